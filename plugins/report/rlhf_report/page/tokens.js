// A completion's tokens, coloured by one of their numbers, all of which are read under the pointer or by keyboard.
import { get } from "./data.js";
import { el, exact, number, replace, select, visible } from "./dom.js";
import { note } from "./route.js";

const SHADES = 7;
// [name, label, where its colours are strong: at low values, at high ones, or at both ends around 0]
const MEASURES = [
  ["sampler_logps", "log-probability, sampler", "low"],
  ["trainer_logps", "log-probability, trainer", "low"],
  ["differences", "trainer less sampler", "both"],
  ["entropies", "entropy", "high"],
  ["advantages", "advantage", "both"],
  ["mask", "seen by the loss", "low"],
  ["versions", "version", "low"],
];

// Draw the tokens of a completion into a place. choice: {id, stage, rollout, one, query}.
export async function showTokens(place, { id, stage, rollout, one, query }) {
  const tokens = await get("runs", id, stage, "rollouts", rollout, "completions", one.index);
  tokens.differences = differences(tokens);
  const known = MEASURES.filter(([name]) => tokens[name]?.some((value) => value !== null));
  let measure = known.find(([name]) => name === query.colour) ?? known[0];
  const text = el("div", {
    class: "tokens",
    role: "group",
    "aria-label": "Tokens: arrow keys move, and the numbers follow",
  });
  const numbers = el("dl", { class: "numbers", "aria-live": "polite" });
  const scale = el("p", { class: "scale note" });
  const spans = tokens.ids.map((_, i) =>
    el("span", { class: "token", "data-i": i, tabindex: i ? "-1" : "0" }, shownToken(tokens.texts[i])),
  );
  const absent = MEASURES.filter((each) => !known.includes(each)).map(([, label]) => label);

  function paint() {
    const [name, , strong] = measure;
    const values = tokens[name];
    const [low, high] = extent(values, strong);
    const colour = (step) => (strong === "both" ? `two${step}` : `one${strong === "high" ? SHADES - 1 - step : step}`);
    spans.forEach((span, i) => {
      const step = Math.min(SHADES - 1, Math.floor(((values[i] - low) / (high - low || 1)) * SHADES));
      const isUnseen = tokens.mask?.[i] === 0 || tokens.mask?.[i] === false;
      span.className = `token ${values[i] === null ? "unknown" : colour(step)}${isUnseen ? " unseen" : ""}`;
    });
    const steps = Array.from({ length: SHADES }, (_, i) => el("i", { class: colour(i) }));
    replace(
      scale,
      el(
        "span",
        { class: "shades" },
        number(low),
        " ",
        el("span", { "aria-hidden": "true" }, steps),
        " ",
        number(high),
      ),
      tokens.mask?.some((seen) => !seen)
        ? el("span", { class: "unseen-key" }, "struck through: not seen by the loss")
        : null,
      absent.length ? ` Not recorded: ${absent.join(", ")}.` : "",
    );
  }

  function read(i) {
    const entry = (label, value) => el("div", {}, el("dt", {}, label), el("dd", {}, value));
    replace(
      numbers,
      entry("token", `${i} of ${spans.length}`),
      entry("text", JSON.stringify(visible(tokens.texts[i]))),
      entry("id", tokens.ids[i]),
      known.map(([name, label]) => entry(label, exact(tokens[name][i]))),
    );
    for (const span of text.querySelectorAll(".read")) span.classList.remove("read");
    spans[i].classList.add("read");
  }

  const under = (event) => event.target.closest("[data-i]")?.dataset.i;
  text.addEventListener("pointerover", (event) => {
    if (under(event)) read(Number(under(event)));
  });
  text.addEventListener("focusin", (event) => {
    if (under(event)) read(Number(under(event)));
  });
  text.addEventListener("click", (event) => {
    if (under(event)) spans[under(event)].focus({ preventScroll: true });
  });
  text.addEventListener("keydown", (event) => {
    const now = Number(under(event) ?? 0);
    const last = spans.length - 1;
    const to = { ArrowLeft: now - 1, ArrowRight: now + 1, ArrowUp: now - 10, ArrowDown: now + 10, Home: 0, End: last }[
      event.key
    ];
    if (to === undefined) return;
    event.preventDefault();
    spans[now].tabIndex = -1;
    const target = spans[Math.max(0, Math.min(last, to))];
    target.tabIndex = 0;
    target.focus();
  });
  const chooser = select(
    "Colour",
    known.map(([name, label]) => [name, label]),
    measure?.[0] ?? "",
    (name) => {
      measure = known.find((each) => each[0] === name);
      note({ colour: name });
      paint();
    },
  );
  text.append(...spans);
  const asked = tokens.prompt?.texts?.map((each) => el("span", { class: "token" }, shownToken(each)));
  const prompt = asked
    ? el(
        "div",
        { class: "tokens prompt-tokens", "aria-label": "Tokens of the prompt, which the loss does not see" },
        asked,
      )
    : null;
  replace(
    place,
    el(
      "section",
      { class: "token-panel", "aria-label": `Tokens of completion ${one.index}` },
      el("div", { class: "tools" }, el("h3", {}, `Tokens of completion ${one.index}`), known.length ? chooser : null),
      scale,
      prompt,
      text,
      numbers,
    ),
  );
  if (measure) paint();
  if (spans.length) read(0);
}

// The trainer's log-probability less the sampler's, in float32 as both are.
function differences({ sampler_logps: sampler, trainer_logps: trainer }) {
  if (!sampler || !trainer) return null;
  return trainer.map((value, i) => (value === null || sampler[i] === null ? null : Math.fround(value - sampler[i])));
}

function extent(values, strong) {
  const known = values.filter((value) => value !== null).map(Number);
  if (!known.length) return [0, 1];
  const low = known.reduce((a, b) => Math.min(a, b));
  const high = known.reduce((a, b) => Math.max(a, b));
  const far = Math.max(-low, high);
  return strong === "both" ? [-far, far] : [low, high];
}

// A line feed is shown as its sign, and still breaks the line.
function shownToken(text) {
  return text === "" ? "∅" : visible(text).replaceAll("\n", "⏎\n");
}
