// The timeline: four charts of rates, made from two successive states of the server's counters.

const KEPT = 240; // points: two minutes
const LEFT = 40; // pixels for the numbers of the y axis
const BELOW = 16; // and for those of the x axis
const ABOVE = 7;

const CHARTS = [
  { name: "Throughput", unit: "tokens/s", lines: ["generated", "prompts"], rates: throughput },
  { name: "Time to first token", unit: "ms", lines: ["mean"], rates: firstToken },
  { name: "Cache hits", unit: "% of prompt tokens", lines: ["found"], rates: hits, top: 100 },
  { name: "Copies", unit: "MB/s", lines: ["swapped in", "swapped out"], rates: link },
];

const sum = (numbers) => Object.values(numbers).reduce((total, number) => total + number, 0);

function throughput(then, now, seconds) {
  return [(now.generated - then.generated) / seconds, (sum(now.prompts) - sum(then.prompts)) / seconds];
}

function firstToken({ first_token: then }, { first_token: now }) {
  const count = now.count - then.count;
  return [count ? (1000 * (now.sum - then.sum)) / count : null];
}

function hits({ prompts: then }, { prompts: now }) {
  const all = sum(now) - sum(then);
  const found = ["gpu", "host", "disk"].reduce((total, tier) => total + now[tier] - then[tier], 0);
  return [all ? (100 * found) / all : null];
}

function link({ copied: then }, { copied: now }, seconds) {
  return [(now.swap_in - then.swap_in) / seconds / 1e6, (now.swap_out - then.swap_out) / seconds / 1e6];
}

export class Timeline {
  constructor(place) {
    this.charts = CHARTS.map((kind) => new Chart(place, kind));
    this.before = null;
  }

  update(state) {
    const then = this.before;
    this.before = state;
    if (then === null || state.seconds <= then.seconds || state.generated < then.generated) return; // the server is another
    for (const chart of this.charts) chart.add(chart.kind.rates(then, state, state.seconds - then.seconds));
  }
}

// Each line by its own colour and dashes, which the legend shows; a gap where there was nothing to measure.
class Chart {
  constructor(place, kind) {
    this.kind = kind;
    this.points = [];
    const figure = document.createElement("figure");
    const caption = document.createElement("figcaption");
    const title = element("div", "");
    title.append(element("b", kind.name), ` ${kind.unit}`);
    caption.append(title);
    this.values = kind.lines.map((line, at) => legendItem(caption, line, at));
    this.canvas = document.createElement("canvas");
    this.canvas.setAttribute("role", "img");
    figure.append(caption, this.canvas);
    place.append(figure);
    this.describe();
    new ResizeObserver(() => this.draw()).observe(this.canvas);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  add(values) {
    this.points.push(values);
    if (this.points.length > KEPT) this.points.shift();
    this.describe();
    this.draw();
  }

  get highest() {
    return Math.max(0, ...this.points.flat());
  }

  describe() {
    const { name, unit, lines } = this.kind;
    const latest = lines.map((line, at) => {
      const point = this.points.findLast((values) => values[at] !== null);
      this.values[at].textContent = point ? shortened(point[at]) : "–";
      return `${line} ${this.values[at].textContent}`;
    });
    const words = `${name} in ${unit}: ${latest.join(", ")}; highest ${shortened(this.highest)}`;
    this.canvas.setAttribute("aria-label", words);
    this.canvas.dataset.points = this.points.length;
    this.canvas.dataset.highest = this.highest;
  }

  draw() {
    const { canvas, points } = this;
    const width = canvas.clientWidth - LEFT;
    const height = canvas.clientHeight - BELOW - ABOVE;
    canvas.width = canvas.clientWidth * devicePixelRatio;
    canvas.height = canvas.clientHeight * devicePixelRatio;
    const pen = canvas.getContext("2d");
    pen.scale(devicePixelRatio, devicePixelRatio);
    pen.translate(LEFT, ABOVE);
    const style = getComputedStyle(canvas);
    const top = this.kind.top ?? rounded(this.highest);
    this.drawAxes(pen, style, width, height, top);
    pen.lineWidth = 1.6;
    pen.lineJoin = "round";
    this.kind.lines.forEach((_, line) => {
      pen.strokeStyle = pen.fillStyle = style.getPropertyValue(`--line-${line}`);
      pen.setLineDash(line ? [5, 3] : []);
      pen.beginPath();
      let drawing = false;
      points.forEach((values, at) => {
        if (values[line] === null) {
          drawing = false;
          return;
        }
        const x = width - (points.length - 1 - at) * (width / (KEPT - 1));
        const y = height - (values[line] / top) * height;
        if (drawing) pen.lineTo(x, y);
        else pen.fillRect(x - 1, y - 1, 2, 2);
        pen.moveTo(x, y);
        drawing = true;
      });
      pen.stroke();
    });
  }

  drawAxes(pen, style, width, height, top) {
    pen.font = `10px ${style.fontFamily}`;
    pen.fillStyle = style.getPropertyValue("--quiet");
    pen.strokeStyle = style.getPropertyValue("--edge");
    pen.textAlign = "right";
    pen.textBaseline = "middle";
    for (const part of [0, 0.5, 1]) {
      const y = Math.round(height * (1 - part)) + 0.5;
      pen.beginPath();
      pen.moveTo(0, y);
      pen.lineTo(width, y);
      pen.stroke();
      pen.fillText(shortened(top * part), -5, y);
    }
    pen.textBaseline = "top";
    pen.fillText("now", width, height + 5);
    pen.textAlign = "center";
    pen.fillText("−1 min", width / 2, height + 5);
    pen.textAlign = "left";
    pen.fillText("−2 min", 0, height + 5);
    if (this.points.length) return;
    pen.textAlign = "center";
    pen.fillText("waiting for the first figures", width / 2, height / 4);
  }
}

function legendItem(caption, line, at) {
  const item = element("span", "");
  item.className = "key";
  const swatch = element("span", "");
  swatch.className = `line line-${at}`;
  const value = element("b", "");
  item.append(swatch, `${line} `, value);
  caption.append(item);
  return value;
}

function element(name, text) {
  const made = document.createElement(name);
  made.textContent = text;
  return made;
}

// The next number at or above that reads well: 1, 2 or 5 with zeros.
function rounded(value) {
  const unit = 10 ** Math.floor(Math.log10(value || 1));
  return [1, 2, 5, 10].map((step) => step * unit).find((step) => step >= value);
}

function shortened(value) {
  return value >= 100 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(2)));
}
