"""What the devices of a mesh send each other in an update: parameters where they are used, every gradient once."""

from __future__ import annotations

import logging
import math
from typing import Any

import jax
import pytest
from rlhf_topologies.hlo import count_apart

from rlhf_core import create_state
from rlhf_core.mesh import make_mesh
from rlhf_core.metrics import Mean
from rlhf_core.objective import trained_logps, trained_weight
from rlhf_core.optimizers import adamw
from rlhf_core.packing import Layout, empty_batches
from rlhf_core.step import Programs
from rlhf_core.training import definition_of
from tests.shared.drawn import of_shapes
from tests.shared.sent import sent

SIZES = {"hidden_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 512}
TABLE: dict[str, Any] = {"model_type": "llama", "vocab_size": 512, **SIZES}


def described(mesh: Any, **table: Any) -> tuple[Programs, Any, Any]:
    """The programs of a language model whose layers are a loop, its state of shapes, and a micro-batch."""
    found = definition_of({**TABLE, **table}, "lm", None, remat="full")
    assert found is not None
    definition, _ = found

    def objective(params: Any, batch: Any) -> Any:
        logps, entropies = trained_logps(definition, params, batch, entropy=True)
        weight = trained_weight(batch)
        return Mean.of(-logps, weight), {"entropy": Mean.of(entropies, weight)}

    state = create_state(of_shapes(definition, mesh), adamw(1e-3))
    (batch,) = empty_batches(Layout((128,), (8,), (1,), (32,)))
    return Programs(objective, state), state, batch


def spread(state: Any) -> float:
    """Bytes of the parameters that are gathered: all but the embedding, whose rows are sent, and the norms."""
    leaves = jax.tree_util.tree_leaves_with_path(state.params)
    return sum(
        4.0 * math.prod(x.shape)
        for path, x in leaves
        if "norm" not in jax.tree_util.keystr(path) and "embed_tokens" not in jax.tree_util.keystr(path)
    )


def test_fsdp_gathers_parameters_twice_and_sums_gradients_once() -> None:
    """Layers once per pass; the head is kept for the backward pass, here."""
    programs, state, batch = described(make_mesh(1, 8))
    counts = sent(programs.lower(state, batch, False).compile())
    small = 20_000  # norms, metrics
    head = 4.0 * TABLE["vocab_size"] * TABLE["hidden_size"]
    gathered = counts["all-gather"]
    assert gathered == pytest.approx(2 * (spread(state) - head) + head, abs=small)
    summed = sum(counts.get(kind, 0) for kind in ("all-reduce", "reduce-scatter"))
    assert summed == pytest.approx(spread(state), abs=small)


@pytest.mark.parametrize("shape", [(2, 4, 1), pytest.param((2, 2, 2), marks=pytest.mark.long)], ids=str)
def test_devices_along_data_exchange_gradients_once_per_update(shape: tuple[int, int, int]) -> None:
    """Of machines with an equal part of `data` each, `accumulate` sends nothing to another, `apply` one gradient."""
    mesh = make_mesh(*shape)
    programs, state, batch = described(mesh)
    machine = 8 // shape[0]
    for follows in (False, True):
        text = programs.lower(state, batch, follows).compile().as_text()
        assert count_apart(text, machine)[0].network == 0
    once, _ = count_apart(programs.lower_apply(state).compile().as_text(), machine)
    held = sum(math.prod(x.sharding.shard_shape(x.shape)) * 4.0 for x in jax.tree.leaves(state.params))
    assert once.network == pytest.approx(2 * held * (shape[0] - 1) / shape[0], rel=0.01)


def test_what_cannot_be_cut_into_parts_is_summed_over_data_at_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A mixture of experts: `lax.ragged_dot` has no such rule."""
    caplog.set_level(logging.INFO, logger="rlhf_core")
    programs, state, batch = described(
        make_mesh(2, 4), model_type="mixtral", num_local_experts=2, num_experts_per_tok=1
    )
    text = programs.lower(state, batch, False).compile().as_text()
    assert count_apart(text, 4)[0].network > 0
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("gradients are summed over data in every micro-batch (raised NotImplementedError")


def test_devices_gather_their_own_experts_alone() -> None:
    """Of eight experts two, once per pass, from the other device along `fsdp`; tokens are sent instead."""
    programs, state, batch = described(
        make_mesh(1, 2, 1, 4), model_type="mixtral", num_local_experts=8, num_experts_per_tok=2
    )
    counts = sent(programs.lower(state, batch, False).compile())
    layers = state.params["layers"]["mlp"]["experts"]
    experts = sum(4.0 * math.prod(x.shape) for x in jax.tree.leaves(layers))
    head = 4.0 * TABLE["vocab_size"] * TABLE["hidden_size"]
    dense = spread(state) - experts - head
    assert counts["all-gather"] == pytest.approx(2 * (dense + experts / 4) + head, rel=0.02)
    # Forward and again: tokens, outputs; backward: tokens with their gradients, gradients. In float32, for two experts
    # a token, with twice as much room as an even share.
    pairs = 2 * 2 * 128 * 4 * TABLE["hidden_size"] * 3
    assert counts["all-to-all"] == pytest.approx(7 * pairs, rel=0.15)
