"""What a stage will sample, as it says of itself before it begins."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_core import data
from rlhf_core.config import Component
from rlhf_core.contracts import SAMPLER
from rlhf_core.data.examples import Examples
from rlhf_core.data.prompts import AnyPrompts, EpisodeRows, PromptStream, UntokenizedPrompts
from rlhf_core.errors import counted
from rlhf_core.mesh import rows_per_device
from rlhf_core.rollouts.journal import most_bytes
from rlhf_core.rollouts.sampling_plan import most_bytes as most_value_bytes
from rlhf_core.rollouts.sampling_plan import plan as plan_test
from rlhf_core.runtime.machine import format_bytes
from rlhf_core.sampling.placement import cache_bytes, most_slots, shares_prompts
from rlhf_core.training.memory import scoring_bytes
from rlhf_core.training.rows import Description

if TYPE_CHECKING:
    import jax

    from rlhf_core.models import Definition, Model
    from rlhf_core.rollouts.collector import RolloutOptions
    from rlhf_core.training import Context, OnShapes


@dataclass(frozen=True)
class PlannedRollouts:
    """Rollouts that are trained on: `describe` counts prompts, completions, updates and tokens; `held` their memory.

    routes: of the experts of a completion's token, where they are kept. later: what the environment, the rewards and
    the sampler say of themselves.
    """

    options: RolloutOptions
    prompts: AnyPrompts | UntokenizedPrompts
    routes: jax.ShapeDtypeStruct | None = None

    def describe(self, context: OnShapes, models: Sequence[Model]) -> Description:
        config, options = context.config, self.options
        rounds, group, length = options.max_rounds, options.num_generations, self._length
        per_rollout, serves = options.prompts_per_rollout, options.updates_per_rollout
        count, longest = self._count, self._longest
        rollouts = data.count_updates(count, per_rollout, config.num_train_epochs, None)
        total = rollouts * serves if config.max_training_steps is None else config.max_training_steps
        sampled = -(-total // serves) * per_rollout * group
        journal = most_bytes(
            rollouts=-(-total // serves),
            completions=sampled,
            tokens=sampled * length + sampled // group * longest,
        )
        journal += sampled * length * self._route_bytes
        # What dynamic sampling drops is kept for the sampling test.
        journal *= rounds if options.test is not None else 1
        rollout = f"a rollout is {counted(per_rollout, 'prompts')} × {counted(group, 'completions')}"
        rollout += f" = {per_rollout * group:,}"
        if rounds > 1:
            rollout += f", drawn up to {rounds} times (dynamic_sampling)"
        updates = f"{counted(total, 'updates')} of {counted(config.total_batch_size, 'completions')}; "
        updates += f"{counted(serves, 'updates')} per rollout; "
        updates += (
            f"{sampled // group / count:.2f} epochs" if count else "the length of the data is not known"
        )
        if rounds > 1 and config.max_training_steps is None:
            updates = f"at most {updates}"
        tokens = f"{counted(sampled, 'completions')}, at most {sampled * length:,} sampled tokens"
        if options.environment is not None:
            tokens += ", the environment's included"
        kept = f"the journal takes at most {format_bytes(journal)}, and what the prompts' columns take"
        if options.journal == "until_checkpoint":
            kept += ", less with checkpoints"
        lines = [self._report, *self._columns, rollout, updates, tokens, kept]
        if options.test is not None:
            values = most_value_bytes(rollouts=-(-total // serves), tokens=sampled * length)
            draws = getattr(sampler_maker(context, options), "draws", 0)
            tested = plan_test(options.test, options.sampling, ahead=options.ahead, draws=draws)
            lines.append(f"{tested}; values/ takes at most {format_bytes(values)}")
        else:
            lines.append("sampling test: none: this trainer does not read its completions for one")
        if options.ahead:
            lines.append(
                f"rollouts are sampled {options.ahead} ahead: a policy {options.ahead * serves} to "
                f"{(options.ahead + 1) * serves - 1} updates old writes what is trained on"
            )
        row = longest + group * length
        per_update = config.total_batch_size // group * row
        return Description(lines, total, per_update, row, later=self._episodes)

    @property
    def can_be_tried(self) -> bool:
        """Whether rows are known, which rewards are tried with: not of a stream that has no tokenizer yet."""
        return not isinstance(self.prompts, UntokenizedPrompts) or self.prompts.records is not None

    @property
    def _route_bytes(self) -> int:
        return 0 if self.routes is None else math.prod(self.routes.shape) * self.routes.dtype.itemsize

    @property
    def _length(self) -> int:
        """The most tokens of a completion, or of an episode."""
        length, environment = self.options.sampling.max_completion_length, self.options.environment
        return length if environment is None else environment.length(length)

    @property
    def _count(self) -> int:
        """The prompts; 0: not known."""
        return 0 if isinstance(self.prompts, PromptStream) else len(self.prompts)

    @property
    def _longest(self) -> int:
        """The tokens of the longest prompt, as far as they are known before an episode begins."""
        if self.options.environment is not None or isinstance(self.prompts, UntokenizedPrompts | EpisodeRows):
            return self.options.max_prompt_length
        return max(map(len, self.prompts.ids))

    @property
    def _columns(self) -> list[str]:
        """Which columns of encoded prompts are read."""
        prompts = self.prompts.sample if isinstance(self.prompts, PromptStream) else self.prompts
        if not isinstance(prompts, Examples):
            return []
        of = " of the first rows" if isinstance(self.prompts, PromptStream) else ""
        return [f"columns{of}: {prompts.report.columns}"]

    @property
    def _report(self) -> str:
        prompts, environment = self.prompts, self.options.environment
        if environment is not None:
            rows = f"{len(prompts):,} rows" if isinstance(prompts, EpisodeRows) else "a stream of rows"
            return (
                f"{rows}, which begin episodes of '{Path(environment.name).name}' with prompts of at most "
                f"{self.options.max_prompt_length:,} tokens"
            )
        if not isinstance(prompts, UntokenizedPrompts):
            return str(prompts.report)
        if prompts.records is None:
            return "a stream of prompts"
        return f"{counted(len(prompts), 'prompts')} before length limits"

    @property
    def _episodes(self) -> list[str]:
        environment, turn = self.options.environment, self.options.sampling.max_completion_length
        if environment is None:
            return []
        return [
            f"an episode has at most {environment.max_turns} turns of {turn:,} tokens, and "
            f"{environment.length(turn):,} tokens with the environment's"
        ]

    def held(self, context: OnShapes, definition: Definition, parameters: int) -> Mapping[str, int]:
        planned = context.planned is not None
        # A planned mesh is counted per device; its reward models are shared by all.
        models = {} if planned else {"reward models": _reward_models(context, parameters)}
        if getattr(sampler_maker(context, self.options), "outside", False):
            return models
        group, length, longest = self.options.num_generations, self._length, self._longest
        prompts = rows_per_device(context.mesh, self.options.prompts_per_rollout)
        slots = min(prompts * group, most_slots(None))
        whole = shares_prompts(definition) and slots == prompts * group
        own = length if whole else longest + length
        held = {
            "rollout cache": cache_bytes(definition, slots, own) + cache_bytes(definition, prompts, longest)
        }
        if self._route_bytes:
            held["routes"] = slots * length * self._route_bytes
        # Decoding joins projections, so that each token reads the weights in fewer pieces.
        return held if planned else {**held, "sampler": parameters, **models}


def sampler_maker(context: Context, options: RolloutOptions) -> Any:
    """Return what makes the sampler that the options name."""
    component = Component(name="jax") if options.sampler is None else options.sampler
    return context.registry.get(SAMPLER, component.name, **component.options)


def _reward_models(context: Context, policy: int) -> int:
    """Sum the bytes of the models that rewards read; one that does not exist yet counts as the policy."""
    rewards: Any = getattr(context.config, "rewards", ())
    models = [reward.options.get("model") for reward in rewards if "url" not in reward.options]
    sizes = [
        scoring_bytes(model, context.tokenizer, context.registry)
        for model in models
        if isinstance(model, str)
    ]
    return sum(policy if size is None else size for size in sizes)
