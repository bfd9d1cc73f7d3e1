// The list of runs: how far each is, its last values, and which to compare.
import { sparkline } from "./chart.js";
import { get } from "./data.js";
import { ago, breakable, chip, clock, el, moment, number, replace } from "./dom.js";
import { link, note } from "./route.js";

const MOST = 6;

export async function showRuns(_, query) {
  const chosen = new Set((query.chosen ?? "").split(",").filter(Boolean));
  const list = el("ul", { class: "runs" });
  const count = el("p", { class: "note", role: "status" });
  const compare = el("a", { class: "button" }, "Compare");
  const field = el("input", {
    type: "search",
    placeholder: "filter (/)",
    "aria-label": "Filter the runs",
    value: query.search ?? "",
    "data-key": "filter",
  });
  const entries = new Map();
  const problems = el("ul", { class: "problems" });
  let runs = [];

  // The element of a run, made anew only where the run has changed.
  function entryOf(run) {
    const text = JSON.stringify(run);
    const known = entries.get(run.id);
    if (known?.text === text) return known.element;
    const element = entry(run, chosen, choose);
    entries.set(run.id, { text, element });
    return element;
  }

  function draw() {
    const words = field.value.toLowerCase().split(/\s+/);
    const text = ({ dir, name, state, stage, trainer }) => [dir, name, state, stage, trainer].join(" ").toLowerCase();
    const fitting = runs.filter((run) => words.every((word) => text(run).includes(word)));
    const running = runs.filter(({ state }) => state === "running").length;
    const shown = fitting.map(entryOf);
    const isSame = shown.length === list.childElementCount && shown.every((element, i) => list.children[i] === element);
    if (!isSame) replace(list, shown);
    for (const time of list.querySelectorAll("time")) time.textContent = ago(Number(time.dataset.time));
    replace(
      count,
      runs.length
        ? `${runs.length} run${runs.length > 1 ? "s" : ""}, ${running} running${fitting.length < runs.length ? `; ${fitting.length} shown` : ""}`
        : "No run was found yet. A run appears here as soon as it has begun.",
    );
    drawChoice();
  }

  function drawChoice() {
    const ids = [...chosen].filter((id) => runs.some((run) => run.id === id));
    const fits = ids.length > 1 && ids.length <= MOST;
    compare.textContent = ids.length > MOST ? `at most ${MOST} can be compared` : `Compare ${ids.length || ""}`;
    if (fits) compare.setAttribute("href", link(["compare", ids.join(",")]));
    else compare.removeAttribute("href");
    compare.setAttribute("aria-disabled", String(!fits));
  }

  async function read() {
    const answer = await get("runs");
    runs = answer.runs;
    replace(
      problems,
      (answer.problems ?? []).map((text) => el("li", { class: "message failed" }, text)),
    );
  }

  async function refresh() {
    await read();
    draw();
  }

  const choose = () => {
    drawChoice();
    note({ chosen: [...chosen].join(",") });
  };
  field.addEventListener("input", () => {
    draw();
    note({ search: field.value });
  });
  await read();
  const content = [el("h1", {}, "Runs"), el("div", { class: "tools" }, field, count, compare), problems, list];
  return { title: "Runs", path: [], content, refresh, drawn: draw };
}

function entry(run, chosen, change) {
  const box = el("input", {
    type: "checkbox",
    "aria-label": `Compare ${run.name ?? run.dir}`,
    "data-key": `choose ${run.id}`,
  });
  box.checked = chosen.has(run.id);
  box.addEventListener("change", () => {
    if (box.checked) chosen.add(run.id);
    else chosen.delete(run.id);
    change();
  });
  const values = Object.entries(run.metrics ?? {}).slice(0, 6);
  const warnings = run.warnings ?? [];
  return el(
    "li",
    { class: "run item", tabindex: "0", "data-key": `run ${run.id}` },
    box,
    el(
      "div",
      { class: "run-name" },
      el("a", { class: "open", href: link(["run", run.id]) }, breakable(run.name ?? run.dir)),
      el("small", {}, breakable(run.dir)),
    ),
    chip(run.state),
    el(
      "div",
      { class: "run-stage" },
      progress(run),
      run.state === "running" && run.seconds_left !== null ? el("small", {}, `${clock(run.seconds_left)} left`) : null,
    ),
    el(
      "dl",
      { class: "last" },
      values.map(([name, value]) => el("div", {}, el("dt", {}, breakable(name)), el("dd", {}, number(value)))),
    ),
    el(
      "div",
      { class: "run-spark" },
      run.spark ? [sparkline(run.spark.values, run.spark.name), el("small", {}, breakable(run.spark.name))] : null,
    ),
    el("time", { "data-time": run.changed, title: moment(run.changed) }, ago(run.changed)),
    run.error ? el("p", { class: "message failed" }, run.error) : null,
    run.alarm ? el("p", { class: "alarm" }, "⚠ ", run.alarm) : null,
    warnings.length
      ? el(
          "details",
          { class: "run-warnings", "data-key": `warnings ${run.id}` },
          el("summary", {}, `${warnings.length} warning${warnings.length > 1 ? "s" : ""}`),
          el(
            "ul",
            {},
            warnings.map((text) => el("li", {}, text)),
          ),
        )
      : null,
  );
}

export function progress({ stage, name, trainer, update, updates }) {
  const known = Number.isFinite(updates) && updates > 0;
  return [
    el(
      "span",
      {},
      stage ?? name ?? "",
      trainer ? el("small", {}, ` ${trainer}`) : null,
      " ",
      el("b", {}, number(update)),
      known ? ` of ${number(updates)}` : null,
    ),
    known ? el("progress", { max: updates, value: update ?? 0, "aria-label": "updates" }) : null,
  ];
}
