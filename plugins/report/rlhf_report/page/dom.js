// Elements, numbers and times, of which every view is made. Text from files only ever becomes a text node.

// Control characters, marks that reorder text, and surrogates without a partner: shown as their escapes.
const HIDDEN = /[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]|\p{Surrogate}/gu;

export function visible(text) {
  return String(text).replace(HIDDEN, (mark) => {
    const code = mark.codePointAt(0).toString(16);
    return code.length > 2 ? `\\u${code.padStart(4, "0")}` : `\\x${code.padStart(2, "0")}`;
  });
}

// Make an element. properties: attributes; `on`: {event: listener}; `style`: {property: value}; null and false are left out.
export function el(tag, properties, ...children) {
  return filled(document.createElement(tag), properties, children);
}

export function svg(tag, properties, ...children) {
  return filled(document.createElementNS("http://www.w3.org/2000/svg", tag), properties, children);
}

function filled(element, properties, children) {
  for (const [name, value] of Object.entries(properties ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "on") {
      for (const [event, listener] of Object.entries(value)) element.addEventListener(event, listener);
    } else if (name === "style") {
      for (const [property, each] of Object.entries(value)) element.style.setProperty(property, each);
    } else {
      element.setAttribute(name, value === true ? "" : visible(value));
    }
  }
  element.append(...nodes(children));
  return element;
}

function nodes(children) {
  const shown = children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false);
  return shown.map((child) => (child instanceof Node ? child : document.createTextNode(visible(child))));
}

// Replace what a container holds; what has a `data-key` keeps its focus, its scroll position and whether it is open.
export function replace(container, ...children) {
  const focused = container.contains(document.activeElement) ? document.activeElement.closest("[data-key]") : null;
  const key = focused?.dataset.key;
  const kept = new Map();
  for (const old of container.querySelectorAll("[data-key]")) {
    kept.set(old.dataset.key, { open: old.open, left: old.scrollLeft, top: old.scrollTop });
  }
  container.replaceChildren(...nodes(children));
  for (const fresh of container.querySelectorAll("[data-key]")) {
    const old = kept.get(fresh.dataset.key);
    if (!old) continue;
    if (fresh.tagName === "DETAILS") fresh.open = old.open;
    fresh.scrollLeft = old.left;
    fresh.scrollTop = old.top;
    if (fresh.dataset.key === key) fresh.focus({ preventScroll: true });
  }
}

// A name with optional line breaks after slashes and underscores.
export function breakable(name) {
  return visible(name)
    .split(/(?<=[/_])/)
    .flatMap((part) => [part, el("wbr")]);
}

export function number(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(2);
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(4)));
}

// The shortest decimal that is the same float32; of a number that is no float32, the same float64.
export function exact(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number" || Math.fround(value) !== value) return String(value);
  for (let digits = 6; digits < 10; digits++) {
    const text = String(Number(value.toPrecision(digits)));
    if (Math.fround(Number(text)) === value) return text;
  }
  return String(value);
}

export function signed(value) {
  return value > 0 ? `+${number(value)}` : number(value).replace("-", "−");
}

export function clock(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return "–";
  if (seconds < 60) return `${seconds < 10 ? seconds.toFixed(1) : Math.round(seconds)} s`;
  const minutes = Math.floor(Math.round(seconds) / 60);
  if (minutes < 60) return `${minutes} min ${String(Math.round(seconds) % 60).padStart(2, "0")} s`;
  return `${Math.floor(minutes / 60)} h ${String(minutes % 60).padStart(2, "0")} min`;
}

export function ago(time) {
  const seconds = Date.now() / 1000 - time;
  if (seconds < 5) return "now";
  if (seconds < 90) return `${Math.round(seconds)} s ago`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min ago`;
  if (seconds < 129600) return `${Math.round(seconds / 3600)} h ago`;
  return new Date(1000 * time).toLocaleDateString("en", { day: "numeric", month: "short", year: "numeric" });
}

export function moment(time) {
  return new Date(1000 * time).toLocaleString("en-GB");
}

export const chip = (state) => el("span", { class: `chip ${String(state).replaceAll(" ", "-")}` }, state);

export function select(label, options, value, change) {
  const choices = options.map(([option, text]) => el("option", { value: option }, text));
  const box = el("select", { "data-key": `select ${label}`, on: { change: () => change(box.value) } }, choices);
  box.value = value;
  return el("label", {}, `${label} `, box);
}

// A table that scrolls sideways by itself. head: texts; rows: lists of cells, the first of which names the row.
export function table(caption, head, rows, properties = {}) {
  const cells = (row) => row.map((cell, i) => (i ? el("td", {}, cell) : el("th", { scope: "row" }, cell)));
  return el(
    "div",
    { class: "wide", tabindex: "0", role: "region", "aria-label": caption, "data-key": `table ${caption}` },
    el(
      "table",
      properties,
      el("caption", { class: "hidden" }, caption),
      el(
        "thead",
        {},
        el(
          "tr",
          {},
          head.map((name) => el("th", { scope: "col" }, name)),
        ),
      ),
      el(
        "tbody",
        {},
        rows.map((row) => el("tr", {}, cells(row))),
      ),
    ),
  );
}
