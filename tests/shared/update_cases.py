"""Combinations of GRPO's options, the data of one update, and the ways in which the trainer may lay it out."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from rlhf_grpo import GRPOConfig
from rlhf_grpo.functional import loss_by_name
from rlhf_grpo.objective import Terms, objective
from rlhf_grpo.train import with_kept

from rlhf_core.packing import Layout, Packed, Tree, empty_batches, pack

N, T = 6, 8
LENGTHS = [8, 3, 5, 1, 7, 6]  # of two completions for each of three prompts
LONGEST = 10  # max_completion_length, not the width of the arrays
LEVELS = ["token", "sequence", "sequence_token"]
OPTIONS: dict[str, list[Any]] = {
    "loss_type": ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "gspo", "gspo_token"],
    "bounds": [
        {"epsilon": 0.2},
        {"epsilon": 0.1, "epsilon_high": 0.3, "sapo_temperature_pos": 0.7, "sapo_temperature_neg": 2.0},
        {"epsilon": 0.2, "epsilon_high": 0.3, "delta": 1.4},
        {"epsilon": 0.1, "epsilon_high": 1.1, "dual_clip": 1.3},
    ],
    "importance_sampling_level": LEVELS,
    "kl": [None, "k1", "k2", "k3"],
    "use_bias_correction_kl": [False, True],
    "top_entropy_quantile": [1.0, 0.45],
    "entropy_coef": [0.0, 0.3],
    "correction": [None, "truncate", "mask"],
    "correction_level": ["token", "sequence", "geometric"],
    "mask": ["lengths", "truncated", "holes"],
    "old": ["given", "own"],
    "num_items": [None, 53.0],
}
NEEDS = {"use_bias_correction_kl": "kl", "correction_level": "correction"}  # acts only where that is not None


def covering(tries: int = 400) -> list[dict[str, Any]]:
    """Combinations in which every two values of any two options meet where both act: greedily, of random ones."""
    names = list(OPTIONS)
    draw = np.random.default_rng(2)

    def pairs(combination: Sequence[int]) -> set[Any]:
        chosen = dict(zip(names, combination, strict=True))
        acting = [(name, value) for name, value in chosen.items() if chosen.get(NEEDS.get(name), 1)]
        return set(itertools.combinations(acting, 2))

    sizes = [len(values) for values in OPTIONS.values()]
    left = {
        ((a, i), (b, j))
        for a, b in itertools.combinations(names, 2)
        for i in range(len(OPTIONS[a]))
        for j in range(len(OPTIONS[b]))
        if NEEDS.get(b) != a or i
    }
    found = []
    while left:
        candidates = draw.integers(0, sizes, (tries, len(names))).tolist()
        best = max(candidates, key=lambda c: len(pairs(c) & left))
        left -= pairs(best)
        found.append({name: OPTIONS[name][i] for name, i in zip(names, best, strict=True)})
    return found


def masks(kind: str, draw: np.random.Generator) -> np.ndarray:
    """What is trained on: all, all but two whole completions, or all but one and single tokens of the others."""
    lengths, rows = np.arange(T) < np.array(LENGTHS)[:, None], np.arange(N)[:, None]
    holes = draw.random((N, T)) < 0.3
    return {
        "lengths": lengths,
        "truncated": lengths & (rows % 4 != 1),
        "holes": lengths & ~holes & (rows != 2),
    }[kind]


class Case:
    """One of `covering`'s combinations, as `policy_loss` and the trainer take it, and data to compute it on.

    data: arrays [N, T] by the names of `update_reference`, float32 numbers in float64. tokens: int32 [N, T], of the
    completions; prompts: one for every two of them.
    """

    def __init__(
        self,
        combination: dict[str, Any],
        *,
        logps: np.ndarray,
        entropies: np.ndarray,
        tokens: np.ndarray,
        prompts: Sequence[np.ndarray],
    ) -> None:
        chosen = dict(combination)
        kind, self.own = chosen.pop("mask"), chosen.pop("old") == "own"
        mode, level = chosen.pop("correction"), chosen.pop("correction_level")
        low, high = (0.9, 1.1) if level == "geometric" else (0.6, 1.7)  # a mean of differences is near 0
        self.correction = mode and {"level": level, "mode": mode, "min": low, "max": high}
        self.options = {
            "epsilon": 0.2,
            **chosen.pop("bounds"),
            "beta": 0.0 if chosen["kl"] is None else 0.2,
            "max_completion_length": LONGEST,
            **{name: value for name, value in chosen.items() if value is not None},
        }
        self.tokens, self.prompts = tokens, prompts
        draw = np.random.default_rng(5)
        data = {
            "logps": logps,
            "entropies": entropies,
            **{name: logps + draw.normal(0, 0.4, (N, T)) for name in ("old", "ref", "sampling")},
            "advantages": draw.normal(size=(N, 1)),
            "mask": masks(kind, draw),
        }
        self.data = {name: x.astype(np.float32).astype(np.float64) for name, x in data.items()}
        if self.own:
            self.data["old"] = self.data["logps"]

    @property
    def loss(self) -> Any:
        own = {name.removeprefix("sapo_"): value for name, value in self.options.items()}
        own.setdefault("epsilon_high", own["epsilon"])
        return loss_by_name(own.pop("loss_type"), **own)

    def objective(self, model: Any) -> Any:
        """The trainer's."""
        options = self.options
        terms = Terms(
            options["loss_type"],
            beta=options["beta"],
            kl=options.get("kl", "k3"),
            bias_correction=options["use_bias_correction_kl"],
            entropy_coef=options["entropy_coef"],
            max_completion_length=LONGEST,
        )
        correction = GRPOConfig(sampler_correction=self.correction).sampler_correction
        return partial(objective, model, self.loss, terms, temperature=1.0, correction=correction)

    def trees(self, *, shared: bool) -> list[Tree]:
        """A prompt and its two completions, or every completion with its own copy of the prompt."""

        def cut(x: np.ndarray, members: Sequence[int], kind: Any = np.float32) -> tuple[np.ndarray, ...]:
            return tuple(x[i, : LENGTHS[i]].astype(kind) for i in members)

        values = {
            "sampling_logps": "sampling",
            "old_logps": "old",
            "ref_logps": "ref",
            "entropies": "entropies",
        }
        by_token = np.broadcast_to(self.data["advantages"], (N, T))
        if self.own:
            del values["old_logps"]
        return [
            Tree(
                prefix=self.prompts[members[0] // 2],
                branches=cut(self.tokens, members, np.int32),
                weights=cut(self.data["mask"], members),
                token_values={
                    "advantages": cut(by_token, members),
                    **{name: cut(self.data[x], members) for name, x in values.items()},
                },
            )
            for members in ([(0, 1), (2, 3), (4, 5)] if shared else [(i,) for i in range(N)])
        ]

    def laid_out(
        self, layout: Layout, *, shared: bool = True, reverse: bool = False, spare: bool = False
    ) -> Any:
        """The update's micro-batches, as the trainer's feed makes them; `spare`: one without a sequence as well."""
        each = self.trees(shared=shared)
        names = tuple(each[0].token_values)
        batches = pack(each[::-1] if reverse else each, layout, token_names=names)
        batches += empty_batches(layout, token_names=names) if spare else []
        if (share := self.options["top_entropy_quantile"]) < 1:
            batches = with_kept(batches, share)
        else:
            for batch in batches:
                del batch.token_values["entropies"]
        return batches


def looked_up(model: Any, params: Any, batch: Packed, **_: Any) -> Any:
    """In the place of `trained_logps`: a token's log-probability and entropy are at its number in the arrays."""
    import jax.numpy as jnp

    tokens = np.take_along_axis(batch.rows.tokens, np.maximum(batch.trained, 0), axis=1)
    used = batch.trained >= 0
    at = np.where(used, tokens, 0)
    return tuple(jnp.where(used, params[name].reshape(-1)[at], 0.0) for name in ("logps", "entropies"))
