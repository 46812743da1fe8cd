// The live map: a bar for each conversation, its chunks by tier. The beginning is what is evicted first, so a bar reads
// dropped, disk, host, device from left to right. Each tier has a pattern besides its colour.

import { deviceName, TIERS } from "./strip.js";

const nothing = () => Object.fromEntries(TIERS.map((tier) => [tier, 0]));
const HEIGHTS = [18, 14, 10, 8, 6, 5, 4, 3];
const NARROWEST = 56; // of a column of bars, while lower bars can still make it wider
const WIDEST_CHUNK = 20;
const PARTED_FROM = 5; // pixels of a chunk from which on each is seen by itself
const PULL = 0.22; // of the way to where a bar should be, in one frame

const still = matchMedia("(prefers-reduced-motion: reduce)");
const dark = matchMedia("(prefers-color-scheme: dark)");

export class ChunkMap {
  // `open(id)` is called with the conversation that the user chooses. `title(id)` is what it is called.
  constructor(canvas, readout, open, title) {
    Object.assign(this, { canvas, readout, open, title, bars: new Map(), cursor: null, selected: null, frame: 0 });
    canvas.addEventListener("keydown", (event) => this.press(event));
    canvas.addEventListener("mousemove", (event) => this.moveTo(this.at(event)));
    canvas.addEventListener("click", (event) => this.at(event) && open(this.at(event)));
    canvas.addEventListener("focus", () => this.moveTo(this.cursor ?? this.bars.keys().next().value));
    new ResizeObserver(() => this.draw()).observe(canvas);
    dark.addEventListener("change", () => this.draw());
  }

  // `conversations`: (name, chunks by tier), the latest first. Returns the sums by tier.
  update(conversations) {
    const bars = new Map();
    const sums = nothing();
    for (const [id, goal] of conversations.toReversed()) {
      bars.set(id, { goal, shown: this.bars.get(id)?.shown ?? nothing() });
      for (const tier of TIERS) sums[tier] += goal[tier];
    }
    this.bars = bars;
    this.canvas.dataset.bars = bars.size;
    this.canvas.setAttribute("aria-valuemax", bars.size);
    if (!bars.has(this.cursor)) this.cursor = null;
    this.tell();
    this.frame ||= requestAnimationFrame(() => this.step());
    return sums;
  }

  select(id) {
    this.selected = id;
    this.frame ||= requestAnimationFrame(() => this.step());
  }

  // Moves every bar a part of its way, until all have arrived.
  step() {
    let moving = false;
    for (const { goal, shown } of this.bars.values()) {
      for (const tier of TIERS) {
        const way = goal[tier] - shown[tier];
        const arrives = still.matches || Math.abs(way) < 0.05;
        shown[tier] = arrives ? goal[tier] : shown[tier] + way * PULL;
        moving ||= !arrives;
      }
    }
    this.draw();
    this.frame = moving ? requestAnimationFrame(() => this.step()) : 0;
  }

  layout() {
    const { clientWidth: width, clientHeight: height } = this.canvas;
    let rows, columns, bar;
    for (bar of HEIGHTS) {
      rows = Math.max(1, Math.floor(height / bar));
      columns = Math.max(1, Math.ceil(this.bars.size / rows));
      if (width / columns >= NARROWEST) break;
    }
    let longest = 1;
    for (const { goal } of this.bars.values()) longest = Math.max(longest, TIERS.reduce((all, tier) => all + goal[tier], 0));
    const column = width / columns;
    return { rows, columns, bar, column, chunk: Math.min(WIDEST_CHUNK, (column - 6) / longest) };
  }

  draw() {
    const { canvas } = this;
    const scale = devicePixelRatio;
    canvas.width = canvas.clientWidth * scale;
    canvas.height = canvas.clientHeight * scale;
    const pen = canvas.getContext("2d");
    pen.scale(scale, scale);
    const { rows, bar, column, chunk } = this.layout();
    const paints = Object.fromEntries(TIERS.map((tier) => [tier, paint(pen, tier)]));
    let place = 0;
    for (const [id, { shown }] of this.bars) {
      const left = Math.floor(place / rows) * column;
      const top = (place % rows) * bar;
      drawBar(pen, paints, shown, left + 2, top + 1, bar > 4 ? bar - 2 : bar - 1, chunk);
      if (id === this.selected || id === this.cursor) {
        pen.setLineDash(id === this.selected ? [] : [3, 2]);
        pen.strokeStyle = colour("--text");
        pen.strokeRect(left + 0.5, top + 0.5, column - 3, bar - 1);
      }
      place += 1;
    }
  }

  at(event) {
    const { rows, bar, column } = this.layout();
    const row = Math.floor(event.offsetY / bar);
    const place = Math.floor(event.offsetX / column) * rows + row;
    return row < rows ? [...this.bars.keys()][place] : undefined;
  }

  press(event) {
    const ids = [...this.bars.keys()];
    const now = ids.indexOf(this.cursor);
    const { rows } = this.layout();
    const moves = { ArrowDown: 1, ArrowUp: -1, ArrowRight: rows, ArrowLeft: -rows, Home: -ids.length, End: ids.length };
    if (event.key === "Enter") {
      if (this.cursor !== null) this.open(this.cursor);
    } else if (event.key in moves) {
      this.moveTo(ids[Math.min(Math.max(now + moves[event.key], 0), ids.length - 1)]);
    } else return;
    event.preventDefault();
  }

  moveTo(id) {
    if (id === undefined || id === this.cursor) return;
    this.cursor = id;
    this.tell();
    this.frame ||= requestAnimationFrame(() => this.step());
  }

  // Says in words what is under the cursor.
  tell() {
    const goal = this.bars.get(this.cursor)?.goal;
    const words = goal
      ? `${this.title(this.cursor)}: ${goal.gpu} on the ${deviceName()}, ${goal.host} on the host, ${goal.disk} on disk, ${goal.dropped} dropped`
      : `${this.bars.size} conversations`;
    if (this.readout.textContent === words) return;
    this.readout.textContent = words;
    this.canvas.setAttribute("aria-valuetext", words);
    this.canvas.setAttribute("aria-valuenow", [...this.bars.keys()].indexOf(this.cursor) + 1);
  }
}

function drawBar(pen, paints, shown, left, top, height, chunk) {
  let from = left;
  for (const tier of TIERS) {
    const width = shown[tier] * chunk;
    pen.fillStyle = paints[tier];
    pen.fillRect(from, top, width, height);
    from += width;
  }
  if (chunk < PARTED_FROM) return;
  const gap = chunk < 10 ? 1 : 2;
  for (let x = left + chunk; x < from + 1; x += chunk) pen.clearRect(x - gap, top, gap, height);
}

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name);
}

// GPU is solid, host hatched, disk striped, dropped dotted, as `.cell` in style.css.
function paint(pen, tier) {
  if (tier === "gpu") return colour("--gpu");
  const tile = document.createElement("canvas");
  tile.width = tile.height = 6;
  const ink = tile.getContext("2d");
  ink.fillStyle = colour(`--${tier}`);
  if (tier === "dropped") {
    ink.globalAlpha = 0.18;
    ink.fillRect(0, 0, 6, 6);
    ink.globalAlpha = 1;
    ink.fillRect(2, 2, 2, 2);
    return pen.createPattern(tile, "repeat");
  }
  ink.fillRect(0, 0, 6, 6);
  ink.fillStyle = colour("--stripe");
  if (tier === "disk") ink.fillRect(0, 4, 6, 2);
  else for (let at = 0; at < 6; at += 1) ink.fillRect(at, 5 - at, 2, 1);
  return pen.createPattern(tile, "repeat");
}
