"""A stage under audit, and how far it is read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlhf_core.rollouts import Rollout
from rlhf_core.runs import Damaged, RunDirectory, StageDirectory

FILTERS = {
    "top_k": (None, 0, -1),
    "top_p": (None, 1.0),
    "min_p": (None, 0.0),
    "repetition_penalty": (None, 1.0),
}
"""Options of sampling that change which tokens are drawn, and the values at which they do not."""


class Entry(NamedTuple):
    """A rollout of the journal, and the rounds of prompts that were reserved for it."""

    rollout: Rollout
    taken: tuple[int, ...]


@dataclass(frozen=True)
class Subject:
    """A stage under audit.

    damaged: files that could not be read, filled in as they are read.
    """

    run: RunDirectory
    stage: StageDirectory
    damaged: list[Damaged] = field(default_factory=list)

    @property
    def dir(self) -> Path:
        """The directory of the stage."""
        return self.stage.dir

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """The fields of its configuration."""
        return self.stage.config

    def option(self, path: str) -> Any:
        """Return an option by its dotted path; None where it is not set."""
        found: Any = self.config
        for name in path.split("."):
            found = found.get(name) if isinstance(found, Mapping) else None
        return found

    @cached_property
    def numbers(self) -> list[int]:
        """The numbers of the rollouts in the journal."""
        return self.stage.rollout_numbers

    def journal_file(self, number: int) -> Path:
        """Return the file of a rollout."""
        return self.dir / "journal" / f"rollout-{number:06d}.zip"

    def rollouts(self) -> Iterator[Entry]:
        """Yield the rollouts of the journal, one in memory at a time; damaged files are left out."""
        for rollout, taken, _ in self.stage.rollouts():
            yield Entry(rollout, tuple(taken))

    def values(self, number: int) -> Mapping[str, NDArray[Any]] | None:
        """Read values/NNNNNN.npz, what the trainer thinks of the tokens of a rollout; None where it is missing.

        Raises Damaged where it cannot be read.
        """
        path = self.values_file(number)
        if not path.is_file():
            return None
        try:
            with np.load(path) as file:
                return {name: file[name] for name in file.files}
        # Of zipfile, zlib and NumPy: there is no end to what damaged bytes may be taken for.
        except Exception as error:
            raise Damaged(path, str(error) or type(error).__name__) from error

    def values_file(self, number: int) -> Path:
        """Return the file of what the trainer thinks of the tokens of a rollout."""
        return self.dir / "values" / f"{number:06d}.npz"

    @property
    def updates(self) -> int:
        """How many updates were logged."""
        return max((int(row["step"]) for row in self.stage.metrics if "step" in row), default=0)

    @cached_property
    def updates_per_rollout(self) -> int | None:
        """How many updates each rollout serves, as the versions of the policies say; None with fewer than two."""
        versions = sorted({int(entry.rollout.samples.version.max()) for entry in self.rollouts()})
        gaps = np.diff(versions)
        return int(gaps.min()) if len(gaps) else None

    @property
    def filtered(self) -> str:
        """The option of sampling that draws from another distribution than the policy's; empty where none does."""
        for name, inactive in FILTERS.items():
            if self.option(f"sampling.{name}") not in inactive:
                return f"sampling.{name}"
        return "sampling.temperature" if self.option("sampling.temperature") == 0 else ""

    @property
    def ahead(self) -> int:
        """How many rollouts are sampled ahead of the one that is trained on."""
        return int(self.config.get("rollouts_ahead") or 0)
