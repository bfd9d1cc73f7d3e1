// Rows of a dataset with their losses or scores at an update, and the held-out rows of an evaluation.
import { get } from "./data.js";
import { breakable, el, exact, number, select, signed } from "./dom.js";
import { choose, link } from "./route.js";
import { stageOf } from "./run.js";
import { count, pager, pathTo, searchField, steps } from "./update.js";

const LIMIT = 50;
const SORTS = [
  ["-loss", "largest loss"],
  ["loss", "smallest loss"],
  ["row", "by row"],
];
const CHANGES = [
  ["worst", "got worst"],
  ["best", "got best"],
  ["row", "by row"],
];
const LEAKED = ["leaked", "in the training data, too"];

export async function showRows([, id, stageName, , updateText], query) {
  const run = await get("runs", id);
  const stage = stageOf(run, stageName);
  const update = Number(updateText);
  const sort = query.sort ?? "-loss";
  const answer = await get("runs", id, stage.name, "rows", { update, sort, offset: query.offset ?? 0, limit: LIMIT });
  const content = [
    el("h1", {}, `Rows of update ${number(update)}`),
    steps(stage.rows ?? [], update, (other) => link(["run", id, stage.name, "rows", other], { sort: query.sort })),
    el(
      "div",
      { class: "tools" },
      select("Sort", SORTS, sort, (by) => choose({ sort: by, offset: null })),
    ),
    count(answer, query, "row"),
    el("ol", { class: "rows" }, answer.rows.map(entry)),
    pager(answer, query, LIMIT),
  ];
  return {
    title: `${stage.name}, rows of update ${update}`,
    path: pathTo(run, stage, `rows of update ${update}`),
    content,
  };
}

export async function showEvaluation([, id, stageName, , updateText], query) {
  const run = await get("runs", id);
  const stage = stageOf(run, stageName);
  const update = Number(updateText);
  const [answer, all] = await Promise.all([
    get("runs", id, stage.name, "evaluations", updateText),
    get("runs", id, stage.name, "evaluations"),
  ]);
  const evaluations = all.evaluations ?? [];
  const metrics = Object.entries(evaluations.find((each) => each.update === update)?.metrics ?? {});
  const hasChange = answer.rows.some((row) => Number.isFinite(row.change));
  const leaks = answer.rows.filter(({ leak }) => leak).length;
  const sorts = [...(hasChange ? CHANGES : CHANGES.slice(2)), ...(leaks ? [LEAKED] : [])];
  const sort = sorts.some(([by]) => by === query.sort) ? query.sort : sorts[0][0];
  const shown = ordered(answer, sort).filter((row) =>
    (row.text ?? "").toLowerCase().includes((query.search ?? "").toLowerCase()),
  );
  const offset = Number(query.offset ?? 0);
  const page = { rows: shown.slice(offset, offset + LIMIT), total: shown.length, left_out: answer.left_out };
  const content = [
    el("h1", {}, `Evaluation at update ${number(update)}`),
    steps(stage.evaluations ?? [], update, (other) =>
      link(["run", id, stage.name, "evaluation", other], { sort: query.sort }),
    ),
    el(
      "dl",
      { class: "last" },
      metrics.map(([name, value]) =>
        el("div", {}, el("dt", {}, breakable(name)), el("dd", { title: exact(value) }, number(value))),
      ),
    ),
    el(
      "div",
      { class: "tools" },
      searchField(query, "search these rows"),
      select("Sort", sorts, sort, (by) => choose({ sort: by, offset: null })),
    ),
    leaks
      ? el(
          "p",
          { class: "leak" },
          `⚠ ${number(leaks)} of these ${number(answer.rows.length)} rows have a prompt that the training data have, too; each names the first such row.`,
        )
      : null,
    hasChange
      ? el(
          "p",
          { class: "note" },
          `A change is the ${answer.of} less that of the evaluation at update ${number(answer.before)}: ` +
            `${answer.falls ? "a fall" : "a rise"} is better.`,
        )
      : null,
    count(page, query, "row"),
    el("ol", { class: "rows" }, page.rows.map(entry)),
    pager(page, query, LIMIT),
  ];
  return {
    title: `${stage.name}, evaluation at update ${update}`,
    path: pathTo(run, stage, `evaluation at update ${update}`),
    content,
  };
}

// Sort the rows of an evaluation; a loss is better where it falls, all else where it rises.
function ordered({ rows, falls }, sort) {
  if (sort === "row") return rows;
  if (sort === "leaked") return [...rows].sort((a, b) => Boolean(b.leak) - Boolean(a.leak));
  const sign = (sort === "worst") === falls ? -1 : 1;
  return [...rows].sort((a, b) => sign * ((a.change ?? 0) - (b.change ?? 0)));
}

function entry(row) {
  const values = Object.entries({
    ...(Number.isFinite(row.loss) ? { loss: row.loss } : {}),
    ...row.scores,
    ...row.values,
  });
  const change = Number.isFinite(row.change)
    ? el("span", { class: "change", title: exact(row.change) }, `change ${signed(row.change)}`)
    : null;
  return el(
    "li",
    { class: "row item", tabindex: "-1", "data-key": `row ${row.row}` },
    el(
      "p",
      { class: "rewards" },
      el("b", {}, row.where ?? `row ${row.row}`),
      values.map(([name, value]) => el("span", {}, `${name} `, el("b", { title: exact(value) }, number(value)))),
      change,
      row.leak ? el("span", { class: "leak" }, `⚠ the same prompt as ${row.leak} of the training data`) : null,
    ),
    el("div", { class: "text" }, row.text),
  );
}
