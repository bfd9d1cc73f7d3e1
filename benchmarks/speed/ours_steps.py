"""Steps of our suite, timed: W1 to W5.

W1 and W2 run what `rlhf_core.fit` runs in an update (the trainers' update sources, which pack rows on the host,
`Programs` and the guard that is read an update late) and nothing else of a run (logs, evaluations, checkpoints).
"""

from __future__ import annotations

import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import jax
import machine
import numpy as np
import optax
import works
from rlhf_grpo import GRPOConfig
from rlhf_grpo.objective import Terms
from rlhf_grpo.objective import objective as grpo_objective
from rlhf_grpo.train import GRPOSteps, PolicyReader
from rlhf_reward import RewardConfig
from rlhf_reward.objective import objective as reward_objective
from rlhf_reward.objective import pair_loss

from rlhf_core import (
    ADVANTAGE,
    PAIRWISE_LOSS,
    POLICY_LOSS,
    SAMPLER,
    TRAINER,
    SamplerInputs,
    optimizers,
    plugins,
)
from rlhf_core.config import TrainerConfig
from rlhf_core.data import Source
from rlhf_core.fit import TreeReader
from rlhf_core.fit.batches import (
    KNOWN_UPDATES,
    ExampleUpdates,
    UpdateSource,
    choose_row_layout,
    expected_calls,
    uses_several_batches,
)
from rlhf_core.mesh import make_mesh, put_rows
from rlhf_core.metrics import Mean
from rlhf_core.models import Model, fresh_model
from rlhf_core.objective import trained_logps
from rlhf_core.packing.trees import tree
from rlhf_core.rollouts import (
    RolloutCollector,
    RolloutOptions,
    RolloutUpdates,
    choose_rollout_rows,
    open_rewards,
)
from rlhf_core.rollouts.open_collector import open_prompts
from rlhf_core.sampling import Rollouts
from rlhf_core.stage import Stage
from rlhf_core.stage.execute import execute, specified
from rlhf_core.state import TrainState, create_state
from rlhf_core.step import Objective, Programs
from rlhf_core.surprisal import MOMENTS
from rlhf_core.tokenizer import load_tokenizer
from rlhf_core.training import OnDevices, Reference
from rlhf_core.training.choose_attention import choose_attention

Row = dict[str, Any]
VALUES = {"W1": ("loss",), "W2": MOMENTS}
"""The values of objectives that the trainers' actions ask of every update: losses of rows, and the sampling test."""


class NoRows:
    """Stands for encoded data where no checkpoint is written."""

    def __len__(self) -> int:
        return 0

    def where(self, i: int) -> str:
        return f"row {i}"


def fresh(shape: works.Model, head: Any, tokenizer: Any = None) -> Model:
    return fresh_model(
        {**shape.config, "eos_token_id": 2, "pad_token_id": 1}, head, tokenizer=tokenizer, mesh=make_mesh()
    )


def a_stage(name: str, directory: Path, *listeners: Any, **inputs: Any) -> tuple[Stage, plugins.Host]:
    host = plugins.load(objects=listeners)
    return Stage(name, directory, works.SEED, make_mesh(), True, host.registry, host.hook, inputs), host


def run_updates(task: works.Task) -> Row:
    """W1, W2."""
    with tempfile.TemporaryDirectory(prefix="speed-") as directory:
        make = reward_update if task.work == "W1" else policy_update
        objective, updates, state = make(task, Path(directory))
        return timed_updates(objective, updates, state, works.WARM_UP + task.steps, VALUES[task.work])


def timed_updates(
    objective: Objective, updates: UpdateSource, state: TrainState, count: int, values: tuple[str, ...]
) -> Row:
    """One update to start with, while what `fit` compiles is compiled, and then `count`, the last ones timed."""
    mesh, programs = (
        state.step.sharding.mesh,
        Programs(objective, state, from_zero=uses_several_batches(updates, state), values=values),
    )
    programs.compile(state, expected_calls(updates, 0, 1, state))
    guard, over, first_at = None, [], 0.0
    for step in range(1 + count):
        if guard is not None and updates.needs_state(step):
            int(guard)
        update, done = updates.update(step, state), None
        for number, batch in enumerate(update.batches):
            done = programs.accumulate(state, put_rows(mesh, batch), done, number)
        assert done is not None
        state, _ = programs.apply(state, done)
        if guard is not None:
            int(guard)  # of the update before, while this one is computed
            over.append(time.perf_counter())
        if step == 1:  # as `fit` does
            programs.compile(state, expected_calls(updates, step, KNOWN_UPDATES, state))
        elif step == 2:
            programs.wait()
        guard = jax.numpy.copy(state.guard)
        if step == 0:
            int(guard)
            first_at = time.time()
    if guard is None or int(guard) >= 0:
        raise SystemExit("a loss or gradient was not finite")
    over.append(time.perf_counter())
    return {"seconds": np.diff(over[works.WARM_UP :]).tolist(), "first_step_at": first_at}


def reward_update(task: works.Task, directory: Path) -> tuple[Objective, UpdateSource, TrainState]:
    """As `rlhf_reward.train.run` sets it up."""
    stage, _ = a_stage("reward", directory)
    model = fresh(task.model, "score")
    config = RewardConfig(total_batch_size=works.PAIRS, learning_rate=works.LEARNING_RATE, optimizer="adamw")
    margin = {"margin": np.zeros(2, np.float32)}
    trees = [
        tree(list(works.token_ids(2, works.PAIR_TOKENS, task.model.vocab, i)), sequence_values=margin)
        for i in range(8 * works.PAIRS)
    ]
    layout = choose_row_layout(trees, config, stage.devices(), task.model.hidden, reads_tokens=False)
    model = choose_attention(model, config, stage, trees, layout, group=2)
    source = Source.of(NoRows(), trees, seed=stage.seed)
    updates = ExampleUpdates(source, config, layout, sequence_names=("margin",), group=2)
    loss = stage.registry.get(PAIRWISE_LOSS, config.loss.name, **config.loss.options)
    measure = partial(pair_loss, loss, coefficient=config.center_rewards_coefficient, name=config.loss.name)
    tx, _ = optimizers.make_optimizer(config, stage.registry, updates.total)
    state = create_state(model, tx, seed=stage.seed)
    return partial(reward_objective, model.definition, measure), updates, state


def grpo_config(task: works.Task, **more: Any) -> GRPOConfig:
    return GRPOConfig(
        total_batch_size=works.PROMPTS * works.GROUP,
        num_generations=works.GROUP,
        max_prompt_length=works.PROMPT,
        sampling={"temperature": 1.0, "max_completion_length": works.COMPLETION},
        kl={"beta": task.beta},
        loss="dapo",
        learning_rate=works.LEARNING_RATE,
        optimizer="adamw",
        seed=works.SEED,
        **more,
    )


def prompt_rows(task: works.Task) -> list[dict[str, str]]:
    return [{"prompt": works.words(ids)} for ids in works.token_ids(64, works.PROMPT, task.model.vocab)]


def given_completions(task: works.Task) -> Rollouts:
    shape = (works.PROMPTS * works.GROUP, works.COMPLETION)
    ids = works.token_ids(*shape, task.model.vocab, 1)
    logps = np.full(shape, -np.log(task.model.vocab), np.float32)
    return Rollouts(ids, np.full(shape[0], shape[1], np.int32), logps, np.zeros(shape[0], np.bool_))


def policy_update(task: works.Task, directory: Path) -> tuple[Objective, UpdateSource, TrainState]:
    """As `rlhf_grpo.train.run` sets it up, but with a sampler that returns the same completions every time."""
    tokenizer = load_tokenizer(works.write_tokenizer(directory / "tokenizer", task.model.vocab, stops=True))
    config = grpo_config(task)
    stage, host = a_stage("grpo", directory, train_dataset=prompt_rows(task), rewards=[works.reward])
    stage = specified(host.registry.get(TRAINER, "grpo"), config, stage)
    model = fresh(task.model, "lm")
    samples = given_completions(task)
    loss = stage.registry.get(POLICY_LOSS, config.loss.name, **config.loss.options)
    terms = Terms(
        name=config.loss.name, beta=task.beta, kl=config.kl.name, max_completion_length=works.COMPLETION
    )
    mesh, context = stage.devices(), OnDevices(config, stage)
    context.tokenizer = tokenizer
    options = RolloutOptions(works.PROMPT, works.GROUP, config.sampling, config.prompts_per_rollout)
    prompts = open_prompts(context, options, "train_data")
    rewards = open_rewards((), stage)
    collector = RolloutCollector(stage, prompts, tokenizer, lambda *_: samples, rewards, options)
    model, layout = choose_rollout_rows(context, model, collector)
    reference = Reference(model.params, (), mesh) if config.keeps_reference else None
    logps = partial(trained_logps, model.definition, temperature=1.0, entropy=True)
    steps = GRPOSteps(
        config,
        collector,
        stage.registry.get(ADVANTAGE, config.advantage.name, **config.advantage.options),
        PolicyReader(config, logps, reference, partial(TreeReader, layout=layout, mesh=mesh, per="token")),
        layout,
    )
    updates = RolloutUpdates(context, collector, layout, steps, reference=reference)
    tx, _ = optimizers.make_optimizer(config, stage.registry, updates.total)
    objective = partial(grpo_objective, model.definition, loss, terms, temperature=1.0, moments=True)
    return objective, updates, create_state(model, tx, seed=stage.seed)


def run_rollouts(task: works.Task) -> Row:
    """W3: the sampler that GRPO uses, without a token that stops."""
    with tempfile.TemporaryDirectory(prefix="speed-") as directory:
        stage, _ = a_stage("grpo", Path(directory))
    model, config = fresh(task.model, "lm"), grpo_config(task)
    sampler = stage.registry.get(SAMPLER, "jax")(
        SamplerInputs(
            definition=model.definition,
            tokenizer=None,
            options=config.sampling,
            mesh=model.mesh,
            stop_ids=(),
            num_generations=works.GROUP,
            prompts_per_call=works.PROMPTS,
            max_prompt_length=works.PROMPT,
        )
    )
    prompts = works.token_ids(64, works.PROMPT, task.model.vocab)
    seconds, first_at = [], 0.0
    for step in range(1 + works.WARM_UP + task.steps):
        began = time.perf_counter()
        chosen = [prompts[(works.PROMPTS * step + i) % len(prompts)] for i in range(works.PROMPTS)]
        samples = sampler(model.params, chosen, jax.random.fold_in(jax.random.key(works.SEED), step))
        seconds.append(time.perf_counter() - began)
        first_at = first_at or time.time()
        if samples.lengths.min() < works.COMPLETION:
            raise SystemExit("a completion is shorter than it should be")
    return {"seconds": seconds[1 + works.WARM_UP :], "first_step_at": first_at}


class Clock:
    """A reward function that notes when it was called: once a step, as soon as the completions are there."""

    def __init__(self) -> None:
        self.__name__ = "even"
        self.called: list[float] = []

    def __call__(self, completions: list[str], **columns: Any) -> list[float]:
        self.called.append(time.perf_counter())
        return works.reward(completions)


class First:
    """Notes when the first update had been computed."""

    def __init__(self) -> None:
        self.at = 0.0

    @plugins.hookimpl
    def rlhf_step_end(self) -> None:
        self.at = self.at or time.time()


def run_trainer(task: works.Task) -> Row:
    """W4: the trainer itself. A step is the time from one call of the reward function to the next."""
    steps = 1 + works.WARM_UP + task.steps
    clock, first = Clock(), First()
    with tempfile.TemporaryDirectory(prefix="speed-") as directory:
        files = works.write_tokenizer(Path(directory) / "tokenizer", task.model.vocab, stops=False)
        model = fresh(task.model, "lm")
        config = grpo_config(task, max_training_steps=steps + 1, log_steps=1)
        stage, host = a_stage(
            "grpo",
            Path(directory) / "grpo",
            first,
            model=model,
            tokenizer=load_tokenizer(files),
            train_dataset=prompt_rows(task),
            rewards=[clock],
        )
        execute(host.registry.get(TRAINER, "grpo"), config, stage, host)
    return {"seconds": np.diff(clock.called)[1 + works.WARM_UP :].tolist(), "first_step_at": first.at}


def run_log_probs(task: works.Task) -> Row:
    """W5: log-probabilities of rows as SFT packs them, and their gradient; no optimizer.

    `extra_bytes`: peak memory of the steps over that of the process with the parameters and the compiled program; the
    gradient is part of it.
    """
    model, config = fresh(task.model, "lm"), TrainerConfig(total_batch_size=works.SEQUENCES)
    sequences = works.token_ids(works.SEQUENCES, works.LENGTH, task.model.vocab)
    trees = [tree([ids]) for ids in sequences]
    layout = choose_row_layout(trees, config, model.mesh, task.model.hidden, reads_tokens=True)
    updates = ExampleUpdates(Source.of(NoRows(), trees, seed=works.SEED), config, layout)

    def objective(params: Any, batch: Any) -> tuple[Mean, dict[str, Any]]:
        logps, _ = trained_logps(model.definition, params, batch)
        return Mean.of(-logps, batch.trained >= 0), {}

    state = create_state(model, optax.identity(), seed=works.SEED)
    programs = Programs(objective, state)
    extra, seconds, first_at = None, [], 0.0
    for step in range(1 + works.WARM_UP + task.steps):
        began, done = time.perf_counter(), None
        for batch in updates.update(step).batches:
            done = programs.accumulate(state, put_rows(model.mesh, batch), done)
        jax.block_until_ready(done)
        seconds.append(time.perf_counter() - began)
        first_at = first_at or time.time()
        del done
        extra = extra or machine.Extra()
    assert extra is not None
    timed = seconds[1 + works.WARM_UP :]
    return {"seconds": timed, "extra_bytes": extra.read(), "first_step_at": first_at}
