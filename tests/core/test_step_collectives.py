"""What the devices of a mesh send each other in an update: parameters where they are used, every gradient once."""

from __future__ import annotations

import math
import os
from collections import Counter
from typing import Any

import jax
import numpy as np
import pytest

from rlhf_core import create_state
from rlhf_core.fit.batches import empty_batches
from rlhf_core.mesh import make_mesh
from rlhf_core.metrics import Mean
from rlhf_core.models import Model
from rlhf_core.objective import trained_logps, trained_weight
from rlhf_core.optimizers import adamw
from rlhf_core.packing.rows import Layout
from rlhf_core.step import Programs
from rlhf_core.topologies import hlo
from rlhf_core.training.memory import definition_of
from rlhf_core.training.programs import planned_params

SIZES = {"hidden_size": 128, "num_hidden_layers": 10, "num_attention_heads": 8, "intermediate_size": 192}
TABLE = {"model_type": "llama", "vocab_size": 512, "num_key_value_heads": 4, **SIZES}


def programs(mesh: Any, **table: Any) -> tuple[Programs, Any, Any]:
    """The programs of a language model, its state of shapes, and a micro-batch; layers are a loop."""
    described = definition_of({**TABLE, **table}, "lm", None, remat="full")
    assert described is not None
    definition, hf_config = described
    model = Model(definition, planned_params(definition, mesh), None, hf_config, None, mesh)

    def objective(params: Any, batch: Any) -> Any:
        logps, entropies = trained_logps(definition, params, batch, entropy=True)
        weight = trained_weight(batch)
        return Mean.of(-logps, weight), {"entropy": Mean.of(entropies, weight)}

    state = create_state(model, adamw(1e-3))
    (batch,) = empty_batches(Layout((64,), (8,), (1,), (32,)))
    return Programs(objective, state), state, batch


def matrices(state: Any) -> float:
    """Bytes of the parameters that `fsdp` and `tensor` shard, but for the embedding, whose rows are sent instead."""
    return sum(
        4.0 * math.prod(x.shape)
        for path, x in jax.tree_util.tree_leaves_with_path(state.params)
        if x.ndim > 1 and "norm" not in str(path) and "embed_tokens" not in str(path)
    )
