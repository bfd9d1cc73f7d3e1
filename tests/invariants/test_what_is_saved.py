"""What is evaluated is what is saved, and what is read is what was saved: dtypes, hashes and base models."""

from __future__ import annotations

import dataclasses
import json
import shutil
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rlhf_dpo
import rlhf_grpo
import rlhf_reward
import rlhf_sft

from rlhf_core import artifacts, data, load_model
from rlhf_core.errors import InputError
from rlhf_core.models import Model
from rlhf_core.scoring import Scorer
from tests.shared.short_runs import Watch

SHORT = {"max_training_steps": 2, "total_batch_size": 4, "learning_rate": 3e-2}
CONFIGS: dict[str, Any] = {
    "sft": rlhf_sft.SFTConfig(**SHORT),
    "reward": rlhf_reward.RewardConfig(**SHORT),
    "dpo": rlhf_dpo.DPOConfig(**SHORT),
    "grpo": rlhf_grpo.GRPOConfig(**SHORT, num_generations=2, max_completion_length=6, num_preview_samples=0),
}
ROWS = {"sft": "texts", "reward": "pairs", "dpo": "pairs", "grpo": "prompts"}


def train(
    tiny: ModuleType, name: str, directory: Path, model: Any = None, *, evaluates: bool = True, **fields: Any
) -> Any:
    """(artifact, the last metrics) of a short run, which evaluates held-out rows."""
    rows = getattr(tiny, ROWS[name])
    inputs: dict[str, Any] = {
        "model": model or tiny.make_model("score" if name == "reward" else "lm", scale=20.0)
    }
    inputs |= {"train_dataset": rows(8)} | ({"eval_dataset": rows(8, seed=1)} if evaluates else {})
    if name == "grpo":
        inputs["rewards"] = [lambda completion_ids: [float(sum(ids) % 7) for ids in completion_ids]]
    watch = Watch()
    artifact = tiny.run(name, CONFIGS[name].replace(**fields), directory, listeners=[watch], **inputs)
    return artifact, {metric: value for row in watch.rows for metric, value in row.items()}


@pytest.mark.long  # that evaluations read what is saved: tests/packages/training/test_held_out.py, and the next one
@pytest.mark.parametrize(
    "name",
    [
        "reward",
        "grpo",
        *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("sft", "dpo")),
    ],
)
def test_an_evaluation_reads_the_rounded_weights_and_training_does_not(
    name: str, tiny: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a rounding so coarse that nothing is left, evaluations say something else, and the weights are the same."""
    artifact, metrics = train(tiny, name, tmp_path / "as_is")
    monkeypatch.setattr(Model, "as_stored", lambda self, params: jax.tree.map(jnp.zeros_like, params))
    other, rounded = train(tiny, name, tmp_path / "rounded")
    evaluated = [metric for metric in metrics if metric.startswith("eval_")]
    assert evaluated
    assert any(metrics[metric] != rounded[metric] for metric in evaluated)
    head = "score" if name == "reward" else "lm"
    before, after = (tiny.leaves(load_model(each.path, head).params) for each in (artifact, other))
    for path, leaf in before.items():
        np.testing.assert_array_equal(leaf, after[path], err_msg=path)


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_reward_models_record_is_of_the_model_that_was_saved(
    tiny: ModuleType, tmp_path: Path, dtype: str
) -> None:
    artifact, metrics = train(tiny, "reward", tmp_path / "run", stored_dtype=dtype)
    scorer = Scorer.load(artifact.path)
    assert scorer.model.stored_dtype == dtype
    rows = tmp_path / "rows.jsonl"
    tiny.write_rows(rows, tiny.pairs(8, seed=1))
    scores = np.concatenate(list(scorer.score_rows(data.load(str(rows))).values()))
    contract = artifact.metadata["contract"]
    assert contract["mean"] == pytest.approx(float(scores.mean()), abs=1e-5)
    assert contract["std"] == pytest.approx(float(scores.std()), rel=1e-5)
    assert metrics["eval_mean_reward"] == pytest.approx(float(scores.mean()), abs=1e-5)


@pytest.fixture(scope="module")
def trained(tiny: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The artifact of a language model, which nobody changes."""
    artifact, _ = train(tiny, "sft", tmp_path_factory.mktemp("trained"), evaluates=False)
    return Path(artifact.path)


@pytest.fixture
def copied(trained: Path, tmp_path: Path) -> Path:
    """A copy of that, to be damaged."""
    return Path(shutil.copytree(trained, tmp_path / "copied"))


def test_the_stored_dtype_is_that_of_the_files_unless_it_is_given(
    tiny: ModuleType, trained: Path, tmp_path: Path
) -> None:
    model = load_model(trained, mesh=tiny.one_device())
    model.storing("bfloat16").save(tmp_path / "bf16")
    source = str(tmp_path / "bf16")
    kept, _ = train(tiny, "sft", tmp_path / "kept", source, evaluates=False)
    asked, _ = train(tiny, "sft", tmp_path / "asked", source, evaluates=False, stored_dtype="float32")
    assert load_model(kept.path).stored_dtype == "bfloat16"
    assert load_model(asked.path).stored_dtype == "float32"
    named = [json.loads((Path(x.path) / "config.json").read_text())["torch_dtype"] for x in (kept, asked)]
    assert named == ["bfloat16", "float32"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rounding_is_what_saving_and_loading_do(tiny: ModuleType, tmp_path: Path, dtype: str) -> None:
    model = tiny.make_model()
    draw = np.random.default_rng(0)
    params = jax.tree.map(
        lambda x: jnp.asarray(draw.normal(size=x.shape) * 10.0 ** draw.integers(-7, 3), jnp.float32),
        model.params,
    )
    model = dataclasses.replace(
        model, stored_dtype=dtype, params=jax.device_put(params, model.definition.shardings(model.mesh))
    )
    rounded = model.as_stored(model.params)
    model.save(tmp_path)
    jax.tree.map(np.testing.assert_array_equal, load_model(tmp_path).params, rounded)
    assert any(
        not np.array_equal(a, b)
        for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(rounded), strict=True)
    )
    adapted = dataclasses.replace(model, source=tmp_path).with_lora(rank=2)
    assert adapted.as_stored(adapted.params) is adapted.params


def test_a_reward_model_is_scored_in_the_dtype_it_was_trained_in(tiny: ModuleType, tmp_path: Path) -> None:
    artifact, _ = train(tiny, "reward", tmp_path / "run", evaluates=False, dtype="bfloat16")
    assert artifact.metadata["contract"]["compute_dtype"] == "bfloat16"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Scorer.load(artifact.path).model.computes_in == "bfloat16"
    with pytest.warns(UserWarning, match="trained in bfloat16 and scored in float32"):
        Scorer.load(artifact.path, dtype="float32")


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)


def test_a_flipped_bit_in_an_artifacts_weights_is_named(
    tiny: ModuleType, copied: Path, tmp_path: Path
) -> None:
    load_model(copied)
    flip(copied / "model.safetensors")
    with pytest.raises(InputError, match=r"model\.safetensors was changed since it was written"):
        load_model(copied)
    assert load_model(copied, verify=False).source == copied
    with pytest.raises(InputError, match=r"model\.safetensors was changed"):
        train(tiny, "sft", tmp_path / "next", str(copied), evaluates=False)
    train(tiny, "sft", tmp_path / "anyway", str(copied), evaluates=False, verify=False)


def test_an_adapters_base_model_is_verified_and_known_again(
    tiny: ModuleType, copied: Path, tmp_path: Path
) -> None:
    lora = {"rank": 2, "targets": ["q_proj"]}
    artifact, _ = train(tiny, "reward", tmp_path / "rm", str(copied), evaluates=False, lora=lora)
    Scorer.load(artifact.path)
    assert artifact.metadata["contract"]["base"]
    flip(copied / "model.safetensors")
    with pytest.raises(InputError, match=r"model\.safetensors was changed"):
        Scorer.load(artifact.path)
    (copied / artifacts.MANIFEST).unlink()  # of a directory without hashes, the contract still knows
    with pytest.raises(InputError, match="has other weights than those it was trained on"):
        Scorer.load(artifact.path)
