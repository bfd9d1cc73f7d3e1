"""Temporary memory of the distillation loss and its gradient, beside the computation over whole logits.

    python benchmarks/distill/memory.py [--tokens 2048] [--vocabulary 151936]

Programs are compiled for shapes alone: the figures are `memory_analysis()` of the compiler.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from rlhf_distill import Head, token_divergences
from rlhf_distill.divergences import JensenShannon

DIVERGENCE = JensenShannon(0.5)


def dense(student: Head, teacher: Head) -> jax.Array:
    """Compute the divergences from the logits of all tokens."""
    logps = (
        jax.nn.log_softmax(jnp.einsum("rkd,dv->rkv", head.hidden, head.kernel)) for head in (student, teacher)
    )
    return DIVERGENCE(*logps).sum(-1)


def temporary_bytes(
    function: Callable[[Head, Head], jax.Array], tokens: int, vocabulary: int, widths: tuple[int, int]
) -> int:
    """Return the temporary bytes of the mean's value and gradients in the student's hidden states and kernel."""

    def step(hidden: Any, kernel: Any, teacher_hidden: Any, teacher_kernel: Any) -> Any:
        def loss(hidden: Any, kernel: Any) -> Any:
            return function(Head(hidden, kernel), Head(teacher_hidden, teacher_kernel)).mean()

        return jax.value_and_grad(loss, argnums=(0, 1))(hidden, kernel)

    shapes = [
        jax.ShapeDtypeStruct(shape, jnp.float32)
        for width in widths
        for shape in ((1, tokens, width), (width, vocabulary))
    ]
    analysis = jax.jit(step).lower(*shapes).compile().memory_analysis()
    assert analysis is not None
    return int(analysis.temp_size_in_bytes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument(
        "--width", type=int, default=256, help="of the student; the teacher's is twice as large"
    )
    arguments = parser.parse_args()
    ways: dict[str, Callable[[Head, Head], jax.Array]] = {
        "whole logits": dense,
        "chunks": lambda *heads: token_divergences(DIVERGENCE, *heads),
        "chunks, top_k = 64": lambda *heads: token_divergences(DIVERGENCE, *heads, top_k=64),
    }
    widths = (arguments.width, 2 * arguments.width)
    sizes = {
        name: temporary_bytes(function, arguments.tokens, arguments.vocabulary, widths)
        for name, function in ways.items()
    }
    for name, size in sizes.items():
        print(f"{name:20} {size / 2**20:10,.0f} MiB   {size / sizes['whole logits']:.3f}")


if __name__ == "__main__":
    main()
