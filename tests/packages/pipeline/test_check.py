"""`plan` and `rlhf check`: every problem at once, in the words of the file; paths; --set."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rlhf_core import plugins
from rlhf_core.contracts import PAIRWISE_LOSS, Forecast, LossOutput, PairInputs
from rlhf_core.errors import InputError
from rlhf_core.pipeline import Plan, plan, read
from rlhf_core.pipeline.forecast import stage_forecasts
from rlhf_core.pipeline.settings import settings_lines

WRONG = """
sead = 1
mesh = { data = -1, fsdp = -1, tenser = 2 }
[[stage]]
name = "base"
trainer = "fake"
model = { model_type = "llama", tokenizer = "tokeniser/" }
train_data = "trian.jsonl"
learning_rat = 1e-3
size = "big"
[[stage]]
name = "rm"
trainer = "fake_mr"
model = "bass.model"
[[stage]]
name = "policy"
trainer = "fake"
model = "rn.model"
loss = { name = "fake_los" }
rewards = [{ name = "fake_model", model = "base.modle" }, { name = "mine.py:brevity" }]
[[stage]]
name = "last"
trainer = "fake"
model = "later.model"
loss = { name = "fake_loss", temprature = 2.0 }
[[stage]]
name = "later"
trainer = "fake"
"""


def make(text: str, fake: ModuleType, *sets: str, dir: str | None = "runs/a") -> Plan:
    path = Path("p.toml")
    path.write_text(text)
    return plan(read(path, sets=sets, dir=dir), plugins.load(objects=[fake]))


def problems(text: str, fake: ModuleType, *sets: str, dir: str | None = "runs/a") -> str:
    with pytest.raises(InputError) as caught:
        make(text, fake, *sets, dir=dir)
    assert len(caught.value.problems) == len(str(caught.value).splitlines())
    return str(caught.value)


def test_every_mistake_is_reported_together(fake: ModuleType) -> None:
    Path("train.jsonl").write_text("{}")
    told = problems(WRONG, fake, "nope.size=1", dir=None)
    for expected in (
        "sead: unknown field of a pipeline. Did you mean 'seed'?",
        "dir: missing",
        "mesh: only one size may be -1",
        "mesh.tenser: unknown axis. Did you mean 'tensor'?",
        "--set nope.size=1: no stage 'nope'",
        f"stage 'base'.train_data: no such file: {Path('trian.jsonl').absolute()}. Did you mean 'train.js",
        "stage 'base'.model.tokenizer: no such file",
        "stage 'base'.learning_rat: unknown field. Did you mean 'learning_rate'?",
        "stage 'base'.size: expected a whole number, got 'big'",
        "stage 'rm'.trainer: no trainer named 'fake_mr'. Did you mean 'fake_rm'?",
        "stage 'rm'.model: no artifact 'bass.model' before this stage. Did you mean 'base.model'?",
        "stage 'policy'.model: no artifact 'rn.model' before this stage. Available: base.model",
        "stage 'policy'.loss.name: no pairwise loss named 'fake_los'. Did you mean 'fake_loss'?",
        "stage 'policy'.rewards[0].model: stage 'base' has no output 'modle'. Did you mean 'model'?",
        f"stage 'policy'.rewards[1].name: {Path('mine.py').absolute()}: no such file",
        "stage 'last'.model: 'later.model': stage 'later' is not before this one",
        "stage 'last'.loss.temprature: unknown option",
    ):
        assert expected in told, f"{expected}\n--- not in ---\n{told}"
    stages = [line.split("'")[1] for line in told.splitlines() if line.startswith("stage '")]
    assert stages == sorted(stages, key=["base", "rm", "policy", "last"].index)
    # A stage with an unknown trainer causes no further errors in the stages that use it.
    assert told.count("stage 'rm'") == 2


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "stage: the pipeline has none"),
        ("[stage]\nname = 'a'", "write each stage as a [[stage]] table"),
        ("[[stage]]\ntrainer = 'fake'", "stage 1: name: missing"),
        ("[[stage]]\nname = 'a.b'\ntrainer = 'fake'", "'a.b' cannot name a stage"),
        ("[[stage]]\nname = 'seed'\ntrainer = 'fake'", "'seed' cannot name a stage"),
        ("[[stage]]\nname = 'a'", "stage 'a'.trainer: missing"),
        ("[[stage]]\nname = 'a'\ntrainer = 'fake'\n" * 2, "stage 'a': two stages have this name"),
        ("seed = -1\n[[stage]]\nname = 'a'\ntrainer = 'fake'", "seed: a whole number"),
        ("mesh = 8\n[[stage]]\nname = 'a'\ntrainer = 'fake'", "mesh: write mesh = {"),
        ("mesh = { data = 0 }\n[[stage]]\nname = 'a'\ntrainer = 'fake'", "mesh.data: a positive number"),
        ("[[stage]]\nname = 'a'\ntrainer = 'fake'\nchat_template = 'plian'", "chat_template: no such file"),
    ],
)
def test_one_mistake(fake: ModuleType, text: str, expected: str) -> None:
    assert expected in problems(text, fake)


def test_references_are_checked_for_their_kind(fake: ModuleType) -> None:
    chain = """
[[stage]]
name = "rm"
trainer = "fake_rm"
[[stage]]
name = "base"
trainer = "fake"
model = "rm.model"
rewards = [{ name = "fake_model", model = "rm.model" }]
[[stage]]
name = "policy"
trainer = "fake"
rewards = [{ name = "fake_model", model = "base.model" }]
[[stage]]
name = "rm2"
trainer = "fake_rm"
model = "rm.model"
"""
    told = problems(chain, fake).splitlines()
    assert told == [
        "stage 'base'.model: rm.model is a reward_model; a trainer that makes a language_model starts from a "
        "language_model",
        "stage 'policy'.rewards[0].model: base.model is a language_model; a reward needs a reward_model",
    ]


@pytest.mark.parametrize(
    ("manifest", "kind"),
    [
        ('{"kind": "reward_model"}', "reward_model"),
        ('{"kind": "language_model"}', None),
        ('{"kind": ["reward_model"]}', None),
        ('["reward_model"]', None),
        ('{"kind": "reward_mo', None),
        (None, None),
    ],
)
def test_a_directory_is_checked_for_the_kind_that_its_manifest_says(
    manifest: str | None, kind: str | None, fake: ModuleType
) -> None:
    """A directory without one is a plain model; a damaged one is told when it is read."""
    Path("model").mkdir()
    if manifest is not None:
        Path("model/rlhf_artifact.json").write_text(manifest)
    text = "[[stage]]\nname = 'a'\ntrainer = 'fake'\nmodel = 'model'"
    if kind is None:
        assert make(text, fake).stages[0].config.model == str(Path("model").absolute())
    else:
        assert f"stage 'a'.model: {Path('model').absolute()} is a {kind}" in problems(text, fake)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"seed = \n", "p.toml line 1, column 8: not valid TOML"),
        (b"a = 1\na = 2\n", "p.toml line 2"),
        (b"[stage]\n[stage]\n", "twice; write [[stage]], with two brackets"),
        (b"\xef\xbb\xbfseed = \n", "p.toml line 1, column 8: not valid TOML: Invalid value"),
        (b"name = '\xff'\n", "p.toml: cannot be read: it is not UTF-8 text"),
    ],
)
def test_what_is_not_toml(fake: ModuleType, content: bytes, expected: str) -> None:
    Path("p.toml").write_bytes(content)
    with pytest.raises(InputError) as caught:
        read("p.toml")
    assert expected in str(caught.value)


def test_a_missing_pipeline_file_names_its_neighbour(fake: ModuleType) -> None:
    Path("chain.toml").write_text("")
    with pytest.raises(InputError, match=r"chian.toml: no such file. Did you mean 'chain.toml'\?"):
        read("chian.toml")
    with pytest.raises(InputError, match="is a directory"):
        read(".")


def test_whose_paths_are_relative_to_what(
    fake: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pipelines").mkdir()
    (tmp_path / "here").mkdir()
    for place in ("pipelines", "here"):
        (tmp_path / place / "train.jsonl").write_text("{}")
        (tmp_path / place / "model").mkdir()
    file = tmp_path / "pipelines" / "p.toml"
    file.write_text(
        'dir = "runs/x"\n[[stage]]\nname = "a"\ntrainer = "fake"\n'
        'train_data = ["train.jsonl", { name = "jsonl", path = "train.jsonl" }]\n'
        'model = "model"\neval_data = "org/dataset"\n'
    )
    monkeypatch.chdir(tmp_path / "here")
    plain = read(file)
    options = plain.stages[0].options
    beside = str(tmp_path / "pipelines" / "train.jsonl")
    assert options["train_data"] == [beside, {"name": "jsonl", "path": beside}]
    assert options["model"] == str(tmp_path / "pipelines" / "model")
    assert options["eval_data"] == "org/dataset"
    assert plain.dir == tmp_path / "here" / "runs" / "x"
    changed = read(file, sets=["a.train_data=train.jsonl", "a.model=model", "dir=y"])
    assert changed.stages[0].options["train_data"] == str(tmp_path / "here" / "train.jsonl")
    assert changed.stages[0].options["model"] == str(tmp_path / "here" / "model")
    assert changed.dir == tmp_path / "here" / "y"
    assert read(file, dir="z").dir == tmp_path / "here" / "z"
    mistyped = read(file, sets=["a.model=../here/modle", "a.eval_data=none"])
    assert [p for p in mistyped.problems if "model" in p] == [
        f"stage 'a'.model: no such file: {tmp_path}/here/modle. Did you mean 'model'?"
    ]
    missing = read(file, sets=["a.train_data=tarin.jsonl"])
    assert [p for p in missing.problems if "train_data" in p] == [
        f"stage 'a'.train_data: no such file: {tmp_path}/here/tarin.jsonl. Did you mean 'train.jsonl'?"
    ]


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("a.size=5", "size", 5),
        ("a.learning_rate=1e-3", "learning_rate", 1e-3),
        ("a.loss.temperature=2.0", "loss", {"name": "fake_loss", "temperature": 2.0}),
        ("a.rewards[0].weight=2.5", "rewards", [{"name": "length", "weight": 2.5}, "exact_match"]),
        ("a.rewards[1].weight=2.5", "rewards", [{"name": "length"}, {"name": "exact_match", "weight": 2.5}]),
        ("a.fail=x=y", "fail", "x=y"),
        ("a.max_training_steps=none", "max_training_steps", None),
    ],
)
def test_set(fake: ModuleType, text: str, key: str, value: Any) -> None:
    Path("p.toml").write_text(
        'dir = "x"\n[[stage]]\nname = "a"\ntrainer = "fake"\nloss = "fake_loss"\n'
        'rewards = [{ name = "length" }, "exact_match"]'
    )
    file = read("p.toml", sets=[text])
    assert not file.problems
    assert file.stages[0].options[key] == value


def test_set_of_the_pipeline_itself(fake: ModuleType) -> None:
    Path("p.toml").write_text('dir = "x"\n[[stage]]\nname = "a"\ntrainer = "fake"\n')
    file = read("p.toml", sets=["seed=5", "mesh.fsdp=2"])
    assert (file.seed, file.mesh) == (5, {"fsdp": 2})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a", "--set a: write stage.field=value"),
        ("a.size", "write stage.field=value"),
        ("b.size=1", "no stage 'b'"),
        ("a.rewards[7].weight=1", "'rewards' has no entry 7: it has 1, numbered from 0"),
        ("a.rewards.7.weight=1", "'rewards' has no entry 7: it has 1, numbered from 0"),
        ("a.rewards.weight=1", "'rewards' is a list: write rewards[0].weight"),
        ("a.rewards.-1.weight=1", "'rewards' is a list: write rewards[0].-1; it has 1"),
        ("a.rewards[1]=length", "'rewards' has no entry 1"),
        ("a.loggers.0.name=x", "'loggers' has no entry 0: it is not given in the file"),
        ("a.size.x.y=1", "'size' is 3, which has no 'x'"),
        ("a.size[0]=1", "'size' is 3, which has no '0'"),
        ("a.kind[0]=1", "'kind' is 'plain', which has no '0'"),
        ("a.kind.0.x=1", "'kind' is 'plain', which has no '0'"),
        ("mesh[0]=1", "'mesh'"),
    ],
)
def test_what_cannot_be_set(fake: ModuleType, text: str, expected: str) -> None:
    Path("p.toml").write_text(
        'dir = "x"\n[[stage]]\nname = "a"\ntrainer = "fake"\nsize = 3\nkind = "plain"\n'
        'rewards = [{ name = "length" }]'
    )
    told = [problem for problem in read("p.toml", sets=[text]).problems if problem.startswith("--set")]
    assert len(told) == 1
    assert expected in told[0]


@pytest.mark.parametrize("key", ["a.rewards[1].weight", "a.rewards.1.weight"])
@pytest.mark.parametrize("entry", ['"brief"', '{ name = "brief", weight = 1 }'])
def test_both_spellings_of_an_entry_of_a_list(fake: ModuleType, key: str, entry: str) -> None:
    Path("p.toml").write_text(
        f'dir = "x"\n[[stage]]\nname = "a"\ntrainer = "fake"\nrewards = ["length", {entry}]'
    )
    file = read("p.toml", sets=[f"{key}=2"])
    assert not file.problems
    assert file.stages[0].options["rewards"] == ["length", {"name": "brief", "weight": 2}]


def test_previews_see_the_model_that_is_still_to_be_made(pipeline: Path, fake: ModuleType) -> None:
    host = plugins.load(objects=[fake])
    planned = plan(read(pipeline, dir="runs/a"), host)
    lines = stage_forecasts(planned, host)
    assert lines["policy"] == Forecast(("3 bytes from {'model_type': 'llama'}",))
    assert planned.stages[2].config.model == str(Path("runs/a/base/artifacts/model").absolute())
    assert planned.stages[2].written.model == "base.model"
    assert planned.stages[2].config.rewards[0].options["model"].endswith("runs/a/rm/artifacts/model")


def test_a_plan_says_what_is_learned_with_also_where_the_file_does_not(
    pipeline: Path, fake: ModuleType
) -> None:
    """Not the epochs where updates are given, nor an optimizer's weight_decay, for which the field's holds."""
    host = plugins.load(objects=[fake])
    sets = ["base.max_training_steps=0", "rm.learning_rate=0.001", "rm.max_training_steps=9"]
    stages = plan(
        read(pipeline, sets=[*sets, "policy.loss={ temperature = 2.0 }"], dir="runs/a"), host
    ).stages
    base, rm, policy = (settings_lines(each.written, host.registry) for each in stages)
    adamw = "optimizer adamw (b1 0.9, b2 0.999, eps 1e-08, mu_dtype float32)"
    assert base == ["max_training_steps 0"]
    assert rm == [
        "learning_rate 0.001; max_training_steps 9",
        f"by default: {adamw}; loss fake_loss (temperature 1); scheduler constant; weight_decay 0.01; max_grad_norm 1",
    ]
    assert policy == [
        "loss fake_loss (temperature 2); rewards fake_model",
        f"by default: {adamw}; learning_rate 5e-05; scheduler constant; num_train_epochs 10; weight_decay 0.01; "
        "max_grad_norm 1",
    ]


def test_a_plan_leaves_out_defaults_that_are_no_number_or_text(pipeline: Path, fake: ModuleType) -> None:
    @dataclass(frozen=True)
    class Weighted:
        weights: tuple[float, ...] = field(default_factory=tuple)
        floor: float | None = None
        scale: float = 0.5

        def __call__(self, inputs: PairInputs) -> LossOutput:
            return LossOutput(inputs.chosen)

    host = plugins.load(objects=[fake])
    host.registry.add(PAIRWISE_LOSS, "weighted", Weighted)
    stages = plan(read(pipeline, sets=["rm.loss=weighted"], dir="runs/a"), host).stages
    assert settings_lines(stages[1].written, host.registry)[0] == "loss weighted (scale 0.5)"


def test_what_only_the_hub_can_have_is_said(pipeline: Path, fake: ModuleType) -> None:
    """A directory beside it suggests that the name was misspelt."""
    Path("tokenizer").mkdir()
    sets = ['base.model={model_type="llama", tokenizer="tokeniser"}', 'policy.model="nobody/none"']
    planned = plan(read(pipeline, sets=sets, dir="runs/a"), plugins.load(objects=[fake]))
    lines = stage_forecasts(planned, plugins.load(objects=[fake]))
    said = "is not a directory here: the stage looks it up on the hub when it begins."
    assert lines["base"].lines[-1] == f"model.tokenizer 'tokeniser' {said} Did you mean 'tokenizer'?"
    assert lines["policy"].lines[-1] == f"model 'nobody/none' {said}"
    assert len(lines["rm"].lines) == 1


def test_a_trainer_need_not_forecast(pipeline: Path, fake: ModuleType) -> None:
    host = plugins.load(objects=[fake])
    planned = plan(read(pipeline, dir="runs/a"), host)
    first, *others = planned.stages
    silent = replace(first, trainer=replace(first.trainer, build=None))
    lines = stage_forecasts(replace(planned, stages=(silent, *others)), host)
    assert lines["base"] == Forecast()
    assert lines["rm"].lines


def test_what_trainers_find_is_reported_with_the_stage(pipeline: Path, fake: ModuleType) -> None:
    host = plugins.load(objects=[fake])
    planned = plan(read(pipeline, sets=["rm.fail=forecast", "policy.fail=forecast"], dir="runs/a"), host)
    with pytest.raises(InputError) as caught:
        stage_forecasts(planned, host)
    assert caught.value.problems == (
        "stage 'rm': train.jsonl row 7: no column 'text'",
        "stage 'policy': train.jsonl row 7: no column 'text'",
    )


def test_a_forecast_that_fails_is_reported_with_its_plugin_and_place(
    pipeline: Path, fake: ModuleType, rlhf: Callable[..., Any]
) -> None:
    source = Path(str(fake.__file__))
    line = next(n for n, text in enumerate(source.read_text().splitlines(), 1) if "json.loads" in text)
    plugin = ["--plugin", str(source), "--dir", "runs/a"]
    for command in ("check", "run"):
        sets = ["--set", "base.fail=broken forecast", "--set", "policy.fail=forecast"]
        ended = rlhf(command, "p.toml", *plugin, *sets)
        assert ended.code == 2
        assert ended.message.splitlines() == [
            f"stage 'base'.trainer: 'fake' (from {source}) failed to forecast: it raised JSONDecodeError: "
            f"Expecting property name enclosed in double quotes: line 1 column 2 (char 1) ({source} line {line})",
            "stage 'policy': train.jsonl row 7: no column 'text'",
        ]


def test_a_full_disk_is_not_the_forecasts_fault(
    pipeline: Path, fake: ModuleType, rlhf: Callable[..., Any]
) -> None:
    source = str(fake.__file__)
    ended = rlhf("check", "p.toml", "--plugin", source, "--dir", "runs/a", "--set", "rm.fail=full forecast")
    assert ended.code == 1
    assert ended.message.startswith("no space left on the disk while writing cache")


def test_what_is_wrong_with_a_fresh_model_is_reported_once(tiny: ModuleType, tmp_path: Path) -> None:
    tiny.make_tokenizer().save_pretrained(tmp_path / "tokenizer")
    tiny.write_rows(tmp_path / "texts.jsonl", [{"prompt": "a", "completion": "b"}])
    model = '{ model_type = "llama", hidden_size = 16, num_hidden_layer = 2, tokenizer = "tokenizer" }'
    path = tmp_path / "p.toml"
    path.write_text(
        f'[[stage]]\nname = "base"\ntrainer = "sft"\ntrain_data = "texts.jsonl"\nmodel = {model}\n'
        '[[stage]]\nname = "more"\ntrainer = "sft"\ntrain_data = "texts.jsonl"\nmodel = "base.model"\n'
    )
    host = plugins.load()
    with pytest.raises(InputError) as caught:
        stage_forecasts(plan(read(path, dir="runs/a"), host), host)
    *_, last = told = caught.value.problems
    assert last.startswith("stage 'base'.model: unknown field 'num_hidden_layer'")
    assert all(problem.startswith("stage 'base'.model: ") for problem in told)


def test_what_is_dropped_of_eval_data_is_reported_too(tiny: ModuleType, tmp_path: Path) -> None:
    tiny.make_model("lm").save(tmp_path / "model")
    tiny.write_rows(
        tmp_path / "texts.jsonl", [{"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": "c"}]
    )
    tiny.write_rows(
        tmp_path / "held.jsonl", [{"prompt": "a", "completion": "b"}, {"prompt": "", "completion": " "}]
    )
    stages = [f'name = "{name}"\ntrainer = "{name}"\n' for name in ("sft", "grpo")]
    stages[1] += 'rewards = ["length"]\n'
    data = 'model = "model"\ntrain_data = "texts.jsonl"\neval_data = "held.jsonl"\n'
    path = tmp_path / "p.toml"
    path.write_text("".join(f"[[stage]]\n{stage}{data}" for stage in stages))
    host = plugins.load()
    lines = stage_forecasts(plan(read(path, dir="runs/a"), host), host)
    for name in ("sft", "grpo"):
        _, held_out, *_ = lines[name].lines
        assert re.match(
            r"eval_data: 2 .*: 1 kept, 1 empty dropped \(held.jsonl row 2\).*; rlhf data .*held.jsonl --model",
            held_out,
        )
        # The stage does not warn of it again.
        assert held_out in lines[name].told
