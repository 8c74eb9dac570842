// Line charts that are redrawn in place: hover or arrow keys show values, the legend hides lines, CSV export. All charts
// of a page zoom together: drag over rounds, or + and -; a double click, Escape or the button shows all again.

import { colour, decimal, el, svg } from "./core.js";

const HEIGHT = 240, RIGHT = 12, TOP = 10, BOTTOM = 36;
const FEW = 30; // points of a curve that has dots
const DASHES = ["", "6 3", "2 3", "8 3 2 3"];
export const options = { smooth: 0, log: false, zoom: null }; // zoom: [first, last]
const charts = new Set();
let onPaper = false;
addEventListener("beforeprint", () => { onPaper = true; redraw(); });
addEventListener("afterprint", () => { onPaper = false; redraw(); });
export const redraw = () => charts.forEach((chart) => chart.draw());

function ticks(low, high, count, least = 0) {
  const rough = Math.max((high - low) / count || 1, least), power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((k) => k * power).reduce((best, s) => (Math.abs(Math.log(s / rough)) < Math.abs(Math.log(best / rough)) ? s : best));
  const found = [];
  for (let at = Math.ceil(low / step) * step; at <= high + step / 1e6; at += step) found.push(Math.abs(at) < step / 1e6 ? 0 : at);
  return found;
}

function logTicks(low, high) {
  const found = [];
  for (let p = Math.floor(Math.log10(low)); p <= Math.ceil(Math.log10(high)); p++)
    for (const k of [1, 2, 5]) if (k * 10 ** p >= low && k * 10 ** p <= high) found.push(k * 10 ** p);
  if (found.length < 2) return ticks(low, high, 5); // a narrow range holds no round numbers of a log scale
  return found.length > 7 ? found.filter((v) => Math.abs(Math.log10(v) - Math.round(Math.log10(v))) < 1e-9) : found;
}

const short = (v) => (v !== 0 && (Math.abs(v) < 0.001 || Math.abs(v) >= 1e5) ? v.toExponential(0) : String(Number(v.toPrecision(4))));

function smoothed(values) {
  if (!options.smooth) return values;
  let mean = 0, weight = 0;
  return values.map((v) => {
    mean = options.smooth * mean + (1 - options.smooth) * v;
    weight = options.smooth * weight + (1 - options.smooth);
    return mean / weight;
  });
}

// The part of a line that the zoom shows.
function within(series) {
  if (!options.zoom) return series;
  const kept = series.x.map((x, i) => i).filter((i) => series.x[i] >= options.zoom[0] && series.x[i] <= options.zoom[1]);
  return { ...series, x: kept.map((i) => series.x[i]), y: kept.map((i) => series.y[i]), v: kept.map((i) => series.v[i]) };
}

function zoomTo(range) {
  if (!range && !options.zoom) return;
  options.zoom = range && range[1] - range[0] < 1 ? [Math.floor(range[0]), Math.floor(range[0]) + 1] : range;
  redraw();
}

export class Chart {
  // series: [{name, x, y, index}]; the index gives the colour, which a run keeps in every chart of the page
  constructor(place, { title, axis, caption, xTitle = "round" }) {
    this.title = title; this.axis = axis; this.xTitle = xTitle;
    this.hidden = new Set(); this.series = []; this.at = null;
    this.legend = el("div", { class: "legend" });
    this.box = el("div", { class: "drawing chart" });
    this.readout = el("p", { class: "readout", "aria-live": "polite" });
    this.whole = el("button", { type: "button", class: "small quiet", hidden: "", "aria-label": `Show all rounds of ${title}`, on: { click: () => zoomTo(null) } }, "reset");
    const save = el("button", { type: "button", class: "small quiet", "aria-label": `Download ${title} as CSV`, on: { click: () => this.save() } }, "CSV");
    this.figure = el("figure", {}, el("div", { class: "title" }, el("h3", {}, title), this.whole, save), this.box, this.legend, this.readout,
      caption ? el("figcaption", {}, caption) : null);
    place.append(this.figure);
    new ResizeObserver(() => this.draw()).observe(this.box);
    charts.add(this);
  }

  remove() { charts.delete(this); this.figure.remove(); }

  set(series) { this.series = series; this.draw(); }

  save() {
    const rows = [["run", this.xTitle, this.axis], ...this.series.flatMap((s) => s.x.map((x, i) => [s.name, x, s.y[i]]))];
    const safe = (v) => { const t = String(v); return /[",\n]/.test(t) || /^[=+@-]/.test(t) && typeof v === "string" ? `"${t.replaceAll('"', '""')}"` : t; };
    const text = rows.map((row) => row.map(safe).join(",")).join("\n") + "\n";
    const link = el("a", { href: URL.createObjectURL(new Blob([text], { type: "text/csv" })), download: `${this.title.replace(/\W+/g, "-").toLowerCase()}.csv` });
    link.click();
    URL.revokeObjectURL(link.href);
  }

  // the first and the last round of all lines
  range() { return [Math.min(...this.visible().map((s) => s.x[0])), Math.max(...this.visible().map((s) => s.x.at(-1)))]; }

  visible() { return this.series.filter((s) => !this.hidden.has(s.name) && s.x.length); }

  draw() {
    if (this.drag) return; // drawn when the button is released
    this.whole.hidden = !options.zoom;
    const paper = this.figure.closest(".grid") ? 340 : 690; // pixels of half a sheet of A4, and of a whole one
    const width = onPaper ? paper : Math.max(240, this.box.clientWidth), shown = this.visible().map((s) => within({ ...s, v: smoothed(s.y) })).filter((s) => s.x.length);
    this.drawLegend();
    const xs = shown.flatMap((s) => [s.x[0], s.x[s.x.length - 1]]);
    let [low, high] = [Infinity, -Infinity];
    for (const s of shown) for (const v of s.v) { if (v < low) low = v; if (v > high) high = v; }
    if (!shown.length || !Number.isFinite(low)) {
      this.box.replaceChildren(el("p", { class: "soft empty" }, options.zoom ? "No values in these rounds." : "Nothing to draw yet."));
      return;
    }
    const log = options.log && low > 0;
    const least = low >= 0 && !log ? 0 : -Infinity; // no axis below 0 for non-negative values
    const pad = low === high ? Math.abs(low) * 0.1 || 0.1 : log ? 0 : (high - low) * 0.05;
    low = Math.max(least, low - pad); high += pad;
    const [x0, x1] = options.zoom ?? [Math.min(...xs), Math.max(...xs, Math.min(...xs) + 1)];
    const levels = log ? logTicks(low, high) : ticks(low, high, 5);
    const LEFT = Math.max(54, 32 + 7 * Math.max(...levels.map((t) => short(t).length))); // room for the longest number beside the title
    const f = log ? Math.log : (v) => v;
    const X = (v) => LEFT + (v - x0) / (x1 - x0) * (width - LEFT - RIGHT);
    const Y = (v) => TOP + (f(high) - f(v)) / (f(high) - f(low)) * (HEIGHT - TOP - BOTTOM);
    const last = shown.map((s) => `${s.name} ${decimal(s.y[s.y.length - 1])}`).slice(0, 8).join("; ");
    const drawing = svg("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, width, height: HEIGHT, role: "application", tabindex: 0,
      "aria-roledescription": "line chart",
      "aria-label": `${this.title}, ${this.xTitle} ${x0} to ${x1}. Last values: ${last}. Left and right arrow keys read values.` });
    for (const t of levels) {
      drawing.append(svg("line", { x1: LEFT, x2: width - RIGHT, y1: Y(t), y2: Y(t), class: "gridline" }));
      drawing.append(svg("text", { x: LEFT - 6, y: Y(t) + 4, "text-anchor": "end" }, short(t)));
    }
    for (const t of ticks(x0, x1, Math.max(3, width / 75), 1)) // rounds are whole
      drawing.append(svg("text", { x: X(t), y: HEIGHT - BOTTOM + 16, "text-anchor": X(t) > width - 30 ? "end" : "middle" }, t.toLocaleString("en")));
    drawing.append(svg("line", { x1: LEFT, x2: width - RIGHT, y1: HEIGHT - BOTTOM, y2: HEIGHT - BOTTOM, class: "axis" }));
    drawing.append(svg("text", { x: (LEFT + width - RIGHT) / 2, y: HEIGHT - 4, "text-anchor": "middle" }, this.xTitle));
    drawing.append(svg("text", { x: 12, y: (TOP + HEIGHT - BOTTOM) / 2, "text-anchor": "middle",
      transform: `rotate(-90 12 ${(TOP + HEIGHT - BOTTOM) / 2})` }, this.axis));
    for (const s of shown) {
      const points = s.x.map((x, i) => `${X(x).toFixed(1)},${Y(s.v[i]).toFixed(1)}`).join(" ");
      const look = { class: "curve", "data-run": s.name };
      const mark = s.x.length === 1 ? svg("circle", { ...look, cx: X(s.x[0]), cy: Y(s.v[0]), r: 3.5 }) :
        svg("polyline", { ...look, points, "stroke-dasharray": DASHES[Math.floor(s.index / 8) % 4] });
      mark.style.stroke = colour(s.index);
      if (s.x.length === 1) mark.style.fill = colour(s.index);
      drawing.append(mark);
      if (s.x.length > 1 && s.x.length <= FEW) drawing.append(...s.x.map((x, i) => {
        const dot = svg("circle", { ...look, cx: X(x).toFixed(1), cy: Y(s.v[i]).toFixed(1), r: 2.5 });
        dot.style.fill = dot.style.stroke = colour(s.index);
        return dot;
      }));
    }
    this.cross = svg("line", { y1: TOP, y2: HEIGHT - BOTTOM, class: "cross", visibility: "hidden" });
    this.dots = svg("g");
    drawing.append(this.cross, this.dots);
    this.now = { shown, X, Y, x0, x1, width };
    const at = (event) => {
      const box = drawing.getBoundingClientRect();
      return Math.min(x1, Math.max(x0, x0 + ((event.clientX - box.left) * width / box.width - LEFT) / (width - LEFT - RIGHT) * (x1 - x0)));
    };
    const area = svg("rect", { y: TOP, height: HEIGHT - TOP - BOTTOM, class: "area" });
    drawing.addEventListener("pointermove", (event) => {
      this.read(at(event));
      if (!this.drag) return;
      const [from, to] = [this.drag.x, at(event)].sort((a, b) => a - b);
      area.setAttribute("x", X(from)); area.setAttribute("width", X(to) - X(from));
    });
    drawing.addEventListener("pointerdown", (event) => {
      this.read(at(event));
      if (event.pointerType !== "mouse" || event.button) return; // fingers scroll the page
      this.drag = { x: at(event), left: event.clientX };
      drawing.setPointerCapture(event.pointerId);
      drawing.append(area);
    });
    const release = (event) => {
      const { drag } = this;
      if (!drag) return;
      this.drag = null;
      area.remove();
      if (event.type === "pointerup" && Math.abs(event.clientX - drag.left) > 8) zoomTo([drag.x, at(event)].sort((a, b) => a - b));
      else this.draw();
    };
    drawing.addEventListener("pointerup", release);
    drawing.addEventListener("pointercancel", release);
    drawing.addEventListener("dblclick", () => zoomTo(null));
    drawing.addEventListener("pointerleave", () => this.read(null));
    drawing.addEventListener("keydown", (event) => {
      const ways = { ArrowLeft: -1, ArrowRight: 1 };
      if (event.key === "Escape") { this.read(null); zoomTo(null); }
      if ("+-".includes(event.key)) {
        const share = event.key === "+" ? 0.25 : 1, middle = this.at ?? (x0 + x1) / 2, [first, last] = this.range();
        const next = [Math.max(first, middle - share * (x1 - x0)), Math.min(last, middle + share * (x1 - x0))];
        zoomTo(next[0] <= first && next[1] >= last ? null : next);
      }
      if (!(event.key in ways)) return;
      event.preventDefault();
      const all = [...new Set(shown.flatMap((s) => s.x))].sort((a, b) => a - b);
      const here = this.at === null ? all.length : all.findIndex((x) => x >= this.at);
      this.read(all[Math.min(all.length - 1, Math.max(0, here + ways[event.key]))]);
    });
    const focused = this.box.contains(document.activeElement);
    this.box.replaceChildren(drawing);
    if (focused) drawing.focus({ preventScroll: true });
    if (this.at !== null) this.read(this.at);
    else this.readout.textContent = "";
  }

  read(wanted) {
    const { shown, X, Y } = this.now;
    this.dots.replaceChildren();
    this.cross.setAttribute("visibility", wanted === null ? "hidden" : "visible");
    this.at = wanted;
    if (wanted === null) { this.readout.textContent = ""; return; }
    const found = shown.map((s) => {
      let [a, b] = [0, s.x.length - 1];
      while (a < b) { const m = (a + b) >> 1; if (s.x[m] < wanted) a = m + 1; else b = m; }
      if (a > 0 && wanted - s.x[a - 1] < s.x[a] - wanted) a -= 1;
      return { s, i: a, x: s.x[a] };
    });
    const at = found.reduce((best, one) => (Math.abs(one.x - wanted) < Math.abs(best - wanted) ? one.x : best), found[0].x);
    this.at = at;
    this.cross.setAttribute("x1", X(at)); this.cross.setAttribute("x2", X(at));
    const here = found.filter((one) => one.x === at);
    for (const { s, i } of here) {
      const dot = svg("circle", { cx: X(s.x[i]), cy: Y(s.v[i]), r: 3.5 });
      dot.style.fill = colour(s.index);
      this.dots.append(dot);
    }
    const words = here.slice(0, 12).map(({ s, i }) => (shown.length > 1 ? `${s.name} ` : "") + decimal(s.y[i]));
    this.readout.textContent = `${this.xTitle} ${at.toLocaleString("en")}: ${words.join(" · ")}`;
  }

  drawLegend() {
    const names = this.series.map((s) => s.name).join("\n") + [...this.hidden].join("\n");
    if (this.drawn === names) return;
    this.drawn = names;
    this.legend.replaceChildren(...(this.series.length < 2 ? [] : this.series.map((s) => {
      const swatch = el("span", { class: "swatch" });
      swatch.style.background = colour(s.index);
      return el("button", { type: "button", class: "key", "aria-pressed": String(!this.hidden.has(s.name)), title: "Show or hide this line", on: {
        click: () => { this.hidden.has(s.name) ? this.hidden.delete(s.name) : this.hidden.add(s.name); this.draw(); this.legend.querySelectorAll("button")[this.series.indexOf(s)]?.focus(); },
        pointerenter: () => this.mark(s.name), pointerleave: () => this.mark(""), focus: () => this.mark(s.name), blur: () => this.mark(""),
      } }, swatch, s.name);
    })));
  }

  // linked highlighting: the same run in every chart of the page
  mark(name) {
    for (const line of document.querySelectorAll(".curve")) line.classList.toggle("faint", Boolean(name) && line.dataset.run !== name);
  }
}

// Curves by column, each in a chart of its own that stays while the page does.
export class Gallery {
  constructor(place, { details = false } = {}) { this.place = place; this.charts = new Map(); this.details = details; }

  set(columns, runs, indexOf) {
    const wanted = columns.filter((c) => Boolean(c.detail) === this.details);
    const keys = new Set(wanted.map((c) => c.key));
    for (const [key, chart] of this.charts) if (!keys.has(key)) { chart.remove(); this.charts.delete(key); }
    for (const c of wanted) {
      if (!this.charts.has(c.key)) this.charts.set(c.key, new Chart(this.place, c));
      this.charts.get(c.key).set(Object.entries(runs).filter(([, run]) => c.key in run.curves)
        .map(([name, run]) => ({ name, x: run.curves[c.key][0], y: run.curves[c.key][1], index: indexOf(name) })));
    }
  }
}

export function spark(values, label) {
  const known = values.filter(Number.isFinite);
  const box = svg("svg", { viewBox: "0 0 96 24", class: "spark", role: "img", "aria-label": label });
  if (known.length < 2) return box;
  const [low, high] = [Math.min(...known), Math.max(...known)];
  const y = (v) => (high > low ? 21 - (v - low) / (high - low) * 18 : 12);
  box.append(svg("polyline", { points: values.map((v, i) => `${(i / (values.length - 1) * 92 + 2).toFixed(1)},${y(v).toFixed(1)}`).join(" ") }));
  box.append(svg("circle", { cx: 94, cy: y(values[values.length - 1]), r: 2 }));
  return box;
}

export function drawingOptions() {
  const smooth = document.getElementById("smooth"), log = document.getElementById("log-scale");
  smooth?.addEventListener("change", () => { options.smooth = Number(smooth.value); redraw(); });
  log?.addEventListener("change", () => { options.log = log.checked; redraw(); });
}
