"""Read trees with models, without a gradient: a value per sequence, or per trained token.

A few batches are on the device at a time, and progress is printed where it takes long.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import jax
import numpy as np
from numpy.typing import NDArray

from rlhf_core.errors import InputError
from rlhf_core.mesh import abstract_rows, put_rows, replicated_sharding
from rlhf_core.packing.rows import Layout, Packed, Tree, empty_batches, pack, with_room
from rlhf_core.runtime.background import BackgroundCompiler

if TYPE_CHECKING:
    from jax.sharding import Mesh

IN_FLIGHT = 2
"""Batches whose inputs and results the device holds: one is computed while the other is read or placed."""
QUIET_SECONDS = 5.0
"""Work that takes no longer is not announced; progress is announced after this long, then a tenth as often."""


def compute_batches(
    compute: Callable[[Packed], Any],
    mesh: Mesh,
    batches: Iterable[Packed],
    say: Callable[[str], None] | None = None,
) -> Iterator[tuple[Packed, Any]]:
    """Yield every batch with its result on the host; at most two are dispatched and not read.

    say: prints progress where the computation takes longer than a few seconds.
    """
    pending: deque[tuple[Packed, Any]] = deque()
    due = time.monotonic() + QUIET_SECONDS
    wait = QUIET_SECONDS
    for number, batch in enumerate(batches):
        if len(pending) == IN_FLIGHT:
            done, result = pending.popleft()
            yield done, jax.device_get(result)
        if say is not None and time.monotonic() > due:
            wait = 10 * QUIET_SECONDS
            due = time.monotonic() + wait
            say(f"evaluating {number}{f'/{len(batches)}' if isinstance(batches, Sequence) else ''}")
        pending.append((batch, compute(put_rows(mesh, batch))))
    for done, result in pending:
        yield done, jax.device_get(result)


@contextmanager
def say_if_slow(say: Callable[[str], None], line: str) -> Iterator[None]:
    """Say a line where the block takes longer than a few seconds."""
    timer = threading.Timer(QUIET_SECONDS, say, [line])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


CHUNK = 1024
"""Trees that are packed together."""
BRANCH = "number of the branch"
"""A sequence value in addition to those of the trees, whose names are columns of the data."""


def pack_numbered(
    trees: Sequence[Tree],
    layout: Layout,
    *,
    chunk: int | None = None,
    sequence_names: Sequence[str] = (),
    **options: Any,
) -> Iterator[Packed]:
    """Pack trees, `chunk` (CHUNK) of them at a time; `Packed.example` numbers all of them.

    The sequence value BRANCH numbers the branches of each tree, which may be split over rows. options: as for `pack`.
    """
    chunk = chunk or CHUNK
    for start in range(0, len(trees), chunk):
        numbered = [_with_branch_numbers(tree) for tree in trees[start : start + chunk]]
        room = with_room(layout, numbered, options.get("group", 1))
        for batch in pack(numbered, room, sequence_names=(*sequence_names, BRANCH), **options):
            yield batch._replace(example=np.where(batch.example < 0, -1, batch.example + start))


def _with_branch_numbers(tree: Tree) -> Tree:
    numbers = np.arange(len(tree.branches), dtype=np.float32)
    return tree._replace(sequence_values={**tree.sequence_values, BRANCH: numbers})


class TreeReader:
    """Computes values of trees with models, without a gradient: one per sequence, or one per trained token.

    function: (params, batch) → an array [rows, sequences], or with per="token" [rows, trained], or a mapping of
        several by name. It is traced once for every shape of the layout, and a single program computes all its values:

            def read(params, batch):
                logps, entropies = trained_logps(model, params["policy"], batch, entropy=True)
                reference, _ = trained_logps(model, params["reference"], batch)
                return {"old_logps": logps, "ref_logps": reference, "entropies": entropies}

            reader = TreeReader(read, layout, mesh, per="token")
            values = reader({"policy": state.params, "reference": reference.params}, rollout.trees(prompts))
            values["old_logps"][3]  # of the fourth branch: a number per trained token, one whose weight is not 0

    token_names, sequence_names: values of the trees that `function` reads. say: prints the progress of a computation
    of more than a few seconds, such as `stage.say`. routes: of the trees, as in `RolloutCollector.routes`.
    """

    def __init__(
        self,
        function: Callable[[Any, Packed], Any],
        layout: Layout,
        mesh: Mesh,
        *,
        per: Literal["sequence", "token"],
        token_names: Sequence[str] = (),
        sequence_names: Sequence[str] = (),
        say: Callable[[str], None] | None = None,
        routes: jax.ShapeDtypeStruct | None = None,
    ) -> None:
        self.layout, self.mesh, self.per, self.say = layout, mesh, per, say
        self.token_names, self.sequence_names, self.routes = token_names, sequence_names, routes
        # A function of its own, as in `evaluator`.
        self._compute = jax.jit(partial(function), out_shardings=replicated_sharding(mesh))
        self._compiler = BackgroundCompiler()

    def __call__(self, params: Any, trees: Sequence[Tree], *, group: int = 1) -> Any:
        """Return the values of all branches, in the order of the trees and of their branches.

        One per sequence: an array [branches]; reshape that of pairs to [pairs, 2]. One per token: a list with an array
        [trained tokens] for each branch. Where `function` returns a mapping: {name: such values}.
        group: branches that stay together in a row, see `pack`. Every process must call this alike.
        """
        names: dict[str, Any] = {"token_names": self.token_names, "sequence_names": self.sequence_names}
        return self.read(params, pack_numbered(trees, self.layout, group=group, **names))

    def read(self, params: Any, batches: Iterable[Packed]) -> Any:
        """Return what a call does, from the batches of `pack_numbered`."""
        places = [np.zeros((2, 0))]
        results = []
        for batch, result in compute_batches(partial(self._run, params), self.mesh, batches, self.say):
            used = batch.example >= 0
            places.append(np.stack([batch.sequence_values[BRANCH][used], batch.example[used]]))
            cut = cut_tokens if self.per == "token" else cut_sequences
            results.append(jax.tree.map(partial(cut, batch, used), result))
        order = np.lexsort(np.concatenate(places, axis=1))

        def ordered(*parts: NDArray[Any]) -> Any:
            values = np.concatenate(parts)[order]
            return values.tolist() if self.per == "token" else values

        if results:
            return jax.tree.map(ordered, *results)
        nothing = jax.eval_shape(self._compute, params, self.shapes()[0])
        return jax.tree.map(lambda array: ordered(np.zeros(0, array.dtype)), nothing)

    def compile(self, params: Any) -> None:
        """Start to compile, in the background, for parameters that are placed like these."""
        for batch in self.shapes():
            self._compiler.compile(
                batch.rows.tokens.shape, self.lower(params, abstract_rows(self.mesh, batch))
            )

    def lower(self, params: Any, batch: Any) -> jax.stages.Lowered:
        """Lower the program for a micro-batch of one of `shapes`; shapes with shardings will do."""
        return self._compute.lower(params, batch)

    def _run(self, params: Any, batch: Packed) -> Any:
        self._compiler.wait(batch.rows.tokens.shape)
        return self._compute(params, batch)

    def shapes(self) -> list[Packed]:
        """Return an empty micro-batch of every shape that is read."""
        names = (*self.sequence_names, BRANCH)
        return empty_batches(
            self.layout, token_names=self.token_names, sequence_names=names, routes=self.routes
        )


def require_shape(
    name: str, per: str, shape: tuple[int, ...], batch: Packed, *, groups: bool = False
) -> None:
    """Raise InputError for an objective's values of another shape than [rows, trained] or, per sequence, [rows,
    sequences]. groups: whether they may have a number for each group of sequences, such as a pair.
    """
    (rows, sequences), tokens = batch.last.shape, batch.trained.shape[1]
    expected = (rows, tokens) if per == "token" else (rows, sequences)
    of_groups = groups and per == "sequence" and len(shape) == 2 and shape[0] == rows and shape[1] > 0
    if shape == expected or (of_groups and sequences % shape[1] == 0):
        return
    raise InputError(
        f"the objective's values '{name}' have the shape {list(shape)}; expected {list(expected)}, a number for each "
        f"{'trained token' if per == 'token' else 'sequence'} of each row"
        + (", or one for each group of sequences, such as a pair" if groups and per == "sequence" else "")
    )


def cut_sequences(batch: Packed, used: NDArray[np.bool_], array: NDArray[Any]) -> NDArray[Any]:
    """Cut values [rows, sequences] into a number for each sequence that is used."""
    return array[used]


def cut_tokens(batch: Packed, used: NDArray[np.bool_], array: NDArray[Any]) -> NDArray[Any]:
    """Cut values [rows, trained] into an array for each sequence that is used."""
    row, column = np.nonzero(batch.trained >= 0)
    owner = row * used.shape[1] + batch.rows.sequence[row, batch.trained[row, column]]
    counts = np.bincount(owner, minlength=used.size)[used.reshape(-1)]
    pieces = np.split(array[row, column], np.cumsum(counts)[:-1])
    return np.fromiter(pieces, object, len(counts))
