// Chunks in a row: those of the open conversation by where they are now, and below a reply by where its prompt's came
// from. The order is the conversation's: its beginning is evicted first, so it stands on the left.

export const TIERS = ["dropped", "disk", "host", "gpu"];
const WORDS = { gpu: "device", host: "host", disk: "disk", dropped: "dropped", recomputed: "recomputed", new: "new" };
const SOURCES = ["recomputed", "disk", "host", "gpu", "new"];
const MOST_CELLS = 160; // beyond, a cell is several chunks

// `name`: what people call the top tier. Without a GPU it is no GPU's memory.
export function nameDevice(name) {
  WORDS.gpu = name;
  for (const place of document.querySelectorAll("[data-device]")) place.textContent = WORDS.gpu;
}

export function deviceName() {
  return WORDS.gpu;
}

// Draws a conversation's chunks: `place` is a figure with a caption. `chunks`: their number by tier, undefined: unknown.
export function showChunks(place, chunks, chunkTokens) {
  const [bar, caption] = place.children;
  const all = TIERS.flatMap((tier) => Array(chunks?.[tier] ?? 0).fill(tier));
  const each = Math.ceil(all.length / MOST_CELLS) || 1;
  const cells = all.filter((_, at) => at % each === 0);
  while (bar.children.length > cells.length) bar.lastChild.remove();
  while (bar.children.length < cells.length) bar.append(document.createElement("span"));
  cells.forEach((tier, at) => (bar.children[at].className = `cell ${tier}`)); // a new colour fades in
  const words = all.length ? `${all.length} chunks of ${chunkTokens} tokens` : "The first turn makes chunks, which are shown here.";
  const present = TIERS.toReversed().filter((tier) => chunks?.[tier]);
  caption.replaceChildren(words, ...present.map((tier) => legendItem(tier, chunks[tier])));
}

// Where a prompt's tokens came from. `tokens`: by source. `times`: of the reply, in milliseconds.
export function sourceStrip(tokens, chunkTokens, generated, times) {
  const present = SOURCES.filter((source) => tokens[source]);
  const bar = document.createElement("div");
  bar.className = "strip";
  bar.setAttribute("role", "img");
  const came = present.map((source) => `${WORDS[source]} ${tokens[source]}`).join(" · ");
  bar.setAttribute("aria-label", `The prompt's tokens by where they came from: ${came}`);
  bar.append(...present.map((source) => run(source, Math.ceil(tokens[source] / chunkTokens))));
  const caption = document.createElement("figcaption");
  const rate = generated > 1 && times.last > times.first ? ` at ${Math.round(speed(generated, times))}/s` : "";
  const figures = `first token after ${Math.round(times.first)} ms · ${generated} tokens${rate}`;
  caption.append("Prompt tokens", ...present.map((source) => legendItem(source, tokens[source])), figures);
  const figure = document.createElement("figure");
  figure.append(bar, caption);
  return figure;
}

function legendItem(kind, count) {
  const item = document.createElement("span");
  const swatch = document.createElement("span");
  item.className = "key";
  swatch.className = `cell ${kind}`;
  item.append(swatch, `${WORDS[kind]} ${count.toLocaleString("en")}`);
  return item;
}

function speed(generated, times) {
  return ((generated - 1) * 1000) / (times.last - times.first);
}

function run(source, chunks) {
  const element = document.createElement("span");
  element.className = `run ${source}`;
  element.dataset.chunks = chunks;
  element.title = `${WORDS[source]}: ${chunks} chunks`;
  element.style.setProperty("--chunks", chunks);
  return element;
}
