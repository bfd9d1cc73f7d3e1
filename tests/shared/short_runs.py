"""Six updates of each of our trainers; the fixture `short` runs them, `short.CONFIGS` says how."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np
from rlhf_dpo import DPOConfig, OnlineDPOConfig
from rlhf_grpo import GRPOConfig
from rlhf_kto import KTOConfig
from rlhf_reward import RewardConfig
from rlhf_sft import SFTConfig

from rlhf_core import hookimpl, load_model

COMPILED: list[str] = []
"""Every program compiled in this process."""


def note(event: str, seconds: float, **about: Any) -> None:
    if event == "/jax/core/compile/backend_compile_duration":
        COMPILED.append(str(about.get("fun_name")))


jax.monitoring.register_event_duration_secs_listener(note)

SAMPLING = ("grpo", "online_dpo")
SHORT = {"learning_rate": 1e-2, "max_training_steps": 6, "log_steps": 1}
CONFIGS: dict[str, Any] = {
    "sft": SFTConfig(total_batch_size=4, **SHORT),
    "reward": RewardConfig(total_batch_size=4, **SHORT),
    "dpo": DPOConfig(total_batch_size=4, **SHORT),
    "kto": KTOConfig(total_batch_size=4, **SHORT),
    "grpo": GRPOConfig(
        total_batch_size=8,
        num_generations=4,
        num_iterations=2,
        max_completion_length=6,
        beta=0.1,
        sync_ref_model=True,
        ref_model_sync_steps=2,
        **SHORT,
    ),
    "online_dpo": OnlineDPOConfig(total_batch_size=8, num_iterations=2, max_completion_length=6, **SHORT),
}


def early(completions: list[str]) -> list[float]:
    """The share of a completion's words that are in the first half of the alphabet."""
    return [sum("a" <= word <= "m" for word in text.split()) / 6 for text in completions]


class Watch:
    """A logger that keeps every logged row, and how many programs had been compiled at it."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []
        self.compiled: list[int] = []

    @hookimpl
    def rlhf_step_end(self, step: int, metrics: Any) -> None:
        self.rows.append({"step": step, **metrics})
        self.compiled.append(len(COMPILED))

    def steps(self, name: str = "loss") -> list[float]:
        return [row["step"] for row in self.rows if name in row]

    def last(self, name: str) -> float:
        return next(row[name] for row in reversed(self.rows) if name in row)


@dataclass(frozen=True)
class Short:
    """Runs in `directory`, with models and rows that all tests share."""

    tiny: ModuleType
    directory: Path
    models: dict[str, Any]
    rows: dict[str, list[dict[str, Any]]]

    @classmethod
    def of(cls, tiny: ModuleType, directory: Path) -> Short:
        models = {name: tiny.make_model("score" if name == "reward" else "lm", scale=4.0) for name in CONFIGS}
        return cls(
            tiny,
            directory,
            models,
            {
                "sft": tiny.texts(11),
                "reward": tiny.pairs(11),
                "dpo": tiny.pairs(11),
                "kto": [{**row, "label": i % 3 > 0} for i, row in enumerate(tiny.texts(11))],
            }
            | dict.fromkeys(SAMPLING, tiny.prompts(7)),
        )

    def train(
        self, trainer: str, *, at: str = "", listeners: tuple = (), inputs: dict | None = None, **changes: Any
    ) -> tuple[dict[str, np.ndarray], Watch]:
        """(the parameters by path, what was logged) of a run in directory / at / trainer."""
        watch = Watch()
        given = {"model": self.models[trainer], "train_dataset": self.rows[trainer]}
        given |= {"rewards": [early]} if trainer in SAMPLING else {}
        artifact = self.tiny.run(
            trainer,
            CONFIGS[trainer].replace(**changes),
            self.directory / at / trainer,
            listeners=[watch, *listeners],
            **(given | (inputs or {})),
        )
        head = "score" if trainer == "reward" else "lm"
        return self.tiny.leaves(load_model(artifact.path, head, mesh=self.tiny.one_device()).params), watch
