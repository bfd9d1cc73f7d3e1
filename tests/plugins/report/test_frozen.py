"""A report that is the page of `rlhf watch`: what of a run is in its file, and that it needs nothing else."""

from __future__ import annotations

import base64
import hashlib
import re
from typing import Any

import pytest
from rlhf_report.frozen import PAGE, collect, frozen, joined, thinned

from tests.shared import page_answers
from tests.shared.report_runs import answers_in


class Answering:
    """Answers as `Watched` does, from those of `page_answers`."""

    def __init__(self, found: dict[str, Any]) -> None:
        self.found = found

    def runs(self) -> Any:
        return self.found["api/runs"]

    def run(self, id: str) -> Any:
        return self.found[f"api/runs/{id}"]

    def compare(self, ids: list[str]) -> Any:
        return self.found[f"api/compare?runs={'%2C'.join(ids)}"]

    def metrics(self, id: str, stage: str, after: float, names: None) -> Any:
        return self.found[f"api/runs/{id}/{stage}/metrics"]

    def results(self, id: str, stage: str) -> Any:
        return self.found[f"api/runs/{id}/{stage}/results"]

    def rollouts(self, id: str, stage: str, update: int, wanted: Any) -> Any:
        return self.found[f"api/runs/{id}/{stage}/rollouts?update={update}"]

    def rows(self, id: str, stage: str, update: int, *_: Any) -> Any:
        return self.found[f"api/runs/{id}/{stage}/rows?update={update}"]

    def evaluations(self, id: str, stage: str) -> Any:
        return self.found[f"api/runs/{id}/{stage}/evaluations"]

    def evaluation(self, id: str, stage: str, update: int) -> Any:
        return self.found[f"api/runs/{id}/{stage}/evaluations/{update}"]


def test_a_report_has_the_answers_for_all_that_it_shows() -> None:
    found = page_answers.answers()
    kept = collect(Answering(found), ["a"])
    assert kept["api/runs"]["runs"] == found["api/runs"]["runs"][:1]
    places = ("a", *(f"a/{stage}/{kind}" for stage in ("policy", "rm") for kind in ("metrics", "results")))
    shown = {
        "api/runs",
        *(f"api/runs/{place}" for place in places),
        *(f"api/runs/a/policy/rollouts?update={update}" for update in (39, 40, 41)),
        *(f"api/runs/a/rm/rows?update={update}" for update in (2, 4)),
        *("api/runs/a/rm/evaluations", "api/runs/a/rm/evaluations/2", "api/runs/a/rm/evaluations/4"),
    }
    assert kept.keys() == shown
    assert answers_in(frozen(kept, "first")) == kept


def test_of_many_updates_a_report_has_the_first_the_last_the_saved_and_some_between() -> None:
    found = page_answers.answers()
    policy = found["api/runs/a"]["stages"][1]
    policy |= {"rollouts": list(range(101)), "saved": 47}
    for update in range(101):
        found[f"api/runs/a/policy/rollouts?update={update}"] = {"update": update, "total": 0, "groups": []}
    kept = collect(Answering(found), ["a"])
    shown = kept["api/runs/a"]["stages"][1]
    assert shown["rollouts"] == [0, 20, 40, 47, 60, 80, 100]
    assert shown["kept_of"]["rollouts"] == 101
    assert "api/runs/a/policy/rollouts?update=40" in kept
    assert "api/runs/a/policy/rollouts?update=41" not in kept


def test_two_runs_are_compared() -> None:
    found = page_answers.answers()
    for stage in ("rm", "policy"):
        for route in [route for route in found if f"/a/{stage}" in route]:
            found.setdefault(route.replace("/a/", "/b/"), found[route])
    kept = collect(Answering(found), ["a", "b"])
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
