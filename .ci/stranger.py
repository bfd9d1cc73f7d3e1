"""Install what `make dist` built as a stranger does, without the checkout, and use it.

    python .ci/stranger.py DIST [--python python3.12] [--quick]

In an empty environment, from the directory DIST and the package index that pip is set up for: rlhf-core with every
other distribution alone, then rlhf-suite with its commands (demo, new, report, serve, a pipeline of one's own). Prints
what each step took. --quick leaves the demo's training out: it writes and checks its pipeline.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

PIPELINE = """
dir = "runs/mine"

[[stage]]
name = "base"
trainer = "sft"
model = { model_type = "llama", hidden_size = 32, num_hidden_layers = 2, num_attention_heads = 2, \
intermediate_size = 64, tokenizer = "quickstart/data/tokenizer" }
train_data = "mine.jsonl"
total_batch_size = 4
max_training_steps = 3

[[stage]]
name = "policy"
trainer = "grpo"
model = "base.model"
train_data = "mine.jsonl"
rewards = ["my_reward.py:brevity"]
num_generations = 2
total_batch_size = 4
max_training_steps = 2
sampling = { max_completion_length = 8 }
"""
ROWS = [{"prompt": "Mia wants a red kite .", "completion": " Dear Mia , here is your red kite ."}] * 8
REWARD = "def brevity(completions, **columns):\n    return [-len(text) / 9 for text in completions]\n"

IMPORT_ALL = """
import importlib, pkgutil, sys
from importlib.metadata import requires
package = importlib.import_module(sys.argv[1].replace("-", "_"))
for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as error:  # what it needs is an extra, or missing in its metadata
        if error.name.replace("_", "-") not in " ".join(requires(sys.argv[1])):
            raise
"""

LIBRARIES = ("rlhf-http",)
"""Distributions that register nothing: others import them."""


class Stranger:
    """An empty directory with a virtual environment."""

    def __init__(self, place: Path, dist: Path, python: str) -> None:
        self.place, self.dist = place, dist
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "RLHF_", "VIRTUAL_ENV"))}
        self.environment = {**kept, "PATH": f"{place / 'venv/bin'}:{os.environ['PATH']}"}
        self.run(python, "-m", "venv", place / "venv")

    def run(self, *command: str | Path) -> str:
        """Run a command in the directory; return what it printed. Ends everything where it fails."""
        began = time.monotonic()
        done = subprocess.run(
            list(map(str, command)), cwd=self.place, env=self.environment, capture_output=True, text=True
        )
        words = (str(each).replace(str(self.place), ".") for each in command)
        line = " ".join(word.strip().partition("\n")[0] for word in words)
        print(f"$ {line}  # {time.monotonic() - began:.0f} s", flush=True)
        if done.returncode:
            sys.exit(f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}")
        return done.stdout

    def install(self, *names: str) -> None:
        self.run("pip", "install", "--quiet", "-f", self.dist, *names)

    def installed(self) -> dict[str, str]:
        listed = json.loads(self.run("pip", "list", "--format", "json"))
        return {each["name"]: each["version"] for each in listed}

    def megabytes(self) -> int:
        files = (self.place / "venv/lib").rglob("*")
        return sum(f.stat().st_size for f in files if f.is_file() and not f.is_symlink()) // 10**6


def serves(stranger: Stranger, model: Path) -> None:
    """Start `rlhf serve`, ask for a completion, and stop it."""
    command = ["rlhf", "serve", str(model), "--port", "0"]
    began = time.monotonic()
    with subprocess.Popen(
        command,
        cwd=stranger.place,
        env=stranger.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as server:
        assert server.stdout is not None
        said = ""
        for said in server.stdout:
            if found := re.search(r"http://\S+:(\d+)", said):
                break
        else:
            sys.exit(f"rlhf serve ended: {said}")
        address = f"http://127.0.0.1:{found[1]}/v1"
        with urllib.request.urlopen(f"{address}/models") as answer:
            (only,) = json.load(answer)["data"]
        body = json.dumps({"model": only["id"], "prompt": "Mia wants a red kite .", "max_tokens": 4}).encode()
        asked = urllib.request.Request(f"{address}/completions", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(asked, timeout=300) as answer:
            assert json.load(answer)["choices"][0]["finish_reason"] in ("length", "stop")
        server.send_signal(signal.SIGTERM)
        server.stdout.read()
    assert server.returncode == 0, server.returncode
    print(f"$ {' '.join(command)}  # {time.monotonic() - began:.0f} s, a completion, SIGTERM", flush=True)


def alone(stranger: Stranger, names: list[str]) -> None:
    """Install core, then every other distribution with what it says that it needs, and nothing else."""
    stranger.install("rlhf-core")
    before = stranger.installed()
    print(f"{len(before)} distributions, {stranger.megabytes()} MB", flush=True)
    stranger.run("rlhf", "--help")
    stranger.run("rlhf", "plugins")
    for name in names:
        stranger.install(name)
        listed = {
            each["distribution"]: each for each in json.loads(stranger.run("rlhf", "plugins", "--json"))
        }
        if name in LIBRARIES:
            assert name not in listed, listed[name]
        else:
            assert listed[name]["state"] == "loaded", listed[name]
        stranger.run("python", "-c", IMPORT_ALL, name)
        for command in listed.get(name, {"components": {}})["components"].get("command", ()):
            stranger.run("rlhf", command, "--help")
        installed = stranger.installed()
        assert before.items() <= installed.items(), "it changes what core installed"
        added = sorted(installed.keys() - before.keys())
        print(f"{name}: {', '.join(added)}", flush=True)
        stranger.run("pip", "uninstall", "--quiet", "--yes", *added)


def suite(stranger: Stranger, *, quick: bool) -> None:
    """Install rlhf-suite and use its commands."""
    stranger.install("rlhf-suite")
    print(f"{len(stranger.installed())} distributions, {stranger.megabytes()} MB", flush=True)
    stranger.run("python", "-c", "import rlhf_core")
    stranger.run("rlhf", "--help")
    stranger.run("rlhf", "plugins")
    print(stranger.run("rlhf", "doctor"))
    stranger.run("rlhf", "schema", "-o", "pipeline.schema.json")
    stranger.run("rlhf", "demo", "--write", "quickstart")
    stranger.run("rlhf", "check", "quickstart/quickstart.toml")
    if not quick:
        table = stranger.run("rlhf", "demo")
        print("\n".join(line for line in table.splitlines() if line.lstrip().startswith(("right", "Wall"))))
        stranger.run("rlhf", "report", "runs/quickstart-seed0")
    (stranger.place / "mine.toml").write_text(PIPELINE)
    (stranger.place / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (stranger.place / "my_reward.py").write_text(REWARD)
    stranger.run("rlhf", "check", "mine.toml")
    stranger.run("rlhf", "run", "mine.toml")
    stranger.run("rlhf", "report", "runs/mine")
    serves(stranger, Path("runs/mine/policy/artifacts/model"))
    stranger.run("rlhf", "new", "reward", "concise")
    stranger.install("./rlhf-concise[test]")
    stranger.run("python", "-m", "pytest", "-q", "rlhf-concise")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("dist", type=Path)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    dist = arguments.dist.resolve()
    names = sorted(path.name.split("-")[0].replace("_", "-") for path in dist.glob("*.whl"))
    names = [name for name in names if name not in ("rlhf-core", "rlhf-suite")]
    with tempfile.TemporaryDirectory(prefix="stranger-") as place:
        stranger = Stranger(Path(place), dist, arguments.python)
        alone(stranger, names)
        suite(stranger, quick=arguments.quick)


if __name__ == "__main__":
    main()
