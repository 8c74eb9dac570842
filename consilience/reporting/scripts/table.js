// The numbers of a figure as rows: for the CSV file, and for readers who prefer a table to a picture.

const ROWS = {
  lines(of) {
    const banded = of.series.some((series) => series.bands.length);
    const head = ["series", of.x.title, of.y.title, ...(banded ? ["low", "high"] : [])];
    const rows = of.series.flatMap((series) => series.x.map((x, n) => {
      const outer = series.bands[0];
      return [series.name || (series.link || "").replace(/^[a-z]+:/, ""), x, series.y[n], ...(banded ? [outer ? outer.low[n] : null, outer ? outer.high[n] : null] : [])];
    }));
    return [head, ...rows];
  },
  bars(of) {
    const names = of.series.map((series) => series.name || of.y.title);
    const keys = of.series[0] ? places(of.x, of.series[0].x.length) : [];
    if (of.series.length === 1) return [[of.x.title, ...names], ...of.series[0].x.map((x, n) => [of.x.names || of.x.of ? keys[n] : x, of.series[0].y[n]])];
    const all = [...new Set(of.series.flatMap((series) => series.x))].sort((a, b) => a - b);
    return [[of.x.title, ...names], ...all.map((x) => [x, ...of.series.map((series) => series.y[series.x.indexOf(x)] ?? null)])];
  },
  heat(of) {
    const frames = of.frames.length ? of.frames : [{ name: "", values: of.values }];
    const across = places(of.across, frames[0].values[0].length), down = places(of.down, frames[0].values.length);
    const timed = of.frames.length > 0;
    const rows = frames.flatMap((frame) => frame.values.map((row, n) => [...(timed ? [frame.name] : []), down[n], ...row]));
    return [[...(timed ? [of.over] : []), `${of.down.title} \\ ${of.across.title}`, ...across], ...rows];
  },
  strips(of) {
    return [["group", "name", of.x.title, of.words[0] || "mark", "low", "high"], ...of.strips.flatMap((strip) => strip.dots.map((dot, n) => [strip.name, strip.names[n] || n, dot, strip.mark, ...(strip.span || [null, null])]))];
  },
  points(of) {
    const head = [of.over, "client", ...of.axes, ...of.colourings.map((one) => one.title)];
    const rows = of.frames.flatMap((frame, f) => of.names.map((name, n) => [frame.name, name, frame.x[n], frame.y[n], ...of.colourings.map((one) => (one.groups.length ? one.groups[n] : valuesAt(one, f)[n]))]));
    return [head, ...rows.filter((row) => row[2] !== null)];
  },
  graph(of) {
    return [["client", "partner", "times"], ...of.edges.map(([a, b, times]) => [of.names[a], of.names[b], times])];
  },
};

function csv(rows) {
  // a name that begins like a formula must not become one in a spreadsheet
  const cell = (value) => {
    if (value === null || value === undefined) return "";
    if (typeof value === "number") return String(value);
    const text = /^[=+\-@\t\r]/.test(value) ? `'${value}` : value;
    return /[",\n\r]/.test(text) ? `"${text.replace(/"/g, '""')}"` : text;
  };
  return rows.map((row) => row.map(cell).join(",")).join("\n") + "\n";
}

function element(tag, attributes = {}, ...children) {
  const found = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) found.setAttribute(name, value);
  found.append(...children);
  return found;
}

const MOST_ROWS = 300;

function dataTable(rows) {
  const [head, ...body] = rows;
  const line = (cells, tag) => element("tr", {}, ...cells.map((cell, n) => element(n ? tag : "th", n ? {} : { scope: tag === "th" ? "col" : "row" }, cell === null || cell === undefined ? "" : String(cell))));
  const shown = element("table", {}, element("thead", {}, line(head, "th")), element("tbody", {}, ...body.slice(0, MOST_ROWS).map((row) => line(row, "td"))));
  const box = element("div", { class: "table numbers", tabindex: "0", role: "region", "aria-label": "Numbers of the figure" }, shown);
  if (body.length > MOST_ROWS) box.append(element("p", { class: "soft" }, `The first ${MOST_ROWS} of ${body.length} rows; the CSV file has all.`));
  return box;
}

function save(name, content, type) {
  const url = URL.createObjectURL(new Blob([content], { type }));
  const link = element("a", { href: url, download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}
