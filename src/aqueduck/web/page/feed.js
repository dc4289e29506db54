// The line to the server: server-sent events over fetch (which can carry the token), and coming back when it breaks.

import { token } from "./access.js";

const SILENCE_MS = 12000; // the server says something at least every five seconds
const DELAYS_MS = [500, 1000, 2000, 4000, 8000, 10000];

// handlers: update(data), state(name, detail): "live", "connecting", "lost" with {retryAt, since}, "refused".
export function follow(handlers) {
  let failures = 0;
  let lastAt = null;
  let wake = null;

  async function run() {
    for (;;) {
      try {
        handlers.state(failures ? "lost" : "connecting", { retryAt: null, since: lastAt });
        await listen();
      } catch (problem) {
        if (problem.refused) {
          handlers.state("refused", {});
          await new Promise((resolve) => { wake = resolve; });
          failures = 0;
          continue;
        }
      }
      const delay = DELAYS_MS[Math.min(failures++, DELAYS_MS.length - 1)];
      handlers.state("lost", { retryAt: Date.now() + delay, since: lastAt });
      await new Promise((resolve) => { wake = resolve; setTimeout(resolve, delay); });
    }
  }

  async function listen() {
    const abort = new AbortController();
    const stop = () => abort.abort();
    let watchdog = setTimeout(stop, SILENCE_MS);
    try {
      const headers = token.header();
      const response = await fetch("/api/v1/events", { headers, signal: abort.signal, cache: "no-store" });
      if (response.status === 401) throw { refused: true };
      if (!response.ok) throw new Error(`status ${response.status}`);
      const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
      const pieces = [];
      for (;;) {
        const { value, done } = await reader.read();
        if (done) return;
        clearTimeout(watchdog);
        watchdog = setTimeout(stop, SILENCE_MS);
        pieces.push(value);
        if (!value.includes("\n\n")) continue; // join once, not at each piece of a large event
        const blocks = pieces.join("").split("\n\n");
        pieces.length = 0;
        pieces.push(blocks.pop());
        blocks.forEach(deliver);
      }
    } finally {
      clearTimeout(watchdog);
      abort.abort();
    }
  }

  function deliver(block) {
    const data = block.split("\n").filter((line) => line.startsWith("data: ")).map((line) => line.slice(6)).join("\n");
    if (!data) return;
    if (failures || lastAt === null) handlers.state("live", {});
    failures = 0;
    lastAt = Date.now();
    handlers.update(JSON.parse(data));
  }

  window.addEventListener("online", () => wake && wake());
  run();
  return { retry() { failures = 0; if (wake) wake(); } };
}
