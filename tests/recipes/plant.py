"""Plant the faults of `faults.toml`, one at a time, and count which are caught by the recipes and which by the tests.

    python tests/recipes/plant.py                       every fault that has no result for this commit yet
    python tests/recipes/plant.py ratio-always-one      these alone, again
    python tests/recipes/plant.py --budget 60           begin no fault after an hour; the same command goes on
    python tests/recipes/plant.py --check               whether every fault can still be planted; nothing is run
    python tests/recipes/plant.py --table               print the results that there are, as Markdown

A fault is planted in a copy of the tracked files. There its recipes are run in their order until one does not pass, and
its files of tests until one fails, side by side. What fails without any fault, at the same commit, catches nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
FAULTS = Path(__file__).with_name("faults.toml")
RESULTS = ROOT / ".cache" / "recipes" / "faults.json"
PASSED, CAUGHT, BROKEN, NO_CATCH = "passed", "caught", "broken", "fails without a fault"
LONGEST = 600.0
"""Seconds after which a recipe or a file of tests is ended; a fault that it hangs with is caught."""
SIDES = ("recipes", "tests")


@dataclass(frozen=True)
class Change:
    """A change of the product that should be noticed: in `file`, `old`, which occurs once, becomes `new`.

    about: what is wrong then. recipes, tests: names of recipes and files of tests that can reach it, most likely first.
    """

    name: str
    file: str
    old: str
    new: str
    about: str = ""
    recipes: Sequence[str] = ()
    tests: Sequence[str] = ()

    def planted(self) -> str:
        """Return the file with the change. Raises ValueError where what it replaces does not occur once."""
        text = (ROOT / self.file).read_text(encoding="utf-8")
        count = text.count(self.old)
        if count != 1:
            raise ValueError(f"{self.name}: what it replaces occurs {count} times in {self.file}")
        return text.replace(self.old, self.new)

    def problem(self) -> str | None:
        """Return why it cannot be planted, or is no Python then; None: it can."""
        try:
            compile(self.planted(), self.file, "exec")
        except (OSError, ValueError, SyntaxError) as error:
            return f"{self.name}: {error}"
        return None


def read_changes(file: Path) -> list[Change]:
    """Read a list of changes, a table each by its name."""
    return [Change(name, **table) for name, table in tomllib.loads(file.read_text(encoding="utf-8")).items()]


class Outcome(NamedTuple):
    """What came of a recipe or a file of tests: one of the words above, and the first line of why."""

    state: str
    why: str = ""

    @property
    def text(self) -> str:
        return f"{self.state}: {self.why}" if self.why else self.state


def run(side: str, name: str, root: Path, *, marks: str = "not exhaustive") -> Outcome:
    """Run a recipe or a file of tests in a copy of the repository, with that copy's code.

    marks: pytest's expression of the tests that are run.
    """
    command = {
        "recipes": ["tests/recipes/reproduce.py", name],
        "tests": ["-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", marks, name],
    }[side]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [sys.executable, *command],
            cwd=root,
            env=environment(root),
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            code = process.wait(LONGEST)
        except subprocess.TimeoutExpired:
            return Outcome(CAUGHT, f"hung: not done after {LONGEST:.0f} s")
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        log.seek(0)
        lines = [line.strip() for line in log.read().splitlines() if line.strip()]
    if code == 0:
        return Outcome(PASSED)
    # Of pytest, 2 is an error while it read the file; of others a mistake on the command line.
    failed = code == 1 or (side == "tests" and code == 2)
    return Outcome(CAUGHT if failed else BROKEN, why(side, lines) if failed else f"ended with {code}")


def why(side: str, lines: Sequence[str]) -> str:
    """The first metric that left its interval, or the first test that failed, as it was printed."""
    if side == "tests":
        found = [line for line in lines if re.match(r"(FAILED|ERROR) ", line)]
        return (found or lines or [""])[0]
    heads = [i for i, line in enumerate(lines) if "left its intervals" in line]
    if heads and heads[0] + 1 < len(lines):
        return lines[heads[0] + 1]
    # A run that failed: its last line but that of the summary names the error.
    return lines[-2] if len(lines) > 1 else "".join(lines)


def environment(root: Path) -> dict[str, str]:
    """What makes a process use the code in `root`, whatever is installed, and keep no encoded data of others."""
    paths = [root, *sorted(path for path in (root / "plugins").iterdir() if path.is_dir())]
    own = {"PYTHONPATH": os.pathsep.join(map(str, paths)), "RLHF_CACHE": str(root / ".cache")}
    if (shared := ROOT.parent / "shared").is_dir():
        own |= {"RLHF_SHARED": os.environ.get("RLHF_SHARED", str(shared))}
    return {**os.environ, **own}


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def version() -> str:
    """The commit, with a hash of what differs from it in tracked files."""
    commit, changes = git("rev-parse", "HEAD").strip()[:12], git("diff", "HEAD")
    return f"{commit}+{hashlib.sha256(changes.encode()).hexdigest()[:8]}" if changes else commit


@contextmanager
def copy(change: Change | None) -> Iterator[Path]:
    """The tracked files of the working tree in a directory of their own, with a change planted."""
    with tempfile.TemporaryDirectory(prefix="fault-", ignore_cleanup_errors=True) as directory:
        root = Path(directory)
        for name in git("ls-files", "-z").split("\0"):
            if name and (ROOT / name).exists():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(ROOT / name, root / name)
        if change is not None:
            (root / change.file).write_text(change.planted(), encoding="utf-8")
        yield root


def check(faults: Iterable[Change]) -> list[str]:
    """What is wrong with the faults: of each that cannot be planted, or names what there is not."""
    from recipes import RECIPES

    problems = []
    for fault in faults:
        problems += filter(None, [fault.problem()])
        unknown = [name for name in fault.recipes if name not in RECIPES]
        unknown += [name for name in fault.tests if not (ROOT / name).is_file()]
        problems += [f"{fault.name}: there is no {name}" for name in unknown]
    return problems


class Count:
    """The results of one commit, kept in a file after every run."""

    def __init__(self, file: Path, commit: str) -> None:
        self.file, self.lock = file, Lock()
        self.every: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
        self.found: dict[str, Any] = self.every.setdefault(commit, {})
        self.none: dict[str, Any] = self.found.setdefault("none", {side: {} for side in SIDES})

    def save(self) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        beside = self.file.with_suffix(".tmp")
        beside.write_text(json.dumps(self.every, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        beside.replace(self.file)

    def passes(self, side: str, name: str, unplanted: Path) -> bool:
        """Whether a recipe or a file of tests passes without a fault."""
        known = self.none[side]
        if name not in known:
            outcome = run(side, name, unplanted)
            with self.lock:
                known[name] = outcome.text
                self.save()
            if outcome.state != PASSED:
                print(f"{name} fails without a fault: {outcome.why}", flush=True)
        return bool(known[name] == PASSED)

    def one_side(self, side: str, names: Sequence[str], root: Path, unplanted: Path) -> dict[str, str]:
        """{recipe or file of tests: its outcome}, up to the first that catches the fault."""
        done: dict[str, str] = {}
        for name in names:
            if not self.passes(side, name, unplanted):
                done[name] = NO_CATCH
                continue
            outcome = run(side, name, root)
            done[name] = outcome.text
            if outcome.state == CAUGHT:
                break
        return done

    def add(self, fault: Change, unplanted: Path, sides: Sequence[str]) -> None:
        """Plant a fault and keep what came of it; of a side that is not asked for, what was known."""
        began = time.monotonic()
        with copy(fault) as root, ThreadPoolExecutor(len(SIDES)) as pool:
            names = {"recipes": fault.recipes, "tests": fault.tests}
            running = {side: pool.submit(self.one_side, side, names[side], root, unplanted) for side in sides}
            done = {side: future.result() for side, future in running.items()}
        with self.lock:
            self.found[fault.name] = self.found.get(fault.name, {}) | done
            self.found[fault.name]["seconds"] = round(time.monotonic() - began)
            self.save()
        told = [f"{side}: {caught(done[side]) or '-'}" for side in sides]
        print(f"{fault.name:<26}{'   '.join(told)}", flush=True)

    def missing(self, fault: Change, sides: Iterable[str]) -> bool:
        return any(side not in self.found.get(fault.name, {}) for side in sides)


def caught(outcomes: dict[str, str]) -> str:
    """What caught a fault, and by what: "dapo (policy/kl.end)"; empty where nothing did."""
    for name, text in outcomes.items():
        if text.startswith(CAUGHT):
            reason = text.removeprefix(f"{CAUGHT}: ")
            test = re.search(r"::(\w+)", reason)
            short = test[1] if test else reason.partition(" is ")[0].partition(": ")[0]
            return f"{name.removeprefix('tests/')} ({short[:60]})"
    return ""


def table(found: dict[str, Any]) -> str:
    """The results as Markdown, and the counts."""
    lines = ["| fault | what is wrong | caught by recipes | by tests |", "|---|---|---|---|"]
    caught_by: list[tuple[bool, bool]] = []
    for fault in read_changes(FAULTS):
        if fault.name not in found:
            continue
        cells = [
            caught(found[fault.name][side]) or "no" if side in found[fault.name] else "not run"
            for side in SIDES
        ]
        shown = [cell.replace("|", "\\|") for cell in cells]
        lines.append(f"| {fault.name} | {fault.about} | {shown[0]} | {shown[1]} |")
        caught_by.append((cells[0] not in ("no", "not run"), cells[1] not in ("no", "not run")))
    recipes, tests = (sum(each[i] for each in caught_by) for i in range(2))
    either = sum(any(each) for each in caught_by)
    lines += [
        "",
        f"Of {len(caught_by)} faults {recipes} are caught by recipes, {tests} by tests, {either} by either, "
        f"{len(caught_by) - either} by neither.",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Count which planted faults are caught by recipes and by tests."
    )
    parser.add_argument(
        "faults", nargs="*", metavar="FAULT", help="run again; if none is named, those without a result"
    )
    parser.add_argument("--list", action="store_true", help="print the faults")
    parser.add_argument("--check", action="store_true", help="only check that they can be planted")
    parser.add_argument("--table", action="store_true", help="only print the results there are")
    parser.add_argument("--only", choices=SIDES, help="run the recipes alone, or the tests")
    parser.add_argument(
        "--budget", type=float, default=float("inf"), metavar="MINUTES", help="begin none after them"
    )
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FILE")
    parser.add_argument(
        "--commit", default=None, help="whose results --table prints; those of the working tree if not given"
    )
    arguments = parser.parse_args()
    known = {fault.name: fault for fault in read_changes(FAULTS)}
    if unknown := [name for name in arguments.faults if name not in known]:
        parser.error(f"no fault {unknown[0]!r}; --list prints them")
    faults = [known[name] for name in arguments.faults] or list(known.values())
    if arguments.list:
        print("\n".join(f"{fault.name:<26} {fault.about}" for fault in faults))
        return
    if problems := check(faults):
        sys.exit("\n".join(problems))
    if arguments.check:
        print(f"{len(faults)} faults can be planted")
        return
    count = Count(arguments.results, arguments.commit or version())
    if not arguments.table:
        sides = [arguments.only] if arguments.only else list(SIDES)
        todo = faults if arguments.faults else [fault for fault in faults if count.missing(fault, sides)]
        until = time.monotonic() + 60 * arguments.budget
        with copy(None) as unplanted:
            for fault in todo:
                if time.monotonic() > until:
                    print("the budget is used up; the same command goes on")
                    break
                count.add(fault, unplanted, sides)
    print(table(count.found))


if __name__ == "__main__":
    main()
