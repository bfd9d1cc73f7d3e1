"""The prompts and rewards that a GRPO stage names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

from rlhf_core import data
from rlhf_core.doors import open_records, tell
from rlhf_core.trees import Tree
from rlhf_grpo.rewards import Reward, make_rewards

if TYPE_CHECKING:
    from rlhf_core import Stage
    from rlhf_core.data import Prompts
    from rlhf_grpo.config import GRPOConfig


def open_rewards(config: GRPOConfig, stage: Stage) -> list[Reward]:
    """The rewards of the config and those handed over from Python."""
    given = stage.inputs.get("rewards")
    return make_rewards(config.rewards, given, config.reward_weights, stage.registry, f"stage '{stage.name}'")


@overload
def open_prompts(
    config: GRPOConfig, stage: Stage, tokenizer: Any, field: str, *, needed: Literal[True] = True
) -> Prompts: ...
@overload
def open_prompts(
    config: GRPOConfig, stage: Stage, tokenizer: Any, field: str, *, needed: bool
) -> Prompts | None: ...
def open_prompts(
    config: GRPOConfig, stage: Stage, tokenizer: Any, field: str, *, needed: bool = True
) -> Prompts | None:
    """`train_data` or `eval_data`, tokenised; None where it is not given and not needed."""
    records = open_records(config, stage, field, needed=needed)
    if records is None:
        return None
    encoded = data.encode_prompts(
        records,
        tokenizer,
        max_prompt_length=config.max_prompt_length,
        overlong=config.overlong,
        truncation_mode=config.truncation_mode,
        chat_template=config.chat_template,
    )
    tell(encoded.report, stage, field)
    return encoded


def require_known(prompts: Prompts, vocab_size: int) -> None:
    """Raise InputError naming the rows with tokens that the model has no embedding for."""
    data.require_vocabulary([Tree(ids, ()) for ids in prompts.ids], prompts.where, vocab_size)
