// Greedy and beam search of one sentence, as `nmt/decoding/search.py` and `hypotheses.py` do it.
//
// A hypothesis is {tokens, score, length, finished, weights, coverage}: tokens without `<s>`; score, the summed
// log-probability; length, with `</s>`; weights, the attention weights of each token; coverage, the sum of its weights
// at each source position, for the coverage penalty. Hypotheses are ranked by `rank`.

const LEAST_LOG_COVERAGE = -20;

/** Return log P / lp + cp, where lp is ((5 + n) / 6)^alpha or n^alpha for n tokens. */
function rank(score, length, logCoverage, config) {
  return score / ((5 + length) / 6) ** config.length_penalty + config.coverage_penalty * logCoverage;
}

function logCoverage({ coverage }) {
  if (!coverage) return 0;
  return coverage.reduce((total, sum) => total + Math.max(LEAST_LOG_COVERAGE, Math.log(Math.min(1, sum))), 0);
}

/** Return log-probabilities. `<s>` and padding are never chosen. */
function logProbabilities(logits) {
  const result = new Float64Array(logits.length);
  let largest = -Infinity, total = 0;
  for (let i = 0; i < logits.length; i++) largest = Math.max(largest, logits[i]);
  for (let i = 0; i < logits.length; i++) total += Math.exp(logits[i] - largest);
  const normalizer = largest + Math.log(total);
  for (let i = 0; i < logits.length; i++) result[i] = logits[i] - normalizer;
  result[PAD] = result[BOS] = -Infinity;
  return result;
}

/** Allow only the literal pieces that a hypothesis still has to write, and `</s>` only after all of them. */
function requireLiterals(logp, tokens, maxLength, { vocabulary, wanted }) {
  const missing = wanted.filter(id => !tokens.includes(id)), values = missing.map(id => logp[id]);
  const isDue = missing.length + 1 >= maxLength - tokens.length || largestIndices(logp, 1)[0] === EOS;
  if (missing.length) logp[EOS] = -Infinity;
  if (missing.length && isDue) logp.fill(-Infinity);
  for (const id of vocabulary) logp[id] = -Infinity;
  missing.forEach((id, i) => { logp[id] = values[i]; });
}

/** Return the indices of the k largest values, largest first; of equal values the first. */
function largestIndices(values, k) {
  const best = [];
  for (let i = 0; i < values.length; i++) {
    if (best.length === k && values[i] <= values[best[k - 1]]) continue;
    let place = best.length;
    while (place && values[i] > values[best[place - 1]]) place--;
    best.splice(place, 0, i);
    if (best.length > k) best.pop();
  }
  return best;
}

/** Return a hypothesis with one more token. */
function append(hypothesis, token, score, weights) {
  return {
    tokens: [...hypothesis.tokens, token],
    score,
    length: hypothesis.length + 1,
    finished: token === EOS,
    weights: weights ? [...hypothesis.weights, weights] : null,
    coverage: hypothesis.coverage && sum(hypothesis.coverage, weights),
  };
}

/**
 * Return the hypotheses of a sentence, best first.
 *
 * @param ids of the source, with `</s>`
 * @param config `search.*`, and `literals`: {vocabulary: ids of all literal pieces, wanted: ids of those that the
 *   translation must have, each exactly once}. The search goes on until all hypotheses are finished, or as long as they
 *   may be
 * @param onStep is called with the best hypothesis after each token, and awaited; it stops the search by throwing
 */
async function search(model, ids, config, onStep) {
  const maxLength = Math.floor(Math.min(config.max_length, config.max_ratio * ids.length + 20));
  const coverage = config.coverage_penalty ? new Float32Array(ids.length) : null;
  const order = hypothesis => rank(hypothesis.score, hypothesis.length, logCoverage(hypothesis), config);
  const { memory, state: start } = model.start(ids);
  let beam = [{ tokens: [], score: 0, length: 0, finished: false, weights: [], coverage }];
  let active = beam, state = start;  // the unfinished hypotheses, and the state of the model with a row for each
  for (let step = 0; step < maxLength && active.length; step++) {
    const read = model.step(active.map(({ tokens }) => tokens.at(-1) ?? BOS), state, memory);
    const candidates = beam.flatMap(hypothesis => {
      if (hypothesis.finished) return [{ hypothesis }];
      const row = active.indexOf(hypothesis), logp = logProbabilities(read.logits[row]);
      requireLiterals(logp, hypothesis.tokens, maxLength, config.literals);
      return largestIndices(logp, config.beam).filter(token => logp[token] > -Infinity).map(token =>
        ({ row, hypothesis: append(hypothesis, token, hypothesis.score + logp[token], read.weights?.[row]) }));
    });
    const ranks = candidates.map(candidate => order(candidate.hypothesis));
    const chosen = largestIndices(ranks, config.beam).map(index => candidates[index]);
    beam = chosen.map(({ hypothesis }) => hypothesis);
    const unfinished = chosen.filter(({ hypothesis }) => !hypothesis.finished);
    active = unfinished.map(({ hypothesis }) => hypothesis);
    state = config.beam === 1 ? read.state : model.select(read.state, unfinished.map(({ row }) => row));
    await onStep?.(beam[0]);
  }
  return beam.map(hypothesis => ({ ...hypothesis, ranking: order(hypothesis) })).sort((a, b) => b.ranking - a.ranking);
}
