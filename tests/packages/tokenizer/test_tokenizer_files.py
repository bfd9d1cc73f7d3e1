"""Untrusted tokenizer files: none of their code is run, and any defect raises a single InputError."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlhf_core import data
from rlhf_core.errors import InputError
from rlhf_core.models import load_model
from rlhf_core.tokenizer import Encoder, load_tokenizer, special_ids, template_hash, tokenizer_hash
from tests.shared import chat_cases as chat

TURNS = [chat.user("a b"), chat.assistant("b")]
CODE = "from pathlib import Path\nPath({marker!r}).touch()\nclass Evil: pass\nclass EvilConfig: pass\n"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    tokenizer = chat.byte_level(bos="<s>", eos="<|im_end|>", pad="<|endoftext|>")
    tokenizer.chat_template = {"default": chat.CHATML, "tool_use": chat.TOOLS}
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "tokenizer" / "generation_config.json").write_text('{"eos_token_id": [1, 5]}')
    return tmp_path / "tokenizer"


def use(directory: Path) -> None:
    """Use a tokenizer in all the ways the entry points do."""
    tokenizer = load_tokenizer(directory)
    encoder = Encoder(tokenizer)
    encoder.whole([None], ["a b"])
    special_ids(tokenizer)
    tokenizer_hash(tokenizer)
    template_hash(tokenizer)
    rows = [{"prompt": TURNS[:1], "chosen": TURNS[1:], "rejected": [chat.assistant("a")]}]
    data.encode_pairs(data.load(rows), tokenizer, max_length=None)
    data.encode_prompts(data.load([{"prompt": "a"}]), tokenizer, max_prompt_length=None)


def edit(path: Path, change: Callable[[Any], Any]) -> None:
    path.write_text(json.dumps(change(json.loads(path.read_text()))))


@pytest.mark.parametrize("model_type", ["llama", "evil"])
@pytest.mark.parametrize("fast", [True, False])
def test_code_beside_a_tokenizer_is_never_run(
    fast: bool,
    model_type: str,
    tiny: Any,
    tmp_path: Path,
    rlhf: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path, marker = tmp_path / "model", tmp_path / "was_run"
    model = tiny.make_model("lm")
    model.save(path)
    (path / "evil.py").write_text(CODE.format(marker=str(marker)))
    named = {"AutoTokenizer": ["evil.Evil", "evil.Evil"], "AutoConfig": "evil.EvilConfig"}
    edit(path / "tokenizer_config.json", lambda c: {**c, "tokenizer_class": "Evil", "auto_map": named})
    edit(path / "config.json", lambda c: {**c, "model_type": model_type, "auto_map": named})
    if not fast:
        (path / "tokenizer.json").unlink()
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 100))
    rows = str(tiny.write_rows(tmp_path / "rows.jsonl", [{"prompt": "a", "completion": "b"}]))
    out = ["--dir", str(tmp_path / "run"), "--max_training_steps", "1"]
    doors = (
        ["data", rows, "--tokenizer", str(path)],
        ["data", rows, "--model", str(path)],
        ["generate", str(path), "--prompt", "a", "--max_completion_length", "1"],
        ["score", str(path), rows],
        ["export", str(path), str(tmp_path / "out")],
        ["train", "sft", "--model", str(path), "--train_data", rows, *out],
        ["train", "grpo", "--model", str(path), "--train_data", rows, "--rewards", '["length"]', *out],
    )
    wrong = model_type == "evil"
    for door in doors if wrong else doors[:2]:
        ended = rlhf(*door)
        assert ended.code in (0, 2), (door, ended)
    for load in (load_tokenizer, load_model):
        with contextlib.suppress(InputError):
            load(path)
    assert not marker.exists()


ODD: list[Any] = [
    None,
    True,
    -1,
    2**70,
    1.5,
    "",
    "x",
    "\ud800",
    [],
    {},
    [[]],
    {"a": {}},
    "{%",
    "{{ a.b.c() }}",
]


def mutate(value: Any, draw: random.Random) -> Any:
    """Replace, delete or multiply one place of a JSON value."""
    value = copy.deepcopy(value)
    parent, key, at = None, None, value
    for _ in range(draw.randint(1, 6)):
        if isinstance(at, dict) and at:
            parent, key = at, draw.choice(list(at))
        elif isinstance(at, list) and at:
            parent, key = at, draw.randrange(len(at))
        else:
            break
        at = parent[key]
    if parent is None:
        return draw.choice(ODD)
    if draw.random() < 0.2:
        del parent[key]
    elif draw.random() < 0.1:
        for _ in range(5000):
            at = [at]
        parent[key] = at
    else:
        parent[key] = draw.choice(ODD)
    return value


@pytest.mark.parametrize("seed", range(4))
def test_damaged_files_are_one_message_or_work(seed: int, directory: Path, tmp_path: Path) -> None:
    draw = random.Random(seed)
    refused = 0
    for number in range(25):
        path = tmp_path / str(number)
        shutil.copytree(directory, path)
        file = draw.choice([each for each in path.rglob("*") if each.is_file()])
        content = file.read_bytes()
        if file.suffix == ".json" and draw.random() < 0.7:
            nested = mutate(json.loads(content), draw)
            content = _dumps(nested).encode("utf-8", "surrogatepass")
        else:
            at = draw.randrange(len(content))
            content = content[:at] + bytes([draw.randrange(256)]) + content[at + draw.randint(0, 40) :]
        file.write_bytes(content)
        try:
            use(path)
        except InputError:
            refused += 1
        shutil.rmtree(path)
    assert 2 < refused < 25


def _dumps(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except RecursionError:
        return '{"a":' + "[" * 5000 + "]" * 5000 + "}"


@pytest.mark.parametrize("command", ["score", "generate"])
@pytest.mark.parametrize("column", ["prompt", "completion", "id"])
def test_an_unpaired_surrogate_in_any_column_is_reported_before_anything_is_computed(
    column: str,
    command: str,
    tiny: Any,
    tmp_path: Path,
    rlhf: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows, cut = tmp_path / "rows.jsonl", '"a\\ud83d"'
    fine = {"prompt": '"a"', "completion": '"b"', "id": "1"}
    rows.write_text("".join(
        "{" + ", ".join(f'"{name}": {value}' for name, value in row.items()) + "}\n"
        for row in (fine, {**fine, column: cut})
    ))  # fmt: skip
    tiny.make_model("score" if command == "score" else "lm").save(tmp_path / "model")
    monkeypatch.setattr("rlhf_core.models.loading.load_model", lambda *_, **__: pytest.fail("computed"))
    ended = rlhf(command, str(tmp_path / "model"), str(rows))
    assert ended.code == 2
    assert re.search(rf"row 2: '{column}' is not valid Unicode: .*; remove it", ended.message)


def same_as_auto_tokenizer(directory: Path) -> None:
    from transformers import AutoTokenizer

    ours, theirs = load_tokenizer(directory), AutoTokenizer.from_pretrained(directory)
    assert type(ours) is type(theirs)
    assert ours.backend_tokenizer.to_str() == theirs.backend_tokenizer.to_str()
    left_out = ("_tokenizer",)
    mine, their_own = (
        {k: repr(v) for k, v in vars(each).items() if k not in left_out} for each in (ours, theirs)
    )
    assert mine == their_own


@pytest.mark.parametrize(
    "named", ["PreTrainedTokenizerFast", "TokenizersBackend", "LlamaTokenizerFast", None]
)
@pytest.mark.parametrize("name", list(chat.cases()))
def test_a_tokenizer_without_a_model_is_loaded_as_by_auto_tokenizer(
    name: str, named: str | None, tmp_path: Path
) -> None:
    chat.cases()[name].tokenizer.save_pretrained(tmp_path)
    config = tmp_path / "tokenizer_config.json"
    edit(config, lambda content: {**content, "tokenizer_class": named} if named else content)
    same_as_auto_tokenizer(tmp_path)


@pytest.mark.data
@pytest.mark.parametrize("name", ["tokenizers/chatml_bpe_2k", "models/stories260K"])
def test_tokenizers_of_the_shared_data_are_loaded_as_by_auto_tokenizer(shared: Path, name: str) -> None:
    same_as_auto_tokenizer(shared / "data" / name)
