"""The code blocks of the documents: pipelines are planned, Python is run."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

DOCUMENTS = (
    "README.md",
    "plugins/sft/README.md",
    "plugins/reward/README.md",
    "plugins/grpo/README.md",
    "plugins/suite/README.md",
    "plugins/trackers/README.md",
    "docs/tutorial/first_run.md",
    "examples/plugins/rlhf-tanh-loss/README.md",
)
REPLY = " Dear Mia , here is your red kite . Thank you !"
ROWS = {
    "corpus.jsonl": {"prompt": "Mia wants a red kite .", "completion": REPLY},
    "pairs.jsonl": {"prompt": "Mia wants a red kite .", "chosen": REPLY, "rejected": " Not my problem ."},
    "pairs.heldout.jsonl": {"prompt": "Mia wants a red kite .", "chosen": REPLY, "rejected": " Dear Mia"},
    "prompts.jsonl": {"prompt": "Mia wants a red kite ."},
}


def blocks(repository: Path, language: str) -> list[Any]:
    found = []
    for document in DOCUMENTS:
        text = (repository / document).read_text(encoding="utf-8")
        for index, block in enumerate(
            re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
        ):
            found.append(pytest.param(block, id=f"{document}-{index}"))
    return found


REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def workplace(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory where everything is that the documents name: small, but the real thing."""
    from rlhf_core.models import fresh_model

    directory = tmp_path_factory.mktemp("documents")
    table = {"model_type": "llama", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    table |= {"intermediate_size": 24, "max_position_embeddings": 64}
    tokenizer = tiny.make_tokenizer()
    for place, head in (
        ("path/to/model", "lm"),
        ("path/to/reward_model", "score"),
        ("runs/quickstart-seed0/base/artifacts/model", "lm"),
    ):
        fresh_model(table, head, tokenizer=tokenizer).save(directory / place)  # type: ignore[arg-type]
    for name, row in ROWS.items():
        (directory / name).write_text(json.dumps(row) + "\n")
    (directory / "my_rewards.py").write_text(
        "def brevity(completions, **columns):\n    return [-float(len(text)) for text in completions]\n"
    )
    return directory


@pytest.mark.parametrize("block", blocks(REPOSITORY, "toml"))
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
@pytest.mark.parametrize("block", blocks(REPOSITORY, "python"))
def test_python_in_documents_runs(block: str, workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(workplace)
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(block, "document", "exec", dont_inherit=True), names)
    if "result" in names:
        assert (names["result"].artifact.path / "config.json").is_file()
    else:
        from rlhf_core import POLICY_LOSS, Registry

        registry = Registry()
        names["rlhf_register"](registry)
        assert registry.names(POLICY_LOSS) == ["tanh"]


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
