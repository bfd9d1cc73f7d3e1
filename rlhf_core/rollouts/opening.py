"""How a trainer that samples gets its prompts, its reward functions and its sampler."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

from rlhf_core import data
from rlhf_core.contracts import SAMPLER, SamplerInputs
from rlhf_core.doors import open_records, tell
from rlhf_core.errors import InputError
from rlhf_core.options import Component
from rlhf_core.rollouts.rewards import Reward, WeightedReward, make_rewards
from rlhf_core.text_settings import text_options

if TYPE_CHECKING:
    from rlhf_core.data import Prompts
    from rlhf_core.models import Model
    from rlhf_core.options import TrainerConfig
    from rlhf_core.sampling import SamplingOptions
    from rlhf_core.stage import Stage


@overload
def open_prompts(
    config: TrainerConfig,
    stage: Stage,
    tokenizer: Any,
    field: str,
    *,
    max_prompt_length: int,
    needed: Literal[True] = True,
) -> Prompts: ...
@overload
def open_prompts(
    config: TrainerConfig, stage: Stage, tokenizer: Any, field: str, *, max_prompt_length: int, needed: bool
) -> Prompts | None: ...
def open_prompts(
    config: TrainerConfig,
    stage: Stage,
    tokenizer: Any,
    field: str,
    *,
    max_prompt_length: int,
    needed: bool = True,
) -> Prompts | None:
    """The prompts of `train_data` or `eval_data`, tokenised; None where the field is not given and not needed.

    Raises InputError for rows that are no prompts.
    """
    records = open_records(config, stage, field, needed=needed)
    if records is None:
        return None
    encoded = data.encode_prompts(
        records,
        tokenizer,
        max_prompt_length=max_prompt_length,
        overlong=config.overlong,
        truncation_mode=config.truncation_mode,
        chat_template=text_options(config, stage),
    )
    tell(encoded.report, stage, field)
    return encoded


def require_known(prompts: Prompts, vocab_size: int) -> None:
    """Raise InputError naming the rows with tokens that the model has no embedding for."""
    data.require_vocabulary(prompts.ids, prompts.where, vocab_size)


def open_rewards(
    components: Sequence[WeightedReward], stage: Stage, *, weights: Sequence[float] | None = None
) -> list[Reward]:
    """The reward functions of a config's field `rewards`, and those handed over from Python after them.

    weights: of all of them, in this order, in place of their own. Raises InputError where there is no function, for
    unknown names and options, equal labels, and weights that do not match.
    """
    return make_rewards(
        components, stage.inputs.get("rewards"), weights, stage.registry, f"stage '{stage.name}'"
    )


def open_sampler(
    stage: Stage,
    model: Model,
    prompts: Prompts,
    options: SamplingOptions,
    *,
    num_generations: int,
    prompts_per_call: int,
    sampler: Component | None = None,
) -> Any:
    """A function (parameters, prompts, key) → `rlhf_core.sampling.Rollouts`, see `rlhf_core.sampling.Sampler`.

    sampler: the component that makes it; None: the core's. Raises InputError for a model without a stop token.
    """
    if not model.stop_ids and not options.stop_token_ids:
        raise InputError(
            f"stage '{stage.name}'.model: neither the tokenizer nor generation_config.json names an end-of-sequence "
            "token, so no completion could ever stop; set eos_token in tokenizer_config.json"
        )
    component = Component(name="jax") if sampler is None else sampler
    make = stage.registry.get(SAMPLER, component.name, **component.options)
    return make(
        SamplerInputs(
            definition=model.definition,
            tokenizer=model.tokenizer,
            options=options,
            mesh=stage.devices(),
            stop_ids=model.stop_ids,
            num_generations=num_generations,
            prompts_per_call=prompts_per_call,
            max_prompt_length=int(prompts.ids.lengths.max()),
        )
    )


def warm_up(sampler: Any, model: Model, prompts: Sequence[Any]) -> None:
    """Let the sampler do ahead what prompts of these lengths need once, where it can: compile."""
    if hasattr(sampler, "warm_up"):
        sampler.warm_up(model.params, [len(ids) for ids in prompts])
