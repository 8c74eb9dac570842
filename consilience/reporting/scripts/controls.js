// Buttons of a figure, the toolbar of a page, and the entry point.

function button(text, title, act, pressed) {
  const found = element("button", { type: "button", title, ...(pressed === undefined ? {} : { "aria-pressed": String(pressed) }) }, text);
  found.addEventListener("click", () => act(found));
  return found;
}

function tools(figure) {
  const { of, view, box, name } = figure;
  const bar = element("div", { class: "tools", role: "toolbar", "aria-label": `${of.title}: tools` });
  const positive = { lines: (s) => s.y, bars: (s) => s.y }[of.kind];
  if (positive && of.series.every((s) => positive(s).every((value) => value === null || value > 0)) && of.series.length) {
    bar.append(button("log", "Logarithmic scale", (self) => {
      view.log = !view.log;
      self.setAttribute("aria-pressed", String(view.log));
      figure.reset = true;
      draw(figure);
    }, false));
  }
  if (of.kind !== "graph") bar.append(button("reset", "Show everything again (or double-click the figure)", () => { figure.reset = true; draw(figure); }));
  bar.append(button("numbers", "Show the numbers as a table", (self) => {
    const open = box.querySelector(".numbers");
    if (open) open.remove();
    else box.querySelector("figcaption").before(dataTable(ROWS[of.kind](of)));
    self.setAttribute("aria-pressed", String(!open));
  }, false));
  const picture = (format) => async () => {
    const size = { format, width: Math.max(640, figure.plot.clientWidth), height: figure.plot.clientHeight, scale: format === "png" ? 2 : 1 };
    const paper = { ...figure.base.layout, paper_bgcolor: css("--page") };
    const url = await Plotly.toImage({ data: figure.plot.data, layout: { ...paper, height: undefined } }, size);
    const link = element("a", { href: url, download: `${name}.${format}` });
    link.click();
  };
  bar.append(button("SVG", "Save as SVG", picture("svg")), button("PNG", "Save as PNG", picture("png")));
  bar.append(button("CSV", "Save the numbers", () => save(`${name}.csv`, csv(ROWS[of.kind](of)), "text/csv")));
  return bar;
}

// A slider over rounds, and the choice of colouring.
function choices(figure) {
  const { of, view } = figure;
  const line = element("div", { class: "choices" });
  const first = of.kind === "graph" ? 0 : 1;
  const frames = of.frames || [];
  if (frames.length > 1 || (of.kind === "graph" && frames.length)) {
    const last = frames.length + (first ? -1 : 0);
    view.frame = first ? last : 0;
    const said = element("output");
    const slider = element("input", { type: "range", min: "0", max: String(last), step: "1", "aria-label": `${of.title}: ${of.over}` });
    const show = () => {
      const frame = frames[view.frame - (first ? 0 : 1)];
      said.textContent = !frame ? `all ${of.over}s` : /^\d/.test(frame.name) ? `${of.over} ${frame.name}` : frame.name;
      slider.setAttribute("aria-valuetext", said.textContent);
      slider.value = String(view.frame);
    };
    const go = (frame) => { view.frame = frame; show(); if (figure.drawn) draw(figure); };
    slider.addEventListener("input", () => { stop(); go(Number(slider.value)); });
    let timer = 0;
    const play = button("▶", "Play", () => (timer ? stop() : start()));
    const stop = () => { clearInterval(timer); timer = 0; play.textContent = "▶"; play.title = "Play"; };
    const start = () => {
      if (view.frame >= last) go(0);
      play.textContent = "❚❚";
      play.title = "Pause";
      timer = setInterval(() => (view.frame < last ? go(view.frame + 1) : stop()), 500);
    };
    play.setAttribute("aria-label", `${of.title}: play over ${of.over}s`);
    show();
    line.append(play, slider, said);
  }
  if (of.colourings && of.colourings.length > 1) {
    const select = element("select", {}, ...of.colourings.map((one, n) => element("option", { value: String(n) }, one.title)));
    select.addEventListener("change", () => { view.colouring = Number(select.value); draw(figure); });
    line.append(element("label", {}, "colour ", select));
  }
  return line;
}

// One toolbar for all figures: shown methods, highlighted client, smoothing.
function pageBar(main) {
  const methods = new Map(), clients = new Set();
  let curves = false;
  for (const { of } of figures.values()) {
    for (const s of of.series || of.strips || []) if (s.link && s.link.startsWith("method:")) methods.set(s.link, methods.has(s.link) ? Math.min(s.look, methods.get(s.link)) : s.look);
    for (const of_axis of [of.down, of.x]) if (of_axis && of_axis.of === "client") places(of_axis, (of.values || (of.series && of.series[0].x) || []).length).forEach((name) => clients.add(name));
    curves = curves || (of.kind === "lines" && of.series.some((s) => s.x.length > 5 && s.form !== "step"));
  }
  const bar = element("div", { class: "figurebar", role: "toolbar", "aria-label": "All figures" });
  if (methods.size > 1) {
    const chips = element("div", { class: "chips" });
    for (const [link, look] of methods) {
      const chip = button("", "Show or hide in all figures", () => toggle(link), true);
      const swatch = element("span", { class: "swatch" });
      swatch.style.background = `var(--line-${look % 8})`;
      chip.append(swatch, link.slice(7));
      chip.dataset.link = link;
      chip.addEventListener("mouseenter", () => point(link));
      chip.addEventListener("mouseleave", () => point(null));
      chip.addEventListener("focus", () => point(link));
      chip.addEventListener("blur", () => point(null));
      chips.append(chip);
    }
    bar.append(chips);
  }
  if (clients.size > 1) {
    const select = element("select", { class: "client" }, element("option", { value: "" }, "none"), ...[...clients].map((name) => element("option", { value: name }, name)));
    select.addEventListener("change", () => { state.pinned = select.value ? `client:${select.value}` : null; markAll(); });
    bar.append(element("label", {}, "mark client ", select));
  }
  if (curves) {
    const slider = element("input", { type: "range", min: "0", max: "0.95", step: "0.05", value: "0" });
    const said = element("output", {}, "0");
    slider.addEventListener("input", () => { state.smoothing = Number(slider.value); said.textContent = slider.value; redraw(); });
    bar.append(element("label", {}, "smoothing ", slider), said);
  }
  if (bar.childElementCount) main.before(bar);
}

function mount(root, data) {
  for (const box of root.querySelectorAll("figure[data-figure]")) {
    const name = box.dataset.figure, of = data[name];
    if (!of || figures.has(name)) continue;
    const figure = { name, of, box, view: { log: false, smoothing: 0, frame: 0, colouring: 0 }, drawn: false };
    figure.plot = element("div", { class: "plot", role: "group", "aria-label": `${of.title}. The button "numbers" shows it as a table.` });
    figures.set(name, figure);
    box.querySelector(".drawing").after(figure.plot, choices(figure));
    box.querySelector("h3").after(tools(figure));
    visible.observe(box);
  }
}

// New numbers for a figure that is on the page; the reader's choices stay.
function update(name, of) {
  const figure = figures.get(name);
  if (!figure) return false;
  figure.of = of;
  figure.view.frame = Math.min(figure.view.frame, Math.max(0, (of.frames || []).length - 1));
  figure.stale = true;
  if (figure.drawn && figure.inSight) draw(figure);
  return true;
}

async function begin() {
  const text = await unpacked("figure-data");
  if (!text) return;
  await loadPlotly();
  if (!window.Plotly) return;
  mount(document, JSON.parse(text));
  const first = document.querySelector(".figures, .grid");
  if (first && figures.size) pageBar(first);
  document.documentElement.dataset.figures = "ready";
}

// Expands closed sections for printing, and restores them afterwards.
let unfolded = [];
addEventListener("beforeprint", () => {
  unfolded = [...document.querySelectorAll("details:not([open])")];
  for (const one of unfolded) one.open = true;
});
addEventListener("afterprint", () => { for (const one of unfolded) one.open = false; });

window.consilience = { mount, update, point, pin, toggle, pageBar, figures };
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
if (typeof DecompressionStream !== "undefined") begin();
