"""The table of chips, and what they compute, hold and send, by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from rlhf_topologies import chips, hlo, roofline

from rlhf_core.models import complete_table
from tests.shared.decoder_configs import defined


@pytest.mark.parametrize(
    ("name", "shape", "count", "machine", "written"),
    [
        ("h100:8", (1, 1, 8), 8, 8, "h100:8"),
        ("h200:2x8", (1, 2, 8), 16, 8, "h200:2x8"),
        ("h100:1x4x8", (1, 4, 8), 32, 8, "h100:4x8"),
        ("H100:2x4x8", (2, 4, 8), 64, 8, "h100:2x4x8"),
        ("a100:1", (1, 1, 1), 1, 1, "a100:1"),
        ("v5e:4x4", (4, 4), 16, 16, "v5e:4x4"),
        ("v6e:2x4", (2, 4), 8, 8, "v6e:2x4"),
        ("v5p:2x2x4", (2, 2, 4), 16, 16, "v5p:2x2x4"),
    ],
)
def test_names(name: str, shape: tuple[int, ...], count: int, machine: int, written: str) -> None:
    topology = chips.parse(name)
    assert (topology.shape, topology.count, topology.machine) == (shape, count, machine)
    assert topology.name == written


@pytest.mark.parametrize("by", ["compute", "memory", "link", "network", "host"])
def test_the_slowest_part_sets_the_bound(by: str) -> None:
    chip = chips.CHIPS["h100"]
    work = {"bf16": 2e12, "f32": 1e12, "size": 1e9, "sent": 1e8, "network": 1e7, "host": 1e7}
    larger = {"compute": "bf16", "memory": "size", "link": "sent"}.get(by, by)
    work = {name: value * (1e4 if name == larger else 1) for name, value in work.items()}
    host = work.pop("host")
    products = {name: work[name] for name in ("bf16", "f32")}
    counts = hlo.Counts(products, bytes=work["size"], sent=work["sent"], network=work["network"])
    found = roofline.bound(counts, chip, host)
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


def test_an_embedding_that_no_token_is_multiplied_with_does_not_count() -> None:
    """It is a language model's head where the two are tied, and never a reward model's."""
    table = {"model_type": "llama", "vocab_size": 32, "hidden_size": 8, "intermediate_size": 16}
    table |= {"num_hidden_layers": 2, "num_attention_heads": 2}

    def weights(head: Any, *, tied: bool) -> int:
        hf_config = complete_table({**table, "tie_word_embeddings": tied}, None, None)
        return roofline.token_weights(defined(hf_config, head))

    language = weights("lm", tied=True)
    assert language == weights("lm", tied=False)
    assert language - weights("score", tied=True) == 32 * 8 - 8
    assert weights("score", tied=True) == weights("score", tied=False)


def test_inputs_per_layer_are_looked_up() -> None:
    """Of Gemma 4, whose layers share keys and values: more words cost nothing."""
    table = {"model_type": "gemma4_text", "vocab_size": 32, "hidden_size": 16, "intermediate_size": 32}
    table |= {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    table |= {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2}
    table |= {"global_head_dim": 16, "hidden_size_per_layer_input": 4, "use_double_wide_mlp": True}

    def described(words: int) -> Any:
        hf_config = complete_table({**table, "vocab_size_per_layer_input": words}, None, None)
        return defined(hf_config, "lm")

    mlp, inputs = 3 * 16 * 32 * (2 + 2 * 2), 4 * 4 * (16 + 2 * 16)
    attention = 16 * (8 + 16) * ((4 + 2 + 2 + 4) + (4 + 4))
    norms = 4 * 5 * 16 + 2 * (8 + 16) + 8 + 16 + 4  # and scalars: their layers are stacked
    assert (
        roofline.token_weights(described(32))
        == roofline.token_weights(described(64))
        == 32 * 16 + mlp + inputs + attention + norms
    )


def test_every_figure_has_a_source_and_reaches_the_gpu_compiler() -> None:
    for chip in chips.CHIPS.values():
        assert " table " in chip.source, chip.name
        assert chip.usable == int(chips.USABLE * chip.memory)
        assert chip.flops["bf16"] >= chip.flops["f32"] > 0
        assert (chip.network is None) == (chip.host is None) == (chip.platform == "tpu")
        # A dtype that the table lacks is no faster than float32.
        other = roofline.bound(hlo.Counts(products={"s32": 1e12}), chip)
        assert other.compute == pytest.approx(1e12 / chip.flops["f32"])
        if chip.platform == "gpu":
            text = chips.target_config(chip)
            assert f"device_memory_size: {chip.memory}\n" in text
            assert f"memory_bandwidth: {chip.memory_bandwidth:.0f}\n" in text
            assert text.count("{") == text.count("}")
