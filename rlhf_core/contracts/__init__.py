"""The contracts between core and plugins: kinds of components, and the structs that cross between them.

Nothing here imports jax, so that the command line starts in milliseconds.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from rlhf_core.contracts.kind import Kind as Kind
from rlhf_core.contracts.models import ModelFamily as ModelFamily
from rlhf_core.contracts.models import TensorParallel as TensorParallel
from rlhf_core.contracts.sampling import Beginning as Beginning
from rlhf_core.contracts.sampling import Continuation as Continuation
from rlhf_core.contracts.sampling import OpenWorld as OpenWorld
from rlhf_core.contracts.sampling import Rollouts as Rollouts
from rlhf_core.contracts.sampling import SamplerFunction as SamplerFunction
from rlhf_core.contracts.sampling import SamplerInputs as SamplerInputs
from rlhf_core.contracts.sampling import SamplerMaker as SamplerMaker
from rlhf_core.contracts.sampling import TurnSettings as TurnSettings
from rlhf_core.contracts.sampling import Weights as Weights
from rlhf_core.contracts.sampling import World as World
from rlhf_core.contracts.trainers import Forecast as Forecast
from rlhf_core.contracts.trainers import Trainer as Trainer

if TYPE_CHECKING:
    import jax
    import numpy as np
    import optax


class Rows(NamedTuple):
    """The batch layout, arrays [rows, time]. A row holds several sequences, or trees with a shared prompt.

    tokens: int32, 0 where unused. positions: int32, position within the token's own sequence, prompt included.
    visible_until: int32: queries q with k <= q < visible_until[k] see the key at index k; 0 where unused.
    parent: int32, index in the row of the token whose hidden state predicts this one; -1 for a first token.
    sequence: int32, the number of the token's sequence in the row; negative for a shared prompt and where unused.
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


LARGEST_REWARD = 3.4028234663852886e38
"""The largest number of float32, in which rewards reach advantages."""


def total_reward(by_function: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Sum the functions that apply, weighted, float64 [..., functions] → [...]; NaN where none applies."""
    import numpy as np

    scored = ~np.isnan(by_function)
    total = np.where(scored, by_function * weights, 0.0).sum(-1)
    return np.where(scored.any(-1), total, np.nan)


def all_equal(rewards: np.ndarray) -> np.ndarray:
    """Check whether the scored rewards along the last axis are all equal up to rounding, or none is scored.

    rewards: float64 [..., samples], NaN where not scored. Returns bool [...]. Sums of weighted rewards that are equal
    on paper, such as 0.1 + 0.2 and 0.3, differ in the last digits of float64; an advantage must not scale that up.
    """
    import numpy as np

    highest = np.nan_to_num(rewards, nan=-np.inf).max(-1)
    lowest = np.nan_to_num(rewards, nan=np.inf).min(-1)
    size = np.abs(np.nan_to_num(rewards)).max(-1)
    return highest - lowest <= 4 * np.spacing(size)


class AdvantageInputs(NamedTuple):
    """Rewards of one rollout, grouped by prompt.

    rewards: float32 [prompts, samples], the weighted sum over functions; NaN: not scored.
    rewards_by_function: float32 [prompts, samples, functions]; NaN: the function does not apply.
    weights: float32 [functions]. lengths: int32 [prompts, samples], completion tokens.
    labels: names the functions, as the metrics do. columns: the dataset's other columns, {name: one value per
        completion}, those of a prompt adjacent.
    rewards64, rewards_by_function64: the same rewards in float64, for differences that float32 rounds off, such as
        those of 100000000 and 100000001; None: not known.
    """

    rewards: jax.Array | np.ndarray
    rewards_by_function: jax.Array | np.ndarray
    weights: jax.Array | np.ndarray
    lengths: jax.Array | np.ndarray
    labels: tuple[str, ...] = ()
    columns: Mapping[str, Sequence[Any]] = {}
    rewards64: np.ndarray | None = None
    rewards_by_function64: np.ndarray | None = None

    @staticmethod
    def all_equal(rewards: np.ndarray) -> np.ndarray:
        """Check whether the rewards of a group are all equal, up to rounding; see `all_equal`."""
        return all_equal(rewards)

    @classmethod
    def of(
        cls,
        rewards_by_function: np.ndarray,
        weights: np.ndarray,
        lengths: np.ndarray,
        *,
        labels: tuple[str, ...] = (),
        columns: Mapping[str, Sequence[Any]] | None = None,
        total: np.ndarray | None = None,
    ) -> AdvantageInputs:
        """Make the inputs from the rewards by function, float64 [prompts, samples, functions].

        total: float64 [prompts, samples], what becomes `rewards`; None: the weighted sum.
        """
        import numpy as np

        total = total_reward(rewards_by_function, weights) if total is None else total
        rewards, each, weights = (x.astype(np.float32) for x in (total, rewards_by_function, weights))
        return cls(rewards, each, weights, lengths, labels, columns or {}, total, rewards_by_function)


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

    def take(self, rows: Sequence[int]) -> RewardInputs:
        """Return the inputs of some completions."""

        def of(values: Sequence[Any]) -> list[Any]:
            return [values[i] for i in rows]

        columns = {name: of(values) for name, values in self.columns.items()}
        places = of(self.places) if self.places else ()
        return RewardInputs(of(self.prompts), of(self.completions), of(self.completion_ids), columns, places)


class PairwiseLoss(Protocol):
    def __call__(self, inputs: PairInputs, /) -> LossOutput: ...


class PolicyLoss(Protocol):
    def __call__(self, inputs: PolicyInputs, /) -> LossOutput: ...


class Advantage(Protocol):
    def __call__(self, inputs: AdvantageInputs, /) -> jax.Array | np.ndarray: ...


class RewardFunction(Protocol):
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
        """Begin an episode with a row of the dataset, and return its first messages, ending with one to reply
        to. seed: equal for the episodes of a group, which must begin alike.
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
REWARD: Kind[RewardFunction] = Kind(
    "reward", ("prompts", "completions", "completion_ids", "log_metric"), by_path=True
)
ENVIRONMENT: Kind[Environment] = Kind("environment", factory=True, by_path=True)
MODEL: Kind[ModelFamily] = Kind("model")
DATASET: Kind[Dataset] = Kind("dataset", factory=True)
LOGGER: Kind[object] = Kind("logger", factory=True)
OPTIMIZER: Kind[OptimizerFactory] = Kind("optimizer", ("learning_rate",))
ACTION: Kind[Any] = Kind("action", ("context", "build"))
"""(context, build) → the `Action` that a field of every trainer's config opens, or None where the build cannot have it;
called once `build` is there, where the field is set. Its name is the field's."""


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


LAYER: Kind[type] = Kind("layer")
"""A decoder's layer: a class that is made with (config, rngs) and called with (x, ctx), see
`rlhf_core.models.layer.Layer`."""


class AttentionPart(NamedTuple):
    """A softmax over some of the keys that a query sees, float32, to be joined with others over the same query.

    mixed: [B, K, R, h], the sum of e^(logit - highest) · value. highest: [B, K, R], the highest logit;
    `rlhf_core.models.MASKED` where no key is seen. total: [B, K, R], the sum of e^(logit - highest).
    """

    mixed: jax.Array
    highest: jax.Array
    total: jax.Array


class AttentionOver(Protocol):
    """Self-attention over rows, with the arguments, shapes and result of `rlhf_core.models.attend`.

    window: int32 scalar, traced where layers differ in it. softcap: a Python number. Layers with sinks also give
    `sinks`, float32 [K, G]; an implementation without this parameter is refused for their models.
    starts: int32 [n], where devices share a row: q then holds n runs of consecutive queries, equally long, of which run
        i begins at the token starts[i]; everything else is of the whole row. An implementation without this parameter
        is refused where the mesh has `context`.
    An implementation raises InputError, while it is traced, for what it cannot compute.
    Optional attribute: `over_cache(q, keys, values, first, end, softcap)`, the attention of one query per row and head
        over the entries first … end - 1 of a cache, int32 scalars, without reading the others: an `AttentionPart`, or
        None for a cache that it does not suit. q: [B, K, R, h], already scaled; keys: [B, K, h, T]; values: [B, K, T,
        h], all on one device. Samplers on accelerators ask the component "pallas" for it.
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
    "attention",
    ("q", "k", "v", "positions", "visible_until", "window", "softcap", "sinks", "starts"),
    constant=True,
)


class ExpertProducts(Protocol):
    """The products of a mixture of experts, each of which has some of the rows, sorted by expert.

    counts: int32 [experts], how many rows each has; their sum may be less than N, and what is computed of the rows
    behind those of the last expert is not read.
    """

    def rows(
        self, x: jax.Array, weights: jax.Array, counts: jax.Array, *, transposed: bool = False
    ) -> jax.Array:
        """Compute x[rows of e] · weights[e] for every expert e: [N, out] in the dtype of `x`, summed in float32.

        x: [N, in]. weights: [experts, in, out], or with `transposed` [experts, out, in], in the dtype of `x`.
        """
        ...

    def gradient(self, x: jax.Array, d_y: jax.Array, counts: jax.Array) -> jax.Array:
        """Compute x[rows of e]ᵀ · d_y[rows of e] for every expert e: float32 [experts, in, out].

        x: [N, in]; d_y: [N, out], in one dtype.
        """
        ...


EXPERTS: Kind[ExpertProducts] = Kind("experts", constant=True)
"""Accelerators take the component "pallas"; without one, XLA computes the products."""

KINDS: tuple[Kind[Any], ...] = (
    ACTION,
    ADVANTAGE,
    ATTENTION,
    DATASET,
    ENVIRONMENT,
    EXPERTS,
    LAYER,
    LOGGER,
    MODEL,
    OPTIMIZER,
    PAIRWISE_LOSS,
    POLICY_LOSS,
    REWARD,
    SAMPLER,
    TRAINER,
)
"""The kinds that core reads; a plugin may declare its own."""
