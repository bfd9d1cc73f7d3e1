"""Matrices of a frozen base in four or eight bits, as bitsandbytes stores them.

nf4 (Dettmers et al. 2023, QLoRA): each block of 64 inputs of one output is divided by its largest absolute value, and
every number becomes the nearest of 16 values, two numbers to a byte. The largest values of a matrix are quantized in
turn: their mean is subtracted, and blocks of 256 become the nearest of 256 values. int8 (Dettmers et al. 2022): the
inputs of each output are multiplied by 127 / their largest absolute value, and rounded. Activations stay as they are.

A matrix of the model is [in, out]; in files it is [out, in].
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from rlhf_core.mesh import gathered

Quantization: TypeAlias = Literal["nf4", "nf4_plain", "int8"]
"""nf4_plain: nf4 whose blocks' largest values are not quantized."""
GROUP = "quantized"
"""The key of a module's matrix, in place of `kernel`."""
BLOCK = 64
"""Inputs of a block; a matrix with another number of inputs than a multiple of it is not quantized to nf4."""
OUTER = 256
"""Blocks whose largest values are quantized together."""
NF4 = np.array(
    [
        [-1, -0.696192801, -0.525073051, -0.394917488, -0.284441382, -0.18477343, -0.0910500363, 0],
        [0.0795802996, 0.160930201, 0.246112302, 0.337915242, 0.440709829, 0.562617004, 0.722956836, 1],
    ],
    np.float32,
).reshape(16)
"""The numbers that four bits stand for: centres of equal shares of a normal distribution, scaled to [-1, 1]."""
BAND = 1 << 22
"""Numbers of a matrix that are quantized together: what the host holds of it in float32."""


@functools.cache
def scale_values() -> np.ndarray:
    """Return the 256 values that blocks' largest values become, float32, ascending: 0, 1, and for each power of ten
    10⁻⁶ … 1 the centres of 1, 2, 4, … 64 equal parts of [0.1, 1] times it, with both signs (Dettmers 2015).
    """
    values = [np.array([0, 1], np.float32)]
    start = np.float64(np.float32(0.1))
    for exponent in range(7):
        count = 2**exponent
        numbers = np.arange(count + 1)
        step = np.float64(np.float32((1 - start) / count))
        # To the last bit those of bitsandbytes: edges are counted from the nearer end, in float32.
        edges = np.where(numbers < (count + 1) // 2, start + numbers * step, 1 - (count - numbers) * step)
        edges = edges.astype(np.float32)
        centres: np.ndarray = (edges[:-1] + edges[1:]) / 2 * np.float32(10.0 ** (exponent - 6))
        values += [centres, -centres]
    return np.sort(np.concatenate(values))


def _nearest(values: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Return the index, uint8, of the nearest of ascending `values`."""
    nearest: np.ndarray = np.searchsorted((values[1:] + values[:-1]) / 2, x)
    return nearest.astype(np.uint8)


def can_quantize(kind: Quantization, size: int) -> bool:
    """Tell whether a matrix with so many inputs can be quantized."""
    return kind == "int8" or size % BLOCK == 0


def plain(kind: Quantization | None) -> Quantization | None:
    """Return how the arrays are held that `with_plain_scales` returns."""
    return "nf4_plain" if kind == "nf4" else kind


def layout(
    kind: Quantization, shape: Sequence[int], axes: Sequence[str | None]
) -> dict[str, tuple[tuple[int, ...], Any, tuple[str | None, ...]]]:
    """Return {array: (shape, dtype, logical axes)} of stacked matrices [..., in, out].

    nf4: `codes` uint8 [..., in / 2, out], of two inputs the first in the upper half; `scales` uint8 [..., in / 64,
    out], indices into `scale_values`, times `outer`, float32 [..., blocks / 256], a factor for 256 of them by output
    and then by input, plus `mean`, float32 [...]. nf4_plain: `codes`, and `scales` float32 [..., in / 64, out]. int8:
    `codes` int8 [..., in, out], `scales` float32 [..., 1, out].
    """
    *lead, size, out = shape
    named = tuple(axes)
    if kind == "int8":
        return {
            "codes": ((*lead, size, out), np.int8, named),
            "scales": ((*lead, 1, out), np.float32, (*named[:-2], None, named[-1])),
        }
    codes = {"codes": ((*lead, size // 2, out), np.uint8, named)}
    if kind == "nf4_plain":
        return {**codes, "scales": ((*lead, size // BLOCK, out), np.float32, named)}
    return {
        **codes,
        "scales": ((*lead, size // BLOCK, out), np.uint8, named),
        # Small, and read by all devices: its order is that of the whole matrix.
        "outer": ((*lead, math.ceil(size // BLOCK * out / OUTER)), np.float32, (*named[:-2], None)),
        "mean": (tuple(lead), np.float32, named[:-2]),
    }


def quantize(kind: Quantization, tensor: np.ndarray) -> dict[str, np.ndarray]:
    """Quantize one matrix of a file, [out, in] of any float dtype, to the arrays of `layout`."""
    out, size = tensor.shape
    bands = [slice(i, i + max(BAND // size, 1)) for i in range(0, out, max(BAND // size, 1))]
    if kind == "int8":
        codes = np.empty((out, size), np.int8)
        largest = np.empty((out, 1), np.float32)
        for band in bands:
            part = tensor[band].astype(np.float32)
            largest[band] = np.abs(part).max(1, keepdims=True)
            codes[band] = np.rint(part * (127 / _not_zero(largest[band])))
        return {"codes": np.ascontiguousarray(codes.T), "scales": largest.T}
    codes = np.empty((out, size // 2), np.uint8)
    largest = np.empty((out, size // BLOCK), np.float32)
    for band in bands:
        part = tensor[band].astype(np.float32).reshape(-1, size // BLOCK, BLOCK)
        largest[band] = np.abs(part).max(2)
        numbers = _nearest(NF4, part / _not_zero(largest[band])[:, :, None]).reshape(len(part), size)
        codes[band] = numbers[:, ::2] << 4 | numbers[:, 1::2]
    scales = {"scales": np.ascontiguousarray(largest.T)} if kind == "nf4_plain" else quantize_scales(largest)
    return {"codes": np.ascontiguousarray(codes.T), **scales}


def quantize_scales(largest: np.ndarray) -> dict[str, np.ndarray]:
    """Quantize the largest values of a matrix's blocks, float32 [out, in / 64], to the last three arrays of nf4."""
    mean = np.asarray(largest.mean(dtype=np.float32))
    flat = np.zeros(-(-largest.size // OUTER) * OUTER, np.float32)
    flat[: largest.size] = largest.reshape(-1) - mean
    outer = np.abs(flat.reshape(-1, OUTER)).max(1)
    codes = _nearest(scale_values(), flat.reshape(-1, OUTER) / _not_zero(outer)[:, None])
    scales = codes.reshape(-1)[: largest.size].reshape(largest.shape)
    return {"scales": np.ascontiguousarray(scales.T), "outer": outer, "mean": mean}


def _not_zero(x: np.ndarray) -> np.ndarray:
    return np.where(x == 0, np.float32(1), x)


def scales_of(arrays: Mapping[str, jax.Array]) -> jax.Array:
    """Compute the largest values of blocks, float32 [..., in / 64, out]; of int8 [..., 1, out]."""
    scales = arrays["scales"]
    if "outer" not in arrays:
        return scales
    *lead, blocks, out = scales.shape
    # Broadcast, not looked up: accelerators are slow at that.
    each = jnp.repeat(arrays["outer"], OUTER, axis=-1)[..., : blocks * out].reshape(*lead, out, blocks)
    values = jnp.asarray(scale_values()).at[scales].get(mode="promise_in_bounds")
    return values * each.swapaxes(-1, -2) + arrays["mean"][..., None, None]


def dequantize(arrays: Mapping[str, jax.Array], dtype: Any) -> jax.Array:
    """Compute the matrices [..., in, out] that the arrays of `layout` stand for; in float32, then rounded to `dtype`.

    `scales` may be those that `scales_of` returns, without `outer` and `mean`.
    """
    codes = arrays["codes"]
    scales = scales_of(arrays)
    if codes.dtype == jnp.int8:
        return (codes.astype(jnp.float32) * (scales / 127)).astype(dtype)
    *lead, half, out = codes.shape
    both = jnp.stack([codes >> 4, codes & 15], axis=-2).reshape(*lead, scales.shape[-2], -1, out)
    numbers = jnp.asarray(NF4).at[both].get(mode="promise_in_bounds")
    return (numbers * scales[..., None, :]).reshape(*lead, 2 * half, out).astype(dtype)


class PlainScaled(NamedTuple):
    """Matrices in few bits whose scales are not quantized: the arrays of nf4_plain or int8."""

    codes: Any
    scales: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the matrices, [..., in, out]."""
        *lead, size, out = self.codes.shape
        return (*lead, size if self.codes.dtype == jnp.int8 else 2 * size, out)

    def matrices(self, dtype: Any) -> jax.Array:
        return dequantize(self._asdict(), dtype)


def with_plain_scales(params: Mapping[str, Any]) -> dict[str, Any]:
    """Compute the scales of every quantized module among the parameters, as `plain` names them."""
    computed: dict[str, Any] = {}
    for name, value in params.items():
        if name == GROUP:
            computed[name] = {"codes": value["codes"], "scales": scales_of(value)}
        elif isinstance(value, Mapping):
            computed[name] = with_plain_scales(value)
        else:
            computed[name] = value
    return computed


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def quantized_product(
    x: jax.Array, arrays: Mapping[str, jax.Array], axes: tuple[tuple[str, tuple[str | None, ...]], ...]
) -> jax.Array:
    """Compute x · matrix, [N, in] · [in, out], in the dtype of `x`. axes: each array's
    name and logical axes.

    The backward pass dequantizes again: of a layer, only its codes are kept for it. The arrays get no gradient.
    """
    arrays, x = only_now(arrays, x)
    return x @ _whole(arrays, axes, x.dtype)


def only_now(arrays: Any, x: jax.Array) -> tuple[Any, jax.Array]:
    """Return both, so that the compiler dequantizes the arrays where `x` is known, and not once for several passes."""
    pair: tuple[Any, jax.Array] = lax.optimization_barrier((arrays, x))
    return pair


def _whole(arrays: Mapping[str, jax.Array], axes: Any, dtype: Any) -> jax.Array:
    """Gather what `fsdp` spreads, in few bits, and dequantize it."""
    return dequantize({name: gathered(arrays[name], named) for name, named in axes}, dtype)


def _forward(x: jax.Array, arrays: Any, axes: Any) -> tuple[jax.Array, Any]:
    return quantized_product(x, arrays, axes), arrays


def _backward(axes: Any, arrays: Any, d_y: jax.Array) -> tuple[jax.Array, None]:
    arrays, d_y = only_now(arrays, d_y)
    return jnp.einsum("no,io->ni", d_y, _whole(arrays, axes, d_y.dtype)), None


quantized_product.defvjp(_forward, _backward)


class Quantized(nnx.Module):
    """The matrix of a linear layer in few bits: the arrays of `layout`, stacked."""

    def __init__(self, kind: Quantization, shape: tuple[int, ...], axes: tuple[str | None, ...]) -> None:
        for name, (size, dtype, named) in layout(kind, shape, axes).items():
            setattr(self, name, nnx.Param(jnp.zeros(size, dtype), axes=named))
        self.parts = tuple(layout(kind, shape, axes))

    @property
    def arrays(self) -> dict[str, jax.Array]:
        return {name: getattr(self, name)[...] for name in self.parts}

    def __call__(self, x: jax.Array) -> jax.Array:
        """[N, in] → [N, out]."""
        arrays = self.arrays
        named = {name: getattr(self, name).get_metadata("axes") for name in arrays}
        # Of one layer: the last axes.
        axes = tuple((name, named[name][len(named[name]) - each.ndim :]) for name, each in arrays.items())
        return quantized_product(x, arrays, axes)
