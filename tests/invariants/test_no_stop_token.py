"""Tokenizers that name no end-of-sequence token, or one that stands for unknown text: every trainer says so."""

from __future__ import annotations

import warnings
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from rlhf_dpo import DPOConfig
from rlhf_reward import RewardConfig
from rlhf_sft import SFTConfig

from rlhf_core import plugins
from rlhf_core.errors import InputError
from rlhf_core.training import Context
from tests.shared.plans import forecast_of

MISSING = "neither the tokenizer nor generation_config.json names an end-of-sequence token"


def checked(trainer: str, options: str, tokenizer: Any, tiny: ModuleType) -> tuple[str, ...]:
    """Return the warnings of `rlhf check` for one stage with this tokenizer."""
    here = Path.cwd()
    tokenizer.save_pretrained(here / "tokenizer")
    tiny.write_rows(
        here / "rows.jsonl", [{**row, **text} for row, text in zip(tiny.pairs(4), tiny.texts(4), strict=True)]
    )
    sizes = ", ".join(f'{k} = "{v}"' if isinstance(v, str) else f"{k} = {v}" for k, v in tiny.SIZES.items())
    (here / "p.toml").write_text(
        f'[[stage]]\nname = "s"\ntrainer = "{trainer}"\ntrain_data = "rows.jsonl"\n'
        f'model = {{ {sizes}, tokenizer = "tokenizer" }}\n{options}\n'
    )
    host = plugins.load()
    return tuple(forecast_of(here / "p.toml", host, dir="run")["s"].warnings)


def without_eos(tiny: ModuleType) -> Any:
    tokenizer = tiny.make_tokenizer()
    tokenizer.eos_token = None
    return tokenizer


@pytest.mark.parametrize(
    ("trainer", "options"),
    [("sft", ""), ("reward", ""), ("dpo", ""), ("distill", 'teacher = "teacher"\non_policy_fraction = 0')],
)
def test_a_check_warns_that_nothing_learns_to_end(
    trainer: str, options: str, tiny: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for tokenizer, missing in ((without_eos(tiny), True), (tiny.make_tokenizer(), False)):
        if trainer == "distill":
            tiny.make_model("lm").save(tmp_path / "teacher", tokenizer=tokenizer)
        assert any(MISSING in line for line in checked(trainer, options, tokenizer, tiny)) is missing


def test_a_check_refuses_to_sample_without_a_stop_token(
    tiny: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rewards = 'rewards = [{ name = "length", target = 4 }]'
    with pytest.raises(InputError, match="no completion could ever stop; set eos_token"):
        checked("grpo", rewards, without_eos(tiny), tiny)
    checked("grpo", f"{rewards}\nsampling = {{ stop_token_ids = [1] }}", without_eos(tiny), tiny)


@pytest.mark.parametrize(
    ("config", "opened"), [(SFTConfig, "texts"), (RewardConfig, "pairs"), (DPOConfig, "pairs")]
)
def test_a_run_warns_once(config: Any, opened: str, tiny: ModuleType, tmp_path: Path) -> None:
    rows = [{**row, "completion": row["chosen"]} for row in tiny.pairs(4)]
    stage = SimpleNamespace(
        name="s", seed=0, is_main=True, mesh=tiny.one_device(), inputs={"train_dataset": rows, "eval_dataset": rows},
        registry=plugins.load().registry, dir=tmp_path, template_date=None, say=print,
    )  # fmt: skip
    context = Context(config(), stage)
    context.tokenizer = without_eos(tiny)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for field in ("train_data", "eval_data"):
            getattr(context, opened)(field)
    assert sum(f"stage 's'.model: {MISSING}" in str(each.message) for each in caught) == 1


def test_an_end_token_that_stands_for_unknown_text_is_a_warning(
    tiny: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tokenizer = tiny.make_tokenizer()
    tokenizer.eos_token = "<unk>"
    assert any("'<unk>' both ends sequences and stands for" in x for x in checked("sft", "", tokenizer, tiny))
