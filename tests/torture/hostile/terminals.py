"""Texts through every door to a terminal: none of them drives it."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from tests.torture import runs
from tests.torture.experiment import Case
from tests.torture.hostile.inputs import (
    STEPS,
    Commands,
    Environment,
    change_rows,
    file_name,
    plant_text,
    toml_string,
    write_pipeline,
)
from tests.torture.terminal import EVERYTHING, on_terminal, smuggled


def _cells(work: Path, text: str, env: Environment) -> Commands:
    for name in ("corpus", "prompts", "prompts.heldout", "pairs"):
        change_rows(
            work / f"data/{name}.jsonl",
            lambda row: {k: f"{v}{text}" if isinstance(v, str) else v for k, v in row.items()},
        )
    shutil.rmtree(work / "run")
    policy = str(work / "kept")
    (work / "p.toml").write_text((work / "p.toml").read_text().replace("max_prompt_length = 16", ""))
    return [
        ("data", "data/corpus.jsonl", "--tokenizer", "data/tokenizer"),
        ("data", "data/pairs.jsonl"),
        ("check", "p.toml"),
        ("run", "p.toml"),
        ("generate", policy, "data/prompts.jsonl"),
    ]


def _columns(work: Path, text: str, env: Environment) -> Commands:
    change_rows(work / "data/corpus.jsonl", lambda row: {f"{key}{text}": value for key, value in row.items()})
    change_rows(work / "data/prompts.jsonl", lambda row: {**row, text: 1, "word": [text]})
    shutil.rmtree(work / "run")
    return [
        ("data", "data/corpus.jsonl"),
        ("check", "p.toml"),
        ("run", "p.toml"),
        ("data", "data/prompts.jsonl"),
    ]


def _messages(work: Path, text: str, env: Environment) -> Commands:
    call = {"type": "function", "function": {"name": text, "arguments": {text: text}}}
    rows = [
        {"messages": [{"role": text, "content": "x"}, {"role": "assistant", "content": text}]},
        {"messages": [{"role": "user", "content": text}, {"role": "assistant", "tool_calls": [call]}]},
        {"messages": [{"role": "user", text: text}]},
        {"messages": text},
    ]
    (work / "data/corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_pipeline(work, runs.SFT.replace("train_data", 'chat_template = "plain"\ntrain_data'))
    commands: Commands = []
    for i, row in enumerate(rows):
        (work / f"data/{i}.jsonl").write_text(json.dumps(row) + "\n")
        commands.append(
            ("data", f"data/{i}.jsonl", "--tokenizer", "data/tokenizer", "--chat_template", "plain")
        )
    return [*commands, ("check", "p.toml"), ("run", "p.toml")]


def _files(work: Path, text: str, env: Environment) -> Commands:
    name = file_name(text)
    (work / "data/corpus.jsonl").rename(work / "data" / name)
    stage = runs.SFT.replace('"data/corpus.jsonl"', toml_string(f"data/{name}"))
    write_pipeline(work, stage)
    (work / "missing.toml").write_text(
        f"dir = {toml_string(name)}\n" + stage.replace("train_data = ", "train_data = [").replace(name, name)
    )
    os.rename(work / "p.toml", work / f"{name}.toml")
    return [
        ("check", f"{name}.toml"),
        ("run", f"{name}.toml", "--dir", f"runs/{name}"),
        ("report", f"runs/{name}"),
        ("report", f"{name}/none"),
        ("data", f"data/{name}"),
        ("data", f"data/{name}x"),
        ("data", f"data/{name}", f"{name}2"),
        ("check", f"{name}x.toml"),
        ("run", f"{name}.toml", "--plugin", f"{name}.py"),
        ("generate", name, "--prompt", name),
        ("score", name, f"data/{name}"),
        ("export", "run/base/artifacts/model", f"exported/{name}"),
        ("compare", "run", f"runs/{name}", "-o", f"{name}.html"),
    ]


def _bytes(work: Path, text: str, env: Environment) -> Commands:
    """Names that are not UTF-8: a byte that some terminals take for the beginning of a sequence."""
    name = os.fsdecode(b"\x9b2J\xff.jsonl")
    (work / "data/corpus.jsonl").rename(work / "data" / name)
    os.rename(work / "run", work / os.fsdecode(b"run\x9b2J"))
    return [
        ("data", f"data/{name}"),
        ("data", f"{name}2"),
        ("check", name),
        ("report", os.fsdecode(b"run\x9b2J")),
        (name,),
        ("train", "sft", "--train_data", f"data/{name}", f"--{name}", "x"),
    ]


def _names(work: Path, text: str, env: Environment) -> Commands:
    quoted = toml_string(text)
    stages = [
        runs.SFT.replace('name = "base"', f"name = {quoted}"),
        runs.SFT.replace('trainer = "sft"', f"trainer = {quoted}"),
        f"{runs.SFT}\n{quoted} = 1\n",
        runs.SFT.replace("learning_rate = 1e-2", f"learning_rate = {quoted}"),
        f"{runs.SFT}\noptimizer = {{ name = {quoted} }}\n",
        f'{runs.SFT}\noptimizer = {{ name = "adamw", {quoted} = {quoted} }}\n',
        f"{runs.SFT}\nlogger = [{{ name = {quoted} }}]\n",
        runs.SFT.replace('model_type = "llama"', f"model_type = {quoted}"),
        runs.SFT.replace("hidden_size = 16", f"hidden_size = {quoted}, {quoted} = 1"),
        runs.SFT.replace(runs.MODEL, toml_string(f"base.{text}")),
        runs.SFT.replace(
            'train_data = "data/corpus.jsonl"', f"train_data = {{ name = {quoted}, path = {quoted} }}"
        ),
        f"{runs.SFT}\nchat_template = {quoted}\n",
        f"{runs.SFT}\nmesh = {{ {quoted} = 1 }}\n",
        f"{text}\n",
    ]
    commands: Commands = []
    for i, stage in enumerate(stages):
        (work / f"p{i}.toml").write_text(f'dir = "other{i}"\n{stage}', errors="replace")
        commands.append(("check", f"p{i}.toml"))
    return [*commands, ("run", "p0.toml"), ("run", "p9.toml")]


def _arguments(work: Path, text: str, env: Environment) -> Commands:
    return [
        (text,),
        ("run", f"--{text}"),
        ("run", "p.toml", "--set", f"{text}=1"),
        ("check", "p.toml", "--set", f"base.learning_rate={text}"),
        ("check", "p.toml", "--on", text),
        ("check", "p.toml", "--devices", text),
        ("check", "p.toml", text),
        ("train", text),
        ("train", text, "--help"),
        ("train", "sft", text),
        ("train", "sft", f"--{text}", text),
        ("new", text, "x"),
        ("new", "reward", text),
        ("generate", "run/base/artifacts/model", "--prompt", text, "--max_completion_length", "2"),
        ("generate", "run/base/artifacts/model", "--prompt", "say", "--stop_strings", text),
        ("generate", "run/base/artifacts/model", "--prompt", "x", "--chat_template_kwargs", text),
        ("generate", "run/base/artifacts/model", "--prompt", "x", "--temperature", text),
        ("generate", "run/base/artifacts/model", "--prompt", "x", "--chat_template", text),
        ("report", "run", "-o", f"none/{text}/"),
    ]


def _urls(work: Path, text: str, env: Environment) -> Commands:
    url = f"https://127.0.0.1:9/{text}"
    write_pipeline(work, runs.SFT.replace(runs.MODEL, toml_string(url)))
    (work / "q.toml").write_text(
        'dir = "q"\n' + runs.SFT.replace('"data/corpus.jsonl"', toml_string(f"someone/{text}"))
    )
    return [
        ("check", "p.toml"),
        ("run", "p.toml"),
        ("check", "q.toml"),
        ("run", "q.toml"),
        ("data", url),
        ("data", f"someone/{text}"),
        ("generate", url, "--prompt", "x"),
        ("score", f"someone/{text}", "data/pairs.jsonl"),
    ]


def _broken_data(work: Path, text: str, env: Environment) -> Commands:
    contents = {
        "a.jsonl": f'{{"prompt": "x", "completion": {text}\n',
        "b.jsonl": json.dumps(text) + "\n",
        "c.json": text,
        "d.csv": f'{text},"\n{text}\n',
        "e.csv": f"prompt,{text.splitlines()[0]}\nx\n",
        "f.parquet": text,
        "g.jsonl.gz": text,
        "h.txt": text,
        "i.jsonl": json.dumps({"prompt": [text], "chosen": {text: text}, "rejected": 1}) + "\n",
        f"j.{file_name(text)}": text,
    }
    for name, content in contents.items():
        (work / "data" / name).write_text(content)
    return [
        *(("data", f"data/{name}") for name in contents),
        ("score", "run/rm/artifacts/model", "data/i.jsonl"),
        ("generate", "run/base/artifacts/model", "data/a.jsonl"),
        ("generate", "run/base/artifacts/model", "data/b.jsonl"),
    ]


def _models(work: Path, text: str, env: Environment) -> Commands:
    """Put the text into every field of a model's files, one file at a time."""
    commands: Commands = []
    model = work / "run/base/artifacts/model"
    for file in ("config.json", "tokenizer_config.json", "generation_config.json"):
        if not (model / file).exists():
            continue
        before = json.loads((model / file).read_text())
        for field in [*list(before)[:8], text]:
            place = work / f"model{len(commands)}"
            shutil.copytree(model, place)
            (place / file).write_text(json.dumps({**before, field: text}))
            commands.append(("generate", place.name, "--prompt", "say", "--max_completion_length", "2"))
    return commands[:16]


def _vocabulary(work: Path, text: str, env: Environment) -> Commands:
    """Make every token of a model the text: what it writes is hostile."""
    file = work / "run/base/artifacts/model/tokenizer.json"
    content = json.loads(file.read_text())
    kept = [token["content"] for token in content["added_tokens"]]
    words = content["model"]["vocab"]
    content["model"]["vocab"] = {w if w in kept else f"{text}{i}": i for w, i in words.items()}
    file.write_text(json.dumps(content))
    model = "run/base/artifacts/model"
    policy = runs.GRPO.replace('"base.model"', toml_string(model)) + "eval_on_start = true\n"
    write_pipeline(work, policy)
    shutil.rmtree(work / "other", ignore_errors=True)
    return [
        ("generate", model, "--prompt", "say", "--max_completion_length", "8"),
        ("generate", model, "data/prompts.heldout.jsonl", "--max_completion_length", "8"),
        ("run", "p.toml"),
    ]


def _templates(work: Path, text: str, env: Environment) -> Commands:
    quoted = json.dumps(text)
    contents = [
        f"{{{{ raise_exception({quoted}) }}}}",
        f"{{% {text} %}}",
        f"{{{{ messages[{quoted}].x.y }}}}",
        f"{{{{ {quoted}|int|wordwrap(0) }}}}{{{{ {quoted}.{'x' * 5}() }}}}",
        f"{{{{ {quoted}|nosuch }}}}",
        f"{{% include {quoted} %}}",
    ]
    row = {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "say"}]}
    (work / "data/chat.jsonl").write_text(json.dumps(row) + "\n")
    commands: Commands = []
    for i, content in enumerate(contents):
        (work / f"t{i}.jinja").write_text(content)
        settings = ("--chat_template", f"t{i}.jinja")
        commands.append(("data", "data/chat.jsonl", "--tokenizer", "data/tokenizer", *settings))
        commands.append(("generate", "run/base/artifacts/model", "--prompt", "x", *settings))
    return commands


PLUGIN = """
from dataclasses import dataclass
from rlhf_core import LOGGER, POLICY_LOSS, REWARD, LossOutput, TRAINER, Trainer, TrainerConfig, hookimpl
import logging, warnings
TEXT = {text!r}.replace(":", ";")

@dataclass(frozen=True)
class Loss:
    def __call__(self, inputs):
        loss = -inputs.logps * inputs.advantages
        return LossOutput(loss, {{TEXT: loss}})

class Config(TrainerConfig):
    '''{doc}'''

def fail(config, stage):
    {how}

def reward(completions, **_):
    return [1.0] * len(completions)

def raising(completions, **_):
    raise ValueError(TEXT)

def wrong(completions, **_):
    return [TEXT] * len(completions)

class Sink:
    @hookimpl
    def rlhf_step_end(self, step, metrics):
        raise RuntimeError(TEXT)

@hookimpl
def rlhf_register(registry):
    registry.add(POLICY_LOSS, "mine", Loss)
    registry.add(LOGGER, "sink", Sink)
    registry.add(TRAINER, "failing", Trainer(Config, {{}}, fail))
    registry.add(REWARD, TEXT, reward)
    registry.add(TRAINER, TEXT, Trainer(Config, {{}}, fail))
"""


def _write_plugin(work: Path, text: str, how: str = "raise RuntimeError(TEXT)") -> None:
    (work / "plugin.py").write_text(PLUGIN.format(text=text, how=how, doc="Nothing."))


def _plugins(work: Path, text: str, env: Environment) -> Commands:
    _write_plugin(work, text)
    (work / "broken.py").write_text(f"raise ImportError({text!r})\n")
    (work / "warns.py").write_text(
        f"import warnings, logging\nwarnings.warn({text!r})\nlogging.warning({text!r})\n"
    )
    quoted = toml_string(text)
    info = work / "site/hostile-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: hostile{text.splitlines()[0]}\nVersion: 1{text[:4]}\n"
    )
    (info / "entry_points.txt").write_text(f"[rlhf]\nx{file_name(text)} = no_such_module\n", errors="replace")
    env["PYTHONPATH"] = f"{work / 'site'}:{os.environ['PYTHONPATH']}"
    stage = runs.SFT.replace('trainer = "sft"', f"trainer = {quoted}").replace(
        quoted + "\nmodel", quoted + "\n#"
    )
    write_pipeline(work, re.sub(r"(?m)^(total|learning|max|save|log|train).*\n", "", stage))
    return [
        ("plugins", "--plugin", "plugin.py"),
        ("plugins", "--plugin", "plugin.py", "--json"),
        ("plugins", "--plugin", "broken.py"),
        ("check", "p.toml", "--plugin", "broken.py"),
        ("check", "p.toml", "--plugin", "warns.py"),
        ("train", text.replace(":", ";"), "--help", "--plugin", "plugin.py"),
        ("train", "reward\x1b[2J", "--help", "--plugin", "plugin.py"),
        ("new", "reward", text),
    ]


def _failures(work: Path, text: str, env: Environment) -> Commands:
    """Let trainers, loggers and rewards raise the text, expected or not."""
    _write_plugin(work, text)
    policy = runs.GRPO.replace('"base.model"', '"run/base/artifacts/model"').replace(
        "max_training_steps = 8", "max_training_steps = 2"
    )

    def rewards(listed: str) -> str:
        return policy.replace('["data/rewards.py:right"]', f"[{listed}]")

    good = '"data/rewards.py:right"'
    stages = {
        "trainer": '[[stage]]\nname = "a"\ntrainer = "failing"\n',
        "logger": policy + 'logger = [{ name = "sink" }]\n',
        "loss": policy + 'loss = { name = "mine" }\n',
        "raising": rewards('{ name = "plugin.py:raising", check = false }'),
        "worker": rewards('{ name = "plugin.py:raising", timeout = 20, check = false }'),
        "skip": rewards(f'{{ name = "plugin.py:raising", on_error = "skip" }}, {good}'),
        "wrong": rewards('{ name = "plugin.py:wrong", check = false }'),
        "label": rewards(f'{{ name = "data/rewards.py:right", label = {toml_string(text)} }}'),
        "column": rewards('{ name = "exact_match" }'),
    }
    commands: Commands = []
    for name, stage in stages.items():
        (work / f"{name}.toml").write_text(f'dir = "r-{name}"\n{stage}')
        commands.append(("run", f"{name}.toml", "--plugin", "plugin.py"))
    return commands


def _variables(work: Path, text: str, env: Environment) -> Commands:
    stage = f'{runs.SFT}logger = [{{ name = "wandb", project = {{ env = {toml_string(text)} }} }}]\n'
    write_pipeline(work, STEPS.sub("max_training_steps = 1", stage))
    shutil.copytree(work, work / "w")
    (work / "q.toml").write_text(
        'dir = "q"\n'
        + STEPS.sub("max_training_steps = 1", runs.SFT)
        + f'logger = [{{ name = "wandb", mode = "offline", project = {toml_string(text)} }}]\n'
    )
    safe = text.replace("\x00", "")
    env |= {
        "RLHF_DISABLE_PLUGINS": safe,
        "WANDB_MODE": safe,
        "WANDB_ENTITY": safe,
        "XDG_CACHE_HOME": f"c{file_name(safe)}",
    }
    return [("check", "p.toml"), ("run", "q.toml"), ("plugins",)]


def _odd_runs(work: Path, text: str, env: Environment) -> Commands:
    """Put the text into what a run directory's files say, and read it again."""
    plant_text(work / "run", text)
    (work / "odd").mkdir()
    (work / "odd/events.jsonl").write_text(text)
    (work / "run/base/stage.json").write_text(json.dumps({"state": text, "config": {text: text}}))
    return [
        ("report", "run"),
        ("report", "odd"),
        ("compare", "run", "odd"),
        ("run", "p.toml"),
        ("check", "p.toml"),
    ]


DOORS: dict[str, Callable[[Path, str, Environment], Commands]] = {
    "cells": _cells,
    "columns": _columns,
    "messages": _messages,
    "files": _files,
    "bytes": _bytes,
    "names": _names,
    "arguments": _arguments,
    "urls": _urls,
    "broken data": _broken_data,
    "models": _models,
    "vocabulary": _vocabulary,
    "templates": _templates,
    "plugins": _plugins,
    "failures": _failures,
    "variables": _variables,
    "odd runs": _odd_runs,
}
MAY_RAISE = {"failures"}
"""Doors behind which a component raises what is no message for a user, so that a traceback is right."""


def judge_terminal(case: Case, work: Path, name: str) -> None:
    """Run a door's commands on a terminal, with all payloads at once."""
    environment: Environment = {"HOME": str(work), "HF_HUB_OFFLINE": "1"}
    for arguments in DOORS[name](work, EVERYTHING, environment):
        code, sent = on_terminal(*arguments, cwd=work, env=environment)
        case.count("outputs")
        case.count(f"exits with {code}")
        shown = ascii(" ".join(arguments)[:80])
        for what in smuggled(sent)[:3]:
            case.fail(f"{shown}: {what}")
        if b"Traceback (most recent call last)" in sent and name not in MAY_RAISE:
            case.fail(f"{shown}: a traceback: {sent[-1500:]!r}")
        if code < 0:
            case.fail(f"{shown}: ended with {code}")
