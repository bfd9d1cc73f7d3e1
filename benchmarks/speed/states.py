"""Time a training step of a model with layers that keep a state, next to one with attention alone, by length.

python benchmarks/speed/states.py [--rounds 5] [--lengths 256,512,1024,2048,4096]

qwen3_5_text (six layers of the gated delta rule, two of attention) and qwen3 (eight of attention), 10M parameters each,
float32. A step has one row of each length: forward, backward, AdamW, as SFT makes it. For each: seconds to trace and
compile, seconds of a step (the median, models and lengths in turn), bytes of temporary arrays, and whether the compiled
program has an array with two axes as long as the row.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from typing import Any

import jax
import numpy as np

from rlhf_core import create_state, runtime
from rlhf_core.metrics import Mean
from rlhf_core.models import fresh_model
from rlhf_core.objective import trained_logps, trained_weight
from rlhf_core.optimizers import adamw
from rlhf_core.packing.rows import Layout, pack, tree
from rlhf_core.step import accumulate, apply

COMMON: dict[str, Any] = {
    "hidden_size": 256,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 688,
    "vocab_size": 8192,
    "max_position_embeddings": 8192,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {"model_type": "qwen3"},
    "qwen3_5_text": {
        "model_type": "qwen3_5_text",
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--lengths", default="256,512,1024,2048,4096")
    parser.add_argument("--models", default=",".join(MODELS))
    given = parser.parse_args()
    runtime.prepare()
    lengths = [int(n) for n in given.lengths.split(",")]
    programs = {
        (name, length): Program(name, length) for name in given.models.split(",") for length in lengths
    }
    for _ in range(given.rounds):
        for program in programs.values():
            program.run()
    for (name, length), program in programs.items():
        row = {"model": name, "length": length, "parameters": program.parameters, **program.found}
        print(json.dumps({**row, "step_seconds": float(np.median(program.seconds))}))


class Program:
    """A step of one model on one row, compiled."""

    def __init__(self, name: str, length: int) -> None:
        model = fresh_model(COMMON | MODELS[name])
        self.parameters = sum(x.size for x in jax.tree.leaves(model.params))
        draw = np.random.default_rng(0)
        text = draw.integers(3, 8192, length).astype(np.int32)
        (self.batch,) = pack(
            [tree([text], [np.ones(length, np.float32)])], Layout((length,), (1,), (1,), (length,))
        )
        self.state = create_state(model, adamw(1e-4))
        self.seconds: list[float] = []

        def objective(params: Any, batch: Any) -> Any:
            logps, _ = trained_logps(model.definition, params, batch)
            return Mean.of(-logps, trained_weight(batch)), {}

        def step(state: Any, batch: Any) -> Any:
            return apply(state, accumulate(objective, state.params, batch, None))

        began = time.perf_counter()
        lowered = jax.jit(step, donate_argnums=0).lower(self.state, self.batch)
        traced = time.perf_counter()
        self.step = lowered.compile()
        square = re.compile(rf"\[(?:\d+,)*{length},(?:\d+,)*{length}(?:,\d+)*\]")
        self.found = {
            "trace_seconds": traced - began,
            "compile_seconds": time.perf_counter() - traced,
            "temporary_bytes": self.step.memory_analysis().temp_size_in_bytes,
            "square": bool(square.search(self.step.as_text())),
        }
        self.run()
        self.seconds.clear()

    def run(self) -> None:
        began = time.perf_counter()
        self.state, _ = self.step(self.state, self.batch)
        jax.block_until_ready(self.state)
        self.seconds.append(time.perf_counter() - began)


if __name__ == "__main__":
    main()
