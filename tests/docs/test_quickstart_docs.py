"""The code blocks of the documents: pipelines are planned, Python is run."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.shared import documents

DOCUMENTS = (
    "README.md",
    "plugins/sft/README.md",
    "plugins/reward/README.md",
    "plugins/grpo/README.md",
    "plugins/dpo/README.md",
    "plugins/kto/README.md",
    "plugins/kernels/README.md",
    "plugins/suite/README.md",
    "plugins/trackers/README.md",
    "docs/tutorial/first_run.md",
    "examples/plugins/rlhf-tanh-loss/README.md",
)
REPOSITORY = documents.REPOSITORY


def blocks(wanted: str) -> list[Any]:
    return [
        pytest.param(text, id=f"{document}-{index}")
        for document in DOCUMENTS
        for index, (language, text) in enumerate(documents.blocks(REPOSITORY / document))
        if language == wanted
    ]


@pytest.fixture(scope="module")
def workplace(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory where everything is that the documents name."""
    directory: Path = tmp_path_factory.mktemp("documents")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        documents.write_what_pages_name(tiny)
    labelled = [{**row, "label": i % 2} for i, row in enumerate(tiny.texts(16))]
    for name in ("labels", "labels.heldout"):
        tiny.write_rows(directory / f"{name}.jsonl", labelled)
    tiny.make_model("score").save(directory / "path/to/reward_model")
    tiny.make_model().save(directory / "runs/quickstart-seed0/base/artifacts/model")
    return directory


@pytest.mark.parametrize("block", blocks("toml"))
def test_pipelines_in_documents_can_be_checked(
    block: str, workplace: Path, rlhf: Any, tmp_path: Path
) -> None:
    table = tomllib.loads(block)
    if "stage" not in table:  # a line or two that belong into a stage
        return
    file = workplace / "pipeline.toml"
    file.write_text(block if "dir" in table else f'dir = "runs/first"\n{block}')
    ended = rlhf("check", str(file), "--dir", str(tmp_path / "run"))
    assert ended.code == 0, ended.message
    assert all(stage["name"] in ended.out for stage in table["stage"])


@pytest.mark.long
@pytest.mark.parametrize("block", blocks("python"))
def test_python_in_documents_runs(block: str, workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(workplace)
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(block, "document", "exec", dont_inherit=True), names)
    if "result" in names:
        assert (names["result"].artifact.path / "config.json").is_file()
    else:
        from rlhf_core import POLICY_LOSS, Registry

        registry = Registry()
        registry.add(POLICY_LOSS, "tanh", names["Tanh"])
        assert registry.get(POLICY_LOSS, "tanh", temperature=2.0) == names["Tanh"](2.0)


def test_commands_in_documents_exist(rlhf: Any) -> None:
    known = set(re.findall(r"^[^\w\n]*(\w+)  ", rlhf("--help").out, re.MULTILINE))
    others = [
        "docs/index.md",
        "docs/how-to/real-data.md",
        "docs/tutorial/grpo.md",
        "CONTRIBUTING.md",
        "CHANGELOG.md",
    ]
    others += [str(page.relative_to(REPOSITORY)) for page in (REPOSITORY / "docs/reference").glob("*/*.md")]
    for document in (*DOCUMENTS, *others):
        text = (REPOSITORY / document).read_text(encoding="utf-8")
        used = set(re.findall(r"(?:`|^\$ )rlhf (\w[\w |]*?)(?=[ `\n])", text, re.MULTILINE))
        for command in {word for words in used for word in words.split(" | ")}:
            assert command.split()[0] in known, f"{document}: rlhf {command}"
