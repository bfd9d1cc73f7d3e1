"""`rlhf check` of a GRPO stage tells what its rewards would do, without a device."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rlhf_core import plugins
from rlhf_core.errors import InputError
from rlhf_core.pipeline.file import read
from rlhf_core.pipeline.forecast import stage_forecasts
from rlhf_core.pipeline.plan import plan

MINE = """
def words(completions):
    return [len(c.split()) for c in completions]

def last(completions, *, target=3):
    return [len(c[-1]["content"]) - target for c in completions]

def needs(completions, target):
    return [float(x) for x in target]

class Asks:
    def reset(self, row, seed):
        return row["prompt"]

    async def step(self, completion):
        raise AssertionError("a check does not call it")

def kept(environment_rewards):
    return environment_rewards
"""
PIPELINE = """
dir = "run"
[[stage]]
name = "policy"
trainer = "grpo"
model = {{ model_type = "llama", hidden_size = 16, num_hidden_layers = 1, num_attention_heads = 2, \
intermediate_size = 32, num_key_value_heads = 1, tokenizer = "tokenizer" }}
train_data = "prompts.jsonl"
rewards = [{rewards}]
chat_template = "plain"
num_generations = 2
total_batch_size = 4
"""


@pytest.fixture
def check(tiny: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    tiny.make_tokenizer().save_pretrained("tokenizer")
    Path("mine.py").write_text(MINE)
    rows = [
        {"prompt": [{"role": "user", "content": f"w{i}"}], "answer": "four" if i == 3 else "4", "target": 3}
        for i in range(6)
    ]
    Path("prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))

    def check(rewards: str, more: str = "") -> list[str]:
        Path("p.toml").write_text(PIPELINE.format(rewards=rewards) + more)
        host = plugins.load()
        return stage_forecasts(plan(read(Path("p.toml")), host), host)["policy"].printed()

    return check


def test_rows_without_a_value_that_a_reward_needs_are_counted(check: Any) -> None:
    rows = [json.loads(line) for line in Path("prompts.jsonl").read_text().splitlines()]
    rows[4]["answer"] = None
    del rows[1]["answer"]
    Path("prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (line,) = [line for line in check('{ name = "exact_match" }') if "exact_match" in line]
    assert line.startswith("reward 'exact_match': 2 of 6 rows have no 'answer'; the first is ")
    assert line.endswith("prompts.jsonl row 2")


def test_what_an_environment_will_give_is_not_missing_from_the_rows(check: Any) -> None:
    lines = check('{ name = "mine.py:kept", check = false }', 'environment = { name = "mine.py:Asks" }')
    assert not [line for line in lines if "environment_rewards" in line]


def test_all_problems_of_rewards_are_reported_together(check: Any) -> None:
    with pytest.raises(InputError) as caught:
        check(
            '{ name = "mine.py:words" }, { name = "mine.py:last", target = 4 }, { name = "numeric_answer" }'
        )
    rows, call = caught.value.problems
    assert "prompts.jsonl row 4: reward 'numeric_answer': the answer 'four' is not a number" in rows
    assert "reward 'mine.py:words' raised AttributeError: 'list' object has no attribute 'split'" in call
    assert call.endswith("completions are lists of messages here: c[-1]['content'] is the text")


def test_what_is_worth_knowing_is_a_line(check: Any) -> None:
    lines = check('{ name = "mine.py:last", target = 4 }, { name = "numeric_answer", on_error = "skip" }')
    told = "\n".join(lines)
    used = "warning: reward 'mine.py:last': its option target = 4 is used, and the column 'target' is not"
    assert used in lines
    assert "row 4: reward 'numeric_answer': the answer 'four' is not a number" in told


def test_held_out_prompts_have_the_columns_too(check: Any) -> None:
    text = Path("prompts.jsonl").read_text()
    Path("held_out.jsonl").write_text(text.replace('"target"', '"goal"'))
    with pytest.raises(InputError) as caught:
        check('{ name = "mine.py:needs" }', 'eval_data = "held_out.jsonl"')
    assert caught.value.problems == (
        "stage 'policy'.rewards: reward 'mine.py:needs' needs the column 'target', which eval_data does not have; "
        "it has answer, goal",
    )
