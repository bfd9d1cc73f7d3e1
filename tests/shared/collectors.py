"""Collectors of rollouts whose sampler is the test's own."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from rlhf_core import Rollouts
from rlhf_core.rollouts import Reward, Rollout, RolloutCollector, RolloutOptions
from rlhf_core.sampling import SamplingOptions


def collector(
    prompts: Any = None,
    tokenizer: Any = None,
    rewards: Sequence[Reward] = (),
    *,
    sampler: Any = None,
    group: int = 3,
    size: int = 2,
    episodes: Any = None,
    stops: Sequence[int] = (),
    **options: Any,
) -> RolloutCollector:
    """Make a collector of `size` prompts, `group` completions each. stops: further stop tokens."""
    stage: Any = SimpleNamespace(name="policy", mesh=None, is_main=True)
    sampling = SamplingOptions(stop_token_ids=tuple(stops))
    given = RolloutOptions(8, group, sampling, size, **options)
    return RolloutCollector(stage, prompts, tokenizer, sampler, rewards, given, episodes)


def scored(
    prompts: Any,
    chosen: Sequence[int],
    samples: Rollouts,
    tokenizer: Any,
    rewards: Sequence[Reward] = (),
    stops: Sequence[int] = (),
) -> Rollout:
    """Return the rollout of completions that are there already, with the inputs and values of its rewards."""
    made = collector(prompts, tokenizer, rewards, sampler=lambda *_: samples, stops=stops)
    key: Any = None
    return made.sample(None, np.array(chosen), key, np.arange(len(samples.lengths)))
