"""References to models are checked for their kind wherever a configuration names one."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest
from pydantic import Field

from rlhf_core import REWARD, TRAINER, Registry, Trainer, TrainerConfig, hookimpl, plugins
from rlhf_core.config import ArtifactKinds, Component, Options
from rlhf_core.errors import InputError
from tests.shared.plans import plan_of


class Inner(Options):
    value_model: str | None = None
    start_model: Annotated[str, ArtifactKinds("reward_model")] | None = None


class PPOConfig(TrainerConfig):
    critic_model: str | None = Field(None, description="by its usual kind")
    other_model: str | None = Field(None, description="of any kind")
    start_model: Annotated[str | None, ArtifactKinds("language_model", "reward_model")] = None
    verifier_model: Annotated[str | None, ArtifactKinds("verifier")] = None
    ppo: Inner | None = None
    rewards: list[Annotated[Component, REWARD]] = Field([], description="rewards")


@dataclass
class Judged:
    model: str = ""
    judge_model: str = ""
    draft: Annotated[str, "no note of ours"] = ""
    answer_model: Annotated[str, ArtifactKinds("language_model")] = ""

    def __call__(self, completions: Any) -> list[float]:
        return [0.0 for _ in completions]


class Plugin:
    @hookimpl
    def rlhf_register(self, registry: Registry) -> None:
        for name, kind in (("lm", "language_model"), ("rm", "reward_model"), ("check", "verifier")):
            registry.add(TRAINER, name, Trainer(PPOConfig, {"model": kind}, lambda config, stage: None))
        registry.add(REWARD, "judged", Judged)


STAGES = "".join(
    f'[[stage]]\nname = "{name}"\ntrainer = "{trainer}"\n'
    for name, trainer in (("a_lm", "lm"), ("a_rm", "rm"), ("a_check", "check"), ("last", "lm"))
)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ('critic_model = "a_lm.model"', "a_lm.model is a language_model; this field needs a rew"),
        ('critic_model = "a_rm.model"', ""),
        ('other_model = "a_check.model"', ""),
        ('start_model = "a_lm.model"', ""),
        ('start_model = "a_rm.model"', ""),
        ('start_model = "a_check.model"', "a_check.model is a verifier; this field needs a language_model or a rew"),
        ('verifier_model = "a_rm.model"', ".verifier_model: a_rm.model is a reward_model; this"),
        ('ppo.value_model = "a_lm.model"', ".ppo.value_model: a_lm.model is a language_model"),
        ('ppo.start_model = "a_lm.model"', ".ppo.start_model: a_lm.model is a language_model"),
        ('rewards = [{ name = "judged", model = "a_lm.model" }]', "a reward needs a reward_model"),
        ('rewards = [{ name = "judged", judge_model = "a_lm.model" }]', ""),
        ('rewards = [{ name = "judged", answer_model = "a_lm.model" }]', ""),
        ('rewards = [{ name = "judged", answer_model = "a_rm.model" }]', ".rewards[0].answer_model: a_rm.model is a"),
    ],
)  # fmt: skip
def test_kinds(tmp_path: Path, options: str, said: str) -> None:
    (tmp_path / "p.toml").write_text(f'dir = "run"\n{STAGES}{options}\n')
    host = plugins.load(objects=[Plugin()])
    if not said:
        plan_of(tmp_path / "p.toml", host)
        return
    with pytest.raises(InputError, match=re.escape(said)):
        plan_of(tmp_path / "p.toml", host)
