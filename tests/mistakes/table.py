"""The table of mistakes, in the order of messages.txt."""

from __future__ import annotations

from tests.mistakes import (
    functions,
    models,
    other_commands,
    requests,
    reward_options,
    rollouts,
    sampling,
    scores,
    services,
    settings,
    trainers,
)
from tests.mistakes.mistake import Mistake

SECTIONS: dict[str, list[Mistake]] = {
    **settings.SECTIONS,
    **trainers.SECTIONS,
    **reward_options.SECTIONS,
    **models.SECTIONS,
    **sampling.SECTIONS,
    **rollouts.SECTIONS,
    **services.SECTIONS,
    **scores.SECTIONS,
    **functions.SECTIONS,
    **other_commands.SECTIONS,
    **requests.SECTIONS,
}
