// A small line chart of the last minutes: inline SVG, one colour, a value under the pointer.

import { h, setAttribute, setText } from "./format.js";

const SPAN_MS = 600000;
const SHORTEST_MS = 30000;
const HEIGHT = 96;
const TOP = 18;
const RIGHT = 5; // room for the dot
const SVG = "http://www.w3.org/2000/svg";
let made = 0;

function svg(tag, attributes) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

export class Chart {
  // options: title, format(value), field (index in a point), floor (the smallest top of the scale), tone
  constructor(options) {
    this.options = options;
    this.points = [];
    const gradient = `fade-${++made}`;
    this.value = h("strong", { class: "chart-value" }, "–");
    this.when = h("span", { class: "chart-when" });
    this.top = h("span", { class: "chart-top", "aria-hidden": "true" });
    this.area = svg("path", { class: "chart-area", fill: `url(#${gradient})` });
    this.line = svg("path", { class: "chart-line" });
    this.cross = svg("line", { class: "chart-cross", y1: 0, y2: HEIGHT });
    this.dot = svg("circle", { class: "chart-dot", r: 3 });
    const stops = [["0", "0.28"], ["1", "0.02"]].map(([offset, opacity]) =>
      svg("stop", { offset, "stop-color": "currentColor", "stop-opacity": opacity }));
    const fade = svg("linearGradient", { id: gradient, x1: 0, y1: 0, x2: 0, y2: 1 });
    fade.append(...stops);
    this.svg = svg("svg", { role: "img", height: HEIGHT, preserveAspectRatio: "none" });
    this.svg.append(fade, svg("line", { class: "chart-base", x1: 0, x2: 10000, y1: HEIGHT - 0.5, y2: HEIGHT - 0.5 }),
      this.area, this.line, this.cross, this.dot);
    this.element = h("figure", { class: "chart", "data-tone": options.tone || "calm" },
      h("figcaption", {}, h("span", {}, options.title), this.when, this.value), h("div", { class: "chart-plot" }, this.top, this.svg));
    this.svg.addEventListener("pointermove", (event) => this.point(event.offsetX));
    this.svg.addEventListener("pointerleave", () => this.point(null));
    this.width = 0;
    new ResizeObserver(([entry]) => { this.width = entry.contentRect.width; this.draw(); }).observe(this.svg);
  }

  update(points) {
    this.points = points;
    this.draw();
  }

  scale() {
    const points = this.points;
    const end = points[points.length - 1][0];
    const start = Math.max(points[0][0], end - SPAN_MS);
    const span = Math.max(end - start, SHORTEST_MS);
    let most = this.options.floor;
    for (const point of points) if (point[0] >= start) most = Math.max(most, point[this.options.field] ?? 0);
    const top = niceTop(most, this.options.base || 10);
    return {
      top,
      x: (t) => (this.width - RIGHT) * (1 - (end - t) / span),
      y: (v) => HEIGHT - 1 - (v / top) * (HEIGHT - 1 - TOP),
    };
  }

  draw() {
    const { field, format, title } = this.options;
    if (!this.points.length || !this.width) return;
    const { top, x, y } = this.scale();
    const drawn = thin(this.points, field, this.width).map(([t, v]) => [x(t), v === null ? null : y(v)]);
    let line = "", area = "", open = null;
    for (const [px, py] of drawn) {
      if (py === null) { if (open !== null) area += `L${open},${HEIGHT}Z`; open = null; continue; }
      const at = `${px.toFixed(1)},${py.toFixed(1)}`;
      if (open === null) { line += `M${at}`; area += `M${px.toFixed(1)},${HEIGHT}L${at}`; }
      else { line += `L${at}`; area += `L${at}`; }
      open = px.toFixed(1);
    }
    if (open !== null) area += `L${open},${HEIGHT}Z`;
    setAttribute(this.line, "d", line);
    setAttribute(this.area, "d", area);
    setText(this.top, format(top));
    const values = this.points.map((point) => point[field]).filter((v) => v !== null);
    const now = this.points[this.points.length - 1][field];
    const most = values.length ? Math.max(...values) : null;
    setAttribute(this.svg, "aria-label", `${title}: ${format(now)} now, at most ${format(most)} in the last minutes`);
    this.point(this.pointer ?? null);
  }

  point(px) {
    this.pointer = px;
    const { field, format } = this.options;
    if (!this.points.length || !this.width) return;
    const { x, y } = this.scale();
    let shown = this.points[this.points.length - 1];
    if (px !== null) {
      for (const point of this.points) if (Math.abs(x(point[0]) - px) < Math.abs(x(shown[0]) - px)) shown = point;
    }
    const value = shown[field];
    setText(this.value, format(value));
    setText(this.when, px === null ? "" : new Date(shown[0]).toLocaleTimeString());
    this.cross.style.display = px === null ? "none" : "";
    this.dot.style.display = value === null ? "none" : "";
    if (value === null) return;
    const at = x(shown[0]);
    setAttribute(this.cross, "x1", at.toFixed(1));
    setAttribute(this.cross, "x2", at.toFixed(1));
    setAttribute(this.dot, "cx", at.toFixed(1));
    setAttribute(this.dot, "cy", y(value).toFixed(1));
  }
}

// One point for every other pixel at most: the highest of those that share it.
function thin(points, field, width) {
  const step = Math.ceil(points.length / Math.max(1, width / 2));
  if (step <= 1) return points.map((point) => [point[0], point[field]]);
  const kept = [];
  for (let i = 0; i < points.length; i += step) {
    let best = points[i];
    for (let j = i; j < Math.min(i + step, points.length); j++) if ((points[j][field] ?? -1) > (best[field] ?? -1)) best = points[j];
    kept.push([best[0], best[field]]);
  }
  const last = points[points.length - 1];
  kept.push([last[0], last[field]]);
  return kept;
}

// 1, 2 or 5 times a power: the scale stays still while values wander.
function niceTop(value, base) {
  if (base === 1024) return 2 ** Math.ceil(Math.log2(value));
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * power).find((top) => top >= value);
}
