// Curves, bars, heat maps and strips in Plotly: from a record to traces, layout and height.
// `view` holds what the reader chose: log, smoothing, frame, colouring.

const DRAW = {};

// Exponential moving average, as in TensorBoard: with bias correction, gaps skipped.
function smoothed(values, share) {
  if (!share) return values;
  let mean = 0, weight = 0;
  return values.map((value) => {
    if (value === null) return null;
    mean = share * mean + (1 - share) * value;
    weight = share * weight + 1 - share;
    return mean / weight;
  });
}

function legendRows(names, width) {
  const wide = Math.max(...names.map((name) => name.length), 1) * 7 + 52;
  return Math.ceil(names.length / Math.max(1, Math.floor(width / wide)));
}

DRAW.lines = (of, view, t, width) => {
  const traces = [];
  for (const series of of.series) {
    const hue = series.form === "level" ? t.soft : colour(t, series.look);
    for (const band of series.bands) {
      const fill = { x: series.x, line: { width: 0 }, mode: "lines", hoverinfo: "skip", link: series.link, legendgroup: band.name || series.name || series.link };
      traces.push({ ...fill, y: smoothed(band.low, view.smoothing), showlegend: false, name: band.name });
      traces.push({ ...fill, y: smoothed(band.high, view.smoothing), fill: "tonexty", fillcolor: faded(hue, band.strength), showlegend: Boolean(band.name), name: band.name });
    }
    const few = series.x.length <= 40 && ["line", "step"].includes(series.form);
    const line = { color: series.form === "faint" ? faded(hue, 0.45) : hue, width: { line: 2.2, dashed: 2.2, step: 2.2, thin: 1, faint: 1.2, level: 1.2 }[series.form] };
    line.dash = { level: "dot", dashed: "6px,6px" }[series.form] || dash(t, series.look);
    if (series.form === "step") line.shape = "hv";
    if (view.smoothing && series.form === "line") {
      traces.push({ x: series.x, y: series.y, mode: "lines", line: { ...line, width: 1 }, opacity: 0.3, hoverinfo: "skip", showlegend: false, link: series.link, legendgroup: series.name || series.link });
    }
    const named = series.name || (series.link || "").replace(/^[a-z]+:/, "");
    traces.push({
      x: series.x, y: series.form === "level" ? series.y : smoothed(series.y, view.smoothing), name: named, line, link: series.link,
      mode: few ? "lines+markers" : "lines", marker: { size: 5, color: hue }, connectgaps: true,
      legendgroup: series.name || series.link, showlegend: Boolean(series.name), hoverinfo: series.form === "level" ? "skip" : undefined,
      hovertemplate: series.form === "level" ? undefined : `%{y:.5~g}<extra>${escaped(named)}</extra>`,
    });
  }
  const named = traces.filter((trace) => trace.showlegend).map((trace) => trace.name);
  const rows = named.length ? legendRows(named, width - 70) : 0;  // it is as wide as the drawing
  const whole = of.series.length <= 10 && !of.series.some((series) => series.form === "faint");
  const height = 290 + 21 * rows;
  const x = { ...axis(t, of.x, false, of.series.flatMap((series) => series.x)), hoverformat: ",.6~g", unifiedhovertitle: { text: `${escaped(of.x.title)} %{x}` } };
  const more = { xaxis: x, yaxis: axis(t, of.y, view.log, of.series.flatMap((series) => [...series.y, ...series.bands.flatMap((band) => [...band.low, ...band.high])])), showlegend: rows > 0, hovermode: whole ? "x unified" : "closest" };
  const found = layout(t, more);
  found.legend.maxheight = 1;
  found.legend.y = -62 / (height - 50 - 21 * rows);
  return { traces, layout: found, height };
};

DRAW.bars = (of, view, t, width) => {
  const traces = of.series.map((series) => {
    const keys = of.x.of === "client" || of.x.names ? places(of.x, series.x.length) : null;
    return {
      type: "bar", x: series.x, y: series.y, name: series.name, showlegend: Boolean(series.name), keys, client: of.x.of === "client",
      marker: { color: colour(t, series.look) }, text: keys, textposition: "none",
      hovertemplate: `${escaped(of.x.title)} ${keys ? "%{text}" : "%{x}"}<br>${escaped(of.y.title)}: %{y:.5~g}<extra>${escaped(series.name)}</extra>`,
    };
  });
  const x = axis(t, of.x, false, of.series.flatMap((series) => series.x));
  const names = of.x.names || [];
  if (names.length && names.length <= Math.max(8, width / 26)) Object.assign(x, { tickvals: names.map((_, n) => n), ticktext: names.map(escaped) });
  const heights = new Map();  // of the stacks
  for (const series of of.series) series.x.forEach((at, n) => heights.set(at, (heights.get(at) || 0) + (series.y[n] || 0)));
  const more = { xaxis: x, yaxis: axis(t, of.y, view.log, [0, ...heights.values()]), barmode: "stack", bargap: 0.18, showlegend: of.series.some((series) => series.name) };
  if (of.level) {
    more.shapes = [{ type: "line", xref: "paper", x0: 0, x1: 1, y0: of.level[1], y1: of.level[1], line: { color: t.lines[1], width: 1.5, dash: "dash" } }];
    // above the drawing, where it hides no bar
    more.annotations = [{ xref: "paper", yref: "paper", x: 1, y: 1, text: `- - ${escaped(of.level[0])} ${short(of.level[1])}`, showarrow: false, xanchor: "right", yanchor: "bottom", font: { size: 11, color: t.lines[1] } }];
    more.margin = { l: 44, r: 12, t: 22, b: 40 };
  }
  return { traces, layout: layout(t, more), height: 290 };
};

DRAW.heat = (of, view, t, width) => {
  const values = of.frames.length ? of.frames[view.frame].values : of.values;
  const down = places(of.down, values.length), across = places(of.across, values[0].length);
  const known = (of.frames.length ? of.frames.map((frame) => frame.values) : [values]).flat(2).filter((value) => value !== null);
  const range = known.reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)], [Infinity, -Infinity]);
  const trace = {
    type: "heatmap", z: values, zmin: of.scale.low ?? range[0], zmax: of.scale.high ?? range[1], hoverongaps: false,
    colorscale: scale(of.scale.diverging ? DIVERGING : HEAT), colorbar: colourBar(t, of.scale.title),
    y: down.map((_, n) => n), x: across.map((_, n) => n), rows: down, columns: across,
    text: values.map((row, n) => row.map((_, m) => `${escaped(of.down.title)} ${escaped(down[n])}, ${escaped(of.across.title)} ${escaped(across[m])}`)),
    hovertemplate: `%{text}<br>${escaped(of.scale.title)}: %{z:.4~g}<extra></extra>`,
  };
  const square = of.down.of === "client" && of.across.of === "client";
  const height = square ? Math.min(440, Math.max(280, width * 0.82)) : Math.min(460, Math.max(270, 130 + 9 * values.length));
  const more = { xaxis: named(t, of.across, across, width / 34), yaxis: { ...named(t, of.down, down, height / 17), autorange: "reversed" }, plot_bgcolor: t.empty };
  return { traces: [trace], layout: layout(t, more), height };
};

// Ticks of a heat map's side: as many names as there is room for.
function named(t, of, names, room) {
  const least = names.length / Math.max(3, room);
  const step = [1, 2, 5, 10, 20, 50, 100, 200, 500].find((one) => one >= least) || Math.ceil(least);
  const counted = names.every((name) => /^\d+$/.test(name)) && !of.names;
  const at = names.map((_, n) => n).filter((n) => (counted ? Number(names[n]) : n) % step === 0);
  const short = (name) => (name.length > 12 ? `${name.slice(0, 11)}…` : name);
  return { ...axis(t, of), tickvals: at, ticktext: at.map((n) => escaped(short(names[n]))), showgrid: false };
}

DRAW.strips = (of, view, t) => {
  const traces = [];
  of.strips.forEach((strip, place) => {
    const hue = colour(t, strip.look);
    const offset = (n) => (of.spread ? place + (((n * 0.618034) % 1) - 0.5) * 0.5 : place);
    const said = [strip.mark !== null ? `${of.words[0]} ${short(strip.mark)}` : "", strip.span ? `${of.words[1]} ${short(strip.span[0])} to ${short(strip.span[1])}` : ""];
    const common = { link: strip.link, showlegend: false, name: strip.name };
    if (strip.span) {
      const [low, high] = strip.span;
      const line = { x: [low, high], y: [place, place], mode: "lines", line: { color: hue, width: 2.4 }, hoverinfo: "skip" };
      const box = { x: [low, high, high, low, low], y: [-0.3, -0.3, 0.3, 0.3, -0.3].map((d) => place + d), fill: "toself", fillcolor: faded(hue, 0.2), mode: "none", hoverinfo: "skip" };
      traces.push({ ...common, ...(of.box ? box : line) });
    }
    traces.push({
      ...common, x: strip.dots, y: strip.dots.map((_, n) => offset(n)), mode: "markers", marker: { color: hue, size: of.spread ? 6 : 8, opacity: 0.65 },
      text: strip.dots.map((_, n) => escaped(strip.names[n] || "")),
      hovertemplate: `%{text} %{x:.5~g}<br>${said.filter(Boolean).map(escaped).join("<br>")}<extra>${escaped(strip.name)}</extra>`,
    });
    if (strip.mark !== null) traces.push({ ...common, x: [strip.mark, strip.mark], y: [place - 0.3, place + 0.3], mode: "lines", line: { color: t.ink, width: 2 }, hoverinfo: "skip" });
  });
  const names = of.strips.map((strip) => escaped(strip.name.length > 22 ? `${strip.name.slice(0, 21)}…` : strip.name));
  const y = { ...axis(t, { title: "" }), visible: of.strips.some((strip) => strip.name), tickvals: names.map((_, n) => n), ticktext: names, range: [names.length - 0.45, -0.55], showgrid: false };
  const all = of.strips.flatMap((strip) => [...strip.dots, ...(strip.span || []), ...(of.zero ? [0] : [])]).filter((value) => value !== null);
  const low = Math.min(...all), high = Math.max(...all), room = 0.05 * (high - low || 1);
  const more = { xaxis: { ...axis(t, of.x), range: [low - room, high + room] }, yaxis: y };
  if (of.zero) more.shapes = [{ type: "line", yref: "paper", y0: 0, y1: 1, x0: 0, x1: 0, line: { color: t.soft, width: 1, dash: "dash" } }];
  return { traces, layout: layout(t, more), height: Math.max(210, 90 + (of.spread ? 44 : 28) * names.length) };
};

function short(value) {
  return value === null ? "" : String(Number(value.toPrecision(4)));
}

// Plotly reads a few tags in texts: names are text.
function escaped(text) {
  return String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
}
