"""Register core's own components, through the same hook as any plugin's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlhf_core import data, loggers, optimizers, sampling
from rlhf_core.contracts import (
    ACTION,
    ATTENTION,
    DATASET,
    ENVIRONMENT,
    LAYER,
    LOGGER,
    MODEL,
    OPTIMIZER,
    SAMPLER,
)
from rlhf_core.data.files import FORMATS
from rlhf_core.environments import ToolEnvironment
from rlhf_core.models import DECODER, Layer
from rlhf_core.models.attention import attend, attend_blocks, attend_cudnn
from rlhf_core.plugins.hooks import hookimpl
from rlhf_core.plugins.registry import Registry


@hookimpl
def rlhf_register(registry: Registry) -> None:
    registry.add(MODEL, "decoder", DECODER)
    registry.add(LAYER, "attention", Layer)
    registry.add(ATTENTION, "auto", attend)
    registry.add(ATTENTION, "xla", attend)
    registry.add(ATTENTION, "blocks", attend_blocks)
    registry.add(ATTENTION, "cudnn", attend_cudnn)
    for name in ("adamw", "adafactor", "lion", "muon", "sgd"):
        registry.add(OPTIMIZER, name, getattr(optimizers, name))
    for name in FORMATS:
        registry.add(DATASET, name, _file_loader(name))
    registry.add(DATASET, "hub", hub)
    registry.add(LOGGER, "console", loggers.Console)
    registry.add(LOGGER, "jsonl", loggers.JsonLines)
    registry.add(SAMPLER, "jax", sampling.make_sampler)
    registry.add(ENVIRONMENT, "tools", ToolEnvironment)
    registry.add(ACTION, "previews", previews)


def _file_loader(kind: str) -> Callable[..., data.Records]:
    def load_file(*, path: str, split: str | None = None) -> data.Records:
        """Read the rows of one file."""
        return data.load({"name": kind, "path": path} | ({} if split is None else {"split": split}))

    return load_file


def previews(context: Any, build: Any) -> Any:
    """Complete fixed prompts with the language model that is trained, before, while and after it is."""
    from rlhf_core.rollouts.previews import open_previews  # a stage without previews opens no sampler

    return open_previews(context, build)


def hub(*, path: str, subset: str | None = None, split: str = "train") -> data.Records:
    """Load a dataset of the Hugging Face hub; `path` is its name there."""
    return data.load({"name": path, "split": split} | ({} if subset is None else {"subset": subset}))
