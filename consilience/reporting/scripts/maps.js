// Clients in the plane, and on a circle.

DRAW.points = (of, view, t, width) => {
  const frame = of.frames[view.frame], colouring = of.colourings[view.colouring];
  const known = frame.x.map((_, n) => n).filter((n) => frame.x[n] !== null);
  const texts = (which) => which.map((n) => escaped(of.names[n]));
  const labelled = known.length <= 40;
  const sides = labelled ? labelSides(frame, known) : new Map();
  const common = { mode: labelled ? "markers+text" : "markers", textfont: { size: 10, color: t.soft }, type: "scatter" };
  const facts = (n) => of.colourings.map((one) => `${one.title}: ${one.groups.length ? one.groups[n] : short(valuesAt(one, view.frame)[n])}`);
  const traces = [];
  const add = (which, name, marker, legend) => traces.push({
    ...common, name, showlegend: legend, keys: which.map((n) => of.names[n]), client: true,
    x: which.map((n) => frame.x[n]), y: which.map((n) => frame.y[n]), text: texts(which), textposition: which.map((n) => sides.get(n) || "top center"), marker: { size: 11, opacity: 0.9, ...marker },
    customdata: which.map((n) => facts(n).map(escaped).join("<br>")), hovertemplate: "client %{text}<br>%{customdata}<extra></extra>",
  });
  if (colouring.groups.length) {
    const groups = [...new Set(colouring.groups)].sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
    groups.forEach((group, n) => add(known.filter((k) => colouring.groups[k] === group), group, { color: colour(t, n), symbol: n }, groups.length > 1));
  } else {
    const values = valuesAt(colouring, view.frame);
    const all = colouring.values.flat().filter((value) => value !== null);
    add(known, colouring.title, {
      color: known.map((n) => values[n]), colorscale: scale(HEAT), cmin: Math.min(...all), cmax: Math.max(...all),
      colorbar: colourBar(t, colouring.title), line: { width: 1, color: t.soft },
    }, false);
  }
  const xs = of.frames.flatMap((one) => one.x).filter((v) => v !== null), ys = of.frames.flatMap((one) => one.y).filter((v) => v !== null);
  const range = (values) => { const low = Math.min(...values), high = Math.max(...values), room = 0.12 * (high - low || 1); return [low - room, high + room]; };
  // the same limits in every round, so that only clients move
  const more = { xaxis: { ...axis(t, { title: of.axes[0] }), range: range(xs) }, yaxis: { ...axis(t, { title: of.axes[1] }), range: range(ys), scaleanchor: "x" }, showlegend: traces.length > 1 };
  return { traces, layout: layout(t, more), height: Math.min(480, Math.max(320, width * 0.85)) };
};

// Each name on the side of its point that is farthest from other points and from names already placed.
function labelSides(frame, known) {
  const spread = (values) => Math.max(...values) - Math.min(...values) || 1;
  const size = Math.max(spread(known.map((n) => frame.x[n])), spread(known.map((n) => frame.y[n])));
  const offsets = { "top center": [0, 0.06], "bottom center": [0, -0.06], "middle right": [0.05, 0], "middle left": [-0.05, 0] };
  const taken = known.map((n) => [frame.x[n] / size, frame.y[n] / size]), sides = new Map();
  known.forEach((n, at) => {
    let best = -1;
    for (const [side, [dx, dy]] of Object.entries(offsets)) {
      const x = taken[at][0] + dx, y = taken[at][1] + dy;
      const room = Math.min(0.1, ...taken.map(([a, b], other) => (other === at ? 1 : Math.hypot(a - x, b - y))));
      if (room > best + 1e-9) { best = room; sides.set(n, side); }
    }
    const [dx, dy] = offsets[sides.get(n)];
    taken.push([taken[at][0] + dx, taken[at][1] + dy]);
  });
  return sides;
}

// The values of a colouring in a frame; a single set applies to all frames.
function valuesAt(colouring, frame) {
  return colouring.values[Math.min(frame, colouring.values.length - 1)];
}

DRAW.graph = (of, view, t, width) => {
  const angle = (n) => Math.PI / 2 - (2 * Math.PI * n) / of.names.length;
  const x = of.names.map((_, n) => Math.cos(angle(n))), y = of.names.map((_, n) => Math.sin(angle(n)));
  const one = view.frame > 0 ? of.frames[view.frame - 1].edges.map(([a, b]) => [a, b, 1]) : of.edges;
  const most = Math.max(1, ...one.map((edge) => edge[2]));
  const levels = new Map();  // one trace for lines of equal thickness
  for (const [a, b, times] of one) {
    const found = levels.get(times) || { x: [], y: [], ends: [] };
    found.x.push(x[a], x[b], null);
    found.y.push(y[a], y[b], null);
    found.ends.push([a, b]);
    levels.set(times, found);
  }
  const traces = [...levels].map(([times, found]) => ({
    x: found.x, y: found.y, mode: "lines", hoverinfo: "skip", showlegend: false, name: `${times} times`, edges: found.ends,
    line: { color: t.lines[0], width: 0.8 + (3 * times) / most }, opacity: 0.3 + (0.5 * times) / most,
  }));
  const partners = of.names.map(() => new Map());
  for (const [a, b, times] of one) {
    partners[a].set(b, times);
    partners[b].set(a, times);
  }
  const said = partners.map((own) => [...own].sort((p, q) => q[1] - p[1]).slice(0, 8).map(([k, times]) => `${escaped(of.names[k])}${times > 1 ? ` (${times}×)` : ""}`).join(", ") || "nobody");
  const labelled = of.names.length <= 60;
  traces.push({
    x, y, mode: "markers", marker: { size: labelled ? 13 : 6, color: t.lines[1] }, keys: of.names, client: true, showlegend: false,
    text: of.names.map(escaped), customdata: said, hovertemplate: "client %{text}<br>with %{customdata}<extra></extra>",
  });
  if (labelled) traces.push({ x: x.map((v) => 1.12 * v), y: y.map((v) => 1.12 * v), mode: "text", text: of.names.map((name) => escaped(name.slice(0, 10))), textfont: { size: 11, color: t.ink }, hoverinfo: "skip", showlegend: false });
  const bare = { visible: false, range: [-1.3, 1.3] };
  return { traces, layout: layout(t, { xaxis: bare, yaxis: { ...bare, scaleanchor: "x" }, margin: { l: 8, r: 8, t: 8, b: 8 } }), height: Math.min(460, Math.max(320, width * 0.9)) };
};
