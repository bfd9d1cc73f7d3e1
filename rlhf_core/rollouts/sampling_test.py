"""The sampling test: whether completions are drawn from the policy, rollout by rollout, and what is written of it."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rlhf_core.errors import RunError, warn
from rlhf_core.fit import Action
from rlhf_core.logprobs import NEVER
from rlhf_core.mesh import row_multiple
from rlhf_core.objective import trained_moments
from rlhf_core.reading import TreeReader
from rlhf_core.rollouts.rollout import Rollout
from rlhf_core.rollouts.sampling_plan import EVERY, filters_of, not_applicable
from rlhf_core.runtime.files import attempt, make_directory, write_atomic
from rlhf_core.sampling.filters import filtered
from rlhf_core.surprisal import LAMBDAS, MOMENTS, log_bets

if TYPE_CHECKING:
    import jax
    from jax.sharding import Mesh

    from rlhf_core.fit.actions import Moment
    from rlhf_core.models import Definition, Model
    from rlhf_core.packing import Layout, Packed, Tree
    from rlhf_core.rollouts.collector import RolloutCollector
    from rlhf_core.stage import Stage
    from rlhf_core.training import Context

FOLDER = "values"
LIMIT = math.log(1e9)
"""The log of the evidence that ends a run: an honest sampler reaches it with a probability of at most 1e-9."""
MOST_OUTSIDE = 1e-3
"""Share of tokens outside of what the filters allow, by rounding, above which they are warned of."""
COLUMNS = 5 + len(LAMBDAS)
"""Of `sums`: engine, version, tokens, Σ(−log p − H), ΣV, and Σ log e for every λ of LAMBDAS."""


class Evidence:
    """What was won by betting against each engine: log M, for every λ of LAMBDAS.

    With r = 1, 2, … the rollouts, M ← e_λ · (M + 1 / (r (r + 1))) for every λ and engine: a rollout may be the first
    that an engine is dishonest in. The mean of M over them reaches 1e9 with a probability of at most 1e-9, however long
    the run, where bets have a mean of at most 1 (Ville 1939).
    """

    def __init__(self, engines: int = 1) -> None:
        self.engines = engines
        self.logs: dict[int, list[float]] = {}

    def bet(self, number: int, sums: NDArray[np.float64]) -> None:
        """Bet on rollout `number`, from 0. sums: as `sum_moments` returns them."""
        begun = -math.log((number + 1) * (number + 2))
        for engine in np.unique(sums[:, 0]).astype(int).tolist():
            bets = sums[sums[:, 0] == engine, 5:].sum(0)
            before = self.logs.get(engine, [-math.inf] * len(LAMBDAS))
            self.logs[engine] = (bets + np.logaddexp(before, begun)).tolist()

    def log_mean(self, engine: int | None = None) -> float:
        """Return log M, the mean over λ of an engine; None: over all engines, too."""
        if engine is not None:
            return _log_sum(self.logs[engine]) - math.log(len(LAMBDAS))
        if not self.logs:
            return -math.inf
        each = [value for values in self.logs.values() for value in values]
        return _log_sum(each) - math.log(max(self.engines, len(self.logs)) * len(LAMBDAS))


class SamplingTest:
    """Compares the surprisal of what was sampled with the entropy of the policy, and writes values/NNNNNN.npz.

    With p the policy's distribution, −log p(x) − H has mean 0 for an honest sampler, and so does its sum over tokens
    that depend on each other. What may end a run is `Evidence`, of bets that are fair as long as the sampler is honest
    within the tolerance.

    A trainer gives the test to `RolloutUpdates`, with `RolloutOptions.test` for how it is made. That is all, unless a
    pass of the trainer's reads the moments: it then says so in `prepare`, with `add`, and has `actions` among its own.
    Tokens that are not added are read by the test, in rows of `layout`, before the rollout's first update; where no
    pass of the trainer's reads any, those of one of EVERY prompts.

    With rollouts ahead, bets are on `Rollout.draws` alone, where the sampler has these.

    model: the policy, with the attention that suits these rows.
    """

    def __init__(self, context: Context, collector: RolloutCollector, model: Model, layout: Layout) -> None:
        options = collector.options.test
        assert options is not None
        sampled = collector.options
        self.stage: Stage = collector.stage
        self.collector, self.options = collector, options
        self.applies = not_applicable(sampled.sampling) is None
        self.filters = filters_of(sampled.sampling)
        few = context.on_mesh(partial(_for_chosen_prompts, layout, context.mesh))
        reader = partial(TreeReader, mesh=context.mesh, per="token", routes=collector.routes)
        moments = partial(read_moments, model.definition, sampled.sampling.temperature or 1.0)
        self.reader = reader(partial(moments, None), few if options.read_by == "test" else layout)
        self._drawn = self.reader
        """Reads moments of what tokens are drawn from; with filters those of the policy are no use for bets."""
        if self.filters:
            self._drawn = reader(partial(moments, partial(filtered, options=sampled.sampling)), few)
        if options.read_by == "test":
            context.ahead(self.reader.compile, model.params)
        at_hand = not sampled.ahead or hasattr(collector.sampler, "draws")
        self.acts = bool(self.applies and options.tolerance and at_hand and self.stage.replay is None)
        engines = getattr(collector.sampler, "engines", 1)
        self.apart = sampled.environment is None or engines == 1
        """Whether it is known which engine drew a token: the turns of an episode may be of several."""
        self.evidence = Evidence(engines if self.apart else 1)
        self._proven: dict[int, int] = {}
        """The version of the policy whose draws each engine was tested by last: rollouts of one version share these."""
        self._rollout: Rollout | None = None
        self._sampled: NDArray[np.bool_] = np.zeros((0, 0), np.bool_)
        self._known: NDArray[np.bool_] = self._sampled
        self._awaited: NDArray[np.bool_] = self._sampled
        """Tokens whose moments come from the update."""
        self._found: dict[str, NDArray[np.float32]] = {}
        self._further: list[tuple[NDArray[np.int64], dict[str, NDArray[np.float32]]]] = []
        """Tokens that `_besides` names: their engines and versions [tokens, 2], and their moments."""
        self._warned = False
        self._sums = np.zeros((0, COLUMNS))
        """What was bet on with the rollout that was finished last."""
        self._wrote = False

    @property
    def actions(self) -> list[Action]:
        """What takes the moments from updates, where these compute them."""
        if self.options.read_by != "update":
            return []
        return [Action(1, self._take, "watch", values=dict.fromkeys(MOMENTS, "token"), name="sampling test")]

    @staticmethod
    def sampled(rollout: Rollout) -> NDArray[np.bool_]:
        """Mark every token that the sampler drew, bool [N, C], those of failed episodes included, which no mask has."""
        said = rollout.conversations
        if said is None:
            return np.asarray(rollout.samples.mask, np.bool_)
        sampled = np.zeros(rollout.samples.mask.shape, np.bool_)
        for row, turns in zip(sampled, said.turns, strict=True):
            for turn in turns:
                row[turn.start : turn.end] = True
        return sampled

    def begin(self, rollout: Rollout) -> None:
        """Begin with a rollout, none of whose tokens is known."""
        self._rollout, self._sampled = rollout, self.sampled(rollout)
        self._known = self._awaited = np.zeros_like(self._sampled)
        self._found = {name: np.full(self._sampled.shape, np.nan, np.float32) for name in MOMENTS}
        self._further = []

    def add(
        self, tokens: NDArray[np.bool_], moments: Mapping[str, Sequence[NDArray[Any]]] | None = None
    ) -> None:
        """Take the moments of these tokens, bool [N, C]: {name: an array for each sequence}, in their order.

        moments: None where the rollout's only update returns them, as the objective's values.
        """
        self._known = self._known | tokens
        if moments is None:
            self._awaited = tokens
            return
        for name, values in moments.items():
            self._found[name][tokens] = _joined(values)

    def complete(self, rollout: Rollout, params: Any) -> Rollout:
        """Read the tokens that are not known; return the rollout, with the metrics of a test that no update completes.

        What dynamic sampling left out is read here, and is not part of what is returned. rollout: as the trainer has
        prepared it. params: those of the policy that sampled it. Raises RunError where the completions are not drawn
        from the policy.
        """
        assert self._rollout is not None
        left = self._sampled & ~self._known
        if self.options.read_by == "test":
            left &= _of_chosen_prompts(self._rollout, self._rollout.number)
        if left.any():
            self.add(left, self.reader(params, self._trees(self._rollout, left)))
        for part, tokens in self._besides():
            found = self._drawn(params, self._trees(part, tokens))
            moments = {name: _joined(values) for name, values in found.items()}
            self._further.append((_places(part, tokens), moments))
        rollout = replace(rollout, dropped=None)
        if self.actions:
            return rollout
        metrics = self._finish()
        problem = self._problem()
        if problem is not None:
            raise RunError(f"stage '{self.stage.name}': {problem}")
        return replace(rollout, metrics={**rollout.metrics, **metrics})

    def _trees(self, rollout: Rollout, tokens: NDArray[np.bool_]) -> list[Tree]:
        """Make trees of some tokens, bool [N, C], for a pass of their own."""
        return [
            tree
            for tree in rollout.trees(self.collector.prompts, mask=tokens)
            if any(weights.any() for weights in tree.weights or ())
        ]

    def _besides(self) -> list[tuple[Rollout, NDArray[np.bool_]]]:
        """Return whose tokens, bool [N, C], are to be read besides: of what dynamic sampling left out, and with filters
        those of some prompts alone.
        """
        rollout = self._rollout
        assert rollout is not None
        dropped = [] if rollout.dropped is None else [rollout.dropped]
        if not self.applies:
            return []
        parts = [rollout, *dropped] if self.filters else dropped
        if not self.filters and self.options.read_by != "test":
            return [(part, self.sampled(part)) for part in parts]
        return [(part, self.sampled(part) & _of_chosen_prompts(part, rollout.number)) for part in parts]

    def _finish(self) -> dict[str, float]:
        """Write the rollout's values and return its metrics; there are none where the test is not applicable.

        Where the evidence suffices, `_problem` then says what is wrong.
        """
        assert self._rollout is not None
        rollout, self._rollout = self._rollout, None
        sums = np.zeros((0, COLUMNS))
        outside: dict[str, float] = {}
        if self.applies:
            parts = self._further
            if not self.filters:
                own = {name: values[self._known] for name, values in self._found.items()}
                parts = [(_places(rollout, self._known), own), *parts]
            places = np.concatenate([np.zeros((0, 2), np.int64), *(place for place, _ in parts)])
            moments = {name: _joined([found[name] for _, found in parts]) for name in MOMENTS}
            if self.filters and len(places):
                inside = moments["surprisal/logps"] > NEVER / 2
                places = places[inside]
                moments = {name: each[inside] for name, each in moments.items()}
                outside["sampling/outside"] = 1 - float(inside.mean())
                self._warn_of_outside(1 - float(inside.mean()), len(inside))
            sums = sum_moments(places, moments, self.options.tolerance)
        drawn = self._sum_draws(rollout)
        self._write(rollout, sums, drawn)
        self._found = {}
        self._sums = sums if drawn is None else drawn
        self.evidence.bet(rollout.number, self._sums)
        return {**self._metrics(sums), **outside}

    def _sum_draws(self, rollout: Rollout) -> NDArray[np.float64] | None:
        """Sum what engines drew that were given the rollout's policy since the one before; None: they draw nothing."""
        if not len(rollout.draws):
            return None
        version = int(rollout.samples.version[0])
        engines = rollout.draws[:, 0].astype(np.int64)
        new = np.array([self._proven.get(engine) != version for engine in engines.tolist()])
        self._proven |= dict.fromkeys(engines.tolist(), version)
        drawn = rollout.draws[new & (rollout.draws[:, 1] > NEVER / 2)]
        places = np.stack([drawn[:, 0] * self.apart, np.full(len(drawn), version)], axis=1).astype(np.int64)
        moments = dict(zip(MOMENTS, drawn[:, 1:].T, strict=True))
        return sum_moments(places, moments, self.options.tolerance)

    def _warn_of_outside(self, share: float, count: int) -> None:
        if share <= MOST_OUTSIDE or self._warned or not self.stage.is_main:
            return
        self._warned = True
        warn(
            f"stage '{self.stage.name}': {share:.2%} of {count:,} sampled tokens are none that "
            f"{' and '.join(self.filters)} allow: the sampler filters otherwise, or not at all"
        )

    def _problem(self) -> str | None:
        """Return what is wrong with the rollout that was finished last; None: nothing is known."""
        if not self.acts or self.evidence.log_mean() < LIMIT:
            return None
        engine = max(np.unique(self._sums[:, 0]).astype(int).tolist(), key=self.evidence.log_mean)
        rows = self._sums[self._sums[:, 0] == engine]
        tokens, excess, _ = rows[:, 2:5].sum(0)
        gap = excess / tokens
        power = self.evidence.log_mean() / math.log(10)
        causes = (
            "it samples greedily, at a lower temperature or with filters (top_k, top_p)"
            if gap < 0
            else "it holds another policy, samples at a higher temperature, or its ids are another tokenizer's"
        )
        name = f"engine e{engine}" if self.apart else "the engines"
        versions = " and ".join(str(int(version)) for version in np.unique(rows[:, 1]))
        return (
            f"the completions are not drawn from the policy: over {int(tokens):,} tokens of {name}, policy "
            f"version {versions}, the surprisal is {gap:+.3f} nats per token off the entropy "
            f"(limits.surprisal_gap={self.options.tolerance:g}, evidence 10^{power:.0f}). "
            f"The likeliest cause: {causes}"
        )

    def snapshot(self) -> dict[str, Any]:
        """Return the evidence so far, and which draws it has, for a checkpoint."""
        logs = {str(engine): values for engine, values in self.evidence.logs.items()}
        return {**logs, "proven": [*self._proven.items()]} if self._proven else logs

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Continue with the evidence of a checkpoint, or without any where it had stopped the run."""
        self._proven = dict(saved.get("proven", ()))
        self.evidence.logs = {int(name): list(logs) for name, logs in saved.items() if name != "proven"}
        if self.acts and self.evidence.log_mean() >= LIMIT:
            self.evidence.logs = {}
            self.stage.say("the sampling test had stopped this run; it begins again, with no evidence")

    def _take(self, at: Moment) -> dict[str, float]:
        """Take the moments of an update that had the whole rollout."""
        assert at.values is not None
        self.add(self._awaited, at.values.arrays)
        metrics = self._finish()
        at.stop(self._problem())
        return metrics

    def _metrics(self, sums: NDArray[np.float64]) -> dict[str, float]:
        if not len(sums):
            return {}
        metrics = _measured(sums, self.evidence.log_mean(), "")
        engines = np.unique(sums[:, 0]).astype(int).tolist()
        if max(self.evidence.engines, len(engines)) > 1:
            for engine in engines:
                rows = sums[sums[:, 0] == engine]
                metrics |= _measured(rows, self.evidence.log_mean(engine), f"/e{engine}")
        return metrics

    def _write(self, rollout: Rollout, sums: NDArray[np.float64], drawn: NDArray[np.float64] | None) -> None:
        if not self.stage.is_main:
            return
        folder = self.stage.dir / FOLDER
        number = rollout.number
        attempt(lambda: make_directory(folder), FOLDER, folder)
        if not self._wrote:
            remove_from(folder, number)
            self._wrote = True
        journalled = rollout.samples.mask
        arrays = {
            "trainer_logps": self._found["surprisal/logps"][journalled],
            "entropies": self._found["surprisal/entropies"][journalled],
            "variances": self._found["surprisal/variances"][journalled],
            "sums": sums,
            **({} if drawn is None else {"draws": drawn}),
            "rollout": np.array(rollout.digest()),
        }
        content = io.BytesIO()
        np.savez(content, **arrays)
        write_atomic(folder / f"{number:06d}.npz", content.getvalue(), private=True)


def read_moments(
    definition: Definition,
    temperature: float,
    keep: Callable[[jax.Array], jax.Array] | None,
    params: Any,
    batch: Packed,
) -> dict[str, jax.Array]:
    """Compute the moments of trained tokens by name, float32 [rows, trained]; keep: as `trained_moments` has it."""
    replay = batch.routes is not None
    found = trained_moments(definition, params, batch, temperature=temperature, replay=replay, keep=keep)
    return found.named()


def remove_from(folder: Path, number: int) -> None:
    """Delete the values of rollouts from `number` on, of an attempt that was given up."""
    for path in folder.glob("*.npz"):
        if path.stem.isdecimal() and int(path.stem) >= number:
            attempt(path.unlink, path.name, path)


def _of_chosen_prompts(rollout: Rollout, number: int) -> NDArray[np.bool_]:
    """Mark the completions of one of EVERY prompts, bool [N, 1].

    They go by their numbers and the rollout's, since a choice that sees what was sampled would make bets unfair.
    """
    return np.repeat(rollout.prompts % EVERY == number % EVERY, rollout.group)[:, None]


def _for_chosen_prompts(layout: Layout, mesh: Mesh) -> Layout:
    """Return a layout with as many fewer rows per micro-batch as prompts are chosen."""
    multiple = row_multiple(mesh)
    return layout._replace(rows=tuple(-(-rows // (EVERY * multiple)) * multiple for rows in layout.rows))


def _places(rollout: Rollout, tokens: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return engine and version of each of these tokens, bool [N, C], as int64 [tokens, 2]."""
    owners = np.nonzero(tokens)[0]
    samples = rollout.samples
    return np.stack([samples.engine[owners], samples.version[owners]], axis=1).astype(np.int64)


def _joined(values: Sequence[NDArray[Any]]) -> NDArray[np.float32]:
    """Join the values of sequences, of which there may be none."""
    return np.concatenate([np.zeros(0, np.float32), *values])


def sum_moments(
    places: NDArray[np.integer[Any]], moments: Mapping[str, NDArray[np.float32]], tolerance: float
) -> NDArray[np.float64]:
    """Sum the moments of tokens by engine and version, float64 [rows, COLUMNS].

    places: int [tokens, 2], engine and version. moments: by the names of MOMENTS, float32 [tokens].
    """
    kinds, owners = np.unique(places, axis=0, return_inverse=True)
    surprisal = -np.asarray(moments["surprisal/logps"], np.float64)
    excess = surprisal - np.asarray(moments["surprisal/entropies"], np.float64)
    variances = np.asarray(moments["surprisal/variances"], np.float64)
    each = np.column_stack([np.ones(len(places)), excess, variances, log_bets(moments, tolerance)])
    sums = np.stack(
        [np.bincount(owners.reshape(-1), column, minlength=len(kinds)) for column in each.T], axis=1
    )
    return np.column_stack([kinds.astype(np.float64), sums])


def _measured(sums: NDArray[np.float64], log_evidence: float, suffix: str) -> dict[str, float]:
    """Return the metrics of rows of `sums`: gap (nats per token), z and log10 of the evidence."""
    tokens, excess, variance = sums[:, 2:5].sum(0)
    return {
        f"sampling/surprisal_gap{suffix}": float(excess / tokens),
        f"sampling/surprisal_z{suffix}": float(excess / math.sqrt(variance)) if variance else 0.0,
        f"sampling/surprisal_evidence{suffix}": log_evidence / math.log(10),
    }


def _log_sum(values: Sequence[float]) -> float:
    return float(np.logaddexp.reduce(np.array(values)))
