"""Register core's own components, through the same hook as any plugin's."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

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
from rlhf_core.plugins.hooks import hookimpl

if TYPE_CHECKING:
    from rlhf_core.data import Records
    from rlhf_core.plugins.registry import Registry

FORMATS = ("jsonl", "json", "csv", "parquet", "arrow", "array_record", "txt")


@hookimpl
def rlhf_register(registry: Registry) -> None:
    registry.add(MODEL, "decoder", "rlhf_core.models:DECODER")
    registry.add(LAYER, "attention", "rlhf_core.models:Layer")
    registry.add(ATTENTION, "auto", "rlhf_core.models.attention:attend")
    registry.add(ATTENTION, "xla", "rlhf_core.models.attention:attend")
    registry.add(ATTENTION, "blocks", "rlhf_core.models.attention:attend_blocks")
    registry.add(ATTENTION, "cudnn", "rlhf_core.models.attention:attend_cudnn")
    for name in ("adamw", "adafactor", "lion", "muon", "sgd"):
        registry.add(OPTIMIZER, name, f"rlhf_core.optimizers:{name}")
    for name in FORMATS:
        registry.add(DATASET, name, _file_loader(name))
    registry.add(DATASET, "hub", hub)
    registry.add(LOGGER, "console", "rlhf_core.loggers.console:Console")
    registry.add(LOGGER, "jsonl", "rlhf_core.loggers.jsonl:JsonLines")
    registry.add(SAMPLER, "jax", "rlhf_core.sampling:make_sampler")
    registry.add(ENVIRONMENT, "tools", "rlhf_core.environments:ToolEnvironment")
    registry.add(ACTION, "previews", "rlhf_core.rollouts.previews:open_previews")


def _file_loader(kind: str) -> Callable[..., Records]:
    def load_file(*, path: str, split: str | None = None) -> Records:
        """Read the rows of one file."""
        from rlhf_core import data

        return data.load({"name": kind, "path": path} | ({} if split is None else {"split": split}))

    return load_file


def hub(*, path: str, subset: str | None = None, split: str = "train") -> Records:
    """Load a dataset of the Hugging Face hub; `path` is its name there."""
    from rlhf_core import data

    return data.load({"name": path, "split": split} | ({} if subset is None else {"subset": subset}))
