"""The options of a GRPO stage."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from rlhf_core import (
    ADVANTAGE,
    ENVIRONMENT,
    POLICY_LOSS,
    REWARD,
    Component,
    Options,
    RolloutConfig,
)
from rlhf_core.rollouts import EnvironmentOptions, SamplingTestOptions, WeightedReward
from rlhf_core.sampling import SamplingOptions


class KL(Options):
    """The penalty for leaving the reference policy. With d = ref − policy log-probability of a sampled token:
    k1 is −d, k2 is d²/2, k3 is exp(d) − d − 1 (Schulman 2020).
    """

    name: Literal["k1", "k2", "k3"] = Field(default="k3", description="the estimator")
    beta: float = Field(default=0.04, ge=0, description="its weight; 0: no reference is kept")
    place: Literal["loss", "reward"] = Field(
        default="loss", description="added to the loss, or subtracted from the rewards"
    )


class DynamicSampling(Options):
    """Replace groups whose rewards are all equal by groups of further prompts (Yu et al. 2025)."""

    max_rounds: int = Field(
        default=3,
        ge=2,
        description="most sampling rounds per rollout; groups with equal rewards then fill the rest",
    )


class Limits(RolloutConfig.SamplingLimits):
    """Bounds on logged metrics; beyond them the run stops with its state saved and a diagnosis."""

    kl: float | None = Field(
        default=None, gt=0, description="upper bound on the KL between policy and reference, nats per token"
    )
    entropy: float | None = Field(
        default=None, gt=0, description="lower bound on the mean entropy, nats per token"
    )


class SamplerCorrection(Options):
    """Importance sampling between the distribution that drew the completions and the trainer's.

    The ratio is exp(trainer − sampler log-probability) of a token, its product over a sequence's tokens, or the
    geometric mean of these. `truncate` clips it to [min, max]; `mask` leaves out what lies outside; `off` corrects
    nothing. It multiplies the policy loss, not the KL term.
    """

    level: Literal["token", "sequence", "geometric"] = Field(default="sequence", description="of the ratio")
    mode: Literal["truncate", "mask", "off"] = Field(
        default="mask", description="what happens outside the bounds"
    )
    max: float = Field(default=3.0, ge=1, description="upper bound of the ratio")
    min: float = Field(default=0.0, ge=0, le=1, description="lower bound of the ratio")


class EvaluationOptions(Options):
    """How completions of the prompts of `eval_data` are sampled and judged."""

    num_generations: int = Field(default=1, ge=1, description="completions per prompt")
    sampling: SamplingOptions | None = Field(
        default=None, description="options that are not set are as in training"
    )
    pass_threshold: float | None = Field(
        default=None,
        description="reward at which a completion passes, for pass@k; none: pass@k is not reported",
    )


class GRPOConfig(RolloutConfig):
    """Group relative policy optimization (Shao et al. 2024) and its descendants, by the name of the loss."""

    ALIASES: ClassVar[Mapping[str, Any]] = {
        "loss_type": "loss.name",
        "epsilon": ("loss.epsilon", 0.2),
        "epsilon_high": ("loss.epsilon_high", 0.2),
        "delta": ("loss.delta", None),
        "importance_sampling_level": ("loss.importance_sampling_level", "token"),
        "dual_clip": ("loss.dual_clip", None),
        "sapo_temperature_pos": ("loss.temperature_pos", 1.0),
        "sapo_temperature_neg": ("loss.temperature_neg", 1.05),
        "scale_rewards": ("advantage.scale", "group"),
        "beta": "kl.beta",
        "temperature": "sampling.temperature",
        "top_p": "sampling.top_p",
        "top_k": "sampling.top_k",
        "min_p": "sampling.min_p",
        "repetition_penalty": "sampling.repetition_penalty",
        "max_completion_length": "sampling.max_completion_length",
        "tools": "environment.tools",
    }
    UNUSED_FIELDS: ClassVar[Mapping[str, str]] = {
        "max_sequence_length": "max_prompt_length limits prompts, max_completion_length completions",
        "prompt_repeated": "completions are sampled, and follow their prompts",
    }

    LEARNING_FIELDS: ClassVar = ("kl", *RolloutConfig.LEARNING_FIELDS)

    learning_rate: float = Field(default=1e-6, gt=0, description="at its peak")
    num_train_epochs: int = Field(
        default=1, ge=1, description="passes over the prompts, those that dynamic_sampling draws included"
    )
    num_generations: int = Field(default=8, ge=2, description="completions per prompt (a group)")
    rewards: list[Annotated[WeightedReward, REWARD]] = Field(
        default=[], description="reward functions by name, `module:function` or `file.py:function`"
    )
    reward_weights: list[float] | None = Field(
        default=None,
        description="one weight per entry of `rewards`; none: each one's own `weight`, 1 by default. The environment's "
        "is `environment.weight`",
    )
    environment: Annotated[EnvironmentOptions, ENVIRONMENT] | None = Field(
        default=None,
        description="environment of multi-turn episodes; its reward comes before `rewards`; none: completions "
        "of one turn",
    )
    advantage: Annotated[Component, ADVANTAGE] = Field(
        default=Component(name="group"), description="how rewards become advantages"
    )
    loss: Annotated[Component, POLICY_LOSS] = Field(
        default=Component(name="dapo"), description="the policy loss and its options"
    )
    kl: KL = Field(default=KL(), description="the KL penalty against the reference policy")
    use_bias_correction_kl: bool = Field(
        default=False,
        description="multiply the KL term by the importance ratio, so that its gradient is unbiased",
    )
    top_entropy_quantile: float = Field(
        default=1.0, gt=0, le=1, description="share of the tokens, by entropy, that the policy loss trains on"
    )
    entropy_coef: float = Field(
        default=0.0, description="weight of the mean entropy, subtracted from the loss"
    )
    num_iterations: int = Field(default=1, ge=1, description="times each completion is trained on")
    steps_per_generation: int = Field(default=1, ge=1, description="updates per pass over a rollout")
    dynamic_sampling: DynamicSampling | None = Field(
        default=None, description="replace groups whose rewards are all equal; none: keep them"
    )
    sampler_correction: SamplerCorrection | None = Field(
        default=None,
        description="importance correction for a sampler that differs from the policy; none: no correction, and with "
        'rollouts_ahead { level = "token", mode = "truncate", max = 2.0 }',
    )
    replay_routes: bool = Field(
        default=False,
        description="of a model with experts: send the tokens of completions to the experts that the sampler sent them "
        "to, with the gates of the trained router (Ma et al. 2025), in updates and for old log-probabilities; prompts "
        "and the reference are routed by their own routers. Not with an environment",
    )
    evaluation: EvaluationOptions = Field(default=EvaluationOptions(), description="how eval_data is used")
    num_preview_samples: int = Field(
        default=8,
        ge=0,
        description="prompts of eval_data, else of train_data, whose completions before the first update, at every "
        "evaluation and after the last are written to samples/, with every reward; 0: none",
    )
    log_completions: bool = Field(
        default=False,
        description="print num_completions_to_print completions of every logged rollout in the terminal, with rewards",
    )
    num_completions_to_print: int = Field(
        default=4, ge=1, description="completions that log_completions prints, evenly spread over the rollout"
    )
    limits: Limits = Field(default=Limits(), description="bounds at which a collapsing run stops")
    mask_truncated_completions: bool = Field(
        default=False, description="do not train on completions that were cut off at the length limit"
    )
    sync_ref_model: bool = Field(
        default=False, description="move the reference towards the policy every ref_model_sync_steps updates"
    )
    ref_model_mixup_alpha: float = Field(
        default=0.9, ge=0, le=1, description="share of the policy in the new reference"
    )
    ref_model_sync_steps: int = Field(default=64, ge=1, description="updates between moves of the reference")

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, given: Any) -> Any:
        """Fill in `evaluation.sampling`: options that it does not set are those of training."""
        evaluation = given.get("evaluation")
        sampling = given.get("sampling", {})
        sampling = sampling.to_dict() if isinstance(sampling, Options) else sampling
        own = evaluation.get("sampling") if isinstance(evaluation, Mapping) else None
        if isinstance(own, Mapping) and isinstance(sampling, Mapping):
            return {**given, "evaluation": {**evaluation, "sampling": {**sampling, **own}}}
        return given

    @model_validator(mode="after")
    def _fits(self) -> GRPOConfig:
        if self.total_batch_size % self.num_generations:
            raise ValueError(
                f"total_batch_size={self.total_batch_size} (completions of an update) is not a multiple of "
                f"num_generations={self.num_generations}: a group would be split"
            )
        turn = self.sampling.max_completion_length
        if self.environment is not None and self.environment.length(turn) < turn:
            raise ValueError(
                f"environment.max_tokens={self.environment.max_tokens} (tokens of an episode) is less than "
                f"sampling.max_completion_length={turn}, those of a single turn"
            )
        if self.sampling.temperature == 0:
            raise ValueError(
                "sampling.temperature=0 gives identical completions, so a group has nothing to compare; "
                "use a temperature above 0"
            )
        if self.sync_ref_model and self.lora is not None:
            raise ValueError(
                "sync_ref_model=true mixes full weights, which does not work with lora; remove one of them"
            )
        if self.evaluation.num_generations > 1 and self.evaluation_sampling.temperature == 0:
            raise ValueError(
                f"evaluation.sampling.temperature=0 gives {self.evaluation.num_generations} identical "
                "completions; use a temperature above 0, or evaluation.num_generations=1"
            )
        return self

    @property
    def correction(self) -> SamplerCorrection | None:
        """The importance correction that the objective applies."""
        given = self.sampler_correction
        if given is None and self.rollouts_ahead:
            return SamplerCorrection(level="token", mode="truncate", max=2.0)
        return None if given is None or given.mode == "off" else given

    @property
    def evaluation_sampling(self) -> SamplingOptions:
        return self.sampling if self.evaluation.sampling is None else self.evaluation.sampling

    @property
    def keeps_reference(self) -> bool:
        """Whether the policy is compared with the model it started from: for the penalty, or to watch the distance."""
        return self.kl.beta > 0 or self.limits.kl is not None

    @property
    def sampling_test(self) -> SamplingTestOptions:
        """How the sampler is tested: by the training pass, where it reads all tokens as the sampler did."""
        tolerance = self.limits.surprisal_gap
        dropped = "the groups that dynamic_sampling drops" if self.dynamic_sampling is not None else ""
        if self.updates_per_rollout > 1:
            return SamplingTestOptions(tolerance, "rollout", dropped)
        if self.lora is not None and self.lora.dropout:
            return SamplingTestOptions(
                tolerance, "rollout", "every token, since lora.dropout acts in training"
            )
        cut = (
            "completions that mask_truncated_completions leaves out"
            if self.mask_truncated_completions
            else ""
        )
        failed = "the tokens of failed episodes" if self.environment is not None else ""
        also = [each for each in (cut, failed, dropped) if each]
        return SamplingTestOptions(tolerance, "update", " and ".join(also))

    @property
    def prompts_per_rollout(self) -> int:
        return self.total_batch_size * self.steps_per_generation // self.num_generations

    @property
    def updates_per_rollout(self) -> int:
        return self.steps_per_generation * self.num_iterations


def watch(limits: Limits, metrics: Mapping[str, float]) -> str | None:
    """Return why the metrics of a step pass a limit; None: they do not."""
    kl, entropy = metrics.get("kl"), metrics.get("entropy")
    shown = ", ".join(
        f"{name} {metrics[name]:.4g}"
        for name in ("reward", "reward_std", "kl", "entropy", "completions/mean_length")
        if name in metrics
    )
    if limits.kl is not None and kl is not None and kl > limits.kl:
        return (
            f"the policy has drifted too far from its reference: kl {kl:.4g} nats per token is above "
            f"limits.kl={limits.kl:g} "
            f"({shown}). It may be exploiting the reward: read the newest completions. Raise kl.beta, lower "
            "learning_rate, or train for fewer updates"
        )
    if limits.entropy is not None and entropy is not None and entropy < limits.entropy:
        return (
            f"the policy has collapsed: entropy {entropy:.4g} nats per token is below "
            f"limits.entropy={limits.entropy:g} ({shown}). Its completions are nearly all the same, so groups "
            "have little left to compare. Raise loss.epsilon_high, entropy_coef or kl.beta, or lower learning_rate"
        )
    return None
