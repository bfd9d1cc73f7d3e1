"""An audit: every check of every stage of a run, in an order from files to what they mean."""

from __future__ import annotations

import json
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rlhf_audit.check import FAIL, NOT_APPLICABLE, PASS, Check
from rlhf_audit.data import evaluations, held_out
from rlhf_audit.files import artifacts, journal, ledger, logged_rewards, metrics, rows
from rlhf_audit.replaying import replay_check
from rlhf_audit.sampling import (
    ages,
    encoded_again,
    equal_completions,
    rounded,
    sampling_test,
    trainer_against_sampler,
    values,
)
from rlhf_audit.subject import Subject
from rlhf_audit.training import advantages, rewards, shown_rewards
from rlhf_core import TRAINER, InputError, Stage
from rlhf_core import plugins as plugin_loading
from rlhf_core.config import build
from rlhf_core.errors import suggest
from rlhf_core.mesh import make_mesh
from rlhf_core.pipeline.file import read
from rlhf_core.pipeline.plan import Plan, plan
from rlhf_core.runs import Damaged, RunDirectory, StageDirectory, open_run
from rlhf_core.stage.spec import StageSpec
from rlhf_core.tokenizer import load_tokenizer

RESOLVED = "pipeline.resolved.toml"


@dataclass(frozen=True)
class AuditOptions:
    """What an audit does besides reading files.

    replay: updates that are trained again; 0: none. exact: read sampled tokens again with the policies that are kept.
    call: call rewards that cost something, too. plugins: files with components.
    """

    replay: int = 0
    exact: bool = False
    call: bool = False
    plugins: Sequence[Path] = ()


def audit(
    path: str | Path, *, stage: str | None = None, options: AuditOptions | None = None
) -> dict[str, list[Check]]:
    """Check the stages of a run; return {stage: its checks}.

    stage: the only one to check. Raises InputError where `path` is no run, or has no such stage.
    """
    options = options or AuditOptions()
    damaged: list[Damaged] = []
    run = open_run(path, damaged=damaged.append)
    begun = [each for each in run.stages if each.spec or each.has_metrics]
    names = [each.name for each in begun]
    if stage is not None and stage not in names:
        raise InputError(f"--stage {stage}: no such stage.{suggest(stage, names)} Stages: {', '.join(names)}")
    host = plugin_loading.load(files=options.plugins)
    planned = _plan(run, host)
    with tempfile.TemporaryDirectory(prefix="rlhf-audit-") as scratch:
        return {
            each.name: list(_checks(run, each, host, planned, damaged, options, Path(scratch)))
            for each in begun
            if stage in (None, each.name)
        }


def failed(found: dict[str, list[Check]]) -> bool:
    """Return whether a check failed."""
    return any(check.verdict == FAIL for checks in found.values() for check in checks)


def _plan(run: RunDirectory, host: plugin_loading.Host) -> Plan | str:
    """Return what the run was asked for; a text that says why it cannot be opened."""
    try:
        if (run.dir / RESOLVED).is_file():
            return plan(read(run.dir / RESOLVED, dir=run.dir), host)
        return Plan(None, run.dir, 0, {}, tuple(_called_from_python(each, host) for each in run.stages))
    except InputError as error:
        return error.problems[0]


def _called_from_python(stage: StageDirectory, host: plugin_loading.Host) -> StageSpec:
    """Specify a trainer that was called from Python, as its stage.json has it: without objects that were in memory.

    Raises InputError where its trainer or what its configuration names is not installed.
    """
    trainer = host.registry.get(TRAINER, stage.trainer)
    named = {name: value for name, value in stage.config.items() if name in trainer.config.names()}
    if "rewards" in named:
        functions = {key for key, code in stage.spec["code"].items() if not code["owner"]}
        rewards = enumerate(named["rewards"])
        named["rewards"] = [reward for i, reward in rewards if f"rewards[{i}]" not in functions]
    config = build(trainer.config, named, where=stage.name, registry=host.registry)
    seed = int(stage.spec["seed"])
    return StageSpec(stage.name, stage.dir, stage.dir, stage.trainer, trainer, seed, config, config, config)


def _checks(
    run: RunDirectory,
    stage: StageDirectory,
    host: plugin_loading.Host,
    planned: Plan | str,
    damaged: list[Damaged],
    options: AuditOptions,
    scratch: Path,
) -> Iterator[Check]:
    """Yield the checks of a stage."""
    subject = Subject(run, stage, damaged)
    opened = _open(stage, host, planned, scratch)
    checks: list[tuple[str, Callable[[], Check]]] = [
        ("artifact hashes", partial(artifacts, subject)),
        ("journal", partial(journal, subject)),
        ("journal rows", partial(rows, subject)),
        ("ledger", partial(ledger, subject)),
        ("metrics rows", partial(metrics, subject)),
        ("logged rewards", partial(logged_rewards, subject)),
        ("shown completions", partial(shown_rewards, subject)),
        ("trainer's values", partial(values, subject)),
        ("sampling test", partial(sampling_test, subject)),
        ("trainer against sampler", partial(trainer_against_sampler, subject)),
        ("rounded log-probabilities", partial(rounded, subject)),
        ("ages of policies", partial(ages, subject)),
        ("equal completions", partial(equal_completions, subject)),
        ("ids against their text", lambda: encoded_again(subject, _tokenizer(subject, opened))),
        ("rewards", partial(rewards, subject, opened, call=options.call)),
        ("advantages", partial(advantages, subject, opened)),
        ("held-out prompts", partial(held_out, subject)),
        ("evaluations", partial(evaluations, subject)),
    ]
    if options.exact:
        # What reads policies is imported where it is asked for.
        from rlhf_audit.exact import ExactChecks

        checks += ExactChecks(subject, opened).checks()
    if options.replay:
        checks.append(("replay", partial(replay_check, subject, options.replay, options.plugins)))
    found = [_run(name, check) for name, check in checks]
    yield _readable(subject)
    yield from found
    for more in host.hook.rlhf_audit(run=run, stage=stage):
        yield from more or ()


def _run(name: str, check: Callable[[], Check]) -> Check:
    """Run a check; what damaged files make of it is a failure of the check, by name."""
    try:
        return check()
    except Damaged as error:
        return Check(name, FAIL, "", error.why, str(error.path))


def _readable(subject: Subject) -> Check:
    """Check that every file that was asked for could be read."""
    there = {str(each.path): each for each in subject.damaged if subject.dir in each.path.parents}
    if not there:
        return Check("files", "pass", "all are readable")
    first = next(iter(there.values()))
    return Check("files", FAIL, f"{len(there)} damaged", first.why, str(first.path))


def _open(
    stage: StageDirectory, host: plugin_loading.Host, planned: Plan | str, scratch: Path
) -> Stage | str:
    """Open a stage as it was asked for, in a directory of its own, to call its components; a text says why not."""
    if isinstance(planned, str):
        return f"what it was asked for cannot be opened: {planned}"
    spec = next((each for each in planned.stages if each.name == stage.name), None)
    if spec is None:
        return "the pipeline has no such stage any more"
    directory = scratch / stage.name
    directory.mkdir(exist_ok=True)
    mesh = make_mesh(**dict[str, Any](planned.mesh)) if stage.rollout_numbers else None
    return Stage(stage.name, directory, spec.seed, mesh, True, host.registry, host.hook, spec=spec)


def _tokenizer(subject: Subject, opened: Stage | str) -> Any:
    """Open the tokenizer of a stage's policy; None where it cannot be."""
    places = [str(path.parent) for path in subject.dir.glob("artifacts/*/tokenizer.json")]
    model = None if isinstance(opened, str) else getattr(opened.specification().config, "model", None)
    if isinstance(model, str):
        places.append(model)
    for place in places:
        try:
            return load_tokenizer(place)
        except InputError:
            continue
    return None


def lines(found: dict[str, list[Check]]) -> Iterator[str]:
    """Yield an audit as lines for a reader; checks that are not applicable for the same reason share one."""
    for stage, checks in found.items():
        yield f"stage '{stage}'"
        applied = [check for check in checks if check.verdict != NOT_APPLICABLE]
        width = max(len(check.name) for check in applied)
        for check in applied:
            yield f"  {check.verdict:4}  {check.name:{width}}  {_number_and_why(check)}".rstrip()
            if check.where and check.verdict == FAIL:
                yield f"        {'':{width}}  {check.where}"
        names: dict[str, list[str]] = defaultdict(list)
        for check in checks:
            if check.verdict == NOT_APPLICABLE:
                names[_number_and_why(check)].append(check.name)
        for why, skipped in names.items():
            yield f"  n/a   {', '.join(skipped)}: {why}"
    verdicts = Counter(check.verdict for checks in found.values() for check in checks)
    yield f"{verdicts[PASS]} pass, {verdicts[FAIL]} fail, {verdicts[NOT_APPLICABLE]} not applicable"


def _number_and_why(check: Check) -> str:
    return "; ".join(part for part in (check.number, check.why) if part)


def as_json(found: dict[str, list[Check]]) -> str:
    """Return an audit as JSON, for programs."""
    stages = {
        stage: [
            {
                "name": check.name,
                "verdict": check.verdict,
                "number": check.number,
                "why": check.why,
                "where": check.where,
                "values": {name: float(value) for name, value in check.values.items()},
            }
            for check in checks
        ]
        for stage, checks in found.items()
    }
    return json.dumps({"passed": not failed(found), "stages": stages}, ensure_ascii=False)
