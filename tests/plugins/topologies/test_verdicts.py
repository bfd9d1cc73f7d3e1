"""The roofline against NumPy, and what is said of programs that do not fit."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
from rlhf_topologies.check import lines, program_table
from rlhf_topologies.chips import CHIPS, parse
from rlhf_topologies.hlo import Counts
from rlhf_topologies.pass_memory import pass_bytes
from rlhf_topologies.roofline import bound, token_weights
from rlhf_topologies.verdicts import judge_stage

from rlhf_core.models import DECODER
from rlhf_core.models.loading import complete_table, describe

MESH = {"data": 1, "fsdp": 8, "tensor": 1}
GB = 10**9


def counts(
    bf16: float = 0.0, f32: float = 0.0, size: float = 0.0, sent: float = 0.0, network: float = 0.0
) -> dict[str, Any]:
    return asdict(Counts({"bf16": bf16, "f32": f32}, bytes=size, sent=sent, network=network))


def program(name: str = "accumulate 8 × 512", work: str = "train", **changes: Any) -> dict[str, Any]:
    return {
        "name": name,
        "work": work,
        "calls": 2.0,
        "tokens": 4000.0,
        "steps": 0,
        "rows": 16,
        "host": 0.0,
        "beside": 8 * GB,
        "memory": {"arguments": 6 * GB, "outputs": 5 * GB, "aliased": 4 * GB, "temporary": 10 * GB},
        "once": counts(bf16=1e14, size=1e11),
        "loops": [],
        **changes,
    }


def stage(*programs: Any, resident: dict[str, int] | None = None) -> dict[str, Any]:
    held = resident or {"parameters": 4 * GB, "optimizer": 8 * GB}
    return {"note": None, "remat": "auto", "resident": held, "weights": 7 * GB, "programs": list(programs)}


@pytest.mark.parametrize("by", ["compute", "memory", "link", "network", "host"])
def test_the_slowest_part_sets_the_bound(by: str) -> None:
    chip = CHIPS["h100"]
    work = {"bf16": 2e12, "f32": 1e12, "size": 1e9, "sent": 1e8, "network": 1e7, "host": 1e7}
    larger = {"compute": "bf16", "memory": "size", "link": "sent"}.get(by, by)
    work = {name: value * (1e4 if name == larger else 1) for name, value in work.items()}
    host = work.pop("host")
    found = bound(Counts(**counts(**work)), chip, host)
    seconds = {
        "compute": np.float64(work["bf16"]) / 989.4e12 + np.float64(work["f32"]) / 494.7e12,
        "memory": np.float64(work["size"]) / 3.35e12,
        "link": np.float64(work["sent"]) / 450e9,
        "network": np.float64(work["network"]) / 50e9,
        "host": np.float64(host) / 64e9,
    }
    for name, value in seconds.items():
        assert getattr(found, name) == pytest.approx(value)
    assert (found.by, found.seconds) == (by, pytest.approx(seconds[by]))


def test_a_dtype_that_the_table_lacks_is_no_faster_than_float32() -> None:
    chip = CHIPS["h100"]
    assert bound(Counts(products={"s32": 1e12}), chip).compute == pytest.approx(1e12 / 494.7e12)


def test_an_embedding_that_no_token_is_multiplied_with_does_not_count() -> None:
    """It is a language model's head where the two are tied, and never a reward model's."""
    table = {"model_type": "llama", "vocab_size": 32, "hidden_size": 8, "intermediate_size": 16}
    table |= {"num_hidden_layers": 2, "num_attention_heads": 2}

    def weights(head: Any, *, tied: bool) -> int:
        hf_config = complete_table({**table, "tie_word_embeddings": tied}, None, None)
        return token_weights(describe(DECODER, hf_config, head, "model"))

    language = weights("lm", tied=True)
    assert language == weights("lm", tied=False)
    assert language - weights("score", tied=True) == 32 * 8 - 8
    assert weights("score", tied=True) == weights("score", tied=False)


def test_inputs_per_layer_are_looked_up() -> None:
    """Of Gemma 4, whose layers share keys and values: more words cost nothing, and two devices share its layers."""
    table = {"model_type": "gemma4_text", "vocab_size": 32, "hidden_size": 16, "intermediate_size": 32}
    table |= {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    table |= {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2}
    table |= {"global_head_dim": 16, "hidden_size_per_layer_input": 4, "use_double_wide_mlp": True}

    def described(words: int, **changes: Any) -> Any:
        hf_config = complete_table({**table, "vocab_size_per_layer_input": words, **changes}, None, None)
        return describe(DECODER, hf_config, "lm", "model")

    mlp, inputs = 3 * 16 * 32 * (2 + 2 * 2), 4 * 4 * (16 + 2 * 16)
    attention = 16 * (8 + 16) * ((4 + 2 + 2 + 4) + (4 + 4))
    norms = 4 * 5 * 16 + 2 * (8 + 16) + 8 + 16 + 4  # and scalars: their layers are stacked
    assert (
        token_weights(described(32))
        == token_weights(described(64))
        == 32 * 16 + mlp + inputs + attention + norms
    )
    one = {"data": 1, "fsdp": 1, "tensor": 1}
    two = described(32, num_hidden_layers=2, num_kv_shared_layers=1, layer_types=["full_attention"] * 2)
    whole, half = (pass_bytes(two, (2, 64), one | {"tensor": n}, trains=True) for n in (1, 2))
    assert half < whole


def test_speed_at_most() -> None:
    """Two micro-batches and an update; sampling of 64 steps of 1 ms after 100 ms of prefill."""
    chip = CHIPS["h100"]
    step = counts(size=chip.memory_bandwidth * 1e-3)
    made = judge_stage(
        stage(
            program(once=counts(bf16=989.4e12)),
            program("apply", "update", calls=1.0, tokens=0.0, once=counts(size=3.35e12)),
            program(
                "generate",
                "sample",
                calls=0.5,
                tokens=1000.0,
                steps=64,
                once=counts(bf16=98.94e12),
                loops=[counts(size=1.0), step],
            ),
        ),
        parse("h100:8"),
        MESH,
    )
    assert made["fits"]
    assert made["training_seconds"] == pytest.approx(2 * 1.0 + 1.0)
    assert made["sampling_seconds"] == pytest.approx(0.5 * (0.1 + 64 * 1e-3))
    assert made["update_seconds"] == pytest.approx(made["training_seconds"] + made["sampling_seconds"])
    peak = 8 * 989.4e12
    assert made["training_mfu"] == pytest.approx(6 * 7 * GB * 8000 / (3.0 * peak))
    assert made["sampling_mfu"] == pytest.approx(2 * 7 * GB * 500 / (made["sampling_seconds"] * peak))
    assert made["programs"][2]["bound"] == "compute"
    shown = "\n".join(lines(made))
    assert f"training: at most {8000 / 3:,.0f} tokens/s" in shown
    assert "always in memory: parameters 4.0 GB, optimizer 8.0 GB" in shown
    assert "fits: at most 25.0 GB of 76.5 GB" in shown
    assert program_table(made).row_count == 4  # a row for the steps
    # Of two loops the one that moves more.
    assert made["programs"][2]["step"]["bytes"] == step["bytes"]


def test_memory_counts_a_program_and_what_stays_in_memory() -> None:
    """6 + 10 + (5 − 4) + 8 GB."""
    (found,) = judge_stage(stage(program()), parse("h100:8"), MESH)["programs"]
    assert found["peak"] == 25 * GB
    assert found["memory"] == {"arguments": 6 * GB, "temporary": 10 * GB, "outputs": GB, "beside": 8 * GB}


@pytest.mark.parametrize(
    ("work", "words"),
    [
        ("train", ['remat = "full"', "gradient_accumulation_steps"]),
        ("sample", ["sampling.mesh.tensor", "max_completion_length"]),
        ("read", ["shorter rows"]),
        ("update", ["mesh.fsdp"]),
    ],
)
def test_what_to_change_where_something_does_not_fit(work: str, words: list[str]) -> None:
    large = program("big", work, memory={"arguments": 0, "outputs": 0, "aliased": 0, "temporary": 70 * GB})
    made = judge_stage(stage(large), parse("h100:8"), MESH)
    assert not made["fits"]
    for word in words:
        assert word in " ".join(made["advice"])
    assert "does not fit: 78.0 GB of 76.5 GB in big" in lines(made)
    already = judge_stage({**stage(large), "remat": "full"}, parse("h100:8"), MESH)
    assert "remat" not in " ".join(already["advice"])


def test_a_row_per_device_cannot_be_split_further() -> None:
    large = program("big", memory={"arguments": 0, "outputs": 0, "aliased": 0, "temporary": 70 * GB}, rows=8)
    (advice,) = judge_stage(stage(large), parse("h100:8"), MESH)["advice"]
    assert "mesh.context" in advice
    assert "gradient_accumulation_steps" not in advice


def test_a_state_that_is_too_large_is_to_be_spread() -> None:
    state = {"parameters": 20 * GB, "optimizer": 40 * GB}
    large = program("apply", "update", beside=70 * GB)
    (advice,) = judge_stage(stage(large, resident=state), parse("h100:8"), {**MESH, "fsdp": 1})["advice"]
    assert "parameters, optimizer: set mesh = { fsdp = 8 }" in advice
    (advice,) = judge_stage(stage(large, resident=state), parse("h100:8"), MESH)["advice"]
    assert "use more devices, or train adapters" in advice


def test_a_compiler_that_refuses_for_memory_gets_the_same_advice() -> None:
    refused = {key: value for key, value in program().items() if key not in ("memory", "once", "loops")}
    made = judge_stage(stage({**refused, "error": "RESOURCE_EXHAUSTED: used 20G"}), parse("v5e:2x4"), MESH)
    assert not made["fits"]
    assert 'remat = "full"' in " ".join(made["advice"])
    other = judge_stage(stage({**refused, "error": "INTERNAL: a bug"}), parse("v5e:2x4"), MESH)
    assert other["advice"] == ["accumulate 8 × 512: the compiler says: INTERNAL: a bug"]


def test_a_trainer_that_does_not_describe_its_programs() -> None:
    made = judge_stage(None, parse("h100:8"), MESH)
    assert made["fits"]
    assert lines(made) == ["not compiled: its trainer has no build"]
