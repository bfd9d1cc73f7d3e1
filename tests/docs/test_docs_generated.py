"""The pages that docs/generate.py writes are what it would write now, and every field in them is described."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest

from rlhf_core.plugins.component import load_file


@pytest.fixture(scope="module")
def generate(repository: Path) -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(repository / "docs"))
        return load_file(repository / "docs/generate.py")


@pytest.fixture(scope="module")
def pages(generate: ModuleType) -> dict[str, str]:
    written: dict[str, str] = generate.pages()
    return written


def test_the_files_are_what_the_code_says_now(generate: ModuleType, pages: dict[str, str]) -> None:
    for name, text in pages.items():
        assert (generate.TARGET / name).read_text(encoding="utf-8") == text, (
            f"docs/reference/{name} is out of date: python docs/generate.py"
        )


def test_every_field_flag_and_kind_is_described(pages: dict[str, str]) -> None:
    rows = re.findall(r"^\| (.*) \|$", "\n".join((pages["config.md"], pages["components.md"])), re.MULTILINE)
    cells = [row.split(" | ") for row in rows]
    assert len(cells) > 100
    assert [row for row in cells if len(row) == 4 and not row[3].strip()] == []


def test_every_heading_is_there_once_where_a_link_needs_it(pages: dict[str, str]) -> None:
    """GitHub gives the second of two equal headings another anchor, so a link would lead to the first."""
    for name, text in pages.items():
        headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
        wanted = re.findall(rf"\]\((?:{name})?#([\w-]+)\)", "\n".join(pages.values()))
        anchors = [heading.lower().replace(" ", "-") for heading in headings]
        for anchor in {*wanted} & {*anchors}:
            assert anchors.count(anchor) == 1, f"{name}: {anchor}"


def test_links_of_the_pages_lead_somewhere(pages: dict[str, str]) -> None:
    anchors = {
        name: [heading.lower().replace(" ", "-") for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE)]
        for name, text in pages.items()
    }
    for name, text in pages.items():
        for target, anchor in re.findall(r"\]\(([\w.]*)#([\w-]+)\)", text):
            assert anchor in anchors[target or name], f"{name} links to {target}#{anchor}"


def test_every_python_name_says_something(pages: dict[str, str]) -> None:
    parts = pages["python.md"].split("\n\n")
    signatures = [i for i, part in enumerate(parts) if re.fullmatch(r"`[^`\n]+`", part)]
    assert len(signatures) > 100
    assert [parts[i] for i in signatures if re.match("[`#|-]", parts[i + 1])] == []
