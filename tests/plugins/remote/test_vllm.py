"""GRPO with a real vLLM on CPUs, which `make test-engines` installs: every policy is published, proven and sampled.

Each fault is one that a user makes when starting an engine of version 0.32; what engines answer: test_engines.py.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest
from rlhf_grpo import GRPOConfig, GRPOTrainer
from rlhf_remote import engines

from rlhf_core import SAMPLER, InputError, RunError, installed_registry
from rlhf_core.errors import Stopped
from rlhf_core.models import fresh_model, load_model
from rlhf_core.rollouts import RolloutOptions
from rlhf_core.sampling import SamplingOptions
from rlhf_core.tokenizer import load_tokenizer

sampler: Any = partial(installed_registry().get, SAMPLER)
pytestmark = [pytest.mark.engines, pytest.mark.usefixtures("vllm")]

ENGINES = Path(os.environ.get("ENGINES", Path(__file__).parents[3] / ".engines"))
SETTINGS = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}
SIZES = {"hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 96}
LORA = {"rank": 4, "alpha": 8}
WITH_LORA = ("--enable-lora", "--max-loras", "3", "--max-lora-rank", "8")
READY_SECONDS = 600
TALK = """
from rlhf_core.contracts import Turn


class Talk:
    said = 0

    def reset(self, row, seed):
        return [{"role": "user", "content": row["prompt"]}]

    def step(self, completion):
        self.said += 1
        reward = float(len(set(completion["content"].split())))
        return Turn([{"role": "user", "content": "a b c"}], reward, done=self.said == 3)
"""


class Server:
    """`vllm serve MODEL` with flags; ready when it is made."""

    def __init__(
        self, model: Path, *flags: str, dtype: str = "float32", logps: str = "processed_logprobs"
    ) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url, self.log = f"http://127.0.0.1:{port}", model.with_name(f"{model.name}-{port}.log")
        self.command = [
            *(str(ENGINES / "bin" / "vllm"), "serve", str(model), "--host", "127.0.0.1", "--port", str(port)),
            *("--dtype", dtype, "--max-model-len", "64", "--max-num-seqs", "32", "--enforce-eager"),
            *("--served-model-name", "policy", "--logprobs-mode", logps, *flags),
        ]
        self.start()

    def start(self) -> None:
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                self.command, stdout=log, stderr=log, env={**os.environ, **SETTINGS}, start_new_session=True
            )
        until = time.monotonic() + READY_SECONDS
        while not self.answers():
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            assert time.monotonic() < until, self.log.read_text()[-3000:]
            time.sleep(0.5)

    def answers(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health").status_code == 200
        except httpx.HTTPError:
            return False

    def kill(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture(scope="module")
def vllm() -> None:
    if not (ENGINES / "bin" / "vllm").is_file():
        pytest.skip(f"no vLLM in {ENGINES}; make test-engines installs it")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vllm")


@pytest.fixture(scope="module")
def model(tiny: ModuleType, place: Path) -> Path:
    """With a generation_config.json that would filter what is sampled."""
    tiny.make_model(scale=6, **SIZES).save(place / "model")
    told = {"top_k": 2, "top_p": 0.5, "repetition_penalty": 1.5, "eos_token_id": 1}
    (place / "model" / "generation_config.json").write_text(json.dumps(told))
    return place / "model"


@pytest.fixture(scope="module")
def server(vllm: None, model: Path) -> Iterator[Server]:
    running = Server(model, *WITH_LORA)
    yield running
    running.kill()


@pytest.fixture(scope="module")
def ill_started(vllm: None, model: Path) -> Iterator[Server]:
    """Of another dtype, with log-probabilities at temperature 1, and without adapters."""
    running = Server(model, dtype="bfloat16", logps="raw_logprobs")
    yield running
    running.kill()


Train = Callable[..., tuple[Path, list[dict[str, Any]]]]


@pytest.fixture
def train(tiny: ModuleType, model: Path, place: Path, tmp_path: Path) -> Train:
    def train(url: str, weights: str = "adapter", steps: int = 2, **options: Any) -> Any:
        directory = options.pop("at", tmp_path / "run")
        engine = {
            "name": "vllm",
            "urls": [url],
            "weights": weights,
            "directory": str(place / options.pop("place", tmp_path.name)),
            "probe_tolerance": options.pop("probe_tolerance", 1e-3),
            "patience": options.pop("patience", 300.0),
        }
        of, data = options.pop("model", model), tiny.prompts(8)
        running, first = engines.Vllm(url, None, 60), str(options.pop("first", model))
        if (running.weights_name() or "").startswith(
            "policy-"
        ):  # of a test before: adapters need the first ones
            running.load_weights(first, "first")
        config = GRPOConfig(
            **{
                "total_batch_size": 8,
                "num_generations": 4,
                "learning_rate": 1e-2,
                "max_training_steps": steps,
                "max_completion_length": 8,
                "temperature": 0.7,
                "log_steps": 1,
                "num_preview_samples": 0,
                "save_directory": str(directory),
                "sampler": engine,
                "seed": 1,
                "lora": LORA if weights == "adapter" else None,
                **options,
            }
        )
        rewards = (
            []
            if "environment" in options
            else [lambda completion_ids: [float(x[0] % 5) for x in completion_ids]]
        )
        GRPOTrainer(config, model=str(of), train_dataset=data, rewards=rewards).train()
        return directory, tiny.read_rows(directory / "metrics.jsonl")

    return train


@pytest.mark.parametrize("weights", ["adapter", "disk"])
@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_every_policy_is_published_and_proven(train: Train, server: Server, weights: str, ahead: int) -> None:
    _, rows = train(server.url, weights, 6, rollouts_ahead=ahead)
    if ahead:
        assert [row["rollout/lag"] for row in rows] == [min(i, ahead) for i in range(6)]
    assert all(row["sync/probe_difference"] < 1e-3 for row in rows)
    # What the engine says of its completions is what the trainer computes of them, as long as the policy is the same:
    # the filters of generation_config.json are not used.
    same = rows[: 1 if ahead else 6]
    assert all(row["sampling/logp_difference_max"] < 1e-3 for row in same)


def test_conversations_go_through_the_engine(train: Train, server: Server, tmp_path: Path) -> None:
    (tmp_path / "talk.py").write_text(TALK)
    environment = {"name": f"{tmp_path / 'talk.py'}:Talk", "max_turns": 4, "max_tokens": 48}
    _, rows = train(server.url, steps=3, environment=environment, chat_template="plain", max_prompt_length=12)
    assert all(row["sampling/logp_difference_max"] < 1e-3 for row in rows)
    assert max(row["episodes/turns"] for row in rows) > 1


def test_what_an_engine_was_started_with_is_caught_before_it_samples(
    train: Train, ill_started: Server
) -> None:
    """What is known without a policy, a check says; see below."""
    url = ill_started.url
    with pytest.raises(
        RunError, match="it computes in bfloat16, and the trainer in float32: start it with --dtype"
    ):
        train(url, "disk", place="dtype")
    with pytest.raises(
        RunError, match=r"not those at the request's temperature, 0.7: .*--logprobs-mode processed"
    ):
        train(url, "disk", place="raw", probe_tolerance=0.5)


def test_a_check_asks_an_engine_and_prints_how_to_start_one(
    server: Server, ill_started: Server, model: Path, place: Path
) -> None:
    opened = load_model(model)

    def check(url: str, *, lora: int | None = 4, longest: int = 40, **options: Any) -> Any:
        of = opened if lora is None else opened.with_lora(rank=lora)
        wanted = RolloutOptions(32, 4, SamplingOptions(temperature=0.7), 2, ahead=options.pop("ahead", 1))
        weights = "disk" if lora is None else "adapter"
        return sampler("vllm", urls=[url], weights=weights, **options).check(of, wanted, longest)

    assert check(server.url).warnings == ()
    assert "computes 3 adapters at a time, and 4 policies" in check(server.url, ahead=3).warnings[0]
    for url, wrong, said in (
        (server.url, {"longest": 65}, "--max-model-len 65"),
        (server.url, {"lora": 12}, "its adapters have a rank of at most 8: --max-lora-rank 16"),
        (server.url, {"model": "base"}, "serves policy, and not 'base'"),
        (ill_started.url, {"lora": 4}, "it was started without adapters: --enable-lora"),
        (
            ill_started.url,
            {"lora": None},
            "at temperature 1 whatever is asked: start vLLM with --logprobs-mode",
        ),
    ):
        with pytest.raises(InputError, match=said):
            check(url, **wrong)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    (warning,) = check(f"http://127.0.0.1:{port}").warnings
    command = warning.partition("start it: ")[2]
    environment = {**os.environ, **SETTINGS, "PATH": f"{ENGINES / 'bin'}:{os.environ['PATH']}"}
    with (place / "printed.log").open("w") as log:
        started = subprocess.Popen(
            command, shell=True, env=environment, stdout=log, stderr=log, start_new_session=True
        )
    try:
        until = time.monotonic() + READY_SECONDS
        while check(f"http://127.0.0.1:{port}").warnings:
            assert started.poll() is None, (place / "printed.log").read_text()[-3000:]
            assert time.monotonic() < until
            time.sleep(1)
    finally:
        os.killpg(started.pid, signal.SIGKILL)
        started.wait()


def test_tied_heads(train: Train, tiny: ModuleType, place: Path, shared: Path, rlhf: Any) -> None:
    """Engines are given a head of its own; one that is seen to have been started with the tied model is refused."""
    table = {**tiny.SIZES, "hidden_size": 128, "num_attention_heads": 4, "tie_word_embeddings": True}
    tokenizer = load_tokenizer(shared / "data" / "tokenizers" / "chatml_bpe_2k")
    fresh_model({**table, "initializer_range": 0.15}, tokenizer=tokenizer).save(place / "tied")
    assert rlhf("export", str(place / "tied"), str(place / "untied"), "--untied").code == 0
    (place / "link").symlink_to("tied")
    packed, apart = Server(place / "link"), Server(place / "untied")
    try:
        with pytest.raises(
            RunError, match="start it with a copy that has a head of its own, rlhf export MODEL DIR"
        ):
            train(packed.url, "disk", place="refused", model=place / "tied")
        # As on another machine: it is given a head of its own, and shows whether it took it.
        (place / "link").unlink()
        for server in (packed, apart):
            _, rows = train(
                server.url, "disk", 3, place=server.url[-5:], model=place / "tied", first=place / "tied"
            )
            assert all(row["sync/probe_difference"] < 1e-3 for row in rows)
            assert all(row["sampling/logp_difference_max"] < 1e-3 for row in rows)
    finally:
        packed.kill()
        apart.kill()


@pytest.mark.parametrize("weights", ["adapter", "disk"])
def test_an_engine_that_is_killed_and_started_again(
    train: Train, server: Server, weights: str, tmp_path: Path
) -> None:
    """None is left: the state is saved, and the same run continues when the engine is back, with its first weights."""
    honest, asked = engines.Vllm.complete, []

    def complete(self: Any, *arguments: Any) -> Any:
        asked.append(arguments[-1].max_tokens)
        if asked.count(8) == 5:  # of the third rollout
            server.kill()
        return honest(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engines.Vllm, "complete", complete)
        with pytest.raises(
            Stopped, match=r"no engine has answered for 1 s: .*rerun the same command when one does"
        ):
            train(server.url, weights, 4, at=tmp_path / "run", patience=1.0)
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["2"]
    server.start()
    _, rows = train(server.url, weights, 4, at=tmp_path / "run")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert all(row["sync/probe_difference"] < 1e-3 for row in rows)
    assert all(row["sampling/logp_difference_max"] < 1e-3 for row in rows)


EVEN = """
def even(completion_ids):
    return [sum(i % 2 == 0 for i in ids) / len(ids) for ids in completion_ids]
"""
SMOLLM2 = """
dir = "{dir}"

[[stage]]
name = "policy"
trainer = "grpo"
model = "{model}"
train_data = "prompts.jsonl"
rewards = ["rewards.py:even"]
num_generations = 4
total_batch_size = 8
learning_rate = {rate}
max_training_steps = 6
max_completion_length = 8
log_steps = 1
save_steps = 2
rollouts_ahead = {ahead}
sampler = {{ name = "vllm", urls = ["{url}"], weights = "{weights}", probe_tolerance = 1e-3 }}
{lora}
"""


@pytest.fixture(scope="module")
def smollm2(vllm: None, place: Path, repository: Path) -> Iterator[Server]:
    """Serves a copy of SmolLM2, whose head is tied, with a head of its own."""
    source = repository / ".cache" / "smollm2"
    if not source.is_dir():
        pytest.skip(f"no model at {source}; make test-engines fetches it")
    command("export", str(source), str(place / "smollm2"), "--untied", cwd=place)
    running = Server(place / "smollm2", *WITH_LORA)
    yield running
    running.kill()


def command(*arguments: str, cwd: Path) -> None:
    """Run `rlhf` without the tests' flags for XLA, which make large programs slow."""
    subprocess.run([*RLHF, *arguments], cwd=cwd, env=PLAIN, check=True)


RLHF = [sys.executable, "-m", "rlhf_core.cli"]
PLAIN = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_"))}


@pytest.mark.parametrize("ahead", [0, 1, 2])
@pytest.mark.parametrize("weights", ["adapter", "disk"])
def test_smollm2(
    smollm2: Server, place: Path, repository: Path, tiny: ModuleType, weights: str, ahead: int
) -> None:
    """Six updates of a pretrained model; a run that is killed after its third is trained again to the same bits."""
    engine = engines.Vllm(smollm2.url, None, 60)
    if (engine.weights_name() or "").startswith("policy-"):  # of a case before
        engine.load_weights(str(place / "smollm2"), "first")
    rows = [{"prompt": [{"role": "user", "content": f"What is {i} + {i}?"}]} for i in range(8)]
    tiny.write_rows(place / "prompts.jsonl", rows)
    (place / "rewards.py").write_text(EVEN)
    run, logged = f"{weights}-{ahead}", place / f"{weights}-{ahead}" / "policy" / "metrics.jsonl"
    lora, rate = ("lora = { rank = 8 }", "1e-3") if weights == "adapter" else ("", "1e-5")
    named = {"dir": run, "model": repository / ".cache" / "smollm2", "url": smollm2.url, "ahead": ahead}
    (place / "pipeline.toml").write_text(SMOLLM2.format(**named, weights=weights, lora=lora, rate=rate))
    if ahead == 1:
        killed = subprocess.Popen([*RLHF, "run", "pipeline.toml"], cwd=place, env=PLAIN)
        while not logged.is_file() or logged.read_bytes().count(b"\n") < 3:
            assert killed.poll() is None
            time.sleep(0.1)
        killed.kill()
        killed.wait()
    command("run", "pipeline.toml", cwd=place)
    rows = tiny.read_rows(logged)
    assert len(rows) == 6
    assert min(row["grad_norm"] for row in rows) > 1e-3
    assert all(row["sync/probe_difference"] < 1e-3 for row in rows)
    same = rows[: 1 if ahead else 6]
    assert all(row["sampling/logp_difference_max"] < 1e-3 for row in same)
    if ahead:  # the policies differ by more than the receipts
        assert max(row["sampling/logp_difference_max"] for row in rows) > 2e-3
    if ahead == 1:
        command("replay", run, cwd=place)
    shutil.rmtree(place / run)
