"""Plant each change of a fixed list in the product, alone, and see whether a test fails.

    python tests/recipes/mutants.py                     every mutant that has no result for this commit yet
    python tests/recipes/mutants.py NAME…               these alone, again
    python tests/recipes/mutants.py --budget 60         begin none after an hour; the same command goes on
    python tests/recipes/mutants.py --workers 2         two at a time
    python tests/recipes/mutants.py --check             whether every mutant can still be planted; nothing is run
    python tests/recipes/mutants.py --table             print the results that there are, and compare with the recorded
    python tests/recipes/mutants.py --record            write them to mutants.found.toml
    python tests/recipes/mutants.py --draw 40 --seed 3  print other changes, drawn by lines, as entries of mutants.toml

mutants.toml has the list. One run of the tests with a probe in each changed statement tells which of them execute it.
Those are what a mutant is tried with: first those of its own package, then the others, then those that `make test-long`
adds, which a run of their own finds.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock

from plant import ROOT, Change, copy, environment, git, read_changes, version

HERE = Path(__file__).parent
LIST, FOUND = HERE / "mutants.toml", HERE / "mutants.found.toml"
RESULTS, PROBED = ROOT / ".cache/recipes/mutants.json", ROOT / ".cache/recipes/probed.json"
PROGRAMS = ROOT / ".cache/recipes/programs"
PRODUCT = ("rlhf_core/", "plugins/")
OWN, ANY, LONG, SURVIVED = "its own package", "another's tests", "make test-long alone", "no test"
PENDING = "not by the tests of make test that execute it; others are to follow"
SHORT = "not exhaustive and not long and not launchers and not engines and not pages"
LONGER = "long and not exhaustive and not launchers and not engines and not pages"
LONGEST = 240.0
"""Seconds without a test's end after which tests are ended; a mutant that they hang with is found."""
PROBE = """
import os
_seen = set()

def hit(name):
    test = os.environ.get("PYTEST_CURRENT_TEST", "import").rpartition(" (")[0] or "import"
    if (name, test) not in _seen:
        _seen.add((name, test))
        with open(os.environ["RLHF_PROBES"], "a", encoding="utf-8") as file:
            file.write(f"{name}\\t{test}\\n")
"""
CHOSEN = """
from pathlib import Path

def pytest_collection_modifyitems(config, items):
    wanted = Path(__file__).with_name("chosen.txt").read_text(encoding="utf-8").splitlines()
    order = {test: place for place, test in enumerate(wanted)}
    places = [order.get(item.nodeid, order.get(item.nodeid.partition("::")[0])) for item in items]
    kept = sorted((place, at) for at, place in enumerate(places) if place is not None)
    config.hook.pytest_deselected(items=[item for item, place in zip(items, places) if place is None])
    items[:] = [items[at] for _, at in kept]
"""
"""A plugin of pytest that runs the tests and the files of chosen.txt, in that order."""


def line_of(mutant: Change) -> int:
    """Return the first line, from 1, that differs in a mutant's file."""
    before = (ROOT / mutant.file).read_text(encoding="utf-8").splitlines()
    after = mutant.planted().splitlines()
    same = (i for i, (old, new) in enumerate(zip(before, after, strict=False)) if old != new)
    return next(same, min(len(before), len(after))) + 1


def mutants() -> list[Change]:
    """Read the list."""
    return read_changes(LIST)


def package_tests(file: str) -> list[str]:
    """List the files of tests of a file's package: those that name its module first."""
    parts = Path(file).with_suffix("").parts
    is_plugin = parts[0] == "plugins"
    module = ".".join(parts[2:] if is_plugin else parts).removesuffix(".__init__")
    room = parts[1] if is_plugin or len(parts) > 2 else "core"
    folder = f"tests/{'plugins' if is_plugin else 'packages'}/{room}/"
    every = [name for name in git("ls-files", f"{folder}test_*.py").splitlines() if (ROOT / name).exists()]
    return sorted(every, key=lambda name: module not in (ROOT / name).read_text(encoding="utf-8"))


def files_of(tests: list[str]) -> list[str]:
    """Return the files of tests, each once."""
    return list(dict.fromkeys(test.partition("::")[0] for test in tests))


def run_tests(tests: list[str], marks: str, root: Path) -> str | None:
    """Run tests, or all of a file, in a copy of the repository until one fails; return what it says, else None."""
    files = files_of(tests)
    (root / "chosen.txt").write_text("\n".join(tests), encoding="utf-8")
    (root / "rlhf_chosen.py").write_text(CHOSEN, encoding="utf-8")
    with tempfile.TemporaryDirectory() as directory:
        command = ["-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-p", "rlhf_chosen", "-m", marks]
        # Programs are found by what they compute, so that no mutant gets another's.
        own = {**environment(root), "TMPDIR": directory, "JAX_COMPILATION_CACHE_DIR": str(PROGRAMS)}
        printed = Path(directory) / "printed.txt"
        with printed.open("w", encoding="utf-8") as file:
            process = subprocess.Popen(
                [sys.executable, *command, *files],
                cwd=root,
                env=own,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        if not ends(process, printed):
            return f"hung: no test ended in {LONGEST:.0f} s"
        out = printed.read_text(encoding="utf-8", errors="replace")
    # 5: no test has these marks.
    if process.returncode in (0, 5):
        return None
    lines = [line for line in out.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return (lines or out.splitlines()[-1:] or ["ended without a word"])[0]


def ends(process: subprocess.Popen[bytes], printed: Path) -> bool:
    """Wait for tests that print a character for each; kill them, and return False, where none is added for long."""
    size = -1
    while printed.stat().st_size > size:
        size = printed.stat().st_size
        try:
            process.wait(LONGEST)
        except subprocess.TimeoutExpired:
            continue
        return True
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return False


def try_short(mutant: Change, tests: list[str]) -> tuple[str, str]:
    """Return which of the tests of `make test` that execute a mutant's statement find it, and what the first says."""
    own_files = package_tests(mutant.file)
    own = [test for test in tests if test.partition("::")[0] in own_files]
    others = [test for test in tests if test.partition("::")[0] not in own_files]
    with copy(mutant) as root:
        for where, chosen in ((OWN, own), (ANY, others)):
            message = run_tests(chosen, SHORT, root) if chosen else None
            if message is not None:
                return where, message
    return PENDING, ""


def try_long(mutant: Change, tests: list[str]) -> tuple[str, str]:
    """Return whether the rest of `make test-long`, and of the files of these tests, finds a mutant, and what it says.

    What a fixture or a cached helper executes counts for the first test that uses it, but others of its file may fail.
    """
    short = probe(SHORT)[mutant.name]
    with copy(mutant) as root:
        for where, marks, chosen in ((ANY, SHORT, files_of(short)), (LONG, LONGER, tests)):
            message = run_tests(chosen, marks, root) if chosen else None
            if message is not None:
                return where, message
    return SURVIVED, ""


def statements(tree: ast.AST) -> Iterator[ast.stmt]:
    """Yield the statements before which another can stand."""
    for node in ast.walk(tree):
        for field in ("body", "orelse", "finalbody"):
            body = getattr(node, field, None)
            if not isinstance(body, list):
                continue
            for i, each in enumerate(body):
                is_docstring = i == 0 and isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant)
                if isinstance(each, ast.stmt) and not is_docstring:
                    yield each


def with_probes(text: str, probes: dict[str, int]) -> str:
    """Return a file's text in which each of these lines, by a mutant's name, says that it is reached."""
    lines = text.splitlines(keepends=True)
    found = list(statements(ast.parse(text)))
    inserted: list[tuple[int, str]] = []
    for name, line in probes.items():
        around = [each for each in found if each.lineno <= line <= (each.end_lineno or each.lineno)]
        # An elif is no place for a statement; nor is the rest of a line.
        around = [each for each in around if lines[each.lineno - 1][: each.col_offset].strip() == ""]
        around = [each for each in around if not lines[each.lineno - 1].lstrip().startswith("elif")]
        if not around:
            continue
        inner = max(around, key=lambda each: each.lineno)
        first = min([inner.lineno, *(each.lineno for each in getattr(inner, "decorator_list", []))])
        call = f'__import__("rlhf_probe").hit({name!r})\n'
        inserted.append((first, " " * inner.col_offset + call))
    for first, call in sorted(inserted, reverse=True):
        lines.insert(first - 1, call)
    return "".join(lines)


def probe(marks: str) -> dict[str, list[str]]:
    """Run the tests with these marks once, with probes; return, for each mutant, those that execute its statement.

    A statement that is executed where its module is imported is reached by every test: it has all files, those of its
    package first.
    """
    every: dict[str, dict[str, list[str]]] = json.loads(PROBED.read_text()) if PROBED.exists() else {}
    key = f"{version()}: {marks}"
    if key in every:
        return every[key]
    by_file: dict[str, dict[str, int]] = {}
    for mutant in mutants():
        by_file.setdefault(mutant.file, {})[mutant.name] = line_of(mutant)
    hits: dict[str, list[str]] = {mutant.name: [] for mutant in mutants()}
    with copy(None) as root, tempfile.NamedTemporaryFile("r", encoding="utf-8") as out:
        (root / "rlhf_probe.py").write_text(PROBE)
        for file, probes in by_file.items():
            (root / file).write_text(with_probes((ROOT / file).read_text(encoding="utf-8"), probes))
        command = ["-m", "pytest", "-q", "-n", "2", "--dist", "load", "-p", "no:cacheprovider", "-m", marks]
        own = {**environment(root), "RLHF_PROBES": out.name, "JAX_COMPILATION_CACHE_DIR": str(PROGRAMS)}
        subprocess.run([sys.executable, *command, "tests"], cwd=root, env=own, check=False)
        for line in out.read().splitlines():
            name, _, test = line.partition("\t")
            if name in hits and test not in hits[name]:
                hits[name].append(test)
    files = git("ls-files", "tests/*/test_*.py").splitlines()
    for mutant in mutants():
        if "import" in hits[mutant.name]:
            own_files = package_tests(mutant.file)
            hits[mutant.name] = [*own_files, *(file for file in files if file not in own_files)]
    every[key] = hits
    PROBED.parent.mkdir(parents=True, exist_ok=True)
    PROBED.write_text(json.dumps(every))
    return hits


Attempt = Callable[[Change, list[str]], tuple[str, str]]
"""A mutant and the tests that execute its statement → by whom it is found, and what the first test says."""


class Results:
    """What was found with one commit, kept in a file after every mutant."""

    def __init__(self) -> None:
        self.every = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        self.found: dict[str, list[str]] = self.every.setdefault(version(), {})
        self.lock = Lock()

    def keep(self, name: str, result: tuple[str, str]) -> None:
        with self.lock:
            self.found[name] = list(result)
            RESULTS.parent.mkdir(parents=True, exist_ok=True)
            RESULTS.write_text(json.dumps(self.every, indent=1, ensure_ascii=False))
            print(f"{name}: {result[0]}  {result[1][:100]}", flush=True)


def recorded() -> dict[str, str]:
    """Return by whom each mutant was found when that was last recorded."""
    if not FOUND.exists():
        return {}
    return dict(tomllib.loads(FOUND.read_text(encoding="utf-8")))


def table(found: dict[str, list[str]]) -> str:
    """Return how many are found by whom, and the names of those that no test finds."""
    lines = []
    for where in (OWN, ANY, LONG, SURVIVED):
        names = [name for name, (each, _) in found.items() if each == where]
        lines.append(f"{where}: {len(names)}")
        lines += [f"    {name}" for name in names if where == SURVIVED]
    before = recorded()
    lost = [
        name
        for name, (each, _) in found.items()
        if each == SURVIVED and before.get(name, SURVIVED) != SURVIVED
    ]
    lines += [f"found before, and not any more: {', '.join(lost)}"] if lost else []
    without = [each.name for each in mutants() if found.get(each.name, [PENDING])[0] == PENDING]
    lines += [f"not run yet: {len(without)}"] if without else []
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--budget", type=float, default=float("inf"), metavar="MINUTES")
    parser.add_argument("--workers", type=int, default=1, metavar="N")
    for flag in ("--check", "--table", "--record"):
        parser.add_argument(flag, action="store_true")
    parser.add_argument("--draw", type=int, metavar="N")
    parser.add_argument("--seed", type=int, default=14)
    options = parser.parse_args()
    if options.draw:
        from mutants_drawn import draw

        print(draw(options.draw, options.seed, {(each.file, each.old, each.new) for each in mutants()}))
        return
    problems = list(filter(None, (mutant.problem() for mutant in mutants())))
    if problems or options.check:
        print("\n".join(problems) or f"{len(mutants())} mutants can be planted")
        raise SystemExit(1 if problems else 0)
    results = Results()
    if options.record:
        lines = [
            f'{json.dumps(name)} = "{where}"'
            for name, (where, _) in sorted(results.found.items())
            if where != PENDING
        ]
        FOUND.write_text("\n".join(lines) + "\n", encoding="utf-8")
    if options.table or options.record:
        print(table(results.found))
        return
    until = time.monotonic() + 60 * options.budget
    chosen = [each for each in mutants() if each.name in options.names or not options.names]

    def run(attempt: Attempt, todo: list[Change], reached: dict[str, list[str]]) -> None:
        def go_on(mutant: Change) -> None:
            if time.monotonic() < until:
                results.keep(mutant.name, attempt(mutant, reached[mutant.name]))

        with ThreadPoolExecutor(options.workers) as pool:
            list(pool.map(go_on, todo))

    for attempt, marks in ((try_short, SHORT), (try_long, LONGER)):
        before = "" if marks == SHORT else PENDING
        todo = [each for each in chosen if results.found.get(each.name, [""])[0] == before]
        if marks == SHORT and options.names:
            todo = chosen
        if todo and time.monotonic() < until:
            reached = probe(marks)
            run(attempt, sorted(todo, key=lambda each: len(reached[each.name])), reached)
    print(table(results.found))


if __name__ == "__main__":
    main()
