// A run: what each stage came to, its curves as they grow, what happened, where the time went.
import { makeChart, nearest, place, points } from "./chart.js";
import { makeCurves } from "./curves.js";
import { get, isFrozen } from "./data.js";
import { diagram } from "./diagram.js";
import { breakable, chip, clock, el, moment, number, replace, table } from "./dom.js";
import { results } from "./results.js";
import { link, note } from "./route.js";
import { progress } from "./runs.js";

const FIRST = 8;
const QUIET = new Set(["begun", "done", "ended"]);

export function stageOf(run, name) {
  const current = run.stages.find(({ state }) => state === "running" || state === "failed");
  const begun = run.stages.filter(({ update }) => update);
  return run.stages.find((stage) => stage.name === name) ?? current ?? begun.at(-1) ?? run.stages[0];
}

// The rows of a stage's metrics.jsonl, of which only those that were added are fetched.
export function makeRows(id, stage) {
  const log = { rows: [], names: [], sessions: null };

  return {
    log,
    // Fetch the rows of some metrics (null: of all); return whether anything changed.
    async grow(names, sessions) {
      const isNew = sessions !== log.sessions || String(names) !== String(log.names);
      const after = isNew ? null : (log.rows.at(-1)?.step ?? null);
      const { rows } = await get("runs", id, stage, "metrics", { after, names: names?.join(",") });
      const known = new Set(isNew ? [] : log.rows.slice(-rows.length - 1).map(({ step, time }) => `${step} ${time}`));
      const added = rows.filter(({ step, time }) => !known.has(`${step} ${time}`));
      log.rows = isNew ? rows : log.rows.concat(added);
      Object.assign(log, { names, sessions });
      return isNew || added.length > 0;
    },
  };
}

// A run, one stage of it; in a report all of them, one after the other, where none was chosen.
export async function showRun([, id, wanted], query) {
  let run = await get("runs", id);
  const path = [[run.name ?? run.dir, link(["run", id])]];
  if (!run.stages.length)
    return { title: run.name, path, content: [heading(run), el("p", { class: "note" }, "No stage has begun yet.")] };
  const isWhole = isFrozen() && !wanted;
  const stages = isWhole ? run.stages : [stageOf(run, wanted)];
  const { settings, controls } = makeCurves(query, () => views.forEach(({ redraw }) => redraw()));
  const listing = { all: query.all ? query.all === "1" : isFrozen(), search: query.search ?? "" };
  const views = stages.map(({ name }) =>
    stageView(id, name, () => run, { settings, listing, front: isWhole ? `${name} ` : "" }),
  );
  const top = el("div");
  const below = el("div");

  function drawWords() {
    const shown = isWhole ? null : stages[0].name;
    // The verdict comes first: of a single stage it is below the tabs, and the picture at the end.
    replace(top, heading(run), isWhole ? [verdicts(run), picture(run)] : null, tabs(run, shown));
    replace(below, isWhole ? null : picture(run), belowOf(run));
    for (const view of views) view.drawWords();
  }

  async function refresh() {
    const answer = await get("runs", id);
    const before = run;
    run = answer;
    if (answer !== before) drawWords();
    for (const view of views) await view.refresh(before);
  }

  const field = el("input", {
    type: "search",
    placeholder: "metrics (/)",
    "aria-label": "Show the metrics with this in their names",
    value: listing.search,
    "data-key": "metrics",
  });
  field.addEventListener("input", async () => {
    listing.search = field.value;
    note({ search: field.value });
    await Promise.all(views.map((view) => view.again()));
  });
  await Promise.all(views.map((view) => view.read()));
  const tools = (openers) => el("div", { class: "tools" }, controls, field, openers);
  const section = (view) => el("section", { class: "stage" }, view.title, view.words, view.openers, view.rest);
  return {
    title: isWhole ? run.name : `${run.name} · ${stages[0].name}`,
    path: wanted ? [...path, [stages[0].name, ""]] : path,
    content: isWhole
      ? [top, tools(null), views.map(section), below]
      : [top, views[0].words, tools(views[0].openers), views[0].rest, below],
    refresh: isFrozen() ? null : refresh,
    drawn() {
      drawWords();
      for (const view of views) view.layOut();
    },
  };
}

// A stage: its verdict, its curves and its results. run: returns what was read of the run last. front: of charts' keys.
function stageView(id, name, run, { settings, listing, front }) {
  const source = makeRows(id, name);
  const title = el("h2");
  const words = el("div");
  const openers = el("span", { class: "openers" });
  const board = el("div");
  const outcome = el("div");
  const below = el("div");
  let charts = [];
  let isAll = listing.all;

  const now = () => stageOf(run(), name);
  const names = () => (isAll || listing.search ? null : keyCharts(now()).flatMap((kind) => kind.names));
  const sessions = () =>
    (run().events ?? []).filter(({ stage: of, event }) => of === name && event === "continued").length;

  // Return what opens the update nearest to a point of a curve, of those that were kept; null where none was.
  function opening() {
    const { rollouts = [], rows = [] } = now();
    const kept = rollouts.length ? rollouts : rows;
    const kind = rollouts.length ? "update" : "rows";
    const go = (step) => {
      location.hash = link(["run", id, name, kind, kept[nearest(kept, step)]]);
    };
    return kept.length ? go : null;
  }

  function redraw() {
    const { rows } = source.log;
    const shared = { ...settings, events: placed(run().events ?? [], name, rows, settings.axis), open: opening() };
    for (const { chart, kind } of charts)
      chart.draw(linesOf(kind, rows, settings.axis), { ...shared, log: settings.log || kind.log });
  }

  // Lay the charts out: the trainer's few metrics, then the rest.
  function layOut() {
    const few = keyCharts(now());
    const fits = ({ title, names: of }) =>
      `${title} ${of.join(" ")}`.toLowerCase().includes(listing.search.toLowerCase());
    const kinds = listing.search ? chartsOf(now()).filter(fits) : few;
    const rest =
      isAll && !listing.search
        ? chartsOf(now()).filter((kind) => !few.some(({ title }) => title === kind.title))
        : [];
    const make = (kind) => {
      const made = { kind, chart: makeChart(kind.title, kind.group, `${front}${kind.title}`) };
      charts.push(made);
      return made.chart.element;
    };
    charts = [];
    const logged = now().rows_logged ?? 0;
    const zeros = rest.filter((kind) => isAlwaysZero(kind, source.log.rows));
    const drawn = rest.filter((kind) => !zeros.includes(kind));
    const more = chartsOf(now()).length - few.length;
    const fold = el(
      "button",
      {
        type: "button",
        class: "more",
        "data-key": "more",
        "aria-expanded": String(isAll),
        on: { click: () => unfold(!isAll) },
      },
      isAll ? "Fold the rest" : `${more} more chart${more > 1 ? "s" : ""}`,
    );
    replace(
      board,
      el("div", { class: "charts" }, kinds.map(make)),
      kinds.length
        ? null
        : el("p", { class: "note" }, listing.search ? "No metric has this in its name." : "Nothing was logged yet."),
      logged > source.log.rows.length
        ? el(
            "p",
            { class: "note" },
            `${number(source.log.rows.length)} of ${number(logged)} logged rows are in this file, the least and largest values of each stretch among them.`,
          )
        : null,
      more > 0 && !listing.search ? fold : null,
      el("div", { class: "charts" }, drawn.map(make)),
      zeros.length
        ? el("p", { class: "note" }, "Always 0, and not drawn: ", zeros.flatMap((kind) => kind.names).join(", "), ".")
        : null,
    );
    redraw();
  }

  async function unfold(all) {
    isAll = all;
    note({ all: all ? 1 : 0 });
    await again();
  }

  const read = () => source.grow(names(), sessions());

  async function again() {
    await read();
    layOut();
  }

  function drawWords() {
    const stage = now();
    replace(title, stage.name, " ", el("small", {}, stage.trainer), " ", chip(stage.state));
    replace(words, verdict(id, stage));
    replace(openers, opener(id, stage));
    replace(below, stageBelow(run(), stage));
  }

  // before: what was read of the run before.
  async function refresh(before) {
    const isOther = before !== run();
    if (!(await read()) && !isOther) return;
    if (JSON.stringify(chartsOf(now())) === JSON.stringify(chartsOf(stageOf(before, name)))) redraw();
    else layOut();
  }

  async function fill() {
    const made = results(await get("runs", id, name, "results"), now());
    replace(outcome, made.content);
    made.draw();
  }

  const fail = (error) => replace(outcome, el("p", { class: "message failed", role: "alert" }, error.message));

  // The results are read from many files: in a report they are there, a live page reads them when they are unfolded.
  const fold = el(
    "details",
    { "data-key": `results ${name}`, on: { toggle: () => fold.open && fill().catch(fail) } },
    el("summary", {}, "Results: numbers, distributions, weights, completions before and after"),
    outcome,
  );
  return {
    ...{ title, words, openers, read, again, redraw, refresh, drawWords },
    rest: [board, isFrozen() ? outcome : fold, below],
    layOut() {
      layOut();
      if (isFrozen()) fill();
    },
  };
}

function isAlwaysZero(kind, rows) {
  const values = kind.names.flatMap((name) => rows.map((row) => row[name] ?? (name in row ? NaN : 0)));
  return values.every((value) => value === 0);
}

// The first sentence on each stage.
function verdicts(run) {
  const judged = run.stages.filter(({ verdict: sentences }) => sentences?.length);
  const first = ({ name, verdict: [{ text, tone }] }) => el("li", { class: tone }, el("b", {}, name), ": ", text);
  return judged.length ? el("ul", { class: "verdicts" }, judged.map(first)) : null;
}

function picture(run) {
  const place = { class: "wide", tabindex: "0", role: "region", "aria-label": "Stages", "data-key": "stages" };
  return run.picture ? el("div", place, diagram(run.picture)) : null;
}

function heading(run) {
  const facts = [
    run.dir,
    run.began ? `begun ${moment(run.began)}` : null,
    run.seconds ? `took ${clock(run.seconds)}` : null,
    Number.isFinite(run.seed) ? `seed ${run.seed}` : null,
    run.machine,
  ].filter(Boolean);
  const error = run.error ? el("p", { class: "message failed" }, run.error) : null;
  return [
    el("h1", {}, breakable(run.name ?? run.dir), " ", chip(run.state)),
    el("p", { class: "sub" }, breakable(facts.join(" · "))),
    error,
  ];
}

function tabs(run, name) {
  const tab = (stage) =>
    el(
      "a",
      {
        class: "tab",
        href: link(["run", run.id, stage.name]),
        "aria-current": stage.name === name ? "page" : null,
        "data-key": `tab ${stage.name}`,
      },
      el("span", { class: `dot ${String(stage.state).replaceAll(" ", "-")}` }),
      stage.name,
      el("small", {}, stage.trainer, " · ", stage.state),
    );
  return el("nav", { class: "tabs", "aria-label": "Stages" }, run.stages.map(tab));
}

// What shows a sentence, the nearest of what was kept; null where nothing was.
function evidence(id, stage, see) {
  if (!see) return null;
  const kept = { update: stage.rollouts, rows: stage.rows, evaluation: stage.evaluations }[see.kind] ?? [];
  if (!kept.length) return null;
  const at = see.update === null ? kept.at(-1) : kept[nearest(kept, see.update)];
  const query = see.query ?? {};
  const which = [
    query.sort === "-spread" ? " whose rewards differ most" : "",
    query.sort === "-reward" ? " with the highest rewards" : "",
    query.sort === "leaked" ? " that are in the training data" : "",
    query.without ? ` without a score of ${query.where}` : "",
    query.finish ? " that were cut" : "",
  ];
  const name = { update: "completions", rows: "rows", evaluation: "held-out rows" }[see.kind];
  const text = `See the ${name} of update ${number(at)}${which.join("")}`;
  return el("a", { href: link(["run", id, stage.name, see.kind, at], query) }, text);
}

// The sentences with a link to where each shows; the same place is linked once.
function told(id, stage) {
  const seen = new Set();
  return (stage.verdict ?? []).map(({ text, tone, see }) => {
    const where = evidence(id, stage, see);
    const isNew = where && !seen.has(where.href);
    if (isNew) seen.add(where.href);
    return el("li", { class: tone }, text, " ", isNew ? where : null);
  });
}

function checked(stage) {
  const texts = stage.checked ?? [];
  if (!texts.length) return null;
  return el(
    "details",
    { class: "checked", "data-key": `checked ${stage.name}` },
    el("summary", {}, `${texts.length} check${texts.length > 1 ? "s" : ""} found nothing wrong`),
    el(
      "ul",
      {},
      texts.map((text) => el("li", {}, text)),
    ),
  );
}

function verdict(id, stage) {
  const facts = [
    stage.saved ? `The saved model is that of update ${number(stage.saved)}` : null,
    stage.state === "running" && Number.isFinite(stage.seconds_left) ? `${clock(stage.seconds_left)} left` : null,
    ...(stage.facts ?? []),
  ].filter(Boolean);
  const sentences = told(id, stage);
  return el(
    "section",
    { class: "verdict", "aria-label": "Verdict" },
    sentences.length ? el("ul", {}, sentences) : null,
    checked(stage),
    stage.message ? el("p", { class: `message ${stage.state}` }, stage.message) : null,
    el("p", { class: "run-stage" }, progress(stage), facts.length ? el("small", {}, facts.join(" · ")) : null),
    stage.next ? el("p", { class: "note" }, "To continue: ", el("code", {}, stage.next)) : null,
  );
}

function opener(id, stage) {
  const rollouts = stage.rollouts ?? [];
  const rows = stage.rows ?? [];
  const evaluations = stage.evaluations ?? [];
  // Of a rollout, a report shows first what there was to learn from.
  const sort = (kind) => (isFrozen() && kind === "update" ? "-spread" : null);
  const to = (kind, update, text) =>
    el("a", { class: "button", href: link(["run", id, stage.name, kind, update], { sort: sort(kind) }) }, text);
  return [
    rollouts.length ? to("update", rollouts.at(-1), "Newest rollout") : null,
    rollouts.length && !isFrozen()
      ? el("a", { class: "button", href: link(["run", id, stage.name, "search"]) }, "Search texts")
      : null,
    rows.length ? to("rows", rows.at(-1), "Newest rows") : null,
    evaluations.length ? to("evaluation", evaluations.at(-1), "Newest evaluation") : null,
    leftOut(stage),
  ];
}

// Say of how many updates a report has rollouts, rows or evaluations.
function leftOut(stage) {
  const parts = Object.entries(stage.kept_of ?? {}).filter(([kind, count]) => count > stage[kind].length);
  const said = parts.map(([kind, count]) => `${kind} of ${stage[kind].length} of ${number(count)} updates`);
  return said.length ? el("span", { class: "note" }, `In this file: ${said.join(", ")}; rlhf watch shows all.`) : null;
}

// Every chart of a stage; where the server names none, one for each metric beside its held-out twin.
export function chartsOf(stage) {
  if (stage.charts) return stage.charts;
  const bases = [...new Set((stage.metrics ?? []).map((name) => name.replace(/^eval_/, "")))];
  return bases.map((base) => ({
    group: "",
    title: base,
    names: stage.metrics.filter((name) => name.replace(/^eval_/, "") === base),
  }));
}

export function keyCharts(stage) {
  const key = stage.key ?? stage.metrics ?? [];
  const hasReward = key.includes("reward");
  const place = (name) => (name === "loss" && hasReward ? key.length : key.indexOf(name)); // the loss of a policy says little
  const rank = ({ names }) =>
    Math.min(
      ...names
        .map((name) => name.replace(/^eval_/, ""))
        .filter((name) => key.includes(name))
        .map(place),
    );
  return chartsOf(stage)
    .filter((kind) => rank(kind) < Infinity)
    .sort((a, b) => rank(a) - rank(b))
    .slice(0, FIRST);
}

// The lines of a chart, one for metrics that are equal; a held-out metric has the colour of its twin in training.
export function linesOf(kind, rows, axis) {
  const lines = [];
  for (const name of kind.names) {
    const made = points(rows, name, axis, kind.unit ?? 1);
    const dashed = name.startsWith("eval_");
    const twin = lines.find(
      (line) =>
        line.dashed === dashed &&
        line.points.y.length === made.y.length &&
        line.points.y.every((y, i) => y === made.y[i]),
    );
    if (!made.x.length && !made.missing.length) continue;
    if (twin) twin.label = `${twin.label} = ${name}`;
    else lines.push({ name, label: name, points: made, colour: colourOf(name, lines), dashed });
  }
  return lines;
}

function colourOf(name, lines) {
  const trained = lines.find((line) => `eval_${line.name}` === name);
  return trained?.colour ?? new Set(lines.map(({ colour }) => colour)).size;
}

// Where events happened on an axis: beside the row that was logged last before them.
function placed(events, stage, rows, axis) {
  const timed = rows.filter(({ time }) => time !== undefined);
  if (!timed.length) return [];
  const shown = events.filter((event) => event.stage === stage && !QUIET.has(event.event));
  return shown.map((event) => {
    const row = Number.isFinite(event.step)
      ? rows.find(({ step }) => step >= event.step)
      : timed.findLast(({ time }) => time <= event.time);
    return {
      x: place(row ?? timed[0], axis, timed[0].time),
      text: `${event.event}: ${event.message ?? ""}`,
      kind: event.event,
    };
  });
}

function stageBelow(run, stage) {
  const events = (run.events ?? []).filter((event) => event.stage === stage.name || !event.stage);
  return [
    stage.subsets
      ? el(
          "section",
          {},
          el("h3", {}, "By group"),
          table(
            `${stage.name}: results by group`,
            stage.subsets.columns,
            stage.subsets.rows.map(([name, ...numbers]) => [name, ...numbers.map(number)]),
          ),
        )
      : null,
    el(
      "section",
      {},
      el("h3", {}, "What happened"),
      events.length
        ? table(
            `${stage.name}: events`,
            ["when", "event", ""],
            events.map(({ time, event, message }) => [
              moment(time),
              chip(event),
              el("span", { class: "prose" }, message ?? ""),
            ]),
            { class: "events" },
          )
        : el("p", { class: "note" }, "No event was recorded."),
    ),
    stage.time?.length
      ? el("section", {}, el("h3", {}, "Where the time went"), timeBar(stage.name, stage.time))
      : null,
  ];
}

function belowOf(run) {
  const problems = run.problems ?? [];
  return [
    run.config
      ? el(
          "details",
          { "data-key": "config" },
          el("summary", {}, "Configuration, as resolved"),
          el("pre", {}, run.config),
        )
      : null,
    run.versions ? el("p", { class: "note" }, `Versions: ${run.versions}`) : null,
    problems.length
      ? el(
          "section",
          {},
          el("h2", {}, "Not readable"),
          el(
            "ul",
            { class: "problems" },
            problems.map((text) => el("li", {}, text)),
          ),
        )
      : null,
  ];
}

function timeBar(name, parts) {
  const whole = parts.reduce((sum, { seconds }) => sum + seconds, 0) || 1;
  const share = ({ seconds }, i) => el("i", { class: `part c${i}`, style: { "flex-grow": seconds / whole } });
  const rows = parts.map(({ name, seconds }, i) => [
    [el("i", { class: `swatch c${i}` }), name],
    clock(seconds),
    `${((100 * seconds) / whole).toFixed(1)} %`,
  ]);
  return [
    el("div", { class: "time-bar", "aria-hidden": "true" }, parts.map(share)),
    table(`${name}: where the time went`, ["", "time", "share"], rows, { class: "narrow" }),
  ];
}
