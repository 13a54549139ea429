// -------------------------------------------------------------------------------------------------- page
// `translator` is all that the page knows of the model:
//   info: {languages: {source, target}, about}, of the model that is chosen
//   controls: elements with settings; a change of one starts the translation again
//   ready: a promise
//   translate(text, onProgress) -> a promise of the results of all lines, as `translateLine` of translator.js returns
//     them. It is null if `stop` or a later call came first. `onProgress(line, value)` is called with the text of a line
//     while it is written, and with its result at the end.
//   stop(): end the translation
const [source, mirror, translation, state, notes, detail, options, grid, copy, clear, about] = [
  "source", "mirror", "translation", "status", "notes", "detail", "options", "matrix", "copy", "clear", "about",
].map(id => document.getElementById(id));
const PAUSE = 250;  // milliseconds without typing after which the translation starts
const RANKING = "log-probability, divided by the length penalty";
let results = [];  // of each line, undefined while it is translated
let choices = [];  // of each line, the number of the option that is shown
let current = 0;  // the line whose details are shown
let timer = null;  // of the translation that is about to start

/** Return the English name of a language, given its code. The name of a column that is no code stays. */
function languageName(code) {
  try {
    return new Intl.DisplayNames("en", { type: "language" }).of(code);
  } catch {
    return code;
  }
}

function showLanguage(label, text, code) {
  label.textContent = languageName(code);
  text.lang = label.textContent === code ? "" : code;
}

/** Show the languages of the model that is chosen. */
function showModel() {
  const { languages, about: note } = translator.info;
  showLanguage(document.getElementById("source-name"), source, languages.source);
  showLanguage(document.getElementById("translation-name"), translation, languages.target);
  about.textContent = note;
}

const words = (side, axis) => side.words.flatMap((word, i) =>
  [gap(i, side.noSpaceBefore), make("span", { class: "word", [axis]: i }, word)]);

/** Show the words of the source behind the text that was typed. */
function showMirror() {
  mirror.replaceChildren(...source.value.split("\n").map((line, number) => {
    const node = make("div", { dir: "auto", "data-pair": number });
    let end = 0;
    results[number]?.source.words.forEach((word, s) => {
      const start = line.indexOf(word, end);
      if (start < 0) return;  // the tokenizer has normalized it
      node.append(line.slice(end, start), make("span", { class: "word", "data-s": s }, word));
      end = start + word.length;
    });
    node.append(line.slice(end));
    return node;
  }));
}

const chosen = line => results[line]?.options[choices[line] ?? 0];

/** Return the node of a line of the translation. */
function lineNode(line) {
  while (translation.childElementCount <= line) {
    translation.append(make("p", { dir: "auto", "data-pair": translation.childElementCount }));
  }
  return translation.children[line];
}

function showLine(line, value) {
  const node = lineNode(line), isText = typeof value === "string", option = isText ? null : chosen(line);
  node.classList.toggle("writing", isText);
  node.replaceChildren(...(isText ? [value] : option ? words(option, "data-t") : []));
  node.tabIndex = option ? 0 : -1;
  if (!option) return;
  const noWeights = option.words.map(() => results[line].source.words.map(() => 0));
  weightsOf.set(String(line), option.weights ?? noWeights);
}

/** Show alternatives and attention of a line. */
function showDetail(line) {
  current = line;
  for (const [number, node] of [...translation.children].entries()) {
    node.setAttribute("aria-current", number === line && translation.childElementCount > 1);
  }
  const option = chosen(line);
  detail.hidden = !option;
  if (!option) return;
  options.replaceChildren(...results[line].options.map(({ text, ranking }, number) => {
    const button = make("button", { type: "button", "aria-pressed": number === (choices[line] ?? 0) },
      make("span", { dir: "auto" }, text || "(empty)"), make("small", { title: RANKING }, ranking.toFixed(2)));
    button.addEventListener("click", () => choose(line, number));
    return make("li", {}, button);
  }));
  options.parentNode.hidden = results[line].options.length < 2;
  grid.parentNode.hidden = !option.weights || !option.words.length;
  grid.dataset.pair = line;
  grid.replaceChildren();
  if (!grid.parentNode.hidden) {
    grid.append(matrix({ source: results[line].source.words, translation: option.words }, option.weights));
  }
}

function choose(line, number) {
  choices[line] = number;
  showLine(line, results[line]);
  showDetail(line);
  options.children[number].firstChild.focus();
}

/** Say what was split or cut. */
function showNotes() {
  notes.replaceChildren(...results.flatMap((result, index) => {
    const name = results.length > 1 ? `Line ${index + 1}` : "The text", said = [];
    if (result?.parts > 1) said.push(`${name} is long; it was translated in ${result.parts} parts.`);
    if (result?.isCut) said.push(`${name}: the translation was cut at its maximum length.`);
    if (result?.isBeyondReach) said.push(`${name} is longer than the model can look: its end gets no attention.`);
    return said.map(text => make("li", {}, text));
  }));
}

async function translate() {
  clearTimeout(timer);
  timer = null;
  const text = source.value, start = performance.now();
  const lines = text.split("\n");
  results = lines.map(() => undefined);
  choices = [];
  light(null);
  while (translation.childElementCount > lines.length) translation.lastChild.remove();
  translation.setAttribute("aria-busy", "true");
  state.textContent = text.trim() ? "Translating \u2026" : "";
  try {
    const done = await translator.translate(text, (line, value) => {
      if (typeof value !== "string") results[line] = value;
      showLine(line, value);
      if (typeof value !== "string" && line === Math.min(current, lines.length - 1)) showDetail(line);
    });
    if (!done) return;  // the text has changed
    const first = results.findIndex(result => result.options.length);
    showDetail(chosen(current) ? current : Math.max(0, first));
    showMirror();
    showNotes();
    state.textContent = first < 0 ? "" : `Translated in ${((performance.now() - start) / 1000).toFixed(1)} s`;
    copy.disabled = first < 0;
  } catch (error) {
    lines.forEach((_, line) => results[line] || showLine(line, ""));
    showDetail(current);
    showNotes();
    copy.disabled = true;
    state.textContent = error.message;
  }
  translation.setAttribute("aria-busy", "false");
}

async function copyTranslation() {
  const text = results.map((_, line) => chosen(line)?.text ?? "").join("\n");
  try {
    await navigator.clipboard.writeText(text);
  } catch {  // without permission
    const field = make("textarea", { "aria-hidden": true });
    field.value = text;
    document.body.append(field);
    field.select();
    document.execCommand("copy");
    field.remove();
    copy.focus();
  }
  state.textContent = "Copied";
}

function translateSoon(delay) {
  clearTimeout(timer);
  timer = setTimeout(translate, delay);
}

source.addEventListener("input", () => {
  translator.stop();
  results = [];
  light(null);
  showMirror();
  showNotes();
  translateSoon(PAUSE);
});
for (const control of translator.controls) {
  control.addEventListener("change", () => {
    showModel();
    translateSoon(0);
  });
}
copy.addEventListener("click", copyTranslation);
clear.addEventListener("click", () => {
  source.value = "";
  source.dispatchEvent(new Event("input"));
  source.focus();
});
// The words of the mirror lie below the text field, which receives the events.
source.addEventListener("pointermove", ({ clientX, clientY }) => {
  const word = document.elementsFromPoint(clientX, clientY).find(node => node.matches("#mirror .word"));
  if (word) select(word);
  light(word ?? null);
});
source.addEventListener("pointerleave", () => light(null));

/** Show the line of a word or of a focused node in detail. */
function select(node) {
  const line = node.closest("[data-pair]")?.dataset.pair;
  if (line !== undefined && +line !== current && chosen(+line)) showDetail(+line);
}

for (const name of ["pointerover", "focusin"]) {
  translation.addEventListener(name, event => select(event.target));
}
followPointerAndFocus(translation);
followPointerAndFocus(grid);

showModel();
showMirror();
translator.ready.then(() => source.value && translate(), error => {
  state.textContent = error.message;
});
