"""`rlhf check --devices N`: memory per device for every trainer's stage, without using a device."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import pytest

from rlhf_core.mesh import make_mesh
from rlhf_core.models import load_model

UNITS = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9}
DPO = """
dir = "run"
[[stage]]
name = "direct"
trainer = "dpo"
model = "model"
train_data = "pairs.jsonl"
max_training_steps = 2
total_batch_size = 4
max_sequence_length = 32
"""


def memory(rlhf: Callable[..., Any], pipeline: str, *more: str) -> tuple[str, dict[str, float]]:
    """Parse (where, {part: bytes}) from the output of `rlhf check`, its lines joined."""
    ended = rlhf("check", pipeline, *more)
    assert ended.code == 0, ended.message
    said = " ".join(ended.out.split())
    found = re.search(
        r"memory about ([\d.,]+ [kMG]?B) (.*?), float32: ((?:[a-z ]+ [\d.,]+ [kMG]?B,? ?)+)", said
    )
    assert found, said
    parts = re.findall(r"([a-z ]+?) ([\d.]+) ([kMG]?B)", found[3])
    sizes = {name.strip(): float(number) * UNITS[unit] for name, number, unit in parts}
    number, unit = found[1].split()
    assert float(number) * UNITS[unit] == pytest.approx(sum(sizes.values()), rel=0.02)
    return found[2], sizes


@pytest.mark.parametrize(
    ("pipeline", "head"),
    [
        ("rm", "score"),
        *(pytest.param(name, "lm", marks=pytest.mark.long) for name in ("base", "policy", "direct")),
    ],
)
def test_memory_of_each_device(pipeline: str, head: Any, place: Any, rlhf: Any) -> None:
    """Parameters match what eight devices hold; on one device nothing is divided."""
    place.write("direct.toml", DPO)
    mesh = ("--set", "mesh.data=2", "--set", "mesh.fsdp=-1", "--set", "mesh.tensor=2")
    where, parts = memory(rlhf, f"{pipeline}.toml", "--devices", "8", *mesh)
    assert where == "on each of 8 devices (data 2, fsdp 2, tensor 2)"
    params = load_model(place.path / "model", head, mesh=make_mesh(2, 2, 2)).params
    device = jax.devices()[0]
    shards = [s for leaf in jax.tree.leaves(params) for s in leaf.addressable_shards if s.device == device]
    held = sum(shard.data.nbytes for shard in shards)
    assert parts["parameters"] == pytest.approx(held, rel=0.01)
    assert parts["optimizer"] == pytest.approx(2 * held, rel=0.01)  # AdamW's moments
    where, whole = memory(rlhf, f"{pipeline}.toml")
    assert where == "in all"
    for part in (
        "copies while saving",
        "process",
    ):  # memory of the process on this machine besides the device's arrays
        assert whole.pop(part) > 0
    if pipeline == "policy":
        assert whole.pop("sampler") == whole["parameters"]
    assert memory(rlhf, f"{pipeline}.toml", "--devices", "1")[1] == whole
    assert set(parts) == set(whole)
    if pipeline == "policy":
        assert parts["reference"] == parts["gradients"]
        # 2 prompts × 2 completions on four shares of the rows: one prompt each, two of them empty.
        assert parts["rollout cache"] == pytest.approx(whole["rollout cache"] / 2, rel=0.01)


def test_a_loss_without_a_reference_takes_the_memory_of_sft(place: Any, rlhf: Any) -> None:
    """Of a stream, whose references are computed for each update, so that the starting model stays in memory."""
    stream = DPO.replace('"pairs.jsonl"', '{ path = "pairs.jsonl", streaming = true }')
    place.write("sft.toml", stream.replace('"dpo"', '"sft"'))
    place.write("sigmoid.toml", stream)
    place.write("simpo.toml", f'{stream}loss = "simpo"\n')
    sft, sigmoid, simpo = (memory(rlhf, f"{name}.toml")[1] for name in ("sft", "sigmoid", "simpo"))
    assert sigmoid["starting model"] == sigmoid["parameters"]
    assert set(simpo) == set(sft)
    for part in set(sft) - {"activations", "process"}:  # a row of theirs holds one completion
        assert simpo[part] == sft[part], part
        assert sigmoid[part] == sft[part], part


def test_no_device_is_touched(place: Any, rlhf: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("devices were asked for")

    for name in ("devices", "local_devices"):
        monkeypatch.setattr(jax, name, refuse)
    assert (
        "1,024 devices (data 256, fsdp 4, tensor 1)"
        in memory(rlhf, "policy.toml", "--devices", "1024", "--set", "mesh.fsdp=4")[0]
    )


def test_a_mesh_that_does_not_fit_is_reported_with_all_else(place: Any, rlhf: Any) -> None:
    place.write("corpus.jsonl", '{"prompt": "a"}\n')
    ended = rlhf("check", "base.toml", "--devices", "8", "--set", "mesh.tensor=3")
    assert ended.code == 2
    assert "mesh.tensor: 3 does not fit 8 devices: it must divide 8; set mesh.tensor = 2" in ended.message
    assert "corpus.jsonl" in ended.message
