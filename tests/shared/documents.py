"""Documents as a reader follows them: files are written, commands typed, Python run, from top to bottom of a page."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from tests.shared.commands import typed

REPOSITORY = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.DOTALL | re.MULTILINE)
EXECUTED = ("console", "python", "toml", "bash", "yaml")


class Ended(NamedTuple):
    code: int
    said: str


def blocks(page: Path) -> list[tuple[str, str]]:
    """(language, text) of every block."""
    return BLOCK.findall(page.read_text(encoding="utf-8"))


def named(text: str) -> str | None:
    """The file that a block is: its first line is `# NAME.py`, `# NAME.toml`, …"""
    match = re.match(r"# ([\w.-]+\.(?:py|toml|txt|sh|sbatch|yaml))\n", text.removeprefix("#!/bin/bash\n"))
    return match[1] if match else None


def links(page: Path) -> list[str]:
    """Targets of the links that lead into the repository, without anchors."""
    return re.findall(r"\]\((?!https?:)([^)#]+)[^)]*\)", page.read_text(encoding="utf-8"))


def commands(text: str) -> list[str]:
    """The lines after "$ " of a console block, continued ones joined, comments left out."""
    lines = re.findall(r"^\$ ((?:.*\\\n)*.*)", text, re.MULTILINE)
    return [re.sub(r"\\\n\s*", "", line).partition(" #")[0].strip() for line in lines]


def shows(shown: str, said: str) -> None:
    """Every line of a text block is a line of what was said; "…" stands for anything, spaces for spaces."""
    lines = [" ".join(line.split()) for line in said.splitlines()]
    for line in filter(None, (" ".join(line.split()) for line in shown.splitlines())):
        wanted = ".*".join(re.escape(part.strip()) for part in line.split("…"))
        assert any(re.fullmatch(wanted, each) for each in lines), f"{line!r} is no line of\n{said}"


def run_python(text: str) -> str:
    """What a block prints."""
    names: dict[str, Any] = {"__name__": "__main__"}
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(text, "document", "exec", dont_inherit=True), names)
    return out.getvalue()


def rlhf(arguments: Iterable[str]) -> Ended:
    """The command in this process, with what it prints in one text."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
        code = typed(arguments)
    return Ended(code, out.getvalue())


def type_in(line: str) -> Ended:
    """A command as it is typed."""
    program, *arguments = shlex.split(line)
    if program == "rlhf":
        return rlhf(arguments)
    done = subprocess.run(
        [sys.executable if program == "python" else program, *arguments],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=300,
    )
    return Ended(done.returncode, done.stdout)


def few_updates(text: str) -> str:
    """A pipeline whose stages end after two updates, and whose fresh models have one layer, which compiles sooner."""
    short = re.sub(
        r"^(num_train_epochs|max_training_steps) = \d+$", "max_training_steps = 2", text, flags=re.M
    )
    return re.sub(r"\bnum_hidden_layers = \d+", "num_hidden_layers = 1", short)


def follow(
    page: Path,
    *,
    edit: Callable[[str], str] = few_updates,
    fails: Iterable[str] = (),
    compare: Callable[[str, str], object] = shows,
) -> None:
    """Follow a page in the current directory, which must be importable from.

    Blocks with a name are written as files, after `edit`. compare: what a text block shows with what the block before
    it said. fails: commands that end with exit code 2, the first time that they are typed.
    """
    said, failing = "", list(fails)
    for language, text in blocks(page):
        if (name := named(text)) is not None:
            Path(name).write_text(edit(text), encoding="utf-8")
        elif language == "console":
            said = ""
            for line in commands(text):
                wanted = 2 if line in failing else 0
                failing = [each for each in failing if each != line]
                ended = type_in(line)
                assert ended.code == wanted, f"{page.name}: {line}\n{ended.said}"
                said += ended.said
        elif language == "python":
            said = run_python(text)
        elif language == "text":
            compare(text, said)


def write_what_pages_name(tiny: Any) -> None:
    """Write the model, rows and rewards that pages name and do not make into the current directory."""
    tiny.make_model(scale=4.0).save(Path("path/to/model"))
    rows = {"corpus": tiny.texts, "pairs": tiny.pairs, "pairs.heldout": tiny.pairs, "prompts": tiny.prompts}
    for name, make in rows.items():
        tiny.write_rows(Path(f"{name}.jsonl"), make(16))
    Path("my_rewards.py").write_text(
        "def brevity(completions, **columns):\n    return [-len(text) / 9 for text in completions]\n"
    )


def on_one_device(patch: Any) -> None:
    """Tests see eight devices; a reader of most pages has one, and it is faster."""
    import jax

    from rlhf_core import mesh, testing

    assert testing.check_trainer  # is imported before: it tries meshes of several devices
    make, one = mesh.make_mesh, jax.devices()[:1]
    patch.setattr(
        mesh, "make_mesh", lambda *sizes, devices=None, **named: make(*sizes, devices=devices or one, **named)
    )


def stage_tables(page: Path) -> list[dict[str, Any]]:
    """The toml blocks of a page that are no files: fields of a stage, or whole stages."""
    return [tomllib.loads(text) for language, text in blocks(page) if language == "toml" and not named(text)]
