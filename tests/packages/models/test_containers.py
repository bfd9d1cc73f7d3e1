"""Checkpoints that hold more than a text model, and the layouts of experts in files."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from rlhf_sft import SFTConfig
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from transformers import Gemma3Config, LlavaConfig

from rlhf_core import load_model
from rlhf_core.errors import InputError
from rlhf_core.mesh import make_mesh
from rlhf_core.models import define, open_weights
from tests.shared.decoder_configs import CONFIGS
from tests.shared.weight_files import config_of, contents, fused

DRAW = np.random.default_rng(7)
TOWER = {
    "vision_tower.layers.0.self_attn.q_proj.weight": DRAW.normal(size=(6, 6)).astype(np.float16),
    "vision_tower.layers.0.mask": np.array([[True, False]]),
    "vision_tower.positions": np.arange(5),
    "multi_modal_projector.linear.weight": DRAW.normal(size=(16, 6)).astype(ml_dtypes.bfloat16),
    "vision_tower.quantized": DRAW.normal(size=7).astype(ml_dtypes.float8_e4m3fn),
}
OLD = {"model.": "language_model.model.", "lm_head.": "language_model.lm_head."}
NEW = {"model.": "model.language_model."}


def renamed(tensors: Mapping[str, Any], starts: Mapping[str, str]) -> dict[str, Any]:
    for old, new in starts.items():
        tensors = {
            new + name.removeprefix(old) if name.startswith(old) else name: x for name, x in tensors.items()
        }
    return dict(tensors)


def contain(text: Path, to: Path, outer: Mapping[str, Any], starts: Mapping[str, str]) -> Path:
    """Put a text model into a checkpoint with a vision tower, in two shards."""
    shutil.copytree(text, to)
    inner = json.loads((text / "config.json").read_text())
    inner.pop("architectures")
    config = {
        "architectures": ["SomeForConditionalGeneration"],
        "text_config": inner,
        "vision_config": {"model_type": "pixtral", "depth": 1},
        **outer,
    }
    (to / "config.json").write_text(json.dumps(config, indent=2))
    (to / "preprocessor_config.json").write_text('{"size": 14}')
    tensors = renamed(load_file(text / "model.safetensors"), starts)
    (to / "model.safetensors").unlink()
    names = sorted({**tensors, **TOWER})
    shards = {f"model-{i + 1:05d}-of-00002.safetensors": names[i::2] for i in range(2)}
    for file, part in shards.items():
        save_file({name: {**tensors, **TOWER}[name] for name in part}, to / file)
    index = {"metadata": {}, "weight_map": {name: file for file, part in shards.items() for name in part}}
    (to / "model.safetensors.index.json").write_text(json.dumps(index))
    return to


@pytest.fixture(scope="module")
def text(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama."""
    directory = tmp_path_factory.mktemp("text")
    tiny.make_model().save(directory)
    return directory


@pytest.fixture(scope="module")
def llava(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return contain(text, tmp_path_factory.mktemp("llava") / "llava", {"model_type": "llava"}, OLD)


@pytest.mark.parametrize(
    ("outer", "starts", "tied"),
    [
        ({"model_type": "llava"}, OLD, False),
        ({"model_type": "idefics3"}, {"model.": "model.text_model."}, True),
        ({"model_type": "mistral3", "tie_word_embeddings": False}, NEW, False),
        ({"model_type": "gemma3", "tie_word_embeddings": True}, {"model.": "language_model."}, True),
    ],
)
def test_names_come_from_the_files(
    tiny: Any, outer: dict[str, Any], starts: dict[str, str], tied: bool, tmp_path: Path
) -> None:
    made = tiny.make_model(tie_word_embeddings=tied)
    made.save(tmp_path / "text")
    source = contain(tmp_path / "text", tmp_path / "whole", outer, starts)
    model = load_model(source)
    jax.tree.map(np.testing.assert_array_equal, model.params, made.params)
    assert sorted(model.kept.carried) == sorted(TOWER)
    model.save(tmp_path / "saved")
    assert contents(tmp_path / "saved") == contents(source)
    assert config_of(tmp_path / "saved") == config_of(source)
    assert (tmp_path / "saved" / "preprocessor_config.json").read_bytes() == b'{"size": 14}'


GEMMA3 = {
    "model_type": "gemma3_text",
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "num_hidden_layers": 34,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    "sliding_window": 1024,
}
LLAVA = {"vocab_size": 32064, "torch_dtype": "float16"}
NAMES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
}


@pytest.mark.parametrize(
    ("family", "inner", "config"),
    [
        ("gemma3", GEMMA3, Gemma3Config),
        ("llava", LLAVA | {"model_type": "llama"}, LlavaConfig),
        ("llava", LLAVA | {"model_type": "mistral"}, LlavaConfig),
    ],
)
def test_sizes_that_published_files_leave_out(
    family: str, inner: dict[str, Any], config: Any, tmp_path: Path
) -> None:
    """A text_config names only what differs from the defaults of transformers, llava's those of seven billions."""
    whole = {"model_type": family, "text_config": inner, "vision_config": {}}
    decoder: Any = define(whole, "lm", tmp_path)[0]
    theirs = config(text_config=inner).text_config
    for ours, name in NAMES.items():
        assert getattr(decoder.config, ours) == getattr(theirs, name), name
    assert decoder.config.tied == theirs.tie_word_embeddings


def test_shards(llava: Path, tmp_path: Path, in_shards: Callable[[int], None]) -> None:
    """Files of limited size, whose index lists the tensors that are carried, too."""
    in_shards(3000)
    load_model(llava).save(tmp_path)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = {}
    for file in tmp_path.glob("*.safetensors"):
        with safe_open(file, "np") as opened:
            files |= dict.fromkeys(opened.keys(), file.name)
    assert index["weight_map"] == files
    assert index["metadata"]["total_size"] == sum(len(raw) for *_, raw in contents(llava).values())
    assert len(set(files.values())) > 2
    assert contents(tmp_path) == contents(llava)


@pytest.mark.parametrize("flat", [False, True], ids=["text_config", "older"])
def test_the_text_models_of_qwen_vl(tiny: Any, flat: bool, tmp_path: Path) -> None:
    """Text has one position per token, whose rotary embedding is the plain one; older files have no `text_config`."""
    rope = {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}, "rope_theta": 1e6}
    sizes = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    made = tiny.drawn({"model_type": "qwen2", "intermediate_size": 24, "rope_theta": 1e6, **sizes})
    made.save(tmp_path / "text")
    outer: dict[str, Any] = {"model_type": "qwen2_5_vl", "vision_start_token_id": 5}
    source = contain(tmp_path / "text", tmp_path / "whole", outer, {} if flat else NEW)
    config = config_of(source)
    inner = config.pop("text_config") | rope
    whole = (
        {**inner, **config} if flat else {**config, "text_config": {**inner, "model_type": "qwen2_5_vl_text"}}
    )
    (source / "config.json").write_text(json.dumps(whole))
    model = load_model(source)
    assert model.definition.config.ropes == made.definition.config.ropes
    jax.tree.map(np.testing.assert_array_equal, model.params, made.params)
    names = model.definition.module_names()["self_attn.q_proj"]
    assert names == ["model.language_model.layers.0.self_attn.q_proj"]
    model.save(tmp_path / "saved")
    assert contents(tmp_path / "saved") == contents(source)
    assert config_of(tmp_path / "saved") == whole


def test_every_parameter_keeps_its_dtype(text: Path, tmp_path: Path) -> None:
    """Most are bfloat16 here, and one is float32; the tower's dtypes do not count."""
    mixed = tmp_path / "text"
    shutil.copytree(text, mixed)
    tensors = load_file(mixed / "model.safetensors")
    lower = {
        name: value if name == "model.norm.weight" else value.astype(ml_dtypes.bfloat16)
        for name, value in tensors.items()
    }
    save_file(lower, mixed / "model.safetensors")
    whole = contain(mixed, tmp_path / "whole", {"model_type": "llava", "dtype": "bfloat16"}, OLD)
    model = load_model(whole)
    assert model.stored_dtype == "bfloat16"
    model.with_params(model.as_stored(model.params)).save(tmp_path / "saved")
    assert contents(tmp_path / "saved") == contents(whole)
    odd = np.float32(1 + 2**-20)
    raised = jax.tree.map(lambda x: x * 0 + odd, model.params)
    rounded = model.as_stored(raised)
    assert np.asarray(rounded["norm"]["weight"]).max() == odd
    assert np.asarray(rounded["embed_tokens"]["embedding"]).max() == 1
    model.storing("float16").save(tmp_path / "half")
    dtypes = {name: dtype for name, (dtype, _, _) in contents(tmp_path / "half").items()}
    assert {dtypes[name] for name in dtypes if name not in TOWER} == {"F16"}
    config = config_of(tmp_path / "half")
    assert (config["dtype"], config["text_config"]["torch_dtype"]) == ("float16", "float16")


def test_a_reward_model_of_the_whole(llava: Path, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="its reward head is new"):
        load_model(llava, "score").save(tmp_path)
    written, before = contents(tmp_path), contents(llava)
    assert written.keys() ^ before.keys() == {"score.weight", "language_model.lm_head.weight"}
    assert all(written[name] == before[name] for name in written if name != "score.weight")
    config = config_of(tmp_path)
    assert config["architectures"] == ["SomeForSequenceClassification"]
    assert config["text_config"]["pad_token_id"] == 0
    assert "pad_token_id" not in config
    again = load_model(tmp_path, "score")
    again.save(tmp_path / "again")
    assert contents(tmp_path / "again") == written


def test_adapters_have_the_names_of_transformers(llava: Path, text: Path, tmp_path: Path) -> None:
    """Also where files have older names; adapters of the text model alone, or of older versions, are read."""
    model = load_model(llava).with_lora(rank=2, targets=["q_proj"])
    model.save(tmp_path)
    start = "base_model.model.model.language_model.layers."
    names = [f"{start}{i}.self_attn.q_proj.lora_{x}.weight" for i in range(2) for x in "AB"]
    assert sorted(load_file(tmp_path / "adapter_model.safetensors")) == names
    adapter = json.loads((tmp_path / "adapter_config.json").read_text())
    assert adapter["target_modules"] == r"model\.(language_model\.)?layers\.\d+\.(.*\.)?(q_proj)"
    for inner in ("self_attn.q_proj", "q_proj"):  # Gemma 4 has some right in the layer
        assert re.fullmatch(adapter["target_modules"], f"model.layers.11.{inner}")
    assert not re.fullmatch(adapter["target_modules"], "model.vision_tower.layers.0.self_attn.q_proj")
    drawn = {
        name: DRAW.normal(size=(2, 16) if "_A" in name else (16, 2)).astype(np.float32) for name in names
    }
    opened = []
    for other in (start, "base_model.model.model.layers.", "base_model.model.language_model.model.layers."):
        save_file(renamed(drawn, {start: other}), tmp_path / "adapter_model.safetensors")
        opened.append(load_model(tmp_path))
        assert opened[-1].adapter["target_modules"] in (adapter["target_modules"], ["q_proj"])
    for each in opened[1:]:
        jax.tree.map(np.testing.assert_array_equal, each.params, opened[0].params)
    save_file(
        renamed(drawn, {start: "base_model.model.vision_tower.layers."}),
        tmp_path / "adapter_model.safetensors",
    )
    with pytest.raises(InputError, match="no linear layer vision_tower"):
        load_model(tmp_path)


def test_what_cannot_be_opened(llava: Path, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    config = config_of(llava)

    def says(expected: str, change: Mapping[str, Any], more: Mapping[str, Any] | None = None) -> None:
        shutil.copytree(llava, whole)
        (whole / "config.json").write_text(json.dumps({**config, **change}))
        if more:
            file = whole / "model-00001-of-00002.safetensors"
            save_file({**load_file(file), **more}, file)
        with pytest.raises(InputError, match=expected):
            load_model(whole)
        shutil.rmtree(whole)

    says(
        "text_config: model_type 'qwen9_text' is not supported", {"text_config": {"model_type": "qwen9_text"}}
    )
    twin = {
        name.replace("language_model.model", "talker.model"): reader.view(name).copy()
        for name, reader in open_weights(llava).items()
        if name.startswith("language_model.model")
    }
    says("could both belong to its text model", {}, twin)


@pytest.mark.parametrize("family", ["qwen3_5_moe", "qwen3_moe", "glm4_moe"])
def test_experts_stored_one_by_one_or_fused(tiny: Any, family: str, tmp_path: Path) -> None:
    """A layer's experts as [experts, 2 · size, hidden] and [experts, hidden, size], which are written again."""
    model = tiny.drawn(CONFIGS[family])
    model.save(tmp_path / "one")
    single = load_file(tmp_path / "one" / "model.safetensors")
    shutil.copytree(tmp_path / "one", tmp_path / "fused")
    save_file(fused(single), tmp_path / "fused" / "model.safetensors")
    mesh = make_mesh(1, 2, 2, expert=2)
    for layout in ("one", "fused"):
        opened = load_model(tmp_path / layout, mesh=mesh)
        jax.tree.map(np.testing.assert_array_equal, opened.params, model.params)
        opened.save(tmp_path / f"{layout} again")
        assert contents(tmp_path / f"{layout} again") == contents(tmp_path / layout)
    if family == "qwen3_5_moe":
        outer = {"model_type": "qwen3_5_moe", "tie_word_embeddings": False}
        whole = contain(tmp_path / "fused", tmp_path / "whole", outer, NEW)
        opened = load_model(whole)
        jax.tree.map(np.testing.assert_array_equal, opened.params, model.params)
        opened.save(tmp_path / "whole again")
        assert contents(tmp_path / "whole again") == contents(whole)
    assert not open_weights(tmp_path / "fused").keys() & {n for n in single if ".experts." in n}


def assert_carried(directory: Path, further: dict[str, np.ndarray], wrong: tuple[str, np.ndarray]) -> None:
    """Check that further tensors are saved again, over the files that are read, and that a wrong one is refused."""
    file = directory / "model.safetensors"
    save_file({**load_file(file), **further}, file)
    before = contents(directory)
    opened = load_model(directory)
    assert sorted(opened.kept.carried) == sorted(further)
    opened.save(directory)
    assert contents(directory) == before
    name, tensor = wrong
    save_file({**load_file(file), name: tensor}, file)
    with pytest.raises(InputError, match=f"'{re.escape(name)}' is unexpected"):
        load_model(directory)


def test_layers_for_speculation_are_carried(tiny: Any, tmp_path: Path) -> None:
    """GLM's and Qwen3.5's layers that predict further tokens."""
    tiny.drawn({**CONFIGS["glm4_moe"], "num_nextn_predict_layers": 1}).save(tmp_path)
    further = {"model.layers.3.eh_proj.weight": DRAW.normal(size=(24, 48)).astype(np.float16)}
    assert_carried(tmp_path, further, ("model.layers.4.eh_proj.weight", np.zeros((24, 48), np.float16)))


def test_keys_and_values_that_a_layer_does_not_use_are_carried(tiny: Any, tmp_path: Path) -> None:
    """Of gemma4's layers that use those of an earlier layer."""
    tiny.drawn(CONFIGS["gemma4, shared keys"]).save(tmp_path)
    unused = {f"model.layers.4.self_attn.{part}_proj.weight": DRAW.normal(size=(8, 24)) for part in "kv"}
    assert_carried(tmp_path, unused, ("model.layers.0.self_attn.v_norm.weight", np.zeros(8)))


def test_from_stage_to_stage(rlhf: Any, tiny: Any, llava: Path, tmp_path: Path) -> None:
    """All weights, then an adapter, and the export of the run's copy elsewhere: the tower is never lost."""
    options = {"max_training_steps": 1, "total_batch_size": 2, "learning_rate": 1e-2}
    rows = tiny.texts(4)
    run = tmp_path / "run"
    whole = tiny.run("sft", SFTConfig(model=str(llava), train_data=rows, **options), run / "a")
    lora = SFTConfig(
        model=str(whole.path), train_data=rows, lora={"rank": 2, "targets": ["q_proj"]}, **options
    )
    adapted = tiny.run("sft", lora, run / "b")
    assert not list(adapted.path.glob("model*"))
    moved = tmp_path / "moved"
    run.rename(moved)
    path = moved / adapted.path.relative_to(run)
    assert rlhf("export", str(path), str(tmp_path / "out"), "--merge").code == 0
    before, after = contents(llava), contents(tmp_path / "out")
    assert before.keys() == after.keys()
    changed = {name for name in before if before[name] != after[name]}
    assert changed == before.keys() - TOWER.keys()
    assert config_of(tmp_path / "out") == config_of(llava)
    assert (tmp_path / "out" / "preprocessor_config.json").is_file()


def test_check_says_what_is_carried(rlhf: Any, llava: Path, tiny: Any, tmp_path: Path) -> None:
    rows = tiny.write_rows(tmp_path / "rows.jsonl", tiny.texts(2))
    stage = f'[[stage]]\nname = "s"\ntrainer = "sft"\nmodel = "{llava}"\ntrain_data = "{rows}"\n'
    (tmp_path / "one.toml").write_text(f'dir = "run"\n{stage}')
    said = " ".join(rlhf("check", str(tmp_path / "one.toml")).out.split())
    assert "5 tensors of vision_tower, multi_modal_projector, 313 B, not loaded, and saved" in said
    assert "parameters 23.9 kB" in said  # of the text model alone
    said = rlhf("check", str(tmp_path / "one.toml"), "--set", "s.lora={}").out
    assert "not loaded, and not saved again" in " ".join(said.split())
