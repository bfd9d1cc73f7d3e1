"""A report that is the page of `rlhf watch`: what of a run is in its file, and that it needs nothing else."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
from typing import Any

import pytest
from rlhf_report.frozen import PAGE, collect, frozen, joined, thinned

from tests.shared import page_answers


def answered(found: dict[str, Any], asked: list[str]) -> Any:
    """Return what answers the routes as the server does, noting each."""

    def get(route: str) -> Any:
        asked.append(route)
        return found[route.replace("&limit=50", "")]

    return get


def inside(page: str) -> dict[str, Any]:
    """Read the answers in a page."""
    packed = re.search(r'<script type="text/plain" id="frozen">([^<]*)</script>', page)
    assert packed is not None
    found: dict[str, Any] = json.loads(gzip.decompress(base64.b64decode(packed[1])))
    return found


def test_a_report_has_the_answers_for_all_that_it_shows() -> None:
    found = page_answers.answers()
    asked: list[str] = []
    kept = collect(answered(found, asked), ["a"])
    assert kept["api/runs"]["runs"] == found["api/runs"]["runs"][:1]
    shown = {
        *("api/runs", "api/runs/a", "api/runs/a/policy/metrics", "api/runs/a/rm/metrics"),
        *(f"api/runs/a/policy/rollouts?update={update}" for update in (39, 40, 41)),
        *(f"api/runs/a/rm/rows?update={update}" for update in (2, 4)),
        *("api/runs/a/rm/evaluations", "api/runs/a/rm/evaluations/2", "api/runs/a/rm/evaluations/4"),
    }
    assert kept.keys() == shown
    assert len(asked) == len(set(asked))
    assert inside(frozen(kept, "first")) == kept


def test_of_many_updates_a_report_has_the_first_the_last_and_some_between() -> None:
    found = page_answers.answers()
    found["api/runs/a"]["stages"][1]["rollouts"] = list(range(101))
    for update in range(101):
        found[f"api/runs/a/policy/rollouts?update={update}"] = {"update": update}
    kept = collect(answered(found, []), ["a"])
    assert kept["api/runs/a"]["stages"][1]["rollouts"] == [0, 20, 40, 60, 80, 100]
    assert "api/runs/a/policy/rollouts?update=40" in kept
    assert "api/runs/a/policy/rollouts?update=41" not in kept


def test_two_runs_are_compared() -> None:
    found = page_answers.answers()
    for stage in ("rm", "policy"):
        for route in [route for route in found if f"/a/{stage}" in route]:
            found.setdefault(route.replace("/a/", "/b/"), found[route])
    kept = collect(answered(found, []), ["a", "b"])
    assert kept["api/compare?runs=a%2Cb"] == found["api/compare?runs=a%2Cb"]
    assert [run["id"] for run in kept["api/runs"]["runs"]] == ["a", "b"]


def test_thinning_keeps_ends_extremes_gaps_and_evaluations() -> None:
    rows = page_answers.metrics(20_000)
    rows[12_345]["reward"] = 99.0
    rows[5_432]["kl"] = -7.0
    kept = thinned(rows)
    assert len(kept) < 2_000
    assert kept[0] is rows[0]
    assert kept[-1] is rows[-1]
    assert rows[12_345] in kept
    assert rows[5_432] in kept
    assert any(row["loss"] is None for row in kept)
    assert [row["step"] for row in kept] == sorted(row["step"] for row in kept)
    few = [row | ({"eval_x": 1.0} if row["step"] % 500 == 0 else {}) for row in rows]
    assert sum("eval_x" in row for row in thinned(few)) == 40
    assert thinned(rows[:50]) == rows[:50]


def test_the_file_asks_for_nothing_and_runs_no_other_script() -> None:
    hostile = "</script><script>document.title='owned'</script><img src=http://elsewhere>"
    page = frozen(page_answers.answers(hostile), hostile)
    assert hostile not in page
    assert not re.search(r"<[^>]+\b(?:src|action)=|<link\b|@import|url\((?!#)", page.replace('"src"', ""))
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy is not None
    assert "'unsafe-inline'" not in policy[1]
    for directive, tag in (("script-src", 'script type="module"'), ("style-src", "style")):
        content = re.search(rf"<{tag}>(.*?)</{tag.split()[0]}>", page, re.DOTALL)
        assert content is not None
        digest = base64.b64encode(hashlib.sha256(content[1].encode()).digest()).decode()
        assert f"{directive} 'sha256-{digest}'" in policy[1]


def test_every_module_of_the_page_is_in_the_file() -> None:
    text = joined("main")
    assert not re.search(r"^\s*(?:import|export)\b", text, re.MULTILINE)
    modules = re.findall(r"^const from_(\w+) = \(\(\) => \{$", text, re.MULTILINE)
    assert sorted(modules) == sorted(path.stem for path in PAGE.glob("*.js"))
    for module, names in re.findall(r"const (?:\{([^}]*)\}) = from_(\w+);", text):
        exported = re.search(
            rf"^const from_{names} = .*?^return \{{ (.*?) \}};$", text, re.MULTILINE | re.DOTALL
        )
        assert exported is not None
        wanted = {name.strip() for name in module.split(",") if name.strip()}
        assert wanted <= set(exported[1].split(", "))


@pytest.mark.parametrize("name", sorted(path.name for path in PAGE.glob("*.js")))
def test_texts_are_put_in_as_texts(name: str) -> None:
    text = (PAGE / name).read_text(encoding="utf-8")
    banned = (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "new Function",
        "srcdoc",
    )
    assert [word for word in banned if word in text] == []
