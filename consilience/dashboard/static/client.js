// One client of a run over rounds: its data, scores, weight, drift and refused replies.

import { $, ask, cards, decimal, el, keep, number, page, say } from "./core.js";
import { drawingOptions, Gallery } from "./chart.js";

const gallery = new Gallery($("curves"));
const MOST_LABELS = 60;

function columns(main) {
  const metric = main.replaceAll("_", " ");
  return [
    { key: main, title: `Global model: ${metric}`, axis: metric, caption: "The global model on this client's own test rows." },
    { key: `personal_${main}`, title: `Personal model: ${metric}`, axis: metric, caption: "The client's own model on its own test rows." },
    { key: "weight", title: "Aggregation weight", axis: "share of the average", caption: "Its share of the average, in rounds that it took part in." },
    { key: "drift", title: "Drift", axis: "distance between the models", caption: "How far its model moved from the one it was sent." },
    { key: "train_loss", title: "Training loss", axis: "training loss", caption: "As the client reports it." },
  ];
}

keep(async () => {
  const [found, isNew] = await ask(`/api/client?run=${encodeURIComponent(page.run)}&client=${page.client}`);
  if (isNew) {
    say("name", found.name === String(found.client) ? "" : `Client ${found.client}: ${found.name}`);
    const metric = found.curves[found.main];
    cards($("cards"), [...(metric ? [[found.main.replaceAll("_", " "), decimal(metric[1].at(-1)), `at round ${metric[0].at(-1)}`]] : []), ["training rows", number(found.rows), ""], ["test rows", number(found.test_rows), ""],
      ["rounds answered", number(found.answered), `of ${found.rounds}`], ["refused replies", number(found.refusals.length), ""]]);
    labels(found.labels);
    gallery.set(columns(found.main).filter((c) => c.key in found.curves), { [found.name]: { curves: found.curves } }, () => 0);
    $("nothing").hidden = Object.keys(found.curves).length > 0;
    $("refusals-part").hidden = !found.refusals.length;
    $("refusals").replaceChildren(...found.refusals.map((one) => el("li", {}, `round ${one.round}: ${one.reason}`)));
  }
  say("updated", `Updated ${new Date().toLocaleTimeString("en-GB")}` + (found.reading ? "; reading a long record" : ""));
  return found.reading;
});

function labels(held) {
  $("labels-part").hidden = !held.length;
  const all = held.reduce((sum, one) => sum + one.rows, 0) || 1;
  $("labels").replaceChildren(el("caption", { class: "unseen" }, "Training rows by label"),
    el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "label"), el("th", { scope: "col" }, "rows"), el("th", { scope: "col", class: "words" }, "share of its rows"))),
    el("tbody", {}, ...held.slice(0, MOST_LABELS).map((one) => {
      const bar = el("span", { class: "bar", "aria-hidden": "true" });
      bar.style.width = `${(75 * one.rows) / all}%`;
      return el("tr", {}, el("th", { scope: "row" }, one.label), el("td", {}, number(one.rows)), el("td", { class: "words barcell" }, bar, `${((100 * one.rows) / all).toFixed(0)} %`));
    })));
}
drawingOptions();
