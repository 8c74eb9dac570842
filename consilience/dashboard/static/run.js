// One run: numbers, curves, clients, nodes, environment and clock, refused replies, logs and settings.

import { $, ago, ask, cards, control, decimal, el, keep, number, page, say, sortableHead, sorted, status } from "./core.js";
import { drawingOptions, Gallery } from "./chart.js";

const run = page.run, at = `run=${encodeURIComponent(run)}`;
const curves = new Gallery($("curves")), more = new Gallery($("more-curves"), { details: true });
const order = { key: "client", down: false };
const PAGE = 100;
let clients = null, most = PAGE, shownVersion = -1, logFile = "";

function pairs(place, rows) {
  place.replaceChildren(...rows.flatMap(([key, value]) => [el("dt", {}, key), el("dd", {}, value)]));
  place.parentElement.hidden = !rows.length;
}

function head(found) {
  const summary = found.summary;
  $("state").replaceChildren(status(summary), ...(summary.left ? [el("span", { class: "soft" }, ` ${summary.left} left`)] : []), " ", control(summary, turn) ?? "");
  cards($("cards"), found.facts);
  $("warnings").replaceChildren(...found.warnings.map((text) => el("p", { class: "warn" }, text)));
  pairs($("environment"), found.environment);
  pairs($("machine"), found.machine);
  $("events-part").hidden = !found.events.length;
  $("events").replaceChildren(...found.events.map((event) => el("li", {}, `round ${event.round}: ${event.text}`)));
  say("settings", found.settings);
  nodes(found);
  $("logs-part").hidden = !found.logs.length;
  if (found.logs.length && !found.logs.includes(logFile)) {
    logFile = found.logs[0];
    $("log-file").replaceChildren(...found.logs.map((name) => el("option", { value: name }, name)));
  }
}

function nodes(found) {
  $("nodes-part").hidden = !found.nodes.length && !found.summary.deployed;
  const online = found.nodes.filter((node) => node.online).length, going = found.summary.going;
  const when = going ? "after the last round" : "when the server last wrote";
  say("nodes-said", found.nodes.length ? `${online} of ${found.nodes.length} nodes were online ${when}. Answers are replies to training and to tests.` : "The server has written nothing about its nodes yet.");
  const titles = ["node", "client numbers", "training rows", "state", "joined", "last seen", "answers", "failures", "refused by reason", "last problem"];
  $("nodes").replaceChildren(el("caption", { class: "unseen" }, "Nodes of the deployment"),
    el("thead", {}, el("tr", {}, ...titles.map((title, i) => el("th", { scope: "col", class: i > 7 || i === 3 ? "words short" : "" }, title)))),
    el("tbody", {}, ...found.nodes.map((node) => el("tr", {},
      el("th", { scope: "row" }, node.node), el("td", {}, node.clients.length > 6 ? `${node.clients.length} clients` : node.clients.join(", ") || "–"), el("td", {}, number(node.rows)),
      el("td", { class: "words short" }, el("span", { class: `pill ${!node.online ? "off" : going ? "going" : "done"}` }, node.online ? "online" : "offline")),
      el("td", { class: "when", title: node.joined, dataset: { time: node.joined } }), el("td", { class: "when", title: node.last_seen, dataset: { time: node.last_seen } }),
      el("td", {}, number(node.answered)), el("td", { class: node.failed ? "bad" : "" }, number(node.failed)),
      el("td", { class: "words short" }, node.refused || "none"), el("td", { class: "words" }, node.problem || "none")))));
}

function times() {
  for (const cell of document.querySelectorAll("[data-time]")) cell.textContent = ago(cell.dataset.time);
}

function clientTable() {
  if (!clients) return;
  const wanted = $("client-search").value.toLowerCase();
  const rows = sorted(clients.clients.filter((one) => one.name.toLowerCase().includes(wanted)), order.key, order.down);
  const has = (key) => clients.clients.some((one) => one[key] !== null);
  const columns = [["client", "client", ""], ["rows", "training rows", ""], ["value", clients.main.replaceAll("_", " "), ""], ["personal", "personal model", ""],
    ["weight", "last weight", ""], ["answered", "rounds answered", ""], ["refused", "refused", ""]].filter(([key]) => ["client", "answered", "refused"].includes(key) || has(key));
  $("clients").replaceChildren(el("caption", { class: "unseen" }, "Clients"), el("thead", {}, sortableHead(columns, order, clientTable)),
    el("tbody", {}, ...rows.slice(0, most).map((one) => el("tr", {}, ...columns.map(([key]) => (key === "client" ?
      el("th", { scope: "row" }, el("a", { href: `/client?${at}&client=${one.client}` }, one.name === String(one.client) ? `client ${one.client}` : one.name)) :
      el("td", { class: key === "refused" && one.refused ? "bad" : "" }, (["value", "personal", "weight"].includes(key) ? decimal : number)(one[key]))))))));
  say("clients-said", `${rows.length} of ${clients.count} clients` + (rows.length > most ? `, the first ${most} listed` : "") +
    (clients.reading ? "; the record is long and still being read" : ""));
  $("more-clients").hidden = rows.length <= most;
}

async function log() {
  if (!logFile || !$("logs-part").open) return;
  const [found, isNew] = await ask(`/api/log?${at}&file=${encodeURIComponent(logFile)}`);
  if (!isNew) return;
  const place = $("log"), follows = place.scrollHeight - place.scrollTop - place.clientHeight < 40;
  place.textContent = found.lines.join("\n") || "Nothing yet.";
  if (follows) place.scrollTop = place.scrollHeight;
}

const turn = keep(async () => {
  const [found, isNew] = await ask(`/api/run?${at}`);
  if (isNew) head(found);
  times(); // they pass also while the server writes nothing
  if (found.version !== shownVersion) {
    shownVersion = found.version;
    const [drawn] = await ask(`/api/curves?${at}`);
    curves.set(drawn.columns, drawn.runs, () => 0);
    more.set(drawn.columns, drawn.runs, () => 0);
    $("more-part").hidden = !drawn.columns.some((c) => c.detail);
  }
  const [table, changed] = await ask(`/api/clients?${at}`);
  if (changed) { clients = table; clientTable(); }
  await log();
  say("updated", `Updated ${new Date().toLocaleTimeString("en-GB")}, every ${page.refresh} s` + (found.summary.reading ? "; reading a long record" : ""));
  return found.summary.reading || table.reading;
});

$("client-search").addEventListener("input", () => { most = PAGE; clientTable(); });
$("more-clients").addEventListener("click", () => { most += PAGE; clientTable(); });
$("logs-part").addEventListener("toggle", log);
$("log-file").addEventListener("change", () => { logFile = $("log-file").value; log(); });
drawingOptions();
