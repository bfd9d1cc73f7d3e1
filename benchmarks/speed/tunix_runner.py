"""Time Tunix on one of the works, in an environment of its own (requirements-tunix.txt).

    TUNIX_PYTHON benchmarks/speed/tunix_runner.py --work W1 [--model 50m] [--steps 10]

Its own trainers, its own llama model and its own sampler ("vanilla"), with a key cache no longer than the sequences.
It has no reward trainer: W1 is its general trainer with a pairwise loss and one output in the place of the vocabulary.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import machine
import numpy as np
import optax
import works
from flax import nnx
from transformers import AutoTokenizer
from tunix.models.llama3 import model as llama
from tunix.rl import common
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rl_cluster import ClusterConfig, RLCluster, RLTrainingConfig, Role
from tunix.rl.rollout import base_rollout
from tunix.rl.rollout.vanilla_rollout import VanillaRollout
from tunix.sft import hooks
from tunix.sft.peft_trainer import PeftTrainer, TrainingConfig

Row = dict[str, Any]
NEVER = 10**9


def a_model(shape: works.Model) -> llama.Llama3:
    width = shape.hidden // shape.heads
    config = llama.ModelConfig(
        num_layers=shape.layers,
        vocab_size=shape.vocab,
        embed_dim=shape.hidden,
        hidden_dim=shape.intermediate,
        num_heads=shape.heads,
        head_dim=width,
        num_kv_heads=shape.kv_heads,
        rope_theta=10000,
        norm_eps=1e-6,
    )
    return llama.Llama3(config, rngs=nnx.Rngs(works.SEED))


def optimizer() -> optax.GradientTransformation:
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(works.LEARNING_RATE, weight_decay=0.01))


def a_mesh() -> jax.sharding.Mesh:
    return jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))


class Clock(hooks.TrainingHooks):
    """When each update was over: Tunix tells it of one while the next is computed, as soon as its loss is there."""

    def __init__(self) -> None:
        self.over: list[float] = []
        self.first_at = 0.0

    def on_train_step_end(self, *_: Any) -> None:
        self.over.append(time.perf_counter())
        self.first_at = self.first_at or time.time()

    def on_train_start(self, *_: Any) -> None: ...
    def on_train_end(self, *_: Any) -> None: ...
    def on_train_step_start(self, *_: Any) -> None: ...
    def on_eval_step_start(self, *_: Any) -> None: ...
    def on_eval_step_end(self, *_: Any) -> None: ...


def pairwise_loss(model: Any, ids: jax.Array, mask: jax.Array) -> jax.Array:
    """Bradley-Terry with our default centring; the first half of the rows is chosen, the second rejected."""
    positions, visible = common.build_positions_from_mask(mask), common.make_causal_attn_mask(mask)
    each = model(ids, positions, None, visible)[0][..., 0]
    scores = jnp.take_along_axis(each, mask.sum(-1, keepdims=True) - 1, axis=1)[:, 0]
    chosen, rejected = jnp.split(scores, 2)
    return jnp.mean(-jax.nn.log_sigmoid(chosen - rejected) + 0.1 * jnp.square(chosen + rejected))


def run_reward(task: works.Task) -> Row:
    """W1."""
    model = a_model(task.model)
    model.lm_head = llama.Einsum(
        "BTD,DV->BTV", (task.model.hidden, 1), rngs=nnx.Rngs(1), sharding=model.config.shd_config.emb_dv
    )
    pairs = np.stack(
        [works.token_ids(2, works.PAIR_TOKENS, task.model.vocab, i) for i in range(8 * works.PAIRS)]
    )
    steps = 2 + works.WARM_UP + task.steps

    def batches() -> Iterator[Row]:
        for step in range(steps):
            some = pairs[np.arange(step * works.PAIRS, (step + 1) * works.PAIRS) % len(pairs)]
            ids = np.concatenate([some[:, 0], some[:, 1]])
            yield {"ids": ids, "mask": np.ones(ids.shape, np.int32)}

    clock = Clock()
    with a_mesh():
        settings = TrainingConfig(eval_every_n_steps=NEVER, max_steps=steps)
        trainer = PeftTrainer(model, optimizer(), settings).with_loss_fn(pairwise_loss)
        trainer.with_training_hooks(clock)
        trainer.train(batches())
    timed = np.diff(clock.over)[works.WARM_UP :][: task.steps]
    return {"seconds": timed.tolist(), "first_step_at": clock.first_at}


class Rollout(VanillaRollout):
    """Tunix's own rollouts, noting when the first update was over: when the second rollout is asked for."""

    given: np.ndarray | None = None
    """int32 [sequences, tokens]: completions to return instead of sampling."""
    calls = 0
    first_at = 0.0

    def __init__(self, rollout_actor: Any, tokenizer: Any, mesh: Any, rollout_config: Any) -> None:
        c = rollout_actor.config
        cache = base_rollout.CacheConfig(
            rollout_config.kv_cache_size, c.num_layers, c.num_kv_heads, c.head_dim
        )
        super().__init__(rollout_actor, tokenizer, cache)

    def generate(self, prompts: list[str], rollout_config: Any, **more: Any) -> base_rollout.RolloutOutput:
        Rollout.calls += 1
        if Rollout.calls == 2:
            jax.block_until_ready(nnx.state(self.model()))
            Rollout.first_at = time.time()
        if self.given is None:
            return super().generate(prompts, rollout_config, **more)
        tokenizer = self._sampler.tokenizer
        return base_rollout.RolloutOutput(
            text=[tokenizer.decode(ids.tolist()) for ids in self.given],
            logits=None,
            tokens=list(self.given),
            left_padded_prompt_tokens=np.array([tokenizer.encode(str(text)) for text in prompts], np.int32),
            logprobs=None,
        )


def cluster(task: works.Task, directory: Path, steps: int) -> tuple[RLCluster, base_rollout.RolloutConfig]:
    tokenizer = AutoTokenizer.from_pretrained(
        works.write_tokenizer(directory / "tokenizer", task.model.vocab, stops=False)
    )
    mesh = a_mesh()
    rollout = base_rollout.RolloutConfig(
        max_tokens_to_generate=works.COMPLETION,
        max_prompt_length=works.PROMPT,
        kv_cache_size=works.PROMPT + works.COMPLETION,
        temperature=1.0,
        top_p=1.0,
        top_k=None,
    )
    config = ClusterConfig(
        role_to_mesh={Role.ACTOR: mesh, Role.REFERENCE: mesh, Role.ROLLOUT: mesh},
        rollout_engine=Rollout,
        training_config=RLTrainingConfig(
            actor_optimizer=optimizer(),
            eval_every_n_steps=NEVER,
            max_steps=steps,
            mini_batch_size=works.PROMPTS,
            train_micro_batch_size=works.PROMPTS,
        ),
        rollout_config=rollout,
    )
    with mesh:
        reference = a_model(task.model) if task.beta else None
        made = RLCluster(
            actor=a_model(task.model), reference=reference, tokenizer=tokenizer, cluster_config=config
        )
    return made, rollout


def run_grpo(task: works.Task) -> Row:
    """W2, with the same completions every time, and W4: from one call of the reward function to the next."""
    called: list[float] = []

    def reward(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        called.append(time.perf_counter())
        return works.reward(completions)

    if task.work == "W2":
        Rollout.given = works.token_ids(works.PROMPTS * works.GROUP, works.COMPLETION, task.model.vocab, 1)
    steps = 2 + works.WARM_UP + task.steps
    texts = [works.words(ids) for ids in works.token_ids(64, works.PROMPT, task.model.vocab)]
    batches = [
        {"prompts": np.array([texts[(works.PROMPTS * step + i) % len(texts)] for i in range(works.PROMPTS)])}
        for step in range(steps)
    ]
    with tempfile.TemporaryDirectory(prefix="speed-") as directory:
        made, _ = cluster(task, Path(directory), steps)
        config = GRPOConfig(num_generations=works.GROUP, num_iterations=1, beta=task.beta)
        GRPOLearner(rl_cluster=made, algo_config=config, reward_fns=reward).train(batches)
    return {"seconds": np.diff(called)[1 + works.WARM_UP :].tolist(), "first_step_at": Rollout.first_at}


def run_rollouts(task: works.Task) -> Row:
    """W3."""
    prompts = works.token_ids(64, works.PROMPT, task.model.vocab)
    with tempfile.TemporaryDirectory(prefix="speed-") as directory:
        made, config = cluster(task, Path(directory), 1)
    seconds, first_at = [], 0.0
    for step in range(1 + works.WARM_UP + task.steps):
        chosen = [prompts[(works.PROMPTS * step + i) % len(prompts)] for i in range(works.PROMPTS)]
        texts = [works.words(ids) for ids in chosen for _ in range(works.GROUP)]
        began = time.perf_counter()
        out = made.rollout.generate(texts, config)
        seconds.append(time.perf_counter() - began)
        first_at = first_at or time.time()
        if min(map(len, out.tokens)) < works.COMPLETION:
            raise SystemExit("a completion is shorter than it should be")
    return {"seconds": seconds[1 + works.WARM_UP :], "first_step_at": first_at}


def run_log_probs(task: works.Task) -> Row:
    """W5: log-probabilities as its GRPO loss takes them, and their gradient."""
    model = a_model(task.model)
    ids = jnp.asarray(works.token_ids(works.SEQUENCES, works.LENGTH, task.model.vocab))

    def loss(model: Any) -> jax.Array:
        graph, state = nnx.split(model)
        logps = common.compute_per_token_logps(
            graph, state, ids[:, :1], ids[:, 1:], pad_id=1, eos_id=task.model.vocab, stop_gradient=False
        )
        return -logps.mean()

    step = nnx.jit(nnx.value_and_grad(loss))
    extra, seconds, first_at = None, [], 0.0
    for _ in range(1 + works.WARM_UP + task.steps):
        began = time.perf_counter()
        found = jax.block_until_ready(step(model))
        seconds.append(time.perf_counter() - began)
        first_at = first_at or time.time()
        del found
        extra = extra or machine.Extra()
    assert extra is not None
    return {"seconds": seconds[1 + works.WARM_UP :], "extra_bytes": extra.read(), "first_step_at": first_at}


RUNS = {"W1": run_reward, "W2": run_grpo, "W3": run_rollouts, "W4": run_grpo, "W5": run_log_probs}


def main() -> None:
    parser = argparse.ArgumentParser(description="Time Tunix.")
    works.add_arguments(parser)
    task = works.task_of(parser.parse_args())
    if task.work not in RUNS:
        raise SystemExit(f"Tunix does not do {task.work}")
    found = RUNS[task.work](task)
    peak = machine.peak_rss()
    side = jnp.ones((machine.PRODUCT, machine.PRODUCT), jnp.float32)
    product = jax.jit(jnp.dot)
    rate = machine.product_rate(lambda: product(side, side).block_until_ready())
    row = {**found, "peak_rss_bytes": peak, "matmul_flops_per_second": rate}
    print(json.dumps({**row, "versions": works.versions("google-tunix", "jax", "flax")}))


if __name__ == "__main__":
    main()
