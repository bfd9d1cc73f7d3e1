"""Training states on disk: saved in the background, whole or not there, and checked byte by byte when read.

checkpoints/
    120/
        state/          the arrays of the state, by orbax
        arrays.npz      the caller's numpy arrays
        host.json       step, the caller's counters, dtype and shape of every array of the state
        manifest.json   size and hash of every file above; written last
    .160.tmp/           a save in progress, or one that was killed
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding
from orbax.checkpoint import v1

from rlhf_core.artifacts import describe_files, find_damage
from rlhf_core.errors import InputError, RunError
from rlhf_core.runtime.agreement import broadcast_numbers
from rlhf_core.runtime.disk_errors import GOES_ON, attempt, disk_reason
from rlhf_core.runtime.files import make_directory, replace_directory, seal, unseal, write_atomic
from rlhf_core.runtime.peers import hold_end

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


def abstract_leaf(leaf: Any) -> jax.ShapeDtypeStruct:
    """Describe the array that a leaf is to be read as."""
    sharding = getattr(leaf, "sharding", None) or SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def on_sharding(leaf: Any, wanted: Any) -> Any:
    """Place a typed key as wanted: orbax gives it the sharding of its data, which has one axis more."""
    if not jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return leaf
    return jax.jit(lambda key: key, out_shardings=abstract_leaf(wanted).sharding)(leaf)


def copy_array(name: str, array: Any) -> np.ndarray:
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


FORMAT = 1
_CONTEXT = v1.Context()
# Made in the background, a directory that fails leaves threads waiting, and the process never exits.
_CONTEXT.asynchronous.create_directories_asynchronously = False


class Restored(NamedTuple):
    """What `Checkpoints.restore` found: the step it was saved at, and what `save` was given."""

    step: int
    state: Any
    host: dict[str, Any]
    arrays: dict[str, np.ndarray]


class Checkpoints:
    """The checkpoints in a directory, of which the newest `keep` stay (None: all).

    One save is in flight at a time; its failure is raised by the next call of `save`, `wait` or `close`. Call
    `close` in a `finally`: a save still running when the interpreter exits is lost. With several processes,
    all of them make the same calls.
    """

    def __init__(self, directory: str | Path, *, keep: int | None) -> None:
        if keep is not None and keep < 1:
            raise ValueError(f"keep must be at least 1, or None for all checkpoints; got {keep}")
        self.directory = Path(directory).absolute()
        self.keep = keep
        self._damaged: set[int] = set()
        self._pending: Future[list[str]] | None = None
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")

    def steps(self) -> list[int]:
        """Steps with a finished checkpoint, ascending. They are not verified here."""
        if not self.directory.is_dir():
            return []
        return sorted(int(path.name) for path in self.directory.iterdir() if path.name.isdecimal())

    def save(
        self,
        step: int,
        state: Any,
        *,
        host: Mapping[str, Any],
        arrays: Mapping[str, np.ndarray] | None = None,
        protect: int | None = None,
        block: bool = False,
        before: Callable[[], None] | None = None,
    ) -> None:
        """Save a state, returning as soon as its arrays may be donated; `block` waits for the end.

        state: any pytree of jax arrays, typed keys included. host: JSON. arrays: numpy arrays of any shape,
        copied here. A checkpoint of the same step is replaced. protect: a step that stays beside the newest.
        before: called by the main process, in another thread, before there is this checkpoint: brings to the disk
        whatever a run that goes on from it relies on.

        Raises RunError where the disk is full or not writable, with the older checkpoints untouched. An older one that
        cannot be deleted is a warning.
        """
        self.wait()
        arrays_of_state = leaves(state)
        kept = {name: copy_array(name, array) for name, array in (arrays or {}).items()}
        shapes = {name: shape(leaf) for name, leaf in arrays_of_state.items()}
        described = json.dumps({"step": step, "host": dict(host), "leaves": shapes}, default=scalar)
        beside = self.directory / f".{step}.tmp"

        def start() -> v1.AsyncResponse[None]:
            if jax.process_index() == 0:
                self._clean()
                make_directory(beside)
            with _CONTEXT:
                return v1.save_async(beside / "state", arrays_of_state)

        @hold_end()
        def finish(response: v1.AsyncResponse[None]) -> None:
            response.result()
            if jax.process_index() == 0:
                if before is not None:
                    before()
                np.savez(beside / "arrays.npz", **{f"arrays/{name}": array for name, array in kept.items()})  # type: ignore[arg-type]
                write_atomic(beside / "host.json", described)
                manifest = {"format": FORMAT, "files": describe_files(beside)}
                write_atomic(beside / "manifest.json", seal(manifest))
                replace_directory(beside, final)

        def complete(response: v1.AsyncResponse[None]) -> list[str]:
            attempt(lambda: finish(response), what, final, leftover=beside, then=GOES_ON)
            return self._retire(step, protect) if jax.process_index() == 0 else []

        what, final = f"the checkpoint of step {step}", self.directory / str(step)
        response = attempt(start, what, final, leftover=beside, then=GOES_ON)
        self._pending = self._pool.submit(complete, response)
        if block:
            self.wait()

    def restore(
        self,
        abstract_state: Any,
        step: int | None = None,
        *,
        accept: Callable[[Restored], None] | None = None,
    ) -> Restored | None:
        """The newest whole checkpoint, or None where there is none at all; or that of `step`.

        abstract_state: the state's tree with `jax.ShapeDtypeStruct` leaves (or arrays); each array is put on
        the sharding given there, whatever it was saved from. A damaged checkpoint is passed over with a
        warning.

        accept: called with what was found, without its state, before that is read; raises where it does not fit.

        Raises RunError where there are checkpoints and none is whole, or that of `step` is not; InputError where
        it was saved from another tree, shape or dtype, naming the arrays.
        """
        self.wait()
        if step is None:
            step = self._newest_whole()
        else:
            self._require(step)
        if step is None:
            return None
        directory = self.directory / str(step)
        saved = json.loads((directory / "host.json").read_text())
        with np.load(directory / "arrays.npz", allow_pickle=False) as file:
            arrays = {name.removeprefix("arrays/"): file[name] for name in file.files}
        if accept is not None:
            accept(Restored(step, None, saved["host"], arrays))
        wanted = leaves(abstract_state)
        compare(directory, saved["leaves"], {name: shape(leaf) for name, leaf in wanted.items()})
        try:
            found = v1.load(directory / "state", {name: abstract_leaf(leaf) for name, leaf in wanted.items()})
        except Exception as error:  # its bytes are as they were written: an older one would fail as well
            raise RunError(f"{directory} could not be read: {error.__cause__ or error}") from error
        found = {name: on_sharding(leaf, wanted[name]) for name, leaf in found.items()}
        state = jax.tree.unflatten(jax.tree.structure(abstract_state), [found[name] for name in wanted])
        return Restored(step, state, saved["host"], arrays)

    def wait(self) -> None:
        """Wait until the running save is on disk. Raises what it failed with."""
        pending, self._pending = self._pending, None
        for line in () if pending is None else pending.result():
            warnings.warn(line, stacklevel=3)

    def close(self) -> None:
        """`wait`, and release the thread. Safe to call twice."""
        try:
            self.wait()
        finally:
            self._pool.shutdown()

    def _newest_whole(self) -> int | None:
        """Decided by the first process for all, who might otherwise see a shared disk at different times."""
        chosen, problems, unreadable = -1, [], ""
        if jax.process_index() == 0 and self.directory.is_dir():
            self._recover()
            for step in reversed(self.steps()):
                try:
                    problem = _problem(self.directory / str(step))
                except PermissionError as error:  # nothing is known of it, and an older one is no replacement
                    unreadable = f"{error.filename} cannot be read: {disk_reason(error)}"
                    break
                if problem is None:
                    chosen = step
                    break
                problems.append(problem)
                self._damaged.add(step)
        if unreadable:
            chosen = -3
        elif problems and chosen < 0:
            chosen = -2
        chosen = int(broadcast_numbers(np.int32(chosen)))
        if chosen == -3:
            raise RunError(
                unreadable or f"{self.directory} cannot be read by the first process, which says why"
            )
        if chosen == -2:
            raise RunError(
                f"none of the checkpoints in {self.directory} is whole: {'; '.join(problems)}. "
                "Delete that directory to start this stage from its beginning."
            )
        for problem in problems:
            warnings.warn(f"damaged checkpoint: {problem}; going on from step {chosen}", stacklevel=3)
        return None if chosen < 0 else chosen

    def _require(self, step: int) -> None:
        """Raise RunError, on every process, where the checkpoint of `step` is not whole."""
        problem = None
        if jax.process_index() == 0:
            try:
                problem = _problem(self.directory / str(step))
            except PermissionError as error:
                problem = f"{error.filename} cannot be read: {disk_reason(error)}"
        if not broadcast_numbers(np.int32(problem is None)):
            raise RunError(
                f"the checkpoint of step {step} is damaged: {problem or self.directory / str(step)}"
            )

    def _retire(self, newest: int, protect: int | None) -> list[str]:
        """Delete what retention does not keep, after step `newest` was committed; never that one, or `protect`.

        What could not be deleted, a line each: the state that was saved is none the worse for it.
        """
        self._damaged.discard(newest)
        whole = [step for step in self.steps() if step not in self._damaged]
        surplus = set() if self.keep is None else set(whole[: -self.keep])
        problems = []
        for step in sorted(((surplus - {protect}) | self._damaged) - {newest}):
            old, aside = self.directory / str(step), self.directory / f".{step}.tmp"
            try:
                if old.exists():
                    os.rename(old, aside)  # first, so that a deletion that is killed leaves nothing half
                    shutil.rmtree(aside)
            except OSError as error:
                problems.append(
                    f"the checkpoint of step {step}, which is not needed any more, could not be deleted from "
                    f"{old}: {disk_reason(error)}"
                )
        self._damaged.clear()
        return problems

    def _clean(self) -> None:
        """Delete what killed saves left. Nothing is in flight when this is called."""
        make_directory(self.directory)
        self._recover()
        for path in self.directory.glob(".*.tmp"):
            shutil.rmtree(path, ignore_errors=True)

    def _recover(self) -> None:
        """Put back a checkpoint that was being replaced when the process was killed between two renames."""
        for aside in self.directory.glob(".*.replaced"):
            final = self.directory / aside.name[1:].removesuffix(".replaced")
            if not final.exists():
                os.rename(aside, final)


def _problem(directory: Path) -> str | None:
    """Why a checkpoint is not whole, None where it is. Raises PermissionError where this user may not see that."""
    manifest = directory / "manifest.json"
    try:
        described = unseal(manifest.read_bytes())
        if described["format"] != FORMAT:
            return f"{manifest} has format {described['format']}, this version reads {FORMAT}"
        problems = find_damage(directory, described["files"])
    except PermissionError:
        raise
    except OSError as error:
        return f"{manifest} cannot be read: {disk_reason(error)}"
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{manifest} is damaged ({error})"
    return problems[0] if problems else None


def _not_a_second_report(record: logging.LogRecord) -> bool:
    """Each thread of orbax logs the traceback of a failed save; the save itself raises the same error."""
    return "_SignalingThread.run() raised an exception" not in str(record.msg)


logging.getLogger("absl").addFilter(_not_a_second_report)
