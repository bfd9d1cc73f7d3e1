"""Changes of the product's code at lines drawn by chance, written as entries of mutants.toml.

A change turns over a comparison, an operator or a condition, adds 1 to a number, leaves out a call, or cuts a message
short. Lines are drawn first, and then one of a line's changes, so that dense lines do not have more of them.
"""

from __future__ import annotations

import ast
import random
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from plant import ROOT, git

PRODUCT = ("rlhf_core/", "plugins/")
COMPARISONS = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: (" is ", " is not "),
    ast.IsNot: (" is not ", " is "),
    ast.In: (" in ", " not in "),
    ast.NotIn: (" not in ", " in "),
}
OPERATORS = {ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "/"), ast.Div: ("/", "*")}
LEFT_OUT = ("/templates/", "hatch_build.py", "plugins/verifiers/")
"""What `make test` does not run."""
SAYS = ("InputError", "RunError", "warn", "ValueError", "TypeError", "append")


class Change(NamedTuple):
    """The bytes from begin to end become `new`."""

    line: int
    begin: int
    end: int
    new: str
    is_message: bool = False


def changes(source: bytes) -> Iterator[Change]:
    """Yield every change of a file."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def span(node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset

    def between(node: ast.expr, left: ast.expr, right: ast.expr, old: str, new: str) -> Change:
        begin, end = span(left)[1], span(right)[0]
        return Change(node.lineno, begin, end, source[begin:end].decode().replace(old, new, 1))

    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in COMPARISONS:
            yield between(node, node.left, node.comparators[0], *COMPARISONS[type(node.ops[0])])
        elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            yield between(node, node.left, node.right, *OPERATORS[type(node.op)])
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float):
            value = not node.value if isinstance(node.value, bool) else node.value + 1
            yield Change(node.lineno, *span(node), repr(value))
        elif isinstance(node, ast.If | ast.IfExp | ast.While):
            begin, end = span(node.test)
            yield Change(node.test.lineno, begin, end, f"not ({source[begin:end].decode()})")
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            yield Change(node.lineno, *span(node), "pass")
        elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in SAYS and node.args:
            begin, end = span(node.args[0])
            if isinstance(node.args[0], ast.JoinedStr):
                yield Change(node.lineno, begin, end, f"({source[begin:end].decode()})[:12]", is_message=True)


def draw(count: int, seed: int, known: set[tuple[str, str, str]]) -> str:
    """Return so many changes as TOML, one of four of them of a message."""
    random_lines = random.Random(seed)
    files = [name for name in git("ls-files", "*.py").splitlines() if name.startswith(PRODUCT)]
    files = [name for name in files if not any(part in name for part in LEFT_OUT)]
    by_line: dict[bool, list[tuple[str, list[Change]]]] = {False: [], True: []}
    for name in files:
        found = list(changes((ROOT / name).read_bytes()))
        for is_message, lines in by_line.items():
            kind = [each for each in found if each.is_message == is_message]
            lines += [
                (name, [each for each in kind if each.line == line])
                for line in sorted({e.line for e in kind})
            ]
    entries: list[str] = []
    while len(entries) < count:
        name, choices = random_lines.choice(by_line[len(entries) % 4 == 3])
        source = (ROOT / name).read_bytes()
        change = random_lines.choice(choices)
        old, new = unique(source, change)
        entry = (name, old, new)
        if entry not in known:
            known.add(entry)
            entries.append(toml(f"{Path(name).stem}-{seed}-{len(entries)}", *entry))
    return "\n".join(entries)


def unique(source: bytes, change: Change) -> tuple[str, str]:
    """Return what a change replaces and by what, with as many whole lines around it as make it occur once."""
    before, after = 0, 0
    while True:
        begin = source.rfind(b"\n", 0, change.begin) + 1
        for _ in range(before):
            begin = source.rfind(b"\n", 0, begin - 1) + 1
        end = source.find(b"\n", change.end)
        for _ in range(after):
            end = source.find(b"\n", end + 1)
        old = source[begin:end]
        if source.count(old) == 1:
            new = source[begin : change.begin] + change.new.encode() + source[change.end : end]
            return old.decode(), new.decode()
        before, after = before + (before <= after), after + (before > after)


def toml(name: str, file: str, old: str, new: str) -> str:
    """Return an entry of mutants.toml."""

    def quoted(text: str) -> str:
        if "'''" not in text and "\\\n" not in text:
            return f"'''\n{text}'''"
        escaped = text.replace("\\", "\\\\").replace('"""', '""\\"')
        return f'"""\n{escaped}"""'

    return f'["{name}"]\nfile = "{file}"\nold = {quoted(old)}\nnew = {quoted(new)}\n'
