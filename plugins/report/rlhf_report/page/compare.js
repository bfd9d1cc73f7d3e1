// Two to six runs: their curves over each other, what differs in what was asked, the same prompts' completions.
import { makeChart, points } from "./chart.js";
import { makeCurves } from "./curves.js";
import { get, isFrozen, Refused } from "./data.js";
import { breakable, chip, clock, el, exact, number, table } from "./dom.js";
import { choose, link } from "./route.js";
import { chartsOf, makeRows } from "./run.js";

// In a report all stages, one after the other, where none was chosen.
export async function showComparison([, list], query) {
  const ids = (list ?? "").split(",").filter(Boolean);
  const answer = await get("compare", { runs: ids.join(",") });
  const head = [el("h1", {}, `${ids.length} runs`), runsTable(answer.runs)];
  const path = [["compare", ""]];
  if (!answer.stages.length)
    return { title: "Compare", path, content: [head, el("p", { class: "note" }, "They have no stage.")] };
  const isWhole = isFrozen() && !query.stage;
  const chosen = answer.stages.find(({ name }) => name === query.stage) ?? answer.stages.at(-1);
  const { settings, controls } = makeCurves(query, () => views.forEach((view) => view.redraw()));
  const views = await Promise.all(
    (isWhole ? answer.stages : [chosen]).map((stage) => stageView(stage, answer.runs, query, settings)),
  );
  const tabs = el(
    "nav",
    { class: "tabs", "aria-label": "Stages" },
    answer.stages.map(({ name }) =>
      el(
        "a",
        {
          class: "tab",
          href: link(["compare", list], { ...query, stage: name }),
          "aria-current": !isWhole && name === chosen.name ? "page" : null,
          "data-key": `tab ${name}`,
        },
        name,
      ),
    ),
  );
  return {
    title: "Compare",
    path,
    content: [
      head,
      tabs,
      el("div", { class: "tools" }, controls),
      views.map((view) => el("section", { class: "stage" }, isWhole ? view.title : null, view.content)),
    ],
    refresh: isFrozen() ? null : () => Promise.all(views.map((view) => view.refresh())),
    drawn: () => views.forEach((view) => view.redraw()),
  };
}

// A stage of all runs: what differs, its curves, its last values, the replies to the same prompts.
async function stageView(stage, runs, query, settings) {
  const names = runs.map(({ name }) => name);
  const every = chartsOf(stage).flatMap(perMetric);
  const few = every.filter(({ base }) => !stage.key || stage.key.includes(base));
  const isAll = query.all ? query.all === "1" : isFrozen();
  const shown = isAll || !few.length ? every : few;
  const wanted = shown.flatMap((kind) => kind.names);
  const sources = runs.map((run) => makeRows(run.id, stage.name));
  const grow = () => Promise.all(sources.map((source) => source.grow(wanted, 0).catch(absent)));
  await grow();
  const charts = onceEach(shown, sources).map((kind) => ({
    kind,
    chart: makeChart(kind.title, kind.group, `${stage.name} ${kind.title}`),
  }));

  function redraw() {
    for (const { kind, chart } of charts) {
      const lines = kind.names.flatMap((name) =>
        sources.map(({ log }, i) => ({
          name,
          label: name.startsWith("eval_") ? `${names[i]}, held out` : names[i],
          points: points(log.rows, name, settings.axis, kind.unit ?? 1),
          colour: i,
          dashed: name.startsWith("eval_"),
        })),
      );
      chart.draw(
        lines.filter((line) => line.points.x.length || line.points.missing.length),
        { ...settings, log: settings.log || kind.log },
      );
    }
  }

  async function refresh() {
    if ((await grow()).some(Boolean)) redraw();
  }

  const all = el(
    "button",
    {
      type: "button",
      class: "more",
      "data-key": "more",
      on: { click: () => choose({ all: isAll ? 0 : 1 }) },
    },
    isAll ? "Fold the rest" : "All charts",
  );
  return {
    title: el("h2", {}, stage.name),
    content: [
      differences(stage, names),
      el(
        "div",
        { class: "charts" },
        charts.map(({ chart }) => chart.element),
      ),
      few.length && few.length < every.length ? all : null,
      values(stage, names),
      prompts(stage, names),
    ],
    redraw,
    refresh,
  };
}

// A run may lack a stage that another one has.
function absent(error) {
  if (error instanceof Refused && error.status === 404) return false;
  throw error;
}

// A chart of each metric beside its held-out twin: the colours tell the runs apart, not the metrics.
function perMetric(kind) {
  const bases = [...new Set(kind.names.map((name) => name.replace(/^eval_/, "")))];
  const title = (base) => (bases.length > 1 ? `${kind.title}: ${base}` : kind.title);
  return bases.map((base) => ({
    ...kind,
    base,
    of: kind.title,
    title: title(base),
    names: kind.names.filter((name) => name.replace(/^eval_/, "") === base),
  }));
}

// Leave out a metric whose curves are those of another one of its kind in every run, as `reward` and a single reward's.
function onceEach(kinds, sources) {
  const curve = (name) => JSON.stringify(sources.map(({ log }) => log.rows.map((row) => row[name] ?? null)));
  const isFlat = (name) => sources.every(({ log }) => log.rows.every((row) => !row[name]));
  const kept = [];
  for (const kind of kinds) {
    const curves = Object.fromEntries(kind.names.map((name) => [name.replace(kind.base, ""), curve(name)]));
    const twin = kept.find(
      (other) =>
        other.kind.of === kind.of && Object.entries(curves).every(([part, drawn]) => other.curves[part] === drawn),
    );
    if (twin && !kind.names.every(isFlat)) twin.kind.title += ` = ${kind.base}`;
    else kept.push({ kind: { ...kind }, curves });
  }
  return kept.map(({ kind }) => kind);
}

function runsTable(runs) {
  const rows = runs.map(({ id, name, dir, state, seconds }, i) => [
    [el("i", { class: `swatch c${i}` }), el("a", { href: link(["run", id]) }, breakable(name))],
    chip(state),
    clock(seconds),
    el("span", { class: "prose" }, breakable(dir)),
  ]);
  return table("Runs", ["run", "state", "took", "directory"], rows, { class: "events" });
}

function values(stage, names) {
  const rows = (stage.last ?? []).map(({ name, values: last }) => [
    breakable(name),
    ...last.map((value) => el("span", { title: exact(value) }, number(value))),
  ]);
  const title = stage.saved?.some(Number.isFinite) ? "Values of the saved models" : "Last values";
  const caption = `${stage.name}: ${title}`;
  return rows.length ? el("section", {}, el("h3", {}, title), table(caption, ["metric", ...names], rows)) : null;
}

function differences(stage, names) {
  const rows = (stage.differences ?? []).map(({ name, values: texts }) => [
    breakable(name),
    ...texts.map((text) => el("code", {}, text ?? "–")),
  ]);
  return el(
    "section",
    {},
    el("h3", {}, "What differs in the configuration"),
    rows.length
      ? table(`${stage.name}: what differs`, ["field", ...names], rows, { class: "events" })
      : el("p", { class: "note" }, "The configurations of this stage are the same."),
  );
}

function prompts(stage, names) {
  const all = stage.prompts ?? [];
  if (!all.length) return null;
  const one = (completion, i) =>
    el(
      "article",
      { class: "completion" },
      el("h4", {}, el("i", { class: `swatch c${i}` }), names[i]),
      completion
        ? [
            el(
              "p",
              { class: "rewards" },
              el("b", {}, number(completion.reward)),
              Number.isFinite(completion.update) ? el("span", {}, `update ${completion.update}`) : null,
            ),
            el("div", { class: "text", tabindex: "0" }, completion.text),
          ]
        : el("p", { class: "note" }, "none of this prompt"),
    );
  const group = ({ row, prompt, completions }) =>
    el(
      "section",
      { class: "group item", tabindex: "-1", "data-key": `prompt ${row}` },
      el("h4", {}, `row ${row}`),
      el("div", { class: "text prompt" }, prompt),
      el("div", { class: "completions" }, completions.map(one)),
    );
  return el("section", {}, el("h3", {}, "The same prompts"), all.map(group));
}
