// The stages of a run and what flows between them, as the server lays them out.
import { svg } from "./dom.js";

const WIDTH = 208;
const HEIGHT = 96;

export function diagram({ width, height, boxes, arrows }) {
  const head = svg(
    "marker",
    { id: "head", viewBox: "0 0 8 8", refX: 6, refY: 4, markerWidth: 7, markerHeight: 7, orient: "auto" },
    svg("path", { d: "M0 0L8 4L0 8z" }),
  );
  const arrow = ({ path, label, x, y }) => [
    svg("path", { class: "edge", d: path, "marker-end": "url(#head)" }),
    svg("text", { class: "use", x, y }, label),
  ];
  const box = ({ x, y, name, trainer, state, lines }) =>
    svg(
      "g",
      { transform: `translate(${x} ${y})`, class: state.replaceAll(" ", "-") },
      svg("rect", { width: WIDTH, height: HEIGHT, rx: 10 }),
      svg("circle", { cx: WIDTH - 18, cy: 21, r: 5 }),
      svg("text", { x: 16, y: 27 }, svg("tspan", { class: "name" }, name), svg("tspan", { dx: 8 }, trainer)),
      lines.map((line, i) => svg("text", { x: 16, y: 47 + 16 * i }, line)),
    );
  return svg(
    "svg",
    {
      class: "flow",
      viewBox: `0 0 ${width} ${height}`,
      width,
      role: "img",
      "aria-label": `Stages: ${boxes.map(({ name }) => name).join(", ")}`,
    },
    svg("defs", {}, head),
    arrows.map(arrow),
    boxes.map(box),
  );
}
