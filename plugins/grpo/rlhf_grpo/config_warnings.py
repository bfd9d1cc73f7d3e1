"""Warnings, before the run, of settings that have no effect or do silent harm."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from rlhf_grpo.losses import CISPO, SAPO, Clipped

if TYPE_CHECKING:
    from rlhf_core import PolicyLoss
    from rlhf_grpo.config import GRPOConfig

WEIGHTED = ("group", "rloo", "reinforce_pp", "normalize_then_sum")
"""Advantages that ignore a function of weight 0; others may read it all the same."""

RATIO_OPTIONS = ("epsilon", "epsilon_high", "delta", "dual_clip", "temperature_pos", "temperature_neg")
"""Options of policy losses that have no effect where every ratio is 1, except for the cap of `cispo`."""


def grpo_warnings(config: GRPOConfig, loss: PolicyLoss, *, updates: int) -> list[str]:
    """Return one line per setting, beginning with its dotted path. updates: of the whole run."""
    # What the options of other packages' losses do is not known.
    level = loss.importance_sampling_level if isinstance(loss, Clipped | CISPO | SAPO) else None
    return [
        *(_clipping(config, level) if level else ()),
        *(_loss(config.loss.name, config.loss.options, level) if level else ()),
        *_reference(config, updates),
        *_sampling(config),
        *_epochs(config),
        *_rewards(config),
        *_printing(config),
    ]


def _printing(config: GRPOConfig) -> Iterator[str]:
    default = type(config).model_fields["num_completions_to_print"].default
    if config.num_completions_to_print != default and not config.log_completions:
        yield "num_completions_to_print: has no effect without log_completions = true"


def _clipping(config: GRPOConfig, level: str) -> Iterator[str]:
    options = config.loss.options
    if level == "sequence" and config.top_entropy_quantile < 1:
        yield (
            f"top_entropy_quantile={config.top_entropy_quantile:g}: with one ratio per sequence, every token of a "
            "sequence is trained if one of them is chosen; use 'gspo_token' or a loss with ratios per token"
        )
    if config.updates_per_rollout > 1:
        return
    inert = [] if config.loss.name == "cispo" else [name for name in RATIO_OPTIONS if name in options]
    same_for_all = config.top_entropy_quantile == 1 and not config.use_bias_correction_kl
    asked = options.get("importance_sampling_level", "token")
    if asked != "token" and same_for_all and config.advantage.name in WEIGHTED:
        inert.append("importance_sampling_level")
    if inert:
        yield (
            f"loss.{', loss.'.join(inert)}: has no effect: with one update per rollout the ratio is always 1; raise "
            "num_iterations or steps_per_generation, or leave it out"
        )


def _loss(name: str, options: Mapping[str, Any], level: str) -> Iterator[str]:
    epsilon = float(options.get("epsilon", 0.2))
    high = options.get("epsilon_high", 0.2)
    high = epsilon if high is None else float(high)
    delta, dual = options.get("delta"), options.get("dual_clip")
    if name == "cispo" and high < 1:
        yield (
            f"loss.epsilon_high={high:g}: for cispo it is the cap of the weight itself, so every gradient, on-policy "
            f"ones too, is multiplied by {high:g}; 5 is usual"
        )
    if (
        "epsilon" in options
        and "epsilon_high" not in options
        and epsilon != 0.2
        and name not in ("cispo", "sapo")
    ):
        yield (
            f"loss.epsilon={epsilon:g} without epsilon_high: ratios are clipped at {1 - epsilon:g} and 1.2; give both"
        )
    if delta is not None and float(delta) <= 1 + high:
        yield (
            f"loss.delta={float(delta):g}: not above 1 + epsilon_high = {1 + high:g}: it bounds ratios that the clip "
            "leaves alone, and makes the loss of rewarded tokens flat before it is clipped"
        )
    if dual is not None and float(dual) <= 1:
        yield f"loss.dual_clip={float(dual):g}: must be above 1: it cuts off every token with a negative advantage"
    if level != "token" and name not in ("cispo", "sapo") and min(epsilon, high) >= 0.05:
        yield (
            f"loss.epsilon={epsilon:g}: a ratio of whole sequences is a geometric mean and hardly leaves 1, so "
            "this clip has practically no effect; the GSPO paper uses 3e-4 and 4e-4"
        )


def _reference(config: GRPOConfig, updates: int) -> Iterator[str]:
    kl = config.kl
    if config.sync_ref_model and not kl.beta:
        yield "sync_ref_model: has no effect: kl.beta is 0, so there is no reference"
    elif config.sync_ref_model and config.ref_model_sync_steps > updates:
        yield (
            f"ref_model_sync_steps={config.ref_model_sync_steps}: has no effect: the run has {updates} updates"
        )
    if config.use_bias_correction_kl and not (kl.beta and kl.place == "loss"):
        yield "use_bias_correction_kl: has no effect: there is no KL term in the loss"
    if not kl.beta:
        return
    if kl.place == "reward":
        name, options = config.advantage.name, config.advantage.options
        if name == "normalize_then_sum":
            yield (
                "kl.place='reward': has no effect: advantage 'normalize_then_sum' reads the rewards of each function, "
                "and the KL is taken from their sum; use place = 'loss'"
            )
        if name == "group" and options.get("scale", "group") == "group":
            yield (
                "kl.place='reward': completions of a group with equal rewards then differ by KL alone, which "
                "normalization scales up like any other difference; use scale_rewards = 'none' or 'batch', or "
                "dynamic_sampling"
            )
    elif kl.name == "k1" and not config.use_bias_correction_kl:
        yield (
            "kl.name='k1' in the loss: its gradient is zero on average and pulls nowhere; use k2, or "
            "use_bias_correction_kl, or place = 'reward'"
        )


def _epochs(config: GRPOConfig) -> Iterator[str]:
    if config.dynamic_sampling and config.max_training_steps is None and config.scheduler != "constant":
        yield (
            f"scheduler='{config.scheduler}' with dynamic_sampling: extra rounds use up prompts, so the run "
            "may end before the learning rate has reached its final value; give max_training_steps"
        )


def _sampling(config: GRPOConfig) -> Iterator[str]:
    options = config.sampling
    filters = [
        f"{name}={value:g}"
        for name, value, off in (
            ("top_p", options.top_p, 1.0),
            ("top_k", options.top_k, None),
            ("min_p", options.min_p, None),
            ("repetition_penalty", options.repetition_penalty, 1.0),
        )
        if value is not None and value != off
    ]
    if filters and config.sampler_correction is not None:
        yield (
            f"sampling.{', '.join(filters)} with sampler_correction: completions come from a filtered distribution, "
            "the ratio is between unfiltered ones, so it does not correct for the filter"
        )
    elif filters:
        yield (
            f"sampling.{', '.join(filters)}: completions come from a filtered distribution, their log-probabilities "
            "and the gradient from the unfiltered one"
        )
    weights = config.reward_weights or [reward.weight for reward in config.rewards]
    for reward, weight in zip(config.rewards, weights, strict=False):
        if weight == 0 and config.advantage.name in WEIGHTED:
            yield f"rewards '{reward.label or reward.name}': weight is 0: logged only, no effect on training"


def _rewards(config: GRPOConfig) -> Iterator[str]:
    length = config.sampling.max_completion_length
    for reward in config.rewards:
        limit = reward.options.get("max_length")
        cache = reward.options.get("cache", 0)
        if reward.name == "soft_overlong" and isinstance(limit, int) and limit - cache >= length:
            yield (
                f"rewards 'soft_overlong': has no effect: it begins above {limit - cache} tokens, and "
                f"sampling.max_completion_length is {length}"
            )
