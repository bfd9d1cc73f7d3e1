"""The command `rlhf generate`: sample completions of prompts as training would."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_core import plugins as plugin_loading
from rlhf_core.data.report import shorten
from rlhf_core.errors import InputError, NonFiniteError, RunError
from rlhf_core.runtime.files import require_writable
from rlhf_core.runtime.row_output import for_reader, write_rows
from rlhf_core.runtime.terminal import echo

if TYPE_CHECKING:
    from rlhf_core.data import Prompts
    from rlhf_core.tokenizer.encoding import Ints

SEQUENCES_AT_ONCE = 64


def generate(
    model: str,
    file: Path | None,
    prompts: Sequence[str],
    output: Path | None,
    *,
    sampling: Mapping[str, Any],
    max_prompt_length: int | None,
    num_generations: int,
    seed: int,
    chat_template: str | None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    raw: bool = False,
    system: str | None = None,
    base: str | None = None,
    plugins: Sequence[Path] = (),
) -> None:
    """Sample completions of `prompts`, or of the rows of `file`.

    If the model has a chat template, a prompt's text becomes a user message; raw: it is the prompt itself.
    chat_template_kwargs: variables for the template; a row's own are added. system: the system message of conversations
    that do not begin with one. max_prompt_length: tokens that a prompt is cut to, with a warning; None: refuse prompts
    that do not fit in the model's context together with a completion.
    """
    if (file is None) == (not prompts):
        raise InputError(
            "rlhf generate: give either --prompt TEXT (repeatable) or a file with `prompt` or `messages` rows"
        )
    import jax

    from rlhf_core import SamplerInputs, artifacts, data, runtime
    from rlhf_core.data.conversations import require_conversations
    from rlhf_core.data.prompts import as_prompts
    from rlhf_core.data.records import from_memory
    from rlhf_core.models import load_model, local_directory, stored_head
    from rlhf_core.models.model import warn_of_constraints
    from rlhf_core.rollouts.completions import empty_warning
    from rlhf_core.sampling import SHORTEST_BUCKET, Sampler, SamplingOptions, bucket
    from rlhf_core.tokenizer import template_text, with_template_and_stop_ids
    from rlhf_core.tokenizer.encoding import TextOptions, continuations
    from rlhf_core.tokenizer.options import kwargs_problem

    require_writable(output, file)
    runtime.prepare()
    registry = plugin_loading.load(files=plugins).registry
    if file is None:
        records = data.Records([from_memory([{"prompt": text} for text in prompts], "--prompt")])
    else:
        records = data.load(str(file), registry=registry)
    if problem := kwargs_problem(chat_template_kwargs or {}):
        raise InputError(f"--chat_template_kwargs {problem}")
    if stored_head(local_directory(model)) == "score":
        raise InputError(f"{model} is a reward model, which does not generate: use it with rlhf score")
    loaded = load_model(base or model, adapter=base and model, registry=registry)
    if loaded.tokenizer is None:
        raise InputError(
            f"{model}: no tokenizer files; put tokenizer.json and tokenizer_config.json beside config.json"
        )
    loaded = dataclasses.replace(
        loaded, tokenizer=with_template_and_stop_ids(loaded.tokenizer, chat_template, loaded.source)
    )
    chat = file is None and not raw and template_text(loaded.tokenizer) is not None
    messages = [{"prompt": [{"role": "user", "content": text}]} for text in prompts]
    day = artifacts.read_contract(local_directory(model)).get("template_date")
    read = data.Records([from_memory(messages, "--prompt")]) if chat else as_prompts(records)
    if system is not None:
        require_conversations(read.sources, "--system")
    encoded = data.encode_prompts(
        read,
        loaded.tokenizer,
        max_prompt_length=None,
        chat_template=TextOptions(None, chat_template_kwargs or {}, day, system_prompt=system),
    )
    report = encoded.report
    if raw:
        report.untemplated.clear()
    if not report.all_as_given:
        hint = "; give --raw if this is intended" if report.untemplated else ""
        warnings.warn(f"{model}: {report}{hint}", stacklevel=2)
    longest = sampling["max_completion_length"]
    positions = loaded.hf_config.get("max_position_embeddings")
    ids, cut = _fit(encoded, max_prompt_length, longest, positions)
    most = max(map(len, ids))
    warn_of_constraints(loaded.source)
    sampler = Sampler(
        SamplerInputs(
            definition=loaded.definition,
            options=SamplingOptions(**sampling),
            mesh=loaded.mesh,
            stop_ids=loaded.stop_ids,
            num_generations=num_generations,
            prompts_per_call=min(len(encoded), max(1, SEQUENCES_AT_ONCE // num_generations)),
            max_prompt_length=bucket(most, 2 * most + SHORTEST_BUCKET) + 1,  # a program for many lengths
            tokenizer=loaded.tokenizer,
        )
    )
    try:
        rollouts = sampler(loaded.params, ids, jax.random.key(seed))
    except InputError as error:
        raise InputError(*(f"{model}: {problem}" for problem in error.problems)) from None
    except NonFiniteError as error:
        raise RunError(f"{model}: {encoded.where(error.sequence)}: {error}") from None
    completions = [row[:length] for row, length in zip(rollouts.tokens, rollouts.lengths, strict=True)]
    prefixes = [
        prompt if isinstance(text, str) else None
        for prompt, text in zip(ids, encoded.raw, strict=True)
        for _ in range(num_generations)
    ]
    texts = continuations(loaded.tokenizer, prefixes, completions, sampling.get("stop_token_ids", ()))
    whole = [len(ids[i // num_generations]) + len(tokens) for i, tokens in enumerate(completions)]
    if positions and max(whole) > positions:
        warnings.warn(
            f"{model}: {sum(n > positions for n in whole):,} of {len(whole):,} completions, with their prompts up to "
            f"{max(whole):,} tokens, run past the model's context of {positions:,}; give a smaller "
            "--max_completion_length",
            stacklevel=2,
        )
    if warning := empty_warning(texts):
        warnings.warn(f"{model}: {warning}", stacklevel=2)
    rows = [
        {
            **records[int(encoded.rows[i // num_generations])],
            "completion": text,
            "finished": bool(rollouts.finished[i]),
            **({"prompt_tokens_cut": lost} if (lost := cut[i // num_generations]) else {}),
        }
        for i, text in enumerate(texts)
    ]
    if file is None and output is None:
        for row in rows:
            print(for_reader(row["completion"]))
    else:
        write_rows(rows, output)
        if output is not None:
            echo(f"{output}: {len(rows):,} completion{'s'[: len(rows) > 1]}")


def _fit(
    encoded: Prompts, limit: int | None, longest: int, positions: int | None
) -> tuple[list[Ints], list[int]]:
    """Return the prompts' ids, cut to their last `limit` tokens, and how many tokens each lost; warn if any did.

    limit: as `generate`'s max_prompt_length. longest: tokens of a completion. positions: tokens of the model's context,
    all for the prompt if completions alone may be longer. Raises InputError for a prompt that does not fit.
    """
    ids = list(encoded.ids)
    fits = limit or (positions and (positions - longest if positions > longest else positions))
    over = [i for i, prompt in enumerate(ids) if fits and len(prompt) > fits]
    if not over:
        return ids, [0] * len(ids)
    rows = shorten([encoded.where(i) for i in over])
    tokens = f"{rows}: up to {max(len(ids[i]) for i in over):,} tokens"
    if limit is None:
        raise InputError(
            f"{tokens}, and the model's context of {positions:,} leaves {fits:,} for a prompt, with "
            f"--max_completion_length {longest}: shorten the prompt, allow shorter completions, or give "
            "--max_prompt_length, which cuts off a prompt's beginning"
        )
    warnings.warn(f"{tokens}, cut to the last {limit:,}, as --max_prompt_length says", stacklevel=3)
    return [prompt[-limit:] for prompt in ids], [max(len(prompt) - limit, 0) for prompt in ids]
