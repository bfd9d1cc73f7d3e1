"""The pages that docs/generate.py writes are what it would write now, and every field in them is described."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest

from rlhf_core.plugins import load_file


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
    texts = [text for name, text in pages.items() if name not in ("commands.md", "python.md")]
    rows = [row for text in texts for row in fields_in(text)]
    cells = [row.split(" | ") for row in rows]
    assert len(cells) > 100
    assert [row for row in cells if len(row) == 4 and not row[3].strip()] == []


def fields_in(text: str) -> list[str]:
    """The rows of what is generated of a page."""
    start, end = "<!-- fields: written by docs/generate.py -->", "<!-- end of fields -->"
    part = text.partition(start)[2].partition(end)[0] if start in text else text
    return re.findall(r"^\| (.*) \|$", part, re.MULTILINE)


def test_every_heading_is_there_once_where_a_link_needs_it(pages: dict[str, str]) -> None:
    """GitHub gives the second of two equal headings another anchor, so a link would lead to the first."""
    for name, text in pages.items():
        wanted = re.findall(rf"\]\((?:(?:\.\./)?{name})?#([\w-]+)\)", "\n".join(pages.values()))
        for anchor in {*wanted} & {*anchors(text)}:
            assert anchors(text).count(anchor) == 1, f"{name}: {anchor}"


def anchors(text: str) -> list[str]:
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]


def test_every_promised_name_has_one_task(generate: ModuleType, pages: dict[str, str]) -> None:
    """A name that is promised stands under exactly one task of docs/python_page.py, and no task names another."""
    page = generate.python_page
    promises = page.promises()
    assert sum(len(names) for names in page.by_task(promises).values()) == len(promises)
    assert page.unpromised() == []
    text = " ".join(pages["python.md"].split())
    assert [each for each in promises if f"`{each.module}.{each.name}" not in text] == []


def test_a_promised_name_without_a_task_is_an_error(generate: ModuleType) -> None:
    page = generate.python_page
    with pytest.raises(ValueError, match=r"under no task.*rlhf_core\.unheard_of"):
        page.by_task([*page.promises(), page.Promise("rlhf_core", "unheard_of", len)])
