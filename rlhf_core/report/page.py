"""The page: what its template is given, and the template filled in."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jinja2
from bokeh.resources import Resources
from markupsafe import Markup, escape

from rlhf_core.report.charts import Chart
from rlhf_core.report.groups import clock, number
from rlhf_core.resolved import to_toml

HERE = Path(__file__).parent / "page"
BUDGET = 700_000
"""Bytes of the page that the curves may take; see `stretches`."""
BYTES = 32
"""Of one stretch of one curve: two points of the line and a mean, float32, in base 64."""


@dataclass
class Page:
    """Charts and texts, gathered in the order of the page."""

    charts: dict[str, Chart] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def add(self, chart: Chart) -> Chart:
        self.charts[chart.id] = chart
        return chart


def stretches(curves: int) -> int:
    """Into how many stretches a run is cut for drawing, so that all curves fit the budget: 40 to 300."""
    return int(min(300, max(40, BUDGET / BYTES / max(curves, 1))))


def render(template: str, page: Page, **context: Any) -> str:
    """The whole page as HTML: nothing in it is loaded from elsewhere."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {"number": number, "clock": clock, "breaks": breaks, "toml": toml}
    data = {
        chart.id: {
            "item": chart.item,
            "x": chart.x,
            "colours": [line.colour for line in chart.legend],
            "smooths": chart.smooths,
            "percent": chart.percent,
        }
        for chart in page.charts.values()
    }
    return environment.get_template(template).render(
        **context,
        problems=page.problems,
        style=Markup((HERE / "style.css").read_text(encoding="utf-8")),
        script=Markup((HERE / "page.js").read_text(encoding="utf-8")),
        library=packed("\n".join(Resources(mode="inline", components=["bokeh"]).js_raw)),
        data=packed(json.dumps(data, separators=(",", ":"), allow_nan=False)),
        version=version("rlhf-core"),
    )


def breaks(name: str) -> Markup:
    """A metric's name, which may be broken after its slashes and underscores."""
    return Markup(str(escape(name)).replace("/", "/<wbr>").replace("_", "_<wbr>"))


def toml(config: Mapping[str, Any]) -> str:
    """A stage's fields as its file would have them."""
    return to_toml({"stage": [config]}).partition("[[stage]]\n")[2]


def packed(text: str) -> str:
    """Base 64 of the text, gzipped: what the page's script unpacks, a third of the size, and no `<` in it."""
    return base64.b64encode(gzip.compress(text.encode(), 9, mtime=0)).decode("ascii")


def slug(text: str, taken: Sequence[str] = ()) -> str:
    """A name for anchors and elements: letters, digits and hyphens."""
    plain = "".join(c if c.isalnum() and c.isascii() else "-" for c in text.lower()).strip("-") or "x"
    return plain if plain not in taken else slug(f"{plain}-{len(taken)}", taken)
