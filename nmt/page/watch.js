// -------------------------------------------------------------------------------------------------- runs
const PAUSE = 2000;  // milliseconds until the server is asked again
const [state, runList, notes, charts, samples, run, validation, step, list] =
  ["status", "runs", "notes", "charts", "samples", "run", "validation", "step", "pairs"]
    .map(id => document.getElementById(id));
let runs = [];  // {name, written, curves, reports, samples, damaged}, or {name, error}
let answer = "";  // of the server, with `runs`
const hidden = new Set();  // names of runs whose curves are not shown

const format = (value, options = { maximumSignificantDigits: 4 }) => value.toLocaleString("en", options);
const title = name => name === "." ? document.title : name;
const color = (node, index) => node.style.setProperty("--hue", (215 + index * 137.508) % 360);

async function update() {
  try {
    const text = await (await fetch("runs")).text();
    if (text !== answer) {
      runs = JSON.parse(text);
      answer = text;
      show();
      const written = Math.max(0, ...runs.map(run => run.written ?? 0));  // seconds since 1970
      state.textContent = written ? `Last report: ${new Date(1000 * written).toLocaleString("sv")}` : "";
    }
  } catch {
    state.textContent = "The server cannot be reached; is nmt.watch running?";
    answer = "";
  }
  setTimeout(update, PAUSE);
}

function show() {
  point(null);
  showRuns();
  showNotes();
  charts.replaceChildren(...CHARTS.map(drawChart).filter(Boolean));
  showChoice();
}

/** Say how far a run is. */
function describe({ curves: { train, validate } }) {
  const last = train.step.at(-1) ?? validate.step.at(-1);
  const said = [last === undefined ? "nothing reported yet" : `step ${format(last, {})}`];
  const scores = validate.bleu.filter(value => value !== null);
  if (scores.length) {
    const best = Math.max(...scores);
    said.push(`best BLEU ${best.toFixed(2)} at step ${format(validate.step[validate.bleu.indexOf(best)], {})}`);
  }
  return said.join(", ");
}

function showRuns() {
  const focused = document.activeElement.dataset?.name;
  runList.replaceChildren(...runs.map((run, index) => {
    const box = make("input", { type: "checkbox", "data-name": run.name });
    box.checked = !hidden.has(run.name);
    box.disabled = "error" in run;
    box.addEventListener("change", () => {
      box.checked ? hidden.delete(run.name) : hidden.add(run.name);
      show();
    });
    const line = make("label", { "data-run": "" }, box, make("i", {}), make("span", { dir: "auto" }, title(run.name)),
      make("small", {}, run.error ?? describe(run)));
    color(line, index);
    return make("li", {}, line);
  }));
  if (focused !== undefined) [...runList.querySelectorAll("input")].find(box => box.dataset.name === focused)?.focus();
}

/** Say what is not shown. */
function showNotes() {
  const said = runs.length ? [] : ["No run in this folder has written anything yet."];
  for (const { name, curves, reports, damaged } of runs) {
    if (damaged) said.push(`${title(name)}: ${damaged} damaged lines are left out.`);
    if (reports > curves?.train.step.length) {
      said.push(`${title(name)}: ${curves.train.step.length} of ${reports} reports are drawn, at even distances.`);
    }
  }
  notes.replaceChildren(...said.map(text => make("li", { dir: "auto" }, text)));
}

// -------------------------------------------------------------------------------------------------- charts
const CHARTS = [
  { name: "Loss", unit: "nats per token; thin: training; dots: validation", curves: ["train.loss", "validate.loss"] },
  { name: "BLEU", unit: "validation, greedy search", curves: ["validate.bleu"] },
  { name: "Accuracy", unit: "of target tokens, validation", curves: ["validate.accuracy"] },
  { name: "AER", unit: "alignment error rate, validation", curves: ["validate.aer"] },
  { name: "Attention entropy", unit: "nats, validation", curves: ["validate.entropy"] },
  { name: "Learning rate", unit: "", curves: ["train.lr"] },
  { name: "Speed", unit: "tokens of both sides per second", curves: ["train.tokens_per_second"] },
];
const [WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM] = [480, 200, 58, 12, 8, 22];
const MAX_DOTS = 60;  // validations of a run that are drawn as dots

function draw(name, attributes, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

/** Return the lowest and the highest value, apart from each other. */
function range(values) {
  let low = Infinity, high = -Infinity;
  for (const value of values) [low, high] = [Math.min(low, value), Math.max(high, value)];
  const size = Math.max(Math.abs(low), Math.abs(high));
  const margin = high - low > 1e-6 * size ? 0 : size / 10 || 1;
  return [low - margin, high + margin];
}

/** Return round numbers between two values. */
function ticks([low, high], count) {
  const distance = (high - low) / count, power = 10 ** Math.floor(Math.log10(distance));
  const step = power * [1, 2, 5, 10].find(factor => factor * power >= distance * .999);
  const first = Math.ceil(low / step), last = Math.floor(high / step);
  return Array.from({ length: last - first + 1 }, (_, i) => (first + i) * step);
}

/** Return the points {step, value} of each curve of a chart, in the runs that are shown. */
function collect(names) {
  return runs.flatMap((run, index) => hidden.has(run.name) || run.error ? [] : names.map(name => {
    const [kind, key] = name.split("."), columns = run.curves[kind];
    return { run, index, kind, points: columns.step.map((step, i) => ({ step, value: columns[key][i] })) };
  }));
}

function drawChart({ name, unit, curves: names }) {
  const curves = collect(names), known = curves.flatMap(({ points }) => points.filter(({ value }) => value !== null));
  if (!known.length) return null;
  const ends = collect(["train.step", "validate.step"]).map(({ points }) => points.at(-1)?.step ?? 0);
  const xs = [0, Math.max(1, ...ends)];  // the same in all charts
  const ys = range(known.map(({ value }) => value));
  const x = step => LEFT + (step - xs[0]) / (xs[1] - xs[0]) * (WIDTH - LEFT - RIGHT);
  const y = value => TOP + (ys[1] - value) / (ys[1] - ys[0]) * (HEIGHT - TOP - BOTTOM);
  const svg = draw("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": summarize(name, curves) });
  for (const tick of ticks(ys, 4)) {
    svg.append(draw("line", { x1: LEFT, x2: WIDTH - RIGHT, y1: y(tick), y2: y(tick) }),
      draw("text", { x: LEFT - 6, y: y(tick) + 4, "text-anchor": "end" }, format(tick)));
  }
  for (const tick of ticks(xs, 4)) {
    svg.append(draw("text", { x: x(tick), y: HEIGHT - 4, "text-anchor": "middle" }, format(tick)));
  }
  for (const { index, kind, points } of curves) {
    const group = draw("g", { "data-run": "" });
    color(group, index);
    const path = points.map(({ step, value }, i) => value === null ? "" :
      `${points[i - 1]?.value == null ? "M" : "L"}${x(step).toFixed(1)} ${y(value).toFixed(1)}`).join("");
    group.append(draw("path", { class: names.length > 1 ? kind : "", d: path }));
    if (points.length === 1 || kind === "validate" && points.length <= MAX_DOTS) {
      for (const { step, value } of points) {
        if (value !== null) group.append(draw("circle", { cx: x(step), cy: y(value), r: 2.5 }));
      }
    }
    svg.append(group);
  }
  const mark = draw("circle", { class: "mark", r: 4, visibility: "hidden" });
  svg.append(mark);
  const unmark = () => {
    mark.setAttribute("visibility", "hidden");
    point(null);
  };
  svg.addEventListener("pointerleave", unmark);
  svg.addEventListener("pointermove", event => {
    const box = svg.getBoundingClientRect(), scale = WIDTH / box.width;
    const at = [(event.clientX - box.left) * scale, (event.clientY - box.top) * scale];
    let nearest = null, smallest = Infinity;
    for (const { run, kind, points } of curves) {
      for (const { step, value } of points) {
        const distance = value === null ? Infinity : Math.hypot(3 * (x(step) - at[0]), y(value) - at[1]);
        if (distance < smallest) [smallest, nearest] = [distance, { run, kind, step, value }];
      }
    }
    mark.setAttribute("cx", x(nearest.step));
    mark.setAttribute("cy", y(nearest.value));
    mark.setAttribute("visibility", "visible");
    const which = [runs.length > 1 ? title(nearest.run.name) : "", names.length > 1 ? KINDS[nearest.kind] : ""];
    showTip(mark.getBoundingClientRect(), make("span", { dir: "auto" }, which.filter(Boolean).join(", ")),
      ` step ${format(nearest.step, {})}`, make("b", {}, format(nearest.value)));
  });
  return make("figure", {}, make("figcaption", {}, `${name} `, make("small", {}, unit)), svg);
}

const KINDS = { train: "training", validate: "validation" };

/** Say what a chart shows: the last value of each curve. */
function summarize(name, curves) {
  const said = curves.flatMap(({ run, kind, points }) => {
    const last = points.findLast(({ value }) => value !== null);
    return last ? [`${title(run.name)}, ${KINDS[kind]}: ${format(last.value)} at step ${format(last.step, {})}`] : [];
  });
  return `${name}. ${said.join("; ")}`;
}

// -------------------------------------------------------------------------------------------------- samples
let shown = "";  // what of the samples is on the page

/** Offer the runs and validations that have samples. The last validation stays chosen when another follows. */
function showChoice() {
  const offered = runs.filter(({ samples }) => samples?.length);
  samples.hidden = !offered.length;
  if (!offered.length) {
    shown = "";
    return;
  }
  const chosen = offered.some(({ name }) => name === run.value) ? run.value : offered[0].name;
  run.replaceChildren(...offered.map(({ name }) => make("option", { value: name }, title(name))));
  run.value = chosen;
  run.hidden = offered.length === 1;
  const last = offered.find(({ name }) => name === chosen).samples.length - 1;
  const follows = !shown || validation.value === validation.max;
  validation.max = last;
  validation.hidden = last === 0;
  if (follows) validation.value = last;
  showSamples();
}

async function showSamples() {
  const { name, samples: steps } = runs.find(({ name }) => name === run.value);
  const chosen = steps[validation.value];
  step.textContent = `step ${format(chosen, {})}, validation ${+validation.value + 1} of ${steps.length}`;
  const wanted = JSON.stringify([name, chosen]);
  if (wanted === shown) return;
  shown = wanted;
  let articles;
  try {
    const response = await fetch(`samples?${new URLSearchParams({ run: name, step: chosen })}`);
    articles = (await response.json()).map(pair => pairArticle(pair, pair.rows));
  } catch {
    articles = [make("p", { class: "note" }, "The samples of this step cannot be read.")];
  }
  if (wanted !== shown) return;  // another step was chosen meanwhile
  light(null);
  list.replaceChildren(...articles);
}

run.addEventListener("change", () => {
  validation.max = validation.value = runs.find(({ name }) => name === run.value).samples.length - 1;
  showChoice();
});
validation.addEventListener("input", showSamples);
followPointerAndFocus(list);
update();
