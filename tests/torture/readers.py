"""Read a directory of documents as the commands of `rlhf` read it, and compare what two ways of reading give."""

from __future__ import annotations

import functools
import json
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any


@functools.cache
def _host() -> Any:
    from rlhf_core import plugins

    return plugins.load()


@functools.cache
def _words() -> Any:
    """Load a tokenizer that has a chat template."""
    from rlhf_core.tokenizer import load_tokenizer

    return load_tokenizer("data/tokenizer")


def pipeline(directory: Path) -> None:
    """Plan a pipeline, write it as the run directory's resolved file, and read that again."""
    from rlhf_core.config.secrets import public_table
    from rlhf_core.config.toml import to_toml
    from tests.shared.plans import identified_of, plan_of

    planned = plan_of(directory / "q.toml", _host())
    stages = [public_table(stage.written, _host().registry) for stage in planned.stages]
    resolved = {"dir": str(planned.dir), "seed": planned.seed, "mesh": dict(planned.mesh), "stage": stages}
    _equal("the resolved pipeline", tomllib.loads(to_toml(resolved)), _without_none(resolved))
    json.dumps([dict(spec.record) for spec in identified_of(directory / "q.toml", _host())], allow_nan=False)


def forecast(directory: Path) -> None:
    """Compute what `rlhf check` prints of a pipeline, which takes seconds."""
    from tests.shared.plans import forecast_of

    for each in forecast_of(directory / "q.toml", _host()).values():
        each.printed()


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(each) for key, each in value.items() if each is not None}
    return [_without_none(each) for each in value] if isinstance(value, list | tuple) else value


def rows(file: str, directory: Path) -> None:
    """Read rows from memory and from the disk, profile them, and encode them as every trainer would."""
    from contextlib import suppress

    from rlhf_report import data_profile

    from rlhf_core import data
    from rlhf_core.data import files
    from rlhf_core.errors import InputError

    records = data.load(str(directory / file))
    whole = list(records)
    _equal("rows one by one", [records[i] for i in range(len(records))], whole)
    limit, files.IN_MEMORY = files.IN_MEMORY, 0
    try:
        _equal("rows on the disk", list(data.load(str(directory / file))), whole)
    finally:
        files.IN_MEMORY = limit
    readings = (
        lambda: data_profile.render(data_profile.profile(records, None)),
        lambda: data_profile.profile(records, _words(), max_length=32, chat_template="plain"),
        lambda: data.encode_pairs(records, _words(), max_length=None),
        lambda: data.encode_texts(records, _words(), max_length=32),
        lambda: data.encode_prompts(records, _words(), max_prompt_length=32),
    )
    for read in readings:
        with suppress(InputError):
            read()


def model_configs(directory: Path) -> None:
    from rlhf_core.models import check_model
    from rlhf_core.tokenizer import Encoder, load_tokenizer
    from rlhf_core.training.starting_model import definition_of

    check_model(directory / "sharded")
    check_model(directory / "model")
    definition_of(str(directory / "model"), "score", None)
    Encoder(load_tokenizer(directory / "model"), None).whole(["say"], [" kite"])


def run_records(directory: Path) -> None:
    """Read a run directory as `rlhf run`, `rlhf check` and `rlhf report` do."""
    from rlhf_report.watch.run_view import read_run

    from rlhf_core import artifacts
    from rlhf_core.errors import InputError
    from rlhf_core.loggers.jsonl import JsonLines
    from rlhf_core.stage.decide import decide
    from rlhf_core.stage.record import StageRecord
    from rlhf_core.stage.text_settings import day_begun
    from tests.shared.plans import identified_of

    read_run(directory / "run")
    day_begun((directory / "run").absolute())
    artifact = directory / "run/base/artifacts/model"
    artifacts.identity(artifact)
    JsonLines.cut(directory / "run/base/metrics.jsonl", 1)
    artifacts.open_artifact(artifact)
    artifacts.read_contract(artifact)
    for spec in identified_of(directory / "p.toml", _host()):
        record = StageRecord(spec.dir, spec.name)
        longer = {**spec.record, "config": {**spec.record["config"], "max_training_steps": 9}}
        for now in (spec.record, longer):
            if reasons := decide(record.begun, replace(spec, record=now)).reasons:
                raise InputError(*reasons)
        json.dumps(record.metrics)
        record.require_outputs({"model": artifacts.open_artifact(spec.dir / "artifacts" / "model")})


def tokenizer(directory: Path) -> None:
    from rlhf_core.tokenizer import Encoder, load_tokenizer, template_hash, tokenizer_hash

    loaded = load_tokenizer(directory / "tokenizer")
    tokenizer_hash(loaded)
    template_hash(loaded)
    encoder = Encoder(loaded, None)
    encoder.whole(["say kite"], [" kite é\u2028"])
    encoder.prompts(["say"])
    if loaded.chat_template is not None:
        encoder.prompts([[{"role": "user", "content": "say kite"}]])


def weights(directory: Path) -> None:
    """Read a file of weights, and compare every tensor with what the library safetensors reads."""
    import numpy as np
    from safetensors import safe_open

    from rlhf_core.models import check_model
    from rlhf_core.models.safetensors import TensorFile

    reader = TensorFile(directory / "model" / "model.safetensors")
    views = {name: reader.view(name) for name in reader.header}
    with safe_open(reader.path, framework="numpy") as file:
        _equal("names", set(views), set(file.keys()))
        for name, view in views.items():
            if view.dtype in (np.float32, np.float16):
                _equal(name, view.tobytes(), file.get_tensor(name).tobytes())
    check_model(directory / "model")


def adapter(directory: Path) -> None:
    from rlhf_core.models import check_model, load_model, stored_head

    stored_head(directory / "adapter")
    check_model(directory / "adapter")
    load_model(directory / "adapter")


def _equal(what: str, actual: Any, expected: Any) -> None:
    """Raise AssertionError where two readings differ; values that are not equal to themselves are compared as text."""
    if actual != expected and repr(actual) != repr(expected):
        raise AssertionError(f"{what}: {str(actual)[:200]} and not {str(expected)[:200]}")
