"""A training state as a checkpoint names it: arrays by dotted path, their shapes, and what is kept beside them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from rlhf_core.errors import InputError

PLAIN_KINDS = "biufcSU"
"""Kinds of numpy dtypes that an .npz holds without pickle."""


def leaves(tree: Any) -> dict[str, Any]:
    """Name every leaf by its dotted path, under which a checkpoint stores and compares it."""
    pairs = jax.tree_util.tree_leaves_with_path(tree)
    named = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in pairs}
    if len(named) != len(pairs):
        raise ValueError("two arrays of the state have the same dotted path: a key of it contains a dot")
    return named


def shape(leaf: Any) -> str:
    """Write a leaf's dtype and shape, such as `float32[2,3]`."""
    return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"


def abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    """Describe the array that a leaf is to be read as."""
    sharding = getattr(leaf, "sharding", None) or SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def on_sharding(leaf: Any, wanted: Any) -> Any:
    """Place a typed key as wanted: orbax gives it the sharding of its data, which has one axis more."""
    if not jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return leaf
    return jax.jit(lambda key: key, out_shardings=abstract(wanted).sharding)(leaf)


def plain(name: str, array: Any) -> np.ndarray:
    """Copy an array for an .npz. Raises TypeError for a dtype that needs pickle."""
    copy = np.array(array)
    if copy.dtype.kind not in PLAIN_KINDS:
        raise TypeError(
            f"arrays['{name}'] has dtype {copy.dtype}, which a checkpoint cannot hold; convert it"
        )
    return copy


def compare(directory: Path, saved: Mapping[str, str], wanted: Mapping[str, str]) -> None:
    """Raise InputError, naming the arrays, where a checkpoint was saved from another tree, shape or dtype."""
    problems = [
        f"{name}: saved as {saved.get(name, 'nothing')}, now {wanted.get(name, 'nothing')}"
        for name in sorted({*saved, *wanted})
        if saved.get(name) != wanted.get(name)
    ]
    if problems:
        more = [f"and {len(problems) - 10} more arrays"] if len(problems) > 10 else []
        head = f"{directory} was saved from another model or optimizer; use another --dir, or delete it:"
        raise InputError(head, *(f"  {line}" for line in problems[:10] + more))


def scalar(x: Any) -> Any:
    """Turn a NumPy number into Python's, for JSON. Raises TypeError for anything else."""
    if isinstance(x, np.generic):
        return x.item()
    raise TypeError(f"a checkpoint cannot keep {x!r}; make it a number, a text, or an array beside them")
