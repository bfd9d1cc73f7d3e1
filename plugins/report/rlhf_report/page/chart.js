// Curves as SVG: drawn at once, also for paper, readable by pointer and keyboard, with a table beside each.
import { breakable, clock, el, exact, number, replace, svg } from "./dom.js";

const HEIGHT = 210;
const EDGE = { left: 52, right: 10, top: 12, bottom: 24 };
const COLOURS = 8;
const DRAG = 8;
const NEAR = 70; // pixels that the label of an event needs

// Return the value of a row on the axis x: "update", "tokens" or "time" (seconds since the stage's first row).
export function place(row, axis, first) {
  if (axis === "tokens") return row.num_tokens ?? null;
  if (axis === "time") return row.time === undefined ? null : row.time - first;
  return row.step;
}

const isOverUpdates = (axis) => ["update", "tokens", "time"].includes(axis);

// Return the points of a metric: {x, y, steps, missing}. missing: the places of values that were not finite.
export function points(rows, name, axis, unit = 1) {
  const made = { x: [], y: [], steps: [], missing: [] };
  const first = rows[0]?.time ?? 0;
  for (const row of rows) {
    if (!(name in row)) continue;
    const x = place(row, axis, first);
    if (x === null) continue;
    if (row[name] === null) {
      made.missing.push({ x, step: row.step });
    } else {
      made.x.push(x);
      made.y.push(row[name] / unit);
      made.steps.push(row.step);
    }
  }
  return made;
}

// Return the centred mean over a share of the axis, over fewer points at its ends.
export function smoothed(x, y, share) {
  const count = y.length;
  const half = (share * (x[count - 1] - x[0])) / 2;
  if (!(half > 0) || count < 3) return y;
  // An end of the axis that is just within reach is not lost to rounding.
  const rounding = 1e-9 * (x[count - 1] - x[0]);
  const sums = new Float64Array(count + 1);
  for (let i = 0; i < count; i++) sums[i + 1] = sums[i] + y[i];
  const means = new Array(count);
  let from = 0;
  let to = 0;
  for (let i = 0; i < count; i++) {
    const reach = Math.min(half, x[i] - x[0], x[count - 1] - x[i]) + rounding;
    while (x[from] < x[i] - reach) from++;
    while (to < count && x[to] <= x[i] + reach) to++;
    means[i] = (sums[to] - sums[from]) / (to - from);
  }
  return means;
}

export function nearest(sorted, x) {
  let low = 0;
  let high = sorted.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (sorted[middle] < x) low = middle;
    else high = middle;
  }
  return Math.abs(sorted[low] - x) <= Math.abs(sorted[high] - x) ? low : high;
}

function ticks(low, high, wanted) {
  const rough = (high - low) / wanted;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((each) => each >= rough);
  const made = [];
  for (let i = Math.ceil(low / step); i * step <= high + 1e-9 * step; i++) made.push(i * step);
  return made;
}

function powers(low, high) {
  const made = [];
  for (let power = Math.ceil(Math.log10(low)); power <= Math.log10(high); power++) made.push(10 ** power);
  return made.length > 1 ? made : [low, high];
}

// Write a tick with as many digits as tell it from the one beside it.
function tickText(value, step) {
  const size = Math.abs(value);
  const apart = step && size ? Math.floor(Math.log10(size)) - Math.floor(Math.log10(step)) + 1 : 4;
  const digits = Math.min(Math.max(apart, 1), 15);
  const short = (unit) => Number((value / unit).toPrecision(digits));
  if (size >= 1e9) return `${short(1e9)}G`;
  if (size >= 1e6) return `${short(1e6)}M`;
  if (size >= 1e4) return `${short(1e3)}k`;
  if (size !== 0 && size < 1e-3) return short(1).toExponential();
  return String(short(1));
}

// Return the extremes of the axis of values, a little room around them.
function range(lines, isLog) {
  let low = Infinity;
  let high = -Infinity;
  for (const { y } of lines) {
    for (const value of y) {
      if (isLog && value <= 0) continue;
      low = Math.min(low, value);
      high = Math.max(high, value);
    }
  }
  if (low > high) return isLog ? [0.1, 1] : [0, 1];
  if (isLog) return low === high ? [low / 2, high * 2] : [low, high];
  const room = low === high ? Math.abs(low) / 10 || 1 : (high - low) / 20;
  return [low - room, high + room];
}

// Put events together that are nearer than a part of the axis to the one before, so that their labels have room.
function together(events, near) {
  const groups = [];
  for (const event of [...events].sort((a, b) => a.x - b.x)) {
    if (groups.length && event.x - groups.at(-1).at(-1).x < near) groups.at(-1).push(event);
    else groups.push([event]);
  }
  return groups;
}

// Return the path of a line, of many points the lowest and highest of each pixel's column.
function path(x, y, toX, toY) {
  const columns = [];
  for (let i = 0; i < x.length; i++) {
    const left = toX(x[i]);
    const top = toY(y[i]);
    if (!Number.isFinite(top)) continue;
    const column = columns.at(-1);
    if (x.length > 1500 && column && Math.abs(column[0] - left) < 0.5) {
      column[1] = Math.min(column[1], top);
      column[2] = Math.max(column[2], top);
    } else {
      columns.push([left, top, top]);
    }
  }
  const at = (left, top) => `${left.toFixed(1)} ${top.toFixed(1)}`;
  return columns
    .map(([left, high, low], i) => `${i ? "L" : "M"}${at(left, high)}${low > high ? `L${at(left, low)}` : ""}`)
    .join("");
}

// The bars of a histogram, as wide as its bins.
function barsOf(line, { toX, toY }) {
  const half = binOf(line) / 2;
  return line.x.map((x, i) =>
    svg("rect", {
      class: `line column c${line.colour % COLOURS}`,
      x: toX(x - half),
      y: toY(line.y[i]),
      width: toX(x + half) - toX(x - half),
      height: toY(0) - toY(line.y[i]),
    }),
  );
}

const binOf = ({ x }) => (x.length > 1 ? x[1] - x[0] : 1);

// A point of a line; null where it has no place, as 0 on a logarithmic axis.
function dot(line, i, radius, { toX, toY }) {
  const top = toY(line.y[i]);
  return Number.isFinite(top)
    ? svg("circle", { class: `line dot c${line.colour % COLOURS}`, cx: toX(line.x[i]), cy: top, r: radius })
    : null;
}

// Smooth a line, and cut it to the part of the axis that is shown.
function within(line, smooth, { from = null, to = null }) {
  const { x, y, steps, missing } = line.points;
  const mean = smooth ? smoothed(x, y, smooth) : y;
  if (from === null) return { ...line, ...line.points, raw: y, y: mean };
  const isIn = (at) => at >= from && at <= to;
  const cut = (values) => values.filter((_, i) => isIn(x[i]));
  const raw = cut(y);
  return {
    ...line,
    x: cut(x),
    raw,
    y: smooth ? cut(mean) : raw,
    steps: cut(steps),
    missing: missing.filter((gap) => isIn(gap.x)),
  };
}

// A chart whose lines can change. lines: [{name, label?, points, colour, dashed}], see `points`.
// settings: {axis, smooth (share), log, from, to (ends of the axis, null: all), events: [{x, text, kind}], open(step),
// zoom(from, to), bars (whether the lines are histograms)}. Another axis than those of `place` says what x is.
export function makeChart(title, group, key) {
  const at = el("span", { class: "at", role: "status" });
  const legend = el("div", { class: "legend" });
  const plot = svg("svg", { class: "plot", role: "img", "aria-label": title, height: HEIGHT });
  const values = el("details", { class: "values", "data-key": `values ${key}` }, el("summary", {}, "Table"));
  const figure = el(
    "figure",
    { class: "chart item", tabindex: "0", "data-key": `chart ${key}`, "aria-label": title },
    el("figcaption", {}, el("small", {}, group, " ", at), " ", title),
    legend,
    plot,
    values,
  );
  const chart = { element: figure, lines: [], settings: {}, index: null, width: 0 };

  function draw(lines = chart.lines, settings = chart.settings) {
    chart.lines = lines;
    chart.settings = settings;
    const width = Math.max(plot.parentNode.clientWidth - 18, 0) || 520;
    chart.width = width;
    const { smooth, log: isLog, axis } = settings;
    const drawn = lines.map((line) => within(line, smooth, settings));
    const [low, high] = range(
      drawn.map(({ raw }) => ({ y: settings.bars ? [0, ...raw] : raw })),
      isLog,
    );
    const beside = settings.bars && drawn.length ? binOf(drawn[0]) / 2 : 0;
    const ends = drawn.flatMap((line) => [line.x[0] - beside, line.x.at(-1) + beside]);
    const known = [...ends, ...drawn.flatMap((line) => line.missing.map(({ x }) => x))].filter(Number.isFinite);
    const start = known.length ? Math.min(...known) : 0;
    const end = known.length ? Math.max(...known) : 1;
    const span = end - start || 1;
    const inner = { width: width - EDGE.left - EDGE.right, height: HEIGHT - EDGE.top - EDGE.bottom };
    const toX = (x) => EDGE.left + (end === start ? 0.5 : (x - start) / span) * inner.width;
    const share = isLog ? (y) => Math.log(y / low) / Math.log(high / low) : (y) => (y - low) / (high - low);
    const toY = (y) => EDGE.top + (1 - share(y)) * inner.height;
    const bottom = EDGE.top + inner.height;
    const across = (isLog ? powers(low, high) : ticks(low, high, 6)).map((value, i, all) => [
      svg("path", { class: "grid", d: `M${EDGE.left} ${toY(value)}H${width - EDGE.right}` }),
      svg(
        "text",
        { x: EDGE.left - 6, y: toY(value) + 4, "text-anchor": "end" },
        tickText(value, isLog ? null : all[1] - all[0]),
      ),
    ]);
    const xText = axis === "time" ? clock : tickText;
    const along = (end === start ? [start] : ticks(start, end, width < 420 ? 6 : 9))
      .filter((value) => axis !== "update" || Number.isInteger(value))
      .map((value, i, all) =>
        svg("text", { x: toX(value), y: HEIGHT - 6, "text-anchor": "middle" }, xText(value, all[1] - all[0])),
      );
    const marks = together(
      (settings.events ?? []).filter(({ x }) => x >= start && x <= end),
      (span * NEAR) / inner.width,
    ).map((events) => {
      const left = toX(events[0].x);
      const isLeft = left < width / 2;
      const isOneKind = events.every(({ kind }) => kind === events[0].kind);
      const words = events.length > 1 ? `${events.length} ${isOneKind ? events[0].kind : "event"}s` : events[0].kind;
      return svg(
        "g",
        { class: `event ${events.at(-1).kind}` },
        svg("title", {}, events.map(({ text }) => text).join("\n")),
        events.map(({ x }) => svg("path", { d: `M${toX(x)} ${EDGE.top}V${bottom}` })),
        svg("circle", { cx: left, cy: EDGE.top, r: 4 }),
        svg(
          "text",
          { x: left + (isLeft ? 7 : -7), y: EDGE.top + 4, "text-anchor": isLeft ? "start" : "end" },
          words,
        ),
      );
    });
    const curves = drawn.map((line) => {
      const kind = `line c${line.colour % COLOURS}${line.dashed ? " dashed" : ""}`;
      if (settings.bars) return barsOf(line, { toX, toY });
      if (line.x.length === 1) return dot(line, 0, 3.5, { toX, toY });
      const dots = line.x.length <= 12 ? line.x.map((_, i) => dot(line, i, 2.5, { toX, toY })) : [];
      const faint =
        line.y === line.raw ? null : svg("path", { class: `${kind} raw`, d: path(line.x, line.raw, toX, toY) });
      return [faint, svg("path", { class: kind, d: path(line.x, line.y, toX, toY) }), dots];
    });
    const gaps = drawn
      .flatMap((line) => line.missing)
      .map(({ x, step }) =>
        svg(
          "path",
          { class: "missing", d: `M${toX(x) - 4} ${bottom}l4 -7l4 7z` },
          svg("title", {}, `not finite at update ${step}`),
        ),
      );
    chart.cursor = svg("g", { class: "cursor" });
    plot.setAttribute("width", width);
    plot.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    plot.replaceChildren(...[across, along, marks, curves, gaps, chart.cursor].flat(Infinity).filter(Boolean));
    chart.drawn = drawn;
    chart.longest = drawn.reduce((a, b) => (b.x.length > a.x.length ? b : a), drawn[0]);
    chart.scale = { toX, toY, from: (left) => start + ((left - EDGE.left) / inner.width) * span, bottom };
    if (values.open) fill();
    read(chart.index);
  }

  // Show the values at a point of the longest line; null: the last ones.
  function read(index) {
    const { longest, drawn, settings } = chart;
    const count = longest?.x.length ?? 0;
    chart.index = index === null || !count ? null : Math.max(0, Math.min(count - 1, index));
    const x = chart.index === null ? null : longest.x[chart.index];
    at.textContent = x === null ? "" : `${settings.axis} ${settings.axis === "time" ? clock(x) : number(x)}`;
    const dots = [];
    const keys = drawn.map((line) => {
      const i = x === null ? line.x.length - 1 : nearest(line.x, x);
      if (x !== null && i >= 0) dots.push(dot(line, i, 4, chart.scale));
      return el(
        "span",
        { class: line.dashed ? "key dashed" : "key" },
        el("i", { class: `c${line.colour % COLOURS}` }),
        breakable(line.label ?? line.name),
        " ",
        el("b", {}, i < 0 ? "–" : x === null && !isOverUpdates(settings.axis) ? "" : number(line.y[i])),
      );
    });
    legend.replaceChildren(...keys);
    const ruler = x === null ? [] : [svg("path", { d: `M${chart.scale.toX(x)} ${EDGE.top}V${chart.scale.bottom}` })];
    chart.cursor.replaceChildren(...ruler, ...dots.filter(Boolean));
  }

  function fill() {
    const { drawn, longest, settings } = chart;
    const steps = longest?.steps ?? [];
    const every = Math.ceil(steps.length / 100) || 1;
    const shown = steps.filter((_, i) => i % every === 0 || i === steps.length - 1);
    const cell = (line, step) => {
      const i = nearest(line.steps, step);
      return line.steps[i] === step ? exact(line.raw[i]) : "";
    };
    const hasUpdates = isOverUpdates(settings.axis);
    const rows = shown.map((step) => [
      settings.open
        ? el("button", { class: "link", type: "button", on: { click: () => settings.open(step) } }, step)
        : hasUpdates
          ? step
          : number(step),
      ...drawn.map((line) => cell(line, step)),
    ]);
    const head = el(
      "tr",
      {},
      el("th", { scope: "col" }, hasUpdates ? "update" : settings.axis),
      drawn.map((line) => el("th", { scope: "col" }, breakable(line.label ?? line.name))),
    );
    const body = (hasUpdates ? rows.reverse() : rows).map(([first, ...rest]) =>
      el(
        "tr",
        {},
        el("th", { scope: "row" }, first),
        rest.map((value) => el("td", {}, value)),
      ),
    );
    const note = every > 1 ? el("p", { class: "note" }, `One of ${every} points; the curve has all.`) : null;
    replace(
      values,
      el("summary", {}, "Table"),
      note,
      el(
        "div",
        {
          class: "wide tall",
          tabindex: "0",
          role: "region",
          "aria-label": `${title}: values`,
          "data-key": `values of ${key}`,
        },
        el("table", {}, el("thead", {}, head), el("tbody", {}, body)),
      ),
    );
  }

  const under = (event) =>
    nearest(chart.longest.x, chart.scale.from(event.clientX - plot.getBoundingClientRect().left));
  const openAt = (index) => chart.settings.open?.(chart.longest.steps[index]);
  const reads = (event) => {
    if (chart.longest?.x.length) read(under(event));
  };
  // A drag marks a part of the axis, which is then all that is shown.
  let pressed = null;
  let dragged = false;
  const inPlot = (event) => event.clientX - plot.getBoundingClientRect().left;
  plot.addEventListener("pointerdown", (event) => {
    pressed = inPlot(event);
    dragged = false;
    reads(event);
  });
  plot.addEventListener("pointermove", (event) => {
    reads(event);
    if (pressed === null || !chart.settings.zoom || Math.abs(inPlot(event) - pressed) < DRAG) return;
    dragged = true;
    const [left, right] = [pressed, inPlot(event)].sort((a, b) => a - b);
    chart.cursor.prepend(
      svg("rect", { x: left, y: EDGE.top, width: right - left, height: chart.scale.bottom - EDGE.top }),
    );
  });
  plot.addEventListener("pointerup", (event) => {
    if (dragged) chart.settings.zoom(...[pressed, inPlot(event)].map(chart.scale.from).sort((a, b) => a - b));
    pressed = null;
  });
  plot.addEventListener("pointerleave", (event) => {
    pressed = null;
    if (event.pointerType === "mouse") read(null);
  });
  plot.addEventListener("click", (event) => {
    if (!dragged && chart.longest?.x.length) openAt(under(event));
  });
  figure.addEventListener("blur", () => read(null));
  figure.addEventListener("keydown", (event) => {
    if (event.target !== figure || !chart.longest?.x.length) return;
    const last = chart.longest.x.length - 1;
    const now = chart.index ?? last;
    const stride = event.shiftKey ? Math.max(1, Math.round(last / 20)) : 1;
    const to = { ArrowLeft: now - stride, ArrowRight: now + stride, Home: 0, End: last }[event.key];
    if (event.key === "Escape") read(null);
    if (event.key === "Enter") openAt(now);
    if (to === undefined) return;
    event.preventDefault();
    read(chart.index === null && event.key !== "Home" ? last : to);
  });
  values.addEventListener("toggle", () => {
    if (values.open) fill();
  });
  new ResizeObserver(() => {
    if (chart.drawn && figure.clientWidth && Math.abs(figure.clientWidth - 18 - chart.width) > 1) draw();
  }).observe(figure);
  return { element: figure, draw };
}

export function sparkline(values, label) {
  const known = values.filter((value) => value !== null);
  if (known.length < 2) return null;
  const low = Math.min(...known);
  const high = Math.max(...known);
  const toX = (i) => 1 + (i / (values.length - 1)) * 98;
  const toY = (value) => 25 - ((value - low) / (high - low || 1)) * 22;
  const kept = values.map((value, i) => [i, value]).filter(([, value]) => value !== null);
  const line = kept.map(([i, value], k) => `${k ? "L" : "M"}${toX(i).toFixed(1)} ${toY(value).toFixed(1)}`).join("");
  return svg(
    "svg",
    { class: "spark", viewBox: "0 0 100 28", preserveAspectRatio: "none", role: "img", "aria-label": label },
    svg("title", {}, label),
    svg("path", { d: line }),
  );
}
