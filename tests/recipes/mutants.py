"""Change the product's code at places drawn by chance, one at a time, and print which changes no test notices.

    python tests/recipes/mutants.py                        30 changes drawn with seed 14
    python tests/recipes/mutants.py --count 5 --seed 3     other ones
    python tests/recipes/mutants.py --only rlhf_core/data  drawn from these files alone
    python tests/recipes/mutants.py --budget 60            begin none after an hour
    python tests/recipes/mutants.py --list                 print what would be changed; nothing is run

A change turns over a comparison, an operator or a condition, adds 1 to a number, or leaves out a call. The files of
tests that name its module, then the others of its room, are run in a copy of the tracked files until one fails: first
their tests that `make test` runs, then those that `make test-long` adds.
"""

from __future__ import annotations

import argparse
import ast
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from plant import CAUGHT, ROOT, copy, git, run

PRODUCT = ("rlhf_core/", "plugins/")
COMPARISONS = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
}
OPERATORS = {ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "/"), ast.Div: ("/", "*")}


MARKS = {
    "make test": "not exhaustive and not long and not launchers",
    "make test-long alone": "long and not exhaustive",
}
"""Which tests a target runs."""


class Mutant(NamedTuple):
    """A change. begin, end: of the bytes that `new` replaces in `file`."""

    file: str
    line: int
    begin: int
    end: int
    new: str

    def text(self) -> bytes:
        """Return the file with the change."""
        whole = (ROOT / self.file).read_bytes()
        return whole[: self.begin] + self.new.encode() + whole[self.end :]

    def __str__(self) -> str:
        old = (ROOT / self.file).read_bytes()[self.begin : self.end].decode()
        return f"{self.file}:{self.line}: {' '.join(old.split())} → {' '.join(self.new.split())}"


def mutants(file: str) -> Iterator[Mutant]:
    """Yield every change of a file."""
    source = (ROOT / file).read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def span(node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset

    def change(node: ast.expr | ast.stmt, begin: int, end: int, new: str) -> Mutant:
        return Mutant(file, node.lineno, begin, end, new)

    def between(node: ast.expr, left: ast.expr, right: ast.expr, old: str, new: str) -> Mutant:
        begin, end = span(left)[1], span(right)[0]
        return change(node, begin, end, source[begin:end].decode().replace(old, new, 1))

    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in COMPARISONS:
            yield between(node, node.left, node.comparators[0], *COMPARISONS[type(node.ops[0])])
        elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            yield between(node, node.left, node.right, *OPERATORS[type(node.op)])
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float):
            value = not node.value if isinstance(node.value, bool) else node.value + 1
            yield change(node, *span(node), repr(value))
        elif isinstance(node, ast.If | ast.IfExp | ast.While):
            begin, end = span(node.test)
            yield change(node.test, begin, end, f"not ({source[begin:end].decode()})")
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            yield change(node, *span(node), "pass")


def tests_of(file: str) -> list[str]:
    """List the files of tests that reach a file: those that name its module, then the others of its room."""
    parts = Path(file).with_suffix("").parts
    plugin = parts[0] == "plugins"
    module = ".".join(parts[2:] if plugin else parts).removesuffix(".__init__")
    room = parts[1] if plugin or len(parts) > 2 else "core"
    every = [name for name in git("ls-files", "tests/*/test_*.py").splitlines() if (ROOT / name).exists()]
    naming = [name for name in every if module in (ROOT / name).read_text(encoding="utf-8")]
    rest = [name for name in every if name.startswith(f"tests/{room}/") and name not in naming]
    return sorted(naming, key=lambda name: not name.startswith(f"tests/{room}/")) + rest


def try_out(mutant: Mutant) -> str:
    """Run tests with the change until one fails, those of `make test-long` last; return which."""
    with copy(None) as root:
        (root / mutant.file).write_bytes(mutant.text())
        for target, marks in MARKS.items():
            for name in tests_of(mutant.file):
                outcome = run("tests", name, root, marks=marks)
                if outcome.state == CAUGHT:
                    return f"caught by {target}, {name}: {outcome.why}"
    return "SURVIVED"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=30, metavar="N")
    parser.add_argument("--seed", type=int, default=14)
    parser.add_argument("--only", nargs="*", default=PRODUCT, metavar="PATH")
    parser.add_argument("--budget", type=float, default=float("inf"), metavar="MINUTES")
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args()
    files = [name for name in git("ls-files", "*.py").splitlines() if name.startswith(tuple(options.only))]
    drawn = [mutant for name in files if name.startswith(PRODUCT) for mutant in mutants(name)]
    drawn = random.Random(options.seed).sample(drawn, min(options.count, len(drawn)))
    until = time.monotonic() + 60 * options.budget
    for mutant in drawn:
        if time.monotonic() > until:
            break
        print(mutant, "" if options.list else f"— {try_out(mutant)}", flush=True)


if __name__ == "__main__":
    main()
