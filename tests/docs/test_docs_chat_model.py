"""docs/tutorial/chat_model.md is followed from top to bottom, and its table is of the options of an adapter."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from rlhf_sft import SFTConfig

from rlhf_core import load_model
from rlhf_core.models import fresh_model
from rlhf_core.plugins import load_file

SHARED = Path(__file__).parents[1] / "shared"
documents = load_file(SHARED / "documents.py")
cases = load_file(SHARED / "chat_cases.py")
PAGE = documents.REPOSITORY / "docs/tutorial/chat_model.md"
HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"


def smaller(text: str) -> str:
    """A file of the page with fewer updates, and fewer and shorter completions."""
    text = documents.few_updates(text)
    for field, value in (("total_batch_size", 8), ("num_generations", 4), ("max_completion_length", 6)):
        text = re.sub(rf"\b{field} = \d+", f"{field} = {value}", text)
    return re.sub(r"^THINGS = .*$", 'THINGS = ["rain"] * 9 + ["snow"]', text, flags=re.M)


@pytest.mark.long
def test_the_page_can_be_followed(tiny: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory that is called like the model on the hub comes before the hub."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    documents.on_one_device(monkeypatch)
    tokenizer = cases.byte_level(eos="<|im_end|>", pad="<|endoftext|>")
    tokenizer.chat_template = cases.CHATML
    sizes = {**tiny.SIZES, "max_position_embeddings": 512}
    fresh_model(sizes, "lm", tokenizer=tokenizer, mesh=tiny.one_device(), seed=0).save(tmp_path / HUB_NAME)
    documents.follow(PAGE, edit=smaller)
    row = tiny.read_rows(Path("runs/chat/policy/samples/evaluation-000000.jsonl"))[0]
    assert [row[side][0]["role"] for side in ("prompt", "completion")] == ["user", "assistant"]
    assert row["columns"] == {"thing": "snow", "limit": 8}
    ids, mask = np.array([[30, 90, 40, 70]]), np.ones((1, 4), int)
    names = ["runs/adapters/more/artifacts/model", "better-adapter", "better-merged", "merged"]
    first, *others = (np.asarray(load_model(name).logits(ids, mask)) for name in names)
    for other in others:
        np.testing.assert_allclose(other, first, atol=1e-5)


def test_the_table_is_of_the_options() -> None:
    page = PAGE.read_text(encoding="utf-8").partition("\n## Adapters")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| (\S+) \|", page, re.MULTILINE)
    defaults = SFTConfig(lora={}).lora.to_dict()
    assert {name for name, _ in rows} == set(defaults)
    for name, shown in rows:
        value = defaults[name]
        word = {"None": "none", "False": "false"}.get(str(value))
        assert shown == (f'"{value}"' if isinstance(value, str) else word or f"{value:g}")
