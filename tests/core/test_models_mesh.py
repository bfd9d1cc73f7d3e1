"""The same model on one device, on eight in three mesh shapes, and in two processes."""

from __future__ import annotations

import functools
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from rlhf_core.components import load_file
from rlhf_core.mesh import make_mesh
from rlhf_core.models import load_model

FILE = Path(__file__).with_name("mesh_cases.py")
cases: Any = load_file(FILE)
SHAPES = ((8, 1, 1), (1, 4, 2), (2, 2, 2))
PLACES_ONLY = ("phi3, fused", "olmo2, norms over all heads")
"""Families that differ from others in where their parameters lie only: one shape is enough."""
BOTH = [(name, shape) for name in cases.FAMILIES for shape in SHAPES]
BOTH = [(name, shape) for name, shape in BOTH if name not in PLACES_ONLY or shape == (1, 4, 2)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """(a family's directory, what one device measures), by its name."""

    @functools.cache
    def of(name: str) -> Any:
        directory = tmp_path_factory.mktemp("model")
        cases.write(name, directory)
        model = cases.opened(name, directory, make_mesh(devices=jax.devices()[:1]))
        return directory, cases.measured(model)

    return of


@pytest.mark.slow
@pytest.mark.parametrize(("name", "shape"), BOTH, ids=str)
def test_eight_devices_agree_with_one(name: str, shape: tuple[int, int, int], alone: Any) -> None:
    """Logits, loss, and what one update changes."""
    directory, expected = alone(name)
    model = cases.opened(name, directory, make_mesh(*shape))
    if shape[0] < 8:  # else every device holds everything
        kernel = model.params["layers"]["self_attn"]["o_proj"]["kernel"]
        assert np.prod(kernel.sharding.shard_shape(kernel.shape)) < kernel.size
    cases.assert_close(cases.measured(model), expected)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", list(cases.FAMILIES))
def test_what_a_mesh_saves_is_what_it_loaded(name: str, shape: tuple[int, int, int], tmp_path: Path) -> None:
    cases.write(name, tmp_path / "a")
    load_model(tmp_path / "a", mesh=make_mesh(*shape)).save(tmp_path / "b")
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_adapters_saved_from_a_mesh(shape: tuple[int, int, int], tmp_path: Path) -> None:
    name = "llama, adapters"
    cases.write(name, tmp_path / "base")
    model = cases.opened(name, tmp_path / "base", make_mesh(*shape))
    model.save(tmp_path / "adapter")
    jax.tree.map(np.testing.assert_array_equal, load_model(tmp_path / "adapter").params, model.params)


PROGRAM = """
import sys
import jax
process, count, port, file, source, out = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]
jax.config.update("jax_num_cpu_devices", 4 // count)
if count > 1:
    jax.distributed.initialize(f"localhost:{port}", num_processes=count, process_id=process)
from pathlib import Path
import numpy as np
from rlhf_core.components import load_file
from rlhf_core.mesh import make_mesh
cases = load_file(Path(file))
sizes = {"data": 1, "fsdp": 2, "tensor": 2}
model = cases.opened("gemma2", Path(source), make_mesh(**sizes))
model.save(Path(out) / "saved")
np.savez(Path(out) / f"{process}.npz", **cases.measured(model))
"""


@pytest.mark.slow
def test_two_processes_agree_with_one(tmp_path: Path) -> None:
    """Each reads its own part of the files, and the first writes them all."""
    cases.write("gemma2", tmp_path / "model")
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = str(probe.getsockname()[1])
    environment = {**os.environ, "PYTHONPATH": str(FILE.resolve().parents[2])}
    running = []
    for process, count in ((0, 1), (0, 2), (1, 2)):
        out = tmp_path / str(count)
        out.mkdir(exist_ok=True)
        command = [sys.executable, "-c", PROGRAM, str(process), str(count), port, str(FILE)]
        command += [str(tmp_path / "model"), str(out)]
        running.append(
            subprocess.Popen(
                command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
        )
    try:
        for process in running:
            text, _ = process.communicate(timeout=300)
            assert process.returncode == 0, text
    finally:
        for process in running:
            process.kill()
    alone, first, second = (dict(np.load(tmp_path / path)) for path in ("1/0.npz", "2/0.npz", "2/1.npz"))
    cases.assert_close(first, alone)
    for name, value in first.items():
        np.testing.assert_array_equal(second[name], value)
    given = (tmp_path / "model" / "model.safetensors").read_bytes()
    for count in "12":
        assert (tmp_path / count / "saved" / "model.safetensors").read_bytes() == given
