"""The same model on one device, on eight in three mesh shapes, and in two processes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from rlhf_core.mesh import make_mesh
from rlhf_core.models import load_model
from tests.shared import mesh_cases as cases
from tests.shared import processes

FILE = Path(__file__).parents[2] / "shared" / "mesh_cases.py"
SPLIT = (1, 4, 2)
"""All families are saved from it: nothing but the parameters differs in its place."""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A family's directory, by its name."""

    @functools.cache
    def of(name: str) -> Path:
        directory = tmp_path_factory.mktemp("model")
        cases.write(name, directory)
        return directory

    return of


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("llama, adapters", (2, 2, 2)),
        pytest.param("mixtral", SPLIT, marks=pytest.mark.long),
        pytest.param("gpt_oss", (1, 2, 2, 2), marks=pytest.mark.long),
    ],
    ids=str,
)
def test_eight_devices_agree_with_one(name: str, shape: tuple[int, ...], written: Any) -> None:
    """Logits, loss, and what one update changes; gradients of other families: test_model_invariance.py."""
    model = cases.opened(name, written(name), make_mesh(*shape))
    kernel = model.params["layers"]["self_attn"]["o_proj"]["kernel"]
    assert np.prod(kernel.sharding.shard_shape(kernel.shape)) < kernel.size
    alone = cases.opened(name, written(name), make_mesh(devices=jax.devices()[:1]))
    cases.assert_close(cases.measured(model), cases.measured(alone))


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        *((name, SPLIT) for name in cases.FAMILIES if "adapters" not in name),
        ("gemma2", (8, 1, 1)),
        ("mixtral", (2, 2, 2)),
        ("gpt_oss", (1, 2, 2, 2)),
    ],
    ids=str,
)
def test_what_a_mesh_saves_is_what_it_loaded(
    name: str, shape: tuple[int, ...], written: Any, tmp_path: Path
) -> None:
    load_model(written(name), mesh=make_mesh(*shape)).save(tmp_path)
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / file).read_bytes() == (written(name) / file).read_bytes()


def test_adapters_saved_from_a_mesh(written: Any, tmp_path: Path) -> None:
    name = "llama, adapters"
    model = cases.opened(name, written(name), make_mesh(2, 2, 2))
    model.save(tmp_path / "adapter")
    jax.tree.map(np.testing.assert_array_equal, load_model(tmp_path / "adapter").params, model.params)


PROGRAM = """
from pathlib import Path
import numpy as np
from rlhf_core.plugins.component import load_file
from rlhf_core.mesh import make_mesh
file, source, out = map(Path, arguments)
cases = load_file(file)
model = cases.opened(FAMILY, source, make_mesh(*SHAPE))
model.save(out / "saved")
np.savez(out / f"{process}.npz", **cases.measured(model))
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "shape"), [("gemma2", (1, 2, 2, 1)), ("gpt_oss", (1, 1, 2, 2))], ids=["gemma2", "experts"]
)
def test_two_processes_agree_with_one(
    name: str, shape: tuple[int, ...], written: Any, tmp_path: Path
) -> None:
    """Each reads its own part of the files, and the first writes them all; the second case exchanges tokens."""
    source = written(name)
    for count in "12":
        (tmp_path / count).mkdir()
    program = PROGRAM.replace("FAMILY", repr(name)).replace("SHAPE", repr(shape))
    processes.alone_and_in_two(program, lambda i, n: [FILE, source, tmp_path / str(n)])
    alone, first, second = (dict(np.load(tmp_path / path)) for path in ("1/0.npz", "2/0.npz", "2/1.npz"))
    cases.assert_close(first, alone)
    for name, value in first.items():
        np.testing.assert_array_equal(second[name], value)
    given = (source / "model.safetensors").read_bytes()
    for count in "12":
        assert (tmp_path / count / "saved" / "model.safetensors").read_bytes() == given
