"""The table of mistakes, in the order of messages.txt."""

from __future__ import annotations

from tests.mistakes import models, sampling, settings
from tests.mistakes.mistake import Mistake

SECTIONS: dict[str, list[Mistake]] = {**settings.SECTIONS, **models.SECTIONS, **sampling.SECTIONS}
