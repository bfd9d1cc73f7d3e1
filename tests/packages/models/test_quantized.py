"""A base in four or eight bits: the formats in float64, and models that compute with them."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from rlhf_core import artifacts, load_model
from rlhf_core.errors import InputError
from rlhf_core.mesh import make_mesh
from rlhf_core.models import Model, fresh_model, join, open_weights, paths, split
from rlhf_core.models.quantized import NF4, dequantize, quantize, scale_values
from rlhf_core.state import fixed_parameters
from tests.shared import samplers
from tests.shared.drawn import with_adapters_drawn

RECORDED = np.load(Path(__file__).with_name("bitsandbytes.npz"))
"""What bitsandbytes 0.50.2 makes of `WEIGHTS`, under the names of its files."""
WEIGHTS = (np.random.default_rng(0).standard_normal((160, 128)) * 0.05).astype(np.float32)
TABLE = {
    "model_type": "qwen3_moe",
    "vocab_size": 96,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "moe_intermediate_size": 64,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "initializer_range": 0.1,
}
DENSE = {
    "model_type": "phi3",  # fused projections
    "vocab_size": 96,
    "hidden_size": 128,
    "intermediate_size": 200,  # no multiple of 64: this kernel stays as it is in nf4
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "pad_token_id": 0,
    "initializer_range": 0.1,
}


def values(arrays: dict[str, np.ndarray]) -> np.ndarray:
    """The matrix [out, in] that arrays of `layout` define, float64."""
    codes = arrays["codes"].T
    if codes.dtype == np.int8:
        return codes * (arrays["scales"].T.astype(np.float64) / 127)
    numbers = np.stack([codes >> 4, codes & 15], -1).reshape(len(codes), -1)
    scales = arrays["scales"].T.astype(np.float64)
    if "outer" in arrays:
        flat = scale_values().astype(np.float64)[arrays["scales"].T.reshape(-1)]
        factors = arrays["outer"].astype(np.float64)[np.arange(flat.size) // 256]
        scales = (flat * factors + float(arrays["mean"])).reshape(scales.shape)
    return NF4.astype(np.float64)[numbers] * np.repeat(scales, 64, axis=1)


def test_nf4_is_the_nearest_of_sixteen_values_of_a_block() -> None:
    weights = WEIGHTS.astype(np.float64)
    weights[3, 64:] = 0
    blocks = weights.reshape(160, 2, 64)
    largest = np.abs(blocks).max(2)
    share = blocks / np.where(largest == 0, 1, largest)[:, :, None]
    nearest = np.abs(share[..., None] - NF4.astype(np.float64)).argmin(-1)
    arrays = quantize("nf4_plain", weights)
    np.testing.assert_allclose(
        values(arrays), (NF4.astype(np.float64)[nearest] * largest[:, :, None]).reshape(160, 128), rtol=1e-7
    )
    double = quantize("nf4", weights)
    np.testing.assert_array_equal(double["codes"], arrays["codes"])
    # The largest values, less their mean, in blocks of 256 by output and then by input: the nearest of 256 values.
    rest = np.zeros(512)
    rest[:320] = (largest - largest.mean()).reshape(-1)
    outer = np.abs(rest.reshape(2, 256)).max(1)
    np.testing.assert_allclose(double["outer"], outer, rtol=1e-5)
    chosen = np.abs((rest / np.repeat(outer, 256))[:, None] - scale_values().astype(np.float64)).argmin(1)
    np.testing.assert_array_equal(double["scales"].T.reshape(-1), chosen[:320])
    for each in (arrays, double):
        made = np.asarray(dequantize({k: jnp.asarray(v) for k, v in each.items()}, jnp.float32)).T
        np.testing.assert_allclose(made, values(each), rtol=3e-7, atol=1e-9)


def test_int8_is_the_nearest_multiple_of_a_127th_of_the_largest_of_an_output() -> None:
    arrays = quantize("int8", WEIGHTS)
    step = np.abs(WEIGHTS.astype(np.float64)).max(1, keepdims=True) / 127
    assert np.abs(values(arrays) - WEIGHTS).max() <= step.max() / 2 * (1 + 1e-5)
    np.testing.assert_allclose(values(arrays), np.rint(WEIGHTS / step) * step, atol=1e-9)
    made = np.asarray(dequantize({k: jnp.asarray(v) for k, v in arrays.items()}, jnp.float32)).T
    np.testing.assert_allclose(made, values(arrays), rtol=3e-7)


def test_equals_bitsandbytes() -> None:
    np.testing.assert_array_equal(scale_values(), RECORDED["double.weight.nested_quant_map"])
    np.testing.assert_array_equal(NF4, RECORDED["double.weight.quant_map"])
    made = quantize("nf4", WEIGHTS)
    np.testing.assert_array_equal(made["codes"].T.reshape(-1, 1), RECORDED["double.weight"])
    # On a CPU it takes a neighbour of the nearest of 256 values where two are about as near: here once.
    differ = made["scales"].T.reshape(-1) != RECORDED["double.weight.absmax"]
    assert np.flatnonzero(differ).tolist() == [87]
    np.testing.assert_array_equal(made["outer"], RECORDED["double.weight.nested_absmax"])
    np.testing.assert_allclose(values(made)[::40], RECORDED["double.dequantized"], rtol=3e-7, atol=1e-9)


def noisy(model: Model) -> Model:
    """The model with adapters whose B is not zero."""
    return with_adapters_drawn(model.with_lora(rank=4, seed=1, dropout=0.1), 2, 0.1)


def gradients(model: Model) -> tuple[Any, dict[str, np.ndarray]]:
    """The hidden states of eight rows, and the gradient of a function of them by the adapters."""
    tokens = np.random.default_rng(0).integers(3, 96, (8, 16)).astype(np.int32)
    positions = np.broadcast_to(np.arange(16, dtype=np.int32), tokens.shape)
    trained, rest = split(model.params, fixed_parameters(model.params, None, model.definition))

    def loss(trained: Any, rest: Any) -> Any:
        states = model.definition.hidden(join(trained, rest), tokens, positions, np.full_like(tokens, 16))
        return jnp.sum(jnp.sin(states) * jnp.arange(16)[None, :, None]), states

    (_, states), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(trained, rest)
    return np.asarray(states), {
        ".".join(path): np.asarray(leaf) for path, leaf in paths(grads) if path[-1] != "lora_key"
    }


def assert_close(found: Any, expected: Any) -> None:
    """Equal to 1e-5 of the largest entry."""
    np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max(), rtol=0)


@pytest.mark.parametrize(
    ("kind", "table", "axes"),
    [
        pytest.param("nf4", TABLE, {"data": 1, "fsdp": 2, "expert": 4}, marks=pytest.mark.long),
        pytest.param(
            "int8", TABLE, {"data": 1, "expert": 2, "context": 2, "tensor": 2}, marks=pytest.mark.long
        ),
        ("nf4", DENSE, {"data": 1, "fsdp": 2, "context": 2, "tensor": 2}),
        pytest.param("int8", DENSE, {"fsdp": 8}, marks=pytest.mark.long),
    ],
    ids=["nf4-experts", "int8-experts", "nf4-fused", "int8-fused"],
)
def test_computes_what_the_dequantized_model_does(
    kind: Any, table: dict[str, Any], axes: dict[str, int], tmp_path: Path
) -> None:
    """Outputs, gradients of adapters and completions; also on meshes, and in a sampler whose devices share layers."""
    fresh_model(table, seed=1).save(tmp_path)
    one = make_mesh(devices=jax.devices()[:1])
    base = load_model(tmp_path, mesh=one, quantized=kind)
    held = [path for path, _ in paths(base.params) if path[-1] == "codes"]
    assert (("layers", "mlp", "down_proj", "quantized", "codes") in held) == (
        table is DENSE and kind == "int8"
    )
    assert any("experts" in path for path in held) == (table is TABLE)
    model, plain = noisy(base), noisy(base.merged())
    expected = gradients(plain)
    spread = noisy(load_model(tmp_path, mesh=make_mesh(**axes), quantized=kind))
    states, grads = gradients(spread.computing(remat="full"))
    assert_close(states, expected[0])
    assert grads.keys() == expected[1].keys()
    for name, grad in expected[1].items():
        assert_close(grads[name], grad)
    whole = model.merged()
    completions = samplers.sample(whole.definition, whole.params, one)
    for mesh, tensor in ((one, None), (make_mesh(fsdp=8), 2)):
        found = samplers.sample(model.definition, model.params, mesh, tensor)
        samplers.assert_same(found, completions, atol=5e-5)


def test_dequantizes_one_layer_at_a_time(tmp_path: Path) -> None:
    """The compiler neither keeps nor makes the matrices of several layers, forwards or backwards."""
    layers, size = 12, 256
    model = fresh_model(
        {**DENSE, "hidden_size": size, "intermediate_size": size, "num_hidden_layers": layers}
    )
    model.save(tmp_path)
    model = load_model(tmp_path, quantized="nf4").with_lora(rank=2)
    trained, rest = split(model.params, fixed_parameters(model.params, None, model.definition))
    tokens = np.zeros((1, 8), np.int32)

    def loss(trained: Any, rest: Any) -> Any:
        return model.definition.hidden(join(trained, rest), tokens, tokens, tokens + 8).sum()

    held = jax.jit(jax.grad(loss)).lower(trained, rest).compile().memory_analysis()
    matrices = 4 * size * (3 * size + size + 3 * size)  # of one layer in float32; phi3 joins some
    assert held.temp_size_in_bytes < 4 * matrices < layers * matrices


def test_a_stage_trains_adapters_of_a_quantized_base(short: Any, tiny: ModuleType, tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 64}
    tiny.make_model(**sizes).save(tmp_path / "base")
    given = {"model": str(tmp_path / "base")}
    after, watch = short.train("sft", inputs=given, lora={"rank": 2, "base": "nf4"})
    assert watch.last("grad_norm") > 0
    artifact = tmp_path / "sft" / "artifacts" / "model"
    assert {path.name for path in artifact.glob("*.safetensors")} == {"adapter_model.safetensors"}
    assert artifacts.quantized_base(artifact) == "nf4"
    loaded = load_model(artifact)
    assert loaded.quantized == "nf4"
    assert load_model(artifact, quantized="none").quantized is None
    for path, leaf in paths(loaded.params):
        if "adapter" in path:
            np.testing.assert_array_equal(leaf, after[".".join(path)])
    with pytest.raises(InputError, match=r"lora\.base: its adapters were trained on a base in 'nf4'"):
        short.train("sft", at="again", inputs={"model": str(artifact)}, lora={"rank": 2})


BITS4 = {"quant_method": "bitsandbytes", "load_in_4bit": True}
UP = "model.layers.0.mlp.up_proj."


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A model of one layer whose `up_proj` is [out, in] = [160, 128]."""
    table = {**DENSE, "model_type": "llama", "intermediate_size": 160, "num_hidden_layers": 1}
    fresh_model(table).save(tmp_path)
    return tmp_path


def replaced(directory: Path, tensors: dict[str, np.ndarray], method: dict[str, Any]) -> None:
    """Put other tensors in the place of `up_proj`."""
    readers = open_weights(directory)
    others = {
        name: np.array(reader.view(name)) for name, reader in readers.items() if not name.startswith(UP)
    }
    save_file({**others, **tensors}, directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "quantization_config": method}))


@pytest.mark.parametrize(
    ("name", "kind"), [("double", "nf4"), ("single", "nf4"), ("fp4", None), ("int8", "int8")]
)
def test_files_of_bitsandbytes_open_to_the_values_of_their_format(
    directory: Path, name: str, kind: Any
) -> None:
    stored = {k.partition(".")[2]: RECORDED[k] for k in RECORDED if k.startswith(f"{name}.")}
    expected = stored.pop("dequantized", None)
    rows = {"double": 160, "int8": 8}.get(name, 4)
    config = json.loads((directory / "config.json").read_text())
    table = {**config, "intermediate_size": rows}
    fresh_model({k: v for k, v in table.items() if k not in ("architectures", "torch_dtype")}).save(directory)
    method = {"quant_method": "bitsandbytes", "load_in_8bit": True} if name == "int8" else dict(BITS4)
    method |= {"bnb_4bit_use_double_quant": name != "single"}
    replaced(directory, {UP + k: v for k, v in stored.items()}, method)
    with pytest.warns(UserWarning, match=r"converted to float32; adapters can be trained with lora\.base"):
        plain = load_model(directory)
    found = np.asarray(plain.params["layers"]["mlp"]["up_proj"]["kernel"][0]).T
    if expected is None:
        expected = stored["weight"] * (stored["SCB"].astype(np.float64)[:, None] / 127)
    np.testing.assert_allclose(found[:: 40 if name == "double" else 1], expected, rtol=3e-7, atol=1e-9)
    if kind is not None:  # the same values, in the same bits
        held = load_model(directory, quantized=kind)
        part = held.params["layers"]["mlp"]["up_proj"]["quantized"]
        assert ("outer" in part) == (name == "double")
        np.testing.assert_array_equal(
            np.asarray(part["codes"][0]).T.reshape(-1), stored["weight"].reshape(-1)
        )
        merged = held.merged().params["layers"]["mlp"]["up_proj"]["kernel"][0]
        np.testing.assert_allclose(np.asarray(merged).T, found, rtol=3e-7, atol=1e-9)


@pytest.mark.parametrize("scales", [(2, 1), (160, 1), ()], ids=["blocks", "rows", "one"])
def test_fp8_is_multiplied_by_its_scales(directory: Path, scales: tuple[int, ...]) -> None:
    stored = (WEIGHTS * 1000).astype(ml_dtypes.float8_e4m3fn)
    factors = np.random.default_rng(1).uniform(0.5, 2, scales).astype(np.float32)
    tensors = {"weight": stored, "weight_scale_inv": factors, "activation_scale": np.ones((), np.float32)}
    replaced(directory, {UP + k: v for k, v in tensors.items()}, {"quant_method": "fp8"})
    with pytest.warns(UserWarning, match="converted to float32"):
        model = load_model(directory)
    each = factors.repeat(128, 0)[:160] if scales == (2, 1) else factors
    expected = stored.astype(np.float64) * each
    found = np.asarray(model.params["layers"]["mlp"]["up_proj"]["kernel"][0]).T
    np.testing.assert_allclose(found, expected, rtol=1e-7)
