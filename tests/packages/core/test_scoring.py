"""Scoring equals the padded model on meshes and where texts are cut, as a trainer's contract says.

Every door, and order and neighbours, which change no score: tests/plugins/reward/test_one_text_one_score.py.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from rlhf_core import TrainerConfig, artifacts, data
from rlhf_core.errors import InputError
from rlhf_core.mesh import make_mesh
from rlhf_core.models import Model
from rlhf_core.scoring import Scorer, ScoringContract
from rlhf_core.training import OnDevices


@pytest.fixture(scope="module")
def model(tiny: ModuleType) -> Model:
    made: Model = tiny.make_model("score", scale=4.0, vocab_size=64)
    made.tokenizer.add_tokens(["user", "assistant", ":"])
    return made


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


def test_longer_texts_afterwards_get_shapes_of_their_own(model: Model) -> None:
    draw = np.random.default_rng(0)
    prompts = [draw.integers(3, 11, n) for n in (5, 1, 20, 9)]
    sequences = [np.r_[p, draw.integers(3, 11, n), 1] for p in prompts for n in (1, 7, 30)]
    expected = padded_scores(model, sequences)
    assert expected.std() > 1e-4
    scorer = make_scorer(model)
    scorer.score_ids([sequences[0]])
    found = scorer.score_ids(sequences)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-6)


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


def test_messages_and_empty_completions(model: Model) -> None:
    scorer = make_scorer(model, chat_template="plain")
    turns = [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c"}]
    words = ["user", ":", "a", "b", "assistant", ":", "c", "</s>"]
    ids = np.array(model.tokenizer.convert_tokens_to_ids(words))
    assert 2 not in ids  # the unknown word
    found = scorer.score_rows(data.load([{"messages": turns}]))["score"]
    np.testing.assert_allclose(found, padded_scores(model, [ids]), rtol=2e-5, atol=2e-6)
    rows = [{"prompt": "a", "completion": " b"}, {"prompt": "a", "completion": ""}]
    # Empty is a completion like any other, which a policy may well write; missing is none.
    scores = scorer.score_rows(data.load(rows))["score"]
    np.testing.assert_array_equal(scores, scorer.score_completions(["a", "a"], [" b", ""]))
    np.testing.assert_allclose(scores[1:], padded_scores(model, [np.array([3, 1])]), rtol=2e-5, atol=2e-6)
    missing = [*rows, {"prompt": "a", "completion": None}]
    with pytest.warns(UserWarning, match=r"no score for rows without a completion: .*row 3"):
        scores = scorer.score_rows(data.load(missing))["score"]
    assert np.isfinite(scores).tolist() == [True, True, False]


def test_what_does_not_fit_is_refused(model: Model, tiny: ModuleType, tmp_path: Path) -> None:
    contract = ScoringContract.of(model.tokenizer, max_length=16)
    other = tiny.make_tokenizer()
    with pytest.raises(InputError, match="its tokenizer is not the one it was trained with"):
        Scorer(replace(model, tokenizer=other), contract)
    contract = ScoringContract.of(other, max_length=16)
    templated = tiny.make_tokenizer()
    templated.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    with pytest.raises(InputError, match="its chat template is not the one it was trained with"):
        Scorer(replace(model, tokenizer=templated), contract)
    with pytest.raises(InputError, match="is a language_model; scoring needs a reward_model"):
        Scorer.load(tiny.save_policy(tiny.make_model(), tmp_path))
    with pytest.raises(InputError, match="contract is not one this version knows"):
        ScoringContract.from_dict({"max_length": 3}, "x")


@pytest.fixture
def stage(tmp_path: Path) -> Any:
    return SimpleNamespace(
        name="s", seed=0, registry=None, inputs={}, mesh=None, dir=tmp_path, template_date="2026-01-30"
    )


def test_what_a_config_says_about_texts(tiny: ModuleType, stage: Any) -> None:
    model = tiny.make_model("score", scale=4.0)
    config = TrainerConfig(max_sequence_length=7, truncation_mode="keep_start", chat_template="plain")
    scores = np.array([[1.0, 2.0], [4.0, 5.0]], np.float32)
    made = Scorer.contract_of(OnDevices(config, stage), model, scores=scores, evaluation={"accuracy": 1.0})
    contract = ScoringContract.from_dict(made, "here")
    assert (contract.max_length, contract.truncation_mode, contract.chat_template) == (
        7,
        "keep_start",
        "plain",
    )
    assert (contract.read_at, contract.template_date, contract.base) == ("eos", "2026-01-30", None)
    assert (contract.mean, contract.std) == (3.0, pytest.approx(np.std([1, 2, 4, 5])))
    assert contract.evaluation == {"accuracy": 1.0}
    assert contract.compute_dtype == model.computes_in
    scorer = Scorer(model, contract, normalize=True)
    ids = [np.array([3, 4, 5, 1], np.int32)]
    plain = float(model.scores(ids[0][None], np.ones((1, 4)))[0])
    assert scorer.score_ids(ids)[0] == pytest.approx((plain - 3.0) / np.std([1, 2, 4, 5]), abs=1e-5)


def test_without_scores_nothing_is_normalized(tiny: ModuleType, stage: Any) -> None:
    model = tiny.make_model("score", scale=4.0)
    contract = ScoringContract.from_dict(Scorer.contract_of(OnDevices(TrainerConfig(), stage), model), "here")
    assert (contract.mean, contract.std, contract.evaluation) == (None, None, None)
    with pytest.raises(InputError, match="cannot normalize"):
        Scorer(model, contract, normalize=True)


@pytest.mark.parametrize(
    ("kind", "recorded", "expected"),
    [
        ("language_model", {}, "template"),
        ("reward_model", {}, "eos"),
        ("reward_model", {"read_at": "eos"}, "eos"),
        ("reward_model", {"read_at": "template"}, "template"),
    ],
)
def test_a_new_head_reads_the_templates_end_and_an_old_one_what_it_was_trained_on(
    tiny: ModuleType, stage: Any, tmp_path: Path, kind: str, recorded: dict[str, str], expected: str
) -> None:
    """Where the configuration does not say where."""
    model = tiny.make_model("score", scale=4.0)
    manifest = {"format": 1, "name": "model", "kind": kind, "files": {}, "contract": recorded}
    artifacts.write_manifest(tmp_path, manifest)
    context = OnDevices(TrainerConfig(model=str(tmp_path)), stage)
    assert Scorer.contract_of(context, model, read_at=None)["read_at"] == expected
    for asked in ("eos", "template"):
        assert Scorer.contract_of(context, model, read_at=asked)["read_at"] == asked
