"""Build the site: the pages of the repository as HTML, with a search, and a page for each module that authors import.

    python docs/build_site.py [--version 0.2]

stages the pages in .site/pages, at the paths that they have in the repository, so that links between them hold in both
places, and a linked file that is no page becomes one; zensical then makes .site/html/VERSION of them. `make site`
installs what is needed, builds, and opens the result in a browser.
"""

from __future__ import annotations

import argparse
import html
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from urllib.parse import unquote

ROOT = Path(__file__).resolve().parents[1]
SITE = ROOT / ".site"
PAGES = SITE / "pages"
PARTS = {
    "Learn": "docs/tutorial",
    "How to": "docs/how-to",
    "Reference": "docs/reference",
    "Understand": "docs/explanation",
    "Results": "docs/results",
}
"""Sections of the site and their folders; the pages of each stand in the order in which docs/index.md names them."""
SURFACE = ROOT / "tests/shared/public_surface.txt"
PICTURES = {".svg", ".png"}
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
FENCE = re.compile(r"^(`{3,})[^\n]*\n.*?^\1`*$", re.MULTILINE | re.DOTALL)
FORMULA = re.compile(r'<(span|div) class="arithmatex">(?:\\\((.*?)\\\)|\\\[(.*?)\\\])</\1>', re.DOTALL)


def stage(pages: Path = PAGES) -> list[Path]:
    """Copy every page that can be reached from docs/index.md and README.md to `pages`; return them in that order."""
    shutil.rmtree(pages, ignore_errors=True)
    waiting, found = [ROOT / "docs/index.md", ROOT / "README.md"], []
    while waiting:
        source = waiting.pop(0)
        if source in found:
            continue
        found.append(source)
        target = pages / page_of(source).relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.suffix in PICTURES:
            shutil.copyfile(source, target)
        elif source.is_dir():
            text, linked = with_pages(as_list(source), source / "README.md")
            target.write_text(text, encoding="utf-8")
            waiting += linked
        elif source.suffix == ".md":
            text, linked = with_pages(source.read_text(encoding="utf-8"), source)
            target.write_text(text, encoding="utf-8")
            waiting += linked
        else:
            target.write_text(as_page(source), encoding="utf-8")
    return [file for file in found if file.suffix == ".md"]


def with_pages(text: str, source: Path) -> tuple[str, list[Path]]:
    """Point links to files and folders at the pages made of them; return the text and every file linked."""
    linked = []

    def changed(link: re.Match[str]) -> str:
        mark, label, address = link.groups()
        path, hash_, anchor = address.partition("#")
        if not path or "://" in path or path.startswith("mailto:"):
            return link[0]
        file = (source.parent / unquote(path)).resolve()
        file = file / "README.md" if (file / "README.md").is_file() else file
        if not file.exists() or not file.is_relative_to(ROOT):
            raise SystemExit(f"{source.relative_to(ROOT)}: the link {address} leads to no file")
        linked.append(file)
        up = Path(*[".."] * len(source.parent.relative_to(ROOT).parts))
        return f"{mark}[{label}]({(up / page_of(file).relative_to(ROOT)).as_posix()}{hash_}{anchor})"

    return outside_fences(text, lambda part: LINK.sub(changed, part)), linked


def outside_fences(text: str, change: Callable[[str], str]) -> str:
    """Change what stands outside of fenced code."""
    done, end = "", 0
    for fence in FENCE.finditer(text):
        done += change(text[end : fence.start()]) + fence[0]
        end = fence.end()
    return done + change(text[end:])


def page_of(file: Path) -> Path:
    """Return the page of a file or folder: itself, for code the file's name with .md behind it.

    Folders lose the dot that their names begin with: zensical takes nothing from hidden ones.
    """
    if file.is_dir():
        return file / "README.md"
    page = file if file.suffix in {".md", *PICTURES} else file.with_name(file.name + ".md")
    return ROOT.joinpath(*(part.removeprefix(".") for part in page.relative_to(ROOT).parts))


def as_list(folder: Path) -> str:
    """Show a folder as a page that links its files."""
    files = [file.name for file in sorted(folder.iterdir()) if file.is_file() and file.name[0] not in "._"]
    return f"# {folder.relative_to(ROOT)}\n\n" + "".join(f"- [{name}]({name})\n" for name in files)


def as_page(file: Path) -> str:
    """Show a file of code as a page."""
    text = file.read_text(encoding="utf-8")
    language = {".py": "python", ".toml": "toml", ".c": "c"}.get(file.suffix, "text")
    unsearched = "---\nsearch:\n  exclude: true\n---\n"
    return f"{unsearched}\n# {file.name}\n\n`{file.relative_to(ROOT)}`\n\n`````{language}\n{text}`````\n"


def stage_api() -> list[str]:
    """Write a page for each module whose names are promised; mkdocstrings fills them from the docstrings."""
    pages = []
    for block in SURFACE.read_text(encoding="utf-8").split("\n\n")[1:]:
        names = [line.split("(")[0].split(":")[0].split(" ")[0] for line in block.strip().splitlines()]
        depth = min(name.count(".") for name in names)
        module = names[0].rsplit(".", names[0].count(".") - depth + 1)[0]
        own = [name.removeprefix(module + ".") for name in names if name.count(".") == depth]
        options = {
            "members": [name for name in own if not name.isupper()],
            "show_root_heading": False,
            "show_root_toc_entry": False,
        }
        pages.append(f"api/{module}.md")
        (PAGES / "api").mkdir(exist_ok=True)
        text = f"# {module}\n\n::: {module}\n    options: {json.dumps(options)}\n"
        (PAGES / pages[-1]).write_text(text, encoding="utf-8")
    return pages


def navigation(pages: list[Path], api: list[str]) -> list[object]:
    """Arrange pages in sections: every page once."""
    names = [page.relative_to(ROOT).as_posix() for page in pages]
    nav: list[object] = [{"Home": "README.md"}]
    taken = {"README.md"}
    for title, folder in PARTS.items():
        own = [name for name in names if name.startswith(folder + "/")]
        taken.update(own)
        nav.append({title: own})
    nav.append({"Python": list(api)})
    packages = [name for name in names if name.startswith(("plugins/", "examples/"))]
    nav.append({"Packages and examples": packages})
    rest = [name for name in names if name not in taken and name not in packages]
    return [*nav, {"Project": rest}]


def build(version: str) -> Path:
    """Make .site/html/VERSION and the list of versions next to it; formulas become MathML, which needs no script."""
    pages, api = stage(), stage_api()
    target = SITE / "html" / version
    settings = (ROOT / "docs/site.toml").read_text(encoding="utf-8")
    head = (
        f'[project]\ndocs_dir = "pages"\nsite_dir = "html/{version}"\nnav = {toml(navigation(pages, api))}\n'
    )
    packages = [ROOT, *sorted(file.parent for file in ROOT.glob("plugins/*/pyproject.toml"))]
    settings += f"\n[project.plugins.mkdocstrings.handlers.python]\npaths = {toml([str(each) for each in packages])}\n"
    shutil.copy(ROOT / "docs/site.css", PAGES)
    shutil.copy(ROOT / "docs/docstrings.py", SITE)
    (SITE / "zensical.toml").write_text(settings.replace("[project]\n", head, 1), encoding="utf-8")
    subprocess.run(
        [Path(sys.executable).with_name("zensical"), "build", "--clean", "--strict"], cwd=SITE, check=True
    )
    for page in target.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        page.write_text(FORMULA.sub(formula, text), encoding="utf-8")
    made = (each.name for each in (SITE / "html").iterdir() if each.is_dir())
    versions = sorted(made, key=newest_first)
    (SITE / "html/versions.json").write_text(
        json.dumps([{"version": each, "title": each, "aliases": []} for each in versions])
    )
    (SITE / "html/index.html").write_text(f'<meta http-equiv="refresh" content="0; url={versions[0]}/">\n')
    return target


def newest_first(version: str) -> tuple[int, ...]:
    """Sort latest first, then 0.10 before 0.9."""
    return (
        tuple(-int(number) for number in re.findall(r"\d+", version)) if version[0].isdigit() else (-(10**9),)
    )


def formula(found: re.Match[str]) -> str:
    """Turn TeX into MathML."""
    from latex2mathml.converter import convert

    kind, inline, display = found.groups()
    return convert(html.unescape(inline or display), display="inline" if kind == "span" else "block")


def toml(value: object) -> str:
    """Write lists, tables and texts on one line."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{json.dumps(key)} = {toml(item)}" for key, item in value.items()) + " }"
    return "[" + ", ".join(map(toml, value)) + "]" if isinstance(value, list) else json.dumps(value)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--version", default="latest")
    print(build(parser.parse_args().version))
