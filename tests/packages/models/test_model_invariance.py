"""What a sequence's values and gradients are depends on itself alone: not on its row, its micro-batch or the mesh.

On eight devices a model is the same as on one, and saved the same. In two processes: tests/processes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from rlhf_core.mesh import make_mesh, put_rows
from rlhf_core.metrics import Mean
from rlhf_core.models import Model, load_model, paths
from rlhf_core.objective import trained_logps, trained_weight
from rlhf_core.optimizers import adamw
from rlhf_core.packing import Layout, Tree, pack
from rlhf_core.state import create_state
from rlhf_core.step import Programs
from tests.shared import mesh_cases as cases
from tests.shared.decoder_configs import CONFIGS, defined

WINDOW = {"sliding_window": 30}
LINEAR: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 36,
    # Outputs of the delta rule near zero are normalised, which magnifies rounding.
    "rms_norm_eps": 1e-2,
    "layer_types": ["linear_attention", "full_attention"],
    # XLA on CPU crashes where `data` and `tensor` both cut the heads of these layers: `tensor` divides neither number.
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 3,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
}
EXPERTS = {
    "model_type": "qwen3_5_moe_text",
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "num_experts": 4,
    "shared_expert_intermediate_size": 20,
}
FAMILIES: dict[str, dict[str, Any]] = {
    **{name: CONFIGS[name] for name in ("lfm2_moe", "glm4_moe", "granite", "ministral3", "smollm3")},
    **{name: CONFIGS[name] | WINDOW for name in ("gpt_oss", "olmo3", "gemma2")},
    "qwen3_5": LINEAR,
    "qwen3_5_moe": LINEAR | EXPERTS,
    **{name: CONFIGS[name] | WINDOW for name in CONFIGS if name.startswith("gemma4")},
}
TREES = [
    *((70, (5, 9, 60)), (0, (3,)), (64, (10, 1)), (20, (45, 30, 1)), (0, (90,)), (1, (2, 7)), (5, (33, 26))),
    *((40, (40, 3)), (0, (130,)), (90, (8,))),
]
"""(prefix, branches) in tokens, around chunks of 64 tokens and several windows."""
TIME = 160
LAYOUT = Layout((TIME,), (4,), (8,), (TIME,))
"""Rows of several trees, in two micro-batches; the last rows are empty."""
MESHES = {
    "data 2, fsdp 2": (2, 2, 1),
    "fsdp 2, tensor 2": (1, 2, 2),
    "data 2, tensor 2": (2, 1, 2),
    "fsdp 2, context 2": (1, 2, 1, 1, 2),
    "data 2, context 4": (2, 1, 1, 1, 4),
    "expert 2, context 2, tensor 2": (1, 1, 2, 2, 2),
}
CASES = [
    ("lfm2_moe", "fsdp 2, tensor 2"),
    ("gpt_oss", "fsdp 2, context 2"),
    ("gemma4, shared keys", "data 2, fsdp 2"),
]
"""Convolutions and experts over `fsdp` and `tensor`, windows and sinks over `context`, keys and values of other layers;
the other cases are long."""
ONCE = ("smollm3", "gemma4, shared keys", "gemma4, keys as values", "gemma4, experts")
"""On one mesh, and in loops over layers, which the backward pass computes again."""
LONG = [
    *((name, "data 2, fsdp 2") for name in ONCE),
    *(
        (name, mesh)
        for name in FAMILIES
        for mesh in MESHES
        if "context" not in mesh and name not in (*ONCE, "gemma2")
    ),
    *(("qwen3_5", "data 2, context 4"), ("gemma2", "data 2, context 4"), ("lfm2_moe", "fsdp 2, context 2")),
    *((name, "expert 2, context 2, tensor 2") for name in ("qwen3_5_moe", "gpt_oss")),
]


def make(name: str, mesh: Any) -> Model:
    """A model in which nothing is 0 or 1, with the same parameters on every mesh."""
    definition = defined(FAMILIES[name], "lm")
    draw = np.random.default_rng(0)

    def value(path: Any, leaf: Any) -> Any:
        mean = 0.0 if path[-1].key in ("kernel", "embedding") else 0.3
        return (mean + 0.2 * draw.standard_normal(leaf.shape)).astype(np.float32)

    params = jax.tree.map_with_path(value, definition.abstract_params())
    return Model(definition, jax.device_put(params, definition.shardings(mesh)), None, {}, None, mesh)


def make_trees() -> list[Tree]:
    draw = np.random.default_rng(1)
    made = []
    for prefix, branches in TREES:
        ids = [draw.integers(3, 36, n).astype(np.int32) for n in (prefix, *branches)]
        weights = tuple(draw.uniform(0.5, 1.5, n).astype(np.float32) for n in branches)
        made.append(Tree(ids[0], tuple(ids[1:]), weights))
    return made


def apart(trees: list[Tree]) -> list[Tree]:
    """Each sequence by itself, its prompt's tokens in the prefix."""
    return [
        Tree(t.prefix, (b,), (w,)) for t in trees for b, w in zip(t.branches, t.weights or (), strict=True)
    ]


@functools.cache
def alone(name: str) -> tuple[dict[tuple[str, ...], np.ndarray], float]:
    """(Gradient by path, -Σ weight · log-probability), summed in float64 over passes of one sequence each."""
    model = make(name, make_mesh(devices=jax.devices()[:1]))

    def loss(params: Any, batch: Any) -> Any:
        logps, _ = trained_logps(model.definition, params, batch)
        return -(logps * trained_weight(batch)).sum()

    compute = jax.jit(jax.value_and_grad(loss))
    gradient, total = dict[Any, Any](), 0.0
    for sequence in apart(make_trees()):
        (batch,) = pack([sequence], LAYOUT._replace(rows=(1,)))
        value, of_one = compute(model.params, batch)
        total += float(value)
        for path, leaf in paths(of_one):
            gradient[path] = gradient.get(path, 0) + np.asarray(leaf, np.float64)
    return gradient, total


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        *CASES,
        *(pytest.param(*each, marks=pytest.mark.long) for each in LONG if each not in CASES),
    ],
)
def test_gradients_of_packed_rows_on_a_mesh_are_those_of_each_sequence_alone(name: str, mesh: str) -> None:
    model = make(name, make_mesh(*MESHES[mesh], devices=jax.devices()[: math.prod(MESHES[mesh])]))
    if name in ONCE:
        model = model.computing(remat="full")

    def objective(params: Any, batch: Any) -> tuple[Mean, dict[str, Any]]:
        logps, _ = trained_logps(model.definition, params, batch)
        return Mean.of(-logps, trained_weight(batch)), {}

    state = create_state(model, adamw(0.1))
    programs, done = Programs(objective, state, from_zero=True), None
    batches = pack(make_trees(), LAYOUT)
    assert len(batches) > 1
    for batch in batches:
        done = programs.accumulate(state, put_rows(model.mesh, batch), done)
    assert done is not None
    expected, total = alone(name)
    # Copies of the parameters along `data` may have sums of their own until the update.
    np.testing.assert_allclose(np.sum(done.loss.total), total, rtol=1e-5)
    for path, leaf in paths(done.grads):
        leaf = np.asarray(leaf).reshape(-1, *expected[path].shape).sum(0)
        size = np.abs(expected[path]).max()
        assert size > 0 or path[-1] == "e_score_correction_bias", path
        np.testing.assert_allclose(leaf, expected[path], rtol=0, atol=1e-5 * size, err_msg=".".join(path))


SPLIT = (1, 4, 2)
"""All families are saved from it: nothing but the parameters differs in its place."""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A family's directory, by its name."""

    @functools.cache
    def of(name: str) -> Path:
        directory = tmp_path_factory.mktemp("model")
        cases.write(name, directory)
        return directory

    return of


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("llama, adapters", (2, 2, 2)),
        pytest.param("mixtral", SPLIT, marks=pytest.mark.long),
        pytest.param("gpt_oss", (1, 2, 2, 2), marks=pytest.mark.long),
    ],
    ids=str,
)
def test_eight_devices_agree_with_one(name: str, shape: tuple[int, ...], written: Any) -> None:
    """Logits, loss, and what one update changes; gradients of other families: test_model_invariance.py."""
    model = cases.opened(name, written(name), make_mesh(*shape))
    kernel = model.params["layers"]["self_attn"]["o_proj"]["kernel"]
    assert np.prod(kernel.sharding.shard_shape(kernel.shape)) < kernel.size
    alone = cases.opened(name, written(name), make_mesh(devices=jax.devices()[:1]))
    cases.assert_close(cases.measured(model), cases.measured(alone))


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        *((name, SPLIT) for name in cases.FAMILIES if "adapters" not in name),
        ("gemma2", (8, 1, 1)),
        ("mixtral", (2, 2, 2)),
        ("gpt_oss", (1, 2, 2, 2)),
    ],
    ids=str,
)
def test_what_a_mesh_saves_is_what_it_loaded(
    name: str, shape: tuple[int, ...], written: Any, tmp_path: Path
) -> None:
    load_model(written(name), mesh=make_mesh(*shape)).save(tmp_path)
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / file).read_bytes() == (written(name) / file).read_bytes()


def test_adapters_saved_from_a_mesh(written: Any, tmp_path: Path) -> None:
    name = "llama, adapters"
    model = cases.opened(name, written(name), make_mesh(2, 2, 2))
    model.save(tmp_path / "adapter")
    jax.tree.map(np.testing.assert_array_equal, load_model(tmp_path / "adapter").params, model.params)
