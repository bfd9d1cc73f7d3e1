"""Previews and logged weights that do not do, and tokenizers that cannot sample."""

from __future__ import annotations

from rlhf_core.config import TrainerConfig
from rlhf_core.sampling import token_bytes
from tests.mistakes.mistake import call, setting

SHOWN = [
    setting("previews = { from_data = false, every = 2 }", command="check base.toml"),
    setting("previews = { every = 2, sampling = { min_q = 0.1 } }", command="check base.toml"),
    call("generation_temperature alone", lambda place: TrainerConfig(generation_temperature=0.5)),
    call("log_weights = {pattern: '['}", lambda place: TrainerConfig(log_weights={"pattern": "["})),
    call("weight_distribution_pattern alone", lambda place: TrainerConfig(weight_distribution_pattern="mlp")),
    setting('log_weights = { pattern = "mpl", every = 1 }'),
]
SECTIONS = {
    "Previews and logged weights": SHOWN,
    "Tokenizers that cannot sample": [
        call("token_bytes of what is no fast tokenizer", lambda place: token_bytes(object())),
    ],
}
