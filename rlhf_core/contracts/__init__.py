"""The contracts between core and plugins: kinds of components, and the structs that cross between them.

Nothing here imports jax, so that the command line starts in milliseconds.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, Protocol, Self, TypeVar

from rlhf_core.contracts.models import Lora as Lora
from rlhf_core.contracts.models import ModelDefinition as ModelDefinition
from rlhf_core.contracts.models import ModelFamily as ModelFamily
from rlhf_core.contracts.models import TensorParallel as TensorParallel
from rlhf_core.errors import InputError, suggest

if TYPE_CHECKING:
    import jax
    import numpy as np
    import optax
    from jax.sharding import Mesh


T = TypeVar("T")
ALIKE = 0.85
"""Similarity, from 0 to 1, above which one name counts as the other one misspelt."""


@dataclass(frozen=True)
class Kind(Generic[T]):
    """A kind of component: the key under which the registry keeps names. Kinds are open: a plugin may declare its own.

    name: as messages write it, such as "policy loss".
    arguments: the names of the parameters that a component is called with; a function's other keyword parameters with
        defaults are options.
    factory: True where the component is an object, so that a registered function is called to make it.
    constant: True where jit closes over the component, so that it must hash by value: a class must be frozen, without
        public class attributes other than its options and `attributes`.
    attributes: {name: allowed values} that a trainer reads from a component with `attribute`; the first is the default.
    by_path: True where a name may also be `module:function` or `file.py:function`.
    """

    name: str
    arguments: tuple[str, ...] = ()
    factory: bool = False
    constant: bool = False
    attributes: Mapping[str, Sequence[str]] = field(default_factory=dict, hash=False)
    by_path: bool = False

    def attribute(self, component: Any, name: str) -> str:
        """Read a declared attribute from an option, a class or a function; return the default where it is absent.

        Raises InputError, which names the nearest declared value, for a value that is not declared.
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
        """Yield what is wrong with the attributes of a class, function or object with these options."""
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
                continue  # a property has a value on an object only
            try:
                self.attribute(thing, name)
            except InputError as error:
                yield str(error)


def _value(component: Any, name: str, default: str) -> Any:
    """Read an attribute; for a function with options, the chosen value, else the parameter's default."""
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
    """List the public attributes, other than methods, of a class and its parents, or of a function."""
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
    """List the public attributes of an instance; a class or a function has none."""
    return set() if inspect.isclass(thing) or callable(getattr(thing, "__get__", None)) else _public(thing)


def _public(thing: Any) -> set[str]:
    return {name for name in getattr(thing, "__dict__", {}) if not name.startswith("_")}


class Rows(NamedTuple):
    """The batch layout, arrays [rows, time]. A row holds several sequences, or trees with a shared prompt.

    tokens: int32, 0 where unused. positions: int32, position within the token's own sequence, prompt included.
    visible_until: int32: queries q with k <= q < visible_until[k] see the key at index k; 0 where unused.
    parent: int32, index in the row of the token whose hidden state predicts this one; -1 for a first token.
    sequence: int32, the number of the token's sequence in the row; -1 for a shared prompt and where unused.
    weight: float32, 0 where the token is not trained on.
    """

    tokens: jax.Array | np.ndarray
    positions: jax.Array | np.ndarray
    visible_until: jax.Array | np.ndarray
    parent: jax.Array | np.ndarray
    sequence: jax.Array | np.ndarray
    weight: jax.Array | np.ndarray


class LossOutput(NamedTuple):
    """The result of a loss: values and metrics per element, all in the inputs' shape."""

    loss: jax.Array
    metrics: Mapping[str, jax.Array] = {}


class PairInputs(NamedTuple):
    """Preference pairs, float32 [pairs], reward units. chosen, rejected: scores. margin: 0 where the data has none."""

    chosen: jax.Array
    rejected: jax.Array
    margin: jax.Array


@dataclass(frozen=True)
class PolicyInputs:
    """Values per token, float32 [N, T]. Losses are written per element and use `sequence_mean` across a sequence.

    logps: nats, differentiable: log-probability of the token under the policy.
    old_logps: nats, without gradient: under the policy in the denominator of the importance ratio.
    advantages: unitless. mask: 1 where the token is trained on.
    ref_logps, entropies: nats: under the reference policy; of the policy's distribution; None: not computed.
    sequence: int32 [N, T] in [0, sequences): the token's sequence within its row; None: a row is one sequence.
    sequences: the most sequences that a row holds (static).
    rewards: at every token the total reward of its completion, 0 where no function scored it; None: not known.
    """

    logps: jax.Array
    old_logps: jax.Array
    advantages: jax.Array
    mask: jax.Array
    ref_logps: jax.Array | None = None
    entropies: jax.Array | None = None
    sequence: jax.Array | None = None
    sequences: int = 1
    rewards: jax.Array | None = None

    def sequence_sum(self, x: jax.Array) -> jax.Array:
        """Sum `x` over each sequence's masked tokens; every token gets its sequence's sum, float32 [N, T]."""
        import jax.numpy as jnp

        # Values outside the mask, even NaN, must not reach the sum.
        x = jnp.where(self.mask != 0, x * self.mask, 0.0)
        if self.sequence is None:
            return jnp.broadcast_to(x.sum(-1, keepdims=True), self.mask.shape)
        member = (self.sequence[:, :, None] == jnp.arange(self.sequences)).astype(x.dtype)  # [N, T, s]
        # By default, accelerators round a product's float32 inputs to TF32 or bfloat16: a length of 1001 becomes 1000.
        summed = partial(jnp.einsum, precision="highest")
        return summed("nts,ns->nt", member, summed("nts,nt->ns", member, x))

    def sequence_mean(self, x: jax.Array) -> jax.Array:
        """Average `x` likewise, float32 [N, T]; 0 where no token of the sequence is in the mask."""
        import jax.numpy as jnp

        return self.sequence_sum(x) / jnp.maximum(self.sequence_sum(jnp.ones_like(self.mask)), 1.0)


def total_reward(by_function: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Sum the functions that apply, weighted, float64 [..., functions] → [...]; NaN where none applies."""
    import numpy as np

    scored = ~np.isnan(by_function)
    total = np.where(scored, by_function * weights, 0.0).sum(-1)
    return np.where(scored.any(-1), total, np.nan)


class AdvantageInputs(NamedTuple):
    """Rewards of one rollout, grouped by prompt.

    rewards: float32 [prompts, samples], the weighted sum over functions; NaN: not scored.
    rewards_by_function: float32 [prompts, samples, functions]; NaN: the function does not apply.
    weights: float32 [functions]. lengths: int32 [prompts, samples], completion tokens.
    labels: names the functions, as the metrics do. columns: the dataset's other columns, {name: one value per
        completion}, those of a prompt adjacent.
    """

    rewards: jax.Array | np.ndarray
    rewards_by_function: jax.Array | np.ndarray
    weights: jax.Array | np.ndarray
    lengths: jax.Array | np.ndarray
    labels: tuple[str, ...] = ()
    columns: Mapping[str, Sequence[Any]] = {}

    @classmethod
    def of(
        cls,
        rewards_by_function: np.ndarray,
        weights: np.ndarray,
        lengths: np.ndarray,
        *,
        labels: tuple[str, ...] = (),
        columns: Mapping[str, Sequence[Any]] | None = None,
    ) -> AdvantageInputs:
        """Make the inputs from the rewards by function, whose weighted sum becomes `rewards`."""
        total = total_reward(rewards_by_function, weights)
        return cls(total, rewards_by_function, weights, lengths, labels, columns or {})


class RewardInputs(NamedTuple):
    """Arguments that a reward function may take by name; every other column of the dataset has its own name.

    prompts, completions: one per completion: texts, or message lists for chat data.
    completion_ids: the sampled tokens, stop token included. columns: the other columns, one value per completion.
    places: each completion's row as messages name it, such as "prompts.jsonl row 17"; not passed to functions.
    """

    prompts: Sequence[Any]
    completions: Sequence[Any]
    completion_ids: Sequence[Sequence[int]]
    columns: Mapping[str, Sequence[Any]]
    places: Sequence[str] = ()


class SamplingSettings(Protocol):
    """The options of `rlhf_core.sampling.SamplingOptions`, whose descriptions say what they mean; hashable."""

    @property
    def temperature(self) -> float: ...
    @property
    def top_p(self) -> float: ...
    @property
    def top_k(self) -> int | None: ...
    @property
    def min_p(self) -> float | None: ...
    @property
    def repetition_penalty(self) -> float: ...
    @property
    def max_completion_length(self) -> int: ...
    @property
    def stop_strings(self) -> tuple[str, ...]: ...
    @property
    def stop_token_ids(self) -> tuple[int, ...]: ...
    @property
    def mesh(self) -> Any: ...


@dataclass(frozen=True)
class SamplerInputs:
    """Arguments of the function that makes a sampler, equal on every process.

    definition: the model without its parameters. mesh: the devices that hold the parameters.
    options: a sampler honours all of them, or raises an InputError that names the field.
    stop_ids: tokens that end a completion, besides `options.stop_token_ids`. num_generations: completions per prompt.
    prompts_per_call: the usual number of prompts in a call, which may have any. max_prompt_length: in tokens.
    memory: bytes per device that sampling may use, weights in a layout of its own included; None: unknown.
    conversation_length: in tokens, of the longest conversation without its prompt; None: there are no conversations,
        and `converse` is not called.
    """

    definition: ModelDefinition
    tokenizer: Any | None
    options: SamplingSettings
    mesh: Mesh
    stop_ids: tuple[int, ...]
    num_generations: int
    prompts_per_call: int
    max_prompt_length: int
    memory: int | None = None
    conversation_length: int | None = None


@dataclass(frozen=True)
class Forecast:
    """What a stage would do, as `rlhf check` prints it.

    lines: examples, updates, tokens, memory, each a line.
    warnings: without "warning: "; a pipeline shows them at its start, and not again where the stage raises them.
    """

    lines: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    def printed(self) -> list[str]:
        """Return every line for a reader, warnings last."""
        return [*self.lines, *(f"warning: {line}" for line in self.warnings)]


PARAMETERS = ("parameters", "frozen parameters")
"""Residents of a stage that are all parameters of the model that is trained."""


class ProgramShape(NamedTuple):
    """What a program computes with, for a forecast of its memory and time without compiling it.

    model: a `rlhf_core.models.Definition`. rows, time: of a call's batch, padding included; of a sampler the sequences
    that all devices decode at once, and the tokens of each. tensor: devices that share each layer; None: as the
    stage's mesh has it. memory: bytes per device beside the stage's residents; None: they follow from the rest.
    step_bytes: those of them that a step of a sampler reads, on average; None: all.
    """

    model: Any
    rows: int
    time: int
    tensor: int | None = None
    memory: int | None = None
    step_bytes: int | None = None


@dataclass(frozen=True)
class Program:
    """A program that a stage runs, to be compiled from shapes alone.

    name: such as "accumulate 8 × 2048". lower: returns `jax.jit(…).lower(…)` of it, whose arguments are
    jax.ShapeDtypeStructs with shardings on the stage's mesh.
    work: what it does with tokens: "train" (forward and backward), "read" (forward), "sample" or "update" (no tokens).
    calls: per update, on average. tokens: that a call reads, or samples, without padding.
    steps: at most so often per call runs the loop whose number of rounds depends on data, such as decoding; 0: no loop.
    reads: those of `StagePrograms.resident` that are among its arguments, each as often as it is.
    shape: for `--suggest`, which ranks by arithmetic before it compiles; None: counted as if it took nothing.
    """

    name: str
    lower: Callable[[], Any]
    work: Literal["train", "read", "sample", "update"]
    calls: float = 1.0
    tokens: float = 0.0
    steps: int = 0
    reads: tuple[str, ...] = ()
    shape: ProgramShape | None = None


@dataclass(frozen=True)
class StagePrograms:
    """The programs of a stage, and what lies in the devices' memory while any of them runs.

    resident: {name: tree of jax.ShapeDtypeStructs with shardings}, such as "parameters" (those that are trained),
        "frozen parameters", "optimizer", "reference".
    weights: parameters of the model that each token is multiplied with, for its FLOPs: 2 forward, 4 backward.
    note: what is not among them, and why.
    """

    programs: tuple[Program, ...] = ()
    resident: Mapping[str, Any] = field(default_factory=dict)
    weights: int = 0
    note: str | None = None


@dataclass(frozen=True)
class Trainer:
    """A trainer as the pipeline sees it.

    config: the class of its options, a subclass of `rlhf_core.TrainerConfig`.
    outputs: {output name: artifact kind}, all of which `run` must save.
    run: does the work, given the config and the `rlhf_core.Stage`, which hold its inputs.
    forecast: optional: returns a `Forecast` of what `run` would do, or its lines alone, without using a device.
    programs: optional: returns the `StagePrograms` that `run` would run, from shapes alone; the stage's mesh has
        devices that need not exist.
    """

    config: type[Any]
    outputs: Mapping[str, str]
    run: Callable[[Any, Any], None]
    forecast: Callable[[Any, Any], Forecast | Sequence[str]] | None = None
    programs: Callable[[Any, Any], StagePrograms] | None = None


class PairwiseLoss(Protocol):
    def __call__(self, inputs: PairInputs, /) -> LossOutput: ...


class PolicyLoss(Protocol):
    def __call__(self, inputs: PolicyInputs, /) -> LossOutput: ...


class Advantage(Protocol):
    def __call__(self, inputs: AdvantageInputs, /) -> jax.Array | np.ndarray: ...


class _Rollouts(NamedTuple):
    tokens: np.ndarray
    lengths: np.ndarray
    logps: np.ndarray
    finished: np.ndarray
    mask: np.ndarray
    version: np.ndarray


class Rollouts(_Rollouts):
    """N completions, NumPy arrays on every process; C is max_completion_length.

    tokens: int32 [N, C], 0 after the end.
    lengths: int32 [N], tokens of the completion, including the one that ended it.
    logps: float32 [N, C], nats: log-probability under softmax(logits / temperature), without repetition penalty and
        filters; 0 after the end. At temperature 0, under softmax(logits).
    finished: bool [N]: a stop token was sampled or a stop string completed; False: cut at C.
    mask: bool [N, C]: the tokens that the policy wrote; default: all tokens up to each completion's length, by what
        `lengths` holds when the object is made.
    version: int32 [N]: the number of updates applied to the policy that wrote the completion; default: 0.
    """

    __slots__ = ()

    def __new__(
        cls,
        tokens: np.ndarray,
        lengths: np.ndarray,
        logps: np.ndarray,
        finished: np.ndarray,
        mask: np.ndarray | None = None,
        version: np.ndarray | None = None,
    ) -> Self:
        import numpy as np

        if mask is None:
            mask = np.arange(tokens.shape[-1]) < np.asarray(lengths)[..., None]
        if version is None:
            version = np.zeros(np.shape(lengths), np.int32)
        return super().__new__(cls, tokens, lengths, logps, finished, mask, version)


class Continuation(NamedTuple):
    """What follows a turn of the policy in a conversation.

    conversation: its number in the call. tokens: int32 [n], what the world adds, which ends with the header of the
        policy's next turn; None: the conversation is over. limit: the most tokens that the next turn may have.
    replaces: whether `tokens` are the whole context of the next turn, instead of what is added to it.
    """

    conversation: int
    tokens: np.ndarray | None
    limit: int = 0
    replaces: bool = False


class World(Protocol):
    """What the conversations of one call of `converse` are held with; the same calls on every process, in step.

    An attribute `quick` says whether it answers at once, so that a conversation need not make room for others while it
    waits; default: False.
    """

    def submit(self, conversation: int, tokens: np.ndarray, logps: np.ndarray, finished: bool) -> None:
        """Take a turn of the policy: int32 and float32 [n], as in `Rollouts`, and whether it ended by itself."""
        ...

    def replies(self, *, wait: bool) -> Sequence[Continuation]:
        """Return what has arrived since the last call, each once. wait: for at least one, if any is outstanding."""
        ...


class SamplerFunction(Protocol):
    """Sample completions of prompts. The trainer calls it on every process, in step.

    params: the current policy, arrays on the mesh. They belong to the trainer, whose next update overwrites them: an
        engine that keeps its own weights copies them during the call.
    prompts: int [length] each, 1 to max_prompt_length tokens, used as they are: add nothing. Completions are the
        sampled tokens, never text that was tokenized again.
    key: a typed key, the same on every process. ids: int [N], default 0 … N - 1: with the key, they determine each
        completion's random numbers. Equal keys, ids, prompts and parameters should give equal completions on any
        machine; otherwise a run is not reproducible, and a continued run differs from an uninterrupted one.

    Returns `Rollouts` of N = len(prompts) × num_generations completions, those of a prompt adjacent, as new NumPy
    arrays that the caller may change, complete and equal on every process. Log-probabilities are the policy's, under
    softmax(logits / temperature), before penalty and filters.

    An optional method `warm_up(params, lengths)` compiles for prompts of these lengths, or starts to in threads.
    Another, `programs(params, prompts)`, lists the `Program`s of a rollout of so many prompts, for `rlhf check --on`.
    A third, `converse(params, prompts, key, ids, world)`, samples the turns of conversations with a `World`, of which
    prompts has one entry per conversation: conversations wait for their world, not for each other. Without it, all
    conversations take each turn together, in a call whose prompts are all that was said.
    """

    def __call__(
        self, params: Any, prompts: Sequence[np.ndarray], key: jax.Array, ids: np.ndarray | None = None
    ) -> Rollouts: ...


class SamplerMaker(Protocol):
    def __call__(self, inputs: SamplerInputs, /) -> SamplerFunction: ...


class Reward(Protocol):
    def __call__(self, *args: Any, **columns: Any) -> Any: ...


class Turn(NamedTuple):
    """What an environment answers to a completion.

    messages: what it adds to the conversation, such as {"role": "tool", "content": "42"}.
    reward: of this turn, in reward units; an episode's reward is the sum of its turns'; None: this turn has none.
    done: whether the episode is over; its messages are then not sent to the policy.
    metrics: numbers to log, averaged over the turns that have them.
    """

    messages: Sequence[Mapping[str, Any]] = ()
    reward: float | None = None
    done: bool = False
    metrics: Mapping[str, float] = {}


class Environment(Protocol):
    """The world of one episode; an object is made for each. Its methods may be async.

    Optional attributes: `tools`, what the policy may call, as JSON schemas for the chat template; `asynchronous`,
    whether a method that is no coroutine function returns an awaitable; `deterministic`, False where equal seeds and
    completions may get other answers.
    """

    def reset(
        self, row: Mapping[str, Any], seed: int
    ) -> Sequence[Mapping[str, Any]] | Awaitable[Sequence[Mapping[str, Any]]]:
        """Begin an episode with a row of the dataset, and return its first messages, the last of which is to be
        replied to. seed: equal for the episodes of a group, which must begin alike.
        """
        ...

    def step(self, completion: Mapping[str, Any]) -> Turn | Awaitable[Turn]:
        """Answer the policy's message: its `role`, `content`, and `tool_calls` where it made any."""
        ...


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
REWARD: Kind[Reward] = Kind("reward", ("prompts", "completions", "completion_ids"), by_path=True)
ENVIRONMENT: Kind[Environment] = Kind("environment", factory=True, by_path=True)
MODEL: Kind[ModelFamily] = Kind("model")
DATASET: Kind[Dataset] = Kind("dataset", factory=True)
LOGGER: Kind[object] = Kind("logger", factory=True)
OPTIMIZER: Kind[OptimizerFactory] = Kind("optimizer", ("learning_rate",))


@dataclass(frozen=True)
class Artifact:
    """A finished output of a stage: a directory in Hugging Face layout with a manifest.

    kind: "language_model", "reward_model", or a plugin's own.
    metadata: the contents of the manifest, `rlhf_artifact.json`.
    """

    name: str
    kind: str
    path: Any
    metadata: Mapping[str, Any] = field(default_factory=dict)


class AttentionOver(Protocol):
    """Self-attention over rows, with the arguments, shapes and result of `rlhf_core.models.attention.attend`.

    window: int32 scalar, traced where layers differ in it. softcap: a Python number.
    An implementation raises InputError, while it is traced, for what it cannot compute.
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
