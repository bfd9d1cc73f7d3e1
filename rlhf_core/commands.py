"""What the commands other than run and train do, and print."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from rlhf_core import plugins as plugin_loading
from rlhf_core.errors import InputError
from rlhf_core.pipeline_file import read
from rlhf_core.plan import plan
from rlhf_core.preview import components, inputs_line, previews, short_path
from rlhf_core.terminal import echo, show, visible

if TYPE_CHECKING:
    from rlhf_core.plugins import PluginInfo

SEQUENCES_AT_ONCE = 64


def check(
    pipeline: Path,
    *,
    sets: Sequence[str] = (),
    plugins: Sequence[Path] = (),
    dir: Path | None = None,
    devices: int | None = None,
) -> None:
    """Print what a pipeline would do, stage by stage. Raises InputError with every problem.

    devices: how many memory is told for, each; None: memory in all.
    """
    from rlhf_core.pipeline import asked
    from rlhf_core.recorded import refusals
    from rlhf_core.stage_record import StageRecord

    host = plugin_loading.load(files=list(plugins))
    planned = plan(read(pipeline, sets=sets, dir=dir), host)
    problems: list[str] = []
    states: dict[str, str] = {}
    wanted = asked(planned, host)
    records: dict[str, StageRecord] = {}
    try:
        records = {each.name: StageRecord(each.dir, each.name, fix=each.fix) for each in wanted}
        problems += refusals(wanted, records)
    except InputError as error:
        problems += error.problems
    if not problems:
        words = {"new": "runs", "running": "continues", "done": "done, skipped"}
        states = {each.name: words[records[each.name].settle(each.now)] for each in wanted}
    mesh = None
    if devices is not None:
        from rlhf_core.mesh import planned_mesh

        try:
            mesh = planned_mesh(devices, **planned.mesh)
        except InputError as error:
            problems += error.problems
    try:
        said = previews(planned, host, mesh=mesh)
    except InputError as error:
        problems = [*error.problems, *problems]
    if problems:
        raise InputError(*problems)
    table = Table(box=None, show_header=False, pad_edge=False, padding=(1, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for stage in planned.stages:
        lines = [inputs_line(stage), f"{states[stage.name]}, seed {stage.seed}", *components(stage.written)]
        table.add_row(stage.name, "\n".join([*lines, *said[stage.name]]))
    echo(f"{pipeline} → {short_path(str(planned.dir))}\n")
    show(table)


def plugins(*, as_json: bool, files: Sequence[Path] = ()) -> None:
    """Print every distribution in the entry-point group `rlhf`, its state and what it registered."""
    host = plugin_loading.load(files=list(files))
    if as_json:
        echo(json.dumps([dataclasses.asdict(info) for info in host.plugins], indent=2, default=str))
        return
    table = Table(show_lines=True, expand=False)
    for column in ("distribution", "version", "state", "registers"):
        table.add_column(column, overflow="fold")
    for info in host.plugins:
        table.add_row(info.distribution or info.name, info.version or "", info.state, _registered(info))
    show(table)


def new(kind: str, name: str, directory: Path | None) -> None:
    """Write a package for a component, and say what to type next."""
    from rlhf_core import scaffold

    written = scaffold.write(kind, name, directory, plugin_loading.load().registry)
    echo(
        f"{written.directory}: the {scaffold.KINDS[written.kind].name} '{written.name}' is in {written.module}\n"
        f"next: pip install -e '{written.directory}[test]'; python -m pytest {written.directory}; rlhf plugins"
    )


def score(
    model: str,
    file: Path,
    output: Path | None,
    *,
    normalize: bool = False,
    plugins: Sequence[Path] = (),
) -> None:
    """Write the rows of `file` with their scores, and print the accuracy where they are preferences.

    normalize: in standard deviations from the mean that the model's artifact has stored.
    """
    import numpy as np

    from rlhf_core import data, runtime
    from rlhf_core.scoring import Scorer

    require_writable(output)
    runtime.prepare()
    registry = plugin_loading.load(files=plugins).registry
    records = data.load(str(file), registry=registry)
    scores = Scorer.load(model, registry=registry, normalize=normalize).score_rows(records)
    rows = (
        {**records[i], **{name: _number(s[i]) for name, s in scores.items()}} for i in range(len(records))
    )
    _write_rows(rows, output)
    if "chosen_score" in scores:
        chosen, rejected = scores["chosen_score"], scores["rejected_score"]
        right, ties = int((chosen > rejected).sum()), int((chosen == rejected).sum())
        scored = int(np.isfinite(chosen).sum())
        counts = f"{right:,} of {scored:,} pairs scored higher; {ties:,} tied"
        line = f"accuracy {right / max(scored, 1):.4f}: {counts}"
        echo(line, err=output is None)


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
    plugins: Sequence[Path] = (),
) -> None:
    """Sample completions of the prompts given as text, or of the rows of `file`."""
    if (file is None) == (not prompts):
        raise InputError("rlhf generate: give either --prompt TEXT (repeatable) or a file with `prompt` rows")
    import jax

    from rlhf_core import data, runtime
    from rlhf_core.encoding import continuations
    from rlhf_core.models import load_model, local_directory, stored_head
    from rlhf_core.sampling import Sampler, SamplingOptions
    from rlhf_core.tokenizer import settled

    require_writable(output)
    runtime.prepare()
    registry = plugin_loading.load(files=plugins).registry
    source = [{"prompt": text} for text in prompts] if file is None else str(file)
    records = data.load(source, registry=registry)
    if stored_head(local_directory(model)) == "score":
        raise InputError(f"{model} is a reward model, which writes nothing: rlhf score scores with it")
    loaded = load_model(model, registry=registry)
    if loaded.tokenizer is None:
        raise InputError(
            f"{model}: no tokenizer files; put tokenizer.json and tokenizer_config.json beside config.json"
        )
    loaded = dataclasses.replace(loaded, tokenizer=settled(loaded.tokenizer, chat_template, loaded.source))
    encoded = data.encode_prompts(
        records,
        loaded.tokenizer,
        max_prompt_length=max_prompt_length,
        overlong="truncate",
    )
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
    said = [row[:length] for row, length in zip(rollouts.tokens, rollouts.lengths, strict=True)]
    before = [
        ids if isinstance(raw, str) else None
        for ids, raw in zip(encoded.ids, encoded.raw, strict=True)
        for _ in range(num_generations)
    ]
    rows = [
        {**records[i // num_generations], "completion": text, "finished": bool(rollouts.finished[i])}
        for i, text in enumerate(continuations(loaded.tokenizer, before, said))
    ]
    if file is None and output is None:
        for row in rows:
            print(_for_reader(row["completion"]))
    else:
        _write_rows(rows, output)
        if output is not None:
            echo(f"{output}: {len(rows):,} completion{'s'[: len(rows) > 1]}")


def export(model: str, directory: Path, *, merge: bool, plugins: Sequence[Path] = ()) -> None:
    """Write a model for other tools, and say what and where."""
    from rlhf_core import export as exporting
    from rlhf_core import runtime

    runtime.prepare()
    registry = plugin_loading.load(files=plugins).registry
    echo(f"{directory}: {exporting.export(model, directory, registry=registry, merge=merge)}")


def profile(
    file: str,
    tokenizer: str | None,
    model: str | None,
    *,
    max_length: int | None,
    chat_template: str | None,
    plugins: Sequence[Path] = (),
) -> None:
    """Print what a dataset holds, in tokens of the tokenizer or of the model's, else in characters."""
    from rlhf_core import data
    from rlhf_core import profile as profiling
    from rlhf_core.tokenizer import load_tokenizer

    if tokenizer is not None and model is not None:
        raise InputError("rlhf data: give --tokenizer or --model, not both")
    source = model if tokenizer is None else tokenizer
    loaded = None if source is None else load_tokenizer(source)
    records = data.load(file, registry=plugin_loading.load(files=plugins).registry)
    found = profiling.profile(records, loaded, max_length=max_length, chat_template=chat_template)
    show(profiling.render(found))


def require_writable(output: Path | None) -> None:
    """Raise InputError where the rows could not be written, before they are computed."""
    if output is None:
        return
    there = next(folder for folder in output.absolute().parents if folder.exists())
    if output.is_dir():
        raise InputError(f"-o {output}: is a directory; give the file to write in it")
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        wrong = "no permission to write to" if there.is_dir() else "not a directory:"
        raise InputError(f"-o {output}: {wrong} {there}; give another file")


def _write_rows(rows: Iterable[Mapping[str, Any]], output: Path | None) -> None:
    text = "".join(json.dumps(row, ensure_ascii=False, default=_jsonable) + "\n" for row in rows)
    if output is None:
        sys.stdout.write(_for_reader(text))
        return
    from rlhf_core.artifacts import write_atomic

    write_atomic(output, text)


def _for_reader(text: str) -> str:
    """Data as it is for a program, and with control characters shown for a person at a terminal."""
    return visible(text) if sys.stdout.isatty() else text


def _number(value: Any) -> float | None:
    """JSON has no NaN: a row that could not be scored gets null."""
    return None if math.isnan(value) else float(value)


def _jsonable(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    return str(value)


def _registered(info: PluginInfo) -> str:
    if info.error:
        return str(info.error)
    return "\n".join(f"{kind}: {', '.join(names)}" for kind, names in info.components.items())
