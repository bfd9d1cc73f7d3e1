"""What accelerators have, by their makers' data sheets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

USABLE = 0.9
"""Share of a device's memory that arrays may take; the rest is for the runtime, communication and fragments."""
H100_SHEET = "NVIDIA H100 Tensor Core GPU datasheet, table of specifications, column H100 SXM"
H200_SHEET = "NVIDIA H200 Tensor Core GPU datasheet, table of specifications, column H200 SXM"
A100_SHEET = "NVIDIA A100 Tensor Core GPU datasheet, table of specifications, column A100 80GB SXM"
TPU_PAGE = "Cloud TPU documentation, page TPU {name}, System architecture, table of specifications"


@dataclass(frozen=True)
class Chip:
    """One device.

    name: as it is typed. memory: bytes. flops: {dtype of the factors: products per second, each multiplication and
    addition counted}, without sparsity. memory_bandwidth: bytes per second. link: bytes per second that a device sends
    to others of its machine (GPU) or slice (TPU), all links together, one way. network: the same to other machines, of
    the machines that its maker sells (400 Gb/s per GPU; A100: 200); None: there are no others.
    sources: {field: where its figure is from}.
    target: what XLA's GPU compiler asks about a device, besides what stands above.
    """

    name: str
    platform: Literal["gpu", "tpu"]
    memory: int
    flops: Mapping[str, float]
    memory_bandwidth: float
    link: float
    network: float | None
    sources: Mapping[str, str] = field(default_factory=dict)
    target: Mapping[str, str | int | float] = field(default_factory=dict)

    @property
    def usable(self) -> int:
        """Bytes that a stage's arrays may take."""
        return int(USABLE * self.memory)


def _nvidia(
    name: str,
    sheet: str,
    description: str,
    *,
    memory: int,
    bf16: float,
    tf32: float,
    bandwidth: float,
    link: float,
    network: float,
    capability: tuple[int, int],
    cores: int,
    fpus: int,
    clock_ghz: float,
    l2: int,
    shared_per_core: int,
    shared_per_block: int,
) -> Chip:
    """Describe a GPU. By default jax computes float32 products in TF32 where the chip has it."""
    architecture = (
        "CUDA C++ Programming Guide, Compute Capabilities, table of technical specifications per capability"
    )
    return Chip(
        name,
        "gpu",
        memory,
        {"bf16": bf16, "f16": bf16, "f32": tf32},
        bandwidth,
        link,
        network,
        {
            "memory": f"{sheet}; in bytes as CUDA reports it, where that is known",
            "flops": f"{sheet}; half of what it says with sparsity",
            "memory_bandwidth": sheet,
            "link": f"{sheet}; half of NVLink's figure, which is both ways together",
            "network": "NVIDIA DGX A100, H100 and H200 datasheets, network adapters per GPU",
            "target": architecture,
        },
        {
            "description": description,
            "core_count": cores,
            "fpus_per_core": fpus,
            "clock_rate_ghz": clock_ghz,
            "l2_cache_size": l2,
            "shared_memory_per_core": shared_per_core,
            "shared_memory_per_block_optin": shared_per_block,
            "major": capability[0],
            "minor": capability[1],
        },
    )


def _tpu(name: str, *, memory: int, bf16: float, bandwidth: float, link_gbits: float) -> Chip:
    """Describe a TPU. By default jax computes float32 products in bfloat16 there.

    link_gbits: one way, all ports together: half of the bidirectional figure that newer pages have.
    """
    return Chip(
        name,
        "tpu",
        memory * 10**9,
        {"bf16": bf16, "f16": bf16, "f32": bf16},
        bandwidth,
        link_gbits / 8 * 1e9,
        None,
        dict.fromkeys(("memory", "flops", "memory_bandwidth", "link"), TPU_PAGE.format(name=name)),
    )


_HOPPER: dict[str, Any] = {
    "bf16": 989.4e12,
    "tf32": 494.7e12,
    "link": 450e9,  # NVLink 4: 900 GB/s, both ways together
    "network": 50e9,
    "capability": (9, 0),
    "cores": 132,
    "fpus": 128,
    "clock_ghz": 1.98,
    "l2": 50 << 20,
    "shared_per_core": 228 << 10,
    "shared_per_block": 227 << 10,
}
CHIPS: Mapping[str, Chip] = {
    chip.name: chip
    for chip in (
        _nvidia(
            "a100",
            A100_SHEET,
            "NVIDIA A100-SXM4-80GB",
            memory=80 * 10**9,
            bf16=312e12,
            tf32=156e12,
            bandwidth=2.039e12,
            link=300e9,  # NVLink 3: 600 GB/s, both ways together
            network=25e9,
            capability=(8, 0),
            cores=108,
            fpus=64,
            clock_ghz=1.41,
            l2=40 << 20,
            shared_per_core=164 << 10,
            shared_per_block=163 << 10,
        ),
        _nvidia(
            "h100", H100_SHEET, "NVIDIA H100 80GB HBM3", memory=84_978_434_048, bandwidth=3.35e12, **_HOPPER
        ),
        _nvidia("h200", H200_SHEET, "NVIDIA H200", memory=150_754_820_096, bandwidth=4.8e12, **_HOPPER),
        _tpu("v5e", memory=16, bf16=197e12, bandwidth=819e9, link_gbits=1600),
        _tpu("v5p", memory=95, bf16=459e12, bandwidth=2765e9, link_gbits=4800),
        _tpu("v6e", memory=32, bf16=918e12, bandwidth=1600e9, link_gbits=3200),
    )
}


def target_config(chip: Chip) -> str:
    """Write what XLA's GPU compiler asks about a chip, a text protobuf `GpuTargetConfigProto`."""
    target = chip.target
    return f"""gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {target["shared_memory_per_core"]}
  threads_per_core_limit: 2048
  core_count: {target["core_count"]}
  fpus_per_core: {target["fpus_per_core"]}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {chip.memory_bandwidth:.0f}
  l2_cache_size: {target["l2_cache_size"]}
  clock_rate_ghz: {target["clock_rate_ghz"]}
  device_memory_size: {chip.memory}
  shared_memory_per_block_optin: {target["shared_memory_per_block_optin"]}
  cuda_compute_capability {{ major: {target["major"]} minor: {target["minor"]} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 }}
device_description_str: "{target["description"]}"
"""
