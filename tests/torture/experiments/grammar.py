"""Read almost valid documents: each is read or refused with one message, within limits of memory and time."""

from __future__ import annotations

import json
import os
import random
import re
import resource
import select
import shutil
import signal
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from tests.torture import documents, examples
from tests.torture.children import Child, rlhf
from tests.torture.examples import Kind
from tests.torture.experiment import Case, Trial

SHARE = 1.0
MEMORY = 1 << 30
"""Bytes that reading a document may take, beside what the process has when it begins."""
MESSAGE = 20_000
"""The longest message, in characters."""
ENOUGH = 3
"""Failures after which a case ends."""


def run(trial: Trial) -> None:
    prepared = Path(tempfile.mkdtemp(prefix="torture-grammar-"))
    try:
        examples.write_run(prepared)
        made = rlhf("run", "p.toml", cwd=prepared), Child(examples.write_models, prepared, cwd=prepared)
        for ended in [child.wait() for child in made]:
            if ended.code:
                raise RuntimeError(f"the examples could not be made: {ended}")
        kinds = examples.kinds(prepared)
        names = [f"{name} {span}" for name, span in _spans(kinds, trial)]
        if trial.only is not None and trial.only not in names:
            names = [trial.only]  # any range of numbers
        trial.each(names, partial(_judge, kinds, prepared, trial.seed), seconds=1800)
    finally:
        shutil.rmtree(prepared)


def _spans(kinds: Mapping[str, Kind], trial: Trial) -> Iterator[tuple[str, str]]:
    """Yield (kind, "FIRST-LAST"), each kind in turn, so that a short budget tries all of them."""
    spans = {}
    for name, kind in kinds.items():
        starts = [*range(0, kind.documents, kind.at_once)]
        trial.random(name).shuffle(starts)
        spans[name] = [f"{first}-{first + kind.at_once - 1}" for first in starts]
    for turn in range(max(map(len, spans.values()))):
        yield from ((name, own[turn]) for name, own in spans.items() if turn < len(own))


def _judge(kinds: Mapping[str, Kind], prepared: Path, seed: int, case: Case) -> None:
    name, numbers = case.name.split()
    kind = kinds[name]
    first, last = map(int, numbers.split("-"))
    work = case.directory / "files"
    shutil.copytree(prepared, work)
    failures, todo = 0, range(first, last + 1)
    while todo and failures < ENOUGH:
        number = todo[0]
        for number, problem in _outcomes(kind, work, name, seed, todo, None):
            case.count("documents")
            if (outcome := problem.partition(":")[0]) in ("read", "refused"):
                case.count(outcome)
                continue
            failures += 1
            about = f"{name} {seed} {number}"
            kept = _reduced(kind, work, name, seed, number, problem)
            file, document = _document(kind, about, kept)
            case.fail(
                f"document {number}, {file}, with {'; '.join(document.changes.values())}: {problem}\n"
                f"{documents.shown(document.content) if len(document.content) > 600 else document.content!r}"
            )
            break
        todo = range(number + 1, last + 1)


def _reduced(kind: Kind, work: Path, name: str, seed: int, number: int, problem: str) -> list[int]:
    """Leave out changes as long as the document fails in the same way; return those that are left."""
    kept = list(_document(kind, f"{name} {seed} {number}", None)[1].changes)
    for each in list(kept):
        fewer = [i for i in kept if i != each]
        outcome = dict(_outcomes(kind, work, name, seed, range(number, number + 1), fewer)).get(number, "")
        if _sort(outcome) == _sort(problem):
            kept = fewer
    return sorted(kept)


def _sort(problem: str) -> str:
    """Return what equal failures of different documents have in common."""
    return re.sub(r"\d+", "", problem.partition(":")[0])


def _document(kind: Kind, about: str, kept: Sequence[int] | None) -> tuple[str, documents.Document]:
    file = random.Random(f"{about} file").choice(list(kind.files))
    return file, documents.make(kind.files[file], about, kept)


def _outcomes(
    kind: Kind, work: Path, name: str, seed: int, numbers: Sequence[int], kept: Sequence[int] | None
) -> Iterator[tuple[int, str]]:
    """Read documents in a process of its own; yield each number with "read", "refused" or what was wrong.

    Ends after a document at which the process hung or died.
    """
    ours, theirs = os.pipe()
    child = Child(_read_documents, kind, name, seed, numbers, kept, theirs, cwd=work)
    os.close(theirs)
    answers, at, content = iter(numbers), 0, b""
    try:
        waiting: int | None = next(answers)
        limit = 60 + kind.seconds  # the first time the process prepares itself
        while waiting is not None:
            if not select.select([ours], [], [], limit)[0]:
                yield waiting, f"not done after {kind.seconds:.0f} s"
                return
            chunk = os.read(ours, 1 << 16)
            if not chunk:
                yield waiting, f"the process died, {child.wait()}"
                return
            content += chunk
            while waiting is not None and (end := content.find(b"\n", at)) >= 0:
                answer, at = json.loads(content[at:end]), end + 1
                if answer != "ready":
                    yield waiting, answer
                    waiting = next(answers, None)
                limit = kind.seconds
    finally:
        os.close(ours)
        child.signal(signal.SIGKILL, group=True)
        child.wait()


def _read_documents(
    kind: Kind, name: str, seed: int, numbers: Sequence[int], kept: Sequence[int] | None, answers: int
) -> None:
    """Write one line of JSON for each document to the descriptor `answers`."""

    def answer(text: str) -> None:
        os.write(answers, json.dumps(text).encode() + b"\n")

    warnings.simplefilter("ignore")
    os.environ["RLHF_CACHE"] = str(Path("cache").absolute())
    examples = {file: form.write(form.examples[0]) for file, form in kind.files.items()}
    for file, content in examples.items():
        Path(file).write_bytes(content)
    problem = _outcome(kind.read)
    if problem != "read":
        answer(f"the example itself: {problem}")
        return
    base = 1024 * int(Path("/proc/self/status").read_text().partition("VmData:")[2].split()[0])
    resource.setrlimit(resource.RLIMIT_DATA, (base + MEMORY, resource.RLIM_INFINITY))
    answer("ready")
    for number in numbers:
        file, document = _document(kind, f"{name} {seed} {number}", kept)
        Path(file).write_bytes(document.content)
        answer(_outcome(kind.read))
        Path(file).write_bytes(examples[file])


def _outcome(read: Callable[[Path], object]) -> str:
    import traceback

    from rlhf_core.errors import InputError, RunError

    try:
        read(Path())
        return "read"
    except (InputError, RunError) as error:
        text = str(error)
        if not text.strip():
            return f"{type(error).__name__} without a message"
        if len(text) > MESSAGE:
            return f"a message of {len(text):,} characters: {text[:200]}"
        if "more memory than there is" in text:
            return f"more than {MEMORY >> 20} MiB: {text}"
        return f"refused: {text[:300]}"
    except BaseException as error:
        lines = traceback.format_exception_only(error)[-1].strip()[:300]
        frames = traceback.format_list(traceback.extract_tb(error.__traceback__)[-6:])
        return f"{lines}\n{''.join(frames)}"
