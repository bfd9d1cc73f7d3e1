"""How the rows of a stage become tokens: what its config says, and what its model was trained with."""

from __future__ import annotations

import json
from contextlib import suppress
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rlhf_core import artifacts
from rlhf_core.models import Model, local_directory, stored_head
from rlhf_core.tokenizer.text_options import TextOptions

if TYPE_CHECKING:
    from rlhf_core.config import TrainerConfig
    from rlhf_core.stage import Stage
    from rlhf_core.tokenizer.text_options import ReadAt


def text_options(config: TrainerConfig, stage: Stage, *, read_at: ReadAt = "eos") -> TextOptions:
    """How the stage's rows become tokens. read_at: where conversations end; see `read_at_of`."""
    return TextOptions(
        config.chat_template,
        config.chat_template_kwargs,
        template_date(config, stage),
        read_at,
        config.prompt_repeated,
    )


def template_date(config: TrainerConfig, stage: Stage) -> str:
    """The day that chat templates of a stage write: the config's, that of the model it starts from, or the run's."""
    recorded = config.template_date or _recorded(config, stage).get("template_date")
    return recorded or stage.template_date or day_begun(stage.dir)


def day_begun(directory: Path) -> str:
    """The day on which a run in this directory, or a stage, was begun; today where none was yet."""
    days = []
    for file in (directory / "stage.json", *sorted(directory.glob("*/stage.json"))):
        with suppress(
            OSError, ValueError, KeyError, TypeError
        ):  # what is wrong with it is told by who needs it
            days.append(date.fromisoformat(json.loads(file.read_bytes())["started"][:10]).isoformat())
    return min(days, default=date.today().isoformat())


def read_at_of(config: TrainerConfig, stage: Stage, chosen: ReadAt | None) -> ReadAt:
    """Where a reward model's conversations end: as chosen, as the model that training starts from says, or "eos".

    A reward model without a contract of ours was trained on what its chat template writes.
    """
    if chosen is not None:
        return chosen
    directory = _directory(config, stage)
    if directory is None:
        return "eos"
    if (directory / artifacts.MANIFEST).is_file():
        recorded: Literal["template", "eos"] = artifacts.read_contract(directory).get("read_at", "eos")
        return recorded
    return "template" if stored_head(directory) == "score" else "eos"


def _recorded(config: TrainerConfig, stage: Stage) -> dict[str, Any]:
    """What the artifact that the stage starts from says of its use; empty for any other model."""
    directory = _directory(config, stage)
    return {} if directory is None else artifacts.read_contract(directory)


def _directory(config: TrainerConfig, stage: Stage) -> Path | None:
    """Where the stage's model comes from; None for a fresh one, and while it is planned for one that is not here."""
    given = stage.inputs.get("model", config.model)
    if isinstance(given, Model):
        return given.source
    if not isinstance(given, str | Path):
        return None
    if Path(given).expanduser().is_dir():
        return Path(given).expanduser()
    return None if stage.mesh is None else local_directory(given)
