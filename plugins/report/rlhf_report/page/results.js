// What a stage came to: its metrics as numbers, distributions, completions before and after, scored pairs.
import { card, columnsOf, conversation } from "./cards.js";
import { makeChart } from "./chart.js";
import { breakable, el, exact, number, table } from "./dom.js";

// answer: of the route `results`. Return the elements, and a function that draws what needs its place on the page.
export function results(answer, stage) {
  const charts = answer.charts.map((one) => ({
    one,
    chart: makeChart(one.title, one.group, `${stage.name} ${one.title}`),
  }));
  const content = [
    keyTable(answer.metrics, stage),
    charts.length
      ? [
          el("h3", {}, "Distributions and weights"),
          el(
            "div",
            { class: "charts" },
            charts.map(({ chart }) => chart.element),
          ),
        ]
      : null,
    answer.completions.map((each) => completions(each, stage.name)),
    answer.pairs.length ? pairs(answer.pairs) : null,
    everyMetric(answer.metrics, stage),
    answer.problems.map((text) => el("p", { class: "note" }, text)),
  ];
  const draw = () => {
    for (const { one, chart } of charts) chart.draw(one.lines.map(lineOf), { axis: one.axis, bars: one.bars });
  };
  return { content, draw };
}

function lineOf({ name, x, y, dashed = false, colour = null }, place) {
  return { name, dashed, colour: colour ?? place, points: { x, y, steps: x, missing: [] } };
}

const quantity = (name, value) =>
  value !== null && /^(eval_)?memory\//.test(name) ? `${(value / 1e9).toFixed(2)} GB` : number(value);

const isSame = (a, b) => ["first", "last", "least", "largest", "count"].every((part) => a?.[part] === b?.[part]);

// The metrics that matter, in training and held out; of equal ones, as `reward` and a single reward's mean, the first.
function keyTable(metrics, stage) {
  const byName = new Map(metrics.map((metric) => [metric.name, metric]));
  const shown = [];
  for (const name of stage.key) {
    const [trained, heldOut] = [byName.get(name), byName.get(`eval_${name}`)];
    const isKnown = shown.some(
      (other) => other.trained?.largest && isSame(other.trained, trained) && isSame(other.heldOut, heldOut),
    );
    if (!isKnown) shown.push({ name, trained, heldOut });
  }
  const now = (metric) => {
    const value = metric?.saved ?? metric?.last ?? null;
    return value === null ? "–" : el("b", { title: exact(value) }, quantity(metric.name, value));
  };
  const rows = shown.map(({ name, trained, heldOut }) => [
    breakable(name),
    trained?.count > 1 ? quantity(name, trained.first) : "",
    now(trained),
    heldOut ? now(heldOut) : "",
  ]);
  const last = stage.saved === null ? "last" : `saved, update ${number(stage.saved)}`;
  return rows.length
    ? table(`${stage.name}: first and last values`, ["metric", "first", last, "held out"], rows, { class: "narrow" })
    : null;
}

function everyMetric(metrics, stage) {
  if (!metrics.length) return null;
  const parts = [...(stage.saved === null ? [] : ["saved"]), "first", "last", "least", "largest"];
  const rows = metrics.map((metric) => [
    breakable(metric.name),
    ...parts.map((part) => el("span", { title: exact(metric[part]) }, quantity(metric.name, metric[part]))),
    number(metric.count),
    metric.missing || "",
  ]);
  const head = ["metric", ...parts, "values", "not finite"];
  return el(
    "details",
    { "data-key": `numbers ${stage.name}` },
    el("summary", {}, `All ${metrics.length} metrics as numbers`),
    table(`${stage.name}: all metrics`, head, rows),
  );
}

function completions({ title, updates, sides, same_prompts: isSamePrompts, group, means }, stage) {
  const [first, last] = updates;
  const isBoth = first !== last;
  const middle = group > 1 ? `, each with the completion of median reward among its ${group}` : "";
  const same = [
    `The same prompts at update ${first} and at update ${last}${middle}; those whose mean reward changed most come first.`,
    "▲ and ▼ compare a prompt's mean reward; whether that is more than chance is said above.",
  ];
  const other = [
    `Update ${first} next to update ${last}: their prompts differ,`,
    "so completions at the same quantile of the reward are shown side by side.",
  ];
  let said = [`Update ${first}, the only one that was stored.`];
  if (isBoth) said = isSamePrompts ? same : other;
  const rows = means.map(({ name, before, after }) => [breakable(name), number(before), el("b", {}, number(after))]);
  const caption = `${stage}: means of these completions`;
  return el(
    "section",
    {},
    el("h3", {}, title, isBoth ? ", before and after" : ""),
    el("p", { class: "note" }, said.join(" ")),
    isBoth && rows.length
      ? table(caption, ["mean of these prompts", "before", "after"], rows, { class: "narrow" })
      : null,
    sides.map((side, i) => pair(side, { key: `${stage} ${title} ${i}`, isBoth, isSamePrompts, group, updates })),
  );
}

function pair(side, { key, isBoth, isSamePrompts, group, updates }) {
  const [before, after] = side.means ?? [null, null];
  const hasBoth = before !== null && after !== null;
  const isSame = !hasBoth || number(before) === number(after); // rounding is no change
  const change = isSame ? null : el("span", {}, after > before ? "▲ higher" : "▼ lower");
  const mean = (value) => (group > 1 && value !== null ? el("span", {}, `mean of ${group}: ${number(value)}`) : null);
  const one = (shown, name, facts) => {
    if (!shown) return null;
    const isEqual = name === "after" && shown.text === side.before?.text;
    return card(isEqual ? { ...shown, messages: null, text: null } : shown, {
      head: [el("h4", {}, name), isSamePrompts ? null : question(shown)],
      facts,
    });
  };
  const texts = [
    one(side.before, isBoth ? "before" : `update ${updates[0]}`, [mean(before)]),
    one(side.after, "after", [mean(after), change]),
  ];
  return el(
    "section",
    { class: "group item", tabindex: "-1", "data-key": key },
    isSamePrompts ? question(side) : el("h4", {}, side.place),
    el("div", { class: "completions pair" }, texts),
  );
}

function question({ prompt, asked, columns }) {
  return [
    asked ? conversation(asked) : el("div", { class: "text prompt", tabindex: "0" }, prompt),
    columnsOf(columns),
  ];
}

function pairs(all) {
  const reply = (name, text, scores) =>
    el(
      "article",
      { class: "completion" },
      el("h4", {}, name),
      el(
        "p",
        { class: "rewards" },
        scores.map(({ update, [name]: score }) => [el("span", {}, `update ${update}`), el("b", {}, number(score))]),
      ),
      el("div", { class: "text", tabindex: "0" }, text),
    );
  const one = ({ row, prompt, chosen, rejected, scores }, i) =>
    el(
      "section",
      { class: "group item", tabindex: "-1", "data-key": `pair ${i}` },
      row ? el("h4", {}, row) : null,
      el("p", { class: "note" }, "Both begin, as the model reads them:"),
      el("div", { class: "text prompt", tabindex: "0" }, prompt),
      el("div", { class: "completions pair" }, reply("chosen", chosen, scores), reply("rejected", rejected, scores)),
    );
  return el("section", {}, el("h3", {}, "Held-out pairs"), all.map(one));
}
