"""The tables of metrics in docs/reference: what is logged is in them, and what is in them is logged."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from rlhf_dpo import DPO_LOSS
from rlhf_kto import KTO_LOSS

from rlhf_core import ENVIRONMENT, PAIRWISE_LOSS, POLICY_LOSS, LossOutput, Registry, Turn, hookimpl
from rlhf_core.runtime import machine

EVERY = "Every trainer"
PLACEHOLDERS = {
    "NAME": r"[^/]+",
    "LAYER": r"[^/]+",
    "LOSS": "told",
    "METRIC": "size",
    "SUBSET": r"[^/]+",
    "K": r"\d+",
}


class Row(NamedTuple):
    pattern: re.Pattern[str]
    evaluated: str


@pytest.fixture(scope="module")
def tables(repository: Path) -> dict[str, dict[str, Row]]:
    """{trainer, or EVERY: {name: row}}."""
    reference = repository / "docs/reference"
    pages = {EVERY: reference / "config.md"}
    names = ("sft", "reward", "grpo", "dpo", "online_dpo", "kto")
    pages |= {name: reference / f"trainers/{name}.md" for name in names}
    found = {}
    for heading, page in pages.items():
        section = page.read_text(encoding="utf-8").partition("\n## Metrics\n")[2].partition("\n## ")[0]
        rows = re.findall(r"^\| `(.+?)` \| (.+?) \|", section, re.MULTILINE)
        assert rows
        assert len(dict(rows)) == len(rows)
        found[heading] = {name: Row(pattern(name), where) for name, where in rows}
    return found


def pattern(name: str) -> re.Pattern[str]:
    parts = re.split(r"\b([A-Z]+)\b", name)
    return re.compile("".join(PLACEHOLDERS.get(part, re.escape(part)) for part in parts))


class Again:
    """An environment that asks twice."""

    def reset(self, row: Any, seed: int) -> list[dict[str, str]]:
        self.asked = 1
        return [{"role": "user", "content": row["prompt"]}]

    def step(self, completion: Any) -> Turn:
        self.asked += 1
        question = {"role": "user", "content": "a b"}
        return Turn([question], len(completion["content"]), self.asked > 2, {"asked": self.asked})


class Told:
    """Losses that report something beside their value, and an environment that does."""

    @hookimpl
    def rlhf_register(self, registry: Registry) -> None:
        registry.add(PAIRWISE_LOSS, "told", self.pairwise)
        registry.add(POLICY_LOSS, "told", self.policy)
        registry.add(DPO_LOSS, "told", self.dpo)
        registry.add(KTO_LOSS, "told", self.kto)
        registry.add(ENVIRONMENT, "told", Again)

    @staticmethod
    def pairwise(inputs: Any) -> LossOutput:
        return LossOutput(inputs.rejected - inputs.chosen, {"size": inputs.chosen})

    @staticmethod
    def dpo(inputs: Any) -> LossOutput:
        return LossOutput(inputs.ratio_rejected - inputs.ratio_chosen, {"size": inputs.tokens_chosen})

    @staticmethod
    def kto(inputs: Any) -> LossOutput:
        return LossOutput(inputs.ratio, {"size": inputs.logps})

    @staticmethod
    def policy(inputs: Any) -> LossOutput:
        clipped = dict.fromkeys((f"clip_ratio/{x}_mean" for x in ("low", "high", "region")), inputs.mask)
        return LossOutput(-inputs.advantages * inputs.logps, {**clipped, "size": inputs.mask})


def sized(completions: Any, log_metric: Any) -> list[float]:
    log_metric("size", len(completions))
    return [0.0] * len(completions)


def everything(trainer: str, short: Any) -> dict[str, Any]:
    """Settings under which all that the trainer can log is logged."""
    held_out = short.rows[trainer][:4]
    given: dict[str, Any] = {"inputs": {"eval_dataset": held_out}, "listeners": (Told(),)}
    given |= {"max_training_steps": 2, "track_memory": True, "log_grad_norms": True}
    if trainer == "reward":
        given["inputs"] = {"eval_dataset": [{**row, "subset": "short"} for row in held_out]}
        given["loss"] = "told"
    if trainer in ("dpo", "online_dpo", "kto"):
        given["loss"] = "told"
    if trainer == "online_dpo":
        given |= {
            "rollouts_ahead": 1,
            "sampling": {"max_completion_length": 6, "stop_token_ids": list(range(5, 15))},
            "rewards": [{"name": "length", "on_error": "skip", "target": 4}],
        }
        given["inputs"]["rewards"] = [sized]
    if trainer == "grpo":
        given |= {
            "loss": "told",
            "dynamic_sampling": {"max_rounds": 2},
            "entropy_coef": 0.1,
            "rollouts_ahead": 1,
            "sampler_correction": {"max": 2.0},
            "evaluation": {"num_generations": 2, "pass_threshold": 0.5},
            "environment": "told",
            "chat_template": "plain",
            "sampling": {"max_completion_length": 6, "stop_token_ids": list(range(5, 15))},
            "rewards": [{"name": "length", "on_error": "skip", "target": 4}],
        }
        given["inputs"]["rewards"] = [sized]
    return given


@pytest.mark.filterwarnings("ignore:2 rounds of")
@pytest.mark.long
@pytest.mark.parametrize("trainer", ["grpo", "sft", "reward", "dpo", "online_dpo", "kto"])
def test_what_is_logged_is_in_the_table_and_the_other_way_round(
    trainer: str, short: Any, tables: dict[str, dict[str, Row]], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, watch = short.train(trainer, **everything(trainer, short))
    logged = {name for row in watch.rows for name in row} - {"step"}
    if trainer in ("grpo", "online_dpo"):  # what the sampling test says of filters, and of chosen prompts
        filtered = {**everything(trainer, short), "at": "filtered"}
        filtered |= {"shuffle_train_dataset": False, "sampling": {**filtered.get("sampling", {}), "top_k": 4}}
        _, watch = short.train(trainer, **filtered)
        logged |= {name for row in watch.rows for name in row if name.startswith("sampling/")}
    device = SimpleNamespace(memory_stats=lambda: {"peak_bytes_in_use": 1})
    monkeypatch.setattr(machine, "jax", SimpleNamespace(local_devices=lambda: [device]))
    logged |= set(machine.peak_memory())
    documented = tables[EVERY] | tables[trainer]
    unknown = [name for name in logged if not fits(name, documented, trainer)]
    assert unknown == [], "not in the tables of docs/reference, or not as their column `evaluated` says"
    for name, row in documented.items():
        seen = {
            each.startswith("eval_") for each in logged if row.pattern.fullmatch(each.removeprefix("eval_"))
        }
        assert seen == {"no": {False}, "only": {True}, "yes": {False, True}}[evaluated(row, trainer)], name


def fits(name: str, documented: dict[str, Row], trainer: str) -> bool:
    wanted = ("yes", "only") if name.startswith("eval_") else ("yes", "no")
    return any(
        row.pattern.fullmatch(name.removeprefix("eval_")) and evaluated(row, trainer) in wanted
        for row in documented.values()
    )


def evaluated(row: Row, trainer: str) -> str:
    said, _, but = row.evaluated.partition(", but for ")
    return "no" if trainer in but.split() else said
