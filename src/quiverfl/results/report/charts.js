// Charts in the place of still pictures: values under the pointer, zoom, one scale for charts that
// belong together. The page embeds this file and report.js as one script.
const all = (where, what) => [...where.querySelectorAll(what)];
const el = (name, attributes = {}, ...content) => {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...content);
  return made;
};
const SVG = document.querySelector("svg")?.namespaceURI; // whoever draws has a still picture
const draw = (parent, name, attributes, text) => {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  parent.append(made);
  return made;
};

// Numbers in words.
const size = (count) => {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (Math.abs(count) >= 999.5 && unit < 4) { count /= 1000; unit += 1; }
  return `${+count.toPrecision(3)} ${units[unit]}`;
};
const short = (value) => String(+value.toPrecision(4)).replace("-", "−");
const WORDS = {
  share: { tick: (v) => `${+(100 * v).toFixed(4)} %`, value: (v) => `${(100 * v).toFixed(2)} %` },
  bytes: { tick: size, value: size },
  whole: { tick: (v) => v.toLocaleString("en"), value: (v) => Math.round(v).toLocaleString("en") },
  number: { tick: short, value: short },
};

// An axis: from values to places and back, with its ticks.
const axis = (low, high, log, begin, end, wanted, integer) => {
  const into = log ? Math.log10 : (v) => v;
  const back = log ? (v) => 10 ** v : (v) => v;
  const [a, b] = [into(low), into(high)];
  const place = (v) => begin + ((into(v) - a) / (b - a)) * (end - begin);
  const value = (at) => back(a + ((at - begin) / (end - begin)) * (b - a));
  const ticks = [];
  if (log && b - a > 0.7) {
    const parts = b - a > 2.5 ? [1] : [1, 2, 5];
    for (let power = Math.floor(a); power <= b; power += 1)
      for (const part of parts) ticks.push(part * 10 ** power);
  } else {
    const rough = (high - low) / wanted;
    const unit = 10 ** Math.floor(Math.log10(rough));
    let step = [1, 2, 5, 10].find((s) => s * unit >= rough) * unit;
    if (integer) step = Math.max(1, Math.round(step));
    for (let n = Math.ceil(low / step); n * step <= high + 1e-9 * step; n += 1)
      ticks.push(+(n * step).toPrecision(12));
  }
  return { low, high, place, value, ticks: ticks.filter((t) => t >= low && t <= high) };
};
const hull = (ranges) => [Math.min(...ranges.map((r) => r[0])), Math.max(...ranges.map((r) => r[1]))];
const known = (values) => (values || []).filter((v) => v !== null);
const around = ([low, high], log) => {
  if (log) return [low / 1.1, high * 1.1];
  const margin = 0.05 * (high - low) || 0.05 * Math.abs(low) || 1;
  return [low - margin, high + margin];
};

const ROW = 42; // the height of an experiment's row of clients
const hidden = new Set();
const charts = [];
const redraw = () => charts.forEach((chart) => chart.draw());

class Chart {
  constructor(figure, spec) {
    Object.assign(this, { figure, spec, zoom: null, whole: false });
    all(figure, ":scope > svg").forEach((still) => still.classList.add("still"));
    this.holder = figure.appendChild(el("div", { class: "chart" }));
    this.tip = el("div", { class: "tip", role: "status" });
    this.buttons = el("span", { class: "buttons" });
    if (spec.cut) {
      this.range = this.buttons.appendChild(el("button", { type: "button", class: "range" }, "All values"));
      this.range.onclick = () => {
        const whole = !this.whole;
        charts.filter((c) => c.spec.scale === spec.scale).forEach((c) => {
          c.whole = whole;
          if (c.range) c.range.textContent = whole ? "Late values" : "All values";
          c.zoomTo(null);
        });
      };
    }
    this.reset = this.buttons.appendChild(el("button", { type: "button", class: "reset", hidden: "" }, "Reset zoom"));
    this.reset.onclick = () => this.zoomTo(null);
    this.holder.addEventListener("pointermove", (event) => this.move(event));
    this.holder.addEventListener("pointerleave", () => this.leave());
    this.holder.addEventListener("pointerdown", (event) => this.press(event));
    this.holder.addEventListener("pointerup", (event) => this.release(event));
    this.holder.addEventListener("dblclick", () => this.zoomTo(null));
  }
  visible() { return this.spec.series.filter((one) => !hidden.has(one.label)); }
  zoomTo(zoom) {
    this.zoom = zoom;
    this.reset.hidden = !zoom;
    if (this.range) this.range.hidden = Boolean(zoom);
    this.draw();
  }
  // What one scale shows: all its charts, but only the experiments that are switched on.
  extent(side) {
    const together = charts.filter((c) => c.spec.scale === this.spec.scale);
    const ranges = together.flatMap((c) => c.visible().map((one) => {
      if (side === "x") return one.level ? [] : known(one.x);
      if (c.spec.cut && !c.whole && known(one.late).length === 2) return one.late;
      return [...known(one.y), ...known(one.low), ...known(one.high)];
    })).filter((values) => values.length).map((values) => [Math.min(...values), Math.max(...values)]);
    return ranges.length ? hull(ranges) : [0, 1];
  }
  draw() {
    const { spec, holder } = this;
    const points = spec.kind === "points";
    const width = Math.max(240, holder.clientWidth);
    const rows = this.visible();
    const height = points ? 46 + ROW * Math.max(1, rows.length) : Math.round(Math.min(320, 0.62 * width));
    const box = points ? { left: 8, right: 10, top: 4 } : { left: 58, right: 10, top: 8 };
    box.bottom = height - 40;
    const [x0, x1] = this.zoom ? this.zoom.x : this.extent("x");
    const [xl, xh] = this.zoom || !points ? [x0, x1 > x0 ? x1 : x0 + 1] : around([x0, x1], false);
    const [yl, yh] = points ? [0, 1] : this.zoom ? this.zoom.y : around(this.extent("y"), spec.y.log);
    this.x = axis(xl, xh, spec.x.log, box.left, width - box.right, width < 380 ? 4 : 7, spec.x.kind === "whole");
    this.y = axis(yl, yh, spec.y.log, box.bottom, box.top, 6, false);
    this.box = { ...box, width, height };
    holder.replaceChildren(this.tip, this.buttons);
    this.tip.hidden = true;
    const svg = (this.svg = draw(holder, "svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img" }));
    draw(svg, "title", {}, this.figure.querySelector("figcaption").firstChild.textContent);
    const clip = `clip-${charts.indexOf(this)}`;
    const room = { x: box.left, y: box.top - 3, width: width - box.left - box.right, height: box.bottom - box.top + 6 };
    draw(draw(draw(svg, "defs", {}), "clipPath", { id: clip }), "rect", room);
    for (const t of this.x.ticks) {
      draw(svg, "line", { x1: this.x.place(t), x2: this.x.place(t), y1: box.top, y2: box.bottom, class: "grid" });
      const words = draw(svg, "text", { x: this.x.place(t), y: box.bottom + 17, class: "tick middle" }, WORDS[spec.x.kind].tick(t));
      if (this.x.place(t) + words.getComputedTextLength() / 2 > width) { // it would be cut off
        words.setAttribute("x", width);
        words.setAttribute("class", "tick end");
      }
    }
    if (!points) for (const t of this.y.ticks) {
      draw(svg, "line", { x1: box.left, x2: width - box.right, y1: this.y.place(t), y2: this.y.place(t), class: "grid" });
      draw(svg, "text", { x: box.left - 7, y: this.y.place(t) + 4, class: "tick end" }, WORDS[spec.y.kind].tick(t));
    }
    draw(svg, "line", { x1: box.left, x2: width - box.right, y1: box.bottom, y2: box.bottom, class: "edge" });
    draw(svg, "text", { x: box.left, y: height - 4 }, `${spec.x.title}${points ? "" : " · " + spec.y.title}`);
    const inside = draw(svg, "g", { "clip-path": `url(#${clip})` });
    this.marks = [];
    rows.forEach((one, row) => (points ? this.strip(inside, one, row) : this.line(inside, one)));
    this.overlay = draw(svg, "g", { class: "overlay" });
  }
  line(where, one) {
    const at = (values) => values.map((v, i) => [v, i]).filter(([v, i]) => v !== null && one.x[i] !== null)
      .map(([v, i]) => `${this.x.place(one.x[i]).toFixed(1)},${this.y.place(v).toFixed(1)}`);
    if (one.level) {
      const y = this.y.place(one.y[0]);
      draw(where, "line", { x1: this.box.left, x2: this.box.width, y1: y, y2: y, class: "level", style: `stroke:${one.color}` });
      return;
    }
    if (one.low) draw(where, "polygon", { points: [...at(one.low), ...at(one.high).reverse()].join(" "), class: "band", style: `fill:${one.color}` });
    for (const values of one.y ? [one.y] : [one.low, one.high])
      draw(where, "polyline", { points: at(values).join(" "), class: "line", style: `stroke:${one.color}` });
    if (one.y && one.x.length === 1) draw(where, "circle", { cx: this.x.place(one.x[0]), cy: this.y.place(one.y[0]), r: 3.5, style: `fill:${one.color}` });
  }
  strip(where, one, row) {
    const middle = this.box.top + ROW * row + 25;
    const text = draw(where, "text", { x: this.box.left, y: middle - 13 }, one.label);
    text.style.fill = one.color;
    const [low, half, high] = [0.25, 0.5, 0.75].map((share) => {
      const at = share * (one.x.length - 1);
      const below = one.x[Math.floor(at)];
      return this.x.place(below + (at % 1) * (one.x[Math.ceil(at)] - below));
    });
    if (one.x.length) {
      draw(where, "rect", { x: low, width: high - low, y: middle - 10, height: 20, class: "band", style: `fill:${one.color}` });
      draw(where, "line", { x1: half, x2: half, y1: middle - 10, y2: middle + 10, class: "line", style: `stroke:${one.color}` });
    }
    one.x.forEach((value, i) => {
      const spread = 14 * ((((i + 0.5) * 0.6180339887498949) % 1) - 0.5);
      const place = { cx: this.x.place(value), cy: middle + spread };
      draw(where, "circle", { ...place, r: 3, class: "point", style: `fill:${one.color}` });
      this.marks.push({ ...place, one, text: `${one.names[i]}: ${WORDS[this.spec.x.kind].value(value)}` });
    });
  }
  at(event) {
    const corner = this.holder.getBoundingClientRect();
    return [event.clientX - corner.left, event.clientY - corner.top];
  }
  move(event) {
    const [x, y] = this.at(event);
    if (this.begun) return this.select(x, y);
    if (event.target.closest("button")) return this.leave();
    this.overlay.replaceChildren();
    if (this.spec.kind === "points") return this.pointAt(x, y);
    // The place nearest to the pointer at which any of the shown curves has a value.
    const rows = this.visible().filter((one) => !one.level);
    const places = rows.flatMap((one) => known(one.x)).filter((v) => v >= this.x.low && v <= this.x.high);
    if (!places.length || x < this.box.left || y > this.box.bottom) return this.leave();
    const near = (best, v) => (Math.abs(this.x.place(v) - x) < Math.abs(this.x.place(best) - x) ? v : best);
    const here = places.reduce(near);
    const px = this.x.place(here);
    draw(this.overlay, "line", { x1: px, x2: px, y1: this.box.top, y2: this.box.bottom, class: "cross" });
    const told = [];
    for (const one of this.visible()) {
      const i = one.level ? 0 : one.x.indexOf(one.x.reduce((b, v) => (Math.abs(v - here) < Math.abs(b - here) ? v : b)));
      if (!one.level && Math.abs(this.x.place(one.x[i]) - px) > 6) continue;
      const word = WORDS[this.spec.y.kind].value;
      const values = one.y ? [one.y[i]] : [one.low[i], one.high[i]];
      if (values.some((v) => v === null)) continue;
      for (const v of values) draw(this.overlay, "circle", { cx: one.level ? px : this.x.place(one.x[i]), cy: this.y.place(v), r: 3.5, style: `fill:${one.color}` });
      const range = one.y && one.low ? ` (${word(one.low[i])} to ${word(one.high[i])})` : "";
      told.push([values[0], one, values.map(word).join(" to ") + range]);
    }
    told.sort((a, b) => b[0] - a[0]);
    const unit = this.spec.x.title.split(",")[0];
    const head = unit === "rounds" ? `round ${here}` : `${WORDS[this.spec.x.kind].value(here)} ${this.spec.x.kind === "bytes" ? "" : unit}`;
    this.tell(px, y, head, told.map(([, one, text]) => [one, text]));
  }
  pointAt(x, y) {
    const near = this.marks.map((m) => [Math.hypot(m.cx - x, m.cy - y), m]).sort((a, b) => a[0] - b[0])[0];
    if (!near || near[0] > 14) return this.leave();
    draw(this.overlay, "circle", { cx: near[1].cx, cy: near[1].cy, r: 5.5, class: "ring" });
    this.tell(near[1].cx, near[1].cy, near[1].one.label, [[near[1].one, near[1].text]]);
  }
  tell(x, y, head, rows) {
    this.tip.replaceChildren(el("b", {}, head), ...rows.map(([one, text]) => {
      const key = el("span", { class: "key", style: `color:${one.color}` }, one.glyph + "\ufe0e");
      return el("div", {}, key, this.spec.kind === "points" ? "" : `${one.label} `, el("span", { class: "value" }, text));
    }));
    this.tip.hidden = false;
    const wide = this.tip.offsetWidth;
    const left = x + 14 + wide > this.box.width ? Math.max(0, x - 14 - wide) : x + 14;
    this.tip.style.left = `${left}px`;
    this.tip.style.top = `${Math.max(0, Math.min(y - 20, this.box.height - this.tip.offsetHeight))}px`;
  }
  leave() { if (!this.begun) { this.tip.hidden = true; this.overlay.replaceChildren(); } }
  press(event) {
    if (event.pointerType === "touch" || event.button || event.target.closest("button")) return;
    this.begun = this.at(event);
    this.holder.setPointerCapture(event.pointerId);
    event.preventDefault();
  }
  select(x, y) {
    const [left, right] = [this.begun[0], x].sort((a, b) => a - b);
    const [top, bottom] = [this.begun[1], y].sort((a, b) => a - b);
    this.tip.hidden = true;
    this.overlay.replaceChildren();
    const tall = bottom - top > 12 && this.spec.kind === "lines";
    draw(this.overlay, "rect", { x: left, width: right - left, y: tall ? top : this.box.top, height: tall ? bottom - top : this.box.bottom - this.box.top, class: "selection" });
  }
  release(event) {
    if (!this.begun) return;
    const [[x0, y0], [x1, y1]] = [this.begun, this.at(event)];
    this.begun = null;
    this.overlay.replaceChildren();
    if (Math.abs(x1 - x0) < 12) return;
    const order = (a, b) => [Math.min(a, b), Math.max(a, b)];
    const within = ([a, b], axis) => [Math.max(a, axis.low), Math.min(b, axis.high)];
    const x = within(order(this.x.value(x0), this.x.value(x1)), this.x);
    const tall = Math.abs(y1 - y0) > 12;
    const y = tall ? within(order(this.y.value(y0), this.y.value(y1)), this.y) : [this.y.low, this.y.high];
    if (x[1] > x[0] && y[1] > y[0]) this.zoomTo({ x, y });
  }
}
