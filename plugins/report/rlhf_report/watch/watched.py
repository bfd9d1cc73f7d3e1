"""What the routes answer: the runs below some directories, and what is kept of those that are looked at."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlhf_http.fields import BadRequest

from rlhf_core.errors import InputError, suggest
from rlhf_core.hidden import scrub_all
from rlhf_core.runs import Damaged, StageDirectory
from rlhf_report.watch.alarms import Alarms
from rlhf_report.watch.comparing import compared
from rlhf_report.watch.listing import RunList
from rlhf_report.watch.places import find_runs, is_within, run_id
from rlhf_report.watch.results_view import results_of
from rlhf_report.watch.rollout_view import (
    MOST,
    Decode,
    Sampled,
    WantedRollouts,
    in_order,
    page_of,
    read_arrays,
    read_sampled,
    read_values,
    texts_of_tokens,
    tokens,
    updates_per_rollout,
)
from rlhf_report.watch.rows_view import DataRows, evaluation_of, evaluations_of, model_of, rows_of
from rlhf_report.watch.run_view import WatchedRun
from rlhf_report.watch.search_index import SearchIndex, cache_directory

MOST_OPEN = 8
"""Runs whose metrics are kept in memory."""
MOST_TOKENIZERS = 4
PLACES_SECONDS = 0.1
"""How long an answer may look for the same prompts in other rollouts."""

Json = dict[str, Any]


class Watched:
    """Some runs, and those below some directories. Every method is safe to call from several threads."""

    def __init__(self, directories: Sequence[Path] = (), runs: Sequence[Path] = ()) -> None:
        self.directories = [directory.expanduser().absolute() for directory in directories]
        self._given = {run_id(run.absolute()): run.absolute() for run in runs}
        # A report has no list, and keeps nothing.
        self.alarms = Alarms(cache_directory()) if directories else None
        self._list = RunList(self.alarms.of) if self.alarms else RunList()
        self._lock = threading.Lock()
        self._searching = threading.Lock()
        self._open: OrderedDict[str, WatchedRun] = OrderedDict()
        self._rows = DataRows()
        self._tokenizers: OrderedDict[str, Any] = OrderedDict()
        self._prompts: dict[Path, dict[int, frozenset[int]]] = {}

    def runs(self) -> Json:
        """List the runs, the one that changed last first."""
        problems: list[str] = []
        with self._lock:
            entries = self._list.refresh(self._given | find_runs(self.directories, problems))
        return {"runs": scrub_all(entries), "problems": problems}

    def run(self, id: str) -> Json:
        """Describe a run."""
        run = self._run(id)
        with run.lock:
            return run.answer()

    def metrics(self, id: str, stage: str, after: float, names: Sequence[str] | None) -> Json:
        """Return the rows of metrics.jsonl after a step, with all metrics or those of some names."""
        run = self._run(id)
        with run.lock:
            rows = run.metrics(self._stage(run, stage)).rows
        # Rows are in the order of their steps, but for a file that someone wrote by hand.
        start = len(rows)
        while start and _step(rows[start - 1]) > after:
            start -= 1
        if names is None:
            return {"rows": rows[start:]}
        kept = ("step", "time", "num_tokens", *names)
        return {"rows": [{name: row[name] for name in kept if name in row} for row in rows[start:]]}

    def results(self, id: str, stage: str) -> Json:
        """Describe what a stage came to."""
        run = self._run(id)
        name = self._stage(run, stage).name
        with run.lock:
            found = run.reported(run.open()).stage(name)
            assert found is not None
            return dict(scrub_all(results_of(found)))

    def rollouts(self, id: str, stage: str, update: int | None, wanted: WantedRollouts) -> Json:
        """Describe an update's rollout; without an update, search in the completions of the whole stage."""
        run = self._run(id)
        files = self._stage(run, stage)
        if update is None:
            return self._search(files, wanted)
        rollout = read_sampled(files, update)
        if rollout is None:
            raise BadRequest(f"stage '{stage}' has no completions of update {update}", status=404)
        answer = page_of(rollout, wanted)
        self._neighbours(files, rollout, answer["groups"])
        return answer

    def _search(self, files: StageDirectory, wanted: WantedRollouts) -> Json:
        """Find completions by a text in them, in the order of the updates or as asked."""
        if not wanted.search:
            raise BadRequest(
                "give update, or search for a text in all completions of the stage", param="search"
            )
        index = SearchIndex(files)
        with self._searching:
            index.refresh(files)
        found = index.find(wanted.search, wanted.sort)
        end = wanted.offset + min(wanted.limit, MOST)
        if wanted.finish or (wanted.where and wanted.is_bounded):
            every = (wanted.of(group) for group in index.groups(found))
            kept = in_order([group for group in every if group["completions"]], wanted.sort)
            total = len(kept)
            groups = kept[wanted.offset : end]
        else:
            total = len(found)
            groups = list(map(wanted.of, index.groups(found[wanted.offset : end])))
        ones = [one for group in groups for one in group["completions"]]
        return {
            "rollout": None,
            "update": None,
            "total": total,
            "finishes": list(dict.fromkeys(one["finish"] for one in ones)),
            "rewards": list(dict.fromkeys(name for one in ones for name in one["rewards"])),
            "groups": groups,
        }

    def tokens(self, id: str, stage: str, number: int, index: int) -> Json:
        """Describe the tokens of a completion of a rollout."""
        run = self._run(id)
        files = self._stage(run, stage)
        rollout = read_sampled(files, number * updates_per_rollout(files) + 1)
        if rollout is None or not rollout.arrays or not 0 <= index < len(rollout.samples):
            raise BadRequest(
                f"stage '{stage}' has no tokens of completion {index} of rollout {number}", status=404
            )
        return tokens(rollout, index, read_values(files, number), self._decoder(run, files))

    def rows(self, id: str, stage: str, update: int, sort: str, offset: int, limit: int) -> Json:
        """Describe the training rows of an update with their losses."""
        found = rows_of(self._stage(self._run(id), stage), update, sort, offset, limit, self._rows)
        if found is None:
            raise BadRequest(f"stage '{stage}' has no rows of update {update}", status=404)
        return found

    def evaluations(self, id: str, stage: str) -> Json:
        """List the evaluations of a stage."""
        return evaluations_of(self._stage(self._run(id), stage))

    def evaluation(self, id: str, stage: str, update: int) -> Json:
        """Describe the held-out rows of an evaluation."""
        run = self._run(id)
        files = self._stage(run, stage)
        with run.lock:
            leaked = run.leaks(files).rows
        found = evaluation_of(files, update, self._rows, leaked)
        if found is None:
            raise BadRequest(f"stage '{stage}' has no evaluation after update {update}", status=404)
        return found

    def events(self, id: str, after: float) -> Json:
        """Return the events of a run after a time."""
        run = self._run(id)
        with run.lock:
            events = run.answer()["events"]
        return {"events": [event for event in events if _time(event) > after]}

    def compare(self, ids: Sequence[str]) -> Json:
        """Compare runs."""
        return compared([self._run(id) for id in ids])

    def _run(self, id: str) -> WatchedRun:
        """Return an open run. Raises BadRequest, status 404, where there is none of the id."""
        with self._lock:
            run = self._open.get(id)
            if run is None:
                path = self._given.get(id) or find_runs(self.directories, []).get(id)
                if path is None:
                    raise BadRequest("there is no such run, or not any more", status=404)
                run = WatchedRun(id, path)
            self._open[id] = run
            self._open.move_to_end(id)
            while len(self._open) > MOST_OPEN:
                self._open.popitem(last=False)
            return run

    def _stage(self, run: WatchedRun, name: str) -> StageDirectory:
        stages = {stage.name: stage for stage in run.open().stages}
        if name not in stages:
            raise BadRequest(f"the run has no stage '{name}'.{suggest(name, list(stages))}", status=404)
        return stages[name]

    def _decoder(self, run: WatchedRun, files: StageDirectory) -> Decode | None:
        """Return what decodes the tokens of a stage; None where its tokenizer is not at hand."""
        path = model_of(files, run.path)
        if path is None or (path.is_relative_to(run.path) and not is_within(path, run.path)):
            return None
        with self._lock:
            known = self._tokenizers.get(str(path))
        if known is None:
            from rlhf_core.tokenizer import load_tokenizer

            try:
                known = load_tokenizer(path)
            except InputError:
                return None
            with self._lock:
                self._tokenizers[str(path)] = known
                while len(self._tokenizers) > MOST_TOKENIZERS:
                    self._tokenizers.popitem(last=False)
        return texts_of_tokens(known)

    def _neighbours(self, files: StageDirectory, rollout: Sampled, groups: Sequence[Json]) -> None:
        """Fill in the updates before and after that have the same prompts, as far as their files were read in time."""
        with self._lock:
            known = self._prompts.setdefault(files.dir, {})
        times = updates_per_rollout(files)
        until = time.monotonic() + PLACES_SECONDS
        for number in sorted(files.rollout_numbers, key=lambda each: abs(each - rollout.number)):
            if number in known:
                continue
            if time.monotonic() > until:
                break
            arrays = read_arrays(files.dir / "journal" / f"rollout-{number:06d}.zip", ("prompts",))
            known[number] = frozenset(arrays["prompts"].tolist()) if "prompts" in arrays else frozenset()
        for group in groups:
            there = [number for number, rows in list(known.items()) if group["row"] in rows]
            earlier = [number for number in there if number < rollout.number]
            later = [number for number in there if number > rollout.number]
            group["previous"] = max(earlier) * times + 1 if earlier else None
            group["next"] = min(later) * times + 1 if later else None


def _step(row: Json) -> float:
    step = row.get("step")
    return float(step) if isinstance(step, int | float) else float("-inf")


def _time(event: Json) -> float:
    when = event.get("time")
    return float(when) if isinstance(when, int | float) else float("-inf")


def unreadable(error: Exception) -> BadRequest | None:
    """Return what is said of a run's directory that cannot be read, or has vanished; None for another error."""
    if isinstance(error, BadRequest):
        return error
    if isinstance(error, InputError | Damaged | OSError):
        return BadRequest(str(error) or type(error).__name__, status=404)
    return None
