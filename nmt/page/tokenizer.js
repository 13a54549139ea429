// Text to pieces and back, as `nmt/data/tokenizer.py` and SentencePiece do it.

const SPACE_SYMBOL = "\u2581";
const BYTE_COUNT = 256;
const UNKNOWN_PENALTY = 10;  // log-probability of an unknown character below the worst piece
const SILENT_PIECES = ["<pad>", "<s>", "</s>"];  // without text of their own
const UNSPACED = /[\p{sc=Han}\p{sc=Hira}\p{sc=Kana}\p{sc=Thai}\p{sc=Laoo}\p{sc=Khmr}\p{sc=Mymr}\p{sc=Tibt}]/u;
const LITERAL_PIECE = /^[\u{f0000}-\u{f00ff}]$/u;
const encoder = new TextEncoder();
const decoder = new TextDecoder("utf-8", { ignoreBOM: true });

/** The tokenizer of one language. */
class LanguageTokenizer {
  /**
   * @param data {kind: "bpe" | "unigram" | "word", pieces: [by id], first: id of the first ordinary piece,
   *   symbols: [first id, end] of the user-defined ones, squeezesSpaces, characterMap: bytes of a precompiled map of
   *   SentencePiece, or empty}
   * @param scores of all pieces, a Float32Array
   */
  constructor(data, scores) {
    Object.assign(this, data);
    this.scores = scores;
    this.map = data.characterMap.length ? new CharacterMap(data.characterMap) : null;
    const ordinary = data.pieces.slice(data.first);
    this.ids = new Map(ordinary.map((piece, index) => [piece, data.first + index]));
    this.symbolIds = new Map();
    for (let id = data.symbols[0]; id < data.symbols[1]; id++) this.symbolIds.set(data.pieces[id], id);
    this.literalPieces = [...this.symbolIds.keys()].filter(piece => LITERAL_PIECE.test(piece));
    this.literalIds = this.literalPieces.map(piece => this.symbolIds.get(piece));
    // A symbol has a bonus, so that unigram segmentation always chooses it.
    const best = scores.subarray(data.first).reduce((a, b) => Math.max(a, b), -Infinity);
    const worst = scores.subarray(data.first).reduce((a, b) => Math.min(a, b), Infinity);
    this.unknownScore = Math.fround(worst - UNKNOWN_PENALTY);
    this.segmentScores = new Map([...this.ids].map(([piece, id]) => [piece, { id, score: scores[id] }]));
    for (const [piece, id] of this.symbolIds) {
      this.segmentScores.set(piece, { id, score: encoder.encode(piece).length * best - .1 });
    }
    this.longest = Math.max(1, ...[...this.segmentScores.keys()].map(piece => piece.length));
  }

  /** Return the ids of a line, without `<s>` and `</s>`. */
  encode(line) {
    const text = this.normalize(line);
    if (this.kind === "word") return this.words(text).map(word => this.ids.get(word) ?? UNK);
    const pieces = this.kind === "bpe" ? this.mergePairs(text) : this.findBestPath(text);
    return pieces.flatMap(piece => this.symbolIds.get(piece) ?? this.ids.get(piece) ?? this.toBytes(piece));
  }

  toBytes(piece) {
    return Array.from(encoder.encode(piece), byte => this.first - BYTE_COUNT + byte);
  }

  words(text) {
    return (text.match(/\u2581[^\u2581]*/g) ?? []).filter(word => word !== SPACE_SYMBOL);
  }

  /** Return a line as it is segmented: normalized, with U+2581 in place of spaces and before the first word. */
  normalize(line) {
    let bytes = encoder.encode(line);
    let start = 0;
    if (this.squeezesSpaces) {
      for (let prefix; start < bytes.length && (prefix = this.replacePrefix(bytes, start)).text === " ";) {
        start += prefix.length;
      }
    }
    if (start === bytes.length) return "";
    if (!this.map && !this.squeezesSpaces) return SPACE_SYMBOL + decoder.decode(bytes).replaceAll(" ", SPACE_SYMBOL);
    let text = SPACE_SYMBOL, endsWithSpace = this.squeezesSpaces;
    while (start < bytes.length) {
      const prefix = this.replacePrefix(bytes, start);
      const added = endsWithSpace ? prefix.text.replace(/^ +/, "") : prefix.text;
      text += added.replaceAll(" ", SPACE_SYMBOL);
      if (added) endsWithSpace = this.squeezesSpaces && added.endsWith(" ");
      start += prefix.length;
    }
    return this.squeezesSpaces ? text.replace(/\u2581+$/, "") : text;
  }

  /** Return the normalized form of the first character or characters from `start` on, and their length in bytes. */
  replacePrefix(bytes, start) {
    for (const symbol of this.symbolBytes ??= [...this.symbolIds.keys()].map(symbol => encoder.encode(symbol))) {
      if (symbol.every((byte, i) => bytes[start + i] === byte)) {
        return { text: decoder.decode(symbol), length: symbol.length };
      }
    }
    const replaced = this.map?.replacePrefix(bytes, start);
    if (replaced) return replaced;
    const length = utf8Length(bytes[start]);
    return { text: decoder.decode(bytes.subarray(start, start + length)), length };
  }

  /** Split a text into characters and user-defined symbols. */
  split(text) {
    if (!this.symbolIds.size) return Array.from(text);
    const parts = [];
    for (let start = 0; start < text.length;) {
      const symbol = [...this.symbolIds.keys()].filter(symbol => text.startsWith(symbol, start))
        .reduce((a, b) => b.length > a.length ? b : a, "");
      parts.push(symbol || String.fromCodePoint(text.codePointAt(start)));
      start += parts.at(-1).length;
    }
    return parts;
  }

  /** Segment by BPE: merge the pair of the best piece, the first of several, until no pair is a piece. */
  mergePairs(text) {
    const symbols = this.split(text);
    const next = symbols.map((_, i) => i + 1), previous = symbols.map((_, i) => i - 1);
    const queue = new PriorityQueue((a, b) => a.score > b.score || a.score === b.score && a.left < b.left);
    const propose = (left, right) => {
      if (left < 0 || right >= symbols.length) return;
      if (this.symbolIds.has(symbols[left]) || this.symbolIds.has(symbols[right])) return;
      const merged = symbols[left] + symbols[right], id = this.ids.get(merged);
      if (id !== undefined) queue.push({ score: this.scores[id], left, right, size: merged.length });
    };
    for (let i = 0; i + 1 < symbols.length; i++) propose(i, i + 1);
    for (let pair; (pair = queue.pop());) {
      const { left, right, size } = pair;
      if (!symbols[left] || !symbols[right] || symbols[left].length + symbols[right].length !== size) continue;
      symbols[left] += symbols[right];
      symbols[right] = "";
      next[left] = next[right];
      if (next[left] < symbols.length) previous[next[left]] = left;
      propose(previous[left], left);
      propose(left, next[left]);
    }
    return symbols.filter(Boolean);
  }

  /** Segment by a unigram model: the most likely pieces. Scores are rounded where SentencePiece rounds them. */
  findBestPath(text) {
    const best = new Float32Array(text.length + 1), starts = new Int32Array(text.length + 1).fill(-1);
    const update = (start, end, score) => {
      if (starts[end] >= 0 && !(score > best[end])) return;
      best[end] = score;
      starts[end] = start;
    };
    for (let start = 0, size; start < text.length; start += size) {
      size = text.codePointAt(start) > 0xffff ? 2 : 1;
      let isKnown = false;
      for (let end = start + size; end <= Math.min(text.length, start + this.longest); end++) {
        const piece = this.segmentScores.get(text.slice(start, end));
        if (piece === undefined) continue;
        update(start, end, piece.score + best[start]);
        isKnown ||= end === start + size;
      }
      if (!isKnown) update(start, start + size, Math.fround(this.unknownScore + best[start]));
    }
    const pieces = [];
    for (let end = text.length; end > 0; end = starts[end]) pieces.unshift(text.slice(starts[end], end));
    return pieces;
  }

  /** Return the bytes of the text of an id: a space for U+2581 and for a line break, none for `</s>` and the like. */
  surface(id) {
    const piece = this.pieces[id];
    if (SILENT_PIECES.includes(piece)) return new Uint8Array();
    const byte = /^<0x([0-9A-F]{2})>$/.exec(piece);
    const bytes = byte ? Uint8Array.of(parseInt(byte[1], 16)) : encoder.encode(piece.replaceAll(SPACE_SYMBOL, " "));
    return bytes.map(byte => byte === 10 || byte === 13 ? 32 : byte);
  }

  /** Return the text of ids. */
  decode(ids) {
    const bytes = joinBytes(ids.map(id => this.surface(id)));
    return decoder.decode(bytes[0] === 32 ? bytes.subarray(1) : bytes);
  }

  /**
   * Return the words of a text given as ids, and for each id the index of its word, or -1.
   *
   * Words are separated by spaces; text of scripts without spaces is segmented by the browser. A piece belongs to the
   * word in which it begins.
   */
  groupByWords(ids) {
    const surfaces = ids.map(id => this.surface(id)), groups = [];  // groups of indices of ids
    let isInWord = false;
    surfaces.forEach((bytes, index) => {
      const letter = bytes.findIndex(byte => byte !== 32);
      if (letter < 0) {
        if (bytes.length) isInWord = false;
        return;
      }
      if (letter > 0 || !isInWord) groups.push([]);
      groups.at(-1).push(index);
      isInWord = bytes.at(-1) !== 32;
    });
    const words = [], owners = ids.map(() => -1), noSpaceBefore = [];
    for (const group of groups) {
      splitGroup(group, surfaces).forEach((part, number) => {
        for (const index of part) owners[index] = words.length;
        if (number) noSpaceBefore.push(words.length);
        words.push(decoder.decode(joinBytes(part.map(index => surfaces[index]))).replace(/^ +| +$/g, ""));
      });
    }
    // A piece that is only a space belongs to the word directly after it.
    surfaces.forEach((bytes, index) => {
      if (owners[index] < 0 && bytes.length && index + 1 < ids.length && surfaces[index + 1][0] !== 32) {
        owners[index] = owners[index + 1];
      }
    });
    return { words, owners, noSpaceBefore };
  }
}

/** Split a group of pieces without spaces between them where words of a script without spaces begin. */
function splitGroup(group, surfaces) {
  const text = decoder.decode(joinBytes(group.map(index => surfaces[index])));
  if (!UNSPACED.test(text)) return [group];
  const segments = typeof Intl.Segmenter === "function"
    ? Array.from(new Intl.Segmenter(undefined, { granularity: "word" }).segment(text), segment => segment.segment)
    : Array.from(text);
  const parts = [];
  let begin = 0, end = 0, segment = -1, last = -1;  // in bytes
  for (const index of group) {
    while (begin >= end && segment + 1 < segments.length) end += encoder.encode(segments[++segment]).length;
    if (segment !== last) parts.push([]);
    parts.at(-1).push(index);
    last = segment;
    begin += surfaces[index].length;
  }
  return parts;
}

function joinBytes(parts) {
  const bytes = new Uint8Array(parts.reduce((size, part) => size + part.length, 0));
  let end = 0;
  for (const part of parts) {
    bytes.set(part, end);
    end += part.length;
  }
  return bytes;
}

/** Return the length in bytes of the UTF-8 character that begins with a byte. */
function utf8Length(byte) {
  return byte < 0x80 ? 1 : byte < 0xe0 ? 2 : byte < 0xf0 ? 3 : 4;
}

/** A precompiled normalization of SentencePiece: the size of a double-array trie, the trie, and its replacements. */
class CharacterMap {
  constructor(bytes) {
    const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.length), size = view.getUint32(0, true);
    this.units = Uint32Array.from({ length: size / 4 }, (_, i) => view.getUint32(4 + 4 * i, true));
    this.texts = bytes.subarray(4 + size);
  }

  /** Return the replacement of the longest prefix that has one, and its length in bytes; null if none has. */
  replacePrefix(bytes, start) {
    const offset = unit => (unit >>> 10) << ((unit & 0x200) >>> 6);
    let unit = this.units[0], node = offset(unit), value = -1, length = 0;
    for (let i = start; i < bytes.length; i++) {
      node ^= bytes[i];
      unit = this.units[node];
      if (unit === undefined || (unit & 0x800000ff) >>> 0 !== bytes[i]) break;
      node ^= offset(unit);
      if (unit >>> 8 & 1) {
        value = this.units[node] & 0x7fffffff;
        length = i + 1 - start;
      }
    }
    if (!length) return null;
    return { text: decoder.decode(this.texts.subarray(value, this.texts.indexOf(0, value))), length };
  }
}

/** A binary heap, whose `pop` returns the item that comes before all others, or undefined. */
class PriorityQueue {
  constructor(isBefore) {
    this.isBefore = isBefore;
    this.items = [];
  }

  push(item) {
    const items = this.items;
    let place = items.push(item) - 1;
    for (let parent; place && this.isBefore(item, items[parent = place - 1 >> 1]); place = parent) {
      items[place] = items[parent];
    }
    items[place] = item;
  }

  pop() {
    const items = this.items, first = items[0], item = items.pop();
    if (!items.length) return first;
    let place = 0;
    for (let child; (child = 2 * place + 1) < items.length; place = child) {
      if (child + 1 < items.length && this.isBefore(items[child + 1], items[child])) child++;
      if (!this.isBefore(items[child], item)) break;
      items[place] = items[child];
    }
    items[place] = item;
    return first;
  }
}
