// Finds the figures of a page, draws the visible ones, and links their interaction.

const state = { pinned: null, hovered: null, hidden: new Set(), smoothing: 0 };
const figures = new Map();  // name -> { name, of, box, plot, view, drawn }

async function unpacked(id) {
  const block = document.getElementById(id);
  if (!block) return null;
  const bytes = Uint8Array.from(atob(block.textContent), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).text();
}

async function loadPlotly() {
  if (window.Plotly) return;
  const script = document.createElement("script");
  script.textContent = await unpacked("plotly");
  document.head.append(script);
}

// --- drawing

const visible = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    const figure = figures.get(entry.target.dataset.figure);
    if (!figure) continue;
    figure.inSight = entry.isIntersecting;
    if (figure.inSight && (!figure.drawn || figure.stale)) draw(figure);
  }
}, { rootMargin: "300px" });

function draw(figure) {
  const { of, view, plot } = figure;
  figure.box.classList.add("interactive");
  const t = theme();
  view.smoothing = state.smoothing;
  const found = DRAW[of.kind](of, view, t, plot.clientWidth || 400);
  for (const trace of found.traces) if (trace.link && state.hidden.has(trace.link)) trace.visible = trace.showlegend ? "legendonly" : false;
  found.layout.height = found.height;
  const beside = found.layout.yaxis.ticktext || [];  // names at the left take room
  wrapTitle(found.layout.xaxis, (plot.clientWidth || 400) - 60 - 6 * Math.max(0, ...beside.map((name) => name.length - 4)));
  wrapTitle(found.layout.yaxis, found.height - 70);
  if (figure.drawn && !figure.reset) keepZoom(plot, found.layout);
  figure.reset = figure.stale = false;
  figure.base = found;
  const config = { displayModeBar: false, responsive: true, doubleClick: "reset" };
  Plotly.react(plot, found.traces, found.layout, config).then(() => {
    if (!figure.drawn) listen(figure);
    figure.drawn = true;
    mark(figure);
  });
}

// A title that is longer than its axis is broken at the space nearest to its middle.
function wrapTitle(axis, room) {
  const text = axis && axis.title && axis.title.text;
  if (!text || text.length * 7 < room) return;
  const spaces = [...text.matchAll(/ /g)].map((hit) => hit.index);
  if (!spaces.length) return;
  const at = spaces.reduce((best, one) => (Math.abs(one - text.length / 2) < Math.abs(best - text.length / 2) ? one : best));
  axis.title.text = `${text.slice(0, at)}<br>${text.slice(at + 1)}`;
}

function keepZoom(plot, next) {
  const now = plot.layout || {};
  for (const name of ["xaxis", "yaxis"]) {
    const zoomed = now[name] && now[name].autorange === false && plot.dataset[name] === "zoomed";
    if (zoomed && now[name].type === next[name].type) Object.assign(next[name], { range: now[name].range, autorange: false });
  }
}

function listen(figure) {
  const { plot } = figure;
  plot.on("plotly_hover", (event) => point(linkOf(figure, event)));
  plot.on("plotly_unhover", () => point(null));
  plot.on("plotly_click", (event) => pin(linkOf(figure, event)));
  plot.on("plotly_legendclick", (event) => {
    const link = event.data[event.curveNumber].link;
    if (!link || link.startsWith("client:")) return true;
    toggle(link);
    return false;
  });
  plot.on("plotly_relayout", (changed) => {
    for (const name of ["xaxis", "yaxis"]) {
      if (`${name}.range[0]` in changed) plot.dataset[name] = "zoomed";
      if (changed[`${name}.autorange`]) delete plot.dataset[name];
    }
  });
}

// --- linked highlighting of a method or client in all figures

function linkOf(figure, event) {
  let at = event.points[0];
  if (event.points.length > 1 && event.yvals) {
    const y = event.yvals[0];
    at = event.points.reduce((best, one) => (Math.abs(one.y - y) < Math.abs(best.y - y) ? one : best));
  }
  const trace = at.data;
  if (trace.link) return trace.link;
  if (trace.type === "heatmap") return figure.of.down.of === "client" ? `client:${trace.rows[at.pointIndex[0]]}` : null;
  return trace.client && trace.keys ? `client:${trace.keys[at.pointIndex ?? at.pointNumber]}` : null;
}

let waiting = 0;
function point(link) {
  state.hovered = link;
  cancelAnimationFrame(waiting);
  waiting = requestAnimationFrame(markAll);
}

function pin(link) {
  state.pinned = link === state.pinned ? null : link;
  for (const select of document.querySelectorAll("select.client")) select.value = state.pinned && state.pinned.startsWith("client:") ? state.pinned.slice(7) : "";
  markAll();
}

function markAll() {
  const link = state.hovered || state.pinned;
  for (const row of document.querySelectorAll("[data-link]")) row.classList.toggle("marked", row.dataset.link === link);
  for (const figure of figures.values()) if (figure.drawn && figure.inSight) mark(figure);
}

function mark(figure) {
  const link = state.hovered || state.pinned, { plot, base } = figure;
  const key = `${link}`;
  if (figure.marked === key && figure.markedOn === base) return;
  Object.assign(figure, { marked: key, markedOn: base });
  const client = link && link.startsWith("client:") ? link.slice(7) : null;
  const affected = link && base.traces.some((trace) => trace.link === link || (trace.keys && trace.keys.includes(client)));
  const kind = link && link.slice(0, link.indexOf(":") + 1);
  const changes = { opacity: [], fillcolor: [], "marker.opacity": [], "marker.line.width": [] };
  const indices = [];
  base.traces.forEach((trace, n) => {
    if (trace.type === "heatmap") return;
    const same = !affected || trace.link === link || (!trace.link || !trace.link.startsWith(kind));
    changes.fillcolor.push(same || !trace.fillcolor ? trace.fillcolor : trace.fillcolor.replace(/[\d.]+\)$/, "0.03)"));
    if (trace.keys) {
      const own = trace.marker.opacity ?? 1;
      changes["marker.opacity"].push(affected && client !== null ? trace.keys.map((name) => (name === client ? 1 : 0.25)) : own);
      changes["marker.line.width"].push(affected && client !== null ? trace.keys.map((name) => (name === client ? 2.5 : 0)) : 0);
      changes.opacity.push(1);
    } else {
      changes.opacity.push((trace.opacity ?? 1) * (same ? 1 : 0.12));
      changes["marker.opacity"].push(trace.marker?.opacity ?? 1);
      changes["marker.line.width"].push(0);
    }
    indices.push(n);
  });
  if (indices.length) Plotly.restyle(plot, changes, indices);
  const heat = base.traces.find((trace) => trace.type === "heatmap");
  if (heat) Plotly.relayout(plot, { shapes: [...(base.layout.shapes || []), ...frames(figure.of, heat, client)] });
}

// Frames around a client's row and column.
function frames(of, heat, client) {
  const found = [], line = { color: theme().lines[1], width: 2 };
  if (client === null) return found;
  const row = of.down.of === "client" ? heat.rows.indexOf(client) : -1;
  const column = of.across.of === "client" ? heat.columns.indexOf(client) : -1;
  if (row >= 0) found.push({ type: "rect", xref: "paper", x0: 0, x1: 1, y0: row - 0.5, y1: row + 0.5, line });
  if (column >= 0) found.push({ type: "rect", yref: "paper", y0: 0, y1: 1, x0: column - 0.5, x1: column + 0.5, line });
  return found;
}

function toggle(link) {
  if (!state.hidden.delete(link)) state.hidden.add(link);
  for (const chip of document.querySelectorAll("button[data-link]")) chip.setAttribute("aria-pressed", String(!state.hidden.has(chip.dataset.link)));
  redraw();
}

function redraw() {
  for (const figure of figures.values()) {
    figure.stale = true;
    if (figure.drawn && figure.inSight) draw(figure);
  }
}
