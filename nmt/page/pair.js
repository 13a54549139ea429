// A sentence pair: its texts, and the matrix of their attention.
//
// A pair is {line, source: [words], reference: text, translation: [words], chrf, score, noSpaceBefore, rows}.
// `score`: log-probability, or null.
// `noSpaceBefore` (optional): indices of words that follow the previous word without a space, [source, translation].
// `rows` (only with attention): weights of each translated word as [source word, percent, source word, percent, ...]
// without zeros.

/** Build the article of a pair, with a matrix of `rows`, if there are any; they need not be the pair's own. */
function pairArticle(pair, rows) {
  const text = (words, axis, noSpaceBefore) => make("dd", { dir: "auto" }, ...words.flatMap((word, i) =>
    [gap(i, noSpaceBefore), rows && axis ? make("span", { class: "word", [axis]: i }, word) : word]));
  const measure = (name, value, digits) => value === null ? "" :
    make("span", { class: "measure" }, `${name} `, make("b", {}, value.toFixed(digits)));
  const made = make("article", { "data-pair": pair.line, "aria-labelledby": `line-${pair.line}`, tabindex: -1 },
    make("div", { class: "texts" },
      make("header", {}, make("h2", { id: `line-${pair.line}` }, `Line ${pair.line}`),
        measure("chrF", pair.chrf, 1), measure("log-probability", pair.score, 2)),
      make("dl", {},
        make("dt", {}, "Source"), text(pair.source, "data-s", pair.noSpaceBefore?.[0]),
        make("dt", {}, "Reference"), text(pair.reference ? [pair.reference] : []),
        make("dt", {}, "Translation"), text(pair.translation, "data-t", pair.noSpaceBefore?.[1]))));
  if (rows) {
    const weights = rows.map(row => {
      const dense = pair.source.map(() => 0);
      for (let i = 0; i < row.length; i += 2) dense[row[i]] = row[i + 1] / 100;
      return dense;
    });
    weightsOf.set(String(pair.line), weights);
    made.append(make("div", { class: "matrix" }, matrix(pair, weights)));
  }
  return made;
}
