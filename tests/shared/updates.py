"""GRPO's updates with a NumPy sampler and a formula for a policy, which need no programs."""

import tempfile
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
from rlhf_grpo import GRPOConfig
from rlhf_grpo.train import GRPOSteps, PolicyReader, _sampled

from rlhf_core import ADVANTAGE, data, installed_registry
from rlhf_core.fit import TreeReader
from rlhf_core.packing import Layout
from rlhf_core.rollouts import Reward, RolloutCollector, RolloutUpdates
from rlhf_core.sampling import Rollouts
from rlhf_core.training import OnDevices
from tests.shared.specs import recorded_as

RECORD = {"trainer": "grpo", "seed": 5, "config": {}, "inputs": {}, "code": {}, "versions": {}}
G, C = 3, 5
LAYOUT = Layout((32,), (2,), (6,), (30,))


def sampler(params, prompts, key, ids):
    """Completions that depend on the parameters, the prompts, the key and its numbers alone."""
    seed = [
        int(params),
        int(ids[0]),
        *np.asarray(jax.random.key_data(key)).tolist(),
        *(int(p.sum()) for p in prompts),
    ]
    draw = np.random.default_rng(seed)
    n = len(prompts) * G
    lengths = draw.integers(1, C + 1, n).astype(np.int32)
    there = np.arange(C) < lengths[:, None]
    tokens = np.where(there, draw.integers(3, 48, (n, C)), 0).astype(np.int32)
    logps = np.where(there, -draw.random((n, C)), 0).astype(np.float32)
    return Rollouts(tokens, lengths, logps, lengths < C)


def logps_and_entropies(params, batch):
    """A policy whose log-probability of a token is −token/50 − params, and its entropy the token."""
    tokens = jnp.take_along_axis(batch.rows.tokens, jnp.maximum(batch.trained, 0), axis=1)
    there = batch.trained >= 0
    return jnp.where(there, -tokens / 50 - params, 0.0), jnp.where(there, tokens, 0).astype(jnp.float32)


def maker(tiny, tmp_path):
    """Return a function that makes the updates of a stage in a directory of its own."""
    prompts = data.encode_prompts(data.load(tiny.prompts(8)), tiny.make_tokenizer(), max_prompt_length=16)
    everything = SimpleNamespace(
        devices=tiny.one_device,
        seed=5,
        is_main=True,
        name="policy",
        say=lambda line: None,
        mesh=tiny.one_device(),
        registry=None,
        inputs={},
        replay=None,
        specification=lambda: recorded_as(RECORD),
    )

    def length(completion_ids):
        return [float(len(ids)) for ids in completion_ids]

    def make(reference=None, reward=length, advantage=None, place=None, **options):
        """place: the directory of an earlier one, to continue with its journal."""
        stage = SimpleNamespace(**vars(everything))
        stage.dir = place or Path(tempfile.mkdtemp(dir=tmp_path))
        config = GRPOConfig(**{"total_batch_size": 6, "num_generations": G, "log_steps": 4, **options})
        rewards = [Reward("length", 1.0, reward() if isinstance(reward, type) else reward)]
        collector = RolloutCollector(
            stage,
            prompts,
            tiny.make_tokenizer(),
            sampler,
            rewards,
            _sampled(config),
        )
        if reference is not None and not hasattr(reference, "params"):
            reference = SimpleNamespace(
                params=reference, apart=True, equals=lambda params: False, moves=False
            )
        reader = partial(TreeReader, layout=LAYOUT, mesh=tiny.one_device(), per="token")
        policies = PolicyReader(config, logps_and_entropies, reference, reader)
        scaled = installed_registry().get(ADVANTAGE, "group", scale=config.scale_rewards)
        steps = GRPOSteps(config, collector, advantage or scaled, policies, LAYOUT)
        context = OnDevices(config, stage)
        updates = RolloutUpdates(context, collector, LAYOUT, steps, reference=reference)
        updates.config, updates.policies = config, policies
        return updates

    return make


def short_prompts_differ(prompts, completion_ids):
    """Only prompts of less than four words have groups that differ."""
    return [
        float(ids[0]) if len(prompt.split()) < 4 else 0.5
        for prompt, ids in zip(prompts, completion_ids, strict=True)
    ]


class Rising:
    """Asks for more at every call."""

    calls = 0

    def __call__(self, completion_ids):
        self.calls += 1
        return [float(len(ids) > self.calls) for ids in completion_ids]

    def snapshot(self):
        return {"calls": self.calls}

    def restore(self, kept):
        self.calls = kept["calls"]


def state(params):
    return SimpleNamespace(params=params, key=jax.random.key(3), step=params)
