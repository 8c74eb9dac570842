// All runs: search, filter, sort, group, select; the curves of those selected, or else of those in progress.

import { $, ask, cards, control, decimal, duration, el, keep, number, page, runLink, say, sortableHead, sorted, status } from "./core.js";
import { Chart, drawingOptions, spark } from "./chart.js";

const runs = new Map();
const selected = new Set();
const order = { key: "created", down: true };
const PAGE = 200, MOST_DRAWN = 12;
let version = 0, most = PAGE, differing = [], controlled = false, chart = null, chartKey = "", curveData = null;
const colours = new Map(); // a run keeps its colour while the page is open
const indexOf = (name) => { if (!colours.has(name)) colours.set(name, colours.size); return colours.get(name); };

const columns = () => [
  ["", el("span", { class: "unseen" }, "Selected"), "tick"], ["name", "run", ""], ["", "curve", "words short"],
  ["value", titleOfMetric(), ""], ["status", "status", "words short"], ["best", "best", "wide"], ["loss", "loss", "wide"], ["round", "round", ""], ["clients", "clients", "wide"],
  ["seed", "seed", "wide"], ["refused", "refused", "wide"], ["seconds", "time", "wide"], ["created", "created", "wide"],
  ...(controlled ? [["", "action", "quiet"]] : []),
];

function titleOfMetric() {
  const found = new Set([...runs.values()].map((run) => run.metric?.title).filter(Boolean));
  return found.size === 1 ? [...found][0] : "metric";
}

function matches(run) {
  const wanted = $("status").value;
  if (wanted === "running" && !run.going) return false;
  if (wanted === "finished" && run.status !== "finished") return false;
  if (wanted === "other" && (run.going || run.status === "finished")) return false;
  if (wanted === "deployed" && !run.deployed) return false;
  const words = $("search").value.toLowerCase().split(/\s+/).filter(Boolean);
  if (!words.length) return true;
  const text = [run.name, run.status, run.algorithm, run.data, run.model, `seed=${run.seed}`,
    ...Object.entries(run.settings).map(([key, value]) => `${key}=${value}`)].join(" ").toLowerCase();
  return words.every((word) => (word.startsWith("-") && word.length > 1 ? !text.includes(word.slice(1)) : text.includes(word)));
}

function groupsOf(shown) {
  const by = $("group").value;
  if (!by) return [["", shown]];
  const found = new Map();
  for (const run of shown) {
    const key = by === "settings" ? run.group : by === "folder" ? run.folder : by in run ? run[by] : run.settings[by] ?? "not set";
    found.set(key, [...(found.get(key) || []), run]);
  }
  const first = [...found.values()].map((members) => members[0]);
  return [...found].map(([key, members]) => [by === "settings" ? describe(members[0], first) : `${by} = ${key || "(top)"}`, members]);
}

// The algorithm and data of a group, and the settings that distinguish it from other groups of the same two.
function describe(run, others) {
  const alike = others.filter((one) => one.algorithm === run.algorithm && one.data === run.data);
  const words = Object.entries(run.settings).filter(([key, value]) => !["algorithm.name", "data.name"].includes(key) && alike.some((one) => one.settings[key] !== value))
    .map(([key, value]) => `${key.replace(/^algorithm\./, "")}=${value}`);
  return [`${run.algorithm} on ${run.data}`, ...words].join(", ");
}

function spread(members) {
  const known = members.map((run) => run.value).filter(Number.isFinite);
  if (!known.length) return "";
  const mean = known.reduce((a, b) => a + b, 0) / known.length;
  const sd = known.length > 1 ? Math.sqrt(known.reduce((a, b) => a + (b - mean) ** 2, 0) / (known.length - 1)) : 0;
  return known.length > 1 ? `${decimal(mean)} ± ${decimal(sd)}` : decimal(mean);
}

// A name that may be broken after each folder.
const parted = (name) => name.split(/(?<=\/)/).flatMap((part, n) => (n ? [el("wbr"), part] : [part]));

function line(run) {
  const box = el("input", { type: "checkbox", "aria-label": `Select ${run.name}`, on: { change: () => { choose(run.name, box.checked); } } });
  box.checked = selected.has(run.name);
  const progress = run.rounds ? el("progress", { max: run.rounds, value: Math.min(run.round, run.rounds), "aria-label": `${run.round} of ${run.rounds} rounds` }) : null;
  const metric = run.metric?.title ?? "metric";
  const row = el("tr", { class: box.checked ? "chosen" : "" },
    el("td", { class: "tick" }, box),
    el("th", { scope: "row" }, el("a", { href: runLink(run.name) }, ...parted(run.name)), run.problem ? el("span", { class: "note bad" }, run.problem) : el("span", { class: "note" }, `${run.algorithm} · ${run.data}`)),
    el("td", { class: "words short" }, spark(run.spark, `${metric} over rounds, now ${decimal(run.value)}`)),
    el("td", { title: metric }, decimal(run.value), titleOfMetric() === "metric" && run.metric ? el("span", { class: "note" }, run.metric.title) : null),
    el("td", { class: "words short" }, status(run), run.deployed ? el("span", { class: "note" }, "deployed") : null),
    el("td", { class: "wide" }, decimal(run.best)), el("td", { class: "wide" }, decimal(run.loss)),
    el("td", {}, `${run.round}${run.rounds ? `/${run.rounds}` : ""}`, run.going && progress ? progress : null, run.left ? el("span", { class: "note" }, `${run.left} left`) : null),
    el("td", { class: "wide" }, number(run.clients)), el("td", { class: "wide" }, String(run.seed)), el("td", { class: run.refused ? "wide bad" : "wide" }, number(run.refused)),
    el("td", { class: "wide" }, run.seconds ? duration(run.seconds) : "–"), el("td", { class: "wide when" }, run.created.slice(0, 16).replace("T", " ")),
    controlled ? el("td", { class: "quiet" }, control(run, turn)) : null);
  return row;
}

function choose(name, on) {
  on ? selected.add(name) : selected.delete(name);
  show();
  draw();
}

function show() {
  const focus = document.activeElement?.getAttribute("aria-label");
  const all = [...runs.values()], shown = sorted(all.filter(matches), order.key, order.down);
  const groups = groupsOf(shown);
  const width = columns().length;
  let left = most;
  const bodies = groups.map(([label, members]) => {
    const rows = members.slice(0, Math.max(0, left));
    left -= rows.length;
    const body = el("tbody", {});
    if (label && rows.length) {
      const box = el("input", { type: "checkbox", "aria-label": `Select the group ${label}`, on: { change: () => {
        for (const run of members.slice(0, 40)) box.checked ? selected.add(run.name) : selected.delete(run.name);
        show(); draw();
      } } });
      box.checked = members.every((run) => selected.has(run.name));
      body.append(el("tr", { class: "group" }, el("td", { class: "tick" }, box),
        el("th", { scope: "rowgroup", colspan: width - 1 }, label, el("span", { class: "note" }, `${members.length} run${members.length > 1 ? "s" : ""}; ${titleOfMetric()} ${spread(members)}`))));
    }
    body.append(...rows.map(line));
    return body;
  });
  $("runs").replaceChildren(el("caption", { class: "unseen" }, "Runs"), el("thead", {}, sortableHead(columns(), order, show)), ...bodies);
  const going = all.filter((run) => run.going).length, done = all.filter((run) => run.status === "finished").length;
  cards($("cards"), all.length ? [["runs", number(all.length), ""], ["running", number(going), ""], ["finished", number(done), ""],
    ["refused replies", number(all.reduce((sum, run) => sum + run.refused, 0)), "in all runs"]] : []);
  say("found", !all.length ? "No run yet: consilience run makes one." :
    `${shown.length} of ${all.length} runs` + (shown.length > most ? `, the first ${most} listed` : "") + (selected.size ? `; ${selected.size} selected` : ""));
  $("more").hidden = shown.length <= most;
  $("compare").disabled = selected.size < 1;
  $("compare").textContent = selected.size ? `Compare ${selected.size} selected` : "Compare selected";
  $("clear").hidden = !selected.size;
  if (focus) document.querySelector(`[aria-label="${CSS.escape(focus)}"]`)?.focus({ preventScroll: true });
}

function drawn() {
  if (selected.size) return [...selected].filter((name) => runs.has(name)).slice(0, MOST_DRAWN);
  const newest = sorted([...runs.values()].filter(matches), "created", true);
  const going = newest.filter((run) => run.going && run.round);
  return (going.length ? going : newest).slice(0, 6).map((run) => run.name);
}

async function draw() {
  const names = drawn();
  if (!names.length) { $("curves").hidden = true; return; }
  $("curves").hidden = false;
  const [found] = await ask(`/api/curves?${names.map((name) => `run=${encodeURIComponent(name)}`).join("&")}`);
  curveData = found;
  const choice = $("metric"), before = choice.value;
  const wanted = found.columns.map((c) => c.key).join();
  if (choice.dataset.keys !== wanted) {
    choice.dataset.keys = wanted;
    choice.replaceChildren(...found.columns.map((c) => el("option", { value: c.key }, c.title)));
    if (found.columns.some((c) => c.key === before)) choice.value = before;
  }
  plot();
}

function plot() {
  const column = curveData?.columns.find((c) => c.key === $("metric").value);
  if (!column) return;
  if (chartKey !== column.key) { chart?.remove(); chart = new Chart($("chart"), column); chartKey = column.key; }
  chart.set(Object.entries(curveData.runs).filter(([, run]) => column.key in run.curves)
    .map(([name, run]) => ({ name, x: run.curves[column.key][0], y: run.curves[column.key][1], index: indexOf(name) })));
  const names = Object.keys(curveData.runs), only = names.length === 1 ? names[0] : "";
  const going = Object.values(curveData.runs).some((run) => run.going);
  say("curves-title", going ? "Live curves" : "Curves");
  say("which", selected.size ? (only || "The selected runs.") : going ? (only ? `${only}, in progress` : "Runs in progress.") : "The newest runs. Select runs below to draw others.");
}

const turn = keep(async () => {
  const [found] = await ask(`/api/runs?since=${version}`);
  const news = found.runs.length || found.names;
  if (found.names) for (const name of [...runs.keys()]) if (!found.names.includes(name)) { runs.delete(name); selected.delete(name); }
  for (const run of found.runs) runs.set(run.name, run);
  controlled = found.control;
  if (found.differing.join() !== differing.join()) {
    differing = found.differing;
    $("settings").replaceChildren(...differing.map((key) => el("option", { value: key }, key)));
  }
  version = found.version;
  if (news || !$("runs").tHead) show();
  if (news) await draw();
  say("updated", `Updated ${new Date().toLocaleTimeString("en-GB")}, every ${page.refresh} s` + (found.reading ? "; reading long records" : ""));
  return found.reading;
});

for (const id of ["search", "status", "group"]) $(id).addEventListener("input", () => { most = PAGE; show(); selected.size || draw(); });
$("metric").addEventListener("change", plot);
$("more").addEventListener("click", () => { most += PAGE; show(); });
$("clear").addEventListener("click", () => { selected.clear(); show(); draw(); $("search").focus(); });
$("compare").addEventListener("click", () => { location.href = `/compare?${[...selected].slice(0, 40).map((name) => `run=${encodeURIComponent(name)}`).join("&")}`; });
document.addEventListener("keydown", (event) => {
  if (event.key === "/" && !/INPUT|SELECT|TEXTAREA/.test(document.activeElement.tagName)) { event.preventDefault(); $("search").focus(); }
});
drawingOptions();
