// Lines to translations, as `nmt/decoding/translator.py` does it.

const SENTENCE_END = /[.!?;:。！？；…]$/u, FULL_WIDTH_END = /[。！？；…]$/u;  // the latter need no space after them
const NO_SPACE_AFTER = /[\p{sc=Han}\p{sc=Bopomofo}\p{sc=Hira}\p{sc=Kana}\u3001-\u303f\u30fc\uff01-\uff60\uff70]$/u;
const BLANK = /^(?:(?!\ufeff)[\s\x1c-\x1f\x85])*$/;  // what Python's `strip` leaves nothing of
const CACHED_LINES = 500;

/** Split the ids of a line into parts of at most `limit` pieces: after a sentence, else before a word, else anywhere. */
function splitLongLine(ids, pieces, limit) {
  const parts = [];
  let start = 0;
  while (ids.length - start > limit) {
    let sentenceEnd = 0, wordStart = 0;
    for (let i = start + Math.max(1, Math.floor(limit / 2)) + 1; i <= start + limit; i++) {
      const startsWord = pieces[i].startsWith(SPACE_SYMBOL);
      if (startsWord) wordStart = i;
      if ((startsWord ? SENTENCE_END : FULL_WIDTH_END).test(pieces[i - 1])) sentenceEnd = i;
    }
    const end = sentenceEnd || wordStart || start + limit;
    parts.push(ids.slice(start, end));
    start = end;
  }
  return [...parts, ids.slice(start)];
}

/** Join texts with single spaces, but without a space after Chinese or Japanese. */
function joinTexts(texts) {
  return texts.filter(Boolean).reduce((joined, text) => joined + (!joined || NO_SPACE_AFTER.test(joined) ? "" : " ") + text, "");
}

/** Return the weights between words, [translated word][source word]: sums over source pieces, means over target pieces. */
function poolWeights(weights, source, target) {
  const pooled = target.words.map(() => source.words.map(() => 0)), counts = target.words.map(() => 0);
  weights?.forEach((row, i) => {
    const t = target.owners[i];
    if (t < 0) return;
    counts[t]++;
    row.forEach((weight, j) => { if (source.owners[j] >= 0) pooled[t][source.owners[j]] += weight; });
  });
  return pooled.map((row, t) => row.map(weight => weight / counts[t]));
}

/** Return words with each `<unk>` as it is spelled in the line, if both have the same number of words. */
function restoreUnknownWords(line, words) {
  const spelled = line.split(" ").filter(Boolean);
  return words.includes("<unk>") && words.length === spelled.length ? spelled : words;
}

/** A model with its tokenizers and its settings of search. */
class Translator {
  /** @param data as `nmt/page/export.py` writes it; @param bytes the tensors */
  constructor(data, bytes) {
    const weights = new Weights(bytes, data.tensors);
    const { source, target } = data.tokenizers, load = (tokenizer, side) => new LanguageTokenizer(
      { ...tokenizer, characterMap: fromBase64(tokenizer.characterMap) }, weights.get(`tokenizer.${side}`));
    this.source = load(source, "source");
    this.target = target ? load(target, "target") : this.source;
    this.model = new Seq2Seq(weights, data.model);
    this.reach = data.reach;
    this.config = data.search;
    this.cache = new Map();  // results by beam and line
  }

  /**
   * Translate a line. The result is {source, options, parts, isBeyondReach, isCut}:
   * source: {words, glued}, where `glued` are the indices of words that follow the word before them without a space;
   * options: [{text, words, glued, score, weights: [translated word][source word], or null}], best first;
   * parts: how many the line was split into; isBeyondReach: whether attention cannot reach the end of one of them;
   * isCut: whether the best translation was cut at its maximum length.
   *
   * @param onStep is called with the text so far after each token, and awaited; it stops the work by throwing
   */
  async translateLine(line, beam, onStep) {
    const key = `${beam} ${line}`;
    const result = this.cache.get(key) ?? await this.searchLine(line, { ...this.config, beam }, onStep);
    this.cache.delete(key);
    this.cache.set(key, result);
    if (this.cache.size > CACHED_LINES) this.cache.delete(this.cache.keys().next().value);
    return result;
  }

  async searchLine(line, config, onStep) {
    const ids = this.source.encode(line), limit = config.max_source - 1;
    if (!ids.length || BLANK.test(line)) {
      return { source: { words: [], glued: [] }, options: [], parts: 0, isBeyondReach: false, isCut: false };
    }
    const parts = ids.length > limit ? splitLongLine(ids, ids.map(id => this.source.pieces[id]), limit) : [ids];
    const results = [], texts = [];
    for (const part of parts) {
      const source = this.source.groupByWords([...part, EOS]);
      const hypotheses = await search(this.model, [...part, EOS], config,
        best => onStep?.(joinTexts([...texts, this.target.decode(best.tokens)])));
      results.push(this.describe(hypotheses).map(option => ({ source, ...option })));
      texts.push(results.at(-1)[0].text);
    }
    // A line in several parts has one translation, joined from the best of each.
    const options = parts.length > 1 ? [results.map(([best]) => best)] : results[0].map(option => [option]);
    const source = joinSides(results.map(([best]) => best.source));
    source.words = restoreUnknownWords(line, source.words);
    return {
      source,
      options: options.map(joinParts),
      parts: parts.length,
      isBeyondReach: this.reach !== null && parts.some(part => part.length + 1 > this.reach),
      isCut: results.some(([best]) => !best.finished),
    };
  }

  /** Return the hypotheses of a part with their text and words, the first of each text. */
  describe(hypotheses) {
    const optionByText = new Map();
    for (const hypothesis of hypotheses) {
      const text = this.target.decode(hypothesis.tokens);
      const option = { ...hypothesis, text, target: this.target.groupByWords(hypothesis.tokens) };
      if (!optionByText.has(text)) optionByText.set(text, option);
    }
    return [...optionByText.values()];
  }
}

/** Join the words of the parts of a line. */
function joinSides(sides) {
  const joined = { words: [], glued: [] };
  for (const { words, glued } of sides) {
    joined.glued.push(...glued.map(index => index + joined.words.length));
    joined.words.push(...words);
  }
  return joined;
}

/** Join the translations of the parts of a line. Attention weights become blocks on a diagonal. */
function joinParts(parts) {
  const width = parts.reduce((total, { source }) => total + source.words.length, 0);
  let first = 0;
  const weights = parts.flatMap(({ weights, source, target }) => {
    const rows = poolWeights(weights, source, target).map(row => {
      const all = Array(width).fill(0);
      row.forEach((weight, s) => { all[first + s] = weight; });
      return all;
    });
    first += source.words.length;
    return rows;
  });
  return {
    text: joinTexts(parts.map(({ text }) => text)),
    ...joinSides(parts.map(({ target }) => target)),
    score: parts.reduce((total, { score }) => total + score, 0),
    weights: parts.every(({ weights }) => weights) ? weights : null,
  };
}

function fromBase64(text) {
  const characters = atob(text), bytes = new Uint8Array(characters.length);
  for (let i = 0; i < bytes.length; i++) bytes[i] = characters.charCodeAt(i);
  return bytes;
}

