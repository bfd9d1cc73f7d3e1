// An update's rollouts: groups of completions side by side, their rewards, and their tokens; and the search over a stage.
import { card, columnsOf, conversation } from "./cards.js";
import { get, isFrozen } from "./data.js";
import { el, number, replace, select } from "./dom.js";
import { choose, link } from "./route.js";
import { stageOf } from "./run.js";
import { showTokens } from "./tokens.js";

const LIMIT = 50;
const SORTS = [
  ["order", "as sampled"],
  ["-reward", "highest reward"],
  ["reward", "lowest reward"],
  ["-spread", "rewards differ most"],
  ["-advantage", "highest advantage"],
  ["advantage", "lowest advantage"],
  ["-length", "longest"],
  ["length", "shortest"],
];
// What every completion has; its rewards come from the answer.
const FIELDS = ["reward", "advantage", "length", "version", "age"];
const SOON = 250;

export async function showUpdate([, id, stageName, , updateText], query) {
  const run = await get("runs", id);
  const stage = stageOf(run, stageName);
  const update = Number(updateText);
  const { search, finish, where, least, most, without } = query;
  const wanted = {
    update,
    search,
    finish,
    where,
    least,
    most,
    without,
    sort: query.sort ?? "order",
    offset: query.offset ?? 0,
    limit: LIMIT,
  };
  const answer = await get("runs", id, stage.name, "rollouts", wanted);
  const turns = el("div", {}, turn(id, stage, update));
  const content = [
    el("h1", {}, `Update ${number(update)}`, " ", el("small", {}, `rollout ${number(answer.rollout)}`)),
    turns,
    tools(answer, query),
    count(answer, query, "group"),
    el(
      "div",
      { class: "groups" },
      answer.groups.map((group) => groupOf(group, { id, stage: stage.name, query, update, rollout: answer.rollout })),
    ),
    pager(answer, query),
  ];
  return {
    title: `${stage.name}, update ${update}`,
    path: pathTo(run, stage, `update ${update}`),
    content,
    refresh: isFrozen()
      ? null
      : async () => replace(turns, turn(id, stageOf(await get("runs", id), stage.name), update)),
  };
}

export async function showSearch([, id, stageName], query) {
  const run = await get("runs", id);
  const stage = stageOf(run, stageName);
  const answer = query.search
    ? await get("runs", id, stage.name, "rollouts", {
        search: query.search,
        sort: query.sort ?? "order",
        offset: query.offset ?? 0,
        limit: LIMIT,
      })
    : { groups: [], total: 0 };
  const content = [
    el("h1", {}, "Search ", el("small", {}, `in the completions of ${stage.name}`)),
    el(
      "div",
      { class: "tools" },
      searchField(query, "words of a completion"),
      select("Sort", SORTS, query.sort ?? "order", (sort) => choose({ sort, offset: null })),
    ),
    query.search
      ? count(answer, query, "group")
      : el("p", { class: "note" }, "Any word of any completion of this stage."),
    el(
      "div",
      { class: "groups" },
      answer.groups.map((group) =>
        groupOf(group, { id, stage: stage.name, query, update: group.update, rollout: group.rollout, isFound: true }),
      ),
    ),
    pager(answer, query),
  ];
  return { title: `${stage.name}, search`, path: pathTo(run, stage, "search"), content };
}

export function pathTo(run, stage, text) {
  return [
    [run.name ?? run.dir, link(["run", run.id])],
    [stage.name, link(["run", run.id, stage.name])],
    [text, ""],
  ];
}

// Links to the update before and after that has rollouts, and a choice among all.
function turn(id, stage, update) {
  const all = stage.rollouts ?? [];
  const to = (other) => link(["run", id, stage.name, "update", other]);
  return steps(all, update, to);
}

export function steps(all, now, to) {
  const before = all.filter((each) => each < now).at(-1);
  const after = all.find((each) => each > now);
  const go = (other) => {
    location.hash = to(other);
  };
  return el(
    "nav",
    { class: "turn", "aria-label": "Updates" },
    before === undefined ? null : el("a", { class: "button", rel: "prev", href: to(before) }, `← ${before}`),
    all.length > 1
      ? select(
          "Update",
          [...new Set([...all, now])].sort((a, b) => a - b).map((each) => [each, each]),
          now,
          go,
        )
      : null,
    after === undefined ? null : el("a", { class: "button", rel: "next", href: to(after) }, `${after} →`),
  );
}

export function searchField(query, placeholder) {
  const field = el("input", {
    type: "search",
    placeholder: `${placeholder} (/)`,
    "aria-label": placeholder,
    value: query.search ?? "",
    "data-key": "search",
  });
  let later = 0;
  field.addEventListener("input", () => {
    clearTimeout(later);
    later = setTimeout(() => choose({ search: field.value, offset: null, completion: null }), SOON);
  });
  return field;
}

function bound(label, name, query) {
  const field = el("input", { type: "number", step: "any", value: query[name] ?? "", "data-key": name });
  field.addEventListener("change", () => choose({ [name]: field.value, where: query.where ?? "reward", offset: null }));
  return el("label", {}, `${label} `, field);
}

function withoutBox(query) {
  const box = el("input", { type: "checkbox", "data-key": "without" });
  box.checked = query.without === "1";
  box.addEventListener("change", () =>
    choose({ without: box.checked ? 1 : null, where: query.where ?? "reward", offset: null }),
  );
  return el("label", { title: "only completions that have no value of it" }, box, " none");
}

function tools(answer, query) {
  const fields = [...new Set([...FIELDS, ...(answer.rewards ?? [])])];
  const finishes = [["", "any"], ...(answer.finishes ?? []).map((finish) => [finish, finish])];
  return el(
    "div",
    { class: "tools" },
    searchField(query, "search these texts"),
    select("Sort", SORTS, query.sort ?? "order", (sort) => choose({ sort, offset: null })),
    finishes.length > 2
      ? select("Ended", finishes, query.finish ?? "", (finish) => choose({ finish, offset: null }))
      : null,
    select(
      "With",
      fields.map((name) => [name, name]),
      query.where ?? "reward",
      (where) => choose({ where, offset: null }),
    ),
    bound("from", "least", query),
    bound("to", "most", query),
    withoutBox(query),
  );
}

export function count(answer, query, thing) {
  const offset = Number(query.offset ?? 0);
  const shown = (answer.groups ?? answer.rows).length;
  const total = answer.total ?? shown;
  const part = shown < total ? `, ${offset + 1} to ${offset + shown} shown` : "";
  const left = answer.left_out ? `; ${number(answer.left_out)} more are not in this file` : "";
  return el("p", { class: "note", role: "status" }, `${number(total)} ${thing}${total === 1 ? "" : "s"}${part}${left}`);
}

export function pager(answer, query, limit = LIMIT) {
  const offset = Number(query.offset ?? 0);
  const total = answer.total ?? 0;
  const page = (to, text) =>
    el("button", { type: "button", on: { click: () => choose({ offset: to || null }) } }, text);
  if (total <= limit) return null;
  return el(
    "div",
    { class: "turn" },
    offset > 0 ? page(Math.max(0, offset - limit), "Previous page") : null,
    offset + limit < total ? page(offset + limit, "Next page") : null,
  );
}

// place: {id, stage, query, update, rollout, isFound: whether the search over the stage found it}.
function groupOf(group, { id, stage, query, update, rollout, isFound = false }) {
  const key = `group ${update} ${group.row}`;
  const below = el("div");
  const [shownUpdate, shownIndex] = (query.completion ?? "").split(".");
  const isShown = ({ index, indices }) =>
    shownUpdate === String(update) && (indices ?? [index]).map(String).includes(shownIndex);
  const cards = group.completions.map((one) => {
    const open = () => choose({ completion: `${update}.${one.index}`, at: null });
    return card(one, { open: isFrozen() ? null : open, isOpen: isShown(one) });
  });
  const one = group.completions.find(isShown);
  if (one) {
    showTokens(below, { id, stage, rollout, one, query }).catch((error) =>
      replace(below, el("p", { class: "message failed" }, error.message)),
    );
  }
  const found = { class: "open", href: link(["run", id, stage, "update", update], { at: key }) };
  const other = (to, text) =>
    Number.isFinite(to)
      ? el("a", { href: link(["run", id, stage, "update", to], { at: `group ${to} ${group.row}` }) }, text)
      : null;
  return el(
    "section",
    { class: "group item", tabindex: "-1", "data-key": key, "aria-label": `Group of row ${group.row}` },
    el(
      "header",
      {},
      el("h2", {}, `row ${group.row}`, isFound ? el("small", {}, " ", el("a", found, `update ${update}`)) : null),
      facts(group),
      el(
        "span",
        { class: "same" },
        other(group.previous, "← this prompt before"),
        other(group.next, "this prompt next →"),
      ),
    ),
    el(
      "details",
      { class: "prompt", open: true, "data-key": `prompt ${key}` },
      el("summary", {}, "Prompt"),
      group.messages ? conversation(group.messages) : el("div", { class: "text" }, group.prompt),
      columnsOf(group.columns),
    ),
    el("div", { class: "completions" }, cards),
    below,
  );
}

function facts(group) {
  const said = [
    Number.isFinite(group.mean) ? `reward ${number(group.mean)}` : null,
    Number.isFinite(group.spread) ? `± ${number(group.spread)}` : null,
    group.spread === 0 ? "all equal: nothing is learned from this group" : null,
  ];
  return el("span", { class: "sub" }, said.filter(Boolean).join(" "));
}
