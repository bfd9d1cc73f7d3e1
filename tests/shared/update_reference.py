"""The loss of one GRPO update in float64 NumPy, from the definitions: every policy loss, and all that is around it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

Array = np.ndarray


def difference(logps: Array, data: Mapping[str, Array], level: str) -> Array:
    """The logarithm of the importance ratio, [..., N, T] or [..., N, 1]; `data` is what a stop-gradient sees."""
    old, mask = data["old"], data["mask"]
    length = np.maximum(mask.sum(-1, keepdims=True), 1)
    if level == "token":
        return logps - old
    if level == "sequence":
        return ((logps - old) * mask).sum(-1, keepdims=True) / length
    return ((data["logps"] - old) * mask).sum(-1, keepdims=True) / length + logps - data["logps"]


def level_of(options: Mapping[str, Any]) -> str:
    own = {"gspo": "sequence", "gspo_token": "sequence_token"}
    level = options.get("importance_sampling_level", "token")
    return own.get(options["loss_type"], level) if level == "token" else level


def bounds(options: Mapping[str, Any]) -> tuple[float, float]:
    epsilon = options.get("epsilon", 0.2)
    return epsilon, epsilon if options.get("epsilon_high") is None else options["epsilon_high"]


def policy_term(logps: Array, data: Mapping[str, Array], options: Mapping[str, Any]) -> Array:
    """The loss a token before masks, weights and KL, [..., N, T] or [..., N, 1]."""
    level, a = level_of(options), data["advantages"]
    r = np.exp(difference(logps, data, level))
    epsilon, high = bounds(options)
    if options["loss_type"] == "cispo":
        return -np.minimum(np.exp(difference(data["logps"], data, level)), high) * a * logps
    if options["loss_type"] == "sapo":
        positive, negative = (options.get(f"sapo_temperature_{s}", d) for s, d in (("pos", 1), ("neg", 1.05)))
        t = np.where(a > 0, positive, negative)
        return -4 / (1 + np.exp(-t * (r - 1))) / t * a
    capped = np.minimum(r, options.get("delta") or np.inf)
    value = -np.minimum(capped * a, np.clip(r, 1 - epsilon, 1 + high) * a)
    if (bound := options.get("dual_clip")) is not None:
        value = np.where(a < 0, np.minimum(value, -bound * a), value)
    return value


def kl_term(logps: Array, data: Mapping[str, Array], name: str) -> Array:
    d = data["ref"] - logps
    return {"k1": -d, "k2": d * d / 2, "k3": np.exp(d) - d - 1}[name]


def metrics(data: Mapping[str, Array], options: Mapping[str, Any]) -> dict[str, float]:
    """Means over the tokens of entropy, KL and what the bounds cut, after delta."""
    there, a = data["mask"] > 0, data["advantages"]
    out = {
        "entropy": data["entropies"][there].mean(),
        "kl": kl_term(data["logps"], data, options.get("kl", "k3"))[there].mean(),
    }
    if options["loss_type"] == "sapo":
        return out
    r = np.exp(difference(data["logps"], data, level_of(options)))
    epsilon, high = bounds(options)
    if options["loss_type"] == "cispo":
        low, up = np.zeros_like(there), (r > high) & (a > 0)
    else:
        r = np.minimum(r, options.get("delta") or np.inf)
        low, up = (r < 1 - epsilon) & (a < 0), (r > 1 + high) & (a > 0)
    low, up = (np.broadcast_to(x, there.shape)[there].mean() for x in (low, up))
    return {
        **out,
        "clip_ratio/low_mean": low,
        "clip_ratio/high_mean": up,
        "clip_ratio/region_mean": low + up,
    }


def sampler_weight(data: Mapping[str, Array], *, level: str, mode: str, min: float, max: float) -> Array:
    """The ratio of trainer to sampler of a token, or of its sequence: of the sum or of the mean ("geometric")."""
    ratio = (data["old"] - data["sampling"]) * data["mask"]
    if level != "token":
        ratio = ratio.sum(-1, keepdims=True)
    if level == "geometric":
        ratio = ratio / np.maximum(data["mask"].sum(-1, keepdims=True), 1)
    ratio = np.exp(ratio)
    if mode == "truncate":
        return np.clip(ratio, min, max)
    return np.where((ratio >= min) & (ratio <= max), ratio, 0.0)


def sampler_metrics(data: Mapping[str, Array], correction: Any = None) -> dict[str, float]:
    """How far sampler and trainer differ over the tokens, and the ratios of a correction."""
    there = data["mask"] > 0
    difference = np.abs(data["old"] - data["sampling"])[there]
    out = {
        "sampling/logp_difference_max": difference.max(),
        "sampling/logp_difference_mean": difference.mean(),
    }
    if correction is None:
        return out
    ratio = np.broadcast_to(sampler_weight(data, **correction), there.shape)[there]
    return {
        **out,
        "sampling/importance_ratio_mean": ratio.mean(),
        "sampling/importance_ratio_min": ratio.min(),
        "sampling/importance_ratio_max": ratio.max(),
    }


def update_loss(
    logps: Array,
    entropies: Array,
    data: Mapping[str, Array],
    options: Mapping[str, Any],
    correction: Any = None,
) -> Array:
    """The loss, [...], of logps and entropies [..., N, T], at which only they may differ from those in `data`.

    data: logps, entropies, old, ref, sampling, mask [N, T], advantages [N, 1] or [N, T]; what has no gradient is
    computed from these. options: those of `policy_loss`. correction: the fields of SamplerCorrection, or None.
    """
    mask = data["mask"]
    kept = mask
    if (share := options.get("top_entropy_quantile", 1.0)) < 1:
        threshold = np.quantile(data["entropies"][mask > 0], 1 - share)
        kept = mask * (data["entropies"] >= threshold)
    value = policy_term(logps, data, options) * kept
    if correction is not None:
        value = value * sampler_weight(data, **correction)
    if beta := options.get("beta", 0.0):
        kl = kl_term(logps, data, options.get("kl", "k3"))
        if options.get("use_bias_correction_kl"):
            kl = kl * np.exp(difference(logps, data, level_of(options)))
        value = value + beta * kl
    value = value * mask
    if options["loss_type"] in ("grpo", "gspo", "gspo_token", "sapo"):
        loss = (value.sum(-1) / np.maximum(mask.sum(-1), 1)).mean(-1)
    elif options["loss_type"] == "dr_grpo":
        loss = value.sum((-2, -1)) / (len(mask) * options["max_completion_length"])
    else:
        loss = value.sum((-2, -1)) / (options.get("num_items") or max(mask.sum(), 1))
    entropy = (entropies * kept).sum((-2, -1)) / max(kept.sum(), 1)
    return loss - options.get("entropy_coef", 0.0) * entropy


def gradients(
    data: Mapping[str, Array], options: Mapping[str, Any], correction: Any = None, h: float = 1e-5
) -> tuple[Array, Array]:
    """Of the loss with respect to logps and entropies, [N, T] each, by central differences of every element."""
    shape = data["mask"].shape
    steps = h * np.eye(data["mask"].size).reshape(-1, *shape)
    out = []
    for by_logps in (True, False):
        up, down = (
            update_loss(
                data["logps"] + sign * steps * by_logps,
                data["entropies"] + sign * steps * (not by_logps),
                data,
                options,
                correction,
            )
            for sign in (1, -1)
        )
        out.append(((up - down) / (2 * h)).reshape(shape))
    return out[0], out[1]
