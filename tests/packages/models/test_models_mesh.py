"""The same model on one device and on eight, in several mesh shapes. In two processes: tests/processes."""

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
