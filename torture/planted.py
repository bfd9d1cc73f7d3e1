"""Faults to plant: each breaks a promise without any error, and each is found by the experiment named with it."""

from __future__ import annotations

from dataclasses import dataclass

FILES, CHECKPOINT, ARTIFACTS = (
    "rlhf_core/runtime/files.py",
    "rlhf_core/checkpoint.py",
    "rlhf_core/artifacts.py",
)


@dataclass(frozen=True)
class Mutant:
    """One fault.

    about: what is wrong. old: a text that occurs once in the file; new: what replaces it. case: a case of the
    experiment that finds it; without one, the experiment runs for so many minutes.
    """

    name: str
    about: str
    file: str
    old: str
    new: str
    experiment: str
    case: str = ""
    minutes: float = 1.0


MUTANTS = (
    Mutant(
        "file-not-flushed",
        "a file is renamed into place before its bytes are on disk",
        FILES,
        "S_IMODE(before.st_mode))\n        os.fsync(descriptor)",
        "S_IMODE(before.st_mode))",
        "T3",
        "states undisturbed 0 rename 0 run/base/stage.json",
    ),
    Mutant(
        "name-not-flushed",
        "a file's new name is not flushed",
        FILES,
        "os.replace(temporary, target)\n    flush(target.parent)",
        "os.replace(temporary, target)",
        "T3",
        "states undisturbed 0 mark 0 file run/base/stage.json",
    ),
    Mutant(
        "checkpoint-name-not-flushed",
        "a checkpoint's name is not flushed",
        FILES,
        "    flush(final.parent)\n    shutil.rmtree(aside",
        "    shutil.rmtree(aside",
        "T3",
        "states undisturbed 0 mark 0 checkpoint run/base/checkpoints/2",
    ),
    Mutant(
        "checkpoint-files-not-flushed",
        "the files of a checkpoint are hashed and not flushed",
        ARTIFACTS,
        "        flush(path)\n        return {",
        "        return {",
        "T3",
        "states undisturbed 0 rename 0 run/base/checkpoints/2",
    ),
    Mutant(
        "checkpoint-folders-not-flushed",
        "the folders within a checkpoint are not flushed",
        ARTIFACTS,
        "        flush(folder)",
        "        folder.stat()",
        "T3",
        "states undisturbed 0 rename 0 run/base/checkpoints/2",
    ),
    Mutant(
        "rows-not-flushed",
        "metrics are not flushed before the checkpoint that acknowledges them",
        "rlhf_core/stage/step_files.py",
        "    flush_lines(directory / METRICS)",
        "    return",
        "T3",
        "states undisturbed 0 mark 0 checkpoint run/base/checkpoints/2",
    ),
    Mutant(
        "directory-not-flushed",
        "a new directory's name is not flushed",
        FILES,
        "directory.mkdir(exist_ok=True)\n        flush(directory.parent)",
        "directory.mkdir(exist_ok=True)",
        "T3",
        "states undisturbed 0 mark 0 file run/pipeline.resolved.toml",
    ),
    Mutant(
        "saved-before-logged",
        "the last checkpoint is written before the last row",
        "rlhf_core/fit/__init__.py",
        "save(count, state, reported=False, wait=True)",
        "save(count, state, wait=True)",
        "T3",
        "states undisturbed 0 mark 0 checkpoint run/base/checkpoints/4",
    ),
    Mutant(
        "events-not-flushed",
        "a run's events are appended and not flushed",
        "rlhf_core/stage/events.py",
        "ensure_ascii=False), durable=True)",
        "ensure_ascii=False))",
        "T3",
        "states undisturbed 0 mark 0 lines run/events.jsonl",
    ),
    Mutant(
        "finished-before-flushed",
        "a stage is recorded as finished while its rows are not on disk",
        "rlhf_core/stage/execute.py",
        "        if stage.is_main:\n            step_files.sync(stage.dir)\n",
        "",
        "T3",
        "states undisturbed 0 rename 1 run/base/stage.json",
    ),
    Mutant(
        "manifest-last-of-all",
        "a checkpoint gets its name before its manifest",
        CHECKPOINT,
        """                write_atomic(partial / "manifest.json", seal(manifest))
                replace_directory(partial, final)
""",
        """                replace_directory(partial, final)
                write_atomic(final / "manifest.json", seal(manifest))
""",
        "T3",
        "states undisturbed 0 rename 0 run/base/checkpoints/2",
    ),
    Mutant(
        "row-kept-twice",
        "a resumed run keeps the row of the update that it makes again",
        "rlhf_core/loggers/jsonl.py",
        "row <= step:",
        "row <= step + 1:",
        "T3",
        "states undisturbed 0 write 3 run/base/metrics.jsonl",
    ),
)
