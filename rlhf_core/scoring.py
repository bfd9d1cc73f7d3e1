"""Scores of texts by a reward model, read as it was trained: same tokens, same length limit, same reading point."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from rlhf_core import artifacts
from rlhf_core.data.columns import kwargs_of, tools_of
from rlhf_core.data.report import Report
from rlhf_core.data.table import CHUNK
from rlhf_core.data.whole_sequences import Whole, whole_parts
from rlhf_core.errors import InputError, NonFiniteError, RunError, warn
from rlhf_core.mesh import make_mesh, row_multiple
from rlhf_core.models import NO_REWARD_HEAD, Definition, Model, load_model, local_directory, stored_head
from rlhf_core.models.finite import nonfinite_output_error
from rlhf_core.objective import sequence_scores
from rlhf_core.packing.layout import MICRO_BATCH_TOKENS
from rlhf_core.packing.rows import Layout, choose_layout, tree
from rlhf_core.reading import TreeReader
from rlhf_core.runtime.caches import cached
from rlhf_core.tokenizer import template_hash, tokenizer_hash
from rlhf_core.tokenizer.encoding import Encoder, special_ids, template_text
from rlhf_core.tokenizer.options import ReadAt, TextOptions

if TYPE_CHECKING:
    from jax.sharding import Mesh
    from numpy.typing import NDArray

    from rlhf_core.data import Records
    from rlhf_core.models.quantized import Quantization
    from rlhf_core.plugins.registry import Registry
    from rlhf_core.training import Context

__all__ = ["Scorer"]


@dataclass(frozen=True)
class ScoringContract:
    """How a reward model was trained, which its scores depend on.

    max_length: tokens, EOS included; None: the model's own limit. truncation_mode: which end of a longer sequence is
    kept.
    chat_template: "plain" or Jinja text; None: the tokenizer's own. template_hash: hash of its text, None without one.
    special_tokens: {bos, eos, pad} ids. pooling: the token at which the score is read.
    read_at: where a conversation ends: "eos", after the stop token that follows its last reply, or "template", where
    its chat template ends, as TRL and others train. chat_template_kwargs, template_date, prompt_repeated,
    system_prompt: as in `TextOptions`.
    mean, std: of its scores on evaluation data, else on some training data, reward units; None: not measured.
    evaluation: the metrics on its evaluation data; None without any.
    compute_dtype: "float32" or "bfloat16", used in training and evaluation; None: not recorded.
    base: hash of the weights of its adapter's base model; None without an adapter.
    """

    max_length: int | None
    truncation_mode: Literal["keep_end", "keep_start"]
    chat_template: str | None
    template_hash: str | None
    tokenizer_hash: str
    special_tokens: Mapping[str, Any]
    pooling: Literal["last_token"] = "last_token"
    read_at: ReadAt = "eos"
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    template_date: str | None = None
    prompt_repeated: bool | None = None
    mean: float | None = None
    std: float | None = None
    evaluation: Mapping[str, float] | None = None
    compute_dtype: str | None = None
    base: str | None = None
    system_prompt: str | None = None

    @classmethod
    def of(
        cls,
        tokenizer: Any,
        *,
        max_length: int | None,
        truncation_mode: Literal["keep_end", "keep_start"] = "keep_end",
        chat_template: str | TextOptions | None = None,
        mean: float | None = None,
        std: float | None = None,
    ) -> ScoringContract:
        """Build the contract of a model trained with `tokenizer`.

        chat_template: None, "plain", or a file, whose text is stored; or all options.
        """
        options = TextOptions.of(chat_template)
        template = options.chat_template
        template = template if template in (None, "plain") else template_text(tokenizer, template)
        special = special_ids(tokenizer, template)
        stored: dict[str, Any] = dataclasses.asdict(options) | {"chat_template": template}
        return cls(
            max_length=max_length,
            truncation_mode=truncation_mode,
            template_hash=template_hash(tokenizer, template),
            tokenizer_hash=tokenizer_hash(tokenizer),
            special_tokens={"bos": special.bos, "eos": list(special.eos), "pad": special.pad},
            mean=mean,
            std=std,
            **stored,
        )

    @classmethod
    def of_foreign(cls, model: Model) -> ScoringContract:
        """Build the contract of a model without one: its tokenizer's template and limit, read at the template's end.

        A `model_max_length` below the model's positions is the length that it was trained on, as in what is exported.
        """
        tokenizer: Any = model.tokenizer
        limit, positions = tokenizer.model_max_length, model.max_positions
        chosen = isinstance(positions, int) and limit < positions
        side: Literal["keep_end", "keep_start"] = (
            "keep_end" if tokenizer.truncation_side == "left" else "keep_start"
        )
        return cls.of(
            tokenizer,
            max_length=int(limit) if chosen else None,
            truncation_mode=side,
            chat_template=TextOptions(read_at="template"),
        )

    @property
    def text_options(self) -> TextOptions:
        """Return the options with which its texts become tokens."""
        return TextOptions(
            **{each.name: getattr(self, each.name) for each in dataclasses.fields(TextOptions)}
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the contract as `rlhf_artifact.json` stores it, under "contract"."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, given: Mapping[str, Any], where: str) -> ScoringContract:
        """Invert `to_dict`. Raises InputError, naming `where`, for a contract of another version."""
        fields = dataclasses.fields(cls)
        if not given:
            raise InputError(
                f"{where}: the reward model was saved without a contract, which defines its scores; its "
                "trainer must pass one to artifacts.save_model, contract=Scorer.contract_of(context, model), from "
                "rlhf_core.scoring"
            )
        missing = dataclasses.MISSING
        needed = {f.name for f in fields if f.default is missing and f.default_factory is missing}
        odd = (needed - set(given)) | (set(given) - {f.name for f in fields})
        if odd:
            listed = ", ".join(sorted(odd))
            raise InputError(f"{where}: the reward model's contract is not one this version knows ({listed})")
        return cls(**given)

    def require_statistics(self, where: str | Path) -> None:
        """Raise InputError if scores cannot be normalized. where: the contract's source, for the message."""
        if self.mean is None or self.std is None:
            raise InputError(
                f"{where}: cannot normalize: no mean and standard deviation of its scores are stored. The output of "
                "a reward stage, DIR/STAGE/artifacts/model, has them; or leave normalize out"
            )
        if not self.std > 0:
            raise InputError(
                f"{where}: cannot normalize: the stored standard deviation of its scores is {self.std:g}, as "
                "all scores were equal; train it on more data, or leave normalize out"
            )

    def normalized(self, scores: np.ndarray) -> np.ndarray:
        """Return (scores - mean) / std, float32: mean 0 and standard deviation 1 on its evaluation data."""
        assert self.mean is not None
        assert self.std is not None
        return ((np.asarray(scores, np.float64) - self.mean) / self.std).astype(np.float32)


SEQUENCES_AT_ONCE = 4096
SHORTEST_ROW = 64


class ScoredPart(NamedTuple):
    """Scores of consecutive rows."""

    scores: dict[str, np.ndarray]
    """As `Scorer.score_rows` returns them."""
    unread: list[str]
    """Rows without a score, such as "answers.jsonl row 17"."""


def warn_unread(places: Sequence[str]) -> None:
    """Warn about rows that have no score."""
    if places:
        warn(f"no score for rows without a completion: {', '.join(places[:5])}")


class Scorer:
    """Score texts with a reward model under its contract.

    Programs are compiled once, for a few row shapes chosen at the first call.

    layout: these shapes, None before. The last bits of a score depend on them, so a resumed run sets the earlier ones.
    reuses_shapes: whether the first call takes one of a few usual shapes, so that scorers of the same model share
        programs, in place of the cheapest for its sequences. False unless it is set.
    normalize: whether to subtract the contract's mean from scores and divide by its standard deviation.
    """

    def __init__(self, model: Model, contract: ScoringContract, *, normalize: bool = False) -> None:
        """Check the model against the contract.

        Raises InputError if the model has no reward head, its tokenizer differs, or the contract cannot normalize.
        """
        if model.definition.head != "score" or model.tokenizer is None:
            raise InputError(f"{model.source or 'the model'}: scoring needs a reward head and a tokenizer")
        if normalize:
            contract.require_statistics(model.source or "the reward model")
        self.model, self.contract, self.normalize = model, contract, normalize
        self._require(model.tokenizer)
        if contract.compute_dtype not in (None, model.computes_in):
            warn(
                f"{model.source or 'the reward model'}: trained in {contract.compute_dtype} and scored in "
                f"{model.computes_in}: scores differ slightly from its evaluation"
            )
        self.encoder = Encoder(model.tokenizer, contract.text_options)
        self.layout: Layout | None = None
        self.reuses_shapes = False

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        mesh: Mesh | None = None,
        registry: Registry | None = None,
        normalize: bool = False,
        dtype: str | None = None,
        base: str | Path | None = None,
        quantized: Quantization | Literal["none"] | None = None,
    ) -> Scorer:
        """Load a reward model from an artifact, a `…ForSequenceClassification` directory, or the hub.

        A model without a manifest scores with its own tokenizer, template and length limit, at the end of the
        template's text.
        mesh: default: all devices. registry: has the model families; default: those of all installed plugins.
        dtype: of the computation; default: the one it was trained in; another one causes a warning.
        base: the base model of an adapter; default: the one that it names. quantized: as `load_model` takes it.
        Raises InputError for a language model, and for an adapter whose base model has changed since its training.
        """
        directory = local_directory(path)
        contract = None
        if (directory / artifacts.MANIFEST).is_file():
            artifact = artifacts.open_artifact(directory, verify=False)  # load_model verifies it
            if artifact.kind != "reward_model":
                raise InputError(
                    f"{path} is a {artifact.kind}; scoring needs a reward_model: rlhf train reward makes one"
                )
            contract = ScoringContract.from_dict(
                artifact.metadata["contract"], str(directory / artifacts.MANIFEST)
            )
        elif stored_head(directory) == "lm":
            raise InputError(f"{path} {NO_REWARD_HEAD}")
        mesh = make_mesh() if mesh is None else mesh
        model = load_model(
            str(base or path),
            "score",
            adapter=None if base is None else path,
            mesh=mesh,
            registry=registry,
            fresh_head=False,
            dtype=dtype,
            quantized=quantized,
        )
        if model.tokenizer is None:
            raise InputError(
                f"{path}: no tokenizer files; put tokenizer.json and tokenizer_config.json next to config.json"
            )
        if contract is None:
            contract = ScoringContract.of_foreign(model)
        if contract.base is not None and base_identity(model) != contract.base:
            raise InputError(
                f"{path}: its base model, {model.source}, has other weights than those it was trained on; "
                "restore them, set base_model_name_or_path in its adapter_config.json to their location, or "
                "give --base"
            )
        trained_in = contract.compute_dtype
        if dtype is None and trained_in not in (None, model.computes_in):
            with suppress(InputError):  # some families fix their own dtype
                model = model.computing(dtype=trained_in)
        return cls(model, contract, normalize=normalize)

    @staticmethod
    def contract_of(
        context: Context,
        model: Model,
        *,
        read_at: ReadAt | None = "eos",
        scores: NDArray[Any] | None = None,
        evaluation: Mapping[str, float] | None = None,
    ) -> dict[str, Any]:
        """Return what a reward model's scores depend on, for `save_model(…, contract=…)`; a `Scorer` reads it.

        read_at: as for `Context.pairs`. scores: of its evaluation data, else of some training data, reward units; their
        mean and standard deviation are stored, without which they cannot be normalized. evaluation: the metrics on its
        evaluation data.
        """
        contract = ScoringContract.of(
            model.tokenizer,
            max_length=context.config.max_sequence_length,
            truncation_mode=context.config.truncation_mode,
            chat_template=context.text_options(read_at),
            mean=None if scores is None else float(scores.mean()),
            std=None if scores is None else float(scores.std()),
        )
        return dataclasses.replace(
            contract, evaluation=evaluation, compute_dtype=model.computes_in, base=base_identity(model)
        ).to_dict()

    @staticmethod
    def check(path: str | Path) -> None:
        """Raise InputError where the files of a local model show that it cannot score; nothing is loaded."""
        directory = Path(path)
        if directory.is_dir() and stored_head(directory) == "lm":
            raise InputError(
                f"{directory} is a language model, without a reward head: rlhf train reward makes one of it"
            )

    def snapshot(self) -> dict[str, Any]:
        """Return the row shapes chosen for the first texts as JSON values; empty before."""
        return {} if self.layout is None else self.layout._asdict()

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Restore a `snapshot`, for the same last bits; a mesh that these shapes do not fit gets others."""
        if not saved:
            return
        values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in saved.items()}
        layout = Layout(**values)
        if not any(rows % row_multiple(self.model.mesh) for rows in layout.rows):
            self.layout = layout

    def _require(self, tokenizer: Any) -> None:
        problems = []
        if tokenizer_hash(tokenizer) != self.contract.tokenizer_hash:
            problems.append("its tokenizer is not the one it was trained with")
        if template_hash(tokenizer, self.contract.chat_template) != self.contract.template_hash:
            problems.append("its chat template is not the one it was trained with")
        stops = special_ids(tokenizer, self.contract.text_options).eos
        if list(stops) != list(self.contract.special_tokens["eos"]):
            problems.append(
                "its end-of-sequence tokens (generation_config.json) are not those it was trained with"
            )
        if problems:
            source = self.model.source or "the reward model"
            raise InputError(
                *(
                    f"{source}: {problem}; restore the tokenizer files it was saved with"
                    for problem in problems
                )
            )

    def score_rows(self, records: Records, *, prompt_repeated: bool | None = None) -> dict[str, np.ndarray]:
        """Score rows, float32 [rows]: {"score": …}, or {"chosen_score": …, "rejected_score": …} for preferences.

        Where `chosen` and `rejected` are lists of completions, {"chosen_scores": …, "rejected_scores": …}, object
        [rows], hold an array float32 [completions] per row. Scores are NaN, and arrays None, with a warning, for rows
        without a completion. prompt_repeated: whether completions begin with their prompt; None: as in the contract.
        Raises InputError that names malformed rows, and errors of `score_ids`, with the row.
        """
        parts = list(self.score_parts(records, prompt_repeated=prompt_repeated))
        warn_unread([place for part in parts for place in part.unread])
        return {name: np.concatenate([part.scores[name] for part in parts]) for name in parts[0].scores}

    def score_parts(
        self, records: Records, *, prompt_repeated: bool | None = None, skip: int = 0
    ) -> Iterator[ScoredPart]:
        """Score rows part by part, as `score_rows` does; all rows are checked before the first one is scored.

        skip: parts scored earlier. With the `layout` used then, the other parts get bit-identical scores.
        """
        encoder = self.encoder
        if prompt_repeated is not None:
            encoder = Encoder(
                encoder.tokenizer, dataclasses.replace(encoder.options, prompt_repeated=prompt_repeated)
            )
        if skip == 0 and len(records) > CHUNK:
            for _ in whole_parts(records, encoder):
                pass
        report = Report("rows", None)
        for whole in whole_parts(records, encoder, skip=skip, report=report):
            # No length limit here: `score_ids` truncates long sequences, which training may have dropped.
            scores = self._scores_of(whole)
            unread = [
                place
                for place, row in zip(whole.places, scores, strict=True)
                if row is None or np.isnan(row).any()  # of an empty sequence: others have finite scores
            ]
            yield ScoredPart(_by_side(scores, whole.sides, whole.chosen), unread)
        if not report.all_as_given:
            warn(f"{records.name}: {'; '.join(report.lines()[1:])}")

    def _scores_of(self, part: Whole) -> list[np.ndarray | None]:
        """Score the sequences of each row; rows with as many are scored together. None: a row that has none."""
        scores: list[np.ndarray | None] = [None] * len(part.sequences)
        rows = {i: row for i, row in enumerate(part.sequences) if row is not None}
        for size in dict.fromkeys(map(len, rows.values())):
            which = [i for i, row in rows.items() if len(row) == size]
            sequences = [ids for i in which for ids in rows[i]]
            try:
                values = self.score_ids(sequences, group=size).reshape(-1, size)
            except NonFiniteError as error:
                place = part.places[which[error.sequence // size]]
                raise RunError(f"{place}: {error}") from error
            for i, row in zip(which, values, strict=True):
                scores[i] = row
        return scores

    def score_completions(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        tools: Sequence[Any] | None = None,
        kwargs: Sequence[Any] | None = None,
    ) -> np.ndarray:
        """Score completions, texts or message lists, after their prompts: float32 [N], NaN for empty sequences.

        tools: each conversation's tools, as in a row's `tools`. kwargs: each row's `chat_template_kwargs`. A completion
        without an end-of-sequence token gets one, like every training text: a truncated completion is scored as if it
        ended there. If every prompt occurs equally often in a row, neighbours share the prompt's computation.
        """
        row_tools = None if tools is None else [tools_of({"tools": value}) for value in tools]
        row_kwargs = None if kwargs is None else [kwargs_of({"chat_template_kwargs": x}) for x in kwargs]
        sequences = self.encoder.whole(prompts, completions, row_tools, row_kwargs)
        return self.score_ids(sequences, group=_repeats(prompts))

    def score_ids(self, sequences: Sequence[np.ndarray], *, group: int = 1) -> np.ndarray:
        """Score whole sequences, int [n_i], in this model's tokens, EOS last: float32 [N], NaN for empty ones.

        Scores are in reward units, or in standard deviations from the mean if this scorer normalizes. group: neighbours
        that share a prefix (a pair, the completions of one prompt), which is computed once; scores do not depend on it.
        Sequences longer than the contract's limit are truncated as in training, with a warning.

        Raises NonFiniteError, with a sequence's number, where its score is not finite, and InputError where weights are
        not.
        """
        if len(sequences) % group:
            raise ValueError(f"{len(sequences)} sequences do not divide into groups of {group}")
        fitted = self._fit(sequences)
        at_once = max(SEQUENCES_AT_ONCE // group, 1) * group
        parts = [fitted[start : start + at_once] for start in range(0, len(fitted), at_once)]
        scores = np.concatenate([np.zeros(0, np.float32), *(self._score_some(x, group) for x in parts)])
        # A sequence's place in its row changes the last bits, but identical neighbours must tie.
        first: dict[tuple[int, bytes], int] = {}
        scores = scores[[first.setdefault((i // group, ids.tobytes()), i) for i, ids in enumerate(fitted)]]
        empty = np.array([len(ids) == 0 for ids in sequences], bool)
        bad = np.flatnonzero(~np.isfinite(scores) & ~empty).tolist()
        if bad:
            raise nonfinite_output_error(
                self.model.definition,
                self.model.params,
                self.model.source or "the reward model",
                {i: ("the score", fitted[i]) for i in bad},
            )
        scores[empty] = np.nan
        return self.contract.normalized(scores) if self.normalize else scores

    def _fit(self, sequences: Sequence[np.ndarray]) -> list[np.ndarray]:
        limit = self.contract.max_length
        # Empty sequences become one token, so that groups stay whole; `score_ids` discards their scores.
        fitted = [np.asarray(ids if len(ids) else [0], np.int32) for ids in sequences]
        size = self.model.definition.vocab_size
        odd = [str(i) for i, ids in enumerate(fitted) if ids.max() >= size or ids.min() < 0]
        if odd:
            raise InputError(
                f"sequences {', '.join(odd[:5])} to score have token ids out of range (vocab_size {size}): use "
                f"the tokenizer it was trained with"
            )
        if limit is None:
            return fitted
        long = sum(len(ids) > limit for ids in fitted)
        if not long:
            return fitted
        warn(
            f"{long:,} of {len(fitted):,} sequences are longer than the {limit} tokens the reward model was "
            f"trained on; they are truncated as in its training ({self.contract.truncation_mode})"
        )
        keep = slice(-limit, None) if self.contract.truncation_mode == "keep_end" else slice(limit)
        return [ids[keep] for ids in fitted]

    def _score_some(self, sequences: Sequence[np.ndarray], group: int) -> np.ndarray:
        definition, mesh = self.model.definition, self.model.mesh
        trees = [tree(sequences[i : i + group]) for i in range(0, len(sequences), group)]
        longest = max(map(len, sequences))
        # The shapes chosen first serve while every sequence fits; a tree that does not fit is split.
        if self.layout is None or longest > self.layout.time[-1]:
            sizes = [each.size for each in trees]
            if self.reuses_shapes:
                self.layout = usual_layout(mesh, sizes, group, longest=longest)
            else:
                longest = max(longest, self.contract.max_length or 0)
                self.layout = scoring_layout(definition, mesh, sizes, group, longest=longest)
        scores: np.ndarray = scoring_reader(definition, self.layout, mesh)(self.model.params, trees)
        return scores


def scoring_layout(
    definition: Definition, mesh: Mesh, sizes: Sequence[int], group: int, *, longest: int
) -> Layout:
    """Choose the rows for groups of `group` sequences; sizes: tokens per group. longest: tokens of a sequence."""
    return choose_layout(
        sizes,
        group,
        hidden_size=definition.hidden_size,
        max_tokens=MICRO_BATCH_TOKENS,
        row_multiple=row_multiple(mesh),
        longest=longest,
    )


def usual_layout(mesh: Mesh, sizes: Sequence[int], group: int, *, longest: int) -> Layout:
    """Choose rows as `scoring_layout` does, from a few: their length and number are the next powers of two."""
    wanted = max(SHORTEST_ROW, longest, min(max(sizes), MICRO_BATCH_TOKENS))  # a larger group is split
    time = 1 << (wanted - 1).bit_length()
    multiple = row_multiple(mesh)
    # First fit leaves at most one row less than half full.
    needed = -(-min(2 * sum(sizes) // time + 1, len(sizes)) // multiple)
    most = max(MICRO_BATCH_TOKENS // time // multiple, 1)
    rows = multiple * min(1 << (needed - 1).bit_length(), most)
    return Layout((time,), (rows,), (max(time // 16 // group, 1) * group,), (0,))


@cached
def scoring_reader(definition: Definition, layout: Layout, mesh: Mesh) -> TreeReader:
    """Return the reader of sequences' scores that all scorers with this model, layout and mesh share."""
    return TreeReader(partial(sequence_scores, definition), layout, mesh, per="sequence")


def _by_side(
    rows: Sequence[np.ndarray | None], sides: Sequence[str], chosen: Sequence[int] | None
) -> dict[str, np.ndarray]:
    """Split the scores of every row, None for a row without any, into the arrays that `score_rows` returns."""
    if chosen is None:
        blank = np.full(len(sides), np.nan, np.float32)
        return dict(zip(sides, np.stack([blank if row is None else row for row in rows]).T, strict=True))
    columns = {side: np.full(len(rows), None, object) for side in sides}
    for i, (row, count) in enumerate(zip(rows, chosen, strict=True)):
        if row is not None:
            columns[sides[0]][i], columns[sides[1]][i] = row[:count], row[count:]
    return columns


def base_identity(model: Model) -> str | None:
    """Hash the base weights of a model with an adapter; None for a model without one."""
    if model.adapter is None or model.source is None:
        return None
    files = sorted(model.source.glob("*.safetensors"))
    with ThreadPoolExecutor(8) as pool:
        hashes = pool.map(artifacts.hash_file, files)
        named = "\n".join(f"{file.name} {content}" for file, content in zip(files, hashes, strict=True))
    return hashlib.sha256(named.encode()).hexdigest()


def _repeats(prompts: Sequence[Any]) -> int:
    """Return how often every prompt occurs in a row; 1 if not all prompts occur equally often."""
    count = next((i for i, prompt in enumerate(prompts) if prompt != prompts[0]), len(prompts))
    even = count > 0 and len(prompts) % count == 0
    return count if even and all(p == prompts[i - i % count] for i, p in enumerate(prompts)) else 1
