"""Samplers that lie, for authors of samplers: what a run and `rlhf audit` must find.

    registry.add(SAMPLER, "mine", lying_sampler("greedy"))

Each wraps our own sampler and says what an honest engine would, but for the one lie in its name.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from rlhf_core import Rollouts, SamplerInputs
from rlhf_core.sampling import make_sampler

Draw = Callable[[Any, Sequence[np.ndarray], Any, Any], Rollouts]

OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "colder": {"temperature": 0.7},
    "top_k": {"top_k": 5},
}
"""Lies about how tokens are drawn: the options that are used instead of those that were asked for."""
LATE = {"one_late": 1, "two_late": 2}
"""Lies about the policy: how many versions it is behind."""
LIES = (
    *OPTIONS,
    *LATE,
    "other_prompt",
    "one_fewer",
    "one_more",
    "two_digits",
    "sent_twice",
    "encoded_again",
)
"""The names of all lies."""


def lying_sampler(
    lie: str, maker: Callable[[SamplerInputs], Any] = make_sampler
) -> Callable[[SamplerInputs], Any]:
    """Return what makes a sampler with one lie.

    lie: a name of LIES. maker: of the honest sampler that is wrapped. Raises ValueError for another name.

    greedy, colder, top_k: tokens are the likeliest, drawn at temperature 0.7, or among the five likeliest.
    one_late, two_late: the policy is that of one or two calls before.
    other_prompt: completions are those of the next prompt. one_fewer, one_more: one is missing, or there twice.
    two_digits: log-probabilities are rounded. sent_twice: the second completion of each prompt is its first.
    encoded_again: ids are those of the decoded text.
    """
    if lie not in LIES:
        raise ValueError(f"no lie is called {lie!r}: {', '.join(LIES)}")

    def make(inputs: SamplerInputs) -> Any:
        changes = OPTIONS.get(lie, {})
        draw: Draw = maker(replace(inputs, options=inputs.options.replace(**changes)))
        if lie in LATE:
            return _late(draw, LATE[lie])
        if lie == "other_prompt":
            return lambda params, prompts, key, ids=None: draw(params, [*prompts[1:], prompts[0]], key, ids)
        change = _CHANGES.get(lie)
        if change is None:
            return draw
        return lambda params, prompts, key, ids=None: change(draw(params, prompts, key, ids), inputs)

    return make


def _late(draw: Draw, calls: int) -> Draw:
    """Sample with the policy of some calls before, or of the first one."""
    held: deque[Any] = deque(maxlen=calls + 1)

    def sample(params: Any, prompts: Sequence[np.ndarray], key: Any, ids: Any = None) -> Rollouts:
        # The trainer's next update overwrites the arrays.
        held.append(jax.tree.map(lambda x: x.copy(), params))
        return draw(held[0], prompts, key, ids)

    return sample


def _chosen(samples: Rollouts, rows: Sequence[int]) -> Rollouts:
    """Return these completions, in this order."""
    return Rollouts(*(np.asarray(values)[np.asarray(rows, int)] for values in samples))


def _one_fewer(samples: Rollouts, inputs: SamplerInputs) -> Rollouts:
    return _chosen(samples, range(len(samples.lengths) - 1))


def _one_more(samples: Rollouts, inputs: SamplerInputs) -> Rollouts:
    return _chosen(samples, [*range(len(samples.lengths)), 0])


def _two_digits(samples: Rollouts, inputs: SamplerInputs) -> Rollouts:
    return samples._replace(logps=np.round(samples.logps, 2))


def _sent_twice(samples: Rollouts, inputs: SamplerInputs) -> Rollouts:
    group = inputs.num_generations
    return _chosen(samples, [row - 1 if row % group == 1 else row for row in range(len(samples.lengths))])


def _encoded_again(samples: Rollouts, inputs: SamplerInputs) -> Rollouts:
    """Decode every completion that has ended and encode it again; one that would be too long is left as it is."""
    tokenizer: Any = inputs.tokenizer
    tokens, logps = samples.tokens.copy(), samples.logps.copy()
    lengths = np.array(samples.lengths)
    for row, length in enumerate(lengths.tolist()):
        ids = tokens[row, :length].tolist()
        text = tokenizer.decode(ids[:-1], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        again = [*tokenizer.encode(text, add_special_tokens=False), ids[-1]]
        if not samples.finished[row] or len(again) > tokens.shape[1]:
            continue
        tokens[row] = 0
        tokens[row, : len(again)] = again
        # An id more has the log-probability of the last one.
        logps[row, length : len(again)] = logps[row, length - 1]
        logps[row, len(again) :] = 0
        lengths[row] = len(again)
    return samples._replace(
        tokens=tokens, lengths=lengths, logps=logps, mask=np.arange(tokens.shape[1]) < lengths[:, None]
    )


_CHANGES: Mapping[str, Callable[[Rollouts, SamplerInputs], Rollouts]] = {
    "one_fewer": _one_fewer,
    "one_more": _one_more,
    "two_digits": _two_digits,
    "sent_twice": _sent_twice,
    "encoded_again": _encoded_again,
}
"""Lies about what was drawn."""
