"""The command `rlhf generate`: completions of prompts, sampled as training would.

What it needs is imported when it runs: `rlhf --help` imports this module.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlhf_core.errors import InputError, NonFiniteError, RunError, counted, warn
from rlhf_core.runtime.flags import Base, Plugins, Quantize, takes

if TYPE_CHECKING:
    from rlhf_core.data import Examples, Records
    from rlhf_core.models import Model
    from rlhf_core.plugins.registry import Registry
    from rlhf_core.sampling import Sampler
    from rlhf_core.tokenizer.encoding import Ints

SEQUENCES_AT_ONCE = 64
THOUGHTS = ("thinking", "reasoning_content")
"""Fields of a message, and columns of its row, for a thought in a channel of its own (gpt-oss, Gemma 4)."""


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise typer.BadParameter(f"{text!r} is not a JSON object, such as '{{\"enable_thinking\": false}}'")
    return value


@dataclass(frozen=True)
class Generation:
    """The arguments and flags of `rlhf generate`."""

    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A language model: artifact, directory, hub name or URL.")
    ]
    file: Annotated[
        str | None, typer.Argument(metavar="INPUT.jsonl", help="Rows with `prompt` or `messages`.")
    ] = None
    prompt: Annotated[list[str] | None, typer.Option("--prompt", metavar="TEXT", help="Repeatable.")] = None
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="OUT.jsonl", help="Default: standard output.")
    ] = None
    max_completion_length: Annotated[int, typer.Option("--max_completion_length", min=1, help="Tokens.")] = (
        256
    )
    max_prompt_length: Annotated[
        int | None,
        typer.Option(
            "--max_prompt_length",
            min=1,
            help="Tokens that a prompt is cut to, with a warning; default: longer than the model's context is "
            "refused.",
        ),
    ] = None
    temperature: Annotated[
        float, typer.Option("--temperature", min=0.0, help="0: always the most likely token.")
    ] = 1.0
    top_p: Annotated[float, typer.Option("--top_p", min=0.0, max=1.0)] = 1.0
    top_k: Annotated[int | None, typer.Option("--top_k", min=1)] = None
    min_p: Annotated[float | None, typer.Option("--min_p", min=0.0, max=1.0)] = None
    repetition_penalty: Annotated[
        float, typer.Option("--repetition_penalty", help="Above 1: makes repeated tokens less likely.")
    ] = 1.0
    stop_strings: Annotated[
        list[str] | None, typer.Option("--stop_strings", metavar="TEXT", help="End a completion; repeatable.")
    ] = None
    stop_token_ids: Annotated[
        list[int] | None,
        typer.Option("--stop_token_ids", min=0, help="In addition to the model's own; repeatable."),
    ] = None
    num_generations: Annotated[
        int, typer.Option("--num_generations", min=1, help="Completions per prompt.")
    ] = 1
    seed: Annotated[int, typer.Option("--seed", min=0, max=2**32 - 1)] = 0
    chat_template: Annotated[
        str | None, typer.Option("--chat_template", help='"plain" or a file; default: the tokenizer\'s.')
    ] = None
    chat_template_kwargs: Annotated[
        dict | None,  # type: ignore[type-arg]  # typer takes no parameters of it
        typer.Option(
            "--chat_template_kwargs",
            metavar="JSON",
            parser=_json_object,
            help="Variables for the chat template.",
        ),
    ] = None
    system: Annotated[
        str | None,
        typer.Option("--system", metavar="TEXT", help="System message for prompts that have none."),
    ] = None
    raw: Annotated[
        bool, typer.Option("--raw", help="Prompts are texts to continue, without the chat template.")
    ] = False
    base: Base = None
    quantize: Quantize = None
    plugin: Plugins = None


app = typer.Typer(add_completion=False, rich_markup_mode=None)
UNDERSCORES = {"token_normalize_func": lambda name: name.replace("-", "_")}
"""Flags are fields of configurations: --max-completion-length is --max_completion_length, too."""


@app.command(context_settings=UNDERSCORES)
@takes(Generation)
def generate(given: Generation) -> None:
    """Sample completions of prompts. Plain text for --prompt, rows with `completion` for a file or with -o."""
    if (given.file is None) == (not given.prompt):
        raise InputError(
            "rlhf generate: give either --prompt TEXT (repeatable) or a file with `prompt` or `messages` rows"
        )
    from rlhf_core import plugins, runtime
    from rlhf_core.plugins.urls import is_url
    from rlhf_core.runtime.files import require_writable, write_atomic
    from rlhf_core.runtime.terminal import echo, for_reader, row_text

    require_writable(given.output, None if given.file is None else Path(given.file))
    runtime.prepare()
    registry = plugins.load(files=given.plugin or ()).registry
    records = _records(given, registry)
    if is_url(given.model):
        from rlhf_remote.models import complete

        rows = complete(given, records)
    else:
        rows = _complete(given, records, registry)
    if given.output is not None:
        write_atomic(given.output, "".join(map(row_text, rows)))
        echo(f"{given.output}: {counted(len(rows), 'completions')}")
        return
    for row in rows:
        print(for_reader(row["completion"] if given.file is None else row_text(row).rstrip("\n")))


def _complete(given: Generation, records: Records, registry: Registry) -> list[dict[str, Any]]:
    """Sample completions of the prompts: their rows with `completion` and `finished`."""
    import jax

    from rlhf_core.rollouts.rollout_warnings import empty_warning

    model = _open(given, registry)
    encoded = _encode(given, records, model)
    positions = model.max_positions
    group = given.num_generations
    ids, cut = _fit(encoded, given.max_prompt_length, given.max_completion_length, positions)
    sampler = _sampler(given, model, len(ids), max(map(len, ids)))
    try:
        rollouts = sampler(model.params, ids, jax.random.key(given.seed))
    except InputError as error:
        raise InputError(*(f"{given.model}: {problem}" for problem in error.problems)) from None
    except NonFiniteError as error:
        raise RunError(f"{given.model}: {encoded.where(error.sequence)}: {error}") from None
    completions = [row[:length] for row, length in zip(rollouts.tokens, rollouts.lengths, strict=True)]
    prefixes: list[Any] = []
    for prompt, text in zip(ids, encoded.raw, strict=True):
        prefixes += [prompt if isinstance(text, str) else None] * group
    said = _messages(model.tokenizer, prefixes, completions, given.stop_token_ids or ())
    whole = [len(ids[i // group]) + len(tokens) for i, tokens in enumerate(completions)]
    if positions and max(whole) > positions:
        past = sum(length > positions for length in whole)
        warn(
            f"{given.model}: {past:,} of {len(whole):,} completions, with their prompts "
            f"up to {max(whole):,} tokens, run past the model's context of {positions:,}; give a smaller "
            "--max_completion_length"
        )
    warning = empty_warning([each["content"] for each in said])
    if warning:
        warn(f"{given.model}: {warning}")
    rows = []
    for i, message in enumerate(said):
        number = i // group
        row = {**records[int(encoded.rows[number])], "completion": message["content"]}
        for name in THOUGHTS:
            if name in message:
                row[name] = message[name]
        row["finished"] = bool(rollouts.finished[i])
        if cut[number]:
            row["prompt_tokens_cut"] = cut[number]
        rows.append(row)
    return rows


def _messages(
    tokenizer: Any, prefixes: Sequence[Any], completions: Sequence[Any], stop_ids: Sequence[int]
) -> list[dict[str, Any]]:
    """Return completions as messages, with thoughts and calls apart in those of conversations.

    prefixes: the ids of the texts that they continue, None for conversations.
    """
    from rlhf_core.environments import CallParser, ConversationEncoder
    from rlhf_core.tokenizer.encoding import continuations

    texts = continuations(tokenizer, prefixes, completions, stop_ids)
    parser = CallParser(ConversationEncoder(tokenizer, stop_ids=stop_ids))
    return [
        {"content": text} if prefix is not None else parser.message(tokens)
        for text, prefix, tokens in zip(texts, prefixes, completions, strict=True)
    ]


def _records(given: Generation, registry: Registry) -> Records:
    """Open the prompts."""
    from rlhf_core import data
    from rlhf_core.data.records import from_memory
    from rlhf_core.tokenizer.options import kwargs_problem

    problem = kwargs_problem(given.chat_template_kwargs or {})
    if problem:
        raise InputError(f"--chat_template_kwargs {problem}")
    if given.file is None:
        return data.Records([from_memory([{"prompt": text} for text in given.prompt or ()], "--prompt")])
    return data.load(given.file, registry=registry)


def _open(given: Generation, registry: Registry) -> Model:
    """Open the model, whose tokenizer gets the chat template."""
    from rlhf_core.models import load_model, local_directory, stored_head
    from rlhf_core.tokenizer import with_template_and_stop_ids

    if stored_head(local_directory(given.model)) == "score":
        raise InputError(f"{given.model} is a reward model, which does not generate: use it with rlhf score")
    model = load_model(
        given.base or given.model,
        adapter=given.base and given.model,
        registry=registry,
        quantized=given.quantize,
    )
    if model.tokenizer is None:
        raise InputError(
            f"{given.model}: no tokenizer files; add tokenizer.json and tokenizer_config.json next to config.json"
        )
    tokenizer = with_template_and_stop_ids(model.tokenizer, given.chat_template, model.source)
    return dataclasses.replace(model, tokenizer=tokenizer)


def _encode(given: Generation, records: Records, model: Model) -> Examples:
    """Encode the prompts; texts of --prompt are a user's messages if the model has a chat template."""
    from rlhf_core import artifacts, data
    from rlhf_core.data.columns import require_conversations
    from rlhf_core.data.prompts import as_prompts
    from rlhf_core.data.records import from_memory
    from rlhf_core.models import local_directory
    from rlhf_core.tokenizer import template_text
    from rlhf_core.tokenizer.encoding import TextOptions

    read = as_prompts(records)
    if given.file is None and not given.raw and template_text(model.tokenizer) is not None:
        messages = [{"prompt": [{"role": "user", "content": text}]} for text in given.prompt or ()]
        read = data.Records([from_memory(messages, "--prompt")])
    if given.system is not None:
        require_conversations(read.tables, "--system")
    day = artifacts.read_contract(local_directory(given.model)).get("template_date")
    options = TextOptions(None, given.chat_template_kwargs or {}, day, system_prompt=given.system)
    encoded = data.encode_prompts(read, model.tokenizer, max_prompt_length=None, chat_template=options)
    report = encoded.report
    if given.raw:
        report.untemplated.clear()
    if not report.all_as_given:
        hint = "; give --raw if this is intended" if report.untemplated else ""
        warn(f"{given.model}: {report}{hint}")
    return encoded


def _sampler(given: Generation, model: Model, prompts: int, longest: int) -> Sampler:
    """Make a sampler for so many prompts, of so many tokens at most."""
    from rlhf_core import SamplerInputs
    from rlhf_core.sampling import SHORTEST_BUCKET, Sampler, SamplingOptions, bucket

    options = SamplingOptions(
        max_completion_length=given.max_completion_length,
        temperature=given.temperature,
        top_p=given.top_p,
        top_k=given.top_k,
        min_p=given.min_p,
        repetition_penalty=given.repetition_penalty,
        stop_strings=tuple(given.stop_strings or ()),
        stop_token_ids=tuple(given.stop_token_ids or ()),
    )
    return Sampler(
        SamplerInputs(
            definition=model.definition,
            options=options,
            mesh=model.mesh,
            stop_ids=model.stop_ids,
            num_generations=given.num_generations,
            prompts_per_call=min(prompts, max(1, SEQUENCES_AT_ONCE // given.num_generations)),
            # A program for many lengths.
            max_prompt_length=bucket(longest, 2 * longest + SHORTEST_BUCKET) + 1,
            tokenizer=model.tokenizer,
        )
    )


def _fit(
    encoded: Examples, limit: int | None, longest: int, positions: int | None
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
    from rlhf_core.data.report import shorten

    rows = shorten([encoded.where(i) for i in over])
    tokens = f"{rows}: up to {max(len(ids[i]) for i in over):,} tokens"
    if limit is None:
        raise InputError(
            f"{tokens}, and the model's context of {positions:,} leaves {fits:,} for a prompt, with "
            f"--max_completion_length {longest}: shorten the prompt, allow shorter completions, or give "
            "--max_prompt_length, which cuts off a prompt's beginning"
        )
    warn(f"{tokens}, cut to the last {limit:,}, as --max_prompt_length says")
    return [prompt[-limit:] for prompt in ids], [max(len(prompt) - limit, 0) for prompt in ids]
