"""A rollout: completions of some prompts, their rewards, and what a trainer computes from them."""

from __future__ import annotations

import hashlib
import json
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlhf_core.artifacts import write_atomic
from rlhf_core.contracts import AdvantageInputs, RewardInputs
from rlhf_core.environments import Episodes, TurnRecord
from rlhf_core.errors import InputError, RunError, error_line
from rlhf_core.hidden import scrub, scrub_all
from rlhf_core.metrics import Mean, Metric
from rlhf_core.packing.rows import Tree
from rlhf_core.sampling import Rollouts

if TYPE_CHECKING:
    from rlhf_core.contracts import Advantage
    from rlhf_core.rewards.reward import Reward
    from rlhf_core.tokenizer.encoding import Turns

HERE = str(Path(__file__).parent)
VALUE = "value_"
"""Precedes the names of `Rollout.token_values` in a checkpoint."""
EPISODES = "episodes_"
"""Precedes the names of the arrays of `Conversations` in a checkpoint."""
DROPPED = "dropped_"
"""Precedes the names of the arrays of `Rollout.dropped` in a journal."""
ARRAYS = ("prompts", "rewards", "total", "advantages")
SAMPLED = {"tokens": "<i4", "lengths": "<i4", "logps": "<f4", "finished": "?", "mask": "?", "version": "<i4"}
"""The arrays that `digest` reads, and their types."""
ENVIRONMENT_REWARDS = "environment_rewards"
"""The column that episodes add to those of their rows; a sample has it under `turns`."""
LONGEST_CELL = 1000
"""Characters of a column's value in a sample, which repeats it for every completion of the prompt."""
LONGEST = 1000
"""Characters of a completion to print; the samples have all of them."""
PROMPT = 200
"""Characters of a prompt to print, its last."""
Ints = NDArray[np.int32]


class Timing(NamedTuple):
    """Seconds that sampling and scoring took, and how many tokens were sampled."""

    sampling: float = 0.0
    rewards: float = 0.0
    tokens: int = 0

    def metrics(self) -> dict[str, float | Metric]:
        """Return the metrics of the one update that reports this rollout's cost; zeros for the others."""
        out: dict[str, float | Metric] = {"time/rollout": self.sampling, "time/reward": self.rewards}
        if self.tokens:
            out["rollout/tokens_per_second"] = Mean(float(self.tokens), self.sampling)
        return out


@dataclass(frozen=True)
class Conversations:
    """The prompts and turns of P groups of episodes, N in all.

    prompts: int32 [n] each, one per group. turns: of each episode. rewards: each episode's, one per answered turn, and
        failures: a text, or None; both empty after a restore, which does not need them.
    one_row_per_turn: whether every turn is a separate training row.
    """

    prompts: Sequence[Ints]
    turns: Sequence[Sequence[TurnRecord]]
    rewards: Sequence[Sequence[float | None]] = ()
    failures: Sequence[str | None] = ()
    one_row_per_turn: bool = False

    @classmethod
    def of(cls, episodes: Episodes, group: int, *, one_row_per_turn: bool) -> Conversations:
        """Collect what was said; a group all of whose episodes failed has a prompt of one token."""
        every = episodes.episodes
        prompts = [
            next((e.prompt for e in every[i : i + group] if len(e.prompt)), np.zeros(1, np.int32))
            for i in range(0, len(every), group)
        ]
        return cls(
            prompts,
            [tuple(episode.turns) for episode in every],
            [tuple(episode.rewards) for episode in every],
            [episode.failure for episode in every],
            one_row_per_turn,
        )

    def take(self, groups: NDArray[np.intp], rows: NDArray[np.intp]) -> Conversations:
        """Select these groups, whose episodes are `rows`."""
        chosen = rows.tolist()
        return Conversations(
            [self.prompts[i] for i in groups.tolist()],
            [self.turns[i] for i in chosen],
            [self.rewards[i] for i in chosen],
            [self.failures[i] for i in chosen],
            self.one_row_per_turn,
        )

    @classmethod
    def join(cls, parts: Sequence[Conversations | None]) -> Conversations | None:
        """Concatenate the conversations of several rounds of sampling."""
        held = [part for part in parts if part is not None]
        if not held:
            return None
        return cls(
            [prompt for part in held for prompt in part.prompts],
            [turns for part in held for turns in part.turns],
            [rewards for part in held for rewards in part.rewards],
            [failure for part in held for failure in part.failures],
            held[0].one_row_per_turn,
        )

    def described(self, i: int) -> dict[str, Any]:
        """Describe episode i for a reader of its sample."""
        rewards = [*self.rewards[i], *[None] * (len(self.turns[i]) - len(self.rewards[i]))]
        turns = [
            {"message": turn.message, "tokens": turn.end - turn.start, "reward": reward}
            for turn, reward in zip(self.turns[i], rewards, strict=True)
        ]
        failure = self.failures[i]
        return {"turns": turns, **({} if failure is None else {"failure": failure})}

    def arrays(self, prefix: str) -> dict[str, np.ndarray]:
        """Return the arrays that a checkpoint keeps: texts of any length, one after the other, with their lengths."""
        every = [(i, turn) for i, turns in enumerate(self.turns) for turn in turns]
        contexts = [np.zeros(0, np.int32) if turn.context is None else turn.context for _, turn in every]
        arrays = {
            "prompts": np.concatenate([np.zeros(0, np.int32), *self.prompts]),
            "prompt_lengths": np.array([len(prompt) for prompt in self.prompts], np.int32),
            "counts": np.array([len(turns) for turns in self.turns], np.int32),
            "spans": np.array([(turn.start, turn.end) for _, turn in every], np.int32).reshape(-1, 2),
            "contexts": np.concatenate([np.zeros(0, np.int32), *contexts]),
            "context_lengths": np.array([len(context) for context in contexts], np.int32),
            "one_row_per_turn": np.array(self.one_row_per_turn, np.int32),
        }
        return {prefix + name: array for name, array in arrays.items()}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Any], prefix: str) -> Conversations | None:
        """Make conversations of what `arrays` returned; None where it is not there."""
        if f"{prefix}prompts" not in arrays:
            return None
        kept = {
            name.removeprefix(prefix): np.asarray(arrays[name]) for name in arrays if name.startswith(prefix)
        }
        contexts = iter(_split(kept["contexts"], kept["context_lengths"]))
        every = iter(
            TurnRecord(int(start), int(end), context if len(context) else None)
            for (start, end), context in zip(kept["spans"], contexts, strict=True)
        )
        turns = [tuple(next(every) for _ in range(count)) for count in kept["counts"].tolist()]
        prompts = _split(kept["prompts"], kept["prompt_lengths"])
        return cls(prompts, turns, one_row_per_turn=bool(kept["one_row_per_turn"]))


def _split(flat: NDArray[Any], lengths: NDArray[Any]) -> list[Ints]:
    return np.split(flat, np.cumsum(lengths)[:-1]) if len(lengths) else []


@dataclass(frozen=True)
class Rollout:
    """P prompts with N = P × num_generations scored completions, group after group.

    prompts: int64 [P], rows of the prompt dataset.
    samples: the completions, [N, C], with the policy's log-probabilities, `mask` and `version`.
    rewards: float64 [N, functions]; NaN where a function does not apply.
    total: float64 [N], their weighted sum; NaN where no function applies.
    inputs: what the reward functions were called with; None after a restore.
    samples_read: what `rows` returned when the rollout was written to the journal that it was read from.
    number: counts the rollouts of a stage, from 0. rounds: how many rounds of sampling it took.
    metrics: over everything that was sampled, by the names of the metrics page.
    advantages: float32 [N], or [N, C] where each token has its own. token_values: {name: float32 [N, C]}, whatever the
        trainer reads at the start of the rollout and keeps, such as `old_logps`. Both are the trainer's to fill in.
    conversations: of episodes with an environment: what prompts and turns were; None: completions of the dataset's
        prompts. The samples then have the environment's tokens too, outside their mask.
    prompt_ids: int32 [n] each, the tokens that completions continue, whose row may have been corrected since; empty
        for episodes.
    dropped: what dynamic sampling left out, where a sampling test reads it.
    draws: float32 [tokens, 4], what engines drew when they were given the policy, as `SamplerFunction` has it.
    """

    prompts: NDArray[np.int64]
    samples: Rollouts
    rewards: NDArray[np.float64]
    total: NDArray[np.float64]
    inputs: RewardInputs | None = None
    number: int = 0
    rounds: int = 1
    metrics: Mapping[str, float] = field(default_factory=dict)
    timing: Timing = field(default_factory=Timing)
    advantages: NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, np.float32))
    token_values: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)
    conversations: Conversations | None = None
    samples_read: Sequence[Mapping[str, Any]] = ()
    prompt_ids: Sequence[Ints] = ()
    dropped: Rollout | None = None
    draws: NDArray[np.float32] = field(default_factory=lambda: np.zeros((0, 4), np.float32))

    @property
    def group(self) -> int:
        """How many completions each prompt has."""
        return len(self.total) // len(self.prompts)

    def take(self, groups: NDArray[np.intp]) -> Rollout:
        """Select these groups, in this order."""
        rows = (groups[:, None] * self.group + np.arange(self.group)).reshape(-1)
        return replace(
            self,
            prompts=self.prompts[groups],
            samples=Rollouts(*(values[rows] for values in self.samples)),
            rewards=self.rewards[rows],
            total=self.total[rows],
            inputs=None if self.inputs is None else self.inputs.take(rows.tolist()),
            conversations=None if self.conversations is None else self.conversations.take(groups, rows),
            prompt_ids=[self.prompt_ids[i] for i in groups.tolist()] if self.prompt_ids else (),
        )

    @classmethod
    def join(cls, parts: Sequence[Rollout]) -> Rollout:
        """Concatenate rounds of sampling that have no advantages or token values yet."""
        if len(parts) == 1:
            return parts[0]
        return cls(
            np.concatenate([part.prompts for part in parts]),
            Rollouts(*(np.concatenate(values) for values in zip(*(p.samples for p in parts), strict=True))),
            np.concatenate([part.rewards for part in parts]),
            np.concatenate([part.total for part in parts]),
            _joined_inputs([part.inputs for part in parts if part.inputs is not None]),
            metrics=_joined([part.metrics for part in parts]),
            timing=Timing(*(sum(values) for values in zip(*(part.timing for part in parts), strict=True))),
            conversations=Conversations.join([part.conversations for part in parts]),
            prompt_ids=[ids for part in parts for ids in part.prompt_ids],
        )

    def trees(
        self,
        prompts: Any,
        start: int = 0,
        stop: int | None = None,
        *,
        mask: NDArray[np.bool_] | None = None,
    ) -> list[Tree]:
        """Make trees of the groups from `start` to `stop`: the prompt once, its completions as branches.

        prompts: the prompts that were completed, for a rollout without `prompt_ids`.
        mask: bool [N, C], the tokens to train on; None: those that the policy wrote. Branches carry, per token, the
        sampler's log-probabilities as `sampling_logps`, the advantages, if there are any, and all token values; and
        `index`, the completion's number in the rollout, and `reward`, its total, 0 where it has none.
        Where each turn of an episode has a context of its own, it is a tree of its own; see `tree_groups`.
        """
        mask = self.samples.mask if mask is None else mask
        values = {"sampling_logps": self.samples.logps, **self.token_values}
        if len(self.advantages):
            by_token = self.advantages if self.advantages.ndim > 1 else self.advantages[:, None]
            values["advantages"] = np.broadcast_to(by_token, mask.shape)

        routes = self.samples.routes.reshape(*self.samples.routes.shape[:2], -1)

        def tree(prefix: Any, spans: Sequence[tuple[int, slice]]) -> Tree:
            members = [i for i, _ in spans]
            return Tree(
                prefix=np.asarray(prefix, np.int32),
                branches=tuple(self.samples.tokens[i, span].astype(np.int32) for i, span in spans),
                weights=tuple(mask[i, span].astype(np.float32) for i, span in spans),
                token_values={
                    name: tuple(x[i, span].astype(np.float32) for i, span in spans)
                    for name, x in values.items()
                },
                sequence_values={
                    "index": np.array(members, np.float32),
                    "reward": np.nan_to_num(self.total[members]).astype(np.float32),
                },
                routes=tuple(routes[i, span] for i, span in spans) if routes.size else None,
            )

        before = self.prompt_ids if self.conversations is None else self.conversations.prompts
        trees = []
        for group in range(len(self.prompts))[start:stop]:
            prompt = before[group] if before else prompts.ids[self.prompts[group]]
            trees += [tree(prefix, spans) for prefix, spans in self._spans(group, prompt)]
        return trees

    def _spans(self, group: int, prompt: Any) -> Iterator[tuple[Any, list[tuple[int, slice]]]]:
        """Yield what the trees of a group hold: ids that come before, and (completion, its tokens) of the branches."""
        said = self.conversations
        members = range(group * self.group, (group + 1) * self.group)
        if said is None or not said.one_row_per_turn:
            yield prompt, [(i, slice(int(self.samples.lengths[i]))) for i in members]
            return
        for i in members:
            for turn in said.turns[i]:
                context = prompt if turn.context is None else turn.context
                yield context, [(i, slice(turn.start, turn.end))]

    def tree_groups(self, start: int = 0, stop: int | None = None) -> list[int]:
        """Return the group that each of `trees` belongs to."""
        groups = range(len(self.prompts))[start:stop]
        said = self.conversations
        if said is None or not said.one_row_per_turn:
            return list(groups)
        return [
            g for g in groups for turns in said.turns[g * self.group : (g + 1) * self.group] for _ in turns
        ]

    def with_advantages(self, advantage: Advantage, rewards: Sequence[Reward], *, name: str) -> Rollout:
        """Compute the advantages with a component of the kind ADVANTAGE, called `name` in errors.

        rewards: the functions that scored the rollout. The component may give one number per completion or one per
        token. Raises RunError where it raises, or returns anything but finite numbers [prompts, samples] or [prompts,
        samples, time], with a time that reaches the longest completion.
        """
        inputs = advantage_inputs(self, rewards)
        what, shape = f"advantage '{name}'", inputs.rewards.shape
        try:
            out = np.asarray(advantage(inputs), np.float32)
        except (InputError, RunError):
            raise
        except Exception as error:
            raise RunError(f"{what} {error_line(error, HERE)}") from error
        longest = int(np.max(inputs.lengths))
        if out.shape != shape and not (out.ndim == 3 and out.shape[:2] == shape and out.shape[2] >= longest):
            raise RunError(
                f"{what} returned an array of shape {list(out.shape)}; expected one number per completion, "
                f"{list(shape)} (prompts, and samples of each), or one per token, {[*shape, longest]} or longer"
            )
        if not np.isfinite(out).all():
            prompt, sample, *_ = np.argwhere(~np.isfinite(out))[0]
            raise RunError(
                f"{what} returned {out[prompt, sample]} for sample {sample} of prompt {prompt}, whose rewards are "
                f"{self.total.reshape(shape)[prompt].tolist()}; advantages must be finite, and 0 where there is "
                "nothing to learn"
            )
        if out.ndim == 2:
            return replace(self, advantages=out.reshape(-1))
        width = self.samples.tokens.shape[1]
        laid = np.zeros((out.shape[0] * out.shape[1], width), np.float32)
        kept = out.reshape(len(laid), -1)[:, :width]
        laid[:, : kept.shape[1]] = kept
        return replace(self, advantages=laid)

    def with_token_values(
        self, values: Mapping[str, Sequence[NDArray[Any]]], *, mask: NDArray[np.bool_] | None = None
    ) -> Rollout:
        """Add to `token_values` what a `TreeReader` returned for the trees of the whole rollout; 0 elsewhere.

        values: {name: one array per completion, a value for each of its tokens in the mask}. mask: as for `trees`.
        """
        mask = self.samples.mask if mask is None else mask
        mask = mask & (np.arange(mask.shape[1]) < np.asarray(self.samples.lengths)[:, None])
        laid_out = {name: np.zeros(mask.shape, np.float32) for name in values}
        for name, array in laid_out.items():
            array[mask] = np.concatenate(values[name])
        return replace(self, token_values={**self.token_values, **laid_out})

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the arrays that a checkpoint keeps."""
        return {
            **{name: getattr(self, name) for name in ARRAYS},
            **{f"samples_{name}": x for name, x in self.samples._asdict().items() if x.size},
            **{f"{VALUE}{name}": values for name, values in self.token_values.items()},
            **({} if self.conversations is None else self.conversations.arrays(EPISODES)),
            **(
                {
                    "prompt_ids": np.concatenate(self.prompt_ids),
                    "prompt_lengths": np.array([len(ids) for ids in self.prompt_ids], np.int32),
                }
                if self.prompt_ids
                else {}
            ),
            **(
                {}
                if self.dropped is None
                else {f"{DROPPED}{name}": array for name, array in self.dropped.arrays().items()}
            ),
            **({"draws": self.draws} if self.draws.size else {}),
        }

    @classmethod
    def from_arrays(
        cls, arrays: Mapping[str, Any], *, number: int, rounds: int, metrics: Mapping[str, float]
    ) -> Rollout:
        """Make a rollout of what `arrays` returned."""
        there = [name for name in Rollouts._fields if f"samples_{name}" in arrays]
        samples = Rollouts(**{name: np.asarray(arrays[f"samples_{name}"]) for name in there})
        values = {key.removeprefix(VALUE): np.asarray(arrays[key]) for key in arrays if key.startswith(VALUE)}
        prompts, rewards, total, advantages = (np.asarray(arrays[name]) for name in ARRAYS)
        left_out = {
            name.removeprefix(DROPPED): array for name, array in arrays.items() if name.startswith(DROPPED)
        }
        return cls(
            prompts,
            samples,
            rewards,
            total,
            number=number,
            rounds=rounds,
            metrics=metrics,
            advantages=advantages,
            token_values=values,
            conversations=Conversations.from_arrays(arrays, EPISODES),
            prompt_ids=_split(np.asarray(arrays["prompt_ids"]), np.asarray(arrays["prompt_lengths"]))
            if "prompt_ids" in arrays
            else (),
            dropped=cls.from_arrays(left_out, number=number, rounds=rounds, metrics={}) if left_out else None,
            draws=np.asarray(arrays.get("draws", np.zeros((0, 4))), np.float32),
        )

    def write(self, path: Path, rewards: Sequence[Reward]) -> None:
        """Write one JSON line per completion, with the values of `rows`."""
        lines = (json.dumps(row, ensure_ascii=False, default=scrubbed) + "\n" for row in self.rows(rewards))
        write_atomic(path, "".join(lines))

    def rows(self, rewards: Sequence[Reward]) -> list[dict[str, Any]]:
        """Describe each completion, without secrets: `prompt`, `columns` (the row's others, long ones cut),
        `completion`, where there are rewards `reward` (the weighted sum) and `rewards` ({label: value, null where one
        does not apply}), `advantage` (its mean over tokens, where there are advantages), `length` in tokens and
        `finished`, false for a completion that was cut. An episode also has `turns`, with the number of its message
        among those of the completion, the length in tokens and the reward of each, and `failure`, where it failed; its
        `length` is that of all its turns.
        """
        if self.inputs is None:
            return [self._row_read(i, row, rewards) for i, row in enumerate(self.samples_read)]
        rows = []
        for i, text in enumerate(self.inputs.completions):
            length = int(self.samples.mask[i].sum())
            said = self.conversations
            row = {
                "prompt": self.inputs.prompts[i],
                **self._columns(i),
                "completion": text,
                **self._scores(i, rewards),
                **({"advantage": mean_advantage(self, i)} if len(self.advantages) else {}),
                "length": length,
                "finished": bool(self.samples.finished[i]),
                **({} if said is None else said.described(i)),
            }
            rows.append(scrub_all(row))
        return rows

    def _row_read(self, i: int, row: Mapping[str, Any], rewards: Sequence[Reward]) -> dict[str, Any]:
        """Bring a row from the journal up to what the trainer has computed since."""
        names = [*row]
        before = {name: row[name] for name in names[: names.index("length")]}
        scores = self._scores(i, rewards)
        advantage = {"advantage": mean_advantage(self, i)} if len(self.advantages) else {}
        return {**before, **scores, **advantage, **{name: row[name] for name in names[len(before) :]}}

    def said(self, i: int) -> tuple[Turns, Turns]:
        """Return prompt i and its completion, texts or message lists."""
        if self.inputs is None:
            return self.samples_read[i]["prompt"], self.samples_read[i]["completion"]
        return self.inputs.prompts[i], self.inputs.completions[i]

    def _columns(self, i: int) -> dict[str, Any]:
        """Return the columns of completion i's row, for `rows`; {} without any."""
        assert self.inputs is not None
        columns = {
            name: _cut(values[i])
            for name, values in self.inputs.columns.items()
            if name != ENVIRONMENT_REWARDS
        }
        return {"columns": columns} if columns else {}

    def digest(self) -> str:
        """Return the SHA-256 of the completions, in hexadecimal: of the bytes of the arrays of SAMPLED, one after the
        other.
        """
        whole = hashlib.sha256()
        for name, dtype in SAMPLED.items():
            whole.update(np.ascontiguousarray(getattr(self.samples, name), dtype).tobytes())
        return whole.hexdigest()

    def _scores(self, i: int, rewards: Sequence[Reward]) -> dict[str, Any]:
        """Describe how completion i was scored, for `rows`."""
        each = {reward.label: _number(self.rewards[i, f]) for f, reward in enumerate(rewards)}
        return {"reward": _number(self.total[i]), "rewards": each} if rewards else {}


def _joined_inputs(parts: Sequence[RewardInputs]) -> RewardInputs:
    """Join the inputs of rewards of rounds."""

    def all_of(values: Iterable[Sequence[Any]]) -> list[Any]:
        return list(chain.from_iterable(values))

    return RewardInputs(
        prompts=all_of(part.prompts for part in parts),
        completions=all_of(part.completions for part in parts),
        completion_ids=all_of(part.completion_ids for part in parts),
        columns={name: all_of(part.columns[name] for part in parts) for name in parts[0].columns},
    )


def _joined(metrics: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Join the metrics of rounds: counts of failures add up, the others are averaged."""
    names = dict.fromkeys(name for each in metrics for name in each)
    out = {}
    for name in names:
        values = [each[name] for each in metrics if name in each]
        out[name] = float(sum(values) if name.endswith("/failed") else np.mean(values))
    return out


def mean_advantage(rollout: Rollout, i: int) -> float:
    """Average completion i's advantage over its tokens that the policy wrote."""
    advantage = rollout.advantages[i]
    return float(advantage[rollout.samples.mask[i]].mean()) if advantage.ndim else float(advantage)


def scrubbed(value: Any) -> str:
    """Return what JSON cannot hold as a text without secrets."""
    return scrub(str(value))


def _cut(value: Any) -> Any:
    """Return a value that JSON can hold, as a text cut to LONGEST_CELL characters where it is longer."""
    value = scrub_all(value)
    written = json.dumps(value, ensure_ascii=False, default=scrubbed, skipkeys=True)
    text = value if isinstance(value, str) else written
    if len(text) <= LONGEST_CELL:
        return json.loads(written, parse_constant=lambda _: None)
    return f"{text[:LONGEST_CELL]}…"


def _number(x: float) -> float | None:
    return None if np.isnan(x) else float(x)


def advantage_inputs(rollout: Rollout, rewards: Sequence[Reward]) -> AdvantageInputs:
    """Group a rollout's rewards by prompt."""
    group, inputs = rollout.group, rollout.inputs
    return AdvantageInputs.of(
        rollout.rewards.reshape(-1, group, len(rewards)),
        np.array([reward.weight for reward in rewards]),
        np.asarray(rollout.samples.lengths, np.int32).reshape(-1, group),
        labels=tuple(reward.label for reward in rewards),
        columns={} if inputs is None else inputs.columns,
        total=rollout.total.reshape(-1, group),
    )


def completion_lines(rollout: Rollout, rewards: Sequence[Reward], count: int) -> Iterator[str]:
    """Yield a text of several lines per completion, `count` of them, evenly spread over the rollout.

    Control characters are left to the printer, which escapes them. A line of a completion stands behind a bar, so that
    it cannot pass for another line of the output.
    """
    total = len(rollout.total)
    for i in np.linspace(0, total - 1, min(count, total)).astype(int).tolist():
        values = [("reward", rollout.total[i]), *_shown_rewards(rollout, rewards, i)] if rewards else []
        if len(rollout.advantages):
            values.append(("advantage", mean_advantage(rollout, i)))
        cut = "" if rollout.samples.finished[i] else ", cut"
        numbers = "".join(f"{name} {'–' if np.isnan(value) else f'{value:.4g}'}  " for name, value in values)
        asked, said = rollout.said(i)
        prompt = " ".join(_said(asked).split())
        prompt = prompt if len(prompt) <= PROMPT else f"…{prompt[1 - PROMPT :]}"
        completion = _said(said)
        if len(completion) > LONGEST:
            completion = f"{completion[:LONGEST]}… ({len(completion):,} characters)"
        yield (
            f"completion {i + 1:,} of {total:,}  {numbers}{int(rollout.samples.mask[i].sum()):,} tokens{cut}\n"
            f"  after {prompt}\n" + textwrap.indent(completion or "(nothing)", "  │ ", lambda line: True)
        )


def _shown_rewards(rollout: Rollout, rewards: Sequence[Reward], i: int) -> list[tuple[str, float]]:
    """Return each reward's value; none where the only one is the total."""
    values = [(reward.label, rollout.rewards[i, f]) for f, reward in enumerate(rewards)]
    return [] if len(values) == 1 and values[0][1] == rollout.total[i] else values


def _said(said: Any) -> str:
    """Return a text, or the messages of a conversation one after the other; of a single reply its content."""
    if isinstance(said, str):
        return said
    if len(said) == 1 and said[0].get("role") == "assistant" and not said[0].get("tool_calls"):
        return str(said[0].get("content") or "")
    return "\n".join(f"{m.get('role')}: {m.get('content') or m.get('tool_calls') or ''}" for m in said)
