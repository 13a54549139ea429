// -------------------------------------------------------------------------------------------------- translation
/** The model inside of the page, in a worker, so that the page responds while it computes. */
class WorkerTranslator {
  constructor(data, weights, program) {
    const { languages, parameters, attends, search } = data;
    const count = `${parameters.toLocaleString("en")} parameters, in 8 bits`;
    this.info = { languages, about: `${count}${attends ? "" : "; this model has no attention"}. Made with nmt.` };
    this.beam = make("select", { id: "beam", "aria-label": "Search" });
    for (const value of [...new Set([1, 5, search.beam])].sort((a, b) => a - b)) {
      const name = value === 1 ? "Greedy search: fast" : `Beam search: ${value} hypotheses`;
      this.beam.append(make("option", { value }, name));
    }
    this.beam.value = search.beam;
    this.controls = [this.beam];
    document.getElementById("copy").after(this.beam);
    this.worker = new Worker(URL.createObjectURL(new Blob([program], { type: "text/javascript" })));
    this.id = 0;
    this.ready = new Promise((resolve, reject) => {
      this.setReady = resolve;
      this.setFailed = reject;
    });
    this.worker.onmessage = ({ data: message }) => this.receive(message);
    this.worker.onerror = event => this.receive({ error: event.message || "the browser does not start a worker" });
    this.worker.postMessage({ data, weights });
  }

  stop() {
    this.id++;  // what the worker still sends is ignored
    this.finish?.(null);
  }

  translate(text, onProgress) {
    this.stop();
    const lines = text.split("\n"), beam = +this.beam.value, { id } = this;
    return new Promise((resolve, reject) => {
      Object.assign(this, { finish: resolve, fail: reject, onProgress, results: [] });
      this.worker.postMessage({ id, lines, beam });
    });
  }

  receive({ id, index, text, result, isDone, isReady, error }) {
    if (isReady) this.setReady();
    if (error) {
      const failure = new Error(`This browser cannot run the model: ${error}`);
      this.setFailed(failure);
      this.fail?.(failure);
    }
    if (id !== this.id) return;
    if (result) this.results[index] = result;
    if (isDone) this.finish(this.results);
    else this.onProgress(index, result ?? text);
  }
}

/** Return the content of an element, and free its memory. */
function takeText(id) {
  const node = document.getElementById(id);
  node.remove();
  return node.textContent;
}

const translator = new WorkerTranslator(JSON.parse(takeText("data")), takeText("weights"), takeText("worker"));
