"""Checks of reward functions before a run: columns, rows, and a call with made-up completions."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlhf_core import Registry, RewardInputs, data, plugins
from rlhf_core.contracts import Forecast
from rlhf_core.errors import InputError
from rlhf_core.rollouts import Reward, WeightedReward, forecast_rewards, open_rewards, score, set_up

STAGE: Any = SimpleNamespace(name="policy", mesh=None, is_main=True)
FUNCTIONS = """
from pathlib import Path
CALLED = Path(__file__).with_name("called")

def scalar(completions):
    return 1.0

def prints(completions):
    print("in the way")
    return [0.0] * len(completions)

def counted(completions, answer):
    CALLED.write_text(repr((completions, answer)))
    return [0.0] * len(completions)

async def judge(completions):
    CALLED.write_text("judged")
    return [0.0] * len(completions)
"""


@pytest.fixture(scope="module")
def registry() -> Registry:
    return plugins.load().registry


@pytest.fixture
def mine(tmp_path: Path, close_workers: Callable[[], None]) -> Any:
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    yield tmp_path / "mine.py"
    close_workers()


def rewards(registry: Registry, *components: dict[str, Any]) -> list[Reward]:
    stage: Any = SimpleNamespace(name="policy", registry=registry, inputs={})
    return open_rewards([WeightedReward(**c) for c in components], stage)


def prompts(chat: bool = False, **columns: list[Any]) -> Any:
    raw = [[{"role": "user", "content": "a"}] if chat else "a"] * max([1, *map(len, columns.values())])
    return SimpleNamespace(raw=raw, chat=chat, columns=columns, where=lambda i: f"prompts.jsonl row {i + 1}")


def test_columns_that_no_reward_reads_are_listed(registry: Registry) -> None:
    def plain(completions: Any, *, tone: str = "") -> list[float]:
        return [0.0] * len(completions)

    def greedy(completions: Any, **columns: Any) -> list[float]:
        return [0.0] * len(completions)

    table = prompts(tone=["a"], id=[1], tools=[None], messages=[None])
    first, second = Reward("plain", 1.0, plain), Reward("greedy", 1.0, greedy)
    assert forecast_rewards([first], table, STAGE).lines[-1] == "columns that no reward reads: id"
    assert not [line for line in forecast_rewards([first, second], table, STAGE).lines if "no reward" in line]


def test_good_functions_get_a_real_row_in_the_runs_form_and_nothing_is_said(
    registry: Registry, mine: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    good = [{"name": f"{mine}:{name}"} for name in ("counted", "prints")]
    assert forecast_rewards(rewards(registry, *good), prompts(True, answer=["7", "8"]), STAGE) == Forecast()
    completions, answers = eval((mine.parent / "called").read_text())
    assert answers == ["7"] * 3
    assert [set(each[0]) for each in completions] == [{"role", "content"}] * 3
    assert completions[-1][0]["content"] == ""
    assert "in the way" not in capfd.readouterr().out


def test_what_may_cost_money_is_not_called(registry: Registry, mine: Path) -> None:
    class Weights:
        def setup(self, stage: Any) -> None:
            raise AssertionError

        def __call__(self, completions: Any) -> Any:
            raise AssertionError

    named = rewards(registry, {"name": f"{mine}:judge"}, {"name": f"{mine}:scalar", "check": False})
    assert forecast_rewards([*named, Reward("weights", 1.0, Weights())], prompts(), STAGE) == Forecast()
    assert not (mine.parent / "called").exists()


def test_rows_of_data_that_has_no_tokens_yet(registry: Registry) -> None:
    rows = [{"prompt": [{"role": "user", "content": "a"}], "answer": a} for a in ("1", "two", "3", "four")]
    table = data.UntokenizedPrompts(data.load(rows))
    skips = rewards(registry, {"name": "numeric_answer", "on_error": "skip"})
    (line,) = forecast_rewards(skips, table, STAGE).warnings
    assert line.startswith("dataset row 2: reward 'numeric_answer': the answer 'two' is not a number")
    assert line.endswith("2 such rows are skipped (on_error)")


def test_set_up_names_unreadable_rows_and_counts_the_others(registry: Registry) -> None:
    many = prompts(answer=["1", *["x"] * 9])
    for name, text in (("numeric_answer", "is not a number"), ("exact_match", "neither text nor a number")):
        table = prompts(answer=["1", *[{"a": 1}] * 9]) if name == "exact_match" else many
        with pytest.raises(InputError) as caught:
            set_up(rewards(registry, {"name": name}), table, STAGE)
        assert len(caught.value.problems) == 6
        assert caught.value.problems[0].startswith(f"prompts.jsonl row 2: reward '{name}': the answer ")
        assert text in caught.value.problems[0]
        assert caught.value.problems[-1] == f"reward '{name}': and 4 more rows that it cannot read"
    skips = rewards(registry, {"name": "numeric_answer", "on_error": "skip"})
    with pytest.warns(UserWarning, match="prompts.jsonl row 2: .*9 such rows are skipped"):
        set_up(skips, many, STAGE)
    assert skips[0].unreadable == {f"prompts.jsonl row {i}" for i in range(2, 11)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        set_up(rewards(registry, {"name": "numeric_answer"}), prompts(answer=["1", None, 3.5]), STAGE)


def test_a_reward_of_ones_own_checks_its_rows_too() -> None:
    class Keyed:
        def check(self, columns: Any) -> dict[int, str]:
            return {i: f"no such key: {key}" for i, key in enumerate(columns["key"]) if key not in "ab"}

        def __call__(self, completions: Any, key: Any) -> list[float]:
            return [0.0] * len(completions)

    with pytest.raises(InputError, match=r"^prompts\.jsonl row 2: reward 'keyed': no such key: c$"):
        set_up([Reward("keyed", 1.0, Keyed())], prompts(key=["a", "c"]), STAGE)


def test_a_check_that_fails_is_reported() -> None:
    class Checks:
        def check(self, columns: Any) -> Any:
            return {}["key"] if "key" in columns else ["wrong"]

        def __call__(self, completions: Any) -> list[float]:
            return [0.0] * len(completions)

    failed = r"^reward 'checks': its check\(columns\) raised"
    with pytest.raises(InputError, match=rf"{failed} KeyError: 'key' \(.*test_reward_trial\.py line \d+\)"):
        set_up([Reward("checks", 1.0, Checks())], prompts(key=["a"]), STAGE)
    with pytest.raises(InputError, match=rf"{failed} TypeError: it returned list, not \{{row: what is"):
        set_up([Reward("checks", 1.0, Checks())], prompts(), STAGE)


def test_an_option_of_the_pipeline_wins_over_a_column_of_its_name(registry: Registry) -> None:
    inputs = RewardInputs(["a"], ["x"], [[1] * 20], {"target": [[1, 2]]})
    table = prompts(target=[[1, 2]])
    chosen = rewards(registry, {"name": "length", "target": 40})
    assert score(chosen, inputs).tolist() == [[-0.5]]
    assert forecast_rewards(chosen, table, STAGE).warnings == (
        "reward 'length': its option target = 40 is used, and the column 'target' is not",
    )

    def near(completion_ids: Any, *, target: Any = 10) -> list[float]:
        return [float(len(ids) - t[0]) for ids, t in zip(completion_ids, target, strict=True)]

    offered = Reward("near", 1.0, near)
    assert score([offered], inputs).tolist() == [[19.0]]
    assert not forecast_rewards([offered], table, STAGE).lines

    chosen = rewards(registry, {"name": "length", "target": 40})
    with pytest.warns(UserWarning, match="its option target = 40 is used, and the column 'target' is not"):
        set_up(chosen, prompts(target=[[1, 2]]), STAGE)

    def every(completions: Any, *, scale: float = 1.0, **columns: Any) -> list[float]:
        assert set(columns) == {"answer", "prompts", "completion_ids"}
        return [scale] * len(completions)

    inputs = RewardInputs(["a"], ["x"], [[1]], {"scale": [7.0], "answer": [1]})
    reward = Reward("every", 1.0, functools.partial(every, scale=3.0))
    assert score([reward], inputs).tolist() == [[3.0]]


def test_a_default_in_place_of_a_misspelt_column_is_a_warning(registry: Registry, recwarn: Any) -> None:
    def graded(
        completions: Any, anwser: str = "", *, partly: float = 0.5, seed: int | None = None
    ) -> list[float]:
        return [partly] * len(completions)

    reward, table = Reward("graded", 1.0, graded), prompts(answer=["4"], level=[1])
    forecast = forecast_rewards([reward], table, STAGE)
    (told,) = forecast.warnings
    assert told.startswith("reward 'graded': anwser is '' for every row: no option sets it")
    assert forecast.lines == ("columns that no reward reads: answer, level",)
    set_up([reward], table, STAGE)
    assert [told in str(each.message) for each in recwarn] == [True]
    for fine in (
        Reward("graded", 1.0, functools.partial(graded, anwser="4")),
        rewards(registry, {"name": "length"})[0],
    ):
        assert not forecast_rewards([fine], prompts(answer=["4"], targets=[1]), STAGE).warnings
