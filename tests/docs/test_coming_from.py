"""docs/reference/coming_from.md: every field of theirs is there, and what is said of it is so."""

from __future__ import annotations

import importlib
import inspect
import re
import tomllib
import warnings
from pathlib import Path
from typing import Any

import pytest
from rlhf_compat import FIELDS, HERE, NOTHING, RULES
from rlhf_dpo import DPO_LOSS, DPOConfig
from rlhf_grpo import GRPOConfig, grpo_step
from rlhf_reward import RewardConfig, evaluation_step, training_step

from rlhf_core import OPTIMIZER, PAIRWISE_LOSS, SAMPLER, Registry, plugins
from rlhf_core.config import TrainerConfig, build
from rlhf_core.plugins import load_file
from rlhf_core.stage.alone import INPUTS, REFUSED_INPUTS, SPELLINGS

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = (REPOSITORY / "docs/reference/coming_from.md").read_text(encoding="utf-8")
TRL_REWARD_CONFIG = """learning_rate model_init_kwargs trust_remote_code chat_template_path disable_dropout
    dataset_num_proc eos_token max_length pad_to_multiple_of center_rewards_coefficient
    activation_offloading pad_token logging_steps
    gradient_checkpointing bf16"""
"""The fields that TRL's RewardConfig has of its own, or sets anew."""
TAKEN = {**RewardConfig.aliases(), **{name: field.path for name, field in FIELDS.items()}}
"""{another name: the dotted path of ours}."""
TYPED = {
    name: HERE[name]
    for name in (
        *("batch_size", "epochs", "eval_dataset", "lr", "max_new_tokens", "num_epochs", "reward_functions"),
        *("train_batch_size", "train_dataset"),
    )
}
"""What people type that is no name of another library's config."""
KINDS = {"optimizer": OPTIMIZER, "loss": PAIRWISE_LOSS, "sampler": SAMPLER}


def tables(heading: str) -> list[list[tuple[str, ...]]]:
    """The rows of every table below a heading."""
    section = PAGE.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    found = re.findall(r"^\|---.*\n((?:\|.*\n)+)", section, re.MULTILINE)
    return [
        [tuple(cell.strip() for cell in row.strip("| ").split(" |")) for row in table.splitlines()]
        for table in found
    ]


def name(cell: str) -> str:
    (found,) = re.fullmatch(r"`(\w[\w.]*)`", cell).groups()  # type: ignore[union-attr]
    return str(found)


def rows(table: list[tuple[str, ...]]) -> dict[str, tuple[str, str]]:
    """{field: (ours, difference)}."""
    names = [name(row[0]) for row in table]
    assert len(set(names)) == len(names)
    cells = [(row[1], row[2] if len(row) > 2 else "") for row in table]
    return {
        each: (each if ours == "same" else name(ours), told)
        for each, (ours, told) in zip(names, cells, strict=True)
    }


def grouped(table: list[tuple[str, ...]]) -> dict[str, str]:
    """{field: what happens here}, of a table with many fields a row."""
    return {field: row[1] for row in table for field in re.findall(r"`(\w+)`", row[0])}


(EASYDEL,) = tables("EasyDeL's RewardConfig")
DONE, NOT_DONE = "done anyway", "not done"
EASYDEL_WORKS = [row for row in EASYDEL if row[1] not in (DONE, NOT_DONE)]
TRL_SHARED, TRL_GRPO, TRL_MORE, TRL_REFUSED = tables("TRL's RewardConfig")
TRL_LOSSES, TRL_CPO = tables("TRL's CPOConfig and ORPOConfig")


@pytest.fixture(scope="module")
def registry() -> Registry:
    return plugins.load().registry


def test_every_field_of_easydel_is_there_once() -> None:
    file = load_file(REPOSITORY / "tests/plugins/compat/test_names.py").EASYDEL
    ours = {"center_rewards_coefficient", "disable_dropout", "report_steps", "trainer_prefix"}
    translated = {*FIELDS, *NOTHING, *RULES} - {"trainer_config_class"}
    names = [name(row[0]) for row in EASYDEL]
    assert names == sorted(translated | set(file) | ours)
    assert len(names) >= 109
    found = {name(row[0]): (row[1], row[2]) for row in EASYDEL if row[1] in (DONE, NOT_DONE)}
    unused = {name: (NOT_DONE, why) for name, why in TrainerConfig.unused_fields().items()}
    nothing = {name: (DONE if each.done else NOT_DONE, each.instead) for name, each in NOTHING.items()}
    assert found == nothing | unused
    assert sum(here == NOT_DONE for here, _ in found.values()) <= 20


@pytest.mark.parametrize("field", rows(EASYDEL_WORKS))
def test_a_field_of_easydel_is_ours_or_another_name_of_one(field: str) -> None:
    ours, _ = rows(EASYDEL_WORKS)[field]
    assert ours in RewardConfig.model_fields
    path = TAKEN.get(field, "")
    assert field == ours or path.partition(".")[0] == ours or field in RULES
    assert (field == ours) == (field in RewardConfig.model_fields)


def test_every_name_of_trl_is_there_once() -> None:
    shared, grpo, refused = rows(TRL_SHARED), rows(TRL_GRPO), grouped(TRL_REFUSED)
    grpo |= rows(TRL_CPO)
    more = {field: ours.strip("`") for field, ours in grouped(TRL_MORE).items()}
    assert len({*shared, *grpo, *more, *refused}) == len(shared) + len(grpo) + len(more) + len(refused)
    taken = {field for field in shared if field in RewardConfig.model_fields or field in TAKEN}
    paths = {f: ours for f, (ours, _) in {**shared, **grpo}.items() if f not in taken}
    assert {**TYPED, **paths, **more, **refused} == HERE
    assert set(TRL_REWARD_CONFIG.split()) <= {*shared, *refused}
    for field in taken:
        assert shared[field][0] == TAKEN.get(field, field)


@pytest.mark.parametrize(
    ("config", "field", "ours"),
    [(RewardConfig, field, ours) for field, (ours, _) in rows(TRL_SHARED).items()]
    + [(GRPOConfig, field, ours) for field, (ours, _) in rows(TRL_GRPO).items()]
    + [(DPOConfig, field, ours) for field, (ours, _) in rows(TRL_CPO).items()]
    + [(GRPOConfig, field, ours.strip("`")) for field, ours in grouped(TRL_MORE).items()],
)
def test_what_trl_s_names_point_to_exists(
    config: type[TrainerConfig], field: str, ours: str, registry: Registry
) -> None:
    top, _, key = ours.partition(".")
    assert top in config.model_fields, field
    if key and top in KINDS:
        kind = DPO_LOSS if (config, top) == (DPOConfig, "loss") else KINDS[top]
        options = [registry._entry(kind, each).options or {} for each in registry.names(kind)]
        assert any(key in each for each in options)
    elif key:
        with pytest.raises(Exception, match=rf"{top}\.{key}: expected"):
            config(**{top: {key: object()}})


ALL = [
    *(
        (RewardConfig, f, told)
        for table in (EASYDEL_WORKS, TRL_SHARED)
        for f, (_, told) in rows(table).items()
    ),
    *((GRPOConfig, f, told) for f, (_, told) in rows(TRL_GRPO).items()),
]


def test_the_losses_of_cpo_and_orpo_are_written_so(registry: Registry) -> None:
    shown = {theirs: tomllib.loads(ours.strip("`")) for theirs, ours in TRL_LOSSES}
    losses = [build(DPOConfig, table, registry=registry).loss.name for table in shown.values()]
    assert losses == ["cpo", "simpo", "orpo"]


def value(text: str) -> Any:
    return None if text == "none" else tomllib.loads(f"x = {text}")["x"]


@pytest.mark.parametrize(("config", "field", "told"), [x for x in ALL if "default `" in x[2]])
def test_the_defaults_are_those_of_the_config(config: type[TrainerConfig], field: str, told: str) -> None:
    target = HERE.get(field, TAKEN.get(field, field))
    (ours,) = re.findall(r"default `(.*?)`", told)
    found: Any = config()
    for part in target.split("."):
        if field != "use_wandb":
            found = getattr(found, part)
    assert value(ours) == (found.use_wandb if field == "use_wandb" else found)


SNIPPETS = sorted({s for _, _, told in ALL for s in re.findall(r"`(\w+ = [^`]+)`", told)})


def test_there_are_snippets() -> None:
    assert len(SNIPPETS) > 5


@pytest.mark.parametrize("snippet", SNIPPETS)
def test_what_is_said_to_be_written_can_be(snippet: str, registry: Registry) -> None:
    table = tomllib.loads(snippet)
    (field,) = table
    cls = RewardConfig if field in RewardConfig.model_fields else GRPOConfig
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = build(cls, table, registry=registry)
    assert getattr(config, field) != getattr(cls(), field)


def test_the_arguments_are_those_that_are_taken() -> None:
    arguments, methods = tables("Arguments and methods of a trainer")
    found = {name(row[0]): row[1] for row in arguments}
    assert {each for each, ours in found.items() if ours == "none"} <= set(REFUSED_INPUTS)
    assert set(INPUTS) - {"model", "train_dataset", "tokenizer", "rewards", "accept"} <= set(found)
    doors = {path for row in methods for path in re.findall(r"`((?:rlhf_\w+\.)+\w+)", row[1])}
    assert doors
    for path in doors:
        module, _, attribute = path.rpartition(".")
        assert hasattr(importlib.import_module(module), attribute), path
    assert {field: f"`{ours}`" for field, ours in SPELLINGS.items()} == {
        field: ours for field, ours in found.items() if field in SPELLINGS
    }
    assert RewardConfig.aliases()["peft_config"] == "lora"


def test_the_arguments_of_functions_are_theirs_in_their_order() -> None:
    (table,) = tables("Arguments of the functions")
    told = [field for row in table for field in re.findall(r"`(\w+)`", row[0])]
    step = list(inspect.signature(training_step).parameters)
    assert step == [*told[:7], "loss"]
    assert list(inspect.signature(grpo_step).parameters)[:9] == [*told[:2], *told[7:9], *told[2:6], told[9]]
    with_loss = [name for name in told[:7] if name not in ("learning_rate_fn", "gradient_accumulation_steps")]
    assert list(inspect.signature(evaluation_step).parameters) == [*with_loss, "loss"]


def test_a_parser_of_dataclasses_is_told_what_to_do() -> None:
    from transformers import HfArgumentParser

    with pytest.raises(TypeError, match=r"^RewardConfig is no dataclass, .*`rlhf train` .*vars\(parser"):
        HfArgumentParser(RewardConfig)


def test_the_columns_are_those_that_are_taken() -> None:
    from rlhf_core.data.preferences import FAMILIES

    columns = PAGE.split("\n## Columns\n")[1]
    for family in FAMILIES:
        for column in family:
            assert f"`{column}`" in columns
