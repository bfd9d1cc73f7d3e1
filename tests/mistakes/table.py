"""The table of mistakes, in the order of messages.txt."""

from __future__ import annotations

from tests.mistakes import components, files, models, pairs, pipelines, settings, stages
from tests.mistakes.mistake import Mistake

SECTIONS: dict[str, list[Mistake]] = {
    **settings.SECTIONS,
    **pairs.SECTIONS,
    **models.SECTIONS,
    **stages.SECTIONS,
    **pipelines.SECTIONS,
    **files.SECTIONS,
    **components.SECTIONS,
}
