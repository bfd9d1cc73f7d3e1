"""The page of `rlhf watch` as one file: its scripts joined, and the answers of its routes inside.

`collect` asks for what a report shows, and leaves out what would make it large; `frozen` writes the page.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import math
import re
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode

from rlhf_http.fields import BadRequest

from rlhf_report.watch.rollout_view import WantedRollouts

if TYPE_CHECKING:
    from rlhf_report.watch.watched import Watched

PAGE = Path(__file__).parent / "page"
IMPORT = re.compile(r'^import (\{[^}]*\}) from "\./(\w+)\.js";$', re.MULTILINE)
EXPORT = re.compile(r"^export (?=(?:async )?(?:function|const|class) (\w+))", re.MULTILINE)
CONTENT = re.compile(r"<(style|script)[^>]*>(.*?)</\1>", re.DOTALL)

MOST_ROWS = 1200
"""Most rows of a stage's metrics in a report; the page says where there were more."""
SELDOM = 200
"""A metric with no more values than this has them all in a report."""
MOST_UPDATES = 6
"""Most updates of a stage whose rollouts, rows or evaluations are in a report, the first and last among them."""
MOST_GROUPS, MOST_TRAINED, MOST_HELD_OUT = 50, 50, 200
"""Most groups of a rollout, rows of an update, and rows of an evaluation in a report."""
MOST_CHARACTERS = 400_000
"""Characters of the groups of a rollout in a report."""
LONGEST = 4000
"""Characters of a text in a report."""
MOST_MESSAGES = 60
"""Messages of an episode in a report."""


def collect(watched: Watched, ids: Sequence[str]) -> dict[str, Any]:
    """Return the answers of routes that a report of one run, or of several to compare, has inside."""
    listed = {run["id"]: run for run in watched.runs()["runs"]}
    answers: dict[str, Any] = {"api/runs": {"runs": [listed[id] for id in dict.fromkeys(ids)]}}
    for id in dict.fromkeys(ids):
        _collect_run(watched, id, answers)
    if len(ids) > 1:
        answers[f"api/compare?{urlencode({'runs': ','.join(ids)})}"] = shortened(watched.compare(ids))
    return answers


def _collect_run(watched: Watched, id: str, answers: dict[str, Any]) -> None:
    """Add a run, its stages' curves and results, and the rollouts, rows and evaluations of some updates."""
    run = watched.run(id)
    route = f"api/runs/{quote(id, safe='')}"
    problems = dict.fromkeys(run["problems"])
    stages = []
    for stage in run["stages"]:
        name = stage["name"]
        place = f"{route}/{quote(stage['name'], safe='')}"
        rows = watched.metrics(id, name, -math.inf, None)["rows"]
        answers[f"{place}/metrics"] = {"rows": thinned(rows)}
        answers[f"{place}/results"] = shortened(watched.results(id, name))
        if stage["evaluations"]:
            answers[f"{place}/evaluations"] = watched.evaluations(id, name)
        kept: dict[str, list[int]] = {}
        for kind, read in _readers(watched, id, name).items():
            found = {}
            for update in _spread(stage[kind], stage["saved"]):
                try:
                    found[update] = read(update)
                except BadRequest as error:  # a file is damaged
                    problems[str(error)] = None
            between = "/" if kind == "evaluations" else "?update="
            answers |= {f"{place}/{kind}{between}{update}": answer for update, answer in found.items()}
            kept[kind] = list(found)
        counts = {kind: len(stage[kind]) for kind in kept}
        stages.append({**stage, **kept, "rows_logged": len(rows), "kept_of": counts})
    answers[route] = {**run, "stages": stages, "problems": list(problems)}


def _readers(watched: Watched, id: str, stage: str) -> dict[str, Callable[[int], dict[str, Any]]]:
    """Return {kind of answer: what reads that of an update, and leaves out what would be much}."""
    by_spread = WantedRollouts(sort="-spread", limit=MOST_GROUPS)
    return {
        "rollouts": lambda update: _cut(watched.rollouts(id, stage, update, by_spread)),
        "rows": lambda update: _largest(watched.rows(id, stage, update, "-loss", 0, MOST_TRAINED)),
        "evaluations": lambda update: _changed_most(watched.evaluation(id, stage, update)),
    }


def _spread(updates: Sequence[int], saved: int | None) -> list[int]:
    """Return at most MOST_UPDATES of them, evenly spread, and the one that the saved model is of or was sampled by."""
    last = len(updates) - 1
    places = {round(i * last / (MOST_UPDATES - 1)) for i in range(MOST_UPDATES)} if updates else set()
    if saved is not None and updates:
        places.add(max(bisect_right(updates, saved) - 1, 0))
    return [updates[place] for place in sorted(places)]


def _cut(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Keep the groups of a rollout that fit, those whose rewards differ most; `left_out` counts the others."""
    shown = shortened(answer)
    room = MOST_CHARACTERS
    kept: list[dict[str, Any]] = []
    for group in shown["groups"]:
        room -= len(json.dumps(group))
        if room < 0 and kept:
            break
        kept.append(group)
    kept.sort(key=lambda group: group["completions"][0]["index"])
    return {**shown, "groups": kept, "left_out": answer["total"] - len(kept)}


def _largest(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Count the rows of an update that are left out: those with smaller losses."""
    return dict(shortened({**answer, "left_out": answer["total"] - len(answer["rows"])}))


def _changed_most(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Keep the rows of an evaluation that changed most, in their order; `left_out` counts the others."""
    rows = answer["rows"]
    places = sorted(range(len(rows)), key=lambda i: -abs(rows[i]["change"] or 0.0))[:MOST_HELD_OUT]
    kept = [rows[i] for i in sorted(places)]
    return dict(shortened({**answer, "rows": kept, "left_out": len(rows) - len(kept)}))


def shortened(value: Any) -> Any:
    """Cut long texts, and long lists of messages, in an answer."""
    if isinstance(value, str):
        return value if len(value) <= LONGEST else f"{value[:LONGEST]}… ({len(value):,} characters)"
    if isinstance(value, Mapping):
        return {
            name: _messages(each) if name == "messages" else shortened(each) for name, each in value.items()
        }
    return [shortened(each) for each in value] if isinstance(value, list | tuple) else value


def _messages(messages: Any) -> Any:
    if not isinstance(messages, list) or len(messages) <= MOST_MESSAGES:
        return shortened(messages)
    more = {"role": "", "content": f"and {len(messages) - MOST_MESSAGES} more messages"}
    return [*shortened(messages[:MOST_MESSAGES]), more]


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
    packed = base64.b64encode(gzip.compress(written(answers), 9, mtime=0)).decode("ascii")
    policy = f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; base-uri 'none'"
    page = _read("index.html")
    page = re.sub(r'<link rel="(?:icon|stylesheet)"[^>]*>\n', "", page)
    page = page.replace('<script type="module" src="static/main.js"></script>\n', "")
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n{style}\n'
    made = (
        f"Made by rlhf {version('rlhf-core')}. Everything on this page is in this file; it asks for nothing."
    )
    body = f'<footer>{made}</footer>\n<script type="text/plain" id="frozen">{packed}</script>\n{script}\n'
    page = page.replace("<title>rlhf watch</title>", f"<title>{_escaped(title)} · rlhf</title>")
    return page.replace("</head>", f"{head}</head>").replace("</body>", f"{body}</body>")


def written(value: Any) -> bytes:
    """Write JSON that any text fits in, half characters too; numbers that JSON lacks are null."""
    try:
        text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    except ValueError:
        text = json.dumps(_without_nan(value), allow_nan=False, separators=(",", ":"))
    return text.encode()


def _without_nan(value: Any) -> Any:
    if isinstance(value, float):
        return value if value - value == 0 else None
    if isinstance(value, Mapping):
        return {name: _without_nan(each) for name, each in value.items()}
    return [_without_nan(each) for each in value] if isinstance(value, list | tuple) else value


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
