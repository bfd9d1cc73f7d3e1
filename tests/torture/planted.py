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
        "os.fchmod(descriptor, mode)\n            os.fsync(descriptor)",
        "os.fchmod(descriptor, mode)",
        "T3",
        "states undisturbed 0 rename 0 run/base/stage.json",
    ),
    Mutant(
        "name-not-flushed",
        "a file's new name is not flushed",
        FILES,
        "os.replace(temporary, target)\n        flush(target.parent)",
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
        "        flush(path)\n        rest = {",
        "        rest = {",
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
        "rlhf_core/fit/progress.py",
        "before=flush_metrics",
        "before=lambda: None",
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
        "save(at.step, at.state, reported=False, wait=True)",
        "save(at.step, at.state, wait=True)",
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
        "            flush_lines(stage.dir / METRICS)\n",
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
    Mutant(
        "deleted-in-place",
        "a surplus checkpoint is deleted file by file, under its name",
        "rlhf_core/checkpoint.py",
        """        os.rename(self.directory / str(step), aside)
        shutil.rmtree(aside)""",
        "        shutil.rmtree(self.directory / str(step))",
        "T1",
        "only kill unlink 0 checkpoints/1/state/commit_success.txt",
    ),
    Mutant(
        "deleted-before-replaced",
        "a directory is deleted before the one that replaces it has its name",
        "rlhf_core/runtime/files.py",
        "os.rename(final, aside)",
        "shutil.rmtree(final)",
        "T1",
        "again kill rename 0 checkpoints/2",
    ),
    Mutant(
        "not-put-back",
        "a checkpoint that was moved aside by a killed save is not put back",
        "rlhf_core/checkpoint.py",
        "if not final.exists():",
        "if final.exists():",
        "T1",
        "again kill rename 0 checkpoints/2",
    ),
    Mutant(
        "torn-line-stays",
        "a line is appended to half a line",
        "rlhf_core/runtime/files.py",
        '"\\n" * torn + line + "\\n"',
        'line + "\\n"',
        "T1",
        "lines killed write 0 torn",
    ),
    Mutant(
        "filled-under-its-name",
        "a directory is filled under its own name",
        "rlhf_core/runtime/files.py",
        'place = directory if directory.is_dir() else directory.with_name(f".{directory.name}.tmp")',
        "place = directory",
        "T1",
        "directory kill create 0 deep/new/a",
    ),
    Mutant(
        "failed-save-ignored",
        "a save that failed is not reported",
        "rlhf_core/checkpoint.py",
        "() if pending is None else pending.result()",
        "() if pending is None or pending.exception() else pending.result()",
        "T4",
        "sft EIO once fsync 0 run/base/checkpoints/.4.tmp/host.json",
    ),
    Mutant(
        "short-write",
        "the rest of a short write is not written",
        "rlhf_core/runtime/files.py",
        "    while left:\n        left = left[os.write(descriptor, left) :]",
        "    os.write(descriptor, left)",
        "T4",
        "sft EIO short write 1 run/base/.stage.json.#.tmp",
    ),
    Mutant(
        "nested-too-deeply",
        "JSON that is nested too deeply is a traceback",
        "rlhf_core/errors.py",
        "AttributeError, OverflowError, RecursionError)",
        "AttributeError, OverflowError)",
        "T10",
        "stage 300-399",
    ),
    Mutant(
        "hash-not-compared",
        "the hash of a model's file is computed and not compared",
        "rlhf_core/artifacts.py",
        'if hash_file(directory / name) == files[name]["sha256"] or has_other_base(name):',
        "if hash_file(directory / name):",
        "T6",
        "score model.safetensors flip 1",
    ),
    Mutant(
        "key-not-compared",
        "cached tokens are used without looking at what they are of",
        "rlhf_core/data/cache.py",
        ' or manifest["key"] != directory.name',
        "",
        "T6",
        "cache tokens/texts-* mixed 4",
    ),
    Mutant(
        "page-not-escaped",
        "texts are written into the report as HTML",
        "plugins/report/rlhf_report/page/dom.js",
        "document.createTextNode(visible(child))",
        "document.createRange().createContextualFragment(visible(child))",
        "T11",
        "page quote",
    ),
    Mutant(
        "group-survives",
        "processes that a reward started outlive its worker",
        "rlhf_core/workers/pool.py",
        "os.killpg(self.process.pid, signal.SIGKILL)",
        "self.process.kill()",
        "T12",
        "alone starts a process",
    ),
    Mutant(
        "values-unpickled",
        "what a reward returned is sent as it is",
        "rlhf_core/rewards/values.py",
        "return checked_values(self.name, values, count), log.values",
        "return values, log.values",
        "T12",
        "alone bombs",
    ),
    Mutant(
        "day-of-the-clock",
        "a resumed run takes its date from when its record was written last",
        "rlhf_core/stage/text_settings.py",
        'record.get("day", record["started"][:10])',
        'record["started"][:10]',
        "T9",
        "both: update base 3, back a week; update other 1, a year ahead",
    ),
    Mutant(
        "stopped-unsaved",
        "a run that is asked to stop does not save",
        "rlhf_core/fit/__init__.py",
        "        if not at.ends:\n            self.progress.save(at.step, at.state)\n",
        "        if not at.ends and not self.signalled:\n            self.progress.save(at.step, at.state)\n",
        "T8",
        "update, TERM to the process once",
    ),
    Mutant(
        "survivor-waits",
        "the end of a killed process is noticed and not acted on",
        "rlhf_core/runtime/job.py",
        "        job.announce(75 if signals.stop_requested() else 1, killed=number)\n",
        "        pass\n",
        "T7",
        "SIGKILL to 1 in the first update",
    ),
    Mutant(
        "hash-of-old-content",
        "a hash is remembered by size and time of modification alone",
        "rlhf_core/stage/identity.py",
        " {stat.st_ctime_ns}",
        "",
        "T9",
        "files: another content, size and time as before",
    ),
)
