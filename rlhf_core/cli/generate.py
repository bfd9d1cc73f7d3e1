"""The command `rlhf generate`: sample completions of prompts as training would."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf_core import plugins as plugin_loading
from rlhf_core.cli.row_output import for_reader, write_rows
from rlhf_core.errors import InputError
from rlhf_core.runtime.files import require_writable
from rlhf_core.runtime.terminal import echo

SEQUENCES_AT_ONCE = 64


def generate(
    model: str,
    file: Path | None,
    prompts: Sequence[str],
    output: Path | None,
    *,
    sampling: Mapping[str, Any],
    max_prompt_length: int,
    num_generations: int,
    seed: int,
    chat_template: str | None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    raw: bool = False,
    plugins: Sequence[Path] = (),
) -> None:
    """Sample completions of `prompts`, or of the rows of `file`.

    If the model has a chat template, a prompt's text becomes a user message; raw: it is the prompt itself.
    chat_template_kwargs: variables for the template; a row's own are added.
    """
    if (file is None) == (not prompts):
        raise InputError(
            "rlhf generate: give either --prompt TEXT (repeatable) or a file with `prompt` or `messages` rows"
        )
    import jax

    from rlhf_core import artifacts, data, runtime
    from rlhf_core.data.prompts import as_prompts
    from rlhf_core.models import load_model, local_directory, stored_head
    from rlhf_core.rollouts.completions import empty_warning
    from rlhf_core.sampling import Sampler, SamplingOptions
    from rlhf_core.tokenizer import template_text, with_template_and_stop_ids
    from rlhf_core.tokenizer.encoding import TextOptions, continuations
    from rlhf_core.tokenizer.text_options import kwargs_problem

    require_writable(output, file)
    runtime.prepare()
    registry = plugin_loading.load(files=plugins).registry
    source = [{"prompt": text} for text in prompts] if file is None else str(file)
    records = data.load(source, registry=registry)
    if problem := kwargs_problem(chat_template_kwargs or {}):
        raise InputError(f"--chat_template_kwargs {problem}")
    if stored_head(local_directory(model)) == "score":
        raise InputError(f"{model} is a reward model, which does not generate: use it with rlhf score")
    loaded = load_model(model, registry=registry)
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
    encoded = data.encode_prompts(
        data.load(messages) if chat else as_prompts(records),
        loaded.tokenizer,
        max_prompt_length=max_prompt_length,
        overlong="truncate",
        chat_template=TextOptions(None, chat_template_kwargs or {}, day),
    )
    if encoded.report.untemplated and not raw:
        warnings.warn(f"{model}: {encoded.report}; give --raw if this is intended", stacklevel=2)
    sampler = Sampler(
        loaded.definition,
        SamplingOptions(**sampling),
        mesh=loaded.mesh,
        stop_ids=loaded.stop_ids,
        num_generations=num_generations,
        prompts_per_call=min(len(encoded), max(1, SEQUENCES_AT_ONCE // num_generations)),
        max_prompt_length=max_prompt_length,
        tokenizer=loaded.tokenizer,
    )
    rollouts = sampler(loaded.params, encoded.ids, jax.random.key(seed))
    completions = [row[:length] for row, length in zip(rollouts.tokens, rollouts.lengths, strict=True)]
    prefixes = [
        ids if isinstance(raw, str) else None
        for ids, raw in zip(encoded.ids, encoded.raw, strict=True)
        for _ in range(num_generations)
    ]
    texts = continuations(loaded.tokenizer, prefixes, completions, sampling.get("stop_token_ids", ()))
    if warning := empty_warning(texts):
        warnings.warn(f"{model}: {warning}", stacklevel=2)
    encoded_rows = [row for i, row in enumerate(records) if records.where(i) in set(encoded.places)]
    rows = [
        {**encoded_rows[i // num_generations], "completion": text, "finished": bool(rollouts.finished[i])}
        for i, text in enumerate(texts)
    ]
    if file is None and output is None:
        for row in rows:
            print(for_reader(row["completion"]))
    else:
        write_rows(rows, output)
        if output is not None:
            echo(f"{output}: {len(rows):,} completion{'s'[: len(rows) > 1]}")
