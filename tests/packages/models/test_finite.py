"""Outputs that are not finite end a command with an error that says where they begin, whichever command it is."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from rlhf_core import RunError, data, load_model
from rlhf_core.contracts import RewardInputs
from rlhf_core.errors import InputError, NonFiniteError
from rlhf_core.fit import Moment, evaluate_or_warn
from rlhf_core.models import Model
from rlhf_core.models.finite import nonfinite_output_error
from rlhf_core.rollouts import Reward, score
from rlhf_core.sampling import Sampler
from rlhf_core.scoring import Scorer, ScoringContract
from tests.shared import samplers

LETTER = 5
"""The token "c"."""
UNKNOWN = r"{}: its outputs are not finite \(NaN or infinite\): the model's weights are not: '{}' holds {} of"


def changed(model: Model, path: str, change: Callable[[np.ndarray], None]) -> Model:
    """The model after `change` of a copy of the parameter at a dotted path."""
    params = jax.tree.map(np.array, model.params)
    at = params
    for name in path.split("."):
        at = at[name]
    change(at)
    return model.with_params(jax.tree.map(jax.device_put, params))


def poison(index: Any, value: float = np.nan) -> Callable[[np.ndarray], None]:
    def change(x: np.ndarray) -> None:
        x[index] = value

    return change


def fails_at_c(tiny: ModuleType, head: str) -> Model:
    """A model with finite weights whose first layer overflows at the token "c" alone."""

    def only_c(x: np.ndarray) -> None:
        x[:, 0] = 0
        x[LETTER, 0] = 1

    model = changed(tiny.make_model(head, scale=4.0), "embed_tokens.embedding", only_c)
    return changed(model, "layers.self_attn.v_proj.kernel", poison((0, 0), 3e38))


def scorer(model: Model) -> Scorer:
    return Scorer(model, ScoringContract.of(model.tokenizer, max_length=None))


def test_the_layer_is_named_where_all_weights_are_finite(tiny: ModuleType) -> None:
    model = fails_at_c(tiny, "lm")
    late = changed(tiny.make_model("lm"), "lm_head.kernel", poison((slice(None), 7), 3e38))
    for bad, part in ((model, "layer 0 (of 0 to 1)"), (late, "its head, the logits")):
        error = nonfinite_output_error(
            bad.definition, bad.params, "m", {4: ("the score of row 5", [3, LETTER])}
        )
        assert isinstance(error, NonFiniteError)
        assert error.sequence == 4
        assert "m: the score of row 5 is not finite (NaN or infinite), though all weights" in str(error)
        assert f"It begins in the output of {part}" in str(error)


def test_the_row_at_fault_is_named_and_not_its_neighbours_in_a_packed_row(tiny: ModuleType) -> None:
    rows = [{"prompt": "a", "completion": f" {word}"} for word in ("b", "d", "c", "e")]
    with pytest.raises(RunError, match=r"row 3: the reward model: the score is not finite.* layer 0 \("):
        scorer(fails_at_c(tiny, "score")).score_rows(data.load(rows))


def test_scores_of_a_model_with_nan_are_an_error_and_no_output(
    tiny: ModuleType, tmp_path: Path, rlhf: Callable[..., Any]
) -> None:
    with pytest.warns(UserWarning, match=r"score\.weight"):
        changed(tiny.make_model("score"), "score.kernel", poison(...)).save(tmp_path / "rm")
    rows = tiny.write_rows(tmp_path / "pairs.jsonl", tiny.pairs(3))
    for output in (("-o", str(tmp_path / "out")), ()):
        ended = rlhf("score", str(tmp_path / "rm"), str(rows), *output)
        assert (ended.code, ended.out) == (2, "")
        assert re.search(r"rm: its outputs are not finite .*'score\.weight' holds 16 of 16", ended.message)
    assert not (tmp_path / "out").exists()


def test_sampling_names_the_prompt_whose_logits_are_not_finite(tiny: ModuleType) -> None:
    model = fails_at_c(tiny, "lm")
    counts = {"max_completion_length": 2, "max_prompt_length": 4, "prompts_per_call": 4}
    sampler = Sampler(samplers.inputs(model.definition, stop_ids=(1,), **counts))
    prompts = [np.array(ids, np.int32) for ids in ([3, 4], [3, LETTER], [6])]
    with pytest.raises(NonFiniteError, match=r"a next token is not finite.* layer 0 \(") as caught:
        sampler(model.params, prompts, jax.random.key(0))
    assert caught.value.sequence == 1
    bad = changed(model, "lm_head.kernel", poison((0, 0)))
    with pytest.raises(InputError, match=UNKNOWN.format("the policy", "lm_head.weight", 1)):
        sampler(bad.params, prompts, jax.random.key(0))


def test_a_reward_whose_score_is_not_finite_names_the_prompts_row() -> None:
    def broken(completions: list[str]) -> list[float]:
        raise NonFiniteError("runs/rm: the score of sequence 1 is not finite", 1)

    places = ["prompts.jsonl row 1", "prompts.jsonl row 2"]
    given = RewardInputs(["a", "b"], ["c", "d"], [[3], [4]], {}, places)
    with pytest.raises(RunError, match=r"^prompts\.jsonl row 2: reward 'broken': runs/rm: the score"):
        score([Reward("broken", 1.0, broken)], given)


def test_training_on_weights_that_are_not_finite_names_them_and_not_the_rows(
    tiny: ModuleType, short: Any, tmp_path: Path
) -> None:
    bad = changed(short.models["reward"], "layers.mlp.up_proj.kernel", poison((1, 0, 0), np.inf))
    with pytest.raises(
        InputError, match=r"update 1 is .*'model\.layers\.1\.mlp\.up_proj\.weight' holds 1 of"
    ):
        short.train("reward", inputs={"model": bad})
    assert not list((tmp_path / "reward" / "checkpoints").glob("*"))
    rows = [{"prompt": "a", "chosen": " b", "rejected": f" {word}"} for word in "dcef"]
    with pytest.raises(RunError, match=r"row 2.*\), and begins in the output of layer 0 \(of 0 to 1\)"):
        short.train("reward", at="late", inputs={"model": fails_at_c(tiny, "score"), "train_dataset": rows})


def test_an_evaluation_says_where_its_loss_is_not_finite(tiny: ModuleType, tmp_path: Path) -> None:
    stage: Any = SimpleNamespace(name="s", dir=tmp_path, is_main=True)
    model = tiny.make_model("lm")
    state: Any = SimpleNamespace(model=model.definition, params=model.params)
    with pytest.warns(
        UserWarning, match=r"eval_loss after update 3 is not finite: the model's weights are finite"
    ):
        metrics = evaluate_or_warn(lambda state: {"loss": np.nan, "reward": np.nan}, Moment(3, state), stage)
    assert set(metrics) == {"eval_loss", "eval_reward"}
    with pytest.raises(RunError, match="eval_loss after update 0 is not finite"):
        evaluate_or_warn(lambda state: {"loss": np.inf}, Moment(0, state, starts=True), stage)
    bad = changed(model, "norm.weight", poison(0))
    state = SimpleNamespace(model=bad.definition, params=bad.params)
    with pytest.raises(InputError, match=r"'model\.norm\.weight' holds 1 of 16"):
        evaluate_or_warn(lambda state: {"loss": np.nan}, Moment(0, state, starts=True), stage)


@pytest.mark.parametrize(("dtype", "value"), [("float32", np.nan), ("float16", 1e5), ("bfloat16", -np.inf)])
def test_saving_values_that_the_file_cannot_hold_is_said(
    tiny: ModuleType, tmp_path: Path, dtype: str, value: float
) -> None:
    model = dataclasses.replace(tiny.make_model("lm"), stored_dtype=dtype)
    model.save(tmp_path / "good")  # warnings are errors in tests
    bad = changed(model, "layers.mlp.down_proj.kernel", poison((1, 2, 3), value))
    with pytest.warns(UserWarning, match=rf"'model\.layers\.1\.mlp\.down_proj\.weight' .* {dtype}"):
        bad.save(tmp_path / "bad")
    assert not np.isfinite(load_model(tmp_path / "bad").logits([[3]], [[1]])).any()
