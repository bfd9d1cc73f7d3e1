"""A model whose programs are counted, and what is asked of the environment that compiles them."""

from __future__ import annotations

from typing import Any

from rlhf_core.models import Definition
from tests.shared.decoder_configs import defined

GB = 10**9
SIZES = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
}
ONE = {"data": 1, "fsdp": 1, "tensor": 1}


def model(remat: str = "full", **changes: Any) -> Definition:
    return defined({**SIZES, **changes}, "lm").computing(dtype="bfloat16", remat=remat)


def job(on: str, pipeline: str = "base.toml", **more: Any) -> dict[str, Any]:
    """Return what the other environment is given. more: `suggest`, the seconds that a search may take."""
    return {"on": on, "pipeline": pipeline, "sets": [], "dir": None, "plugins": [], **more}
