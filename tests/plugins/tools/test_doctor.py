"""`rlhf doctor`: what it lists, and each thing that can be wrong, with what to type."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest
from rlhf_tools import doctor

from rlhf_core import InputError, Registry, RunError, plugins
from rlhf_core.plugins import PluginInfo
from tests.shared import commands


def test_it_lists_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "LITTLE", 0)
    monkeypatch.setattr(doctor, "GPUS", ())
    monkeypatch.setattr(doctor, "TPUS", ())
    monkeypatch.setattr(doctor, "SUPPORT", {"cuda": (), "tpu": ()})
    said = commands.rlhf("doctor").stdout
    lines = {line[:18].strip(): line[19:] for line in said.splitlines()}
    assert {"core 0.1.0", "grpo 0.1.0"} <= set(lines["rlhf"].split(", "))
    assert lines["devices"].startswith("8 × cpu")
    assert "rlhf-sft" in lines["plugins"]
    assert "doctor" in lines["commands"].split(", ")
    assert said.endswith("\nnothing is wrong\n")


def test_it_says_on_an_accelerator_whether_kernels_are_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SimpleNamespace(platform="gpu", device_kind="H100", memory_stats=lambda: None)
    monkeypatch.setattr("jax.devices", lambda: [gpu])
    found = doctor.version_of

    def said() -> str:
        return next(each.value for each in doctor.devices() if each.name == "kernels")

    assert said() == f"rlhf-kernels {found('rlhf-core')}"
    monkeypatch.setattr(doctor, "version_of", lambda name: None if name == "rlhf-kernels" else found(name))
    assert said() == "none, so XLA computes attention and experts: pip install rlhf-kernels"


PIPELINE = """
[[stage]]
trainer = "sft"
model = { model_type = "gemma4_text" }
logger = ["jsonl", { name = "mlflow" }]
use_wandb = true
[[stage]]
trainer = "grpo"
model = "policy"
rewards = ["length", "mine.py:short", { name = "judge" }]
"""


def test_it_lists_what_a_pipeline_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy/config.json").write_text('{"model_type": "qwen3_5"}')
    (tmp_path / "pipeline.toml").write_text(PIPELINE)
    monkeypatch.setattr(plugins, "load", lambda: SimpleNamespace(registry=Registry()))

    def needed() -> dict[str, str]:
        found = doctor.of_pipeline(tmp_path / "pipeline.toml")
        problems = [finding.problem for finding in found if finding.problem]
        return {line.rpartition("pip install ")[2]: line.split(": ")[1] for line in problems}

    assert "trainer sft: rlhf-sft is installed and not loaded: see its line above" in "".join(
        finding.problem for finding in doctor.of_pipeline(tmp_path / "pipeline.toml")
    )
    monkeypatch.setattr(doctor, "is_installed", lambda package: False)
    assert needed() == {
        "rlhf-sft": "trainer sft",
        "'rlhf-trackers[mlflow]'": "logger mlflow",
        "'rlhf-trackers[wandb]'": "logger wandb",
        "rlhf-families": "model gemma4, model qwen3_5",
        "rlhf-grpo": "trainer grpo",
        "rlhf-rewards": "reward length",
        "rlhf-remote": "reward judge",
    }
    monkeypatch.undo()
    assert needed().keys() <= {"'rlhf-trackers[mlflow]'", "'rlhf-trackers[wandb]'"}
    (tmp_path / "pipeline.toml").write_text("[[stage]\n")
    with pytest.raises(InputError, match=r"pipeline\.toml: "):
        list(doctor.of_pipeline(tmp_path / "pipeline.toml"))


def broken_plugin(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    info = PluginInfo("mine", "rlhf-mine", "1.0", "failed", error="it raised; uninstall it")
    monkeypatch.setattr(plugins, "load", lambda: SimpleNamespace(plugins=[info]))


def old_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = doctor.version_of
    monkeypatch.setattr(doctor, "version_of", lambda name: "0.1" if name == "flax" else found(name))


def idle_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setattr(doctor, "GPUS", (str(tmp_path),))
    monkeypatch.setattr(doctor, "SUPPORT", {"cuda": (), "tpu": ()})


def no_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setattr(doctor, "GPUS", ())
    monkeypatch.setattr(doctor, "SUPPORT", {"cuda": ("jax",), "tpu": ()})


def gpu_that_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    no_gpu(monkeypatch, tmp_path)
    monkeypatch.setattr(doctor, "GPUS", (str(tmp_path),))
    found = jax.devices()

    def fall_back() -> Any:
        try:
            raise RuntimeError("the driver is too old")
        except RuntimeError:
            logging.getLogger("jax._src.xla_bridge").exception("Jax plugin configuration error")
        return found

    monkeypatch.setattr("jax.devices", fall_back)


def no_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail() -> Any:
        raise RuntimeError("Unable to initialize backend 'tpu'")

    monkeypatch.setattr("jax.devices", fail)


def full_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda place: SimpleNamespace(free=10**6))


def cache_in_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "file/cache"))


def broken_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from importlib.metadata import EntryPoint

    point = EntryPoint("mine", "no_such_package:run", "rlhf.commands")
    monkeypatch.setattr(doctor, "find_points", lambda group: [point])


@pytest.mark.parametrize(
    ("section", "break_it", "said"),
    [
        (doctor.extensions, broken_plugin, "it raised; uninstall it"),
        (
            doctor.software,
            old_library,
            "rlhf-core needs flax>=0.12.8, and 0.1 is installed: pip install 'flax>=0.12.8'",
        ),
        (doctor.devices, idle_gpu, "has a GPU, and jax computes on the CPU: pip install 'rlhf-core[cuda]'"),
        (
            doctor.devices,
            no_gpu,
            "jax[cuda] is installed, and no GPU is visible, so jax computes on the CPU; a ",
        ),
        (doctor.devices, gpu_that_fails, "jax[cuda] computes on the CPU: the driver is too old"),
        (
            doctor.devices,
            no_device,
            "Unable to initialize backend 'tpu'; JAX_PLATFORMS=cpu computes on the CPU",
        ),
        (doctor.disks, full_disk, "of disk is free in "),
        (doctor.disks, cache_in_a_file, "cannot be written, so every run compiles again: set XDG_CACHE_HOME"),
        (doctor.extensions, broken_command, "rlhf mine cannot be loaded"),
    ],
)
def test_what_is_wrong_is_named_with_what_to_type(
    section: Any, break_it: Any, said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    break_it(monkeypatch, tmp_path)
    problems = [finding.problem for finding in section() if finding.problem]
    assert any(said in problem for problem in problems)
    monkeypatch.setattr(doctor, "examine", lambda: list(section()))
    error = commands.rlhf("doctor", fails=True).exception
    assert isinstance(error, RunError)
    assert str(error).strip().splitlines() == problems
