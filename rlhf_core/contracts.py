"""What plugins and core say to each other: kinds of components and the structs that cross between them.

Nothing here imports jax, so that a command line can read it in milliseconds.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar

from rlhf_core.errors import InputError, suggest

if TYPE_CHECKING:
    import jax
    import numpy as np
    import optax
    from jax.sharding import Mesh

    from rlhf_core.config import TrainerConfig
    from rlhf_core.models import Definition
    from rlhf_core.sampling import Rollouts, SamplingOptions
    from rlhf_core.stage import Stage


T = TypeVar("T")
ALIKE = 0.85
"""How alike two names are, of 1, where one is taken for the other misspelt."""


@dataclass(frozen=True)
class Kind(Generic[T]):
    """A kind of component, the key under which the registry keeps names. Kinds are open: a plugin may declare its own.

    name: what messages call it, such as "policy loss".
    arguments: the names a component is called with; a function's other keyword parameters with defaults are options.
    factory: True where the component is an object, so that a registered function is called to make it.
    constant: True where jit closes over the component, so that it must hash by value: a class must be frozen, and has
        no public class attribute beside its options and `attributes`.
    attributes: {name: its values} that a trainer reads from a component with `attribute`; the first is the default.
    """

    name: str
    arguments: tuple[str, ...] = ()
    factory: bool = False
    constant: bool = False
    attributes: Mapping[str, Sequence[str]] = field(default_factory=dict, hash=False)

    def attribute(self, component: Any, name: str) -> str:
        """Read a declared attribute of a component: an option, a class attribute or a function's; or the default.

        Raises InputError, with the nearest one, for a value that is not declared.
        """
        values = self.attributes[name]
        value = _value(component, name, values[0])
        if isinstance(value, str) and value in values:
            return value
        raise InputError(
            f"{name} of {self.name} {_called(component)} is {value!r}; it is one of {', '.join(values)}."
            f"{suggest(value, values) if isinstance(value, str) else ''}".rstrip(".")
        )

    def attribute_problems(self, thing: Any, options: Collection[str]) -> Iterator[str]:
        """Yield what is wrong with the attributes of a class, function or object, whose options have these names."""
        if not (self.constant or self.attributes):
            return
        names = _constants(thing) - set(options)
        for name in sorted(names - set(self.attributes)):
            known = f"; a {self.name} has {' and '.join(self.attributes)}" if self.attributes else ""
            yield (
                f"nothing reads its attribute '{name}'{known}.{suggest(name, self.attributes)} A constant of its own "
                "begins with an underscore, an option is a field of the dataclass"
            )
        for name in sorted((set(options) | _state(thing)) - set(self.attributes)):
            if meant := get_close_matches(name, self.attributes, n=1, cutoff=ALIKE):
                yield f"'{name}' is nearly '{meant[0]}', which the trainer reads; write that, or choose another name"
        for name in self.attributes:
            if hasattr(_value(thing, name, ""), "__get__"):
                continue  # a property: known of an object only
            try:
                self.attribute(thing, name)
            except InputError as error:
                yield str(error)


def _value(component: Any, name: str, default: str) -> Any:
    """What a component says; of a function with options, what was chosen, else the parameter's default."""
    chosen: dict[str, Any] = {}
    while isinstance(component, partial):
        chosen = {**component.keywords, **chosen}
        component = component.func
    if name in chosen:
        return chosen[name]
    if hasattr(component, name):
        return getattr(component, name)
    if inspect.isroutine(component) or hasattr(component, "__wrapped__"):
        parameter = inspect.signature(component).parameters.get(name)
        if parameter is not None and parameter.default is not parameter.empty:
            return parameter.default
    return default


def _called(component: Any) -> str:
    while isinstance(component, partial):
        component = component.func
    return str(getattr(component, "__qualname__", None) or type(component).__qualname__)


def _constants(thing: Any) -> set[str]:
    """Public attributes of a class and its parents, or of a function, that are not methods."""
    if inspect.isroutine(thing) or hasattr(thing, "__wrapped__"):
        spaces: list[Mapping[str, Any]] = [getattr(inspect.unwrap(thing), "__dict__", {})]
    else:
        spaces = [vars(base) for base in (thing if inspect.isclass(thing) else type(thing)).__mro__]
    return {
        name
        for space in spaces
        for name, value in space.items()
        if not (name.startswith("_") or callable(value) or hasattr(value, "__get__"))
    }


def _state(thing: Any) -> set[str]:
    """Public attributes of an object that was made."""
    return set() if inspect.isclass(thing) or callable(getattr(thing, "__get__", None)) else _public(thing)


def _public(thing: Any) -> set[str]:
    return {name for name in getattr(thing, "__dict__", {}) if not name.startswith("_")}


class Rows(NamedTuple):
    """The one batch layout, arrays [rows, time]. Several sequences, and trees with a shared prompt, fit one row.

    tokens: int32, 0 where unused. positions: int32, position within the token's own sequence, prompt included.
    visible_until: int32, the key at index k is seen by the queries q with k <= q < visible_until[k]; 0 where unused.
    parent: int32, index in the row of the token whose hidden state predicts this one; -1 for a first token.
    sequence: int32, which sequence of the row the token belongs to; -1 for a shared prompt and for unused.
    weight: float32, 0 where the token is not trained on.
    """

    tokens: jax.Array | np.ndarray
    positions: jax.Array | np.ndarray
    visible_until: jax.Array | np.ndarray
    parent: jax.Array | np.ndarray
    sequence: jax.Array | np.ndarray
    weight: jax.Array | np.ndarray


class LossOutput(NamedTuple):
    """What a loss returns: per-element values and per-element metrics, all of the inputs' shape."""

    loss: jax.Array
    metrics: Mapping[str, jax.Array] = {}


class PairInputs(NamedTuple):
    """One element a preference pair, float32 [pairs], reward units. chosen, rejected: scores. margin: 0 where none."""

    chosen: jax.Array
    rejected: jax.Array
    margin: jax.Array


@dataclass(frozen=True)
class PolicyInputs:
    """One element a token, float32 [N, T]. Authors write element by element and use `sequence_mean` for the rest.

    logps: nats, differentiable: log-probability of the token under the policy.
    old_logps: nats: under the policy that the ratio is taken against; no gradient.
    advantages: unitless. mask: 1 where the token is trained on.
    ref_logps, entropies: nats: under the reference policy; of the policy's distribution at the token; None: not kept.
    sequence: int32 [N, T] in [0, sequences): which sequence of its row a token belongs to; None: a row is one sequence.
    sequences: how many sequences a row holds at most (static).
    """

    logps: jax.Array
    old_logps: jax.Array
    advantages: jax.Array
    mask: jax.Array
    ref_logps: jax.Array | None = None
    entropies: jax.Array | None = None
    sequence: jax.Array | None = None
    sequences: int = 1

    def sequence_sum(self, x: jax.Array) -> jax.Array:
        """Each token's sequence's sum of `x` over the mask, float32 [N, T]."""
        import jax.numpy as jnp

        # What is outside the mask must not poison the sum, whatever it holds.
        x = jnp.where(self.mask != 0, x * self.mask, 0.0)
        if self.sequence is None:
            return jnp.broadcast_to(x.sum(-1, keepdims=True), self.mask.shape)
        member = (self.sequence[:, :, None] == jnp.arange(self.sequences)).astype(x.dtype)  # [N, T, s]
        # By default accelerators round float32 inputs of products to TF32 or bfloat16: a length of 1001 becomes 1000.
        summed = partial(jnp.einsum, precision="highest")
        return summed("nts,ns->nt", member, summed("nts,nt->ns", member, x))

    def sequence_mean(self, x: jax.Array) -> jax.Array:
        """Each token's sequence's mean of `x` over the mask, float32 [N, T]; 0 where the sequence has no token."""
        import jax.numpy as jnp

        return self.sequence_sum(x) / jnp.maximum(self.sequence_sum(jnp.ones_like(self.mask)), 1.0)


class AdvantageInputs(NamedTuple):
    """Rewards of one rollout, grouped by prompt.

    rewards: float32 [prompts, samples], the weighted sum over functions; NaN: not scored.
    rewards_by_function: float32 [prompts, samples, functions]; NaN: the function does not apply.
    weights: float32 [functions]. lengths: int32 [prompts, samples], completion tokens.
    """

    rewards: jax.Array | np.ndarray
    rewards_by_function: jax.Array | np.ndarray
    weights: jax.Array | np.ndarray
    lengths: jax.Array | np.ndarray


class RewardInputs(NamedTuple):
    """What a reward function may ask for by name; every other dataset column is passed under its own name.

    prompts, completions: texts, or message lists for chat data, one a completion.
    completion_ids: the sampled tokens, stop token included. columns: the dataset's others, one value per completion.
    places: names each completion's row in messages, such as "prompts.jsonl row 17"; functions do not get them.
    """

    prompts: Sequence[Any]
    completions: Sequence[Any]
    completion_ids: Sequence[Sequence[int]]
    columns: Mapping[str, Sequence[Any]]
    places: Sequence[str] = ()


@dataclass(frozen=True)
class SamplerInputs:
    """What a sampler is made for; equal on every process.

    definition: the model without its parameters: `family`, `config`, and their functions. mesh: their devices.
    options: to be honoured in full, or refused with an InputError that names the field.
    stop_ids: tokens that end a completion, besides `options.stop_token_ids`. num_generations: completions a prompt.
    prompts_per_call: that will usually come at once; a call may bring any number. max_prompt_length: tokens at most.
    """

    definition: Definition
    tokenizer: Any | None
    options: SamplingOptions
    mesh: Mesh
    stop_ids: tuple[int, ...]
    num_generations: int
    prompts_per_call: int
    max_prompt_length: int


@dataclass(frozen=True)
class Trainer:
    """A trainer as the pipeline sees it.

    config: the options it takes, a subclass of `TrainerConfig`.
    outputs: {output name: artifact kind}, all of which `run` must save.
    run: does the work; reads its inputs from the config and the stage.
    plan: optional; a few lines that say what `run` would do, without touching a device.
    """

    config: type[TrainerConfig]
    outputs: Mapping[str, str]
    run: Callable[[Any, Stage], None]
    plan: Callable[[Any, Stage], Sequence[str]] | None = None


@dataclass(frozen=True)
class ModelFamily:
    """A family of language models, as pure functions over a nested dict of parameters.

    `config` below is whatever hashable value `parse` returned; `params` the dict `init` or `load` made.

    name: the `model_type` values of config.json that it reads, such as ("llama", "qwen2").
    parse(hf_config: Mapping, head: "lm" | "score") -> config: raises InputError naming a field it cannot honour.
    abstract(config) -> params of jax.ShapeDtypeStruct, float32.
    axes(config) -> params of tuples of logical axis names, one name (or None) a dimension.
    init(config, key) -> params, float32.
    hidden(config, params, tokens, positions, visible_until) -> [rows, time, hidden] after the last norm, compute dtype;
        tokens, positions, visible_until int32 [rows, time] as in `Rows`.
    unembedding(config, params) -> (kernel [hidden, vocab], softcap float | None).
    score(config, params, hidden [..., hidden]) -> float32 [...]: the reward head.
    prefill(config, params, tokens, positions, visible_until) -> (hidden, key/value cache, rows first, of these tokens).
    ring(config, cache, length, slot) -> cache of `length` slots: the last token in slot - 1, the rest before it, round.
    prepare(config, params) -> params as `decode` reads them fastest; called once a rollout, inside jit.
    decode(config, params, cache, tokens [B], positions [B], visible [B, length] bool, slot) -> (hidden [B, hidden],
        cache): one token a row, written in `slot`, which `visible` includes. Slots are used round, as in `ring`.
    load(config, directory, shardings) -> params: from a Hugging Face directory; a missing score head is left out.
    save(config, params, directory, dtype) -> None: weights only, in the family's own Hugging Face names.
    adapt(config, lora: Lora | None) -> config: with low-rank adapters, {"adapter": {"lora_a", "lora_b"}} beside the
        kernel [layers, in, out] of each of `lora.targets`, which `prepare` merges; or without. None: it takes none.
    hidden_at(config, params, tokens, positions, visible_until, at int32 [rows, n]) -> `hidden` there. None: none.
    """

    name: tuple[str, ...]
    parse: Callable[..., Any]
    abstract: Callable[..., Any]
    axes: Callable[..., Any]
    init: Callable[..., Any]
    hidden: Callable[..., Any]
    unembedding: Callable[..., Any]
    score: Callable[..., Any]
    prefill: Callable[..., Any]
    ring: Callable[..., Any]
    prepare: Callable[..., Any]
    decode: Callable[..., Any]
    load: Callable[..., Any]
    save: Callable[..., Any]
    adapt: Callable[..., Any] | None = None
    hidden_at: Callable[..., Any] | None = None


class PairwiseLoss(Protocol):
    def __call__(self, inputs: PairInputs, /) -> LossOutput: ...


class PolicyLoss(Protocol):
    def __call__(self, inputs: PolicyInputs, /) -> LossOutput: ...


class Advantage(Protocol):
    def __call__(self, inputs: AdvantageInputs, /) -> jax.Array | np.ndarray: ...


class Draw(Protocol):
    """What a sampler makes: completions of prompts, for a trainer that calls it on every process, in step.

    params: the policy as it is now, arrays on the mesh. They are the trainer's, which overwrites them with its next
        update: an engine that keeps weights of its own copies them inside the call.
    prompts: int [length] each, at least one token and at most max_prompt_length, as they are to be read: nothing is
        added. The completions are tokens too, and are never made from text.
    key: a typed key, the same on every process; ids: int [N], which random numbers each completion is drawn with,
        default 0 … N - 1. Equal keys, ids, prompts and parameters should give equal completions on any machine: a
        run whose sampler does otherwise is not reproducible, nor bit for bit the same when it continues.

    Returns `Rollouts` of N = len(prompts) × num_generations completions, those of a prompt adjacent, as new NumPy
    arrays that are the caller's, whole and equal on every process. Its log-probabilities are those of the policy,
    under softmax(logits / temperature), before penalty and filters.

    An optional method `warm_up(params, lengths)` does, or starts to do in threads, what is slow once for such lengths.
    """

    def __call__(
        self, params: Any, prompts: Sequence[np.ndarray], key: jax.Array, ids: np.ndarray | None = None
    ) -> Rollouts: ...


class SamplerMaker(Protocol):
    def __call__(self, inputs: SamplerInputs, /) -> Draw: ...


class Reward(Protocol):
    def __call__(self, *args: Any, **columns: Any) -> Any: ...


class Dataset(Protocol):
    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Mapping[str, Any]: ...


class OptimizerFactory(Protocol):
    def __call__(self, learning_rate: Any, **options: Any) -> optax.GradientTransformation: ...


TRAINER: Kind[Trainer] = Kind("trainer")
PAIRWISE_LOSS: Kind[PairwiseLoss] = Kind("pairwise loss", ("inputs",), constant=True)
POLICY_LOSS: Kind[PolicyLoss] = Kind(
    "policy loss",
    ("inputs",),
    constant=True,
    attributes={
        "aggregation": ("token_mean", "sequence_mean", "fixed_length"),
        "importance_sampling_level": ("token", "sequence", "sequence_token"),
    },
)
ADVANTAGE: Kind[Advantage] = Kind("advantage", ("inputs",), constant=True)
SAMPLER: Kind[SamplerMaker] = Kind("sampler", ("inputs",))
REWARD: Kind[Reward] = Kind("reward", ("prompts", "completions", "completion_ids"))
MODEL: Kind[ModelFamily] = Kind("model")
DATASET: Kind[Dataset] = Kind("dataset", factory=True)
LOGGER: Kind[object] = Kind("logger", factory=True)
OPTIMIZER: Kind[OptimizerFactory] = Kind("optimizer", ("learning_rate",))


@dataclass(frozen=True)
class Artifact:
    """A finished output of a stage: a directory in Hugging Face layout with a manifest.

    kind: "language_model" or "reward_model", or what a plugin declares.
    metadata: the manifest `rlhf_artifact.json`.
    """

    name: str
    kind: str
    path: Any
    metadata: Mapping[str, Any] = field(default_factory=dict)


class AttentionOver(Protocol):
    """Attention of rows with themselves, as `rlhf_core.models.attention.attend` defines it, shapes and all.

    window: int32 scalar, traced where layers differ in it. softcap: a Python number. What an implementation cannot do,
    it raises InputError for, when it is traced.
    """

    def __call__(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        positions: jax.Array,
        visible_until: jax.Array,
        *,
        window: jax.Array | None = None,
        softcap: float | None = None,
    ) -> jax.Array: ...


ATTENTION: Kind[AttentionOver] = Kind(
    "attention", ("q", "k", "v", "positions", "visible_until", "window", "softcap"), constant=True
)
