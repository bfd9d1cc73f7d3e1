"""Weight files and config.json that are damaged or absurd: one message each, before anything is allocated."""

from __future__ import annotations

import json
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
    (tmp_path / "config.json").write_bytes((saved / "config.json").read_bytes())
    (tmp_path / "model.safetensors").write_bytes(content)
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


def with_config(saved: Path, tmp_path: Path, text: str) -> Path:
    for file in saved.iterdir():
        if file.name != "config.json":
            (tmp_path / file.name).symlink_to(file)
    (tmp_path / "config.json").write_text(text)
    return tmp_path


@pytest.mark.parametrize("name", SIZES)
def test_an_absurd_size_is_refused(name: str, saved: Path, tmp_path: Path) -> None:
    config = json.loads((saved / "config.json").read_text())
    directory = with_config(saved, tmp_path, "{}")
    for value in ABSURD:
        (directory / "config.json").write_text(json.dumps(config | {name: value}))
        with pytest.raises(InputError, match=r"config\.json"):
            load_model(directory)


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000 + "]" * 100_000,
        '{"model_type": "llama", "hidden_size": ' + "[" * 100_000 + "]" * 100_000 + "}",
        '{"model_type": "llama", "num_hidden_layers": ' + "9" * 5000 + "}",
        '{"model_type": ["llama"]}',
        '{"model_type": "llama", "architectures": 3}',
        "null",
        "\x00",
    ],
)
def test_a_config_that_no_parser_holds(
    text: str, saved: Path, tmp_path: Path, door: Callable[[Path], Any]
) -> None:
    with pytest.raises(InputError):
        door(with_config(saved, tmp_path, text))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rms_norm_eps", float("inf")),
        ("rope_theta", 10**400),
        ("rope_scaling", {"rope_type": "yarn", "factor": "4"}),
        ("rope_scaling", {"rope_type": ["yarn"]}),
        ("rope_scaling", [3]),
        ("hidden_act", {"a": 1}),
        ("layer_types", {"full_attention": 1}),
    ],
)
def test_other_fields_of_the_wrong_kind(
    field: str, value: Any, saved: Path, tmp_path: Path, door: Callable[[Path], Any]
) -> None:
    config = json.loads((saved / "config.json").read_text()) | {field: value}
    with pytest.raises(InputError):
        door(with_config(saved, tmp_path, json.dumps(config)))
