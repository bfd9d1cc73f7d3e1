"""Made-up distributions, installed in a directory that is on the path."""

from __future__ import annotations

from pathlib import Path

from rlhf_core.runtime.caches import forget as forget


def install(
    site: Path, distribution: str, points: str, *, version: str = "1.0", requires: str | None = None
) -> None:
    """Install the metadata of a distribution. points: its entry_points.txt."""
    info = site / f"{distribution.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    needs = f"Requires-Dist: {requires}\n" if requires else ""
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n{needs}"
    )
    (info / "entry_points.txt").write_text(points)
    forget()
