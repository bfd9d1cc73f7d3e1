// How all curves of a view are drawn: along what, how smooth, which part; chosen above them and noted in the address.
import { el, select } from "./dom.js";
import { note } from "./route.js";

const AXES = [
  ["update", "updates"],
  ["tokens", "tokens"],
  ["time", "time"],
];

// Return the settings of an address, a way to change them, and the controls. redraw: called after each change.
export function makeCurves(query, redraw) {
  const settings = {
    axis: query.x ?? "update",
    smooth: Number(query.smooth ?? 0),
    log: query.log === "1",
    from: query.from === undefined ? null : Number(query.from),
    to: query.to === undefined ? null : Number(query.to),
    zoom: (from, to) => set({ from, to }),
  };
  const share = el("output");
  const slider = el("input", {
    type: "range",
    min: 0,
    max: 0.3,
    step: 0.01,
    value: settings.smooth,
    "aria-label": "Smoothing: share of the axis that a mean covers",
  });
  const log = el("input", { type: "checkbox" });
  const whole = el("button", { type: "button", on: { click: () => set({ from: null, to: null }) } }, "Show all");
  slider.addEventListener("input", () => set({ smooth: Number(slider.value) }));
  log.addEventListener("change", () => set({ log: log.checked }));
  log.checked = settings.log;

  function set(change) {
    Object.assign(settings, change);
    const { axis, smooth, from, to } = settings;
    note({ x: axis === "update" ? null : axis, smooth: smooth || null, log: settings.log ? 1 : null, from, to });
    show();
    redraw();
  }

  function show() {
    share.textContent = `${Math.round(100 * settings.smooth)} %`;
    whole.hidden = settings.from === null;
  }

  show();
  const along = select("By", AXES, settings.axis, (axis) => set({ axis, from: null, to: null }));
  return {
    settings,
    controls: [along, el("label", {}, "Smooth ", slider, " ", share), el("label", {}, log, " log"), whole],
  };
}
