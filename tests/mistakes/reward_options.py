"""Rewards and environments of a GRPO stage: their options, and the columns that they read."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import jax

from rlhf_core import REWARD, installed_registry
from rlhf_core.mesh import make_mesh
from tests.mistakes.mistake import Mistake, call, setting

CHECK = "check policy.toml"
MINE = """
def words(completions):
    return [len(c.split()) for c in completions]

def last(completions, *, target=3):
    return [len(c[-1]["content"]) - target for c in completions]

def needs(completions, target):
    return [float(x) for x in target]

class Talk:
    def reset(self, row, seed):
        return [{"role": "user", "content": row["prompt"]}]

    def step(self, completion):
        raise ValueError
"""


def policy(lines: str, name: str = "") -> Mistake:
    def make(place: Any) -> None:
        place.write("mine.py", MINE)
        place.write("rubric.txt", "{completion}")
        place.settings("policy.toml", lines)

    return Mistake(name or lines.replace("\n", "; "), make, CHECK)


def reward(options: str) -> Mistake:
    return policy(f"rewards = [{{ {options} }}]")


def judge(options: str) -> Mistake:
    given = dict(part.split(" = ", 1) for part in ['url = "http://h/v1"', 'rubric_file = "rubric.txt"'])
    given |= dict(part.split(" = ", 1) for part in options.split("; "))
    table = ", ".join(f"{name} = {value}" for name, value in given.items())
    lines = f'rewards = [{{ name = "judge", model = "m", {table} }}]'
    return policy(lines, f"a judge with {options}")


def environment(value: str) -> Mistake:
    return policy(f'environment = {value}\nchat_template = "plain"', f"environment = {value}")


def with_rows(name: str, lines: str) -> Mistake:
    """Chats, one of whose answers is no number."""

    def make(place: Any) -> None:
        place.write("mine.py", MINE)
        rows = [
            {"prompt": [{"role": "user", "content": "Mia"}], "answer": "four" if i == 3 else "4", "target": 3}
            for i in range(6)
        ]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        place.write("prompts.jsonl", text)
        place.write("held_out.jsonl", text.replace('"target"', '"goal"'))
        place.settings("policy.toml", f'{lines}\nchat_template = "plain"')

    return Mistake(name, make, CHECK)


def judged_chat(place: Any) -> None:
    reward = installed_registry().get(REWARD, "model", model="scorer")
    mesh = make_mesh(devices=jax.devices()[:1])
    reward.setup(SimpleNamespace(devices=lambda: mesh, registry=None))
    reward([[{"role": "user", "content": "a"}]], [[{"role": "assistant", "content": "b"}]])


BUILT_IN = [
    setting("rewards = []", command=CHECK),
    reward('name = "regex"'),
    reward('name = "regex", pattern = "(a"'),
    reward('name = "soft_overlong", max_length = 20, cache = 30'),
    reward('name = "soft_overlong", max_length = 20, cache = 0'),
    reward('name = "repetition", penalty = 0.5'),
    reward('name = "repetition", ngram = 0'),
    reward('name = "math_verify", seconds = 0'),
    judge('url = "localhost:8000"'),
    judge('url = "http://me:pass@h/v1"'),
    judge('pattern = "("'),
    judge("scale = [5, 1]"),
    judge('pattern = "x"; schema_file = "s.json"'),
    judge('schema_file = "none.json"'),
    judge('rubric_file = "none.txt"'),
]
ROWS = [
    policy('rewards = ["mine.py:needs"]', "a reward that needs a column which the rows do not have"),
    with_rows("an answer that is no number", 'rewards = ["numeric_answer"]'),
    with_rows(
        "an answer, and a reward that takes messages for text",
        'rewards = ["mine.py:words", { name = "mine.py:last", target = 4 }, "numeric_answer"]',
    ),
    with_rows(
        "an option of the name of a column, and an answer that is skipped",
        'rewards = [{ name = "mine.py:last", target = 4 }, { name = "numeric_answer", on_error = "skip" }]',
    ),
    with_rows(
        "a column that held-out prompts lack", 'rewards = ["mine.py:needs"]\neval_data = "held_out.jsonl"'
    ),
    call("the reward of a model without a chat template, called with chats", judged_chat),
]
ENVIRONMENTS = [
    environment('"nowhere"'),
    environment('"collections:Counter"'),
    environment('{ name = "mine.py:Talk", turn = 3 }'),
    environment("{ max_tokens = 3, tools = [] }"),
]
SECTIONS = {
    "Options of rewards": BUILT_IN,
    "What rewards read of the rows": ROWS,
    "Environments": ENVIRONMENTS,
}
