"""A trainer's reward model is scored as it was trained, and can be normalized where its scores are known."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlhf_core import TrainerConfig, artifacts
from rlhf_core.errors import InputError
from rlhf_core.scoring import Scorer, ScoringContract
from rlhf_core.training import Context


@pytest.fixture
def stage(tmp_path: Path) -> Any:
    return SimpleNamespace(
        name="s", seed=0, registry=None, inputs={}, mesh=None, dir=tmp_path, template_date="2026-01-30"
    )


def test_what_a_config_says_about_texts(tiny: ModuleType, stage: Any) -> None:
    model = tiny.make_model("score", scale=4.0)
    config = TrainerConfig(max_sequence_length=7, truncation_mode="keep_start", chat_template="plain")
    scores = np.array([[1.0, 2.0], [4.0, 5.0]], np.float32)
    made = Context(config, stage).scoring_contract(model, scores=scores, evaluation={"accuracy": 1.0})
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
    contract = ScoringContract.from_dict(Context(TrainerConfig(), stage).scoring_contract(model), "here")
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
    context = Context(TrainerConfig(model=str(tmp_path)), stage)
    assert context.scoring_contract(model, read_at=None)["read_at"] == expected
    for asked in ("eos", "template"):
        assert context.scoring_contract(model, read_at=asked)["read_at"] == asked
