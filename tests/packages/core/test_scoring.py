"""Scoring equals the padded model whatever is shared or cut; the contract; the two commands on models."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rlhf_core import artifacts, data
from rlhf_core.errors import InputError
from rlhf_core.mesh import make_mesh
from rlhf_core.models import Model, fresh_model
from rlhf_core.scoring import Scorer, ScoringContract

SIZES = {
    "model_type": "llama",
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 128,
}
WORDS = ["<pad>", "</s>", "<unk>", *"abcdefgh", "user", "assistant", ":"]
PAIRS = [
    {"prompt": "a b c", "chosen": " d e", "rejected": " d f g"},
    {"prompt": "h", "chosen": " a", "rejected": " b b b b"},
    {"prompt": "a b", "chosen": " c d", "rejected": " c d"},
]


def make_tokenizer(words: list[str] = WORDS) -> Any:
    vocabulary = {word: i for i, word in enumerate(words)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    )


@pytest.fixture(scope="module")
def model() -> Model:
    return fresh_model(
        SIZES, "score", tokenizer=make_tokenizer(), mesh=make_mesh(devices=jax.devices()[:1]), seed=1
    )


def save(path: Path, model: Model, kind: str, contract: ScoringContract | None) -> Path:
    """An artifact, written as a stage would."""
    model.save(path)
    manifest = {
        "format": 1,
        "name": "model",
        "kind": kind,
        "stage": "rm",
        "files": artifacts.describe_files(path),
        "versions": {},
        "contract": {} if contract is None else contract.to_dict(),
    }
    artifacts.write_manifest(path, manifest)
    return path


def padded_scores(model: Model, sequences: list[np.ndarray]) -> np.ndarray:
    """The plain computation: one padded row a sequence."""
    width = max(map(len, sequences))
    ids = np.zeros((len(sequences), width), np.int32)
    mask = np.zeros_like(ids)
    for i, sequence in enumerate(sequences):
        ids[i, : len(sequence)], mask[i, : len(sequence)] = sequence, 1
    return np.asarray(model.scores(ids, mask))


def make_scorer(model: Model, **options: Any) -> Scorer:
    return Scorer(model, ScoringContract.of(model.tokenizer, max_length=None, **options))


def test_scores_equal_the_padded_model_in_any_grouping(model: Model) -> None:
    draw = np.random.default_rng(0)
    prompts = [draw.integers(3, 11, n) for n in (5, 1, 20, 9)]
    sequences = [np.r_[p, draw.integers(3, 11, n), 1] for p in prompts for n in (1, 7, 30)]
    expected = padded_scores(model, sequences)
    assert expected.std() > 1e-4
    for group in (3, 12):  # in groups of one: below
        found = make_scorer(model).score_ids(sequences, group=group)
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-6)
    # Longer ones afterwards, in one scorer: the shapes chosen first do not fit them.
    scorer = make_scorer(model)
    scorer.score_ids([sequences[0]])
    np.testing.assert_allclose(scorer.score_ids(sequences), expected, rtol=2e-5, atol=2e-6)


def test_scores_on_a_mesh(model: Model) -> None:
    mesh = make_mesh(data=2, fsdp=2, devices=jax.devices()[:4])
    spread = replace(model, mesh=mesh, params=jax.device_put(model.params, model.definition.shardings(mesh)))
    sequences = [np.arange(3, 3 + n) for n in (1, 4, 6, 2, 5)]
    np.testing.assert_allclose(
        make_scorer(spread).score_ids(sequences), padded_scores(model, sequences), rtol=2e-5, atol=2e-6
    )


@pytest.mark.parametrize(("mode", "keep"), [("keep_end", slice(-4, None)), ("keep_start", slice(4))])
def test_too_long_is_cut_at_the_contracts_side(model: Model, mode: Any, keep: slice) -> None:
    scorer = Scorer(model, ScoringContract.of(model.tokenizer, max_length=4, truncation_mode=mode))
    sequences = [np.array([3, 4, 5, 6, 7, 8]), np.array([3, 4])]
    with pytest.warns(UserWarning, match=r"1 of 2 sequences are longer than the 4 tokens"):
        found = scorer.score_ids(sequences)
    expected = padded_scores(model, [ids[keep] for ids in sequences])
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-6)
    assert abs(expected[0] - padded_scores(model, sequences)[0]) > 1e-5


def test_rows_in_all_forms_score_alike(model: Model) -> None:
    scorer = make_scorer(model)
    pairs = scorer.score_rows(data.load(PAIRS))
    assert set(pairs) == {"chosen_score", "rejected_score"}
    for side in ("chosen", "rejected"):
        rows = [{"prompt": row["prompt"], "completion": row[side]} for row in PAIRS]
        single = scorer.score_rows(data.load(rows))["score"]
        np.testing.assert_allclose(single, pairs[f"{side}_score"], rtol=2e-5, atol=2e-6)
        prompts, completions = [row["prompt"] for row in PAIRS], [row[side] for row in PAIRS]
        np.testing.assert_allclose(
            scorer.score_completions(prompts, completions), single, rtol=2e-5, atol=2e-6
        )
    encoded = [np.array([*(WORDS.index(w) for w in "abcde"), 1])]
    np.testing.assert_allclose(pairs["chosen_score"][:1], padded_scores(model, encoded), rtol=2e-5, atol=2e-6)


def test_messages_and_empty_completions(model: Model) -> None:
    scorer = make_scorer(model, chat_template="plain")
    turns = [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c"}]
    ids = [WORDS.index(word) for word in ("user", ":", "a", "b", "assistant", ":", "c", "</s>")]
    found = scorer.score_rows(data.load([{"messages": turns}]))["score"]
    np.testing.assert_allclose(found, padded_scores(model, [np.array(ids)]), rtol=2e-5, atol=2e-6)
    rows = [{"prompt": "a", "completion": " b"}, {"prompt": "a", "completion": ""}]
    # Empty is a completion like any other, which a policy may well write; missing is none.
    scores = scorer.score_rows(data.load(rows))["score"]
    np.testing.assert_array_equal(scores, scorer.score_completions(["a", "a"], [" b", ""]))
    np.testing.assert_allclose(scores[1:], padded_scores(model, [np.array([3, 1])]), rtol=2e-5, atol=2e-6)
    missing = [*rows, {"prompt": "a", "completion": None}]
    with pytest.warns(UserWarning, match=r"no score for rows without a completion: .*row 3"):
        scores = scorer.score_rows(data.load(missing))["score"]
    assert np.isfinite(scores).tolist() == [True, True, False]


def test_an_artifact_scores_as_it_was_trained(model: Model, tmp_path: Path) -> None:
    contract = ScoringContract.of(model.tokenizer, max_length=16, chat_template="plain", mean=0.5, std=2.0)
    path = save(tmp_path / "rm", model, "reward_model", contract)
    loaded = Scorer.load(path, mesh=model.mesh)
    assert loaded.contract == contract
    sequences = [np.array([3, 4, 5, 1])]
    np.testing.assert_allclose(loaded.score_ids(sequences), padded_scores(model, sequences), rtol=2e-5)


def test_what_does_not_fit_is_refused(model: Model, tmp_path: Path) -> None:
    contract = ScoringContract.of(model.tokenizer, max_length=16)
    other = replace(model, tokenizer=make_tokenizer([*WORDS, "more"]))
    with pytest.raises(InputError, match="its tokenizer is not the one it was trained with"):
        Scorer(other, contract)
    templated = make_tokenizer()
    templated.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    with pytest.raises(InputError, match="its chat template is not the one it was trained with"):
        Scorer(replace(model, tokenizer=templated), contract)
    lm = fresh_model(SIZES, "lm", tokenizer=make_tokenizer(), mesh=model.mesh)
    with pytest.raises(InputError, match="is a language_model; scoring needs a reward_model"):
        Scorer.load(save(tmp_path / "lm", lm, "language_model", None))
    lm.save(tmp_path / "plain")
    with pytest.raises(InputError, match="without a reward head"):
        Scorer.load(tmp_path / "plain")
    with pytest.raises(InputError, match="contract is not one this version knows"):
        ScoringContract.from_dict({"max_length": 3}, "x")


def test_generate_command(model: Model, tmp_path: Path, rlhf: Any) -> None:
    lm = fresh_model(SIZES, "lm", tokenizer=make_tokenizer(), mesh=model.mesh, seed=2)
    path = save(tmp_path / "lm", lm, "language_model", None)
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "a b", "kept": 1}\n{"prompt": "c", "kept": 2}\n')

    def generated(*flags: str) -> list[dict[str, Any]]:
        limits = ("--max_completion_length", "5", "--max_prompt_length", "32")
        ended = rlhf("generate", str(path), str(source), "-o", str(target), *limits, *flags)
        assert ended.code == 0, ended.message
        return [json.loads(line) for line in target.read_text().splitlines()]

    rows = generated("--temperature", "0")
    assert [row["kept"] for row in rows] == [1, 2]
    assert generated("--temperature", "0") == rows
    assert [row["kept"] for row in generated("--num_generations", "3")] == [1, 1, 1, 2, 2, 2]
    assert (
        rlhf("generate", str(path)).code
        == rlhf("generate", str(path), str(source), "--prompt", "a").code
        == 2
    )
