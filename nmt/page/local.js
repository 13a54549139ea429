// -------------------------------------------------------------------------------------------------- translation
// `translator` is all that the page knows of the model:
//   info: {title, languages: {source, target}, parameters, attends, search: {beam}}
//   ready: a promise
//   translate(text, {beam}, onProgress) -> a promise of the results of all lines, as `translateLine` of translator.js
//     returns them. It is null if a later call came first. `onProgress(line, value)` is called with the text of a line
//     while it is written, and with its result at the end.

/** The model inside of the page, in a worker, so that the page responds while it computes. */
class WorkerTranslator {
  constructor(data, weights, program) {
    this.info = data;
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

  translate(text, { beam }, onProgress) {
    this.finish?.(null);
    const lines = text.split("\n"), id = ++this.id;
    return new Promise((resolve, reject) => {
      Object.assign(this, { finish: resolve, fail: reject, onProgress, results: [] });
      this.worker.postMessage({ id, lines, beam });
    });
  }

  receive({ id, index, text, result, isDone, isReady, error }) {
    if (isReady) this.setReady();
    if (error) {
      this.setFailed(new Error(error));
      this.fail?.(new Error(error));
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
