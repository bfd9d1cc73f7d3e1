// The page of `rlhf watch`, and of a report: which view is shown, its path, keys and refreshing.
import { showComparison } from "./compare.js";
import { freeze, get, isFrozen, Refused, signIn } from "./data.js";
import { el, replace } from "./dom.js";
import { showEvaluation, showRows } from "./rows.js";
import { here, link } from "./route.js";
import { showRun } from "./run.js";
import { showRuns } from "./runs.js";
import { showSearch, showUpdate } from "./update.js";

const EVERY = 2000;
const KINDS = { update: showUpdate, search: showSearch, rows: showRows, evaluation: showEvaluation };

const view = document.getElementById("view");
const freshness = document.getElementById("freshness");
const help = document.getElementById("help");
let shown = { path: "", refresh: null, keys: {} };
let serial = 0;

// A view is an async function of (parts, query) → {title, path: [[text, address]], content, refresh?, keys?}.
function viewOf(parts) {
  if (parts[0] === "compare") return showComparison;
  if (parts[0] !== "run") return showRuns;
  return KINDS[parts[3]] ?? showRun;
}

async function show() {
  const mine = ++serial;
  const { parts, query } = here();
  const path = parts.join("/");
  const isSame = path === shown.path;
  let made;
  try {
    made = await viewOf(parts)(parts, query);
  } catch (error) {
    made = failure(error);
  }
  if (mine !== serial) return;
  const top = scrollY;
  document.title = `${made.title} · rlhf`;
  replace(document.getElementById("path"), steps(made.path));
  replace(view, made.content);
  shown = { path, refresh: made.refresh, keys: made.keys ?? {} };
  made.drawn?.();
  if (isSame) scrollTo(0, top);
  else settle(query);
}

function settle(query) {
  const marked = query.at
    ? view.querySelector(`[data-key="${CSS.escape(query.at)}"]`)
    : view.querySelector(".completion.open")?.closest(".group");
  scrollTo(0, 0);
  if (marked) marked.scrollIntoView({ block: "start" });
  (marked ?? view).focus({ preventScroll: true });
}

function steps(path) {
  const first = isFrozen() ? [] : [["runs", link([])]];
  return [...first, ...path].flatMap(([text, address], i, all) => {
    const last = i === all.length - 1;
    const step = last ? el("span", { "aria-current": "page" }, text) : el("a", { href: address }, text);
    return i ? [el("span", { class: "slash", "aria-hidden": "true" }, "/"), step] : [step];
  });
}

function failure(error) {
  if (error instanceof Refused && error.status === 401) return askForKey();
  if (!(error instanceof Refused)) console.error(error);
  const words =
    error instanceof TypeError ? "The server does not answer. Is `rlhf watch` still running?" : error.message;
  const content = el("div", { class: "message failed", role: "alert" }, words);
  return { title: "Not shown", path: [["not shown", ""]], content, refresh: error instanceof Refused ? null : show };
}

function askForKey() {
  const said = el("p", { class: "bad", role: "alert" });
  const field = el("input", { type: "password", name: "key", autocomplete: "current-password", required: true });
  const submit = async (event) => {
    event.preventDefault();
    try {
      await signIn(field.value);
      show();
    } catch (error) {
      replace(said, error.message);
    }
  };
  const form = el(
    "form",
    { class: "key-form", on: { submit } },
    el("label", {}, "Key ", field),
    " ",
    el("button", {}, "Show the runs"),
    said,
  );
  return { title: "Key", path: [["key", ""]], content: form };
}

async function refresh() {
  if (document.hidden || !shown.refresh) return;
  const { refresh: again } = shown;
  shown.refresh = null;
  const mine = serial;
  try {
    await again();
    freshness.textContent = "";
  } catch (error) {
    if (mine === serial)
      freshness.textContent = error instanceof Refused ? error.message : "The server does not answer.";
  }
  if (mine === serial) shown.refresh = again;
}

function items() {
  return [...view.querySelectorAll(".item")].filter((item) => item.checkVisibility());
}

function move(by) {
  const all = items();
  const now = all.indexOf(document.activeElement.closest(".item"));
  const to = all[now < 0 ? (by > 0 ? 0 : all.length - 1) : now + by];
  to?.focus({ preventScroll: true });
  to?.scrollIntoView({ block: "nearest" });
}

function up() {
  const links = document.querySelectorAll("#path a");
  if (links.length) location.hash = links[links.length - 1].getAttribute("href");
}

const KEYS = {
  j: () => move(1),
  k: () => move(-1),
  u: up,
  n: () => view.querySelector("a[rel=next]")?.click(),
  p: () => view.querySelector("a[rel=prev]")?.click(),
  x: () => document.activeElement.closest(".item")?.querySelector("input[type=checkbox]")?.click(),
  "/": () => view.querySelector("input[type=search]")?.focus(),
  "?": () => help.showModal(),
};

addEventListener("keydown", (event) => {
  const writes = event.target.matches("input:not([type=checkbox], [type=range]), textarea, select");
  if (event.key === "Escape" && writes) event.target.blur();
  if (writes || event.ctrlKey || event.metaKey || event.altKey || help.open) return;
  if (event.key === "Enter" && event.target.matches(".item:not(.chart)")) event.target.querySelector("a.open")?.click();
  const action = KEYS[event.key];
  if (!action) return;
  event.preventDefault();
  action();
});

// What is folded is opened for paper, and closed again.
let opened = [];
addEventListener("beforeprint", () => {
  opened = [...view.querySelectorAll("details:not(.values):not([open])")];
  for (const fold of opened) fold.open = true;
});
addEventListener("afterprint", () => {
  for (const fold of opened) fold.open = false;
});

function setTheme(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
  else delete document.documentElement.dataset.theme;
}

function remembered() {
  try {
    return localStorage.getItem("rlhf-theme") ?? "";
  } catch {
    return "";
  }
}

function remember(theme) {
  try {
    localStorage.setItem("rlhf-theme", theme);
  } catch {
    // A file that was opened from a disk may not store anything.
  }
}

async function unpacked(text) {
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).json();
}

async function start() {
  const box = document.getElementById("theme");
  box.value = remembered();
  setTheme(box.value);
  box.addEventListener("change", () => {
    setTheme(box.value);
    remember(box.value);
  });
  document.getElementById("help-button").addEventListener("click", () => help.showModal());
  document.getElementById("skip").addEventListener("click", (event) => {
    event.preventDefault();
    view.focus();
  });
  const carried = document.getElementById("frozen");
  if (carried) freeze(await unpacked(carried.textContent));
  addEventListener("hashchange", show);
  await firstRun();
  await show();
  document.documentElement.dataset.ready = "";
  if (!isFrozen()) setInterval(refresh, EVERY);
}

// A report has one run, or a comparison, and opens at it.
async function firstRun() {
  if (!isFrozen() || here().parts.length) return;
  const { runs } = await get("runs");
  const ids = runs.map(({ id }) => id);
  history.replaceState(null, "", ids.length > 1 ? link(["compare", ids.join(",")]) : link(["run", ids[0]]));
}

start();
