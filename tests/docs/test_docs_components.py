"""Tables of components, and of the properties that kits check, are complete, with the options that there are."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from rlhf_distill import DIVERGENCE
from rlhf_dpo import DPO_LOSS
from rlhf_kto import KTO_LOSS

from rlhf_core import PAIRWISE_LOSS, POLICY_LOSS, Registry, installed_registry, testing
from rlhf_core.contracts import KINDS
from tests.shared import documents

REFERENCE = "docs/reference"
ROW = re.compile(r"^\| \[?`(\w+)`(?:\]\(#(\w+)\))? \| ?(.*?) ?\|.*$", re.MULTILINE)
"""The name of a component, the anchor of its section, and the next cell."""


@pytest.fixture(scope="module")
def registry() -> Registry:
    return installed_registry()


def documented(text: str, kind: Any, registry: Registry) -> dict[str, re.Match[str]]:
    found = {row[1]: row for row in ROW.finditer(text) if row[1] in registry.names(kind)}
    assert sorted(found) == registry.names(kind)
    for row in found.values():
        assert row[2] is None or re.search(rf"^##+ {row[2]}$", text, re.MULTILINE), row[1]
    return found


@pytest.mark.parametrize(
    ("page", "kind"),
    [("reward.md", PAIRWISE_LOSS), ("dpo.md", DPO_LOSS), ("kto.md", KTO_LOSS), ("distill.md", DIVERGENCE)],
    ids=["reward", "dpo", "kto", "distill"],
)
def test_the_options_of_a_table_are_those_of_the_code(
    page: str, kind: Any, repository: Path, registry: Registry
) -> None:
    """With the defaults that it names each component is what it is without options."""
    text = (repository / REFERENCE / "trainers" / page).read_text(encoding="utf-8")
    for name, row in documented(text, kind, registry).items():
        options = tomllib.loads("\n".join(re.findall(r"`(.*?)`", row[3])))
        assert sorted(options) == registry.options(kind, name), name
        assert registry.get(kind, name, **options) == registry.get(kind, name), name


def test_policy_losses_have_a_row_a_section_and_settings(repository: Path, registry: Registry) -> None:
    text = (repository / REFERENCE / "losses/policy.md").read_text(encoding="utf-8")
    blocks = [tomllib.loads(block) for block in re.findall(r"^```toml\n(.*?)^```", text, re.M | re.S)]
    shown = {table["loss"]["name"] for table in blocks if "loss" in table}
    for name, row in documented(text, POLICY_LOSS, registry).items():
        loss = registry.get(POLICY_LOSS, name)
        assert row[2] is not None
        assert f"| `{POLICY_LOSS.attribute(loss, 'aggregation')}` |" in row[0]
        assert name in shown


@pytest.mark.parametrize(
    ("name", "kind"),
    [("dpo", DPO_LOSS), ("kto", KTO_LOSS), ("distill", DIVERGENCE)],
    ids=["dpo", "kto", "distill"],
)
def test_a_readme_names_every_component(name: str, kind: Any, repository: Path, registry: Registry) -> None:
    text = (repository / "plugins" / name / "README.md").read_text(encoding="utf-8")
    assert set(registry.names(kind)) <= set(re.findall(r"^\| [\w ]+ \| `(\w+)` \|", text, re.MULTILINE))


KITS = {
    ("write_a_loss", "property"): testing.check_policy_loss,
    ("write_a_loss", "property of a pairwise loss"): testing.check_pairwise_loss,
    ("write_a_loss", "property of an advantage"): testing.check_advantage,
    ("write_a_reward", "property"): testing.check_reward,
    ("write_a_reward", "property of a logger"): testing.check_logger,
    ("write_a_trainer", "property"): testing.check_trainer,
    ("write_an_environment", "property"): testing.check_environment,
}
"""{page of docs/how-to, heading of its table: the kit that checks these}."""


@pytest.mark.parametrize(("page", "heading"), KITS)
def test_the_properties_are_the_kits(page: str, heading: str, repository: Path) -> None:
    text = (repository / f"docs/how-to/{page}.md").read_text(encoding="utf-8")
    table = text.partition(f"| {heading} | what is tried |\n")[2].partition("\n\n")[0]
    listed = re.findall(r"`([a-z ]+)`", "".join(row.split("|")[1] for row in table.splitlines()))
    said = (KITS[page, heading].__doc__ or "").partition("\n\n")[2].rpartition("\n\n")[2]
    told = [
        name
        for part in re.findall(r"(?:^|\. )\s*([a-z ,]+): ", said, re.MULTILINE)
        for name in part.split(", ")
    ]
    assert sorted(listed) == sorted(told)


@pytest.mark.parametrize(
    "page",
    [
        "README.md",
        "docs/reference/components.md",
        "docs/how-to/write_a_loss.md",
        "docs/how-to/write_a_trainer.md",
        "docs/how-to/write_a_reward.md",
    ],
)
def test_entry_points_of_pages_are_of_kinds(page: str, repository: Path) -> None:
    blocks = [text for language, text in documents.blocks(repository / page) if language == "toml"]
    groups: dict[str, dict[str, str]] = {}
    for text in blocks:
        if "entry-points" in text:
            groups |= tomllib.loads(text)["project"]["entry-points"]
    assert groups
    registry = Registry()
    for name, text in groups.pop("rlhf.kind", {}).items():
        registry.declare(name.replace("_", " "), text)
    groups.pop("rlhf", None)
    kinds = {f"rlhf.{kind.name.replace(' ', '_')}" for kind in KINDS}
    assert set(groups) <= kinds
    for group, named in groups.items():
        for name, text in named.items():
            registry.add_named(group, name, text)
