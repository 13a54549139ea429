// The model: `nmt/model/` in plain JavaScript, one sentence at a time. Names and equations are those of Python.
//
// Vectors are Float32Arrays. Several vectors of one size are one array, row after row, or a list of vectors. Sizes in
// comments: N hypotheses, S source positions, D decoder, M memory (encoder output), A queries and keys, V vocabulary.

const [PAD, UNK, BOS, EOS] = [0, 1, 2, 3];

// ------------------------------------------------------------------------------------------------------------ weights
/** The tensors of a model. A matrix is int8 with a scale for each row, all other tensors are float. */
class Weights {
  /**
   * @param bytes of all tensors
   * @param index by name: {shape, values: offset in bytes} or, for a matrix, {shape, values, scales}
   */
  constructor(bytes, index) {
    const { buffer, byteOffset } = bytes;
    this.tensors = new Map(Object.entries(index).map(([name, { shape, values, scales }]) => {
      const size = shape.reduce((a, b) => a * b, 1);
      if (scales === undefined) return [name, new Float32Array(buffer, byteOffset + values, size)];
      return [name, {
        rows: shape[0],
        columns: shape[1],
        values: new Int8Array(buffer, byteOffset + values, size),
        scales: new Float32Array(buffer, byteOffset + scales, shape[0]),
      }];
    }));
  }

  get(name) {
    return this.tensors.get(name) ?? null;
  }

  /** Return x -> x W^T + b for rows of x; null if the model has no such map. */
  linear(name) {
    const matrix = this.get(`${name}.weight`), bias = this.get(`${name}.bias`);
    return matrix && (x => multiply(matrix, bias, x));
  }

  /** Return ids -> rows of a table. */
  embedding(name) {
    const { columns, values, scales } = this.get(`${name}.weight`);
    return ids => {
      const rows = new Float32Array(ids.length * columns);
      ids.forEach((id, n) => {
        for (let i = 0; i < columns; i++) rows[n * columns + i] = values[id * columns + i] * scales[id];
      });
      return rows;
    };
  }
}

/**
 * Return x W^T + b for all rows of x.
 *
 * Most time goes into these loops. A weight is converted once for four rows of x, and of a single row each value is
 * converted once for four rows of W.
 */
function multiply({ rows, columns, values, scales }, bias, x) {
  const count = x.length / columns, out = new Float32Array(count * rows), fours = count - count % 4;
  for (let n = 0; n < fours; n += 4) {
    const a = n * columns, b = a + columns, c = b + columns, d = c + columns;
    for (let r = 0; r < rows; r++) {
      const start = r * columns;
      let sumA = 0, sumB = 0, sumC = 0, sumD = 0;
      for (let i = 0; i < columns; i++) {
        const weight = values[start + i];
        sumA += weight * x[a + i];
        sumB += weight * x[b + i];
        sumC += weight * x[c + i];
        sumD += weight * x[d + i];
      }
      out[n * rows + r] = sumA;
      out[(n + 1) * rows + r] = sumB;
      out[(n + 2) * rows + r] = sumC;
      out[(n + 3) * rows + r] = sumD;
    }
  }
  for (let n = fours; n < count; n++) {
    const start = n * columns;
    let r = 0;
    for (; r + 4 <= rows; r += 4) {
      const a = r * columns, b = a + columns, c = b + columns, d = c + columns;
      let sumA = 0, sumB = 0, sumC = 0, sumD = 0;
      for (let i = 0; i < columns; i++) {
        const value = x[start + i];
        sumA += values[a + i] * value;
        sumB += values[b + i] * value;
        sumC += values[c + i] * value;
        sumD += values[d + i] * value;
      }
      out[n * rows + r] = sumA;
      out[n * rows + r + 1] = sumB;
      out[n * rows + r + 2] = sumC;
      out[n * rows + r + 3] = sumD;
    }
    for (; r < rows; r++) out[n * rows + r] = dot(x, values, start, r * columns, columns);
  }
  for (let n = 0; n < count; n++) {
    for (let r = 0; r < rows; r++) out[n * rows + r] = out[n * rows + r] * scales[r] + (bias ? bias[r] : 0);
  }
  return out;
}

// -------------------------------------------------------------------------------------------------- rows and vectors
const row = (x, n, size) => x.subarray(n * size, (n + 1) * size);
const split = (x, size) => Array.from({ length: size ? x.length / size : 0 }, (_, n) => row(x, n, size));

function concat(parts) {
  const joined = new Float32Array(parts.reduce((size, part) => size + part.length, 0));
  let end = 0;
  for (const part of parts) {
    joined.set(part, end);
    end += part.length;
  }
  return joined;
}

/** Join each row of several arrays with `count` rows. */
const concatColumns = (parts, count) =>
  concat(Array.from({ length: count }, (_, n) => parts.map(part => row(part, n, part.length / count))).flat());

const sum = (a, b) => a.map((value, i) => value + b[i]);
const sigmoid = x => 1 / (1 + Math.exp(-x));

function dot(a, b, startA = 0, startB = 0, size = a.length) {
  let total = 0;
  for (let i = 0; i < size; i++) total += a[startA + i] * b[startB + i];
  return total;
}

function meanRows(rows) {
  const mean = new Float32Array(rows[0].length);
  for (const vector of rows) vector.forEach((value, i) => { mean[i] += value / rows.length; });
  return mean;
}

// --------------------------------------------------------------------------------------------------------- recurrence
/** i, f, o = sigmoid(.), g = tanh(.); c_t = f c_{t-1} + i g; h_t = o tanh(c_t), with gates stacked as i, f, g, o. */
function lstmCell(inputs, hidden, [, c], size) {
  const newH = new Float32Array(c.length), newC = new Float32Array(c.length);
  for (let k = 0; k < c.length; k++) {
    const base = Math.floor(k / size) * 4 * size + k % size;
    const gate = number => inputs[base + number * size] + hidden[base + number * size];
    newC[k] = sigmoid(gate(1)) * c[k] + sigmoid(gate(0)) * Math.tanh(gate(2));
    newH[k] = sigmoid(gate(3)) * Math.tanh(newC[k]);
  }
  return [newH, newC];
}

/** r, z = sigmoid(.); n = tanh(i_n + r h_n); h_t = (1 - z) n + z h_{t-1}, with gates stacked as r, z, n. */
function gruCell(inputs, hidden, [h], size) {
  const newH = new Float32Array(h.length);
  for (let k = 0; k < h.length; k++) {
    const base = Math.floor(k / size) * 3 * size + k % size;
    const r = sigmoid(inputs[base] + hidden[base]), z = sigmoid(inputs[base + size] + hidden[base + size]);
    const n = Math.tanh(inputs[base + 2 * size] + r * hidden[base + 2 * size]);
    newH[k] = (1 - z) * n + z * h[k];
  }
  return [newH];
}

const CELLS = { lstm: { step: lstmCell, states: 2 }, gru: { step: gruCell, states: 1 } };

/** One recurrent layer in one direction. */
class RNN {
  constructor(weights, name, cell) {
    const matrix = kind => x => multiply(weights.get(`${name}.weight_${kind}`), weights.get(`${name}.bias_${kind}`), x);
    this.project = matrix("ih");
    this.projectHidden = matrix("hh");
    this.hidden = weights.get(`${name}.weight_hh`).columns;
    this.cell = CELLS[cell];
  }

  zeroState() {
    return Array.from({ length: this.cell.states }, () => new Float32Array(this.hidden));
  }

  /** Run one step for N rows of inputs and state. */
  step(x, state) {
    return this.cell.step(this.project(x), this.projectHidden(state[0]), state, this.hidden);
  }

  /** Run over a list of inputs, and return the list of h. */
  run(inputs) {
    const projected = this.project(concat(inputs)), size = projected.length / inputs.length;
    let state = this.zeroState();
    return inputs.map((_, s) => {
      state = this.cell.step(row(projected, s, size), this.projectHidden(state[0]), state, this.hidden);
      return state[0];
    });
  }
}

// ------------------------------------------------------------------------------------------------------------ encoders
/** Return outputs (S vectors of size M) and the last state of each layer. */
class RecurrentEncoder {
  constructor(weights, config) {
    this.layers = Array.from({ length: config.encoder_layers }, (_, layer) => Array.from(
      { length: config.bidirectional ? 2 : 1 },
      (_, direction) => new RNN(weights, `encoder.layers.${layer}.${direction}`, config.cell)));
    this.residual = config.residual;
    this.shortcut = weights.linear("encoder.shortcut");
  }

  run(embedded) {
    const lasts = [];
    let x = embedded;
    this.layers.forEach((directions, depth) => {
      const outputs = directions.map((rnn, direction) =>
        direction ? rnn.run([...x].reverse()).reverse() : rnn.run(x));
      lasts.push(concat(outputs.map((output, direction) => direction ? output[0] : output.at(-1))));
      const h = x.map((_, s) => concat(outputs.map(output => output[s])));
      x = depth && this.residual ? h.map((vector, s) => sum(vector, x[s])) : h;
    });
    if (this.shortcut) x = x.map((vector, s) => sum(vector, this.shortcut(embedded[s])));
    return { outputs: x, lasts };
  }
}

/** (x - mean) / deviation * weight + bias for each row of x. */
class LayerNorm {
  constructor(weights, name) {
    this.weight = weights.get(`${name}.weight`);
    this.bias = weights.get(`${name}.bias`);
  }

  run(x) {
    return concat(split(x, this.weight.length).map(vector => {
      const mean = vector.reduce((a, b) => a + b, 0) / vector.length;
      const variance = vector.reduce((a, b) => a + (b - mean) ** 2, 0) / vector.length;
      return vector.map((value, i) => (value - mean) / Math.sqrt(variance + 1e-5) * this.weight[i] + this.bias[i]);
    }));
  }
}

/** Embeddings times the square root of their size, mapped to the model size if it is another, plus positions. */
class TransformerInput {
  constructor(weights, name, config, size) {
    this.map = weights.linear(`${name}.map`) ?? (x => x);
    this.scale = Math.sqrt(config.embed);
    this.size = size;
  }

  run(embedded, positions) {
    const x = this.map(embedded.map(value => value * this.scale));
    positions.forEach((position, n) => {
      for (let i = 0; i < this.size; i++) {
        const angle = position * 10000 ** (-(i - i % 2) / this.size);
        x[n * this.size + i] += i % 2 ? Math.cos(angle) : Math.sin(angle);
      }
    });
    return x;
  }
}

class FeedForward {
  constructor(weights, name) {
    this.inner = weights.linear(`${name}.inner`);
    this.outer = weights.linear(`${name}.outer`);
  }

  run(x) {
    return this.outer(this.inner(x).map(value => Math.max(0, value)));
  }
}

class TransformerEncoder {
  constructor(weights, config) {
    this.size = config.memory;
    this.input = new TransformerInput(weights, "encoder.input", config, this.size);
    this.layers = Array.from({ length: config.encoder_layers }, (_, layer) => {
      const name = `encoder.layers.${layer}`;
      return {
        attention: new Attention(weights, `${name}.attention`, config.self_attention),
        attentionNorm: new LayerNorm(weights, `${name}.attention_norm`),
        feedForward: new FeedForward(weights, `${name}.feed_forward`),
        feedForwardNorm: new LayerNorm(weights, `${name}.feed_forward_norm`),
      };
    });
    this.norm = new LayerNorm(weights, "encoder.norm");
  }

  run(embedded) {
    const positions = embedded.map((_, s) => s);
    let x = this.input.run(concat(embedded), positions);
    for (const { attention, attentionNorm, feedForward, feedForwardNorm } of this.layers) {
      const normed = attentionNorm.run(x), memory = attention.projectMemory(normed, positions.length);
      x = sum(x, attention.attend(normed, positions.map(() => memory), positions).contexts);
      x = sum(x, feedForward.run(feedForwardNorm.run(x)));
    }
    const outputs = split(this.norm.run(x), this.size);
    return { outputs, lasts: [meanRows(outputs)] };
  }
}

// --------------------------------------------------------------------------------------------------------- normalizers
function softmax(scores) {
  const largest = Math.max(...scores), exponentials = scores.map(score => Math.exp(score - largest));
  const total = exponentials.reduce((a, b) => a + b, 0);
  return exponentials.map(value => value / total);
}

/** max(z - tau, 0) with tau chosen so that the weights sum to 1. */
function sparsemax(scores) {
  const sorted = [...scores].sort((a, b) => b - a);
  let total = 0, tau = 0;
  sorted.forEach((z, index) => {
    total += z;
    if (1 + (index + 1) * z > total) tau = (total - 1) / (index + 1);
  });
  return scores.map(z => Math.max(0, z - tau));
}

/** max(z / 2 - tau, 0)^2 with tau chosen so that the weights sum to 1. */
function entmax15(scores) {
  const largest = Math.max(...scores), halves = scores.map(score => (score - largest) / 2);
  let total = 0, squares = 0, tau = 0;
  [...halves].sort((a, b) => b - a).forEach((z, index) => {
    const rank = index + 1;
    total += z;
    squares += z * z;
    const mean = total / rank, deviation = squares - rank * mean * mean;
    const candidate = mean - Math.sqrt(Math.max(0, (1 - deviation) / rank));
    if (candidate <= z && z > -1) tau = candidate;
  });
  return halves.map(z => Math.max(0, z - tau) ** 2);
}

const NORMALIZERS = { softmax, sparsemax, entmax15 };
const SCORES = ["additive", "concat", "dot", "scaled_dot", "general", "location"];
const WINDOWS = ["global", "local_m", "local_p"];

/** Throw an error if a setting has a value that is not implemented here, rather than compute something else. */
function checkImplemented(key, value, implemented) {
  if (!implemented.includes(value)) throw new Error(`${key}=${value} is not implemented in engine.js`);
}

// ----------------------------------------------------------------------------------------------------------- attention
/**
 * Score x window x normalizer, `nmt/model/attention.py`.
 *
 * A memory is {keys: [S vectors], values: [S vectors]}. In a causal attention the memory of a query ends with its own
 * position.
 */
class Attention {
  /** @param config `model.attention` or `model.self_attention` */
  constructor(weights, name, config) {
    checkImplemented("score", config.score, SCORES);
    checkImplemented("window", config.window, WINDOWS);
    checkImplemented("normalizer", config.normalizer, Object.keys(NORMALIZERS));
    this.config = config;
    this.normalize = NORMALIZERS[config.normalizer];
    const linear = part => weights.linear(`${name}.${part}`) ?? (x => x);
    this.query = linear("score.query");
    this.key = config.score === "location" ? null : linear("score.key");
    const queryRows = weights.get(`${name}.score.query.weight`)?.rows;
    this.maxPositions = config.score === "location" ? queryRows / config.heads : Infinity;
    this.value = linear("value");
    this.output = linear("output");
    this.v = weights.get(`${name}.score.v`);
    this.coverage = weights.get(`${name}.score.coverage`);
    this.point = weights.linear(`${name}.window.point`);
    this.pointV = weights.get(`${name}.window.v`);
  }

  projectMemory(values, count) {
    const rows = x => split(x, x.length / count);
    return { keys: this.key ? rows(this.key(values)) : Array(count).fill(null), values: rows(this.value(values)) };
  }

  /** Return the source positions that a query sees, and a function that gives the gain of each. */
  view(pointed, position, length) {
    const { window, half_width: halfWidth } = this.config;
    const visible = Math.min(length, this.maxPositions);
    let first = 0, end = visible, focus = position;
    if (window === "local_p") {
      focus = length * sigmoid(dot(pointed.map(Math.tanh), this.pointV) / Math.sqrt(this.pointV.length));
    }
    if (window !== "global") {
      const center = Math.min(Math.floor(focus), length - 1);
      first = Math.max(0, center - halfWidth);
      end = Math.min(visible, center + halfWidth + 1);
    }
    const gain = window === "local_p" ? s => Math.exp(-2 * (s - focus) ** 2 / halfWidth ** 2) : () => 1;
    return { first, end, gain };
  }

  /** Return the score of a key for a head: the share of `query` and `key` from `start` on, of size A. */
  score(head, query, key, start, size, position, covered) {
    const kind = this.config.score, coverage = this.coverage;
    if (kind === "additive" || kind === "concat") {
      let total = 0;
      for (let i = start; i < start + size; i++) {
        total += this.v[i] * Math.tanh(query[i] + key[i] + (coverage ? covered * coverage[i] : 0));
      }
      return total;
    }
    const added = coverage ? covered * coverage[head] : 0;
    if (kind === "location") return query[start + position] + added;
    return dot(query, key, start, start, size) / (kind === "dot" ? 1 : Math.sqrt(size)) + added;
  }

  /**
   * Attend with N queries.
   *
   * @param memories the memory of each query
   * @param positions of each query in its own sequence, from 0
   * @param coverages of each query the sum of earlier weights, if the score sees it
   * @returns {contexts: N x M, weights: [N vectors of size S]}; the weights are of `model.attention.head`, or the mean
   */
  attend(queries, memories, positions, coverages = null) {
    const count = memories.length, { heads, head: shownHead } = this.config;
    const projections = this.query(queries), projected = split(projections, projections.length / count);
    const pointed = this.point ? split(this.point(queries), this.pointV.length) : [];
    const shown = [], contexts = [];
    memories.forEach(({ keys, values }, n) => {
      const query = projected[n], { first, end, gain } = this.view(pointed[n], positions[n], values.length);
      const size = query.length / heads, valueSize = values[0].length / heads;
      const context = new Float32Array(values[0].length), shownWeights = new Float32Array(values.length);
      for (let head = 0; head < heads && first < end; head++) {
        const scores = [];
        for (let s = first; s < end; s++) {
          scores.push(this.score(head, query, keys[s], head * size, size, s, coverages?.[n][s]));
        }
        this.normalize(scores).forEach((share, index) => {
          const s = first + index, weight = share * gain(s);
          if (heads === 1 || shownHead === null) shownWeights[s] += weight / heads;
          else if (shownHead === head) shownWeights[s] = weight;
          if (!weight) return;
          for (let i = head * valueSize; i < (head + 1) * valueSize; i++) context[i] += weight * values[s][i];
        });
      }
      shown.push(shownWeights);
      contexts.push(context);
    });
    return { contexts: this.output(concat(contexts)), weights: shown };
  }
}

// ------------------------------------------------------------------------------------------------------------ decoders
// A state is {length: target positions so far, ...}; all else in it has an entry or a row for each of N hypotheses.

/** Styles `bahdanau`, `luong` and `gnmt`, `nmt/model/decoder.py`. */
class RecurrentDecoder {
  constructor(weights, config) {
    this.config = config;
    this.attention = config.attention.score === "none" ? null :
      new Attention(weights, "decoder.attention", config.attention);
    this.layers = Array.from({ length: config.decoder_layers }, (_, layer) =>
      new RNN(weights, `decoder.layers.${layer}`, config.cell));
    this.bridge = weights.linear("decoder.bridge.map");
    this.readout = weights.linear("decoder.readout");
    this.hasInputFeeding = config.style === "luong" && config.input_feeding;
  }

  /** Return the memory, and the state of one hypothesis. */
  start({ outputs, lasts }) {
    const { bridge, decoder_layers: layers, hidden, cell } = this.config, { states } = CELLS[cell];
    const zeros = () => new Float32Array(hidden);
    let cells;
    if (bridge === "learned") {
      const parts = split(this.bridge(lasts.at(-1)).map(Math.tanh), hidden);
      cells = Array.from({ length: layers }, (_, layer) => parts.slice(layer * states, (layer + 1) * states));
    } else {
      const initial = {
        last: layer => lasts[Math.max(0, lasts.length - layers + layer)],
        mean: () => meanRows(outputs),
        zero: zeros,
      }[bridge];
      cells = Array.from({ length: layers }, (_, layer) => [initial(layer), zeros()].slice(0, states));
    }
    const memory = this.attention?.projectMemory(concat(outputs), outputs.length);
    const coverage = this.attention?.coverage ? [new Float32Array(outputs.length)] : null;
    return { memory, state: { length: 0, cells, feed: this.hasInputFeeding ? zeros() : null, coverage } };
  }

  /** Return a copy of a state with the given rows, which may repeat. */
  select(state, rows) {
    const rowsOf = x => concat(rows.map(n => row(x, n, this.config.hidden)));
    return {
      ...state,
      cells: state.cells.map(layer => layer.map(rowsOf)),
      feed: state.feed && rowsOf(state.feed),
      coverage: state.coverage && rows.map(n => state.coverage[n]),
    };
  }

  /** Read a token for each hypothesis. Return features N x D, weights [N vectors of size S] or null, the new state. */
  step(embedded, state, memory) {
    const { style, hidden, residual } = this.config, count = state.cells[0][0].length / hidden;
    const cells = [...state.cells];
    let weights = null, { coverage } = state;
    const attend = queries => {
      if (!this.attention) return new Float32Array();
      const rows = Array(count).fill(memory), positions = Array(count).fill(state.length);
      const attended = this.attention.attend(queries, rows, positions, coverage);
      weights = attended.weights;
      coverage &&= coverage.map((covered, n) => sum(covered, weights[n]));
      return attended.contexts;
    };
    const previousTop = cells.at(-1)[0];
    let context = style === "bahdanau" ? attend(previousTop) : null;
    let x = embedded;
    this.layers.forEach((rnn, depth) => {
      let inputs = [x];
      if (depth === 0 && style === "bahdanau") inputs.push(context);
      if (depth === 0 && this.hasInputFeeding) inputs.push(state.feed);
      if (depth > 0 && style === "gnmt") inputs.push(context);
      cells[depth] = rnn.step(concatColumns(inputs, count), cells[depth]);
      const hasResidual = residual && depth > (style === "gnmt" ? 1 : 0);  // gnmt: from the third layer on
      x = hasResidual ? sum(cells[depth][0], x) : cells[depth][0];
      if (depth === 0 && style === "gnmt") context = attend(x);
    });
    if (style === "luong") context = attend(x);
    const features = style === "gnmt" ? x : this.computeFeatures(context, x, previousTop, embedded, count);
    const feed = this.hasInputFeeding ? features : null;
    return { features, weights, state: { length: state.length + 1, cells, feed, coverage } };
  }

  /** tanh(W [c; s; E y]) of bahdanau or the maximum of its pairs (of the state before), tanh(W [c; h]) of luong. */
  computeFeatures(context, top, previousTop, embedded, count) {
    const isMaxout = this.config.readout === "maxout", inputs = [context, isMaxout ? previousTop : top];
    if (this.config.style === "bahdanau") inputs.push(embedded);
    const readout = this.readout(concatColumns(inputs, count));
    if (!isMaxout) return readout.map(Math.tanh);
    return Float32Array.from({ length: readout.length / 2 }, (_, i) => Math.max(readout[2 * i], readout[2 * i + 1]));
  }
}

/** Style `transformer`, `nmt/model/transformer.py`. */
class TransformerDecoder {
  constructor(weights, config) {
    this.config = config;
    this.input = new TransformerInput(weights, "decoder.input", config, config.hidden);
    this.layers = Array.from({ length: config.decoder_layers }, (_, layer) => {
      const name = `decoder.layers.${layer}`;
      return {
        selfAttention: new Attention(weights, `${name}.self_attention`, config.self_attention),
        selfAttentionNorm: new LayerNorm(weights, `${name}.self_attention_norm`),
        attention: new Attention(weights, `${name}.attention`, config.attention),
        attentionNorm: new LayerNorm(weights, `${name}.attention_norm`),
        contextMap: weights.linear(`${name}.context_map`) ?? (x => x),
        feedForward: new FeedForward(weights, `${name}.feed_forward`),
        feedForwardNorm: new LayerNorm(weights, `${name}.feed_forward_norm`),
      };
    });
    this.norm = new LayerNorm(weights, "decoder.norm");
  }

  /** Return the memory of each layer, and the state of one hypothesis. */
  start({ outputs }) {
    const source = concat(outputs);
    return {
      memory: this.layers.map(({ attention }) => attention.projectMemory(source, outputs.length)),
      state: {
        length: 0,
        pasts: this.layers.map(() => [{ keys: [], values: [] }]),
        coverages: this.layers.map(({ attention }) => attention.coverage ? [new Float32Array(outputs.length)] : null),
      },
    };
  }

  /** Return a copy of a state with the given rows, which may repeat. */
  select(state, rows) {
    return {
      ...state,
      pasts: state.pasts.map(layer => rows.map(n => layer[n])),
      coverages: state.coverages.map(layer => layer && rows.map(n => layer[n])),
    };
  }

  /** Read a token for each of N hypotheses. Return features N x D, weights [N vectors of size S] and the new state. */
  step(embedded, state, memory) {
    const count = state.pasts[0].length, positions = Array(count).fill(state.length), shown = [];
    const pasts = [], coverages = [];
    let x = this.input.run(embedded, positions);
    this.layers.forEach((layer, depth) => {
      const { selfAttention, attention } = layer, normed = layer.selfAttentionNorm.run(x);
      const added = selfAttention.projectMemory(normed, count);
      pasts.push(state.pasts[depth].map(({ keys, values }, n) =>
        ({ keys: [...keys, added.keys[n]], values: [...values, added.values[n]] })));
      x = sum(x, selfAttention.attend(normed, pasts[depth], positions).contexts);

      const covered = state.coverages[depth], sources = Array(count).fill(memory[depth]);
      const { contexts, weights } = attention.attend(layer.attentionNorm.run(x), sources, positions, covered);
      coverages.push(covered && covered.map((vector, n) => sum(vector, weights[n])));
      shown.push(weights);
      x = sum(x, layer.contextMap(contexts));
      x = sum(x, layer.feedForward.run(layer.feedForwardNorm.run(x)));
    });
    const { layer } = this.config.attention;
    const weights = layer === null ? shown[0].map((_, n) => meanRows(shown.map(part => part[n]))) : shown[layer];
    return { features: this.norm.run(x), weights, state: { length: state.length + 1, pasts, coverages } };
  }
}

// --------------------------------------------------------------------------------------------------------------- model
const DECODERS = {
  bahdanau: RecurrentDecoder, luong: RecurrentDecoder, gnmt: RecurrentDecoder, transformer: TransformerDecoder,
};

/** The complete model, `nmt/model/seq2seq.py`. */
class Seq2Seq {
  /** @param config `model.*`, with `memory`, the size of an encoder output */
  constructor(weights, config) {
    this.embedSource = weights.embedding("source_embedding");
    this.embedTarget = weights.embedding("target_embedding");
    this.embed = config.embed;
    this.encoder = new (config.encoder === "transformer" ? TransformerEncoder : RecurrentEncoder)(weights, config);
    checkImplemented("style", config.style, Object.keys(DECODERS));
    this.decoder = new DECODERS[config.style](weights, config);
    this.toEmbedding = weights.linear("to_embedding") ?? (x => x);
    this.output = weights.linear("output");
    this.vocabulary = weights.get("output.weight").rows;
  }

  /** Encode a sentence, which ends with `</s>`. Return memory and the state of one hypothesis. */
  start(ids) {
    return this.decoder.start(this.encoder.run(split(this.embedSource(ids), this.embed)));
  }

  select(state, rows) {
    return this.decoder.select(state, rows);
  }

  /** Read a token for each hypothesis. Return logits [N vectors of size V], weights or null, and the new state. */
  step(tokens, state, memory) {
    const { features, weights, state: newState } = this.decoder.step(this.embedTarget(tokens), state, memory);
    return { logits: split(this.output(this.toEmbedding(features)), this.vocabulary), weights, state: newState };
  }
}
