"""Weight files and config.json that are damaged or absurd: one message each, before anything is allocated."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from rlhf_core.errors import InputError
from rlhf_core.models import check_model, fresh_model, load_model
from rlhf_core.models.safetensors import Reader
from rlhf_core.training import definition_of


def entry(begin: Any, end: Any, shape: Any = (1,), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def file_of(path: Path, header: Any, body: bytes = bytes(8)) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)
    return path


REFUSED: dict[str, Any] = {
    "overlap": {"a": entry(0, 4), "b": entry(0, 4), "c": entry(4, 8)},
    "bytes after the last": {"a": entry(0, 4)},
    "nested": b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "a dtype of no library": {"a": entry(0, 8, [2], "Q8")},
    "no object": b"null",
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_header_that_the_library_refuses_is_refused(what: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        Reader(file_of(tmp_path / "model.safetensors", REFUSED[what]))
    assert len(caught.value.problems) == 1
    assert str(caught.value).startswith(f"{tmp_path / 'model.safetensors'}: ")


@pytest.mark.parametrize("length", [0, 7, 2**63, 2**64 - 1])
def test_a_length_that_no_header_has(length: int, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(struct.pack("<Q", length))
    with pytest.raises(InputError, match=r"/x: cannot be read: .*header"):
        Reader(tmp_path / "x")


@pytest.fixture(scope="module")
def saved(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("saved")
    tiny.make_model().save(directory)
    return directory


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


def test_a_fresh_model_that_no_memory_holds_is_refused(tiny: Any) -> None:
    with pytest.raises(
        InputError, match=r"model: its sizes give 4,\d+,\d+,\d+,\d+ parameters, .* GB of memory"
    ):
        fresh_model({**tiny.SIZES, "hidden_size": 2048, "vocab_size": 2**30}, "lm")
    with pytest.raises(InputError, match="num_hidden_layers must be at most 10,000"):
        fresh_model({**tiny.SIZES, "num_hidden_layers": 2**31, "vocab_size": 9}, "lm")


@pytest.fixture(scope="module")
def adapter(saved: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("adapter")
    load_model(saved).with_lora(rank=2, targets="q_proj").save(directory)
    return directory


def test_an_adapters_fields_of_another_kind_are_named_together(adapter: Path, tmp_path: Path) -> None:
    config = json.loads((adapter / "adapter_config.json").read_text())
    wrong = {"r": 0, "lora_alpha": "x", "lora_dropout": 1.5, "use_rslora": "x", "alpha_pattern": {"(": 1}}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | wrong | {"modules_to_save": "x"}))
    with pytest.raises(InputError) as caught:
        load_model(tmp_path)
    named = [problem.split("adapter_config.json: ")[1].split()[0] for problem in caught.value.problems]
    assert named == [*list(wrong)[:-1], "modules_to_save", "alpha_pattern"]


def test_dora_without_its_magnitudes_is_refused(adapter: Path, tmp_path: Path) -> None:
    config = json.loads((adapter / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | {"use_dora": True}))
    (tmp_path / "adapter_model.safetensors").symlink_to(adapter / "adapter_model.safetensors")
    with pytest.raises(InputError, match=r"q_proj has no lora_magnitude_vector, and .* use_dora is true"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        json.dumps({"weight_map": {"lm_head.weight": "x" * 300}}).encode(),
        json.dumps({"weight_map": {"a" * 100_000: 1}}).encode() + b"\xff",
        b'{"weight_map": ' + b"[" * 100_000,
    ],
)
def test_a_damaged_index_is_one_short_message(content: bytes, saved: Path, tmp_path: Path) -> None:
    directory = with_config(saved, tmp_path, (saved / "config.json").read_text())
    (directory / "model.safetensors").unlink()
    (directory / "model.safetensors.index.json").write_bytes(content)
    with pytest.raises(InputError, match=r"index\.json: damaged") as caught:
        load_model(directory)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.q_proj.lora_A.weight", "score.weight"])
def test_an_adapters_tensors_of_another_shape_are_named(adapter: Path, tmp_path: Path, name: str) -> None:
    directory = with_config(adapter, tmp_path, "")
    (directory / "config.json").unlink()
    weights = directory / "adapter_model.safetensors"
    tensors = load_file(weights)
    weights.unlink()
    for shape in ((), (3,), (3, 5)):
        save_file(tensors | {f"base_model.model.{name}": np.zeros(shape, np.float32)}, weights)
        with pytest.raises(InputError, match=r"adapter_model\.safetensors: .* shape \["):
            load_model(directory, head="score" if name.startswith("score") else "lm")
