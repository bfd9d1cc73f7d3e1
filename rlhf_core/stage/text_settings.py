"""Choose how the rows of a stage become tokens, from its config and from what its model was trained with."""

from __future__ import annotations

import json
from contextlib import suppress
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rlhf_core import artifacts
from rlhf_core.errors import UNREADABLE, read_limited
from rlhf_core.models import Model, local_directory
from rlhf_core.tokenizer.options import TextOptions

if TYPE_CHECKING:
    from rlhf_core.config import TrainerConfig
    from rlhf_core.stage import Stage
    from rlhf_core.tokenizer.options import ReadAt


def text_options(config: TrainerConfig, stage: Stage, *, read_at: ReadAt = "eos") -> TextOptions:
    """Collect the text options of a stage. read_at: where conversations end; see `read_at_of`."""
    return TextOptions(
        config.chat_template,
        config.chat_template_kwargs,
        template_date(config, stage),
        read_at,
        config.prompt_repeated,
        config.system_prompt,
    )


def template_date(config: TrainerConfig, stage: Stage) -> str:
    """Return the date that chat templates write: the config's, the date of the stage's model, or that of the run."""
    recorded = config.template_date or _recorded(config, stage).get("template_date")
    return recorded or stage.template_date or day_begun(stage.dir)


def day_begun(directory: Path) -> str:
    """Return the date on which the run or stage in this directory was started; today where there is none."""
    days = []
    for file in (directory / "stage.json", *sorted(directory.glob("*/stage.json"))):
        with suppress(*UNREADABLE):  # errors are raised where the record is needed
            record = json.loads(read_limited(file))
            days.append(date.fromisoformat(record.get("day", record["started"][:10])).isoformat())
    return min(days, default=date.today().isoformat())


def read_at_of(config: TrainerConfig, stage: Stage, chosen: ReadAt | None) -> ReadAt:
    """Return where a reward model's conversations end: as chosen, as recorded with the stage's model, or "template".

    The end of the template is where other libraries read a score.
    """
    if chosen is not None:
        return chosen
    directory = _model_directory(config, stage)
    if directory is None or not (directory / artifacts.MANIFEST).is_file():
        return "template"
    artifact = artifacts.open_artifact(directory, verify=False)
    if artifact.kind != "reward_model":
        return "template"
    recorded: Literal["template", "eos"] = artifact.metadata["contract"].get("read_at", "eos")
    return recorded


def _recorded(config: TrainerConfig, stage: Stage) -> dict[str, Any]:
    """Read the settings recorded with the artifact that the stage starts from; empty for other models."""
    directory = _model_directory(config, stage)
    return {} if directory is None else artifacts.read_contract(directory)


def _model_directory(config: TrainerConfig, stage: Stage) -> Path | None:
    """Find the directory of the stage's model; None for a fresh one, and in a check for one that is not local."""
    source = stage.inputs.get("model", config.model)
    if isinstance(source, Model):
        return source.source
    if not isinstance(source, str | Path):
        return None
    if Path(source).expanduser().is_dir():
        return Path(source).expanduser()
    return None if stage.mesh is None else local_directory(source)
