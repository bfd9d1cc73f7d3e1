"""The distribution of kernels: what core takes of it, and what core does without it."""

from __future__ import annotations

import ast
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rlhf_kernels

from rlhf_core import ATTENTION, EXPERTS, InputError, installed_registry, plugins
from rlhf_core.models import find_kernels
from rlhf_core.models.experts import expert_product
from tests.shared.plans import planned_for
from tests.shared.site import forget
from tests.walk.source import files, private_imports

ROOT = Path(__file__).parents[3]
COUNTS = np.array([30, 0, 90], np.int32)


def test_kernels_are_found_for_accelerators_alone() -> None:
    registry = installed_registry()
    assert find_kernels(ATTENTION) is find_kernels(EXPERTS) is None
    for platform in ("gpu", "tpu"):
        with planned_for(platform, 1):
            assert find_kernels(ATTENTION) == registry.get(ATTENTION, "pallas")
            assert find_kernels(EXPERTS) == registry.get(EXPERTS, "pallas")


def gradients(x: Any, kernel: Any) -> str:
    """Write the program of a product of experts and its gradients."""

    def total(x: Any, kernel: Any) -> Any:
        return expert_product(x, kernel, jnp.asarray(COUNTS)).astype(jnp.float32).sum()

    return str(jax.make_jaxpr(jax.grad(total, (0, 1)))(x, kernel))


def test_experts_are_multiplied_in_kernels_where_xla_has_none() -> None:
    """All three products on GPUs, on TPUs the one that makes the kernel's gradient."""
    x = jax.ShapeDtypeStruct((120, 16), jnp.bfloat16)
    kernel = jax.ShapeDtypeStruct((3, 16, 8), jnp.float32)
    for platform, count, others in (("cpu", 0, 3), ("gpu", 3, 0), ("tpu", 1, 2)):
        with planned_for(platform, 1):
            program = gradients(x, kernel)
        assert program.count("pallas_call[") == count
        assert program.count("ragged_dot_general[") == others


def test_without_the_distribution_xla_computes_the_same_and_a_warning_says_so_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(plugins.DISABLE, "rlhf-kernels")
    forget()
    x = jax.ShapeDtypeStruct((120, 16), jnp.bfloat16)
    kernel = jax.ShapeDtypeStruct((3, 16, 8), jnp.float32)
    with planned_for("gpu", 1), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            assert find_kernels(ATTENTION) is None
            program = gradients(x, kernel)
    assert "pallas_call" not in program
    assert program.count("ragged_dot_general[") == 3
    assert [str(each.message) for each in caught] == [
        f"{kind}: computed without kernels, which come with pip install rlhf-kernels"
        for kind in ("attention", "experts")
    ]
    with pytest.raises(InputError, match=r"no attention named 'pallas'\..* \(pip install rlhf-kernels\)"):
        plugins.Registry().get(ATTENTION, "pallas")


def test_the_distribution_imports_public_names_of_core_alone() -> None:
    """So can kernels of others."""
    modules = files(ROOT)
    for file in Path(rlhf_kernels.__file__).parent.glob("*.py"):
        imported = private_imports(ast.parse(file.read_text(encoding="utf-8")), modules)
        others = [name for name in imported if not name.startswith("rlhf_kernels.")]
        assert not others, file.name
