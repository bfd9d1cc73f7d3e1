"""Weights on disk: what is read is what was written, in Hugging Face's layout, to the bit.

Files that are damaged or absurd are one message each, before anything is allocated.
"""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from rlhf_core.errors import InputError
from rlhf_core.models import Model, check_model, fresh_model, load_model
from rlhf_core.models.safetensors import BLOCK, DTYPES, copy
from rlhf_core.training import definition_of
from tests.shared.decoder_configs import CONFIGS
from tests.shared.mesh_cases import FAMILIES

TABLE = FAMILIES["llama"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    fresh_model(TABLE).save(directory)
    return directory


@pytest.fixture
def copied(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "copy"))


def assert_same(one: Model, two: Model) -> None:
    jax.tree.map(np.testing.assert_array_equal, one.params, two.params)


def test_a_saved_file_is_a_plain_safetensors_file_in_hugging_face_names(saved: Path) -> None:
    model = load_model(saved)
    tensors = load_file(saved / "model.safetensors")
    with safe_open(saved / "model.safetensors", framework="np") as file:
        assert file.metadata() == {"format": "pt"}
    assert len(tensors) == 3 + 2 * 9
    kernel = np.asarray(model.params["layers"]["self_attn"]["k_proj"]["kernel"])
    assert kernel.shape == (2, 16, 8)
    np.testing.assert_array_equal(tensors["model.layers.1.self_attn.k_proj.weight"], kernel[1].T)
    np.testing.assert_array_equal(tensors["lm_head.weight"], np.asarray(model.params["lm_head"]["kernel"]).T)
    embedding = np.asarray(model.params["embed_tokens"]["embedding"])
    np.testing.assert_array_equal(tensors["model.embed_tokens.weight"], embedding)


@pytest.mark.parametrize(
    ("kind", "head"),
    [
        *((kind, "lm") for kind in ("gemma2", "phi3", "mixtral", "qwen3_moe", "qwen2")),
        ("qwen2", "score"),
    ],
)
def test_load_save_load_is_exact(tiny: Any, tmp_path: Path, kind: str, head: Any) -> None:
    """Four norms; fused projections; experts by two names; tied embeddings, with both heads. All: the golden files."""
    first = tiny.drawn(CONFIGS[kind])
    first = first if head == "lm" else first.with_head(head)
    first.save(tmp_path / "a")
    second = load_model(tmp_path / "a", head)
    assert_same(first, second)
    second.save(tmp_path / "b")
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_large_models_are_sharded_and_stale_files_go(
    copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_shards: Callable[[int], None]
) -> None:
    model, target = load_model(copied), tmp_path / "out"
    model.save(target)
    in_shards(4000)
    model.save(target)
    files = sorted(path.name for path in target.glob("*.safetensors"))
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    index = json.loads((target / "model.safetensors.index.json").read_text())
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))
    assert index["metadata"] == {"total_size": total, "total_parameters": total // 4}
    for file in files:
        part = load_file(target / file)
        assert len(part) == 1 or sum(tensor.nbytes for tensor in part.values()) <= 4000, file
    assert_same(load_model(target), model)
    monkeypatch.undo()
    load_model(target).save(target)  # over itself, back to one file
    assert not list(target.glob("model-*"))
    assert not (target / "model.safetensors.index.json").exists()
    assert_same(load_model(target), model)


@pytest.mark.parametrize("shards", [False, True])
def test_a_head_that_differs_from_the_embeddings_is_used_although_the_config_ties_it(
    tiny: Any, tmp_path: Path, shards: bool
) -> None:
    untied = tiny.drawn(TABLE)
    untied.save(tmp_path / "a")
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    (tmp_path / "a" / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    tensors = load_file(tmp_path / "a" / "model.safetensors")
    if shards:  # of which the index does not list the head
        save_file(
            {
                "lm_head.weight": tensors.pop("lm_head.weight"),
                "model.norm.weight": tensors.pop("model.norm.weight"),
            },
            tmp_path / "a" / "model-2.safetensors",
        )
        save_file(tensors, tmp_path / "a" / "model-1.safetensors")
        (tmp_path / "a" / "model.safetensors").unlink()
        files = dict.fromkeys(tensors, "model-1.safetensors") | {"model.norm.weight": "model-2.safetensors"}
        (tmp_path / "a" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    with pytest.warns(UserWarning, match=r"lm_head\.weight differs from the embeddings.*loaded untied"):
        model = load_model(tmp_path / "a")
    assert_same(model, untied)
    with pytest.warns(UserWarning, match="loaded untied"):
        definition, _ = definition_of(str(tmp_path / "a"), "lm", None) or pytest.fail("none")
    assert jax.tree.structure(definition.abstract_params()) == jax.tree.structure(model.params)
    for name, saved in {"b": model, "merged": model.with_lora(rank=2).merged()}.items():
        saved.save(tmp_path / name)
        assert json.loads((tmp_path / name / "config.json").read_text())["tie_word_embeddings"] is False
        assert_same(load_model(tmp_path / name), model)
    with pytest.warns(UserWarning, match="its reward head is new"):
        reward = load_model(tmp_path / "a", "score")
    assert reward.hf_config["tie_word_embeddings"] is False


def test_a_tied_head_and_tables_that_the_config_determines_are_read_over_in_silence(
    tiny: Any, tmp_path: Path
) -> None:
    table = TABLE | {"tie_word_embeddings": True, "rope_scaling": {"rope_type": "linear", "factor": 4.0}}
    made = tiny.drawn(table)
    made.save(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    embeddings = tensors["model.embed_tokens.weight"]
    unread = {"lm_head.weight": embeddings.copy()}
    unread["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(2, np.float32)
    (tmp_path / "model.safetensors").unlink()
    save_file(tensors | unread, tmp_path / "model.safetensors")
    assert "lm_head" not in load_model(tmp_path).params
    made.with_head("score").save(tmp_path)
    of_reward = load_file(tmp_path / "model.safetensors")
    save_file(of_reward | {"lm_head.weight": embeddings.copy()}, tmp_path / "model.safetensors")
    with pytest.warns(UserWarning, match=r"'lm_head\.weight' is not used: this is a reward model"):
        load_model(tmp_path, "score")


SHAPES = [(1, 1), (3, 5), (BLOCK[0], BLOCK[1]), (2 * BLOCK[0] + 3, 7), (5, BLOCK[1] + 9), (1, 40), (40, 1)]


def bits(dtype: Any, shape: tuple[int, ...]) -> np.ndarray:
    """Every kind of number that the dtype has: subnormal, infinite and NaN too."""
    size = np.dtype(dtype).itemsize
    whole = np.random.default_rng(0).integers(0, 256, (*shape, size), np.uint8)
    found: np.ndarray = whole.view(dtype)[..., 0]
    return found


@pytest.mark.parametrize("dtype", list(DTYPES.values()), ids=list(DTYPES))
def test_numbers_are_copied_as_float32_to_the_bit(dtype: Any) -> None:
    """As stored; transposed, which goes by blocks; and a part into a part, as a device reads its shard."""
    stored = bits(dtype, (70, 50))
    whole = np.full((3, 31, 45), 7, np.float32)
    copies = [
        *((bits(dtype, shape), np.full(shape, 7, np.float32)) for shape in ((9,), (6, 4))),
        *((bits(dtype, shape[::-1]).T, np.full(shape, 7, np.float32)) for shape in SHAPES),
        (stored.T[11:42, 20:65], whole[1]),
    ]
    for source, out in copies:
        copy(source, out)
        expected = np.ascontiguousarray(source.astype(np.float32))
        np.testing.assert_array_equal(out.view(np.uint32), expected.view(np.uint32), err_msg=str(out.shape))
    assert (whole[[0, 2]] == 7).all()


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


@pytest.mark.parametrize("what", HEADERS)
def test_a_header_that_the_library_refuses_is_refused(what: str, copied: Path) -> None:
    header = HEADERS[what]
    if isinstance(header, int):
        content = struct.pack("<Q", header)
    else:
        text = header if isinstance(header, bytes) else json.dumps(header).encode()
        content = struct.pack("<Q", len(text)) + text + bytes(8)
    whole = (copied / "model.safetensors").read_bytes()
    for each in (content, b"", whole[:100], whole[:-4]):
        (copied / "model.safetensors").write_bytes(each)
        with pytest.raises(InputError, match=r"/model\.safetensors: cannot be read: ") as caught:
            load_model(copied)
        assert len(caught.value.problems) == 1


SIZE_FIELDS = (
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


@pytest.mark.parametrize("name", SIZE_FIELDS)
def test_an_absurd_size_is_refused(name: str, copied: Path) -> None:
    file = copied / "config.json"
    config = json.loads(file.read_text())
    for value in ABSURD:
        file.write_text(json.dumps(config | {name: value}))
        with pytest.raises(InputError, match=r"config\.json"):
            load_model(copied)


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
    copied: Path, door: Callable[[Path], Any]
) -> None:
    file = copied / "config.json"
    config = json.loads(file.read_text())
    for text in (*TEXTS, *(json.dumps(config | {field: value}) for field, value in FIELDS)):
        file.write_text(text)
        with pytest.raises(InputError):
            door(copied)
