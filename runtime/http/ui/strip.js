// Where a prompt's chunks came from, drawn beside the reply: counts by source, in the order in which eviction tends to
// leave them (the beginning goes first, what is new is the end).

const SOURCES = [
  { source: "recomputed", letter: "R", words: "recomputed" },
  { source: "disk", letter: "D", words: "disk" },
  { source: "host", letter: "H", words: "host" },
  { source: "gpu", letter: "G", words: "GPU" },
  { source: "new", letter: "N", words: "new" },
];

// `tokens`: of the prompt, by source. `times`: of the reply, in milliseconds.
export function strip(tokens, chunkTokens, generated, times) {
  const present = SOURCES.filter(({ source }) => tokens[source]);
  const came = present.map(({ source, words }) => `${words} ${tokens[source]}`).join(" · ");
  const bar = document.createElement("div");
  bar.className = "strip";
  bar.setAttribute("role", "img");
  bar.setAttribute("aria-label", `The prompt's tokens by where they came from: ${came}`);
  bar.append(...present.map((kind) => run(kind, Math.ceil(tokens[kind.source] / chunkTokens))));
  const caption = document.createElement("figcaption");
  const rate = generated > 1 && times.last > times.first ? ` at ${Math.round(speed(generated, times))}/s` : "";
  caption.textContent = `${came} | first token ${Math.round(times.first)} ms | ${generated} tokens${rate}`;
  const figure = document.createElement("figure");
  figure.append(bar, caption);
  return figure;
}

function speed(generated, times) {
  return ((generated - 1) * 1000) / (times.last - times.first);
}

function run({ source, letter, words }, chunks) {
  const element = document.createElement("span");
  element.className = `run ${source}`;
  element.dataset.chunks = chunks;
  element.title = `${words}: ${chunks} chunks`;
  element.textContent = letter;
  element.style.setProperty("--chunks", chunks);
  return element;
}
