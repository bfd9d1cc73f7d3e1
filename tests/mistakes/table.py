"""The table of mistakes, in the order of messages.txt."""

from __future__ import annotations

from tests.mistakes import models, other_commands, requests, rollouts, sampling, settings
from tests.mistakes.mistake import Mistake

SECTIONS: dict[str, list[Mistake]] = {
    **settings.SECTIONS,
    **models.SECTIONS,
    **sampling.SECTIONS,
    **rollouts.SECTIONS,
    **other_commands.SECTIONS,
    **requests.SECTIONS,
}
