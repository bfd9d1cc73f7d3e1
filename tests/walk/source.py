"""What the source says of how heavy the code is to read: reach, branches, names for two things, circles, tests."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Collection, Iterator
from functools import cached_property
from pathlib import Path

PUBLIC = {
    *(
        "training",
        "rollouts",
        "fit",
        "step",
        "state",
        "objective",
        "optimizers",
        "data",
        "packing",
        "checkpoint",
    ),
    *("sampling", "scoring", "rewards", "logprobs", "models", "tokenizer", "metrics", "mesh", "artifacts"),
    *("testing", "environments", "errors", "config", "contracts", "plugins", "runs"),
}
"""Modules of rlhf_core whose names others may use; a plugin's public names are its package's."""
LIBRARIES = ("rlhf_http",)
"""Distributions that others import: each of their modules is public."""
FUNCTIONS = {"rlhf_core.config.build", "rlhf_core.rollouts.open_collector"}
"""Functions that their package exports under the name of the module that has them: to import one is no module's."""
NAMED = re.compile(r"rlhf_\w+(\.\w+)+(:\w+)?")
"""A module, or a name in one, that is written as text and imported later."""
APART = ("torture", "recipes")
"""Folders of tests that are tools of their own; their lines are counted apart."""
MOST_BRANCHES, MOST_PARAMETERS = 15, 8
Function = ast.FunctionDef | ast.AsyncFunctionDef


class Module:
    """A file of the product."""

    def __init__(self, name: str, file: Path) -> None:
        self.name, self.is_package = name, file.name == "__init__.py"
        text = file.read_text(encoding="utf-8")
        self.lines = text.count("\n")
        self.tree = ast.parse(text)

    @cached_property
    def lazy(self) -> dict[str, str]:
        """{name: what is behind it} of the names that a package resolves on first use: those it imports for types."""
        return {
            alias.asname or alias.name: f"{node.module}.{alias.name}"
            for block in ast.walk(self.tree)
            if isinstance(block, ast.If) and _is_for_types(block)
            for node in ast.walk(block)
            if isinstance(node, ast.ImportFrom) and not node.level
            for alias in node.names
        }


def _is_for_types(node: ast.If) -> bool:
    return ast.unparse(node.test).endswith("TYPE_CHECKING")


def files(root: Path) -> dict[str, Path]:
    """Find the file of every module of the product."""
    found = {}
    for top in [root / "rlhf_core", *sorted((root / "plugins").glob("*/rlhf_*"))]:
        for file in sorted(top.rglob("*.py")):
            parts = file.relative_to(top.parent).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def product(root: Path) -> dict[str, Module]:
    """Read every module of the product."""
    return {name: Module(name, file) for name, file in files(root).items()}


def figures(root: Path) -> dict[str, int]:
    """Count what is read from the source; less is better in each."""
    modules = product(root)
    graph = {name: set(imports(module, modules)) for name, module in modules.items()}
    reached = reach("rlhf_sft.train", graph)
    nodes = [node for module in modules.values() for node in ast.walk(module.tree)]
    functions = [node for node in nodes if isinstance(node, Function)]
    classes = Counter(node.name for node in nodes if isinstance(node, ast.ClassDef))
    core = sum(module.lines for name, module in modules.items() if name.startswith("rlhf_core"))
    tests = {
        file: ast.parse(file.read_text(encoding="utf-8")) for file in sorted((root / "tests").rglob("*.py"))
    }
    lines = Counter()
    for file in tests:
        apart = file.relative_to(root / "tests").parts[0] in APART
        lines["apart" if apart else "tests"] += file.read_text(encoding="utf-8").count("\n")
    return {
        "core, lines": core,
        "plugins, lines": sum(module.lines for module in modules.values()) - core,
        "tests, lines": lines["tests"],
        "torture and recipes, lines": lines["apart"],
        "reach of rlhf_sft.train, modules": len(reached),
        "reach of rlhf_sft.train, lines": sum(modules[name].lines for name in reached),
        f"functions with more than {MOST_BRANCHES} branches": sum(
            branches(each) > MOST_BRANCHES for each in functions
        ),
        f"functions with more than {MOST_PARAMETERS} parameters": sum(
            parameters(each) > MOST_PARAMETERS for each in functions
        ),
        "class names that stand for two things": sum(count > 1 for count in classes.values()),
        "walruses": sum(isinstance(node, ast.NamedExpr) for node in nodes),
        "imports of private modules in tests": sum(
            len(list(private_imports(tree, modules))) for tree in tests.values()
        ),
        "largest circle of files": max(map(len, circles(graph)), default=0),
    }


def imports(module: Module, modules: dict[str, Module]) -> Iterator[str]:
    """Yield the modules that a module imports: at its top, inside functions, by a text, and behind a lazy name."""
    todo: list[ast.AST] = [module.tree]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.If) and _is_for_types(node):
            todo += node.orelse
            continue
        todo += ast.iter_child_nodes(node)
        for name in _named(node, module, modules):
            if name in modules:
                yield name


def _named(node: ast.AST, module: Module, modules: dict[str, Module]) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = _base(node, module)
        yield base
        for alias in node.names:
            yield f"{base}.{alias.name}"
            behind = modules[base].lazy.get(alias.name, "") if base in modules else ""
            yield from (behind, behind.rpartition(".")[0])
    elif isinstance(node, ast.Constant) and isinstance(node.value, str) and NAMED.fullmatch(node.value):
        yield node.value.partition(":")[0]


def _base(node: ast.ImportFrom, module: Module) -> str:
    if not node.level:
        return node.module or ""
    parts = module.name.split(".")
    up = node.level - 1 if module.is_package else node.level
    return ".".join([*parts[: len(parts) - up], *([node.module] if node.module else [])])


def reach(start: str, graph: dict[str, set[str]]) -> set[str]:
    """Return what importing a module can import in the end; a module's packages are imported before it."""
    seen: set[str] = set()
    todo = [start]
    while todo:
        name = todo.pop()
        if name in graph and name not in seen:
            seen.add(name)
            todo += [*graph[name], name.rpartition(".")[0]]
    return seen


def branches(function: Function) -> int:
    """Count the ways that a function's text parts: 1, and one more for each condition, loop, handler and `and`."""
    total = 1
    for node in ast.walk(function):
        if isinstance(node, ast.BoolOp):
            total += len(node.values) - 1
        elif isinstance(node, ast.comprehension):
            total += 1 + len(node.ifs)
        elif isinstance(
            node, ast.If | ast.For | ast.While | ast.IfExp | ast.ExceptHandler | ast.Assert | ast.match_case
        ):
            total += 1
    return total


def parameters(function: Function) -> int:
    """Count a function's parameters."""
    arguments = function.args
    return len(arguments.posonlyargs + arguments.args + arguments.kwonlyargs)


def private_imports(tree: ast.AST, modules: Collection[str]) -> Iterator[str]:
    """Yield the modules that are not public and that are imported, as often as they are.

    modules: all modules of the product; `from PACKAGE import MODULE` imports a module, too.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            named = [name for name in names if name in modules and name not in FUNCTIONS]
            yield from filter(_is_private, named)
            if len(named) < len(names) and _is_private(str(node.module)):
                yield str(node.module)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if _is_private(alias.name))


def _is_private(module: str) -> bool:
    """Tell whether others may not import a module: below a plugin's package, or a public one of core or a library."""
    first, *rest = module.split(".")
    is_public_room = first in LIBRARIES or (first == "rlhf_core" and bool(rest) and rest[0] in PUBLIC)
    return first.startswith("rlhf_") and len(rest) > (1 if is_public_room else 0)


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the sets of files that import each other in a circle (Tarjan's strongly connected components)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []
    for root in graph:
        if root in index:
            continue
        work = [(root, iter(sorted(graph[root])))]
        index[root] = low[root] = len(index)
        stack.append(root)
        while work:
            name, rest = work[-1]
            following = next(rest, None)
            if following is None:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[name])
                if low[name] == index[name]:
                    at = stack.index(name)
                    if len(stack) - at > 1:
                        found.append(sorted(stack[at:]))
                    del stack[at:]
            elif following not in index:
                index[following] = low[following] = len(index)
                stack.append(following)
                work.append((following, iter(sorted(graph[following]))))
            elif following in stack:
                low[name] = min(low[name], index[following])
    return sorted(found, key=len, reverse=True)
