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
from rlhf_core.plugins import load_file

FILE = Path(__file__).parents[2] / "shared" / "mesh_cases.py"
cases: Any = load_file(FILE)
processes: Any = load_file(FILE.parents[1] / "shared" / "processes.py")
SPLIT = (1, 4, 2)
MORE: dict[tuple[int, ...], tuple[str, ...]] = {
    (8, 1, 1): ("gemma2",),
    (2, 2, 2): ("mixtral", "llama, adapters"),
    (1, 2, 2, 2): ("mixtral", "gpt_oss"),
}
"""Shapes on which few families are tried: all are on `SPLIT`, where nothing but the parameters differs in its place."""
BOTH = [
    *((name, SPLIT) for name in cases.FAMILIES),
    *((name, shape) for shape, names in MORE.items() for name in names),
]


COVERING = [("llama, adapters", (2, 2, 2))]
LONG = [("mixtral", SPLIT), ("gemma2", SPLIT), ("gemma4", SPLIT), ("gpt_oss", (1, 2, 2, 2))]
"""Experts; windows and soft caps, of which nothing is spread; layers of several kinds; experts with biases over an axis
of their own."""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A family's directory, by its name."""

    @functools.cache
    def of(name: str) -> Path:
        directory = tmp_path_factory.mktemp("model")
        cases.write(name, directory)
        return directory

    return of


@pytest.fixture(scope="module")
def alone(written: Callable[[str], Path]) -> Callable[[str], Any]:
    """What one device measures of a family, by its name."""

    @functools.cache
    def of(name: str) -> Any:
        return cases.measured(cases.opened(name, written(name), make_mesh(devices=jax.devices()[:1])))

    return of


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        each
        if each in COVERING
        else pytest.param(
            *each,
            marks=pytest.mark.long if each in LONG else pytest.mark.exhaustive,
            id="-".join(map(str, each)),
        )
        for each in BOTH
    ],
    ids=str,
)
def test_eight_devices_agree_with_one(name: str, shape: tuple[int, ...], written: Any, alone: Any) -> None:
    """Logits, loss, and what one update changes."""
    model = cases.opened(name, written(name), make_mesh(*shape))
    if shape[0] < 8:  # else every device holds everything
        layers = model.params["layers"]
        kernel = layers.get("full_attention", layers)["self_attn"]["o_proj"]["kernel"]
        assert np.prod(kernel.sharding.shard_shape(kernel.shape)) < kernel.size
    cases.assert_close(cases.measured(model), alone(name))


@pytest.mark.parametrize(("name", "shape"), BOTH, ids=str)
def test_what_a_mesh_saves_is_what_it_loaded(
    name: str, shape: tuple[int, ...], written: Any, tmp_path: Path
) -> None:
    load_model(written(name), mesh=make_mesh(*shape)).save(tmp_path)
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / file).read_bytes() == (written(name) / file).read_bytes()


@pytest.mark.parametrize("shape", [SPLIT, (2, 2, 2)], ids=str)
def test_adapters_saved_from_a_mesh(shape: tuple[int, int, int], written: Any, tmp_path: Path) -> None:
    name = "llama, adapters"
    model = cases.opened(name, written(name), make_mesh(*shape))
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
