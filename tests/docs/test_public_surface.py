"""Nothing that packages of others rely on changes unnoticed, and our own trainers use nothing else."""

from __future__ import annotations

import difflib
from typing import Any

import pytest

from tests.shared import public_surface as public


def test_the_surface_is_that_of_the_snapshot() -> None:
    before, now = public.FILE.read_text(encoding="utf-8"), public.surface()
    changes = [
        line
        for line in difflib.unified_diff(before.splitlines(), now.splitlines(), lineterm="", n=0)
        if line[:1] in "+-" and line[:3] not in ("+++", "---")
    ]
    assert not changes, (
        "\n".join(changes)
        + "\nThe public surface changed. A line that is gone or altered breaks packages of others: "
        "see CONTRIBUTING.md, Compatibility. If it is meant, run python tests/shared/public_surface.py"
    )


@pytest.mark.parametrize(
    ("authors", "promised"),
    [(public.AUTHORS, public.promised), (public.MODEL_AUTHORS, public.promised_to_model_authors)],
    ids=["trainers", "models"],
)
def test_ours_use_public_names_alone(authors: tuple[str, ...], promised: Any) -> None:
    """Ours, the examples and what `rlhf new` writes: a stranger's trainer, or family, can do what they do."""
    promised = promised()
    modules = {f"rlhf_core.{name}" for name in public.MODULES.split()}
    private = [
        f"{module}.{name}"
        for module, name in public.imported(authors)
        if name not in promised.get(module, ()) and f"{module}.{name}" not in modules
    ]
    assert not private, f"not public: {', '.join(sorted(set(private)))}"


def test_few_names_are_promised_besides_those_of_the_root() -> None:
    """What a trainer's author has to know: a name more needs a reason, and better one that goes."""
    names = {
        f"{module}.{name}"
        for module, names in public.promised().items()
        if module.startswith("rlhf_core.") and module != "rlhf_core.testing"
        for name in names
    }
    assert len(names) <= 75, f"{len(names)}: {', '.join(sorted(names))}"


def test_a_change_would_be_noticed(monkeypatch: Any) -> None:
    from rlhf_core import fit

    before = public.surface()
    assert "rlhf_core.fit.fit(stage, config, build)" in before
    assert "rlhf_core.testing.check_policy_loss(loss)" in before
    assert "hook rlhf_step_end(stage, step, metrics)" in before
    monkeypatch.setattr(fit, "fit", lambda stage: None)
    assert "rlhf_core.fit.fit(stage)\n" in public.surface()
