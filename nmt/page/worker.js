// The program of the worker, after the files that it needs: it translates lines, one request at a time.
//
// Messages to the worker: first {data, weights}, then {id, lines, beam}; a new request ends the one before it.
// Messages from it: {isReady}, {id, index, text} while line `index` is written, {id, index, result} when it is done,
// {id, isDone}, and {error}.
let translator = null, current = null;
const channel = new MessageChannel(), waiting = [];
channel.port1.onmessage = () => waiting.shift()();

/** Let messages in, without the delay of a timer. */
const pause = () => new Promise(resolve => {
  waiting.push(resolve);
  channel.port2.postMessage(null);
});

class Superseded extends Error {}

async function translateLines({ id, lines, beam }) {
  current = id;
  for (const [index, line] of lines.entries()) {
    const result = await translator.translateLine(line, beam, async text => {
      postMessage({ id, index, text });
      await pause();
      if (current !== id) throw new Superseded();
    });
    postMessage({ id, index, result });
  }
  postMessage({ id, isDone: true });
}

onmessage = async ({ data: message }) => {
  try {
    if (message.data) {
      translator = new Translator(message.data, fromBase64(message.weights));
      postMessage({ isReady: true });
    } else {
      await translateLines(message);
    }
  } catch (error) {
    if (!(error instanceof Superseded)) postMessage({ error: String(error?.stack ?? error) });
  }
};
