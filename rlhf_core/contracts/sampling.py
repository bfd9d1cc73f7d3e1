"""What a sampler is made from, is called with, and returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self

if TYPE_CHECKING:
    from pathlib import Path

    import jax
    import numpy as np
    from jax.sharding import Mesh

    from rlhf_core.models import Definition
    from rlhf_core.sampling import SamplingOptions


@dataclass(frozen=True)
class SamplerInputs:
    """Arguments of the function that makes a sampler, equal on every process.

    definition: the model without its parameters. mesh: the devices that hold the parameters.
    options: a sampler honours all of them, or raises an InputError that names the field.
    stop_ids: tokens that end a completion, besides `options.stop_token_ids`. num_generations: completions per prompt.
    prompts_per_call: the usual number of prompts in a call, which may have any. max_prompt_length: in tokens.
    tokenizer: only its tokens may be sampled; `definition.absent` lists the other ids of the vocabulary, which have
        probability 0 in the log-probabilities, too. None: any id may be.
    memory: bytes per device that sampling may use, weights in a layout of its own included; None: unknown.
    conversation_length: in tokens, of the longest conversation without its prompt; None: there are no conversations,
        and `converse` is not called.
    model: the policy as it was opened, which a sampler elsewhere saves with other parameters. directory: the stage's,
        for what a sampler writes.
    routes: whether `Rollouts.routes` are wanted; a sampler that does not have them leaves them out.
    draws: whether `draws` of a sampler that publishes policies are asked for.
    """

    definition: Definition
    options: SamplingOptions
    mesh: Mesh
    stop_ids: Sequence[int]
    prompts_per_call: int
    max_prompt_length: int
    num_generations: int = 1
    tokenizer: Any | None = None
    memory: int | None = None
    conversation_length: int | None = None
    routes: bool = False
    model: Any | None = None
    directory: Path | None = None
    draws: bool = False

    @property
    def policy(self) -> Definition:
        """The definition, from which only the tokenizer's tokens are sampled."""
        if self.tokenizer is None or self.definition.absent:
            return self.definition
        return self.definition.as_policy(self.tokenizer)


class _Rollouts(NamedTuple):
    tokens: np.ndarray
    lengths: np.ndarray
    logps: np.ndarray
    finished: np.ndarray
    mask: np.ndarray
    version: np.ndarray
    routes: np.ndarray
    engine: np.ndarray


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
    routes: int8 or int16 [N, C, layers, k]: the experts that each token was sent to when it was read, in every layer
        with experts; -1 where it was not read, as a completion's last token. Default: [N, C, 0, 0], not known.
    engine: int16 [N]: which of several engines wrote the completion, in the order of `sampler.urls`; default: 0.
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
        routes: np.ndarray | None = None,
        engine: np.ndarray | None = None,
    ) -> Self:
        import numpy as np

        if mask is None:
            mask = np.arange(tokens.shape[-1]) < np.asarray(lengths)[..., None]
        if version is None:
            version = np.zeros(np.shape(lengths), np.int32)
        if routes is None:
            routes = np.zeros((*tokens.shape, 0, 0), np.int8)
        if engine is None:
            engine = np.zeros(np.shape(lengths), np.int16)
        return super().__new__(cls, tokens, lengths, logps, finished, mask, version, routes, engine)


class Weights:
    """The weights that some turns are sampled with, in the sampler's layout; `value` may be replaced between steps.

    number: unlike that of any others.
    """

    def __init__(self, value: Any) -> None:
        self.value, self.number = value, next(_NUMBERS)


_NUMBERS = count()


class TurnSettings(NamedTuple):
    """How one turn is sampled, where turns that are sampled together differ.

    key: uint32 [words], the turn's own key; its t-th token is sampled with fold_in(key, t). temperature, top_p, top_k,
        min_p: as in `SamplingOptions`. stop_ids: the tokens that end the turn, at most `turns.STOP_IDS`; nothing else
        but its limit does. alternatives: whether the likeliest tokens are reported with every token. reads_context:
        whether the world is told the log-probabilities of the context's own tokens, before the turn's first.
    """

    weights: Weights
    key: np.ndarray
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    stop_ids: tuple[int, ...] = ()
    alternatives: bool = False
    reads_context: bool = False


class Beginning(NamedTuple):
    """A conversation of one turn that an `OpenWorld` begins.

    conversation: a number that no other has that is not over. tokens: int32 [n], its context. limit: the most tokens of
        the turn. group: hashable; conversations of a group have equal contexts and weights, and begin alike.
    """

    conversation: int
    tokens: np.ndarray
    limit: int
    settings: TurnSettings
    group: Any = None


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
    """The other side of the conversations of one call of `converse`; the same calls on every process, in step.

    An attribute `quick` says whether it answers immediately, so that a conversation need not make room for
    others while it waits; default: False.

    A world whose conversations each have settings is an `OpenWorld`.
    """

    def submit(self, conversation: int, tokens: np.ndarray, logps: np.ndarray, finished: bool) -> None:
        """Take a turn of the policy: int32 and float32 [n], as in `Rollouts`, and whether it ended by itself."""
        ...

    def replies(self, *, wait: bool) -> Sequence[Continuation]:
        """Return what has arrived since the last call, each once. wait: for at least one, if any is outstanding."""
        ...


class OpenWorld(World, Protocol):
    """A world that begins conversations at any time, by `Beginning` among its replies, and ends them at any time, by a
    `Continuation` without tokens.

    steps: the most tokens of each turn that are sampled before it is asked again.
    """

    steps: int

    def sampled(self, conversation: int, tokens: np.ndarray, logps: np.ndarray, likeliest: Any) -> None:
        """Take the next tokens of a turn, as they are sampled: int32 and float32 [n].

        likeliest: ids int32 and log-probabilities float32 [n, alternatives] of the likeliest tokens, best first; only
        meaningful where the turn's settings ask for them.
        """
        ...

    def read(
        self,
        conversation: int,
        logps: np.ndarray,
        ranks: np.ndarray,
        likeliest: tuple[np.ndarray, np.ndarray],
    ) -> None:
        """Take what the policy thinks of the next tokens of a context, the first of which is its second token.

        logps: float32 [n], nats, at temperature 1. ranks: int32 [n], 1 for the likeliest token. likeliest: as for
        `sampled`.
        """
        ...

    def failed(self, conversation: int) -> None:
        """Take note that a conversation is over, because a distribution of a next token was not finite."""
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
    A sampler on other devices may have `publish(params, version)`, which the trainer calls when it may sample with a
    policy: what it returns is then passed as `params`, perhaps from several threads, while the trainer learns. It also
    has `published(version)`, the same for a version that was published before the run was stopped, and
    `retire(before)`, called when no rollout needs versions below `before` any more. It may have `receipt(policy)`,
    metrics of how it was proven that the policy is held, and `verdict(version, difference)`, called after each rollout
    that the policy that sampled it was trained on, where no rollouts are sampled ahead: difference is the mean absolute
    difference of its log-probabilities from the trainer's, nats, and a text that is returned ends the run. One with
    several engines has `engines`, their number, and says in `Rollouts.engine` which wrote a completion. Where
    `SamplerInputs.draws` asks for it, `draws(policy)` returns what every engine that has written with a policy drew
    before, once for each policy, float32 [tokens, 4]: the engine, the token's log-probability, and entropy and variance
    of the distribution that the trainer says it is drawn from, as `Moments` has them.
    Another, `converse(params, prompts, key, ids, world)`, samples the turns of conversations with a `World`, of which
    prompts has one entry per conversation: conversations wait for their world, not for each other. Without it, all
    conversations take each turn together, in a call whose prompts are all that was said.
    """

    def __call__(
        self, params: Any, prompts: Sequence[np.ndarray], key: jax.Array, ids: np.ndarray | None = None
    ) -> Rollouts: ...


class SamplerMaker(Protocol):
    """Make a sampler.

    One whose sampler is on other devices has `outside = True`, may say with `draws` how many tokens each engine draws
    for its sampler's `draws` of a policy, and may have `check(model, options, longest)`, which `rlhf check` calls with
    the stage's `RolloutOptions` and the tokens of its longest prompt with a completion: it returns a `Forecast`, or
    raises InputError for what is wrong.
    """

    def __call__(self, inputs: SamplerInputs, /) -> SamplerFunction: ...
