"""Secrets: none is in what is printed, nor in a file that is written."""

from __future__ import annotations

import base64
import gzip
import json
import re
from collections.abc import Iterator
from pathlib import Path

from tests.torture import runs
from tests.torture.children import rlhf
from tests.torture.experiment import Case
from tests.torture.hostile.inputs import STEPS, Commands

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

def toml_string():
    return " ".join(os.environ[name] for name in NAMES)

@dataclass
class Sink:
    api_key: str = ""
    pin: SecretStr | None = None
    url: str = ""

    @hookimpl
    def rlhf_step_end(self, step, metrics):
        text = f"{{self.api_key}} {{self.pin.get_secret_value() if self.pin else ''}} {{self.url}} {{toml_string()}}"
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
        raise ConnectionError(f"the judge refused {{api_key}} {{toml_string()}}")
    return [1.0] * len(completions)

def lies(completions, api_key="", **_):
    return [toml_string()] * len(completions)

@hookimpl
def rlhf_register(registry):
    registry.add(LOGGER, "sink", Sink)
    registry.add(REWARD, "grader", judge)
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


def judge_secret(case: Case, work: Path, door: str) -> None:
    """Run with canaries in the environment, in options and in arguments, and look for them in all that is written."""
    how = door.removesuffix(" here")
    (work / "plugin.py").write_text(SECRET_PLUGIN.format(how=how, names=list(CANARIES)))
    sink = f'{{ name = "sink", pin = "{TYPED}", api_key = "{TYPED}2", url = {{ env = "SINK_KEY" }} }}'
    limit = "" if door.endswith("here") else ", timeout = 20"
    reward = f'{{ name = "grader", api_key = {{ env = "SINK_KEY" }}, check = false{limit} }}'
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
