"""Checks of what was sampled: whether it can have come from the policy that the run says."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlhf_audit.check import FAIL, PASS, Check, skipped, verdict_of
from rlhf_audit.subject import Entry, Subject
from rlhf_core import Rollouts
from rlhf_core.rollouts import Rollout
from rlhf_core.runs import Damaged

LAMBDAS = (1 / 2, -1 / 2, 1 / 8, -1 / 8, 1 / 32, -1 / 32)
"""The exponents of the bets that the run has summed."""
LIMIT = math.log(1e9)
"""The log of the evidence at which an honest run would be named once in 10⁹."""
LIMIT_EQUAL = math.log(1e6)
"""The same for equal completions."""
SHARES = (1e-4, 1e-3, 1e-2, 1e-1)
"""Shares of completions that are copies, which the bets on equal completions are made for."""
INTERVAL = 1.96
"""Standard errors on either side, of an interval that has the true value in 95 of 100 runs."""
OLDER, LEAST_OLDER = 100.0, 1e-3
"""How many times, and by how many nats, log-probabilities differ more than in the first rollout where the sampler holds
an older policy: the first rollout has none. Rounding grows with the logits, which do not become a hundred times larger:
by 2.6 at most in the runs of tests/recipes/honest.py, in bfloat16, from 0.0012 nats. In float32 it stays below 2e-7.
"""
ENGINES_TOLERANCE, ROLLOUT_SHARE = 0.2, 0.25
"""The default of `sampler.probe_tolerance`, and the share of it by which a rollout's log-probabilities may be off on
average: a run with engines holds them to it."""
DIGITS = (1, 2, 3, 4)
"""Decimal places to which log-probabilities may have been rounded."""


class Pair(NamedTuple):
    """What sampler and trainer think of a rollout's sampled tokens, nats, float64 [tokens] where both are known."""

    number: int
    sampler: NDArray[np.float64]
    trainer: NDArray[np.float64]


def values(subject: Subject) -> Check:
    """Check that the trainer's values are of the journal's rollouts, and that their sums are those of their tokens."""
    name = "trainer's values"
    if not subject.numbers or not any(subject.values_file(number).is_file() for number in subject.numbers):
        return skipped(name, "the run wrote no values")
    count = 0
    for entry in subject.rollouts():
        number = entry.rollout.number
        try:
            problem = _value_problem(subject, entry)
        except Damaged as error:
            problem = f"it cannot be read: {error.why}"
        if problem:
            return Check(name, FAIL, f"rollout {number}", problem, str(subject.values_file(number)))
        count += 1
    return Check(name, PASS, f"{count} rollouts", values={"rollouts": count})


def _value_problem(subject: Subject, entry: Entry) -> str:
    """Return what is wrong with the values of a rollout."""
    found = subject.values(entry.rollout.number)
    samples = entry.rollout.samples
    if found is None:
        # A rollout that no update has had has no values yet.
        begun = (subject.updates_per_rollout or 1) * entry.rollout.number
        return "it is missing" if begun < subject.updates else ""
    if str(found["rollout"]) != entry.rollout.digest():
        return "they are of another rollout than the journal has"
    if len(found["trainer_logps"]) != int(samples.mask.sum()):
        return f"{len(found['trainer_logps'])} values for {int(samples.mask.sum())} tokens"
    sums = found["sums"]
    excess = -found["trainer_logps"].astype(np.float64) - found["entropies"]
    # The sums also have tokens of failed episodes, which the journal's mask leaves out.
    whole = len(sums) and int(sums[:, 2].sum()) == len(excess) and not np.isnan(excess).any()
    if whole and not math.isclose(float(excess.sum()), float(sums[:, 3].sum()), rel_tol=1e-5, abs_tol=1e-3):
        return (
            f"the sum of surprisal less entropy is {excess.sum():.4f}, and {sums[:, 3].sum():.4f} is written"
        )
    return ""


def sampling_test(subject: Subject) -> Check:
    """Test the surprisal of all sampled tokens against the policy's entropy, from the sums that the run wrote.

    With rollouts ahead, those of what engines drew from each policy before they sampled with it.
    """
    name = "sampling test"
    if not subject.numbers:
        return skipped(name, "the stage sampled nothing")
    files = {}
    for number in subject.numbers:
        with suppress(Damaged):
            files[number] = subject.values(number) or {}
    drawn = any("draws" in found for found in files.values())
    kind = "draws" if drawn else "sums"
    sums = {number: found[kind] for number, found in files.items() if len(found.get(kind, ()))}
    if not sums:
        reason = (
            f"{subject.filtered} draws from another distribution"
            if subject.filtered
            else "the run wrote no sums"
        )
        return skipped(name, reason)
    tested = test_sums(name, subject, sums)
    if subject.ahead and not drawn:
        why = (
            "rollouts_ahead: the sums are of a policy that has moved since it sampled; --exact reads it again"
        )
        return skipped(name, why, tested.number)
    if subject.option("limits.surprisal_gap") == 0:
        return skipped(
            name, "limits.surprisal_gap = 0: the bets have no tolerance for rounding", tested.number
        )
    return tested


def test_sums(name: str, subject: Subject, sums: Mapping[int, NDArray[np.float64]]) -> Check:
    """Bet against the sampler, rollout by rollout.

    sums: {number of a rollout: float64 [engines and versions, 11]}, of which the columns are those of `sums` in
    values/NNNNNN.npz: engine, version, tokens, Σ(−log p − H), ΣV, and Σ log e for every λ of LAMBDAS.
    """
    bets: dict[int, NDArray[np.float64]] = {}
    totals: dict[int, NDArray[np.float64]] = {}
    most, place = -math.inf, (0, 0, 0)
    for number, each in sums.items():
        for engine in np.unique(each[:, 0]).astype(int).tolist():
            rows = each[each[:, 0] == engine]
            begun = -math.log((number + 1) * (number + 2))
            before = bets.get(engine, np.full(len(LAMBDAS), -math.inf))
            bets[engine] = rows[:, 5:].sum(0) + np.logaddexp(before, begun)
            totals[engine] = totals.get(engine, np.zeros(3)) + rows[:, 2:5].sum(0)
        every = np.concatenate([*bets.values()])
        evidence = float(np.logaddexp.reduce(every)) - math.log(len(every))
        if evidence > most:
            likeliest = max(bets, key=lambda engine: float(bets[engine].max()))
            most = evidence
            place = (number, likeliest, int(each[:, 1].max()))
    tokens, excess, variance = np.sum([*totals.values()], axis=0)
    gap = excess / tokens
    error = math.sqrt(variance) / tokens
    z = gap / error if error else 0.0
    number_ = (
        f"gap {gap:+.4f} ± {INTERVAL * error:.4f} nats per token over {int(tokens):,} tokens, z {z:+.1f}, "
        f"evidence 10^{most / math.log(10):.1f}"
    )
    found_values = {
        "gap": gap,
        "standard_error": error,
        "z": z,
        "log10_evidence": most / math.log(10),
        "tokens": tokens,
    }
    if most < LIMIT:
        return Check(name, PASS, number_, values=found_values)
    rollout, engine, version = place
    cause = (
        "it samples greedily, colder or with filters (top_k, top_p)"
        if totals[engine][1] < 0
        else "it holds another policy, samples hotter, or its ids are another tokenizer's"
    )
    why = f"engine e{engine}, version {version}: its tokens are not drawn from the policy; likely {cause}"
    return Check(name, FAIL, number_, why, str(subject.values_file(rollout)), found_values)


def _pairs(subject: Subject) -> Iterator[Pair]:
    """Yield what sampler and trainer think of each rollout whose values are there and fit."""
    for entry in subject.rollouts():
        try:
            found = subject.values(entry.rollout.number)
        except Damaged:
            found = None
        samples = entry.rollout.samples
        if found is None or len(found["trainer_logps"]) != int(samples.mask.sum()):
            continue
        sampler = samples.logps[samples.mask].astype(np.float64)
        trainer = found["trainer_logps"].astype(np.float64)
        known = np.isfinite(sampler) & np.isfinite(trainer)
        if known.any():
            yield Pair(entry.rollout.number, sampler[known], trainer[known])


def trainer_against_sampler(subject: Subject) -> Check:
    """Compare what the sampler said of its tokens with what the trainer thinks of them, token by token."""
    name = "trainer against sampler"
    means: list[float] = []
    numbers: list[int] = []
    signed: list[float] = []
    largest, place = 0.0, 0
    tails: list[NDArray[np.float64]] = []
    for number, sampler, trainer in _pairs(subject):
        apart = np.abs(sampler - trainer)
        numbers.append(number)
        means.append(float(apart.mean()))
        signed.append(float((sampler - trainer).mean()))
        # Enough for a quantile of 99.9 %, whatever the other rollouts have.
        tails.append(np.sort(apart)[-max(len(apart) // 100, 1) :])
        if apart.max() > largest:
            largest = float(apart.max())
            place = number
    if not means:
        return skipped(name, "the run wrote no values")
    size = sum(len(tail) for tail in tails)
    quantile = float(np.sort(np.concatenate(tails))[-max(size // 10, 1)])
    mean = float(np.mean(means))
    trend = float(np.polyfit(numbers, means, 1)[0]) if len(means) > 1 else 0.0
    number_ = (
        f"mean {mean:.2g}, 99.9 % below {quantile:.2g}, largest {largest:.2g} nats per token, "
        f"trend {trend:+.1g} per rollout"
    )
    found = {
        "mean": mean,
        "quantile_999": quantile,
        "largest": largest,
        "trend": trend,
        "bias": float(np.mean(signed)),
    }
    where = f"{subject.journal_file(place)}"
    if subject.ahead:
        return skipped(name, "rollouts_ahead: the trainer has moved since the policy sampled", number_)
    first, later = _first_and_later(numbers, means)
    if later > OLDER * first and later > first + LEAST_OLDER:
        why = (
            f"{first:.2g} nats per token in the first rollout and {later:.2g} in later ones: the sampler's "
            "policy is an older one than the trainer's"
        )
        return Check(name, FAIL, number_, why, where, found)
    problem = far_problem(subject, mean)
    return Check(name, verdict_of(problem), number_, problem, where if problem else "", found)


def first_and_later(subject: Subject) -> tuple[float, float]:
    """Return how far sampler and trainer are apart in the first rollout, and at the median in later ones.

    Nats per token; NaN where that is not known.
    """
    pairs = [(number, float(np.abs(said - thought).mean())) for number, said, thought in _pairs(subject)]
    return _first_and_later([number for number, _ in pairs], [mean for _, mean in pairs])


def _first_and_later(numbers: Sequence[int], means: Sequence[float]) -> tuple[float, float]:
    if len(means) < 2 or numbers[0] != 0:
        return math.nan, math.nan
    return means[0], float(np.median(means[1:]))


def far_problem(subject: Subject, mean: float) -> str:
    """Return what is wrong where sampler and trainer are apart by so much, nats per token; empty where nothing is."""
    tolerance = float(subject.option("sampler.probe_tolerance") or ENGINES_TOLERANCE)
    if mean <= ROLLOUT_SHARE * tolerance:
        return ""
    return "the sampler's log-probabilities are of another policy, temperature or tokens"


def ages(subject: Subject) -> Check:
    """Check how old the policies were that sampled, against what `rollouts_ahead` allows."""
    name = "ages of policies"
    if not subject.numbers:
        return skipped(name, "the stage sampled nothing")
    each = subject.updates_per_rollout
    if each is None:
        return skipped(name, "fewer than two rollouts")
    oldest = 0
    for entry in subject.rollouts():
        number = entry.rollout.number
        versions = np.asarray(entry.rollout.samples.version)
        due = max(number - subject.ahead, 0) * each
        where = str(subject.journal_file(number))
        if int(versions.min()) < due:
            why = f"version {int(versions.min())} sampled rollout {number}, which version {due} was due to sample"
            return Check(name, FAIL, f"{due - int(versions.min())} updates too old", why, where)
        if int(versions.max()) > number * each:
            why = f"version {int(versions.max())} sampled rollout {number}, before update {number * each}"
            return Check(name, FAIL, "", why, where)
        oldest = max(oldest, number * each - int(versions.min()))
    return Check(name, PASS, f"at most {oldest} updates old", values={"oldest": oldest})


def equal_completions(subject: Subject) -> Check:
    """Test whether completions of a prompt equal earlier ones more often than their probabilities say.

    Where x_j is drawn after distinct x_1, x_2, … of the same prompt, it equals one of them with probability
    q = Σ p(x_i). The bet that a share s of completions are copies wins (q + s (1 − q)) / q at an equal one and
    1 − s at another, which has a mean of 1 for an honest sampler.
    """
    name = "equal completions"
    if not subject.numbers:
        return skipped(name, "the stage sampled nothing")
    if subject.filtered:
        return skipped(name, f"{subject.filtered} draws from another distribution than the policy's")
    logs = np.zeros(len(SHARES))
    seen, expected, total = 0, 0.0, 0
    worst, place = 0.0, ""
    for entry in subject.rollouts():
        rollout = entry.rollout
        if rollout.conversations is not None:
            return skipped(
                name, "the world's answers are part of an episode, and their probability is not known"
            )
        for equal, log_q, row in _draws(rollout):
            q = math.exp(min(log_q, 0.0))
            total += 1
            expected += q
            seen += equal
            for i, share in enumerate(SHARES):
                win = np.logaddexp(log_q, math.log(share) + math.log1p(-min(q, 1 - 1e-12))) - log_q
                logs[i] += win if equal else math.log1p(-share)
            if equal and log_q < worst:
                worst = log_q
                place = f"{subject.journal_file(rollout.number)}, completion {row}"
    if not total:
        return skipped(name, "every prompt has one completion")
    evidence = float(np.logaddexp.reduce(logs)) - math.log(len(logs))
    power = evidence / math.log(10)
    number = f"{seen} of {total:,} equal an earlier one, {expected:.1f} expected, evidence 10^{power:.1f}"
    found = {"equal": seen, "expected": expected, "log10_evidence": power}
    if evidence < LIMIT_EQUAL:
        return Check(name, PASS, number, values=found)
    why = f"one of probability e^{worst:.0f} came twice: completions are sent twice, or seeds are shared"
    return Check(name, FAIL, number, why, place, found)


def _draws(rollout: Rollout) -> Iterator[tuple[bool, float, int]]:
    """Yield, of every completion but its prompt's first: whether it equals one before, log q, and its number."""
    samples = rollout.samples
    logps = np.where(samples.mask, samples.logps, 0.0).astype(np.float64).sum(1)
    for start in range(0, len(rollout.total), rollout.group):
        before: dict[bytes, float] = {}
        for row in range(start, start + rollout.group):
            text = samples.tokens[row, : int(samples.lengths[row])].tobytes()
            if before:
                log_q = float(np.logaddexp.reduce([*before.values()]))
                yield text in before, min(log_q, -1e-9), row
            before.setdefault(text, float(logps[row]))


def rounded(subject: Subject) -> Check:
    """Check whether the sampler's log-probabilities lie on a grid, as numbers do that were written with few digits."""
    name = "rounded log-probabilities"
    on_grid = np.zeros(len(DIGITS))
    total = 0
    for entry in subject.rollouts():
        samples = entry.rollout.samples
        found = samples.logps[samples.mask].astype(np.float64)
        found = found[np.isfinite(found) & (found != 0)]
        total += len(found)
        for i, digits in enumerate(DIGITS):
            scaled = found * 10.0**digits
            # A float32 is off by up to half its last bit.
            near = np.abs(scaled - np.round(scaled)) <= np.abs(scaled) * 2.0**-23 + 1e-9
            on_grid[i] += int((near & (np.round(scaled) != 0)).sum())
    if total < 100:
        return skipped(name, "fewer than 100 log-probabilities below 0")
    shares = on_grid / total
    coarse = [digits for digits, share in zip(DIGITS, shares.tolist(), strict=True) if share > 0.5]
    number = f"{100 * float(shares[1]):.2f} % have two digits"
    problem = (
        f"they are rounded to {coarse[0]} digits: gradients and corrections use what is lost"
        if coarse
        else ""
    )
    return Check(name, verdict_of(problem), number, problem, str(subject.dir / "journal") if problem else "")


def encoded_again(subject: Subject, tokenizer: Any) -> Check:
    """Measure the share of completions whose ids differ from those of their decoded text.

    An honest sampler has the share that the policy gives such ids; one that decodes and encodes has none.
    """
    name = "ids against their text"
    if not subject.numbers:
        return skipped(name, "the stage sampled nothing")
    if tokenizer is None:
        return skipped(name, "the tokenizer of the policy cannot be opened")
    differ = total = 0
    for entry in subject.rollouts():
        if entry.rollout.conversations is not None:
            return skipped(name, "turns of episodes are parts of longer texts")
        found = ids_of_text(tokenizer, entry.rollout.samples)
        differ, total = differ + found[0], total + found[1]
    if not total:
        return skipped(name, "no completion has ended")
    share = differ / total
    number = f"{100 * share:.2f} % of {total:,} completions"
    if not differ:
        why = "no ids differ: the policy writes none that could, or the sampler decodes and encodes; --exact compares"
        return skipped(name, why, number)
    return Check(name, PASS, number, values={"share": share})


def ids_of_text(tokenizer: Any, samples: Rollouts) -> tuple[int, int]:
    """Count the completions whose ids differ from those of their decoded text, and all.

    Those that were cut are left out, since they may end within a character.
    """
    special = {int(each) for each in getattr(tokenizer, "all_special_ids", ())}
    differ = total = 0
    for row, length in enumerate(np.asarray(samples.lengths).tolist()):
        ids = [int(each) for each in samples.tokens[row, :length]]
        while ids and ids[-1] in special:
            ids.pop()
        if not samples.finished[row] or not ids:
            continue
        total += 1
        text = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        differ += [int(each) for each in tokenizer.encode(text, add_special_tokens=False)] != ids
    return differ, total
