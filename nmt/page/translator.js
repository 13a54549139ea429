// Lines to translations, as `nmt/decoding/translator.py` does it.

const SENTENCE_END = /[.!?;:。！？；…]$/u;
const FULL_WIDTH_END = /[。！？；…]$/u;  // needs no space after it
const CONTINUATION_BYTE = /^<0x[89AB][0-9A-F]>$/;  // a byte of UTF-8 that is not the first of a character
const NO_SPACE_AFTER = /[\p{sc=Han}\p{sc=Bopomofo}\p{sc=Hira}\p{sc=Kana}\u3001-\u303f\u30fc\uff01-\uff60\uff70]$/u;
const BLANK = /^(?:(?!\ufeff)[\s\x1c-\x1f\x85])*$/;  // what Python's `strip` leaves nothing of
const CACHED_LINES = 500;

/** Split the ids of a line into parts of at most `limit`: after a sentence, else before a word or a character. */
function splitLongLine(ids, pieces, limit) {
  const parts = [];
  let start = 0;
  while (ids.length - start > limit) {
    let sentenceEnd = 0, wordStart = 0, characterStart = 0;
    for (let i = start + Math.max(1, Math.floor(limit / 2)) + 1; i <= start + limit; i++) {
      const startsWord = pieces[i].startsWith(SPACE_SYMBOL);
      if (startsWord) wordStart = i;
      if (!CONTINUATION_BYTE.test(pieces[i])) characterStart = i;
      if ((startsWord ? SENTENCE_END : FULL_WIDTH_END).test(pieces[i - 1])) sentenceEnd = i;
    }
    const end = sentenceEnd || wordStart || characterStart || start + limit;
    parts.push(ids.slice(start, end));
    start = end;
  }
  return [...parts, ids.slice(start)];
}

/** Join texts with single spaces, but without a space after Chinese or Japanese. */
function joinTexts(texts) {
  const join = (joined, text) => joined + (NO_SPACE_AFTER.test(joined.slice(-2)) ? "" : " ") + text;
  return texts.filter(Boolean).reduce((joined, text) => joined ? join(joined, text) : text, "");
}

/**
 * Return the weights between words, [translated word][source word]: sums over source pieces, means over target pieces.
 *
 * @param rows for each target piece {start, row}: the weights of the source pieces from `start` on
 */
function poolWeights(rows, source, target) {
  const pooled = target.words.map(() => source.words.map(() => 0)), counts = target.words.map(() => 0);
  rows.forEach(({ start, row }, i) => {
    const t = target.owners[i];
    if (t < 0) return;
    counts[t]++;
    row.forEach((weight, j) => {
      const s = source.owners[start + j];
      if (s >= 0) pooled[t][s] += weight;
    });
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
    this.maxSourcePositions = data.maxSourcePositions;
    this.config = data.search;
    this.literals = data.literals;
    this.languages = [data.languages.source, data.languages.target].map(languageOfCase);
    this.cache = new Map();  // results by beam and line
  }

  /**
   * Translate a line. The result is {source, options, parts, isBeyondReach, isCut}:
   * source: {words, noSpaceBefore}, with the indices of words that follow the word before them without a space;
   * options: [{text, words, noSpaceBefore, score, ranking, weights}], best first: `score` is the log-probability,
   *   `ranking` the same with penalties, and weights are [translated word][source word], or null;
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
    const prepared = prepareLine(line, this.source.literalPieces, this.languages, config, this.literals);
    const ids = this.source.encode(prepared.text);
    const limit = config.max_source - 1;
    if (!ids.length || BLANK.test(line)) {
      return { source: { words: [], noSpaceBefore: [] }, options: [], parts: 0, isBeyondReach: false, isCut: false };
    }
    const parts = ids.length > limit ? splitLongLine(ids, ids.map(id => this.source.pieces[id]), limit) : [ids];
    const finish = translation => prepared.restore(translation, 1);
    const results = [], texts = [];  // of each part: hypotheses with different texts, and the best text
    for (const part of parts) {
      const places = part.map(id => this.source.literalIds.indexOf(id)).filter(place => place >= 0);
      const vocabulary = this.target.literalIds;
      const literals = { vocabulary, wanted: places.map(place => vocabulary[place]) };
      const hypotheses = await search(this.model, [...part, EOS], { ...config, literals },
        best => onStep?.(joinTexts([...texts, finish(this.target.decode(best.tokens))])));
      results.push(this.addTexts(hypotheses, finish));
      texts.push(results.at(-1)[0].text);
    }
    const source = this.source.groupByWords(parts.flatMap(part => [...part, EOS]));
    // A line in several parts has one translation, joined from the best of each.
    const options = parts.length > 1 ? [results.map(([best]) => best)] : results[0].map(option => [option]);
    return {
      source: {
        words: restoreUnknownWords(line, source.words.map(word => prepared.restore(word, 0))),
        noSpaceBefore: source.noSpaceBefore,
      },
      options: options.map(hypotheses => this.join(hypotheses, source, finish)),
      parts: parts.length,
      isBeyondReach: parts.some(part => part.length + 1 > (this.maxSourcePositions ?? Infinity)),
      isCut: results.some(([best]) => !best.finished),
    };
  }

  /** Return hypotheses with their texts, the first of each text. */
  addTexts(hypotheses, finish) {
    const byText = new Map();
    for (const hypothesis of hypotheses) {
      const text = finish(this.target.decode(hypothesis.tokens));
      if (!byText.has(text)) byText.set(text, { ...hypothesis, text });
    }
    return [...byText.values()];
  }

  /** Join hypotheses of the parts of a line. Attention weights become blocks on a diagonal. */
  join(hypotheses, source, finish) {
    const target = this.target.groupByWords(hypotheses.flatMap(({ tokens }) => tokens));
    const total = name => hypotheses.reduce((sum, hypothesis) => sum + hypothesis[name], 0);
    let first = 0;
    const rows = hypotheses.flatMap(({ weights }) => {
      const start = first;
      first += weights?.[0].length ?? 0;
      return (weights ?? []).map(row => ({ start, row }));
    });
    return {
      text: joinTexts(hypotheses.map(({ text }) => text)),
      words: target.words.map(finish),
      noSpaceBefore: target.noSpaceBefore,
      score: total("score"),
      ranking: total("ranking"),
      weights: rows.length ? poolWeights(rows, source, target) : null,
    };
  }
}

function fromBase64(text) {
  const characters = atob(text), bytes = new Uint8Array(characters.length);
  for (let i = 0; i < bytes.length; i++) bytes[i] = characters.charCodeAt(i);
  return bytes;
}

