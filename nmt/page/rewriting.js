// What is done to a line before the search, and undone in its translation, as `nmt/decoding/rewriting.py` does it.

const LITERAL_PIECES = /[\u{f0000}-\u{f00ff}]/gu;
const MIN_DIGITS = 2;  // of numbers that are protected
const MIN_CAPITALS = 6;  // letters of a line in capitals; fewer may be an abbreviation

/** Return the language by whose rules letters get their case: only Turkish and Azerbaijani differ. */
function languageOfCase(name) {
  const code = name.split(".").at(-1);
  return ["tr", "az"].includes(code) ? code : "en";
}

/** Return whether a line has several words, and enough letters with case, all of them capitals. */
function isInCapitals(line) {
  const letters = line.match(/\p{Lu}|\p{Ll}/gu) ?? [];
  return letters.length >= MIN_CAPITALS && line.trim().includes(" ") && line === line.toUpperCase();
}

/** Return [start, text] of the numbers, addresses, tags and placeholders of a line that are copied. */
function findLiterals(line, { pattern, finalMarks }) {
  const found = [];
  for (const { 0: match, index, groups } of line.matchAll(new RegExp(pattern, "gu"))) {
    let end = match.length;
    while (groups.urls && finalMarks.includes(match[end - 1])) end--;
    if (groups.numbers && match.match(/\p{Nd}/gu).length < MIN_DIGITS) continue;
    found.push([index, match.slice(0, end)]);
  }
  return found;
}

/**
 * Prepare a line for the search: {text, restore}. `restore(text, side)` undoes it in the line or a word of it (side 0),
 * or in its translation or a word of that (side 1).
 *
 * @param pieces the literal pieces of the vocabulary
 * @param languages of source and target, as `languageOfCase` returns them
 * @param config `search.*`
 * @param literals {pattern, finalMarks}, as `nmt/page/export.py` writes them
 */
function prepareLine(line, pieces, languages, config, literals) {
  const unused = pieces.filter(piece => !line.includes(piece)), originals = new Map();
  let text = "", end = 0;
  for (const [start, literal] of config.protect ? findLiterals(line, literals) : []) {
    if (!unused.length) break;
    const piece = unused.shift();
    originals.set(piece, literal);
    text += line.slice(end, start) + piece;
    end = start + literal.length;
  }
  text += line.slice(end);
  const inCapitals = config.capitals && isInCapitals(text);
  const putBack = text => text.replace(LITERAL_PIECES, piece => originals.get(piece) ?? piece);
  const toCapitals = (text, language) =>
    text.split(" ").map(word => word === "<unk>" ? word : word.toLocaleUpperCase(language)).join(" ");
  return {
    text: inCapitals ? text.toLocaleLowerCase(languages[0]) : text,
    restore: (text, side) => putBack(inCapitals ? toCapitals(text, languages[side]) : text),
  };
}
