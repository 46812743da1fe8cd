// The timeline: four charts of rates, made from two successive states of the server's counters.

const KEPT = 240; // points: two minutes

const CHARTS = [
  { name: "Tokens/s", unit: "", lines: ["generated", "prompts"], rates: throughput },
  { name: "Time to first token", unit: "ms", lines: ["mean"], rates: firstToken },
  { name: "Prompt tokens from the cache", unit: "%", lines: ["hits"], rates: hits },
  { name: "Link", unit: "MB/s", lines: ["in", "out"], rates: link },
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

// Each line by its own dashes; a gap where there was nothing to measure.
class Chart {
  constructor(place, kind) {
    this.kind = kind;
    this.points = [];
    const figure = document.createElement("figure");
    this.caption = document.createElement("figcaption");
    this.canvas = document.createElement("canvas");
    this.canvas.setAttribute("role", "img");
    figure.append(this.caption, this.canvas);
    place.append(figure);
    this.describe();
    new ResizeObserver(() => this.draw()).observe(this.canvas);
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
      const value = point ? shortened(point[at]) : "–";
      return lines.length > 1 ? `${line} ${value}` : value;
    });
    this.caption.textContent = `${name}: ${latest.join(", ")} ${unit}`.trimEnd();
    this.canvas.setAttribute("aria-label", `${this.caption.textContent}; highest ${shortened(this.highest)}`);
    this.canvas.dataset.points = this.points.length;
    this.canvas.dataset.highest = this.highest;
  }

  draw() {
    const { canvas, points } = this;
    const { clientWidth: width, clientHeight: height } = canvas;
    canvas.width = width * devicePixelRatio;
    canvas.height = height * devicePixelRatio;
    const pen = canvas.getContext("2d");
    pen.scale(devicePixelRatio, devicePixelRatio);
    const style = getComputedStyle(canvas);
    pen.lineWidth = 1.5;
    const most = this.highest || 1;
    const y = (value) => height - 2 - (value / most) * (height - 14);
    this.kind.lines.forEach((_, line) => {
      pen.strokeStyle = pen.fillStyle = style.getPropertyValue(line ? "--host-line" : "--gpu");
      pen.setLineDash(line ? [4, 3] : []);
      pen.beginPath();
      let drawing = false;
      points.forEach((values, at) => {
        if (values[line] === null) {
          drawing = false;
          return;
        }
        const x = width - (points.length - at) * (width / KEPT);
        if (drawing) pen.lineTo(x, y(values[line]));
        else pen.fillRect(x - 1, y(values[line]) - 1, 2, 2);
        pen.moveTo(x, y(values[line]));
        drawing = true;
      });
      pen.stroke();
    });
    pen.fillStyle = style.color;
    pen.font = `10px ${style.fontFamily}`;
    pen.fillText(shortened(this.highest), 2, 10);
  }
}

function shortened(value) {
  return value >= 100 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(2)));
}
