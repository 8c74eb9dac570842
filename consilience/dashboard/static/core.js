// Shared by all pages: requests with caching, elements, number formats, colours.

const root = document.getElementById("dashboard");
export const page = root.dataset;
export const $ = (id) => document.getElementById(id);

const tags = new Map(); // address -> [entity tag, content]

// The content at an address, and whether it is new. The server answers 304 while nothing has changed.
export async function ask(address) {
  const known = tags.get(address);
  const headers = known ? { "If-None-Match": known[0] } : {};
  const answer = await fetch(address, { headers, cache: "no-store", credentials: "same-origin" });
  if (answer.status === 304) return [known[1], false];
  const content = await answer.json();
  if (!answer.ok) throw new Error(content.error || `the server answered ${answer.status}`);
  const tag = answer.headers.get("etag");
  if (tag) {
    if (tags.size > 50) tags.clear();
    tags.set(address, [tag, content]);
  }
  return [content, true];
}

export async function act(what, run) {
  const answer = await fetch(`/control/${what}`, {
    method: "POST",
    headers: { "Content-Type": "application/json", "X-Consilience-Page": page.secret },
    body: JSON.stringify({ run }),
    credentials: "same-origin",
  });
  const text = await answer.text();
  let content = {};
  try { content = JSON.parse(text); } catch { content = { error: text.trim() }; }
  if (!answer.ok) throw new Error(content.error || `the server answered ${answer.status}`);
  return content;
}

// Calls `update` now and periodically; it pauses while the page is hidden, and after an error it shows it and continues.
export function keep(update) {
  const every = 1000 * Number(page.refresh);
  let timer = 0;
  async function turn() {
    clearTimeout(timer);
    let soon = false;
    try {
      soon = await update();
      say("connection", "");
    } catch (problem) {
      say("connection", `No answer from the dashboard (${problem.message}); trying again.`);
    }
    if (!document.hidden) timer = setTimeout(turn, soon ? 150 : every);
  }
  document.addEventListener("visibilitychange", () => document.hidden || turn());
  turn();
  return turn;
}

export function say(id, text) {
  const place = $(id);
  if (place && place.textContent !== text) place.textContent = text;
}

// An element; text is always text, never markup.
export function el(name, attributes = {}, ...inside) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (key === "on") for (const [event, listener] of Object.entries(value)) made.addEventListener(event, listener);
    else if (key === "dataset") Object.assign(made.dataset, value);
    else if (value === true) made.setAttribute(key, "");
    else made.setAttribute(key, value);
  }
  made.append(...inside.filter((each) => each !== null && each !== undefined));
  return made;
}

export function svg(name, attributes = {}, ...inside) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...inside);
  return made;
}

export function number(value, digits = 4) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  if (Number.isInteger(value)) return value.toLocaleString("en");
  const size = Math.abs(value);
  return size >= 1000 || (size < 0.001 && size > 0) ? value.toExponential(2) : value.toFixed(digits);
}

// A metric: as many digits for 1 as for 0.9375.
export const decimal = (value) => (Number.isInteger(value) && Math.abs(value) < 1000 ? value.toFixed(4) : number(value));

export function duration(seconds) {
  const whole = Math.round(seconds);
  const [h, m, s] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60, whole % 60];
  const two = (n) => String(n).padStart(2, "0");
  return h ? `${h}:${two(m)}:${two(s)}` : `${m}:${two(s)}`;
}

export function ago(time) {
  const seconds = (Date.now() - Date.parse(time)) / 1000;
  if (!Number.isFinite(seconds)) return time || "–";
  if (seconds < 90) return `${Math.max(0, Math.round(seconds))} s ago`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min ago`;
  if (seconds < 129600) return `${Math.round(seconds / 3600)} h ago`;
  return new Date(time).toISOString().slice(0, 10);
}

export const runLink = (name) => `/runs/${name.split("/").map(encodeURIComponent).join("/")}`;
export const colour = (index) => `var(--line-${index % 8})`;

export function cards(place, facts) {
  place.replaceChildren(...facts.map(([label, value, note]) =>
    el("li", {}, el("span", {}, label), el("b", {}, value), note ? el("span", {}, note) : null)));
}

export function status(run) {
  const kind = run.going ? "going" : run.status === "finished" ? "done" : run.status === "created" ? "new" : "off";
  return el("span", { class: `pill ${kind}` }, run.status);
}

// A button that stops or resumes a run, after a confirmation; nothing if that is not possible.
export function control(run, after) {
  if (!run.can) return null;
  const stops = run.can === "stop";
  const button = el("button", { type: "button", class: "small", "aria-label": `${stops ? "Stop" : "Resume"} ${run.name}` },
    stops ? "Stop" : "Resume");
  button.addEventListener("click", async () => {
    if (stops && !confirm(`Stop ${run.name} after the round in progress? It can be resumed.`)) return;
    button.disabled = true;
    try {
      await act(run.can, run.name);
      say("done", stops ? `${run.name} ends after this round.` : `${run.name} is being resumed.`);
    } catch (problem) {
      say("done", problem.message);
    }
    setTimeout(after, 600);
  });
  return button;
}

// Sorts rows by a column; missing values come last in both directions.
export function sorted(rows, key, down) {
  const rank = (row) => { const v = row[key]; return v === "" || v === undefined || Number.isNaN(v) ? null : v; };
  return [...rows].sort((a, b) => {
    const [x, y] = [rank(a), rank(b)];
    if (x === null || y === null) return (x === null) - (y === null);
    const order = typeof x === "number" && typeof y === "number" ? x - y : String(x).localeCompare(String(y), "en", { numeric: true });
    return down ? -order : order;
  });
}

// The head of a table whose columns sort it: `columns` are [key, title, class].
export function sortableHead(columns, state, changed) {
  return el("tr", {}, ...columns.map(([key, title, kind]) => {
    if (!key) return el("th", { scope: "col", class: kind }, title);
    const mine = state.key === key;
    const arrow = mine ? (state.down ? " ↓" : " ↑") : "";
    const button = el("button", { type: "button", class: "sort", on: { click: () => {
      state.down = mine ? !state.down : !["name", "seed", "client"].includes(key);
      state.key = key;
      changed();
    } } }, title + arrow);
    return el("th", { scope: "col", class: kind, "aria-sort": mine ? (state.down ? "descending" : "ascending") : "none" }, button);
  }));
}
