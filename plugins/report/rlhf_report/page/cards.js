// A completion as a card: its rewards, its text or messages, how it ended.
import { breakable, el, exact, number, signed } from "./dom.js";

const ADVANTAGE = { [-1]: "bad", 0: "none", 1: "good" };

// The other columns of a row.
export function columnsOf(columns) {
  const entries = Object.entries(columns ?? {});
  if (!entries.length) return null;
  const one = ([name, value]) => el("span", {}, el("b", {}, breakable(name)), " ", value);
  return el("p", { class: "columns" }, entries.map(one));
}

// A completion. text: null where it is that of the card before. open: shows its tokens. head, facts: more to show.
export function card(one, { open = null, isOpen = false, head = null, facts: more = null } = {}) {
  const rewards = Object.entries(one.rewards ?? {});
  const age = Number.isFinite(one.age) && one.age > 0 ? ` (${one.age} old)` : "";
  const tags = [
    Number.isFinite(one.length) ? `${one.length} tokens` : null,
    one.finish ? `ended: ${one.finish}` : null,
    Number.isFinite(one.version) ? `version ${one.version}${age}` : null,
    one.dropped ? `dropped: ${one.dropped}` : null,
  ].filter(Boolean);
  return el(
    "article",
    { class: `completion${isOpen ? " open" : ""}`, "aria-label": `Completion ${one.index ?? ""}` },
    head,
    el(
      "p",
      { class: "rewards" },
      el("b", { title: exact(one.reward) }, number(one.reward)),
      one.copies > 1
        ? el(
            "span",
            { class: "copies", title: `equal completions: ${(one.indices ?? []).join(", ")}` },
            `×${one.copies}`,
          )
        : null,
      Number.isFinite(one.advantage)
        ? el(
            "span",
            { class: ADVANTAGE[Math.sign(one.advantage)], title: `advantage ${exact(one.advantage)}` },
            `advantage ${signed(one.advantage)}`,
          )
        : null,
      more,
    ),
    rewards.length > 1
      ? el(
          "dl",
          { class: "by-function" },
          rewards.map(([name, value]) =>
            el("div", {}, el("dt", {}, breakable(name)), el("dd", { title: exact(value) }, number(value))),
          ),
        )
      : null,
    one.messages ? conversation(one.messages) : textOf(one.text),
    el(
      "p",
      { class: "tags" },
      tags.map((tag) => el("span", {}, tag)),
      open
        ? el("button", { type: "button", "data-key": `tokens of ${one.index}`, on: { click: open } }, "Tokens")
        : null,
    ),
  );
}

function textOf(text) {
  if (text === null) return el("p", { class: "note" }, "the same text");
  return el("div", { class: "text", tabindex: "0" }, text === "" ? el("i", {}, "empty") : text);
}

export function conversation(messages) {
  const entry = ({ role, content, name, policy, added, turn, tokens, reward, errors = [] }) => {
    const said = [
      added ? "written by the environment" : null,
      turn ? `turn ${turn}` : null,
      Number.isFinite(tokens) ? `${tokens} tokens` : null,
      Number.isFinite(reward) ? `reward ${number(reward)}` : null,
    ];
    return el(
      "li",
      { class: policy ? "policy" : null },
      el(
        "p",
        { class: "rewards" },
        el("b", {}, role, name ? ` ${name}` : ""),
        said.filter(Boolean).map((text) => el("span", {}, text)),
      ),
      el("div", { class: "text" }, content),
      errors.map((text) => el("p", { class: "bad" }, `malformed call: ${text}`)),
    );
  };
  return el("ol", { class: "conversation", tabindex: "0" }, messages.map(entry));
}
