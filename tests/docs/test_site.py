"""The site holds every page, under one entry of its navigation; `make site` builds it and opens it in a browser."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from rlhf_core.plugins import load_file

ROOT = Path(__file__).parents[2]
site: Any = load_file(ROOT / "docs/build_site.py")


def test_every_page_is_reached_and_stands_in_the_navigation_once(tmp_path: Path) -> None:
    pages = site.stage(tmp_path)
    entries = tomllib.loads(f"nav = {site.toml(site.navigation(pages, ['api/x.md']))}")["nav"]
    listed = [
        page
        for entry in entries
        for value in entry.values()
        for page in ([value] if isinstance(value, str) else value)
    ]
    assert sorted(listed) == sorted([*(page.relative_to(ROOT).as_posix() for page in pages), "api/x.md"])
    hidden = [each for each in tmp_path.rglob("*") if each.name.startswith(".")]
    assert not hidden, "zensical takes nothing from these"
    unreached = set((ROOT / "docs").rglob("*.md")) - set(pages)
    assert not unreached, "no page links these"


def test_links_to_files_lead_to_pages_of_them_and_fenced_code_is_kept() -> None:
    text, linked = site.with_pages("[run](../Makefile)\n```md\n[a](b)\n```\n", ROOT / "docs/index.md")
    assert text == "[run](../Makefile.md)\n```md\n[a](b)\n```\n"
    assert linked == [ROOT / "Makefile"]
