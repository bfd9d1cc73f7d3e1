"""The page of `rlhf watch` as one file: its scripts joined, and the answers of its routes inside.

`collect` asks whatever answers the routes for what a report shows; `frozen` writes the page.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

PAGE = Path(__file__).parent / "page"
IMPORT = re.compile(r'^import (\{[^}]*\}) from "\./(\w+)\.js";$', re.MULTILINE)
EXPORT = re.compile(r"^export (?=(?:async )?(?:function|const|class) (\w+))", re.MULTILINE)
CONTENT = re.compile(r"<(style|script)[^>]*>(.*?)</\1>", re.DOTALL)

MOST_ROWS = 1200
"""Most rows of a stage's metrics in a report; the page says where there were more."""
SELDOM = 200
"""A metric with no more values than this has them all in a report."""
MOST_UPDATES = 6
"""Most updates of a stage whose rollouts or rows are in a report, the first and last among them."""
Get = Callable[[str], Any]
"""What answers a route, such as `api/runs/ID` or `api/runs/ID/STAGE/rows?update=7`, with JSON."""


def collect(get: Get, ids: Sequence[str]) -> dict[str, Any]:
    """Return the answers that a report of one run, or of several to compare, has inside."""
    listed = [run for run in get("api/runs")["runs"] if run["id"] in ids]
    answers: dict[str, Any] = {"api/runs": {"runs": sorted(listed, key=lambda run: ids.index(run["id"]))}}
    for id in ids:
        _collect_run(get, f"api/runs/{quote(id, safe='')}", answers)
    if len(ids) > 1:
        route = f"api/compare?{urlencode({'runs': ','.join(ids)})}"
        answers[route] = get(route)
    return answers


def _collect_run(get: Get, route: str, answers: dict[str, Any]) -> None:
    """Add a run, its stages' curves, and the rollouts, rows and evaluations of some updates."""
    run = get(route)
    stages = []
    for stage in run["stages"]:
        place = f"{route}/{quote(stage['name'], safe='')}"
        rows = get(f"{place}/metrics")["rows"]
        answers[f"{place}/metrics"] = {"rows": thinned(rows)}
        kept = {kind: _spread(stage.get(kind) or []) for kind in ("rollouts", "rows", "evaluations")}
        for kind in ("rollouts", "rows"):
            for update in kept[kind]:
                answers[f"{place}/{kind}?update={update}"] = get(f"{place}/{kind}?update={update}&limit=50")
        if kept["evaluations"]:
            answers[f"{place}/evaluations"] = get(f"{place}/evaluations")
        for update in kept["evaluations"]:
            answers[f"{place}/evaluations/{update}"] = get(f"{place}/evaluations/{update}")
        stages.append({**stage, **kept, "rows_logged": len(rows)})
    answers[route] = {**run, "stages": stages}


def _spread(updates: Sequence[int]) -> list[int]:
    """Return at most MOST_UPDATES of them, evenly spread."""
    last = len(updates) - 1
    places = {round(i * last / (MOST_UPDATES - 1)) for i in range(MOST_UPDATES)}
    return [updates[place] for place in sorted(places)] if updates else []


def thinned(rows: Sequence[Mapping[str, Any]], most: int = MOST_ROWS) -> list[Mapping[str, Any]]:
    """Return about `most` rows: the first, the last, and of each stretch those with a metric's least or largest value.

    Rows with a metric that is logged seldom, such as those of evaluations, are kept, and those with a value that is not
    finite, of each at most SELDOM.
    """
    if len(rows) <= most:
        return list(rows)
    places: dict[str, list[int]] = {}
    missing: list[int] = []
    for place, row in enumerate(rows):
        for name in row.keys() - {"step", "time", "num_tokens"}:
            places.setdefault(name, []).append(place)
        if None in row.values():
            missing.append(place)
    kept = {0, len(rows) - 1, *missing[:SELDOM]}
    often = {name: at for name, at in places.items() if len(at) > SELDOM}
    for name in places.keys() - often.keys():
        kept.update(places[name])
    stretches = max(1, most // (2 * max(len(often), 1)))
    for name, at in often.items():
        for stretch in range(stretches):
            part = at[stretch * len(at) // stretches : (stretch + 1) * len(at) // stretches]
            values = {place: rows[place][name] for place in part if rows[place][name] is not None}
            if values:
                kept |= {min(values, key=values.__getitem__), max(values, key=values.__getitem__)}
    return [rows[place] for place in sorted(kept)]


def frozen(answers: Mapping[str, Any], title: str) -> str:
    """Return the page with the answers of its routes in it, which opens from a disk and asks for nothing.

    answers: {route: JSON}, as `api/runs`, `api/runs/ID`, `api/runs/ID/STAGE/metrics`; of a query, `update` and `runs`
    alone count: `api/runs/ID/STAGE/rollouts?update=7`.
    """
    style = f"<style>{_read('style.css')}</style>"
    script = f'<script type="module">{joined("main")}</script>'
    data = json.dumps(answers, separators=(",", ":"), allow_nan=False)
    packed = base64.b64encode(gzip.compress(data.encode(), 9, mtime=0)).decode("ascii")
    policy = f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; base-uri 'none'"
    page = _read("index.html")
    page = re.sub(r'<link rel="(?:icon|stylesheet)"[^>]*>\n', "", page)
    page = page.replace('<script type="module" src="static/main.js"></script>\n', "")
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n{style}\n'
    body = f'<script type="text/plain" id="frozen">{packed}</script>\n{script}\n'
    page = page.replace("<title>rlhf watch</title>", f"<title>{_escaped(title)} · rlhf</title>")
    return page.replace("</head>", f"{head}</head>").replace("</body>", f"{body}</body>")


def joined(name: str) -> str:
    """Return a module of the page with all that it imports before it, as one module.

    Each is a function whose value has what it exports.
    """
    parts: dict[str, str] = {}
    _collect(name, parts)
    return "\n".join(parts.values())


def _collect(name: str, parts: dict[str, str]) -> None:
    """Add a module to the parts, after those that it imports."""
    text = _read(f"{name}.js")
    for _, other in IMPORT.findall(text):
        if other not in parts:
            _collect(other, parts)
    body = EXPORT.sub("", IMPORT.sub(r"const \1 = from_\2;", text))
    parts[name] = (
        f"const from_{name} = (() => {{\n{body}\nreturn {{ {', '.join(EXPORT.findall(text))} }};\n}})();"
    )


def _hash(element: str) -> str:
    match = CONTENT.fullmatch(element)
    assert match is not None
    digest = hashlib.sha256(match[2].encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;")


def _read(name: str) -> str:
    return (PAGE / name).read_text(encoding="utf-8")
