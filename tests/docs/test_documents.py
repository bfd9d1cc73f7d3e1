"""The documents that are followed from top to bottom; the others have tests of their own, and every page is in one."""

from __future__ import annotations

import re
import shutil
import tomllib
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest

from rlhf_core import plugins
from rlhf_core.config import build
from rlhf_core.contracts import TRAINER
from tests.shared import documents

REPOSITORY: Path = documents.REPOSITORY
EVERY = sorted(
    [*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/**/*.md"), *REPOSITORY.glob("plugins/*/README.md")]
)


class Page(NamedTuple):
    """fails: commands that are meant to end with exit code 2, the first time that they are typed."""

    path: str
    fails: tuple[str, ...] = ()


PAGES = [
    Page("docs/tutorial/your_own_data.md", fails=("rlhf data shop.csv",)),
    Page("docs/tutorial/from_easydel.md"),
    Page("docs/tutorial/chaining.md", fails=("rlhf run chain.toml --set policy.kl.beta=0.1",)),
    Page("docs/explanation/update.md"),
    Page("docs/how-to/add_a_model_family.md"),
]
SHOWN = {
    **{page.path: None for page in PAGES},
    "docs/how-to/write_an_environment.md": None,
    "docs/explanation/ahead.md": None,
    "docs/how-to/engines.md": None,
    "docs/reference/losses/policy.md": "grpo",
    "docs/reference/trainers/dpo.md": "dpo",
    "docs/reference/trainers/reward.md": "reward",
    "docs/tutorial/grpo.md": "grpo",
    "docs/tutorial/reward.md": "reward",
    "plugins/distill/README.md": "distill",
}
"""{page whose toml blocks, where they are no files, are fields of a trainer: which one, where they do not say it}."""


@pytest.fixture
def workplace(tmp_path: Path, tiny: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with the model that pages call MODEL, one device, and the repository's examples."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    documents.on_one_device(monkeypatch)
    tiny.make_model().save(tmp_path / "MODEL")
    shutil.copy(REPOSITORY / "examples/make_data.py", tmp_path)
    return tmp_path


@pytest.mark.long
@pytest.mark.parametrize("page", PAGES, ids=lambda page: Path(page.path).stem)
def test_a_page_can_be_followed(page: Page, workplace: Path) -> None:
    documents.follow(REPOSITORY / page.path, fails=page.fails)


@pytest.mark.parametrize("page", SHOWN)
def test_fields_that_a_page_shows_are_those_of_a_trainer(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unknown fields would be an error; functions of files that the page writes are there."""
    monkeypatch.chdir(tmp_path)
    for _, text in documents.blocks(REPOSITORY / page):
        if (documents.named(text) or "").endswith(".py"):
            Path(documents.named(text)).write_text(text)
    registry = plugins.load().registry
    configs = {name: registry.get(TRAINER, name).config for name in registry.names(TRAINER)}
    tables = documents.stage_tables(REPOSITORY / page)
    assert tables or SHOWN[page] is None
    for table in tables:
        for stage in table.get("stage", [table]):
            fields = {key: value for key, value in stage.items() if key not in ("name", "trainer")}
            fitting = [name for name, config in configs.items() if set(fields) <= set(config.names())]
            config = configs[stage.get("trainer") or SHOWN[page] or fitting[0]]
            build(config, fields, where=page, registry=registry)


@pytest.mark.parametrize("page", EVERY, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in documents.links(page):
        assert (page.parent / target).exists(), f"{page.relative_to(REPOSITORY)} links to {target}"


def test_docs_are_few() -> None:
    assert len(list((REPOSITORY / "docs").rglob("*.md"))) <= 46


@pytest.mark.parametrize("page", EVERY, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_anchors_are_headings(page: Path) -> None:
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#([^)]+)\)", page.read_text(encoding="utf-8")):
        text = (
            (page.parent / target).read_text(encoding="utf-8") if target else page.read_text(encoding="utf-8")
        )
        headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
        known = [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]
        assert anchor in known, f"{page.relative_to(REPOSITORY)} links to {target}#{anchor}"


def test_files_that_the_architecture_names_are_there() -> None:
    text = (REPOSITORY / "docs/explanation/architecture.md").read_text(encoding="utf-8")
    places = [REPOSITORY / "rlhf_core", *REPOSITORY.glob("plugins/*")]
    named = re.findall(r"`((?:rlhf_)?[\w/]+(?:\.py|/))`", text)
    assert len(named) > 60
    assert [name for name in named if not any((place / name).exists() for place in places)] == []


def test_the_rooms_and_layers_of_the_architecture_are_the_code_s() -> None:
    text = (REPOSITORY / "docs/explanation/architecture.md").read_text(encoding="utf-8")
    rooms, layers = text.partition("## Layers")[0], text.partition("```text\n")[2].partition("```")[0]
    core = REPOSITORY / "rlhf_core"
    there = {path.name for path in core.iterdir() if path.suffix == ".py"}
    there |= {f"{path.name}/" for path in core.iterdir() if (path / "__init__.py").exists()}
    cells = "\n".join(re.findall(r"^\| (`.*?`) \|", rooms, re.MULTILINE))
    assert set(re.findall(r"`(\w+(?:\.py|/))`", cells)) == there
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = project["tool"]["importlinter"]["contracts"]
    (linted,) = [contract["layers"] for contract in contracts if contract["type"] == "layers"]
    assert layers.splitlines() == linted


def test_every_page_with_code_is_in_a_test() -> None:
    tests = {path: path.read_text(encoding="utf-8") for path in REPOSITORY.glob("tests/**/test_*.py")}
    for page in EVERY:
        if any(language in documents.EXECUTED for language, _ in documents.blocks(page)):
            name = str(page.relative_to(REPOSITORY))
            known = (name, f'"{Path(name).parent}").glob("*.md")')
            assert any(each in text for text in tests.values() for each in known), f"no test reads {name}"


@pytest.mark.long
def test_the_commands_of_the_readme_run(workplace: Path, tiny: ModuleType) -> None:
    """Its pipeline with an update a stage, and every command on it."""
    blocks = documents.blocks(REPOSITORY / "README.md")
    (pipeline,) = [text for language, text in blocks if language == "toml" and "[[stage]]" in text]
    small = re.sub(r"^(trainer = .*)$", r"\1\nmax_training_steps = 1", pipeline, flags=re.M)
    Path("pipeline.toml").write_text(small.replace("= 128 ", "= 16 ").replace("= 256", "= 8"))
    Path("path/to").mkdir(parents=True)
    Path("MODEL").rename("path/to/model")
    makers = {"corpus": tiny.texts, "pairs": tiny.pairs, "pairs.heldout": tiny.pairs, "prompts": tiny.prompts}
    for name, rows in makers.items():
        tiny.write_rows(Path(f"{name}.jsonl"), rows(8))
    Path("my_rewards.py").write_text(
        "def brevity(completions, **columns):\n    return [-len(text) / 9 for text in completions]\n"
    )
    lines = [line for language, text in blocks if language == "console" for line in documents.commands(text)]
    typed = [
        line for line in lines if line.startswith("rlhf ") and "--dir" not in line and line != "rlhf demo"
    ]
    assert len(typed) >= 6
    for line in typed:
        ended = documents.type_in(line)
        assert ended.code == 0, f"{line}\n{ended.said}"
