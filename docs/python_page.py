"""The page of Python names, from their signatures, docstrings and fields, for `generate.py`."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import itertools
import re
import textwrap
from collections.abc import Iterator
from typing import Any, NamedTuple

from as_markdown import WIDTH, joined, table

from rlhf_core.config import Options
from rlhf_core.contracts import Kind


class Section(NamedTuple):
    title: str
    said: str
    names: dict[str, tuple[str, ...]]
    """{module: names}; (): all of `__all__`, but for kinds."""


SECTIONS = (
    Section(
        "What components get and give",
        "The protocols that components of each kind follow are in [components](components.md).",
        {"rlhf_core": ()},
    ),
    Section(
        "Opening what a stage names",
        "",
        {
            "rlhf_core.training.open": (
                "open_model",
                "open_records",
                "warn_dropped_rows",
                "error_context",
                "try_loss",
                "open_texts",
                "open_pairs",
                "open_prompts",
                "open_rewards",
                "open_sampler",
                "require_vocabulary",
                "warm_up",
            ),
            "rlhf_core.training.updates": ("dataset_updates",),
            "rlhf_core.training.python": ("python_trainer",),
            "rlhf_core.stage.alone": ("run_alone", "Result", "trainer_arguments"),
        },
    ),
    Section("Data", "", {"rlhf_core.data": ()}),
    Section(
        "Rows and updates",
        "[Rows](../explanation/rows.md) says how they are laid out.",
        {
            "rlhf_core.packing.rows": ("Tree", "tree", "pack", "Packed"),
            "rlhf_core.fit.batches": (
                "UpdateSource",
                "Update",
                "DatasetUpdates",
                "choose_row_layout",
                "empty_batches",
                "evaluation_batches",
            ),
            "rlhf_core.fit": ("fit", "Fitted", "evaluator", "per_token"),
        },
    ),
    Section(
        "Objectives",
        "",
        {
            "rlhf_core.objective": (
                "trained_logps",
                "trained_scores",
                "trained_weight",
                "trained_sequence",
                "sequence_scores",
                "loss_output",
            ),
            "rlhf_core.metrics": ("Mean", "Sum", "Max", "Min", "Moments"),
        },
    ),
    Section(
        "Sampling and scoring",
        "[Write a trainer that samples](../how-to/write_a_trainer_that_samples.md) uses them.",
        {
            "rlhf_core.rollouts": (),
            "rlhf_core.sampling": ("Sampler", "Rollouts"),
            "rlhf_core.scoring": ("Scorer", "Contract"),
        },
    ),
    Section(
        "Running and saving",
        "",
        {
            "rlhf_core.optimizers": ("make",),
            "rlhf_core.artifacts": ("save_model",),
            "rlhf_core.contracts": ("Forecast",),
            "rlhf_core.training.forecast": ("forecast_lines",),
            "rlhf_core.training.padded": ("update_once", "evaluate_once", "batch_arrays", "named_loss"),
            "rlhf_core.errors": ("InputError", "RunError", "Stopped"),
        },
    ),
    Section("Kits", "", {"rlhf_core.testing": ()}),
)


ITEM = r"[a-z_]\w*(?:, [a-z_]\w*)*: |[a-z_]\w*\(\w+[,:)]"
"""How a line begins that explains one or more names, or a call."""


def parts() -> Iterator[str]:
    """Headings, signatures and docstrings."""
    for section in SECTIONS:
        yield f"## {section.title}"
        yield section.said
        for module, names in section.names.items():
            found = importlib.import_module(module)
            yield f"### {module}"
            for name in names or sorted(found.__all__, key=str.lower):
                thing = getattr(found, name)
                if not isinstance(thing, Kind):
                    yield from described(name, thing)


def described(name: str, thing: Any) -> Iterator[str]:
    if not (inspect.isroutine(thing) or inspect.isclass(thing)):
        return
    yield f"`{name}{signature(thing) if made_by_hand(thing) else ''}`"
    yield from docstring(thing)
    if inspect.isclass(thing):
        if rows := [(f"`{field}`", joined(said)) for field, said in fields(thing).items() if said]:
            yield table(("field", ""), rows)
        if rows := [(f"`{call}`", said) for call, said in methods(thing)]:
            yield table(("method", ""), rows)


def made_by_hand(thing: Any) -> bool:
    """Not so protocols, exceptions, and configurations, whose fields have pages of their own."""
    told_elsewhere = (Exception, Options)
    return not inspect.isclass(thing) or not (
        issubclass(thing, told_elsewhere) or getattr(thing, "_is_protocol", False)
    )


def signature(function: Any) -> str:
    """Names, kinds and whether there is a default; types and values are in the code."""
    found = inspect.signature(function)
    plain = [
        p.replace(annotation=p.empty, default=p.default if simple(p.default) else ...)
        for p in found.parameters.values()
        if p.name not in ("self", "cls")
    ]
    return str(found.replace(parameters=plain, return_annotation=found.empty)).replace("=Ellipsis", "=…")


def simple(value: Any) -> bool:
    return value is inspect.Parameter.empty or isinstance(value, bool | int | float | str | None)


def docstring(thing: Any) -> Iterator[str]:
    """Its paragraphs; those that explain names, `name: what it is`, as lists."""
    own = vars(thing).get("__doc__") if inspect.isclass(thing) else thing.__doc__
    if inspect.isclass(thing) and (own or "").startswith(f"{thing.__name__}("):
        own = None  # made up by dataclass or NamedTuple
    for number, paragraph in enumerate(inspect.cleandoc(own or "").split("\n\n")):
        items = re.split(rf"\n(?={ITEM})", paragraph)
        if not paragraph:
            continue
        if not number or not re.match(ITEM, paragraph):
            yield items.pop(0)
        if items:
            wrapped = (textwrap.fill(joined(f"- {item}"), WIDTH, subsequent_indent="  ") for item in items)
            yield "\n".join(wrapped)


def fields(cls: type) -> dict[str, str]:
    """{field: the text below it} of a dataclass, NamedTuple or protocol."""
    if not (dataclasses.is_dataclass(cls) or hasattr(cls, "_fields") or getattr(cls, "_is_protocol", False)):
        return {}
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(definition, ast.ClassDef)
    found = {}
    for field, below in itertools.pairwise(definition.body):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(below, ast.Expr)
        ):
            said = getattr(below.value, "value", None)
            found[field.target.id] = said if isinstance(said, str) else ""
    return found


def methods(cls: type) -> Iterator[tuple[str, str]]:
    """(signature, first paragraph) of its own public methods that say what they do."""
    for name, method in vars(cls).items():
        function = getattr(method, "__func__", method)
        if not name.startswith("_") and inspect.isfunction(function) and function.__doc__:
            yield name + signature(function), joined(inspect.cleandoc(function.__doc__).split("\n\n")[0])
