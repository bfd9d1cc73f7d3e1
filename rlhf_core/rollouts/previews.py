"""The action that a stage opens where its field `previews` is set: prompts, completed at every few updates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rlhf_core import data
from rlhf_core.errors import InputError
from rlhf_core.fit import PREVIEWS
from rlhf_core.fit.actions import Action
from rlhf_core.models import Model
from rlhf_core.rollouts.collector import RolloutCollector, RolloutOptions
from rlhf_core.rollouts.fixed_prompts import FixedPrompts
from rlhf_core.rollouts.open_collector import open_sampler
from rlhf_core.sampling import SamplingOptions
from rlhf_core.sampling.placement import cache_bytes
from rlhf_core.training.memory import device_bytes, sampling_memory
from rlhf_core.training.starting_model import error_context, require_stop_token

if TYPE_CHECKING:
    from rlhf_core.config.trainer import PreviewOptions
    from rlhf_core.data import Examples
    from rlhf_core.fit import Build
    from rlhf_core.training.context import Context


def open_previews(context: Context, build: Build) -> Action | None:
    """Open the prompts of `previews` with a separate sampler; None where no language model is trained.

    Raises InputError for data without prompts, and for a model without a stop token.
    """
    options = context.config.previews
    assert options is not None
    policy, model = _policy_of(build)
    if model is None:
        return None
    given: dict[str, Any] = {
        "max_completion_length": options.max_new_tokens,
        "temperature": options.temperature,
        "top_p": options.top_p,
        "top_k": options.top_k,
        **options.sampling,
    }
    with error_context(context.stage, "previews.sampling"):
        sampling = SamplingOptions(**given)
    require_stop_token(model.stop_ids, sampling, context.name)
    with error_context(context.stage, "previews"):
        prompts = _open_prompts(options, context)
        data.require_vocabulary(prompts.ids, prompts.where, model.definition.vocab_size)
    longest = int(prompts.sizes.max())
    count = len(prompts)
    group = options.num_return
    how = RolloutOptions(longest, group, sampling, count, policy=policy)

    def make() -> Any:
        return open_sampler(context, model, prompts, how, count, sampling_memory(context, model, [], []))

    function = context.compute(make)
    collector = RolloutCollector(
        context.stage, prompts, model.tokenizer, function, [], how, absent=model.definition.absent
    )
    fixed = FixedPrompts(
        collector,
        count,
        count,
        model.as_stored,
        name="preview",
        seed=options.seed,
        prints=options.print,
        logs=options.log,
    )
    context.ahead(fixed.warm_up, model)
    cache = cache_bytes(model.definition, count * group, longest + sampling.max_completion_length)
    return fixed.previews(every=options.every, name=PREVIEWS, bytes=cache + device_bytes(model.params))


def _policy_of(build: Build) -> tuple[str | None, Model | None]:
    """Find the language model that is trained, and its name where the state holds several models."""
    if isinstance(build.models, Model):
        return None, build.models if build.models.definition.head == "lm" else None
    for name in build.trains or build.models:
        if build.models[name].definition.head == "lm":
            return name, build.models[name]
    return None, None


def _open_prompts(options: PreviewOptions, context: Context) -> Examples:
    """Encode the given prompts, then those of the data. A text among conversations is a user's message."""
    prompts: list[Any] = list(options.prompts)
    if options.from_data or (options.from_data is None and not prompts):
        prompts += _prompts_of_data(options, context)
    if not prompts:
        raise InputError("there is nothing to complete: no prompts are given, and from_data is false")
    if any(not isinstance(prompt, str) for prompt in prompts):
        prompts = [[{"role": "user", "content": x}] if isinstance(x, str) else list(x) for x in prompts]
    rows = data.load([{"prompt": prompt} for prompt in prompts])
    return data.encode_prompts(
        rows, context.tokenizer, max_prompt_length=None, chat_template=context.text_options()
    )


def _prompts_of_data(options: PreviewOptions, context: Context) -> list[Any]:
    """Find the prompts of evenly spread rows: of `eval_data`, or without it of `train_data`."""
    config, inputs = context.config, context.stage.inputs
    held_out = config.eval_data is not None or inputs.get("eval_dataset") is not None
    held_out = held_out and config.max_evaluation_steps != 0
    field = context.eval_fields[0] if held_out else "train_data"
    records = context.records(field, first=options.count)
    assert records is not None
    chosen = np.linspace(0, len(records) - 1, min(options.count, len(records))).astype(int).tolist()
    prompts = [prompt_of(records[i], options.prompt_column) for i in chosen]
    found = [prompt for prompt in prompts if prompt]
    if not found:
        raise InputError(
            f"the rows of {records.name} have no prompt (columns: {', '.join(records.columns)}); give "
            "previews.prompts, or the column of their prompts as previews.prompt_column"
        )
    return found


def prompt_of(row: Mapping[str, Any], column: str = "prompt") -> str | Sequence[Any] | None:
    """Find the prompt of a row of any trainer's data; None for a text that is trained on whole.

    A column of prompts, a conversation without its last replies, or what two replies begin with: whole messages, or of
    texts whole words.
    """
    if row.get(column):
        prompt: str | Sequence[Any] = row[column]
        return prompt
    messages = row.get("messages")
    if messages:
        return data.without_last_replies(messages)
    chosen, rejected = row.get("chosen"), row.get("rejected")
    if isinstance(chosen, str) and isinstance(rejected, str):
        length = next((i for i, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b), 0)
        return chosen[: chosen[:length].rfind(" ") + 1].rstrip() or None
    if isinstance(chosen, list) and isinstance(rejected, list):
        shared_turns = [a for a, b in zip(chosen, rejected, strict=False) if a == b]
        return data.without_last_replies(shared_turns) or None
    return None
