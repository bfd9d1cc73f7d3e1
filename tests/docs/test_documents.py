"""The documents that are followed from top to bottom; the others have tests of their own, and every page is in one.

Most pages end after few updates; `edit=str` leaves a page as it is.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest
from safetensors import safe_open

from rlhf_core import plugins
from rlhf_core.config import build
from rlhf_core.contracts import TRAINER
from tests.shared import documents, report_runs

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
    Page("docs/reference/runs.md"),
    Page("docs/how-to/add_a_model_family.md"),
]
ABOUT_COMPONENTS = [
    Page(
        "docs/how-to/write_a_loss.md",
        ("rlhf check pipeline.toml --plugin bounded.py --set policy.loss.kk=2.0",),
    ),
    Page("docs/how-to/write_a_reward.md"),
    Page("docs/how-to/write_a_trainer.md"),
    Page("docs/how-to/write_a_trainer_that_samples.md"),
    Page("docs/how-to/write_an_environment.md"),
]
SHOWN = {
    **{page.path: None for page in PAGES},
    "docs/how-to/write_an_environment.md": None,
    "docs/explanation/ahead.md": None,
    "docs/how-to/engines.md": None,
    "docs/reference/losses/policy.md": "grpo",
    "docs/reference/trainers/dpo.md": "dpo",
    "docs/reference/trainers/kto.md": "kto",
    "docs/reference/trainers/reward.md": "reward",
    "docs/tutorial/grpo.md": "grpo",
    "docs/tutorial/reward.md": "reward",
    "plugins/distill/README.md": "distill",
}
"""{page whose toml blocks, where they are no files, are fields of a trainer: which one, where they do not say it}."""


@pytest.fixture
def workplace(tmp_path: Path, tiny: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory with the model that pages call MODEL, rows, one device, and the repository's examples.

    What the pages import from it is forgotten again.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    documents.on_one_device(monkeypatch)
    tiny.make_model().save(tmp_path / "MODEL")
    for name, rows in (("corpus", tiny.texts(12)), ("texts", tiny.texts(8)), ("prompts", tiny.prompts(8))):
        tiny.write_rows(tmp_path / f"{name}.jsonl", rows)
    shutil.copy(REPOSITORY / "examples/make_data.py", tmp_path)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.mark.long
@pytest.mark.parametrize("page", [*PAGES, *ABOUT_COMPONENTS], ids=lambda page: Path(page.path).stem)
def test_a_page_can_be_followed(page: Page, workplace: Path) -> None:
    documents.follow(REPOSITORY / page.path, fails=page.fails)


@pytest.mark.long
def test_the_page_on_the_report_can_be_followed(workplace: Path) -> None:
    documents.follow(REPOSITORY / "docs/how-to/read_the_report.md", edit=str)
    assert Path("both.html").stat().st_size < 2_000_000
    results = report_runs.Report(Path("runs/rm/report.html")).answers["rm/results"]
    assert [chart["title"] for chart in results["charts"]] == [
        "Scores of held-out pairs, update 6, %",
        "Calibration: accuracy over confidence",
    ]
    assert results["pairs"]


@pytest.mark.long  # `tests/packages/models/test_flax_modules.py` has what it shows
def test_the_page_on_flax_can_be_followed(workplace: Path) -> None:
    documents.follow(REPOSITORY / "examples/flax/README.md")
    with safe_open("runs/small/base/artifacts/model/model.safetensors", "numpy") as file:
        assert "layers.0.query.kernel" in set(file.keys())


@pytest.mark.long
def test_the_tutorial_on_grpo_can_be_followed(workplace: Path) -> None:
    page = REPOSITORY / "docs/tutorial/grpo.md"
    documents.follow(page, compare=lambda shown, said: None)  # what it shows is of the whole run
    assert Path("runs/sort/policy/artifacts/model/config.json").is_file()


@pytest.mark.long
def test_python_of_the_page_on_policy_losses_runs() -> None:
    """The blocks have their own assertions, or fail with an exception."""
    for language, text in documents.blocks(REPOSITORY / "docs/reference/losses/policy.md"):
        if language == "python":
            documents.run_python(text)


def test_the_picture_of_policy_losses_is_small_and_without_a_date() -> None:
    text = (REPOSITORY / "docs/reference/losses/policy.svg").read_text(encoding="utf-8")
    assert len(text) < 120_000
    assert "<dc:date>" not in text


@pytest.mark.long
def test_the_tutorial_on_reward_models_prints_about_what_it_says(workplace: Path) -> None:
    shown: list[int] = []
    page = REPOSITORY / "docs/tutorial/reward.md"
    documents.follow(page, edit=str, compare=lambda text, said: shown.append(about_the_same(text, said)))
    assert sum(shown) > 30  # numbers that the page shows and the run confirms
    assert Path("runs/policy/policy/artifacts/model/rlhf_artifact.json").is_file()


NUMBER = r"[+-]?\d+\.\d+(?:e-\d+)?"
SCORES = {"margin", "mean_reward", "reward", ":"}
"""Names of numbers in reward units, which differ more from machine to machine than shares of pairs do."""


def about_the_same(shown: str, said: str) -> int:
    """Every line of the page is one of the output, whose numbers are about the same; returns how many numbers.

    A line is found by its words up to the first number that has a name, and may leave parts out at "…".
    """
    count = 0
    shown_lines, lines = ([" ".join(line.split()) for line in text.splitlines()] for text in (shown, said))
    for line in shown_lines:
        pairs = re.findall(rf"(\S+) ({NUMBER})", line)
        start = f"{line[: line.index(' '.join(pairs[0]))]}{pairs[0][0]} "
        matching = [each for each in lines if each.startswith(start)]
        assert len(matching) == 1, f"{start!r} does not begin one line of\n{said}"
        for name, value in pairs:
            (found,) = re.findall(rf"(?<!\S){re.escape(name)} ({NUMBER})", matching[0])
            near = pytest.approx(float(value), abs=0.6 if name in SCORES else 0.15)
            assert float(found) == near, f"{line}\n{matching[0]}"
            count += 1
    return count


@pytest.mark.long
@pytest.mark.parametrize(
    ("trainer", "data", "own"),
    [("dpo", "pairs", "anchored/likelihood"), ("kto", "labels", "bounded/floored")],
    ids=["dpo", "kto"],
)
def test_a_page_on_a_preference_trainer_can_be_followed(
    trainer: str, data: str, own: str, workplace: Path, tiny: ModuleType
) -> None:
    tiny.make_model(scale=4.0).save("base")
    for name, rows in ((data, tiny.pairs(16)), ("heldout", tiny.pairs(6, seed=1))):
        if trainer == "kto":
            rows = [
                {"prompt": row["prompt"], "completion": row[side], "label": side == "chosen"}
                for row in rows
                for side in ("chosen", "rejected")
            ]
        tiny.write_rows(Path(f"{name}.jsonl"), rows)
    documents.follow(REPOSITORY / f"docs/reference/trainers/{trainer}.md", edit=str)
    plain, changed = (
        tiny.read_rows(Path(f"runs/{run}/policy/metrics.jsonl")) for run in (data, own.partition("/")[0])
    )
    assert [row["step"] for row in plain if "eval_loss" in row] == [2, 4]
    assert own not in plain[-1]
    assert np.isfinite(changed[-1][f"eval_{own}"])


@pytest.mark.long
def test_the_page_on_online_dpo_can_be_followed(workplace: Path, tiny: ModuleType) -> None:
    tiny.make_model(scale=4.0).save("base")
    tiny.write_rows(Path("heldout.jsonl"), tiny.prompts(6, seed=1))
    documents.follow(REPOSITORY / "docs/reference/trainers/online_dpo.md", edit=str)
    rows = tiny.read_rows(Path("runs/ipo/policy/metrics.jsonl"))
    assert [row["step"] for row in rows if "eval_reward" in row] == [2, 4]


SMALL = {
    "total_batch_size = 128": "total_batch_size = 8",
    "max_completion_length = 256": "max_completion_length = 4",
}


@pytest.mark.long
@pytest.mark.parametrize(
    "page",
    [
        "docs/reference/trainers/sft.md",
        "docs/reference/trainers/reward.md",
        "docs/reference/trainers/grpo.md",
    ],
    ids=lambda page: Path(page).stem,
)
def test_the_stage_of_a_trainers_page_runs(page: str, workplace: Path, tiny: ModuleType) -> None:
    """As it stands, with one small update."""
    documents.write_what_pages_name(tiny)
    blocks = documents.blocks(REPOSITORY / page)
    text = next(text for language, text in blocks if language == "toml")
    for large, small in SMALL.items():
        text = text.replace(large, small)
    Path("pipeline.toml").write_text(f'dir = "runs"\n{text}max_training_steps = 1\n')
    ended = documents.rlhf(["run", "pipeline.toml"])
    assert ended.code == 0, ended.said


@pytest.mark.long
def test_the_notebook_can_be_followed(workplace: Path) -> None:
    """Its cells, with few updates, and its shell commands."""
    cells = json.loads((REPOSITORY / "examples/first_steps.ipynb").read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] for cell in code), "clear its outputs"
    settings, *rest = ("".join(cell["source"]) for cell in code)
    names: dict[str, Any] = {"__name__": "__main__"}
    for source in (re.sub(r": \d+", ": 2", settings), *rest):
        if source.startswith("!"):
            ended = documents.type_in(source.removeprefix("!"))
            assert ended.code == 0, ended.said
        else:
            exec(compile(source, "first_steps.ipynb", "exec", dont_inherit=True), names)
    assert 0 <= names["policy"].metrics["reward"] <= 1
    assert len(names["rows"]) >= 1


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


def test_docs_are_few() -> None:
    assert len(list((REPOSITORY / "docs").rglob("*.md"))) <= 49


@pytest.mark.parametrize("page", EVERY, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_links_lead_to_files_and_anchors_to_headings(page: Path) -> None:
    for target in documents.links(page):
        assert (page.parent / target).exists(), f"{page.relative_to(REPOSITORY)} links to {target}"
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
    documents.write_what_pages_name(tiny)
    lines = [line for language, text in blocks if language == "console" for line in documents.commands(text)]
    typed = [
        line for line in lines if line.startswith("rlhf ") and "--dir" not in line and line != "rlhf demo"
    ]
    assert len(typed) >= 6
    for line in typed:
        ended = documents.type_in(line)
        assert ended.code == 0, f"{line}\n{ended.said}"
