// Words of sentence pairs, a matrix of the attention between them, and highlighting of what belongs together.
//
// Words have data-s or data-t, their number in the source or the translation, inside of elements with data-pair, the
// name of their pair; `weightsOf` has its weights. The page has an element `tip` for the weight of a cell.
const LARGE = 24;  // words; longer pairs get smaller cells
const tip = document.getElementById("tip");
const weightsOf = new Map();  // by the name of a pair: weights, [translated word][source word]
const rem = parseFloat(getComputedStyle(document.documentElement).fontSize);
const ruler = document.createElement("canvas").getContext("2d");
ruler.font = `${.875 * rem}px ${getComputedStyle(document.body).fontFamily}`;

function make(name, attributes, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

/** Return the separator before word `i`: a space, unless it is the first word or has none before it. */
function gap(i, noSpaceBefore) {
  return i && !noSpaceBefore?.includes(i) ? " " : "";
}

/** Build a grid with words as headers. One cell is in the tab order; arrow keys move from there. */
function matrix(pair, weights) {
  const word = (text, attributes) => make("th", { tabindex: -1, ...attributes }, make("bdi", {}, text));
  const columns = pair.source.map((text, s) => word(text, { scope: "col", "data-s": s }));
  const rows = pair.translation.map((text, t) => make("tr", {}, word(text, { scope: "row", "data-t": t }),
    ...weights[t].map((weight, s) => {
      const cell = make("td", { tabindex: s || t ? -1 : 0, "data-s": s, "data-t": t, "aria-label": weight.toFixed(2) });
      if (weight) cell.style.setProperty("--weight", weight);
      return cell;
    })));
  const table = make("table", { role: "grid", "aria-label": "Attention: source words across, translated words down" },
    make("thead", {}, make("tr", {}, make("td", {}), ...columns)), make("tbody", {}, ...rows));
  const large = Math.max(rows.length, columns.length) > LARGE;
  table.classList.toggle("large", large);
  const side = (large ? 1.25 : 1.6) * rem + 1, slant = 50 * Math.PI / 180;
  const widths = pair.source.map(text => Math.min(ruler.measureText(text).width, 9 * rem));
  const ends = widths.map((width, s) => (width + rem) * Math.cos(slant) - (columns.length - s - .5) * side);
  table.style.setProperty("--rise", `${Math.max(...widths) * Math.sin(slant) + rem}px`);
  table.style.setProperty("--overhang", `${Math.max(0, ...ends)}px`);
  return table;
}

let lit = [], pointed = null;

/** Highlight both words of a cell; or a word, and the words of the other side in proportion to their weights. */
function light(target) {
  for (const node of lit) {
    node.classList.remove("beam", "dim");
    node.style.removeProperty("--glow");
  }
  lit = [];
  point(null);
  const origin = target?.closest("[data-s], [data-t]");
  if (!origin) return;
  const { pair } = origin.closest("[data-pair]").dataset, weights = weightsOf.get(pair), { s, t } = origin.dataset;
  const select = selector => document.querySelectorAll(`[data-pair="${pair}"] :is(${selector})`);
  const glow = (axis, i, amount) => {
    for (const node of select(`:not(td)[data-${axis}="${i}"]`)) {
      node.style.setProperty("--glow", amount);
      lit.push(node);
    }
  };
  if (s) glow("s", s, 1); else weights[t].forEach((weight, i) => glow("s", i, weight));
  if (t) glow("t", t, 1); else weights.forEach((row, i) => glow("t", i, row[s]));
  for (const node of select(`table, td[data-s="${s}"], td[data-t="${t}"]`)) {
    node.classList.add(node.matches("table") ? "dim" : "beam");
    lit.push(node);
  }
  if (s && t) point(origin);
}

/** Show a tooltip with the words and the weight of a cell. */
function point(cell) {
  pointed = cell;
  tip.hidden = !cell;
  if (!cell) return;
  const head = axis => cell.closest("table").querySelector(`th[data-${axis}="${cell.dataset[axis]}"]`).textContent;
  showTip(cell.getBoundingClientRect(), make("bdi", {}, head("s")), " \u2192 ", make("bdi", {}, head("t")),
    make("b", {}, cell.getAttribute("aria-label")));
}

/** Show a tooltip below a box or, if there is no room, above it. */
function showTip(box, ...children) {
  tip.hidden = false;
  tip.replaceChildren(...children);
  const above = box.top - tip.offsetHeight - 6, below = box.bottom + 6;
  const left = Math.min(box.left + (box.width - tip.offsetWidth) / 2, innerWidth - tip.offsetWidth - 4);
  tip.style.left = `${Math.max(4, left)}px`;
  tip.style.top = `${below + tip.offsetHeight > innerHeight ? above : below}px`;
}

const STEPS = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };

function move(event) {
  if (event.key === "Escape") light(null);
  const from = event.target.closest("td, th"), step = STEPS[event.key];
  if (!from || !step || event.altKey || event.ctrlKey || event.metaKey) return;
  event.preventDefault();
  const [down, right] = step;
  const to = from.closest("table").rows[from.parentNode.rowIndex + down]?.cells[from.cellIndex + right];
  if (to?.hasAttribute("tabindex")) to.focus();  // neither beyond the edge nor into the corner
}

/** Put the focused cell in the tab order, so that Tab returns to it. */
function stay(cell) {
  cell.closest("table").querySelector("[tabindex='0']").tabIndex = -1;
  cell.tabIndex = 0;
}

/** Highlight what the pointer is on inside of an element, or what has the focus. */
function followPointerAndFocus(root) {
  root.addEventListener("pointerover", event => light(event.target));
  root.addEventListener("pointerleave", () => light(document.activeElement));
  root.addEventListener("focusin", event => {
    if (event.target.matches("td, th")) stay(event.target);
    light(event.target);
  });
  root.addEventListener("focusout", () => light(null));
}

addEventListener("keydown", move);
addEventListener("scroll", () => point(pointed), true);
