"""Build the benchmark's programs: from arrays to run them on a device, from shapes to compile them without."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rlhf_grpo import GRPOConfig, group_advantages
from rlhf_grpo.objective import Terms
from rlhf_grpo.objective import objective as policy_objective
from rlhf_grpo.train import PER_SEQUENCE, read_values
from rlhf_reward import RewardConfig
from rlhf_reward.objective import objective as pair_objective
from rlhf_reward.objective import pair_loss
from rlhf_sft.config import SFTConfig
from rlhf_sft.train import objective as text_objective
from rlhf_topologies.description import PARAMETERS, Program, StagePrograms
from rlhf_topologies.programs import loads, reading_programs, resident, training_programs
from rlhf_topologies.roofline import token_weights
from rlhf_topologies.sampling import sampling_programs
from sizes import SEED, Sizes

from rlhf_core import (
    ATTENTION,
    PAIRWISE_LOSS,
    POLICY_LOSS,
    SAMPLER,
    Registry,
    SamplerInputs,
    create_state,
)
from rlhf_core.config import TrainerConfig
from rlhf_core.data import Source
from rlhf_core.fit import TreeReader, empty_batches
from rlhf_core.mesh import put_rows, replicated_sharding, with_shardings
from rlhf_core.models import Model, find_family
from rlhf_core.models.definition import complete
from rlhf_core.models.lora import Lora, linear_modules
from rlhf_core.models.model import config_for
from rlhf_core.models.params import join, split
from rlhf_core.objective import trained_logps
from rlhf_core.optimizers import make_optimizer
from rlhf_core.packing import Packed, Tree, pack, tree
from rlhf_core.rollouts.rollout_rows import full_groups, group_layout
from rlhf_core.runtime.machine import planned
from rlhf_core.sampling import Rollouts, SamplingOptions
from rlhf_core.sampling.placement import cache_bytes, prepared_bytes
from rlhf_core.stage import Stage
from rlhf_core.state import TrainState, fixed_parameters
from rlhf_core.step import Objective, Programs
from rlhf_core.training import OnDevices
from rlhf_core.training.choose_attention import choose_attention

sys.path.append(str(Path(__file__).resolve().parents[1] / "speed"))
import works as speed_works

ROOT = Path(__file__).resolve().parents[2]
SAMPLING_MEMORY = 40 * 10**9
"""Bytes of memory for a rollout: enough to sample all completions of a work at once."""
MANY = 1000
"""Updates of a run that is never run to its end."""


def registry() -> Registry:
    """Register what this suite has itself: where only wheels are carried, it is not installed."""
    registry = Registry()
    for place in (".", "plugins/sft", "plugins/reward", "plugins/grpo"):
        project = tomllib.loads((ROOT / place / "pyproject.toml").read_text("utf-8"))["project"]
        for group, points in project["entry-points"].items():
            for name, text in points.items():
                registry.add_named(group.removeprefix("rlhf.").replace("_", " "), name, text)
    return registry


class NoRows:
    """Stands for the rows of a dataset where nothing is saved."""

    def where(self, i: int) -> str:
        return f"row {i}"

    def __len__(self) -> int:
        return 0


@dataclass
class Bench:
    """The devices and sizes that works are made for, and what is registered."""

    sizes: Sizes
    mesh: Any
    registry: Registry = field(default_factory=registry)

    def stage(self, name: str) -> Stage:
        return Stage(name, Path(), SEED, self.mesh, True, self.registry, None)

    def model(self, table: Any, head: Any) -> Model:
        """Draw a model on the devices; make it of shapes alone where these are only planned."""
        table = dict(table) if head == "lm" else config_for(dict(table), head, None)
        definition = find_family(table["model_type"]).define(table, head)
        make = partial(complete, definition, {}, self.mesh, SEED)
        params = (
            with_shardings(definition.abstract_params(), definition.shardings(self.mesh))
            if planned()
            else make()
        )
        return Model(definition, params, None, table, None, self.mesh)


@dataclass
class Training:
    """An update of given micro-batches."""

    objective: Objective
    model: Model
    state: TrainState
    shapes: Sequence[Packed]
    batches: Sequence[Packed]
    tokens: int
    known: bool = True
    """Whether batches are known before the training."""

    def described(self) -> StagePrograms:
        batches = loads([self.batches], self.shapes)
        programs = training_programs(self.programs(), self.objective, self.state, batches)
        weights = token_weights(self.model.definition)
        return StagePrograms(tuple(programs), resident(self.state), weights)

    def programs(self) -> Programs:
        return Programs(self.objective, self.state, from_zero=self.known and len(self.batches) > 1)

    def update(self, programs: Programs, state: TrainState, batches: Sequence[Packed] = ()) -> TrainState:
        """Run one update as `rlhf_core.fit` does: all micro-batches, then the optimizer."""
        done = None
        for number, batch in enumerate(batches or self.batches):
            done = programs.accumulate(state, put_rows(state.step.sharding.mesh, batch), done, number)
        assert done is not None
        return programs.apply(state, done)[0]


def _training(
    bench: Bench,
    config: TrainerConfig,
    model: Model,
    trees: Sequence[Tree],
    objective: Callable[[Any], Objective],
    **rows: Any,
) -> Training:
    stage = bench.stage("accelerator")
    model, updates = OnDevices(config, stage).updates(model, Source.of(NoRows(), trees), **rows)
    tx, _ = make_optimizer(config, bench.registry, MANY)
    # An update of all trees; drawing them in an order would take a package more.
    values = {name: rows[name] for name in ("sequence_names", "group") if name in rows}
    return Training(
        objective(model.definition),
        model,
        create_state(model, tx, seed=SEED),
        updates.shapes(),
        pack(trees, updates.layout, **values),
        sum(each.size for each in trees),
    )


def reward_update(bench: Bench, name: str) -> Training:
    """W1: a reward model's update."""
    sizes, table = bench.sizes, bench.sizes.models[name]
    config = RewardConfig(total_batch_size=sizes.pairs, max_training_steps=MANY)
    margin = {"margin": np.zeros(2, np.float32)}
    trees = [
        tree(
            list(speed_works.token_ids(2, sizes.pair_tokens, table["vocab_size"], number)),
            sequence_values=margin,
        )
        for number in range(sizes.pairs)
    ]
    loss = bench.registry.get(PAIRWISE_LOSS, config.loss.name, **config.loss.options)
    measure = partial(pair_loss, loss, coefficient=config.center_rewards_coefficient, name=config.loss.name)
    return _training(
        bench,
        config,
        bench.model(table, "score"),
        trees,
        lambda model: partial(pair_objective, model, measure),
        reads_tokens=False,
        sequence_names=("margin",),
        group=2,
    )


def text_update(bench: Bench, model: Model, sequences: int, length: int) -> Training:
    """Train a language model, or its adapters, on given texts."""
    config = SFTConfig(total_batch_size=sequences, max_training_steps=MANY)
    ids = speed_works.token_ids(sequences, length, model.definition.vocab_size)
    trees = [tree([row]) for row in ids]
    return _training(
        bench, config, model, trees, lambda model: partial(text_objective, model), reads_tokens=True
    )


def adapter_update(bench: Bench) -> Training:
    """LoRA: float32 adapters on every linear layer of a base in bfloat16, which is not trained."""
    sizes, table = bench.sizes, dict(bench.sizes.adapted)
    plain = find_family(table["model_type"]).define(table, "lm")
    modules = linear_modules(plain.abstract_params())
    definition = plain.with_lora(Lora(sizes.rank, 2.0 * sizes.rank, 0.0, False, modules))
    fixed = fixed_parameters(definition.abstract_params(), None, definition)

    def rounded(params: Any) -> Any:
        trained, base = split(params, fixed)
        return join(trained, jax.tree.map(lambda x: x.astype(jnp.bfloat16), base))

    if planned():
        shapes = jax.eval_shape(rounded, definition.abstract_params())
        params = with_shardings(shapes, definition.shardings(bench.mesh))
    else:
        draw = jax.jit(
            lambda key: rounded(definition.init(key)), out_shardings=definition.shardings(bench.mesh)
        )
        params = draw(jax.random.key(SEED))
    model = Model(definition, params, None, table, None, bench.mesh)
    return text_update(bench, model, sizes.sequences, sizes.length)


def make_sampler(bench: Bench, model: Model, options: Any, prompts: int) -> Any:
    """Make the sampler that GRPO uses, without a token that stops."""
    return bench.registry.get(SAMPLER, "jax")(
        SamplerInputs(
            definition=model.definition,
            tokenizer=None,
            options=options,
            mesh=bench.mesh,
            stop_ids=(),
            num_generations=bench.sizes.group,
            prompts_per_call=prompts,
            max_prompt_length=bench.sizes.prompt,
            memory=SAMPLING_MEMORY,
        )
    )


class Policy:
    """W2 to W4: rollouts of a policy, and its update, with the reference of the KL term."""

    def __init__(self, bench: Bench, name: str, params: Any = None) -> None:
        sizes, table, stage = bench.sizes, bench.sizes.models[name], bench.stage("accelerator")
        self.config = config = GRPOConfig(
            total_batch_size=sizes.prompts * sizes.group,
            num_generations=sizes.group,
            max_prompt_length=sizes.prompt,
            sampling={"temperature": 1.0, "max_completion_length": sizes.completion},
            kl={"beta": speed_works.BETA},
            max_training_steps=MANY,
        )
        model, lengths = bench.model(table, "lm"), np.full(sizes.prompts, sizes.prompt)
        group = {"group": sizes.group, "length": sizes.completion}
        self.layout = group_layout(config, lengths, model.definition.hidden_size, bench.mesh, **group)
        self.longest = full_groups(lengths, **group)
        self.model = model = choose_attention(model, config, stage, self.longest, self.layout)
        self.prompts = speed_works.token_ids(sizes.prompts, sizes.prompt, table["vocab_size"])
        self.names = ("ref_logps",)  # with one update per rollout nothing is read of the policy
        loss = bench.registry.get(POLICY_LOSS, config.loss.name, **config.loss.options)
        objective = partial(policy_objective, model.definition, loss, Terms.of(config), temperature=1.0)
        tx, _ = make_optimizer(config, bench.registry, MANY)
        self.state = create_state(model, tx, seed=SEED)
        # An update overwrites the policy, so that the reference is a copy.
        self.reference = self.state.params if planned() else jax.tree.map(jnp.copy, self.state.params)
        logps = partial(trained_logps, model.definition, temperature=1.0, entropy=True)
        read = partial(read_values, logps, None, self.names)
        self.reader = TreeReader(read, self.layout, bench.mesh, per="token")
        self.sampler = make_sampler(bench, model, config.sampling, sizes.prompts)
        self.tokens = sizes.prompts * (sizes.prompt + sizes.group * sizes.completion)
        self.sampled = sizes.prompts * sizes.group * sizes.completion
        self.decoded_bytes = decoded_bytes(model, sizes, sizes.prompts)
        self.token_names = ("sampling_logps", "advantages", *self.names)
        shapes = empty_batches(self.layout, token_names=self.token_names, sequence_names=PER_SEQUENCE)
        batches = pack(self.longest, self.layout)
        self.training = Training(objective, model, self.state, shapes, batches, self.tokens, known=False)

    def described_update(self) -> StagePrograms:
        params = self.state.params
        training = self.training.described()
        reading = reading_programs(
            self.reader.lower,
            {"policy": params, "reference": self.reference},
            loads([self.training.batches], self.reader.shapes()),
            times=1.0,
            reads=("reference",),
        )
        return StagePrograms((*training.programs, *reading), self._resident(), training.weights)

    def described_rollout(self) -> StagePrograms:
        programs = sampling_programs(self.sampler, self.state.params, len(self.prompts))
        return StagePrograms(tuple(programs), self._resident(), token_weights(self.model.definition))

    def _resident(self) -> dict[str, Any]:
        return {**resident(self.state), "reference": self.reference}

    def sample(self, state: TrainState, number: int) -> Rollouts:
        key = jax.random.fold_in(jax.random.key(SEED), number)
        return self.sampler(state.params, list(self.prompts), key)

    def update(self, programs: Programs, state: TrainState, samples: Rollouts) -> TrainState:
        """Score completions by their share of even ids, and do what the trainer does with them."""
        rewards = (samples.tokens % 2 == 0).mean(1).astype(np.float32)
        advantages = np.asarray(group_advantages(rewards, num_generations=self.config.num_generations))
        values = {
            "sampling_logps": list(samples.logps),
            "advantages": [np.full(samples.tokens.shape[1], a, np.float32) for a in advantages],
        }
        policies = {"policy": state.params, "reference": self.reference}
        values |= self.reader(policies, self._trees(samples, rewards, {}))
        trees = self._trees(samples, rewards, values)
        batches = pack(
            trees,
            self.layout,
            token_names=self.token_names,
            sequence_names=PER_SEQUENCE,
        )
        return self.training.update(programs, state, batches)

    def _trees(self, samples: Rollouts, rewards: np.ndarray, values: Any) -> list[Tree]:
        size, trees = self.config.num_generations, []
        for number, prompt in enumerate(self.prompts):
            part = slice(number * size, (number + 1) * size)
            trees.append(
                Tree(
                    prompt,
                    tuple(samples.tokens[part]),
                    token_values={name: tuple(each[part]) for name, each in values.items()},
                    sequence_values={
                        "index": np.arange(part.start, part.stop, dtype=np.float32),
                        "reward": rewards[part],
                    },
                )
            )
        return trees

    def given_completions(self) -> Rollouts:
        """Make up completions, as random as a policy with random weights would write them."""
        vocab = self.model.definition.vocab_size
        sizes = (len(self.prompts) * self.config.num_generations, self.config.sampling.max_completion_length)
        ids = np.random.default_rng(SEED).integers(3, vocab, sizes).astype(np.int32)
        logps = np.full(sizes, -np.log(vocab), np.float32)
        return Rollouts(ids, np.full(sizes[0], sizes[1], np.int32), logps, np.zeros(sizes[0], np.bool_))


def decoded_bytes(model: Model, sizes: Sizes, prompts: int) -> int:
    """Count what decoding must read: in each step the weights, each prompt once, and what was written of each
    completion, on average half.
    """
    definition = model.definition
    prompt = cache_bytes(definition, prompts, sizes.prompt)
    own = cache_bytes(definition, prompts * sizes.group, sizes.completion)
    return sizes.completion * (prepared_bytes(definition) + prompt + own // 2)


class Decoding:
    """The sampler alone, with as many prompts as fill `slots` with their groups. model: None: draw one."""

    def __init__(self, bench: Bench, slots: int, model: Model | None = None) -> None:
        sizes = bench.sizes
        table, count = sizes.models[sizes.decoder], slots // sizes.group
        self.model = bench.model(table, "lm") if model is None else model
        options = SamplingOptions(temperature=1.0, max_completion_length=sizes.completion)
        self.sampler = make_sampler(bench, self.model, options, count)
        self.prompts = speed_works.token_ids(count, sizes.prompt, table["vocab_size"])
        self.sampled = slots * sizes.completion
        self.decoded_bytes = decoded_bytes(self.model, sizes, count)

    def described(self) -> StagePrograms:
        programs = sampling_programs(self.sampler, self.model.params, len(self.prompts))
        held = {PARAMETERS[0]: self.model.params}
        return StagePrograms(tuple(programs), held, token_weights(self.model.definition))

    def sample(self, number: int) -> Rollouts:
        key = jax.random.fold_in(jax.random.key(SEED), number)
        return self.sampler(self.model.params, list(self.prompts), key)


@dataclass(frozen=True)
class Heads:
    """Attention over rows that each hold a prompt of a quarter of the row and three completions of it."""

    bench: Bench
    length: int
    name: str
    """As registered; "xla" is dense."""

    def attention(self) -> Any:
        return self.bench.registry.get(ATTENTION, self.name)

    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of q, and of k and v."""
        sizes = self.bench.sizes.attention
        rows = max(sizes.tokens // self.length, 1)
        keys = (rows, sizes.kv_heads, self.length, sizes.head_dim)
        return (rows, sizes.kv_heads, sizes.groups, self.length, sizes.head_dim), keys, keys

    def layout(self) -> tuple[np.ndarray, np.ndarray]:
        """Positions and visible_until, int32 [rows, length]."""
        rows, part = self.shapes()[0][0], self.length // 4
        at = np.arange(self.length)
        positions = np.where(at < part, at, part + at % part)
        until = np.where(at < part, self.length, (at // part + 1) * part)
        return tuple(np.tile(x.astype(np.int32), (rows, 1)) for x in (positions, until))

    def inputs(self, dtype: Any = jnp.bfloat16) -> tuple[Any, ...]:
        """q, k, v and the gradient of the output, random, then the layout."""
        shapes = self.shapes()
        rows, kv_heads, groups, _, head_dim = shapes[0]
        wanted = (*shapes, (rows, self.length, kv_heads * groups * head_dim))
        if planned():
            arrays = tuple(jax.ShapeDtypeStruct(shape, dtype) for shape in wanted)
        else:
            keys = jax.random.split(jax.random.key(SEED), len(wanted))
            arrays = tuple(
                jax.random.normal(key, shape, dtype) for key, shape in zip(keys, wanted, strict=True)
            )
            arrays = (arrays[0] * head_dim**-0.5, *arrays[1:])
        return *arrays, *(self.layout() if planned() else map(jnp.asarray, self.layout()))

    def forward(self, q: Any, k: Any, v: Any, gradient: Any, positions: Any, until: Any) -> Any:
        return self.attention()(q, k, v, positions, until)

    def both(self, q: Any, k: Any, v: Any, gradient: Any, positions: Any, until: Any) -> Any:
        """Compute the output and the gradients of q, k and v."""
        mixed, back = jax.vjp(lambda *x: self.attention()(*x, positions, until), q, k, v)
        return mixed, *back(gradient)

    def described(self) -> StagePrograms:
        arrays = [
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated_sharding(self.bench.mesh))
            for x in self.inputs()
        ]
        tokens = float(self.shapes()[0][0] * self.length)
        programs = [
            Program(name, partial(jax.jit(function).lower, *arrays), work, tokens=tokens)
            for name, function, work in (("forward", self.forward, "read"), ("both", self.both, "train"))
        ]
        return StagePrograms(tuple(programs))


def works(bench: Bench) -> Iterator[tuple[str, Callable[[], StagePrograms]]]:
    """List what `predict.py` compiles, most valuable first: (name, function that describes it)."""
    sizes, models = bench.sizes, list(reversed(bench.sizes.models))
    for name in models:
        yield f"W1 {name}", lambda name=name: reward_update(bench, name).described()
        yield f"W2 {name}", lambda name=name: Policy(bench, name).described_update()
    yield "LoRA", lambda: adapter_update(bench).described()
    for kind in ("xla", "cudnn", "pallas"):
        for length in sizes.attention.lengths if kind in bench.registry.names(ATTENTION) else ():
            yield f"{kind} {length}", Heads(bench, length, kind).described
    for name in models:
        yield f"W3 {name}", lambda name=name: Policy(bench, name).described_rollout()
    for slots in sizes.slots:
        yield f"decode {slots}", lambda slots=slots: Decoding(bench, slots).described()
