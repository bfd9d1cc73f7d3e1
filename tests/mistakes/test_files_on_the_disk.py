"""Large files, which are read from the disk, are refused in the same words as those that are held in memory."""

from __future__ import annotations

from typing import Any

import pytest

from rlhf_core.data import files as reading
from tests.mistakes import files
from tests.mistakes.mistake import Mistake, met


@pytest.mark.parametrize("mistake", files.SECTIONS[files.UNREAD], ids=lambda mistake: mistake.name)
def test_a_file_on_the_disk_is_refused_as_in_memory(
    mistake: Mistake, place: Any, rlhf: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = met(mistake, place, rlhf)
    monkeypatch.setenv("RLHF_CACHE", str(place.path / "cache"))
    monkeypatch.setattr(reading, "IN_MEMORY", 0)
    assert met(mistake, place, rlhf) == expected
