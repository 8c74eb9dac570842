// Some runs side by side: last and best values, the settings by which they differ, and every metric in one chart.

import { $, ask, decimal, el, keep, number, page, runLink, say, status } from "./core.js";
import { drawingOptions, Gallery } from "./chart.js";

const names = JSON.parse(page.runs), at = names.map((name) => `run=${encodeURIComponent(name)}`).join("&");
const curves = new Gallery($("curves")), more = new Gallery($("more-curves"), { details: true });
const summaries = new Map();
let version = 0, colours = [];
const indexOf = (name) => { if (!colours.includes(name)) colours.push(name); return colours.indexOf(name); };

function best(column, curve) {
  if (!column.better) return "";
  return decimal((column.better === "lower" ? Math.min : Math.max)(...curve[1]));
}

function numbers(found) {
  const small = (title) => (/^[A-Z][a-z]/.test(title) ? title[0].toLowerCase() + title.slice(1) : title);
  const shown = found.columns.filter((c) => c.better && !c.detail).slice(0, 6);
  $("numbers").replaceChildren(el("caption", { class: "unseen" }, "Last and best values"),
    el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "run"), el("th", { scope: "col", class: "words short" }, "status"), el("th", { scope: "col" }, "round"),
      ...shown.flatMap((c) => [el("th", { scope: "col" }, small(c.title)), el("th", { scope: "col" }, `best ${small(c.title)}`)]))),
    el("tbody", {}, ...Object.entries(found.runs).map(([name, run]) => {
      const swatch = el("span", { class: "swatch" });
      swatch.style.background = `var(--line-${indexOf(name) % 8})`;
      return el("tr", {}, el("th", { scope: "row" }, swatch, el("a", { href: runLink(name) }, name)), el("td", { class: "words short" }, status(run)), el("td", {}, number(run.round)),
        ...shown.flatMap((c) => { const curve = run.curves[c.key]; return curve ? [el("td", {}, decimal(curve[1].at(-1))), el("td", {}, best(c, curve))] : [el("td", {}, "–"), el("td", {}, "–")]; }));
    })));
}

function settings(chosen) {
  const rows = chosen.map((name) => summaries.get(name)).filter(Boolean);
  const keys = [...new Set(rows.flatMap((run) => Object.keys(run.settings)))].filter((key) => new Set(rows.map((run) => run.settings[key])).size > 1);
  const all = [["seed", (run) => String(run.seed)], ...keys.map((key) => [key, (run) => run.settings[key] ?? "not set"])];
  const told = all.filter(([, of]) => new Set(rows.map(of)).size > 1);
  $("differ-part").hidden = !told.length;
  $("differ").replaceChildren(el("caption", { class: "unseen" }, "Settings by which these runs differ"),
    el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "run"), ...told.map(([key]) => el("th", { scope: "col" }, key)))),
    el("tbody", {}, ...rows.map((run) => el("tr", {}, el("th", { scope: "row" }, run.name), ...told.map(([, of]) => el("td", {}, of(run)))))));
}

keep(async () => {
  const [found, isNew] = await ask(`/api/curves?${at}`);
  const [overview] = await ask(`/api/runs?since=${version}`);
  version = overview.version;
  for (const run of overview.runs) summaries.set(run.name, run);
  if (isNew) {
    numbers(found);
    settings(Object.keys(found.runs));
    curves.set(found.columns, found.runs, indexOf);
    more.set(found.columns, found.runs, indexOf);
    $("more-part").hidden = !found.columns.some((c) => c.detail);
  }
  say("updated", `${Object.keys(found.runs).length} runs. Updated ${new Date().toLocaleTimeString("en-GB")}, every ${page.refresh} s`);
  return overview.reading;
});
drawingOptions();
