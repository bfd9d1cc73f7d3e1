"use strict";
(async () => {
  async function unpacked(id) {
    const bytes = Uint8Array.from(atob(document.getElementById(id).textContent), (c) => c.charCodeAt(0));
    return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
  }

  const library = document.createElement("script");
  library.textContent = await unpacked("library");
  document.head.append(library);
  const data = JSON.parse(await unpacked("data"));
  const charts = new Map();
  const slider = document.getElementById("smooth");
  const dark = matchMedia("(prefers-color-scheme: dark)");

  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const colour = (i) => css(`--c${i % 8}`);
  const format = (x, percent) => {
    if (!Number.isFinite(x)) return "–";
    if (percent) return `${(100 * x).toFixed(1)} %`;
    const size = Math.abs(x);
    if (size !== 0 && (size < 1e-3 || size >= 1e6)) return x.toExponential(2);
    if (size >= 1000) return Math.round(x).toLocaleString("en");
    return String(Number(x.toPrecision(4)));
  };

  // The centred mean over a share of the run, over fewer points at its ends; the stretches have equal length.
  function smoothed(x, y, share) {
    const n = y.length, half = (share * (x[n - 1] - x[0])) / 2;
    if (half <= 0 || n < 3) return Float32Array.from(y);
    const sums = new Float64Array(n + 1), out = new Float32Array(n);
    for (let i = 0; i < n; i++) sums[i + 1] = sums[i] + y[i];
    for (let i = 0, a = 0, b = 0; i < n; i++) {
      const reach = Math.min(half, x[i] - x[0], x[n - 1] - x[i]);
      while (x[a] < x[i] - reach) a++;
      while (b < n && x[b] <= x[i] + reach) b++;
      out[i] = (sums[b] - sums[a]) / (b - a);
    }
    return out;
  }

  function smooth(chart) {
    if (!chart.smooths || chart.share === slider.value) return;
    chart.share = slider.value;
    for (const s of chart.series) {
      s.y = smoothed(s.x, s.plain, slider.value / 100);
      s.source.data = { ...s.source.data, y: s.y };
    }
  }

  function paint(chart) {
    const ink = css("--soft"), line = "#80808038";  // legible on paper too: print does not redraw a dark canvas
    for (const renderer of chart.fig.renderers) {
      const glyph = renderer.glyph, [kind, i] = glyph.tags;
      if (kind === "stroke") glyph.line_color = { value: colour(i) };
      if (kind === "fill" || kind === "both") glyph.fill_color = { value: colour(i) };
      if (kind === "both") glyph.line_color = { value: colour(i) };
      if (kind === "quiet") glyph.line_color = { value: ink };
    }
    for (const axis of [...chart.fig.below, ...chart.fig.left]) axis.major_label_text_color = ink;
    for (const grid of chart.fig.center) if (grid.dimension === 1) grid.grid_line_color = line;
    chart.cursor.line_color = ink;
  }

  function read(chart, i) {
    const s0 = chart.longest, legend = chart.figure.querySelectorAll(".key b");
    chart.index = i === null ? null : Math.max(0, Math.min(s0.x.length - 1, i));
    const at = chart.figure.querySelector(".at");
    at.hidden = chart.index === null;
    if (chart.index === null) {
      chart.cursor.visible = false;
      chart.here.data = { x: [], y: [], colour: [] };
      for (const b of legend) b.textContent = b.dataset.last;
      return;
    }
    const x = s0.x[chart.index], marks = { x: [], y: [], colour: [] };
    at.textContent = `${chart.x} ${format(chart.x === "update" ? Math.round(x) : x, chart.x === "confidence")}`;
    chart.series.forEach((s, k) => {
      const j = nearest(s.x, x);
      legend[k].textContent = format(s.y[j], chart.percent);
      marks.x.push(s.x[j]); marks.y.push(s.y[j]); marks.colour.push(colour(chart.colours[k]));
    });
    chart.cursor.location = x;
    chart.cursor.visible = true;
    chart.here.data = marks;
  }

  function nearest(xs, x) {
    let a = 0, b = xs.length - 1;
    while (b - a > 1) { const m = (a + b) >> 1; if (xs[m] < x) a = m; else b = m; }
    return Math.abs(xs[a] - x) <= Math.abs(xs[b] - x) ? a : b;
  }

  function listen(chart) {
    const { figure, view } = chart, plot = figure.querySelector(".plot");
    const move = (event) => {
      const left = plot.getBoundingClientRect().left;
      read(chart, nearest(chart.longest.x, view.frame.x_scale.invert(event.clientX - left)));
    };
    plot.addEventListener("pointermove", move);
    plot.addEventListener("pointerdown", move);
    plot.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") read(chart, null); });
    plot.addEventListener("dblclick", () => chart.fig.reset.emit());
    figure.addEventListener("blur", () => read(chart, null));
    figure.addEventListener("keydown", (event) => {
      const last = chart.longest.x.length - 1, step = Math.max(1, Math.round(last / 50));
      const now = chart.index ?? last;
      const to = { ArrowLeft: now - step, ArrowRight: now + step, Home: 0, End: last }[event.key];
      if (event.key === "Escape") read(chart, null);
      if (to === undefined) return;
      event.preventDefault();
      read(chart, chart.index === null ? last : to);
    });
  }

  async function draw(figure) {
    if (charts.has(figure.id)) return;
    charts.set(figure.id, null);
    const { item, x, colours, smooths, percent } = data[figure.id];
    const views = await Bokeh.embed.embed_item(item, `${figure.id}-plot`);
    const view = [...views][0], fig = view.model, doc = fig.document;
    const named = (name) => doc.get_model_by_name(`${figure.id}/${name}`);
    const series = colours.map((_, k) => {
      const source = named(k), y = source.data.y;
      return { source, x: source.data.x, y, plain: y };
    });
    const longest = series.reduce((a, b) => (b.x.length > a.x.length ? b : a));
    const chart = { figure, view, fig, x, colours, smooths, percent, series, longest, index: null, cursor: named("cursor"), here: named("here") };
    if (matchMedia("(pointer: coarse)").matches) fig.toolbar.active_drag = null;  // a finger scrolls the page
    charts.set(figure.id, chart);
    paint(chart);
    smooth(chart);
    listen(chart);
  }

  const all = [...document.querySelectorAll("[data-chart]")];
  const ready = () => [...charts.values()].filter(Boolean);
  const key = () => document.querySelectorAll("[data-colour]").forEach((i) => { i.style.color = colour(i.dataset.colour); });
  const repaint = () => { key(); ready().forEach(paint); };
  const near = new Set();  // charts in or near the viewport: others follow the slider when they scroll into view
  const watch = new IntersectionObserver((seen) => {
    for (const { target, isIntersecting } of seen) {
      if (!isIntersecting) { near.delete(target.id); continue; }
      near.add(target.id);
      if (charts.get(target.id)) smooth(charts.get(target.id)); else draw(target);
    }
  }, { rootMargin: "300px" });
  all.forEach((figure) => watch.observe(figure));
  // Charts out of sight are drawn when the browser is idle, so that they can be scrolled to and printed.
  const idle = window.requestIdleCallback ?? ((f) => setTimeout(f, 50));
  const rest = [...all];
  const next = () => { const figure = rest.shift(); if (figure) draw(figure).then(() => idle(next)); };
  idle(next);

  key();
  dark.addEventListener("change", repaint);
  slider?.addEventListener("input", () => {
    document.getElementById("smooth-said").textContent = `${slider.value} %`;
    for (const id of near) if (charts.get(id)) smooth(charts.get(id));
  });
  addEventListener("beforeprint", () => { document.querySelectorAll("details").forEach((d) => { d.open = true; }); ready().forEach(smooth); repaint(); });
  addEventListener("afterprint", repaint);
  window.rlhfCharts = charts;
})();
