"""Provide a model, a tokenizer and rows small enough that a trainer runs on them in seconds."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np

from rlhf_core import plugins
from rlhf_core.config import TrainerConfig
from rlhf_core.contracts import Artifact, Trainer
from rlhf_core.errors import Stopped
from rlhf_core.mesh import make_mesh
from rlhf_core.plugins.hooks import hookimpl
from rlhf_core.stage import Stage
from rlhf_core.stage.execute import execute

LETTERS = "abcdefghijklmnopqrstuvwxyz"
SEED = 0
"""Of every stage that a kit runs."""
SPECIAL = ("<pad>", "</s>", "<unk>")
MODEL_TABLE: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 128,
}
"""A fresh model, with Hugging Face's config names; its vocabulary comes from `tokenizer()`."""


def tokenizer() -> Any:
    """Build a tokenizer with one token per letter between spaces; `</s>` ends a sequence."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [*SPECIAL, *LETTERS]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    )


def texts(count: int = 12) -> list[dict[str, Any]]:
    """Return rows with `prompt` and `completion`."""
    draw = np.random.default_rng(0)
    return [{"prompt": _letters(draw, 5), "completion": " " + _letters(draw, 6)} for _ in range(count)]


def pairs(count: int = 12) -> list[dict[str, Any]]:
    """Return rows with `prompt`, `chosen` and `rejected`; the two completions differ."""
    draw = np.random.default_rng(1)
    return [
        {
            "prompt": _letters(draw, 5),
            "chosen": f" a {_letters(draw, 6)}",
            "rejected": f" b {_letters(draw, 6)}",
        }
        for _ in range(count)
    ]


def prompts(count: int = 12) -> list[dict[str, Any]]:
    """Return rows with `prompt` and `answer`."""
    draw = np.random.default_rng(2)
    return [{"prompt": _letters(draw, 5), "answer": _letters(draw, 1)} for _ in range(count)]


def _letters(draw: np.random.Generator, longest: int) -> str:
    return " ".join(LETTERS[i] for i in draw.integers(0, len(LETTERS), draw.integers(1, longest + 1)))


def a_stage(
    directory: Path,
    *,
    host: plugins.Host | None = None,
    mesh: Any = None,
    inputs: Mapping[str, Any] | None = None,
) -> Stage:
    """Build a stage named `kit` that writes to `directory`, by default with all installed plugins on one device."""
    host = plugins.load() if host is None else host
    return Stage(
        name="kit",
        dir=directory,
        seed=SEED,
        mesh=make_mesh(devices=jax.devices()[:1]) if mesh is None else mesh,
        is_main=True,
        registry=host.registry,
        hook=host.hook,
        inputs=dict(inputs or {}),
    )


STOP_AT, CRASH_AT = 3, 5
"""Updates after which the interrupted run gets a SIGTERM, then a crash: with a checkpoint every other update, it
resumes once after an odd and once after an even number of updates.
"""
HELD_OUT = 4
"""Rows for evaluation if no others are given."""
CLOCKS = ("time", "per_second", "memory/")
"""Parts of the names of metrics that depend on a clock or the machine."""


class CrashError(Exception):
    """Raised by a logger of the kit to crash a run."""


@dataclass
class Ran:
    """Record the events of a run, as a logger."""

    stop: int | None
    crash: int | None
    rows: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    announced: list[str] = field(default_factory=list)
    outputs: dict[str, Artifact] = field(default_factory=dict)
    error: BaseException | None = None
    ignored: bool = False
    """Whether the trainer had no handler for the SIGTERM."""

    @hookimpl
    def rlhf_step_end(self, step: int, metrics: Mapping[str, Any]) -> None:
        self.rows.append((step, dict(metrics)))
        if step == self.stop:
            signal.raise_signal(signal.SIGTERM)
        if step == self.crash:
            raise CrashError

    @hookimpl
    def rlhf_artifact_saved(self, artifact: Artifact) -> None:
        self.announced.append(artifact.name)


@dataclass(frozen=True)
class Case:
    """One trainer with the settings and inputs that its runs share."""

    trainer: Trainer
    config: TrainerConfig
    inputs: Mapping[str, Any]
    directory: Path

    @classmethod
    def of(
        cls,
        trainer: Trainer,
        config: TrainerConfig | None,
        rows: Sequence[Mapping[str, Any]],
        inputs: Mapping[str, Any],
        small: Mapping[str, Any],
        directory: Path,
    ) -> Case:
        """small: values for fields that the config (default: the trainer's defaults) does not set."""
        config = trainer.config() if config is None else config
        config = config.replace(**{k: v for k, v in small.items() if k not in config.model_fields_set})
        given = {"model": MODEL_TABLE, "tokenizer": tokenizer(), "train_dataset": list(rows)}
        given |= {"eval_dataset": list(rows)[:HELD_OUT], **inputs}
        return cls(trainer, config, given, directory)

    def stage(self, name: str, *, mesh: Any, host: plugins.Host | None = None) -> Stage:
        """Build a stage in a directory of that name; without devices if mesh is None."""
        stage = a_stage(self.directory / name, host=host, inputs=self.inputs)
        if mesh is None:
            return Stage(**{**vars(stage), "mesh": None})
        return stage if mesh is ... else Stage(**{**vars(stage), "mesh": mesh})

    def run(self, name: str, *, mesh: Any = ..., stop: int | None = None, crash: int | None = None) -> Ran:
        """Run or resume in a directory of that name; a run that is interrupted may end with an error.

        mesh: default one device. stop: the update after which to send a SIGTERM; crash: after which to raise.
        """
        ran = Ran(stop, crash)
        host = plugins.load(objects=[ran])
        stage = self.stage(name, mesh=mesh, host=host)
        try:
            with _catching(ran):
                ran.outputs = execute(self.trainer, self.config, stage, host)
        except (Stopped, CrashError) as error:
            ran.error = error
            if stop is None and crash is None:
                raise
        return ran


@contextmanager
def _catching(ran: Ran) -> Iterator[None]:
    """Record a SIGTERM that the trainer does not handle, in place of ending the process."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ignore(*_: Any) -> None:
        ran.ignored = True

    before = signal.signal(signal.SIGTERM, ignore)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def clockless(logged: tuple[int, Mapping[str, Any]]) -> tuple[int, dict[str, Any]]:
    """Drop metrics that depend on a clock or the machine from a logged row."""
    step, row = logged
    return step, {name: value for name, value in row.items() if not any(part in name for part in CLOCKS)}
