"""Low-rank adapters: the formula, PEFT's files both ways, what is trained, and what is kept."""

from __future__ import annotations

import json
import re
import warnings

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from rlhf_core import create_state, load_model
from rlhf_core.models import Lora, module_paths, paths, resolve, with_noise
from rlhf_core.models.layers import Adapter
from tests.shared.drawn import with_adapters_drawn

ALL = (
    "mlp.down_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "self_attn.k_proj",
    "self_attn.o_proj",
    "self_attn.q_proj",
    "self_attn.v_proj",
)
IDS = np.array([[3, 9, 4, 7, 8, 5], [6, 4, 0, 0, 0, 0]])
MASK = np.array([[1] * 6, [1, 1, 0, 0, 0, 0]])


def spread(model):
    return with_adapters_drawn(model, 3, 0.3)


@pytest.fixture(scope="module")
def base(tiny, tmp_path_factory):
    directory = tmp_path_factory.mktemp("base")
    tiny.make_model().save(directory)
    return load_model(directory)


@pytest.fixture(scope="module")
def adapted(base):
    return spread(base.with_lora(rank=3, alpha=6.0, targets=["q_proj", r"mlp\..*"]))


@pytest.mark.parametrize(
    ("targets", "expected", "layers"),
    [
        ("all-linear", ALL, {}),
        ("v_proj", ("self_attn.v_proj",), {}),
        (["self_attn.q_proj", r"mlp\.(up|gate)_proj"], ("mlp.gate_proj", "mlp.up_proj", "self_attn.q_proj"), {}),
        (r"layers\.(?!0\.).*k_proj", ("self_attn.k_proj",), {"self_attn.k_proj": (1,)}),
        ("layers.1.self_attn.k_proj", ("self_attn.k_proj",), {"self_attn.k_proj": (1,)}),
        (r"layers\.self_attn\.k_proj|v_proj", ("self_attn.k_proj", "self_attn.v_proj"), {}),
        (["k_proj", r"layers\.0\.self_attn\.k_proj"], ("self_attn.k_proj",), {}),
    ],
)  # fmt: skip
def test_targets(base, targets, expected, layers):
    names = module_paths(base.definition)
    assert tuple(names) == ALL
    assert resolve(targets, names) == (expected, tuple(layers.items()), [])


def test_fresh_adapters_change_nothing(base):
    fresh = base.with_lora(seed=5)
    np.testing.assert_array_equal(fresh.logits(IDS, MASK), base.logits(IDS, MASK))


@pytest.mark.parametrize("use_rslora", [pytest.param(False, marks=pytest.mark.long), True])
def test_merged_is_kernel_plus_scale_times_the_product(base, use_rslora):
    model = spread(base.with_lora(rank=4, alpha=2.0, use_rslora=use_rslora))
    merged = model.merged()
    assert merged.definition == base.definition
    scale = 2.0 / (2.0 if use_rslora else 4.0)
    for target in ALL:
        group, name = target.split(".")
        module = model.params["layers"][group][name]
        a, b = (np.asarray(module["adapter"][x], np.float64) for x in ("lora_a", "lora_b"))
        expected = np.asarray(module["kernel"], np.float64) + scale * np.einsum("lir,lro->lio", a, b)
        np.testing.assert_allclose(merged.params["layers"][group][name]["kernel"], expected, atol=1e-6)
    np.testing.assert_allclose(merged.logits(IDS, MASK), model.logits(IDS, MASK), atol=2e-5)
    assert np.abs(np.asarray(model.logits(IDS, MASK) - base.logits(IDS, MASK))).max() > 1e-2


def test_saved_as_peft_does_and_read_again(adapted, base, tmp_path):
    adapted.save(tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["target_modules"] == ["down_proj", "gate_proj", "q_proj", "up_proj"]
    assert (config["r"], config["lora_alpha"], config["task_type"]) == (3, 6, "CAUSAL_LM")
    again = load_model(tmp_path)
    assert again.definition == adapted.definition
    jax.tree.map(np.testing.assert_array_equal, again.params, adapted.params)
    beside = load_model(base.source, adapter=tmp_path)
    np.testing.assert_array_equal(beside.logits(IDS, MASK), again.logits(IDS, MASK))
    again.save(tmp_path / "twice")
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        assert (tmp_path / "twice" / name).read_bytes() == (tmp_path / name).read_bytes()


def test_a_reward_head_is_saved_with_the_adapter(base, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = spread(load_model(base.source, head="score", seed=4).with_lora(rank=2))
    model.save(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the head is there: none is drawn
        again = load_model(tmp_path, head="score")
    np.testing.assert_array_equal(again.scores(IDS, MASK), model.scores(IDS, MASK))
    assert json.loads((tmp_path / "adapter_config.json").read_text())["modules_to_save"] == ["score"]


def test_dropout_acts_on_what_goes_into_a_and_only_where_it_is_drawn(base):
    model = spread(base.with_lora(rank=2, dropout=0.5, targets="o_proj"))
    plain = spread(base.with_lora(rank=2, targets="o_proj")).logits(IDS, MASK)
    np.testing.assert_allclose(model.logits(IDS, MASK), plain, atol=1e-6)
    noisy = model.with_params(with_noise(model.params, jax.random.key(1)))
    assert np.abs(np.asarray(noisy.logits(IDS, MASK)) - np.asarray(plain)).max() > 1e-3
    np.testing.assert_array_equal(noisy.logits(IDS, MASK), noisy.logits(IDS, MASK))


def test_dropout_keeps_the_mean():
    adapter = Adapter(Lora(8, 8.0, 0.25, False, ()), nnx.Rngs(0), (8, 8), (None, None))
    adapter.lora_a[...] = adapter.lora_b[...] = np.eye(8, dtype=np.float32)
    x = np.arange(1, 4001 * 8 + 1, dtype=np.float32)[: 4000 * 8].reshape(4000, 8)
    np.testing.assert_array_equal(adapter(x), x)
    adapter.lora_key[...] = np.array([0, 7], np.uint32)
    ratio = np.asarray(adapter(x)) / x
    assert set(ratio.round(2).ravel().tolist()) == {0.0, np.float32(1.33)}
    assert ratio.mean() == pytest.approx(1.0, abs=0.01)  # 3 standard errors


def test_ranks_and_alphas_of_their_own(adapted, base, tmp_path):
    """PEFT's patterns: a smaller rank is filled up with zeros, another alpha is multiplied into B."""
    adapted.save(tmp_path)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    prefix = "base_model.model.model.layers.0.self_attn.q_proj"
    tensors[f"{prefix}.lora_A.weight"] = np.ascontiguousarray(tensors[f"{prefix}.lora_A.weight"][:1])
    tensors[f"{prefix}.lora_B.weight"] = np.ascontiguousarray(tensors[f"{prefix}.lora_B.weight"][:, :1])
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    file = tmp_path / "adapter_config.json"
    pattern = {
        "rank_pattern": {r"layers.0.self_attn.q_proj": 1},
        "alpha_pattern": {r"layers.0.self_attn.q_proj": 5},
    }
    file.write_text(json.dumps(json.loads(file.read_text()) | pattern))
    merged = load_model(tmp_path).merged()
    module = base.params["layers"]["self_attn"]["q_proj"]["kernel"]
    a, b = (tensors[f"{prefix}.lora_{x}.weight"].astype(np.float64) for x in "AB")
    expected = np.asarray(module[0], np.float64) + 5.0 * (b @ a).T
    np.testing.assert_allclose(
        merged.params["layers"]["self_attn"]["q_proj"]["kernel"][0], expected, atol=1e-6
    )


@pytest.mark.parametrize(
    "name", [pytest.param("lora_qv", marks=pytest.mark.long), "lora_all_rslora", "lora_dora"]
)
def test_golden_adapters(shared, name):
    directory = shared / "golden" / "llama_lora" / name
    if not directory.is_dir():
        pytest.skip(f"no {directory}")
    inputs = np.load(directory.parents[1] / "llama" / "golden.npz")
    expected, mask = np.load(directory / "golden.npz")["logits"], inputs["attention_mask"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = load_model(directory)
    for one in (model, model.merged()):
        logits = np.asarray(one.logits(inputs["input_ids"], mask))
        np.testing.assert_allclose(logits[mask != 0], expected[mask != 0], atol=1e-4)


SOME = [r"layers\.0\..*q_proj", r"model\.layers\.1\.mlp\.(up|gate)_proj", "o_proj"]
"""Targets of which some are a module in one layer."""
OF_SOME = {
    "model.layers.0.self_attn.q_proj",
    *(f"model.layers.1.mlp.{name}_proj" for name in ("up", "gate")),
    *(f"model.layers.{i}.self_attn.o_proj" for i in (0, 1)),
}


def test_layers_without_an_adapter_are_neither_trained_nor_saved(base, tmp_path):
    model = base.with_lora(rank=2, targets=SOME)
    state = create_state(model, optax.adam(1e-3))
    at = ("layers", "self_attn", "q_proj", "adapter")
    assert dict(state.fixed_layers)[*at, "lora_a"] == dict(state.fixed_layers)[*at, "lora_b"] == (1,)
    assert not dict(paths(model.params))[*at, "lora_a"][1].any()
    assert len(state.fixed_layers) == 6
    model.save(tmp_path)
    file = "adapter_model.safetensors"
    saved = {name.removeprefix("base_model.model.") for name in load_file(tmp_path / file)}
    assert saved == {f"{module}.lora_{x}.weight" for module in OF_SOME for x in "AB"}
    expression = json.loads((tmp_path / "adapter_config.json").read_text())["target_modules"]
    names = [name for each in base.definition.module_names().values() for name in each]
    assert {name for name in names if re.fullmatch(expression, name)} == OF_SOME
    again = load_model(tmp_path)
    assert again.definition == model.definition
    jax.tree.map(np.testing.assert_array_equal, again.params, model.params)
