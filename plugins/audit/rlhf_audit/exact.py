"""Checks that read sampled tokens again, with the policies that are still kept: `--exact`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import jax
import numpy as np
from numpy.typing import NDArray

from rlhf_audit.check import FAIL, PASS, Check, skipped, verdict_of
from rlhf_audit.policies import KeptPolicies
from rlhf_audit.sampling import far_problem, ids_of_text, test_sums
from rlhf_audit.subject import Subject
from rlhf_core import SAMPLER, InputError, RunError, SamplerInputs, Stage
from rlhf_core.logprobs import NEVER
from rlhf_core.rollouts import Rollout, SamplingTest
from rlhf_core.rollouts.sampling_plan import filters_of, not_applicable
from rlhf_core.rollouts.sampling_test import sum_moments

LAGS = (1, 2, 3)
"""By how many rollouts a sampler's policy may be late, in the hypotheses that are tried."""
LATE_Z = 6.0
"""Standard errors at which an older policy fits better: an honest sampler has so many once in 10⁹."""
SAMPLED_AGAIN = 3
"""Rollouts whose prompts our own sampler is given."""
MOST_OUTSIDE = 0.01
"""Share of tokens that filters do not allow: by rounding, an honest sampler has fewer."""
LIMIT_ENCODED = math.log(1e-6)
"""The log of the probability at which shares of an honest sampler and of our own would differ so much."""


class Read(NamedTuple):
    """A rollout's sampled tokens under the policy that the journal says.

    tokens: bool [N, C]. moments: by the names of `Moments`, float32 [tokens].
    """

    rollout: Rollout
    version: int
    tokens: NDArray[np.bool_]
    moments: dict[str, NDArray[np.float32]]


class Distances(NamedTuple):
    """The distance of the log-probabilities that the sampler reported for a rollout from those of policies.

    own: of the journal's, nats, float64 [tokens]. others: the version of each hypothesis. gains: {version: by how much
    it is nearer, nats, float64 [completions]}.
    """

    read: Read
    own: NDArray[np.float64]
    others: dict[str, int]
    gains: dict[int, NDArray[np.float64]]


class ExactChecks:
    """The checks of a stage with the policies that are still kept.

    Rollouts whose policy is kept are read once, when the first check asks for them.
    """

    def __init__(self, subject: Subject, stage: Stage | str) -> None:
        self.subject, self.stage = subject, stage

    @cached_property
    def policies(self) -> KeptPolicies | str:
        """The kept policies; a text says why there are none."""
        if not self.subject.numbers:
            return "the stage sampled nothing"
        if isinstance(self.stage, str):
            return self.stage
        if not getattr(self.stage.specification().config, "model", None):
            return "the model was given from Python, in memory, and its directory is not known"
        try:
            return KeptPolicies(self.subject, self.stage)
        except (InputError, RunError) as error:
            return f"the policy that training starts from cannot be opened: {str(error).splitlines()[0]}"

    @cached_property
    def read(self) -> list[Read] | str:
        """The rollouts whose policy is kept, in their order; a text says why there are none."""
        policies = self.policies
        if isinstance(policies, str):
            return policies
        found = []
        for entry in self.subject.rollouts():
            rollout = entry.rollout
            version = int(np.asarray(rollout.samples.version).max())
            tokens = SamplingTest.sampled(rollout)
            if version not in policies.places or not tokens.any():
                continue
            try:
                found.append(Read(rollout, version, tokens, policies.moments(version, rollout, tokens)))
            except (InputError, RunError) as error:
                return f"policy {version} cannot be read: {str(error).splitlines()[0]}"
        if found:
            return found
        kept = ", ".join(map(str, sorted(policies.places))) or "none"
        return f"no policy that sampled is kept; there are those after updates {kept}: save_steps keeps more"

    def checks(self) -> list[tuple[str, Callable[[], Check]]]:
        """Return the checks by name."""
        return [
            ("sampling test, exact", self.sampling_test),
            ("policy that sampled", self.policy_that_sampled),
            ("ids of our own sampler", self.ids_of_our_own),
        ]

    def sampling_test(self) -> Check:
        """Make the sampling test with the policies that sampled, where these are kept."""
        name, read = "sampling test, exact", self.read
        if isinstance(read, str) or isinstance(self.policies, str):
            return skipped(name, str(read))
        sampling = self.policies.config.sampling
        reason = not_applicable(sampling)
        if reason is not None:
            return skipped(name, reason)
        if any(each.rollout.rounds > 1 and each.rollout.dropped is None for each in read):
            return skipped(
                name, "the journal lacks the groups that dynamic_sampling dropped by their rewards"
            )
        tolerance = float(self.subject.option("limits.surprisal_gap") or 0.0)
        filters = filters_of(sampling)
        outside = 0
        sums = {}
        for each in read:
            sums[each.rollout.number], left_out = self._sums(each, tolerance, filters=bool(filters))
            outside += left_out
        tested = test_sums(name, self.subject, sums)
        number = f"{tested.number}, {len(read)} of {len(self.subject.numbers)} rollouts"
        if filters:
            number += f"; {outside:,} more tokens are outside {' and '.join(filters)}"
        if outside > MOST_OUTSIDE * (tested.values["tokens"] + outside):
            where = str(self.subject.dir / "journal")
            return Check(name, FAIL, number, "the sampler filters otherwise, or not at all", where)
        if not tolerance:
            return skipped(name, "limits.surprisal_gap = 0: the bets have no tolerance for rounding", number)
        return Check(name, tested.verdict, number, tested.why, tested.where, tested.values)

    def _sums(self, each: Read, tolerance: float, *, filters: bool) -> tuple[NDArray[np.float64], int]:
        """Sum the moments of a rollout's sampled tokens, dropped groups included, by engine and version.

        filters: whether they are read under what the filters of sampling leave of the policy. Returns the sums, and the
        number of sampled tokens that these filters do not allow, which are left out of the sums.
        """
        assert isinstance(self.policies, KeptPolicies)
        places, moments = [], []
        for part in (each.rollout, each.rollout.dropped):
            if part is None:
                continue
            tokens = SamplingTest.sampled(part)
            if part is each.rollout and not filters:
                moments.append(each.moments)
            else:
                moments.append(self.policies.moments(each.version, part, tokens, filters=filters))
            places.append(_places(part, each.version, tokens))
        joined = {name: np.concatenate([part[name] for part in moments]) for name in each.moments}
        inside = joined["surprisal/logps"] > NEVER / 2
        kept = {name: values[inside] for name, values in joined.items()}
        return sum_moments(np.concatenate(places)[inside], kept, tolerance), int((~inside).sum())

    def policy_that_sampled(self) -> Check:
        """Compare what the sampler said of its tokens with what every kept policy thinks of them.

        Where it held the policy of the journal, no other one is nearer: with n the rounding, |n + m| is not below |n|
        in the mean. Differences of the two are summed over completions, since tokens of one depend on each other.
        """
        name, read = "policy that sampled", self.read
        if isinstance(read, str):
            return skipped(name, read)
        compared = [self._compare(each) for each in read]
        tokens = sum(len(each.own) for each in compared)
        means = [float(each.own.mean()) for each in compared]
        mean = sum(float(each.own.sum()) for each in compared) / tokens
        number = (
            f"its own is {mean:.2g} nats per token off, {len(read)} of {len(self.subject.numbers)} rollouts"
        )
        values = {"own": mean, "rollouts": float(len(read))}
        nearest = _nearest(compared)
        if nearest is not None:
            what, gain = nearest
            last = next(each for each in reversed(compared) if what in each.others)
            version, rollout = last.others[what], last.read.rollout.number
            why = (
                f"the sampler's policy is {what}: in rollout {rollout} its log-probabilities fit the policy "
                f"after update {version}, and the journal says {last.read.version} ({gain / tokens:.2g} nats per token "
                "nearer)"
            )
            return Check(name, FAIL, number, why, str(self.subject.journal_file(rollout)), values)
        where = str(self.subject.journal_file(read[int(np.argmax(means))].rollout.number))
        problem = far_problem(self.subject, mean)
        return Check(name, verdict_of(problem), number, problem, where if problem else "", values)

    def _compare(self, each: Read) -> Distances:
        """Compare what the sampler said of a rollout with the policy of the journal, and with older ones."""
        assert isinstance(self.policies, KeptPolicies)
        kept = self.policies.places
        said = each.rollout.samples.logps[each.tokens].astype(np.float64)
        known = np.isfinite(said)
        own = np.abs(said - each.moments["surprisal/logps"])[known]
        rows = np.nonzero(each.tokens)[0][known]
        others = {what: version for what, version in self._older(each.version).items() if version in kept}
        gains = {}
        for version in {*others.values()}:
            found = self.policies.moments(version, each.rollout, each.tokens)["surprisal/logps"]
            nearer = own - np.abs(said - found)[known]
            gains[version] = np.asarray(np.bincount(rows, nearer), np.float64)
        return Distances(each, own, others, gains)

    def _older(self, version: int) -> dict[str, int]:
        """Name the older policies that a sampler may have held instead of one: {what it would be: version}."""
        at = self._versions.index(version)
        late = {
            f"{lag} rollout{'s' if lag > 1 else ''} late": self._versions[max(at - lag, 0)]
            for lag in LAGS
            if at
        }
        return late | ({"always the first one": self._versions[0]} if at else {})

    @cached_property
    def _versions(self) -> list[int]:
        """The versions that sampled, in the order of their rollouts, each once."""
        found = (int(np.asarray(entry.rollout.samples.version).max()) for entry in self.subject.rollouts())
        return list(dict.fromkeys(found))

    def ids_of_our_own(self) -> Check:
        """Sample the same prompts with the same policies, and compare how often ids differ from those of their text.

        An honest sampler has our own share, one that decodes and encodes has none. Completions of a prompt are drawn
        alike by both, so that it is as if all were shared out at random (Fisher's exact test, one-sided).
        """
        name, read, policies = "ids of our own sampler", self.read, self.policies
        if isinstance(read, str) or isinstance(policies, str):
            return skipped(name, str(read))
        if any(each.rollout.conversations is not None for each in read):
            return skipped(name, "turns of episodes are parts of longer texts")
        theirs = ours = drawn = total = 0
        for each in read[:SAMPLED_AGAIN]:
            seen = ids_of_text(policies.first.tokenizer, each.rollout.samples)
            again = ids_of_text(policies.first.tokenizer, self._sample(policies, each))
            theirs, total = theirs + seen[0], total + seen[1]
            ours, drawn = ours + again[0], drawn + again[1]
        if not total or not drawn:
            return skipped(name, "no completion has ended")
        number = (
            f"{100 * theirs / total:.2f} % of {total:,} completions differ from their text, "
            f"{100 * ours / drawn:.2f} % of {drawn:,} of our own"
        )
        values = {"theirs": theirs / total, "ours": ours / drawn}
        if not theirs + ours:
            return skipped(name, "the policy writes no ids that would differ", number)
        if log_at_most(theirs, total, ours, drawn) < LIMIT_ENCODED:
            why = (
                "the sampler decodes its ids and encodes the text again: they are not those that were sampled"
            )
            return Check(name, FAIL, number, why, str(self.subject.dir / "journal"), values)
        return Check(name, PASS, number, values=values)

    def _sample(self, policies: KeptPolicies, each: Read) -> Any:
        """Sample the prompts of a rollout with our own sampler and the policy that the journal says."""
        assert isinstance(self.stage, Stage)
        model = policies.open(each.version)
        rollout = each.rollout
        prompts = [np.asarray(ids, np.int32) for ids in rollout.prompt_ids]
        maker = self.stage.registry.get(SAMPLER, "jax")
        sampler = maker(
            SamplerInputs(
                definition=model.definition,
                options=policies.config.sampling,
                mesh=model.mesh,
                stop_ids=model.stop_ids,
                prompts_per_call=len(prompts),
                max_prompt_length=max(map(len, prompts)),
                num_generations=rollout.group,
                tokenizer=model.tokenizer,
            )
        )
        return sampler(model.params, prompts, jax.random.key(rollout.number))


def _places(rollout: Rollout, version: int, tokens: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return the engine of each of these tokens, bool [N, C], beside the version: int64 [tokens, 2]."""
    engines = np.asarray(rollout.samples.engine)[np.nonzero(tokens)[0]]
    return np.stack([engines, np.full(len(engines), version)], axis=1).astype(np.int64)


def _nearest(compared: Sequence[Distances]) -> tuple[str, float] | None:
    """Return the hypothesis whose policies are nearest, with its gain in nats; None where the journal's are."""
    found: dict[str, float] = {}
    for what in dict.fromkeys(what for each in compared for what in each.others):
        gains = np.concatenate([each.gains[each.others[what]] for each in compared if what in each.others])
        error = math.sqrt(float(np.square(gains).sum()))
        if error and float(gains.sum()) / error > LATE_Z:
            found[what] = float(gains.sum())
    if not found:
        return None
    best = max(found, key=lambda what: found[what])
    return best, found[best]


def log_at_most(theirs: int, total: int, ours: int, drawn: int) -> float:
    """Return the log of the probability of so few, or fewer, among `total`, if both samplers were alike.

    theirs of total and ours of drawn completions have the property: the hypergeometric distribution.
    """

    def choose(n: int, k: int) -> float:
        return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)

    having = theirs + ours
    every = choose(total + drawn, having)
    logs = [
        choose(total, k) + choose(drawn, having - k) - every
        for k in range(max(having - drawn, 0), theirs + 1)
    ]
    return float(np.logaddexp.reduce(logs))
