"""Hostile texts through every door: terminals, report pages, chat templates, and secrets in what is written.

Nothing that a text holds drives a terminal, no page runs a script or asks for anything, no template reaches Python, and
no secret is in a file or in the output.
"""

from __future__ import annotations

import base64
import gzip
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torture import browser, runs
from torture.children import Child, rlhf
from torture.experiment import Case, Skipped, Trial
from torture.terminal import EVERYTHING, on_terminal, smuggled

SHARE = 1.5
PREPARED = "prepared"
STEPS = re.compile(r"max_training_steps = \d+")


def run(trial: Trial) -> None:
    names = [f"terminal {door}" for door in DOORS]
    names += [f"template {name}" for name in TEMPLATES]
    names += [f"secret {door}" for door in SECRET_DOORS]
    names += [f"page {name}" for name in browser.HTML]
    trial.random().shuffle(names)
    directory = Path(tempfile.mkdtemp(prefix="torture-hostile-"))
    try:
        prepared = directory / PREPARED
        runs.write(prepared, runs.SFT, runs.REWARD, runs.GRPO)
        ended = rlhf("run", "p.toml", cwd=prepared).wait(240)
        if ended.code:
            raise RuntimeError(f"the run from which the others are made {ended}")
        try:
            browser.chromium()
            control = Child(_require_detection, directory).wait(
                240
            )  # its threads must not be in the forking process
            if control.code:
                raise RuntimeError(f"the page that does what no page may do {control}")
        except Skipped as skipped:
            print(f"    {skipped}: no page is opened, but each is read", flush=True)
        trial.each(names, lambda case: _judge(case, prepared), seconds=900)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _require_detection(directory: Path) -> None:
    """Open a page that does what no page may do, so that a count of nothing means something."""
    page = directory / "control.html"
    page.write_text(
        f"<title>x</title>{browser.HTML['script']}{browser.HTML['image']}{browser.HTML['style']}", "utf-8"
    )
    shown, asked = browser.open_page(page)
    if "<title>owned</title>" not in shown or len(set(asked)) < 3:
        raise RuntimeError(f"the browser does not show what a hostile page does: {asked} {shown[:500]}")


def _judge(case: Case, prepared: Path) -> None:
    sort, _, name = case.name.partition(" ")
    work = case.directory / "work"
    shutil.copytree(prepared, work)
    {"terminal": _judge_terminal, "template": _judge_template, "secret": _judge_secret, "page": _judge_page}[
        sort
    ](case, work, name)


# Terminals


def _judge_terminal(case: Case, work: Path, name: str) -> None:
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


Commands = list[tuple[str, ...]]
Environment = dict[str, str | None]


def _quoted(text: str) -> str:
    """Quote for TOML."""
    return json.dumps(text).replace("\x7f", "\\u007f")


def _file_name(text: str) -> str:
    return text.replace("/", "|")[:80]


def _pipeline(work: Path, *stages: str) -> None:
    (work / "p.toml").write_text('dir = "other"\n' + "".join(stages))


def _rows(path: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    rows = [change(json.loads(line)) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _cells(work: Path, text: str, env: Environment) -> Commands:
    for name in ("corpus", "prompts", "prompts.heldout", "pairs"):
        _rows(
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
    _rows(work / "data/corpus.jsonl", lambda row: {f"{key}{text}": value for key, value in row.items()})
    _rows(work / "data/prompts.jsonl", lambda row: {**row, text: 1, "word": [text]})
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
    _pipeline(work, runs.SFT.replace("train_data", 'chat_template = "plain"\ntrain_data'))
    commands: Commands = []
    for i, row in enumerate(rows):
        (work / f"data/{i}.jsonl").write_text(json.dumps(row) + "\n")
        commands.append(
            ("data", f"data/{i}.jsonl", "--tokenizer", "data/tokenizer", "--chat_template", "plain")
        )
    return [*commands, ("check", "p.toml"), ("run", "p.toml")]


def _files(work: Path, text: str, env: Environment) -> Commands:
    name = _file_name(text)
    (work / "data/corpus.jsonl").rename(work / "data" / name)
    stage = runs.SFT.replace('"data/corpus.jsonl"', _quoted(f"data/{name}"))
    _pipeline(work, stage)
    (work / "missing.toml").write_text(
        f"dir = {_quoted(name)}\n" + stage.replace("train_data = ", "train_data = [").replace(name, name)
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
    quoted = _quoted(text)
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
        runs.SFT.replace(runs.MODEL, _quoted(f"base.{text}")),
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
    _pipeline(work, runs.SFT.replace(runs.MODEL, _quoted(url)))
    (work / "q.toml").write_text(
        'dir = "q"\n' + runs.SFT.replace('"data/corpus.jsonl"', _quoted(f"someone/{text}"))
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
        f"j.{_file_name(text)}": text,
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
    policy = runs.GRPO.replace('"base.model"', _quoted(model)) + "eval_on_start = true\n"
    _pipeline(work, policy)
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
    quoted = _quoted(text)
    info = work / "site/hostile-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: hostile{text.splitlines()[0]}\nVersion: 1{text[:4]}\n"
    )
    (info / "entry_points.txt").write_text(
        f"[rlhf]\nx{_file_name(text)} = no_such_module\n", errors="replace"
    )
    env["PYTHONPATH"] = f"{work / 'site'}:{os.environ['PYTHONPATH']}"
    stage = runs.SFT.replace('trainer = "sft"', f"trainer = {quoted}").replace(
        quoted + "\nmodel", quoted + "\n#"
    )
    _pipeline(work, re.sub(r"(?m)^(total|learning|max|save|log|train).*\n", "", stage))
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
        "label": rewards(f'{{ name = "data/rewards.py:right", label = {_quoted(text)} }}'),
        "column": rewards('{ name = "exact_match" }'),
    }
    commands: Commands = []
    for name, stage in stages.items():
        (work / f"{name}.toml").write_text(f'dir = "r-{name}"\n{stage}')
        commands.append(("run", f"{name}.toml", "--plugin", "plugin.py"))
    return commands


def _variables(work: Path, text: str, env: Environment) -> Commands:
    stage = f'{runs.SFT}logger = [{{ name = "wandb", project = {{ env = {_quoted(text)} }} }}]\n'
    _pipeline(work, STEPS.sub("max_training_steps = 1", stage))
    shutil.copytree(work, work / "w")
    (work / "q.toml").write_text(
        'dir = "q"\n'
        + STEPS.sub("max_training_steps = 1", runs.SFT)
        + f'logger = [{{ name = "wandb", mode = "offline", project = {_quoted(text)} }}]\n'
    )
    safe = text.replace("\x00", "")
    env |= {
        "RLHF_DISABLE_PLUGINS": safe,
        "WANDB_MODE": safe,
        "WANDB_ENTITY": safe,
        "XDG_CACHE_HOME": f"c{_file_name(safe)}",
    }
    return [("check", "p.toml"), ("run", "q.toml"), ("plugins",)]


def _odd_runs(work: Path, text: str, env: Environment) -> Commands:
    """Put the text into what a run directory's files say, and read it again."""
    _plant(work / "run", text)
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


# Pages


def _judge_page(case: Case, work: Path, name: str) -> None:
    """Plant a text in all that a run's files say, and read and open its pages."""
    text = browser.HTML[name]
    run = work / _file_name(f"run{text}")
    os.rename(work / "run", run)
    _plant(run, text)
    shutil.copytree(run, work / "second")
    ended = [
        rlhf("report", str(run), "-o", "report.html", cwd=work).wait(),
        rlhf("compare", str(run), "second", "-o", "compare.html", cwd=work).wait(),
    ]
    for each in ended:
        case.require(each.code == 0, f"{each}")
    for page in (work / "report.html", work / "compare.html"):
        content = page.read_text(encoding="utf-8")
        case.require(
            browser.escaped_beginning(text) in content or page.name == "compare.html",
            f"{page.name} has no text",
        )
        for what in browser.foreign_elements(content)[:5]:
            case.fail(f"{page.name}: {what}")
        case.count("pages")
        if not _has_browser():
            continue
        unprotected = page.with_name(f"unprotected-{page.name}")
        unprotected.write_text(re.sub(r"<meta http-equiv=[^>]*>", "", content), encoding="utf-8")
        for path in (page, unprotected):
            shown, asked = browser.open_page(path)
            title = re.search(r"<title>(.*?)</title>", shown, re.DOTALL)
            if title is None or title[1] == "owned" or " · rlhf" not in title[1]:
                case.fail(f"{path.name}: a script has run, the title is {title and title[1]!r}")
            if asked:
                case.fail(f"{path.name}: asks for {asked}")
            case.count("openings")


def _has_browser() -> bool:
    try:
        return bool(browser.chromium())
    except Skipped:
        return False


def _plant(run: Path, text: str) -> None:
    """Write a text into every string of a run's files that a page shows, and add a conversation."""
    from rlhf_core.runtime.files import seal, unseal

    def planted(value: Any) -> Any:
        if isinstance(value, str):
            return f"{value}{text}"
        if isinstance(value, list):
            return [planted(each) for each in value]
        if isinstance(value, dict):
            return {key: planted(each) for key, each in value.items()}
        return value

    call = {"function": {"name": text, "arguments": {text: text}}}
    for file in run.rglob("samples/*.jsonl"):
        _rows(
            file,
            lambda row: {
                **planted(row),
                "rewards": {f"{k}{text}": v for k, v in row.get("rewards", {}).items()},
            },
        )
        said = [
            {"role": f"assistant{text}", "content": text, "tool_calls": [call], "call_errors": [text]},
            {"role": "assistant", "content": text, "tool_calls": [call]},
            {"role": "tool", "name": text, "content": text},
        ]
        episode = {
            "prompt": [{"role": "user", "content": text}],
            "completion": said,
            "turns": [{"tokens": 3, "reward": 1.0}],
            "reward": 1.0,
            "failure": text,
        }
        if file.parent.parent.name == "policy":
            file.write_text(file.read_text() + json.dumps(episode) + "\n")
    for file in run.rglob("metrics.jsonl"):
        _rows(file, lambda row: {**row, f"reward{text}": float(row["step"]), f"x/{text}": 1.0 * row["step"]})
    for file in run.rglob("events.jsonl"):
        _rows(file, lambda row: {k: planted(v) if k in ("message", "machine") else v for k, v in row.items()})
        event = {"time": 1.0, "stage": f"policy{text}", "event": "warning", "message": text}
        file.write_text(file.read_text() + json.dumps(event) + "\n")
    for file in run.rglob("stage.json"):
        record = unseal(file.read_bytes())
        record["config"] = {**planted(record["config"]), text: text, "model": text}
        record["versions"] = planted(record.get("versions", {}))
        file.write_text(seal(record))
    with (run / "pipeline.resolved.toml").open("a") as file:
        file.write(f"# {text}".replace("\n", " ").replace("\r", " ") + "\n")


# Templates

MARKER = "reached-python"
TEMPLATES = {
    "class": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ cycler.__init__.__globals__.os.system('touch reached-python') }}",
    "namespace": "{{ namespace.__init__.__globals__['__builtins__']['open']('reached-python','w') }}",
    "attr": "{{ messages|attr('__class__')|attr('__init__') }}",
    "map": "{{ messages|map(attribute='__class__')|list }}",
    "format": "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}",
    "format map": "{{ '{a.__class__}'.format_map({'a': messages}) }}",
    "format filter": "{{ '%s'|format(messages.__class__) }}",
    "function": "{{ raise_exception.__globals__ }}",
    "code": "{{ strftime_now.__code__ }}{{ strftime_now.__globals__['os'].system('touch reached-python') }}",
    "generator": "{% set g = (messages|map('upper')) %}{{ g.gi_frame.f_globals }}",
    "self": "{{ self._TemplateReference__context }}{{ self.__init__.__globals__ }}",
    "loop": "{% for x in messages recursive %}{{ loop.__init__.__globals__ }}{% endfor %}",
    "mutation": "{{ messages.append(1) }}{{ messages[0].update(x=1) }}",
    "include": "{% include '/etc/passwd' %}",
    "import": "{% import 'os' as os %}{{ os.system('touch reached-python') }}",
    "extends": "{% extends '/etc/passwd' %}",
    "range": "{% for x in range(10**9) %}{% endfor %}",
    "size": "{{ 'x' * 10**15 }}",
    "power": "{{ (10**10)|string|length }}{{ '%0*d' % (10**14, 1) }}",
    "padding": "{{ 'x'|center(10**15) }}",
    "recursion": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "items": "{{ messages|dictsort }}",
    "attributes": "{{ messages|xmlattr }}",
    "codec": "{{ 'x'.encode('no-such') }}{{ 'x'.encode('idna') }}",
    "none": "{{ none|length }}{{ none + 1 }}",
    "nested": "{{ " + "(" * 300 + "1" + ")" * 300 + " }}",
    "nested lists": "{{ " + "[" * 5000 + "]" * 5000 + " }}",
    "surrogate": "{{ '\\ud800' }}{{ messages[0].content }}",
    "division": "{{ 1 // 0 }}",
    "digits": "{{ (10**5000)|string }}{{ '1' * 5000|int }}{{ ('1' * 5000)|int }}",
    "dates": "{{ strftime_now('%' * 10000) }}{{ strftime_now('\\x00') }}{{ strftime_now(1) }}",
    "json": "{{ messages|tojson(indent=10**12) }}{{ raise_exception|tojson }}",
    "shuffle": "{{ messages|random }}{{ lipsum(n=2) }}{{ messages|batch(0)|list }}{{ 'x'|truncate(-1) }}",
    "sort": "{{ [1, 'a', none]|sort }}{{ messages|groupby('role.x.y')|list }}{{ messages|sum }}",
}


def _judge_template(case: Case, work: Path, name: str) -> None:
    """Render conversations with a hostile template: it ends with a message, and nothing else has happened."""
    (work / "t.jinja").write_text(TEMPLATES[name])
    row = {"messages": [{"role": "user", "content": "say"}, {"role": "assistant", "content": "kite"}]}
    (work / "chat.jsonl").write_text((json.dumps(row) + "\n") * 3)
    model = work / "run/base/artifacts/model"
    (model / "chat_template.jinja").write_text(TEMPLATES[name])
    _pipeline(work, runs.SFT.replace("data/corpus.jsonl", "chat.jsonl") + 'chat_template = "t.jinja"\n')
    commands = (
        ("data", "chat.jsonl", "--tokenizer", "data/tokenizer", "--chat_template", "t.jinja"),
        ("generate", str(model), "--prompt", "x", "--max_completion_length", "2"),
        ("generate", str(model), "chat.jsonl", "--max_completion_length", "2"),
        ("check", "p.toml"),
    )
    for arguments in commands:
        ended = Child(_limited, arguments, cwd=work).wait(60)
        case.count("renderings")
        if ended.traceback or ended.code not in (0, 1, 2):
            case.fail(f"{arguments[0]}: {str(ended)[-1500:]}")
        for word in ("root:x:0", "<class '", "<function", "module 'os'", "__builtins__"):
            if word in ended.out:
                case.fail(f"{arguments[0]} shows {word}")
    if list(work.rglob(MARKER)):
        case.fail("a template has run a command")


def _limited(arguments: tuple[str, ...]) -> None:
    """Run the command with at most 12 GiB of addresses, so that no template takes the machine's memory."""
    import resource
    import sys

    from rlhf_core import cli

    resource.setrlimit(resource.RLIMIT_AS, (12 << 30, 12 << 30))
    sys.argv = ["rlhf", *arguments]
    cli.main()


# Secrets

CANARIES = {
    "WANDB_API_KEY": "canary1" * 5 + "abcde",
    "HF_TOKEN": "hf_canary2canary2canary2canary2can",
    "OPENAI_API_KEY": "sk-canary3-canary3-canary3",
    "AWS_SECRET_ACCESS_KEY": "canary4/canary4+canary4=",
    "JUDGE_PASSWORD": 'canary5"quoted\\ü',
    "SINK_KEY": "canary6-named-in-the-pipeline",
}
TYPED = "canary7-typed-in-the-pipeline"
GIVEN = "canary8-given-on-the-command-line"
SECRET_PLUGIN = """
from dataclasses import dataclass
import os, warnings
from pydantic import SecretStr
from rlhf_core import LOGGER, REWARD, TRAINER, Trainer, TrainerConfig, hookimpl
from rlhf_core.errors import RunError

HOW = {how!r}
NAMES = {names!r}

def quoted():
    return " ".join(os.environ[name] for name in NAMES)

@dataclass
class Sink:
    api_key: str = ""
    pin: SecretStr | None = None
    url: str = ""

    @hookimpl
    def rlhf_step_end(self, step, metrics):
        text = f"{{self.api_key}} {{self.pin.get_secret_value() if self.pin else ''}} {{self.url}} {{quoted()}}"
        if HOW == "warn":
            warnings.warn(f"the service refused {{text}}")
        if HOW == "error":
            raise RunError(f"the service refused {{text}}")
        if HOW == "traceback":
            raise ConnectionError(f"the service refused {{text}}")
        if HOW == "cause":
            try:
                raise ConnectionError(f"the service refused {{text}}")
            except ConnectionError as error:
                raise KeyError("x") from error

def judge(completions, api_key="", **_):
    if HOW == "reward":
        raise ConnectionError(f"the judge refused {{api_key}} {{quoted()}}")
    return [1.0] * len(completions)

def lies(completions, api_key="", **_):
    return [quoted()] * len(completions)

@hookimpl
def rlhf_register(registry):
    registry.add(LOGGER, "sink", Sink)
    registry.add(REWARD, "judge", judge)
"""
SECRET_DOORS = (
    "quiet",
    "warn",
    "error",
    "traceback",
    "cause",
    "reward",
    "reward here",
    "lies",
    "wandb",
    "command line",
    "mistakes",
    "flags",
    "import",
)


def _judge_secret(case: Case, work: Path, door: str) -> None:
    """Run with canaries in the environment, in options and in arguments, and look for them in all that is written."""
    how = door.removesuffix(" here")
    (work / "plugin.py").write_text(SECRET_PLUGIN.format(how=how, names=list(CANARIES)))
    sink = f'{{ name = "sink", pin = "{TYPED}", api_key = "{TYPED}2", url = {{ env = "SINK_KEY" }} }}'
    limit = "" if door.endswith("here") else ", timeout = 20"
    reward = f'{{ name = "judge", api_key = {{ env = "SINK_KEY" }}, check = false{limit} }}'
    if door == "lies":
        reward = '{ name = "plugin.py:lies", check = false, timeout = 20 }'
    sft = STEPS.sub("max_training_steps = 1", runs.SFT).replace("save_steps = 2", "save_steps = 1")
    policy = STEPS.sub("max_training_steps = 1", runs.GRPO).replace('"data/rewards.py:right"', reward)
    loggers = sink if door != "wandb" else f'{sink}, {{ name = "wandb", mode = "offline" }}'
    sft += f"logger = [{loggers}]\n"
    (work / "p.toml").write_text(f'dir = "secret"\n{sft}{policy}')
    environment: dict[str, str | None] = {
        **CANARIES,
        "HOME": str(work / "home"),
        "XDG_CACHE_HOME": str(work / "cache"),
        "RLHF_CACHE": str(work / "cache/data"),
        "TMPDIR": str(work),
        "HF_HUB_OFFLINE": "1",
    }
    inputs = {path: path.read_bytes() for path in (work / "p.toml", work / "plugin.py")}
    for arguments in _secret_commands(work, door):
        ended = rlhf(*arguments, cwd=work, env=environment).wait(150)
        case.count("commands")
        for name, secret in _secrets():
            if secret in ended.out + ended.err:
                case.fail(f"{arguments[0]} prints {name}: {_around(ended.out + ended.err, secret)}")
        if door == "quiet" and ended.code:
            case.fail(f"{ended}")
    for path in sorted(work.rglob("*")):
        if not path.is_file() or path.is_symlink():
            continue
        content = path.read_bytes()
        if content == inputs.get(path) or path.parent.name == "inputs":
            continue
        case.count("files")
        for part in _unpacked(content):
            for name, secret in _secrets():
                if any(form in part for form in _forms(secret)):
                    case.fail(f"{path.relative_to(work)} holds {name}")


def _secrets() -> Iterator[tuple[str, str]]:
    yield from CANARIES.items()
    yield from (("a typed option", TYPED), ("an argument", GIVEN))


def _around(text: str, secret: str) -> str:
    place = text.index(secret)
    return repr(text[max(place - 200, 0) : place + 60])


def _forms(secret: str) -> list[bytes]:
    """List the forms in which a file may hold a text."""
    plain = secret.encode()
    return [
        plain,
        json.dumps(secret)[1:-1].encode(),
        base64.b64encode(plain)[:-4],
        secret.encode("utf-16-le"),
    ]


def _unpacked(content: bytes) -> Iterator[bytes]:
    """Yield a file's content, and what is compressed in it."""
    yield content
    for packed in re.findall(rb'<script type="text/plain"[^>]*>([^<]*)<', content):
        yield gzip.decompress(base64.b64decode(packed))
    if content[:2] == b"\x1f\x8b":
        yield gzip.decompress(content)


def _secret_commands(work: Path, door: str) -> Commands:
    plugin = ("--plugin", "plugin.py")
    ordinary: Commands = [
        ("check", "p.toml", *plugin),
        ("run", "p.toml", *plugin),
        ("report", "secret"),
        ("plugins", *plugin, "--json"),
    ]
    if door == "command line":
        given = ("--set", f"base.logger.0.api_key={GIVEN}", "--set", f"base.logger.0.pin={GIVEN}")
        return [
            ("check", "p.toml", *plugin, *given),
            ("run", "p.toml", *plugin, *given),
            ("report", "secret"),
        ]
    if door == "flags":
        flags = ("--model", "run/base/artifacts/model", "--train_data", "data/corpus.jsonl", "--dir", "flags")
        sink = ("--logger", "sink", "--logger.api_key", GIVEN, "--logger.pin", GIVEN)
        small = ("--max_training_steps", "1", "--total_batch_size", "4", "--max_sequence_length", "32")
        return [("train", "sft", *flags, *sink, *small, *plugin), ("report", "flags")]
    if door == "mistakes":
        base = (work / "p.toml").read_text()
        mistakes = {
            "m0": base.replace("pin = ", "pinn = "),
            "m1": base.replace(f'pin = "{TYPED}"', f'pin = ["{TYPED}"]'),
            "m2": base.replace(f'api_key = "{TYPED}2"', f'api_key = {{ value = "{TYPED}" }}'),
            "m3": base.replace('name = "sink"', 'name = "sinc"'),
            "m4": base.replace("log_steps = 1", f'log_steps = {{ api_key = "{TYPED}" }}'),
            "m5": base.replace(f'api_key = "{TYPED}2"', f'api_key = "{TYPED}'),
            "m6": base.replace(f'pin = "{TYPED}"', f'token = "{TYPED}"'),
        }
        inputs = work / "inputs"
        inputs.mkdir()
        for name, content in mistakes.items():
            (inputs / f"{name}.toml").write_text(
                content.replace('"data/', '"../data/').replace("plugin.py:", "../plugin.py:")
            )
        return [("check", f"inputs/{name}.toml", *plugin) for name in mistakes]
    if door == "import":
        (work / "inputs").mkdir()
        (work / "inputs/broken.py").write_text(
            "import os\nraise ValueError(f\"refused {os.environ['OPENAI_API_KEY']}\")\n"
        )
        return [
            ("plugins", "--plugin", "inputs/broken.py"),
            ("check", "p.toml", "--plugin", "inputs/broken.py"),
        ]
    return ordinary
