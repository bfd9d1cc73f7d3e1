"""Weight files and config.json that are damaged or absurd: one message each, before anything is allocated."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.errors import InputError
from rlhf_core.models import check_model, load_model
from rlhf_core.training import definition_of


def entry(begin: Any, end: Any, shape: Any = (1,), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


HEADERS: dict[str, Any] = {
    "overlap": {"a": entry(0, 4), "b": entry(0, 4), "c": entry(4, 8)},
    "bytes after the last": {"a": entry(0, 4)},
    "nested": b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "a dtype of no library": {"a": entry(0, 8, [2], "Q8")},
    "a shape of more bytes": {"a": entry(0, 8, [3])},
    "no JSON": b"{[}",
    "no object": b"null",
    **{f"a length of {length}": length for length in (0, 7, 2**63, 2**64 - 1)},
}


@pytest.fixture(scope="module")
def saved(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("saved")
    tiny.make_model().save(directory)
    return directory


@pytest.mark.parametrize("what", HEADERS)
def test_a_header_that_the_library_refuses_is_refused(what: str, saved: Path, tmp_path: Path) -> None:
    header = HEADERS[what]
    if isinstance(header, int):
        content = struct.pack("<Q", header)
    else:
        text = header if isinstance(header, bytes) else json.dumps(header).encode()
        content = struct.pack("<Q", len(text)) + text + bytes(8)
    whole = (saved / "model.safetensors").read_bytes()
    (tmp_path / "config.json").write_bytes((saved / "config.json").read_bytes())
    for each in (content, b"", whole[:100], whole[:-4]):
        (tmp_path / "model.safetensors").write_bytes(each)
        with pytest.raises(InputError, match=r"/model\.safetensors: cannot be read: ") as caught:
            load_model(tmp_path)
        assert len(caught.value.problems) == 1


SIZES = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "vocab_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)
ABSURD: list[Any] = [2**31 - 1, 10**30, -1, 0, 2.5, True, "2", [2], float("nan"), "9" * 5000]


@pytest.fixture(params=["load", "check", "plan"])
def door(request: pytest.FixtureRequest) -> Callable[[Path], Any]:
    doors: dict[str, Callable[[Path], Any]] = {
        "load": load_model,
        "check": check_model,
        "plan": lambda path: definition_of(str(path), "lm", None),
    }
    return doors[request.param]


@pytest.fixture
def directory(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "model"))


@pytest.mark.parametrize("name", SIZES)
def test_an_absurd_size_is_refused(name: str, directory: Path) -> None:
    file = directory / "config.json"
    config = json.loads(file.read_text())
    for value in ABSURD:
        file.write_text(json.dumps(config | {name: value}))
        with pytest.raises(InputError, match=r"config\.json"):
            load_model(directory)


TEXTS = [
    "[" * 100_000 + "]" * 100_000,
    '{"model_type": "llama", "hidden_size": ' + "[" * 100_000 + "]" * 100_000 + "}",
    '{"model_type": "llama", "num_hidden_layers": ' + "9" * 5000 + "}",
    '{"model_type": "llama", "architectures": 3}',
    "null",
    "\x00",
]
FIELDS = [
    ("rms_norm_eps", float("inf")),
    ("rope_theta", 10**400),
    ("rope_scaling", {"rope_type": "yarn", "factor": "4"}),
    ("rope_scaling", {"rope_type": ["yarn"]}),
    ("hidden_act", {"a": 1}),
    ("layer_types", {"full_attention": 1}),
]


def test_a_config_that_no_parser_holds_or_of_the_wrong_kind(
    directory: Path, door: Callable[[Path], Any]
) -> None:
    file = directory / "config.json"
    config = json.loads(file.read_text())
    for text in (*TEXTS, *(json.dumps(config | {field: value}) for field, value in FIELDS)):
        file.write_text(text)
        with pytest.raises(InputError):
            door(directory)
