// -------------------------------------------------------------------------------------------------- translation
const CACHED_LINES = 500;
const REASONS = {  // by the status of an answer
  403: "The API key is missing or wrong.",
  429: "The server is busy. Try again in a moment.",
  504: "The server took too long.",
};

function reportLostServer() {
  throw new Error("The server cannot be reached.");
}

/** Return the details of a line, as the server sends them, as a result for the page. */
function toResult({ translations, parts }) {
  const [best] = translations;
  const options = translations.map(option => ({
    text: option.text,
    words: option.target_words,
    noSpaceBefore: option.target_no_space_before,
    score: option.score,
    ranking: option.ranking_score ?? option.score,  // samples are not ranked
    weights: option.word_weights,
  }));
  return {
    source: { words: best.source_words, noSpaceBefore: best.source_no_space_before },
    options: best.source_pieces.length ? options : [],  // an empty line has no pieces
    parts,
    isCut: !best.ended,
  };
}

/** The models of the server that the page comes from. */
class ServerTranslator {
  constructor({ models, alternatives, maxCharacters }) {
    Object.assign(this, { models, alternatives, maxCharacters, ready: Promise.resolve() });
    this.model = document.getElementById("model");
    this.key = document.getElementById("key");  // null if the server needs none
    this.model.append(...models.map(({ languages: { source, target } }, value) =>
      make("option", { value }, `${languageName(source)} \u2192 ${languageName(target)}`)));
    this.model.hidden = models.length === 1;
    this.controls = [this.model, this.key].filter(Boolean);
    this.cache = new Map();  // results by model and line
    this.request = new AbortController();
  }

  get info() {
    const { languages, attends } = this.models[this.model.value];
    return { languages, about: `${attends ? "" : "This model has no attention. "}Made with nmt.` };
  }

  stop() {
    this.request.abort();
  }

  async translate(text, onProgress) {
    this.stop();
    const { signal } = this.request = new AbortController();
    const lines = text.toWellFormed().split("\n"), model = this.model.value, results = [];
    const show = (line, result) => lines.forEach((other, index) => {
      if (other !== line) return;
      results[index] = result;
      onProgress(index, result);
    });
    const missing = [];
    for (const line of new Set(lines)) {
      const result = this.cache.get(`${model} ${line}`);
      if (result) show(line, result);
      else missing.push(line);
    }
    try {
      const details = await this.send(missing, this.models[model].languages, signal);
      missing.forEach((line, index) => {
        const result = toResult(details[index][0]);
        this.cache.set(`${model} ${line}`, result);
        if (this.cache.size > CACHED_LINES) this.cache.delete(this.cache.keys().next().value);
        show(line, result);
      });
    } catch (error) {
      if (!signal.aborted) throw error;
    }
    return signal.aborted ? null : results;
  }

  /** Send lines to the server, and return the details of each. */
  async send(lines, languages, signal) {
    if (!lines.length) return [];
    const settings = { alternatives: this.alternatives, attention: true };
    const body = JSON.stringify({ q: lines, ...languages, ...settings, api_key: this.key?.value });
    const headers = { "Content-Type": "application/json" };
    const response = await fetch("translate", { method: "POST", headers, body, signal }).catch(reportLostServer);
    const answer = await response.json().catch(() => ({}));  // a proxy may answer by a page
    if (!response.ok) throw this.describeError(response.status, answer.error);
    return answer.details ?? reportLostServer();
  }

  describeError(status, error) {
    const limit = this.maxCharacters.toLocaleString("en");
    return new Error(status === 413
      ? `The text is too long: this server takes ${limit} characters at a time.`
      : REASONS[status] ?? `The server reports an error: ${error ?? status}`);
  }
}

const translator = new ServerTranslator(JSON.parse(document.getElementById("data").textContent));
