// Two to six runs: their curves over each other, what differs in what was asked, the same prompts' completions.
import { makeChart, points } from "./chart.js";
import { makeCurves } from "./curves.js";
import { get, isFrozen } from "./data.js";
import { breakable, chip, clock, el, exact, number, replace, table } from "./dom.js";
import { choose, link } from "./route.js";
import { chartsOf, makeRows } from "./run.js";

export async function showComparison([, list], query) {
  const ids = (list ?? "").split(",").filter(Boolean);
  const answer = await get("compare", { runs: ids.join(",") });
  const stage = answer.stages.find(({ name }) => name === query.stage) ?? answer.stages.at(-1);
  const names = answer.runs.map(({ name }) => name);
  const head = [el("h1", {}, `${ids.length} runs`), runsTable(answer.runs, names)];
  const path = [["compare", ""]];
  if (!stage)
    return { title: "Compare", path, content: [head, el("p", { class: "note" }, "They have no stage in common.")] };
  const { settings, controls } = makeCurves(query, () => redraw());
  const every = chartsOf(stage).flatMap(perMetric);
  const few = every.filter(({ base }) => !stage.key || stage.key.includes(base));
  const isAll = query.all ? query.all === "1" : isFrozen();
  const shown = isAll || !few.length ? every : few;
  const wanted = shown.flatMap((kind) => kind.names);
  const sources = answer.runs.map((run) => makeRows(run.id, stage.name));
  await Promise.all(sources.map((source) => source.grow(wanted, 0)));
  const charts = onceEach(shown, sources).map((kind) => ({
    kind,
    chart: makeChart(kind.title, kind.group, kind.title),
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
    const changed = await Promise.all(sources.map((source) => source.grow(wanted, 0)));
    if (changed.some(Boolean)) redraw();
  }

  const tabs = el(
    "nav",
    { class: "tabs", "aria-label": "Stages" },
    answer.stages.map(({ name }) =>
      el(
        "a",
        {
          class: "tab",
          href: link(["compare", list], { ...query, stage: name }),
          "aria-current": name === stage.name ? "page" : null,
          "data-key": `tab ${name}`,
        },
        name,
      ),
    ),
  );
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
  const tools = el("div", { class: "tools" }, controls);
  const board = el("div", { class: "charts" });
  return {
    title: "Compare",
    path,
    content: [
      head,
      tabs,
      differences(stage, names),
      tools,
      board,
      few.length && few.length < every.length ? all : null,
      values(stage, names),
      prompts(stage, names),
    ],
    refresh: isFrozen() ? null : refresh,
    drawn() {
      replace(
        board,
        charts.map(({ chart }) => chart.element),
      );
      redraw();
    },
  };
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
  const kept = [];
  for (const kind of kinds) {
    const curves = kind.names.map((name) => sources.map(({ log }) => log.rows.map((row) => row[name] ?? null)));
    const drawn = JSON.stringify(curves);
    const twin = kept.find((other) => other.kind.of === kind.of && other.drawn === drawn);
    const isFlat = curves.flat(2).every((value) => !value);
    if (twin && !isFlat) twin.kind.title += ` = ${kind.base}`;
    else kept.push({ kind: { ...kind }, drawn });
  }
  return kept.map(({ kind }) => kind);
}

function runsTable(runs, names) {
  const rows = runs.map(({ id, dir, state, seconds }, i) => [
    [el("i", { class: `swatch c${i}` }), el("a", { href: link(["run", id]) }, breakable(names[i]))],
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
  return rows.length ? el("section", {}, el("h2", {}, title), table(title, ["metric", ...names], rows)) : null;
}

function differences(stage, names) {
  const rows = (stage.differences ?? []).map(({ name, values: texts }) => [
    breakable(name),
    ...texts.map((text) => el("code", {}, text ?? "–")),
  ]);
  return el(
    "section",
    {},
    el("h2", {}, "What differs in the configuration"),
    rows.length
      ? table("What differs", ["field", ...names], rows, { class: "events" })
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
      el("h3", {}, `row ${row}`),
      el("div", { class: "text prompt" }, prompt),
      el("div", { class: "completions" }, completions.map(one)),
    );
  return el("section", {}, el("h2", {}, "The same prompts"), all.map(group));
}
