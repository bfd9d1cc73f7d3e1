"""Checkpoints of training states: saved in the background and atomically, and verified byte by byte when read.

checkpoints/
    120/
        state/          the arrays of the state, by orbax
        arrays.npz      the caller's numpy arrays
        host.json       step, the caller's counters, dtype and shape of every array of the state
        manifest.json   size and hash of every file above; written last
    .160.tmp/           a save in progress, or one that was killed
"""

from __future__ import annotations

import functools
import json
import logging
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from rlhf_core.artifacts import describe_files, find_damage
from rlhf_core.errors import InputError, RunError, read_limited, warn
from rlhf_core.runtime.agreement import broadcast_text
from rlhf_core.runtime.files import (
    INTACT,
    attempt,
    disk_reason,
    make_directory,
    replace_directory,
    seal,
    unseal,
    write_atomic,
)
from rlhf_core.runtime.job import hold_end

if TYPE_CHECKING:
    from orbax.checkpoint import v1

PLAIN_KINDS = "biufcSU"
"""Kinds of numpy dtypes that an .npz stores without pickle."""


def leaves(tree: Any) -> dict[str, Any]:
    """Name every leaf by its dotted path, under which a checkpoint stores and compares it."""
    pairs = jax.tree_util.tree_leaves_with_path(tree)
    named = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in pairs}
    if len(named) != len(pairs):
        raise ValueError("two arrays of the state have the same dotted path: a key contains a dot")
    return named


def shape(leaf: Any) -> str:
    """Write a leaf's dtype and shape, such as `float32[2,3]`."""
    return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"


def abstract_leaf(leaf: Any) -> jax.ShapeDtypeStruct:
    """Describe the array to restore a leaf as: shape, dtype and sharding."""
    sharding = getattr(leaf, "sharding", None) or SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def on_sharding(leaf: Any, wanted: Any) -> Any:
    """Move a typed key to the wanted sharding: orbax gives it that of its key data, which has one more axis."""
    if not jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return leaf
    return jax.jit(lambda key: key, out_shardings=abstract_leaf(wanted).sharding)(leaf)


def copy_array(name: str, array: Any) -> np.ndarray:
    """Copy an array to store in an .npz. Raises TypeError for a dtype that needs pickle."""
    copy = np.array(array)
    if copy.dtype.kind not in PLAIN_KINDS:
        raise TypeError(
            f"arrays['{name}'] has dtype {copy.dtype}, which a checkpoint cannot hold; convert it"
        )
    return copy


def compare(directory: Path, saved: Mapping[str, str], wanted: Mapping[str, str]) -> None:
    """Raise InputError, naming the arrays, if a checkpoint was saved from another tree, shape or dtype."""
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
    """Convert a numpy number to a Python number, for JSON. Raises TypeError for anything else."""
    if isinstance(x, np.generic):
        return x.item()
    raise TypeError(f"a checkpoint cannot keep {x!r}; make it a number, a text, or one of the arrays")


FORMAT = 1
ENCODED_AT_ONCE = 2**28
"""Bytes of arrays that are compressed at a time, or one array that is larger."""


def _context(arrays: Mapping[str, Any]) -> v1.Context:
    """Return the options for saving arrays: many bytes are written array by array, to take little more memory.

    Few bytes are written in one transaction: fewer files and flushes, but all that is compressed waits for its end.
    """
    from orbax.checkpoint import v1  # a check, which saves nothing, need not wait for it

    sizes = [leaf.nbytes for leaf in arrays.values()]
    context = v1.Context()
    # If making a directory failed in the background, threads would wait forever and the process would never exit.
    context.asynchronous.create_directories_asynchronously = False
    # It is measured by the clock of the day: a save during which the clock is set ahead would fail.
    context.asynchronous.timeout_secs = 10**9
    # Replicas share the work of saving large arrays. For each shape that takes a program per replica to cut the array
    # up.
    context.array.saving.min_slice_bytes_for_replica_parallel = 2**20
    if sum(sizes) > ENCODED_AT_ONCE:
        # An array of as many bytes as this or more is refused.
        context.memory.write_concurrent_bytes = max(ENCODED_AT_ONCE, *sizes) + 1
    return context


class Restored(NamedTuple):
    """A checkpoint that was read: the step it was saved at, and what `save` was given."""

    step: int
    state: Any
    host: dict[str, Any]
    arrays: dict[str, np.ndarray]


class Checkpoints:
    """The checkpoints in a directory, of which the newest `keep` are retained (None: all).

    One save is in flight at a time; the next call of `save`, `wait` or `close` raises its failure. Call `close` in a
    `finally`: a save still running when the interpreter exits is lost. With several processes, all of them must make
    the same calls.
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
        """List the steps that have a finished checkpoint, ascending, without verifying them."""
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
        """Save a state, replacing a checkpoint of the same step; return as soon as its arrays may be donated.

        state: any pytree of jax arrays, typed keys included. host: JSON. arrays: numpy arrays of any shape, copied
        here. protect: a step whose checkpoint is kept besides the newest. block: return only when the checkpoint is
        on disk. before: called on the main process, in another thread, before the checkpoint appears; it must flush to
        disk what a run that resumes from the checkpoint relies on.

        Raises RunError if the disk is full or not writable, leaving older checkpoints untouched. Warns if an older one
        cannot be deleted.
        """
        self.wait()
        _say_failures_once()
        from orbax.checkpoint import v1

        arrays_of_state = leaves(state)
        copies = {f"arrays/{name}": copy_array(name, array) for name, array in (arrays or {}).items()}
        shapes = {name: shape(leaf) for name, leaf in arrays_of_state.items()}
        host_json = json.dumps({"step": step, "host": dict(host), "leaves": shapes}, default=scalar)
        partial = self.directory / f".{step}.tmp"

        def start() -> v1.AsyncResponse[None]:
            if jax.process_index() == 0:
                self._clean()
                make_directory(partial)
            with _context(arrays_of_state):
                return v1.save_async(partial / "state", arrays_of_state)

        @hold_end()
        def finish(response: v1.AsyncResponse[None]) -> None:
            response.result()
            if jax.process_index() == 0:
                if before is not None:
                    before()
                np.savez(partial / "arrays.npz", **copies)  # type: ignore[arg-type]  # mypy takes names for allow_pickle
                write_atomic(partial / "host.json", host_json)
                manifest = {"format": FORMAT, "files": describe_files(partial)}
                write_atomic(partial / "manifest.json", seal(manifest))
                replace_directory(partial, final)

        def complete(response: v1.AsyncResponse[None]) -> list[str]:
            attempt(lambda: finish(response), what, final, leftover=partial, then=INTACT)
            return self._retire(step, protect) if jax.process_index() == 0 else []

        what = f"the checkpoint of step {step}"
        final = self.directory / str(step)
        response = attempt(start, what, final, leftover=partial, then=INTACT)
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
        """Restore the checkpoint of `step`, by default of the newest whole one; None if there is no checkpoint at all.

        abstract_state: the state's tree with `jax.ShapeDtypeStruct` leaves (or arrays), which give each array its
        sharding, however it was sharded when saved; or a function that makes it of the caller's `host`. Skips damaged
        checkpoints with a warning.
        accept: called with the checkpoint before its state is read, and so without it; raises if it does not fit.

        Raises RunError if no checkpoint is whole, or the one of `step` is not; InputError, naming the arrays, if it was
        saved from another tree, shape or dtype.
        """
        self.wait()
        step = self._choose(step)
        if step is None:
            return None
        directory = self.directory / str(step)
        saved = json.loads((directory / "host.json").read_text())
        with np.load(directory / "arrays.npz", allow_pickle=False) as file:
            arrays = {name.removeprefix("arrays/"): file[name] for name in file.files}
        if accept is not None:
            accept(Restored(step, None, saved["host"], arrays))
        abstract_state = abstract_state(saved["host"]) if callable(abstract_state) else abstract_state
        wanted = leaves(abstract_state)
        compare(directory, saved["leaves"], {name: shape(leaf) for name, leaf in wanted.items()})
        from orbax.checkpoint import v1

        try:
            loaded = v1.load(
                directory / "state", {name: abstract_leaf(leaf) for name, leaf in wanted.items()}
            )
        except (
            Exception
        ) as error:  # its bytes are as they were written, so an older checkpoint would fail too
            raise RunError(f"{directory} could not be read: {error.__cause__ or error}") from error
        loaded = {name: on_sharding(leaf, wanted[name]) for name, leaf in loaded.items()}
        state = jax.tree.unflatten(jax.tree.structure(abstract_state), [loaded[name] for name in wanted])
        return Restored(step, state, saved["host"], arrays)

    def wait(self) -> None:
        """Wait until the running save is on disk. Raises what made the save fail."""
        pending, self._pending = self._pending, None
        for line in () if pending is None else pending.result():
            warn(line)

    def close(self) -> None:
        """Wait for the running save and release the thread. Safe to call twice."""
        try:
            self.wait()
        finally:
            self._pool.shutdown()

    def remove(self, step: int) -> None:
        """Delete the checkpoint of `step`; the others stay. Without one, nothing happens."""
        self.wait()
        path = self.directory / str(step)
        if jax.process_index() == 0 and path.exists():
            attempt(lambda: self._delete(step), f"the checkpoint of step {step}", path)

    def _delete(self, step: int) -> None:
        """Delete a checkpoint, renaming it first, so that killing the deletion leaves no half checkpoint."""
        aside = self.directory / f".{step}.tmp"
        os.rename(self.directory / str(step), aside)
        shutil.rmtree(aside)

    def _choose(self, wanted: int | None) -> int | None:
        """Return the wanted step, or that of the newest whole checkpoint; None if there is no checkpoint at all.

        The first process looks, as others may see a shared disk at other times.
        """
        step, damaged, unreadable = None, [], ""
        if jax.process_index() == 0 and self.directory.is_dir():
            self._recover()
            for each in reversed(self.steps()) if wanted is None else [wanted]:
                try:
                    problem = _problem(self.directory / str(each))
                except PermissionError as error:  # it may be whole, so an older one is no replacement
                    unreadable = f"{error.filename} cannot be read: {disk_reason(error)}"
                    break
                if problem is None:
                    step = each
                    break
                damaged.append(problem)
                self._damaged.add(each)
        step, damaged, unreadable = json.loads(broadcast_text(json.dumps([step, damaged, unreadable])))
        if unreadable:
            raise RunError(unreadable)
        if step is None and wanted is not None:
            raise RunError(
                f"the checkpoint of step {wanted} is damaged: {'; '.join(damaged) or self.directory}"
            )
        if step is None and damaged:
            raise RunError(
                f"no checkpoint in {self.directory} is intact: {'; '.join(damaged)}. "
                "Delete that directory to start this stage from its beginning."
            )
        for problem in damaged if jax.process_index() == 0 else ():
            warn(f"damaged checkpoint: {problem}; resuming from step {step}")
        return step

    def _retire(self, newest: int, protect: int | None) -> list[str]:
        """Delete surplus and damaged checkpoints after `newest` was written; never delete `newest` or `protect`.

        Returns one line per checkpoint that could not be deleted, which does no harm to the one just saved.
        """
        self._damaged.discard(newest)
        whole = [step for step in self.steps() if step not in self._damaged]
        surplus = set() if self.keep is None else set(whole[: -self.keep])
        problems = []
        for step in sorted(((surplus - {protect}) | self._damaged) - {newest}):
            old = self.directory / str(step)
            try:
                if old.exists():
                    self._delete(step)
            except OSError as error:
                problems.append(
                    f"the checkpoint of step {step}, which is no longer needed, could not be deleted from "
                    f"{old}: {disk_reason(error)}"
                )
        self._damaged.clear()
        return problems

    def _clean(self) -> None:
        """Delete what killed saves left behind. Call it only while no save is in flight."""
        make_directory(self.directory)
        self._recover()
        for path in (*self.directory.glob(".*.tmp"), *self.directory.glob(".*.replaced")):
            shutil.rmtree(path, ignore_errors=True)

    def _recover(self) -> None:
        """Put back a checkpoint whose replacement was killed between the two renames."""
        for aside in self.directory.glob(".*.replaced"):
            final = self.directory / aside.name[1:].removesuffix(".replaced")
            if not final.exists():
                os.rename(aside, final)


def _problem(directory: Path) -> str | None:
    """Explain why a checkpoint is not whole; None if it is. Raises PermissionError where this user may not read it."""
    manifest = directory / "manifest.json"
    try:
        content = unseal(read_limited(manifest))
        if content["format"] != FORMAT:
            return f"{manifest} has format {content['format']}, this version reads {FORMAT}"
        problems = find_damage(directory, content["files"])
        if not problems:
            step = json.loads((directory / "host.json").read_bytes())["step"]
            problems = (
                [] if str(step) == directory.name else [f"{directory} holds the checkpoint of step {step}"]
            )
    except PermissionError:
        raise
    except OSError as error:
        return f"{manifest} cannot be read: {disk_reason(error)}"
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{manifest} is damaged ({error})"
    return problems[0] if problems else None


@functools.cache
def _say_failures_once() -> None:
    """Keep orbax's threads from printing tracebacks of a failed save, since the save itself raises the same error.

    Called at the first save, so that no import changes these two globals.
    """
    show = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        # Writes that end after another one failed find the event loop closed that waited for them.
        if "Event loop is closed" not in str(unraisable.exc_value):
            show(unraisable)

    sys.unraisablehook = hook
    failed = "_SignalingThread.run() raised an exception"
    logging.getLogger("absl").addFilter(lambda record: failed not in str(record.msg))
