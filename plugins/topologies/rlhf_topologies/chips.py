"""Accelerators by name (`h100:8`, `h200:2x8`, `h100:1x4x8`, `v5e:4x4`, `v5p:2x2x4`), with figures of data sheets."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from rlhf_core.errors import InputError, suggest

USABLE = 0.9
"""Share of a device's memory that arrays may take; the rest is for the runtime, communication and fragments."""


@dataclass(frozen=True)
class Chip:
    """One device.

    name: as it is typed. memory: bytes. flops: {dtype of the factors: products per second, each multiplication and
    addition counted}, without sparsity. memory_bandwidth: bytes per second. link: bytes per second that a device sends
    to others of its machine (GPU) or slice (TPU), all links together, one way. network: the same to other machines, of
    the machines that its maker sells (400 Gb/s per GPU; A100: 200); None: there are no others. host: the same to the
    host's memory; None: the maker does not say.
    source: where these are from. target: what XLA's GPU compiler asks about a device, besides the above.
    """

    name: str
    platform: Literal["gpu", "tpu"]
    memory: int
    flops: Mapping[str, float]
    memory_bandwidth: float
    link: float
    source: str
    network: float | None = None
    host: float | None = None
    target: Mapping[str, Any] = field(default_factory=dict)

    @property
    def usable(self) -> int:
        """Bytes that a stage's arrays may take."""
        return int(USABLE * self.memory)


# Data sheets give products with sparsity, and NVLink and PCIe in both directions: half of each. Memory is in bytes as
# CUDA reports it, where that is known. JAX computes float32 products in TF32 by default. Targets are from the CUDA C++
# Programming Guide, Compute Capabilities.
_SHEET = (
    "NVIDIA {0} Tensor Core GPU datasheet, table of specifications, column {0} {1}SXM; DGX {0} datasheet, network "
    "adapters per GPU"
)
_HOPPER: dict[str, Any] = {
    "platform": "gpu",
    "flops": {"bf16": 989.4e12, "f16": 989.4e12, "f32": 494.7e12},
    "link": 450e9,
    "network": 50e9,
    "host": 64e9,
}
_HOPPER_TARGET = {
    "core_count": 132,
    "fpus_per_core": 128,
    "clock_rate_ghz": 1.98,
    "l2_cache_size": 50 << 20,
    "shared_memory_per_core": 228 << 10,
    "shared_memory_per_block_optin": 227 << 10,
    "cuda_compute_capability": "{ major: 9 minor: 0 }",
}
_AMPERE_TARGET = {
    "core_count": 108,
    "fpus_per_core": 64,
    "clock_rate_ghz": 1.41,
    "l2_cache_size": 40 << 20,
    "shared_memory_per_core": 164 << 10,
    "shared_memory_per_block_optin": 163 << 10,
    "cuda_compute_capability": "{ major: 8 minor: 0 }",
}


def _tpu(name: str, *, memory: int, bf16: float, bandwidth: float, link_gbits: float) -> Chip:
    """Describe a TPU. JAX computes float32 products in bfloat16 there by default.

    link_gbits: one way, all ports together: half of the bidirectional figure that newer pages have.
    """
    flops = dict.fromkeys(("bf16", "f16", "f32"), bf16)
    source = f"Cloud TPU documentation, page TPU {name}, System architecture, table of specifications"
    return Chip(name, "tpu", memory * 10**9, flops, bandwidth, link_gbits / 8 * 1e9, source)


CHIPS: Mapping[str, Chip] = {
    chip.name: chip
    for chip in (
        Chip(
            "a100",
            "gpu",
            memory=80 * 10**9,
            flops={"bf16": 312e12, "f16": 312e12, "f32": 156e12},
            memory_bandwidth=2.039e12,
            link=300e9,
            network=25e9,
            host=32e9,
            source=_SHEET.format("A100", "80GB "),
            target={"name": "NVIDIA A100-SXM4-80GB", **_AMPERE_TARGET},
        ),
        Chip(
            "h100",
            memory=84_978_434_048,
            memory_bandwidth=3.35e12,
            source=_SHEET.format("H100", ""),
            target={"name": "NVIDIA H100 80GB HBM3", **_HOPPER_TARGET},
            **_HOPPER,
        ),
        Chip(
            "h200",
            memory=150_754_820_096,
            memory_bandwidth=4.8e12,
            source=_SHEET.format("H200", ""),
            target={"name": "NVIDIA H200", **_HOPPER_TARGET},
            **_HOPPER,
        ),
        _tpu("v5e", memory=16, bf16=197e12, bandwidth=819e9, link_gbits=1600),
        _tpu("v5p", memory=95, bf16=459e12, bandwidth=2765e9, link_gbits=4800),
        _tpu("v6e", memory=32, bf16=918e12, bandwidth=1600e9, link_gbits=3200),
    )
}


def target_config(chip: Chip) -> str:
    """Write what XLA's GPU compiler asks about a chip, a text protobuf `GpuTargetConfigProto`."""
    figures = {
        "threads_per_block_limit": 1024,
        "threads_per_warp": 32,
        "shared_memory_per_block": 48 << 10,
        "threads_per_core_limit": 2048,
        "block_dim_limit_x": 2**31 - 1,
        "block_dim_limit_y": 65535,
        "block_dim_limit_z": 65535,
        "registers_per_core_limit": 65536,
        "registers_per_block_limit": 65536,
        "memory_bandwidth": f"{chip.memory_bandwidth:.0f}",
        "device_memory_size": chip.memory,
        **{name: value for name, value in chip.target.items() if name != "name"},
    }
    lines = "".join(f"  {name}: {value}\n" for name, value in figures.items())
    return (
        f'gpu_device_info {{\n{lines}}}\nplatform_name: "CUDA"\ndnn_version_info {{ major: 9 minor: 8 }}\n'
        f'device_description_str: "{chip.target["name"]}"\n'
    )


FORMS = {
    "gpu": "CHIP:[[SLICESx]HOSTSx]DEVICES, such as {chip}:8, or {chip}:2x8 for two machines of eight",
    "tpu": "CHIP:XxY or XxYxZ as the TPU's documentation writes it, such as {chip}:{example}",
}
AXES = {"v5e": 2, "v6e": 2, "v5p": 3}
"""Dimensions of a TPU's interconnect."""


@dataclass(frozen=True)
class Topology:
    """Devices that need not exist. shape: slices × hosts × devices of each (GPU), or as the TPU's name has it."""

    chip: Chip
    shape: tuple[int, ...]

    @property
    def name(self) -> str:
        """Return the name as it is typed, without leading ones."""
        shape = "x".join(map(str, self.shape))
        return f"{self.chip.name}:{re.sub('^(1x)+', '', shape) if self.chip.platform == 'gpu' else shape}"

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    @property
    def machine(self) -> int:
        """Count the devices that reach each other without a network: of a GPU machine, or of the whole TPU slice."""
        return self.shape[-1] if self.chip.platform == "gpu" else self.count


def parse(name: str) -> Topology:
    """Read the name of devices. Raises InputError that says how names are written."""
    kind, _, written = name.strip().lower().partition(":")
    if kind not in CHIPS:
        raise InputError(
            f"--on {name}: no device '{kind}'; there are {', '.join(CHIPS)}.{suggest(kind, CHIPS)}"
        )
    chip = CHIPS[kind]
    shape = tuple(map(int, written.split("x"))) if re.fullmatch(r"\d+(x\d+)*", written) else ()
    if len(shape) not in ((1, 2, 3) if chip.platform == "gpu" else (AXES[kind],)) or 0 in shape:
        form = FORMS[chip.platform].format(chip=kind, example="4x4" if AXES.get(kind) == 2 else "2x2x4")
        raise InputError(f"--on {name}: write {form}")
    return Topology(chip, (1,) * (3 - len(shape)) + shape if chip.platform == "gpu" else shape)
