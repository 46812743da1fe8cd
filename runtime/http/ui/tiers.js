// GPU, host and disk with how full they are, and the chunks that move between them: each flying square is one of them.

const MOVES = [
  { name: "swap_out", lane: "gpu-host", way: "out", kind: "host" },
  { name: "swap_in", lane: "gpu-host", way: "in", kind: "gpu" },
  { name: "spill", lane: "host-disk", way: "out", kind: "disk" },
  { name: "promote", lane: "host-disk", way: "in", kind: "host" },
  { name: "drop", lane: "drop", way: "out", kind: "dropped" },
];
const MOST_FLYING = 4; // squares of one kind in one look; the number below them is exact
const FLIGHT = 800; // ms

const still = matchMedia("(prefers-reduced-motion: reduce)");

export class Tiers {
  constructor(place) {
    Object.assign(this, { place, before: null });
  }

  // `interval`: ms until the next state, in which the flights begin.
  update(state, interval) {
    for (const [tier, states] of Object.entries(state.slots)) this.fill(tier, states);
    this.place.querySelector("[data-dropped]").textContent = state.moves.drop.toLocaleString("en");
    const then = this.before;
    this.before = state;
    const seconds = then && state.seconds - then.seconds;
    if (!(seconds > 0) || state.generated < then.generated) return; // the first state, or of another server
    for (const move of MOVES) this.show(move, state.moves[move.name] - then.moves[move.name], seconds, interval);
  }

  fill(tier, { free, ...taken }) {
    const count = Object.values(taken).reduce((sum, number) => sum + number, 0);
    const box = this.place.querySelector(`[data-box=${tier}]`);
    const meter = box.querySelector(".meter");
    meter.setAttribute("aria-valuemax", count + free);
    meter.setAttribute("aria-valuenow", count);
    meter.style.setProperty("--full", `${(100 * count) / (count + free || 1)}%`);
    box.querySelector("small").textContent = `${count.toLocaleString("en")} of ${(count + free).toLocaleString("en")}`;
  }

  show({ lane, way, kind }, count, seconds, interval) {
    const place = this.place.querySelector(`[data-lane=${lane}] .${way}`);
    place.querySelector("b").textContent = `${Math.round(count / seconds)}/s`;
    place.classList.toggle("busy", count > 0);
    if (still.matches || document.hidden) return;
    const flying = Math.min(count, MOST_FLYING);
    for (let number = 0; number < flying; number += 1) fly(place.firstElementChild, kind, (number * interval) / flying);
  }
}

function fly(track, kind, delay) {
  const square = document.createElement("span");
  square.className = `cell ${kind}`;
  track.append(square);
  const frames = { left: ["0%", "100%"], opacity: [0, 1, 1, 0] };
  const direction = track.parentElement.className.includes("in") ? "reverse" : "normal";
  const flight = square.animate(frames, { duration: FLIGHT, delay, direction, easing: "ease-in-out", fill: "both" });
  flight.finished.then(() => square.remove());
}
