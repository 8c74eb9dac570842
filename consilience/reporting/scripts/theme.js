// Colours and layout, taken from the page's stylesheet, for light and dark mode.

const DASHES = ["solid", "dash", "dashdot", "dot"];
const FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", "DejaVu Sans", sans-serif';
// cividis without its darkest end, and red to blue: the colours of the pictures
const HEAT = ["#0e2f62", "#2a4470", "#45556e", "#5c666f", "#737873", "#8b8b76", "#a69f71", "#c3b466", "#e1cb54", "#fee838"];
const DIVERGING = ["#67001f", "#c13639", "#f09c7b", "#fbe6da", "#f7f7f7", "#dcebf4", "#87beda", "#2f79b5", "#053061"];

function css(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function theme() {
  const lines = [];
  for (let n = 0; n < 8; n++) lines.push(css(`--line-${n}`));
  return { ink: css("--ink"), soft: css("--soft"), rule: css("--rule"), card: css("--card"), empty: css("--empty"), mark: css("--mark"), lines };
}

function colour(t, look) {
  return t.lines[look % t.lines.length];
}

function dash(t, look) {
  return DASHES[Math.floor(look / t.lines.length) % DASHES.length];
}

function faded(hex, strength) {
  const n = parseInt(hex.slice(1), 16);
  return `rgba(${n >> 16}, ${(n >> 8) & 255}, ${n & 255}, ${strength})`;
}

function scale(colours) {
  return colours.map((one, n) => [n / (colours.length - 1), one]);
}

function colourBar(t, title) {
  return { title: { text: title, side: "right", font: { size: 12 } }, thickness: 12, outlinewidth: 0, len: 1, tickfont: { size: 11 }, x: 1.01, xpad: 4 };
}

// An axis by its record; `values` are those along it.
function axis(t, of, log, values = []) {
  const found = {
    title: { text: of.title, standoff: 8 }, gridcolor: t.rule, linecolor: t.soft, tickcolor: t.soft, zeroline: false,
    automargin: true, tickfont: { size: 11 }, ticks: "outside", ticklen: 4,
  };
  const low = values.reduce((least, one) => (one === null ? least : Math.min(least, one)), Infinity);
  const high = values.reduce((most, one) => (one === null ? most : Math.max(most, one)), -Infinity);
  if (log) found.type = "log";
  else if (of.unit === "whole") {
    Object.assign(found, { tickformat: ",.8~g" }, high - low <= 8 ? { tick0: 0, dtick: 1 } : { nticks: 8 });
  } else if (low === high) { // a single value: Plotly would show one unit on both sides of it, and so an accuracy below 0
    const room = 0.1 * Math.abs(low) || 0.1;
    found.range = [low < 0 ? low - room : Math.max(low - room, -0.05 * room), high + room];
  }
  return found;
}

function layout(t, more) {
  return {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: FONT, size: 12, color: t.ink },
    margin: { l: 44, r: 12, t: 10, b: 40 },
    hoverlabel: { bgcolor: t.card, bordercolor: t.rule, font: { color: t.ink, size: 12, family: FONT } },
    legend: { orientation: "h", x: 0, y: -0.22, yanchor: "top", font: { size: 12 }, bgcolor: "rgba(0,0,0,0)" },
    showlegend: false, dragmode: "zoom", hovermode: "closest", ...more,
  };
}

// Names of an axis' places; the keys by which clients are known in all figures.
function places(of, count) {
  return of.names ? of.names : Array.from({ length: count }, (_, n) => String(n + (of.first || 0)));
}
