"""Small models, and what one update of them is on a mesh."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from rlhf_core.mesh import put_rows, replicated_sharding
from rlhf_core.metrics import Mean
from rlhf_core.models import Model, fresh_model, join, load_model, paths, split
from rlhf_core.objective import trained_logps, trained_weight
from rlhf_core.optimizers import adamw
from rlhf_core.packing import Layout, pack, tree
from rlhf_core.state import create_state
from rlhf_core.step import Programs
from tests.shared.decoder_configs import FAMILIES as FIELDS

SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 36,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GEMMA4 = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
GEMMA4 |= {"num_kv_shared_layers": 2, "attention_k_eq_v": True, "hidden_size_per_layer_input": 4}
GEMMA4 |= {"rms_norm_eps": 1.0}  # without it, norms of short vectors enlarge rounding
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": SIZES | {"model_type": "llama"},
    "gemma2": SIZES | FIELDS["gemma2"],
    "phi3, fused": SIZES | {"model_type": "phi3"},
    "olmo2, norms over all heads": SIZES | FIELDS["olmo2"],
    "gemma4": SIZES | FIELDS["gemma4, keys as values"] | GEMMA4,
    "mixtral": SIZES | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": SIZES | FIELDS["gpt_oss"],
    "llama, adapters": SIZES | {"model_type": "llama"},
}
LAYOUT = Layout((24,), (8,), (4,), (20,))
EPSILON = 0.1
"""Adam's: its first update is otherwise the gradient's sign, which rounding turns where a gradient is near zero."""


def write(name: str, directory: Path) -> None:
    """The family's model in Hugging Face layout: drawn once, so that meshes differ in nothing but themselves."""
    fresh_model(FAMILIES[name], seed=3).save(directory)


def opened(name: str, directory: Path, mesh: Any) -> Model:
    model = load_model(directory, mesh=mesh)
    if "adapters" not in name:
        return model
    model = model.with_lora(rank=3, targets=["q_proj", "o_proj", "down_proj"], seed=5)
    key = jax.random.key(6)
    drawn: dict[str, Any] = {}  # B starts at zero, and A would have no gradient
    for number, (path, leaf) in enumerate(paths(model.params)):
        if path[-1] == "lora_b":
            value = 0.3 * jax.random.normal(jax.random.fold_in(key, number), leaf.shape)
            inner = drawn
            for part in path[:-1]:
                inner = inner.setdefault(part, {})
            inner[path[-1]] = value
    b = frozenset(path for path, _ in paths(drawn))
    params = join(split(model.params, b)[0], drawn)
    return model.with_params(jax.device_put(params, model.definition.shardings(mesh)))


def measured(model: Model) -> dict[str, np.ndarray]:
    """Logits of padded rows, the loss of an update in two micro-batches, and every parameter that it changed."""
    draw = np.random.default_rng(0)
    ids = draw.integers(3, 36, (8, 11)).astype(np.int32)
    mask = (np.arange(11) >= draw.integers(0, 6, (8, 1))).astype(np.int32)
    logits = _host(model.mesh, model.logits(ids, mask)) * mask[..., None].astype(np.float32)

    def objective(params: Any, batch: Any) -> tuple[Mean, Mapping[str, Any]]:
        logps, _ = trained_logps(model.definition, params, batch)
        return Mean.of(-logps, trained_weight(batch)), {}

    texts = [draw.integers(3, 36, n).astype(np.int32) for n in draw.integers(4, 20, 24)]
    batches = pack([tree([t], [np.ones(len(t), np.float32)]) for t in texts], LAYOUT)
    assert len(batches) > 1
    state = create_state(model, adamw(0.1, eps=EPSILON))
    programs, done = Programs(objective, state, from_zero=True), None
    for batch in batches:
        done = programs.accumulate(state, put_rows(model.mesh, batch), done)
    assert done is not None
    before = dict(paths(_host(model.mesh, state.trained().params)))
    state, metrics = programs.apply(state, done)
    loss = _host(model.mesh, metrics["loss"].result())
    after = paths(_host(model.mesh, state.trained().params))
    changes = {"change." + ".".join(path): leaf - before[path] for path, leaf in after}
    return {"logits": logits, "loss": loss, **changes}


def _host(mesh: Any, tree: Any) -> Any:
    """Whole arrays on every process."""
    return jax.device_get(jax.jit(lambda x: x, out_shardings=replicated_sharding(mesh))(tree))


def assert_close(found: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> None:
    """To float32 rounding, relative to the largest of an array: sums are taken in another order."""
    assert set(found) == set(expected)
    for name, value in expected.items():
        size = np.abs(value).max()
        assert size > 0, name
        np.testing.assert_allclose(found[name], value, rtol=0, atol=2e-5 * size, err_msg=name)
