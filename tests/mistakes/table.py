"""The table of mistakes, in the order of messages.txt."""

from __future__ import annotations

from tests.mistakes import (
    arguments,
    components,
    files,
    functions,
    model_files,
    models,
    other_commands,
    pairs,
    pipelines,
    requests,
    reward_options,
    rollouts,
    scores,
    services,
    settings,
    stages,
    trainers,
)
from tests.mistakes.mistake import Mistake

SECTIONS: dict[str, list[Mistake]] = {
    **settings.SECTIONS,
    **pairs.SECTIONS,
    **files.SECTIONS,
    **trainers.SECTIONS,
    **arguments.SECTIONS,
    **reward_options.SECTIONS,
    **model_files.SECTIONS,
    **models.SECTIONS,
    **stages.SECTIONS,
    **pipelines.SECTIONS,
    **components.SECTIONS,
    **rollouts.SECTIONS,
    **services.SECTIONS,
    **scores.SECTIONS,
    **functions.SECTIONS,
    **other_commands.SECTIONS,
    **requests.SECTIONS,
}
