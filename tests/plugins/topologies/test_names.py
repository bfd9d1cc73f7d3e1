"""Names of devices, and the table of chips."""

from __future__ import annotations

import pytest
from rlhf_topologies.chips import CHIPS, USABLE, parse, target_config


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
    topology = parse(name)
    assert (topology.shape, topology.count, topology.machine) == (shape, count, machine)
    assert topology.name == written


def test_every_figure_has_a_source() -> None:
    for chip in CHIPS.values():
        assert " table " in chip.source, chip.name
        assert chip.usable == int(USABLE * chip.memory)
        assert chip.flops["bf16"] >= chip.flops["f32"] > 0
        assert (chip.network is None) == (chip.host is None) == (chip.platform == "tpu")


def test_target_of_the_gpu_compiler_is_from_the_table() -> None:
    for chip in CHIPS.values():
        if chip.platform == "gpu":
            text = target_config(chip)
            assert f"device_memory_size: {chip.memory}\n" in text
            assert f"memory_bandwidth: {chip.memory_bandwidth:.0f}\n" in text
            assert text.count("{") == text.count("}")
