"""GRPO with the sampler `rlhf`: a server in this process is given every policy, and proves that it holds it."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import httpx
import jax
import numpy as np
import pytest
from rlhf_grpo import GRPOConfig, GRPOTrainer
from rlhf_remote import engines, sampling, stations

from rlhf_core import SAMPLER, InputError, RunError, installed_registry
from rlhf_core.contracts import Forecast
from rlhf_core.errors import Stopped
from rlhf_core.rollouts import RolloutOptions
from rlhf_core.runs import open_run
from rlhf_core.sampling import SamplingOptions
from tests.shared import serving

sampler: Any = partial(installed_registry().get, SAMPLER)
LORA = {"rank": 4, "alpha": 8}


def restore(url: str, model: Path) -> None:
    """Give the server its first weights again, and no adapters."""
    engine = engines.Vllm(url, None, 60)
    for name in adapters_of(url):
        engine.unload_adapter(name)
    engine.load_weights(str(model), "0")


def adapters_of(url: str) -> list[str]:
    served = engines.Vllm(url, None, 60).models()
    return [name for name, each in served.items() if each.parent is not None]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engines")


@pytest.fixture(scope="module")
def model(tiny: ModuleType, place: Path) -> Path:
    tiny.make_model(scale=8).save(place / "model")
    return place / "model"


@pytest.fixture(scope="module")
def url(tiny: ModuleType, model: Path, place: Path) -> Iterator[str]:
    """The address of `rlhf serve policy=DIR --control --adapters DIRECTORY` in a thread."""
    opening = {"slots": 16, "length": 64, "mesh": tiny.one_device()}
    running = serving.serve({"policy": model}, opening=opening, control=True, adapters=place)
    yield str(running.client.base_url).rstrip("/")
    running.close()


@pytest.fixture(autouse=True)
def as_started(url: str, model: Path) -> Iterator[None]:
    yield
    restore(url, model)


@pytest.fixture
def train(tiny: ModuleType, model: Path, place: Path, tmp_path_factory: Any, url: str) -> Callable[..., Any]:
    def train(
        directory: Path | None = None, steps: int = 3, **options: Any
    ) -> tuple[Path, list[dict[str, Any]]]:
        directory = directory or Path(tmp_path_factory.mktemp("run"))
        options = {"weights": "adapter", "probe_tolerance": 1e-3, "timeout": 60.0, **options}
        ahead, shared = (
            options.pop("ahead", 1),
            place / options.pop("place", f"{directory.parent.name}-{directory.name}"),
        )
        lora = options.pop("lora", LORA if options["weights"] == "adapter" else None)
        engine = {"name": "rlhf", "urls": [url], "directory": str(shared), **options}
        config = GRPOConfig(
            total_batch_size=8,
            num_generations=4,
            learning_rate=1e-2,
            max_training_steps=steps,
            max_completion_length=6,
            log_steps=1,
            rollouts_ahead=ahead,
            num_preview_samples=0,
            save_directory=str(directory),
            sampler=engine,
            seed=1,
            lora=lora,
        )
        GRPOTrainer(
            config,
            model=str(model),
            train_dataset=tiny.prompts(8),
            rewards=[lambda completion_ids: [float(ids[0] % 5) for ids in completion_ids]],
        ).train()
        rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
        return directory, rows

    return train


@pytest.mark.parametrize("weights", ["adapter", "disk"])
def test_every_policy_is_published_and_proven(train: Callable[..., Any], weights: str, place: Path) -> None:
    directory, rows = train(weights=weights, ahead=1, steps=4)
    assert [row["rollout/lag"] for row in rows] == [0, 1, 1, 1]
    assert all(row["sync/probe_difference"] < 1e-4 for row in rows)
    assert all(row["sampling/surprisal_evidence"] < 0 for row in rows)
    # Engine, version and tokens of what it drew, once from each policy: the first two rollouts are of version 0.
    files = sorted((directory / "values").iterdir())
    found = [np.load(file)["draws"][:, :3].tolist() for file in files]
    assert found == [[[0, 0, 64]], [], [[0, 1, 64]], [[0, 2, 64]]]
    # The sampler's log-probabilities of the first rollout are the trainer's own.
    assert rows[0]["sampling/logp_difference_max"] < 1e-4
    assert max(row["sampling/logp_difference_max"] for row in rows[1:]) > 1e-3
    kept = sorted(path.name for path in place.glob(f"*{directory.name}/policy-v*"))
    assert kept[-1] == "policy-v2"
    assert len(kept) <= 3
    if weights == "disk":  # a run begun again finds other policies under its versions
        shutil.rmtree(directory)
        _, rows = train(directory, weights=weights, ahead=0, steps=2)
        assert all(row["sampling/logp_difference_max"] < 1e-4 for row in rows)


@pytest.mark.parametrize("weights", ["adapter", "disk"])
def test_an_engine_that_keeps_its_policy_is_caught(
    train: Callable[..., Any], weights: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It answers that it has loaded the second policy, and has not."""
    load = {"adapter": "load_adapter", "disk": "load_weights"}[weights]
    honest = getattr(engines.Vllm, load)

    def forgets(self: Any, *arguments: str) -> None:
        first = any(each.endswith("-v0") for each in arguments)
        if weights == "adapter":
            path = arguments[1] if first else str(Path(arguments[1]).with_name("policy-v0"))
            honest(self, arguments[0], path)
        elif first:
            honest(self, *arguments)

    monkeypatch.setattr(engines.Vllm, load, forgets)
    with pytest.raises(
        RunError, match=r"does not hold the policy of update 1: .* they are those of update 0: "
    ) as error:
        train(weights=weights, ahead=0, probe_tolerance=10.0)
    what = {"adapter": "the adapter was not loaded", "disk": "it kept its weights"}[weights]
    assert str(error.value).endswith(what)


def test_a_greedy_engine_ends_a_run_with_rollouts_ahead(
    train: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = engines.Vllm.complete

    def greedy(self: Any, *given: Any) -> Any:
        return honest(self, *given[:-1], replace(given[-1], temperature=0.0))

    monkeypatch.setattr(engines.Vllm, "complete", greedy)
    with pytest.raises(RunError, match=r"64 tokens of engine e0, policy version \d, .* samples greedily"):
        train(ahead=1, steps=6)


def test_weights_of_another_run_are_noticed(
    train: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which reloads the engine after the receipt, with the same numbers, even; other requests are not waited for."""
    honest = engines.Vllm.complete
    held, other, may_end = threading.Event(), threading.Event(), threading.Event()

    def complete(self: Any, *arguments: Any) -> Any:
        if arguments[-1].max_tokens > 1 and not held.is_set():
            held.set()
            may_end.wait()
        elif arguments[-1].max_tokens > 1 and not other.is_set():
            other.set()
            self.command("/update_weight_version", {"new_version": "policy-other-v3"})
        return honest(self, *arguments)

    monkeypatch.setattr(engines.Vllm, "complete", complete)
    with pytest.raises(
        RunError, match="its weights are now called 'policy-other-v3', and this run loaded 'policy-"
    ):
        train(weights="disk")
    may_end.set()


def test_a_run_that_no_engine_serves_stops_with_its_state_saved(
    train: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And the same command continues it to the same weights, once an engine answers."""
    _, rows = train(ahead=1, steps=3)
    honest = engines.Vllm.complete
    gone = threading.Event()

    def complete(self: Any, model: str, *arguments: Any) -> Any:
        if model.endswith("v1") or gone.is_set():
            gone.set()
            raise engines.EngineDownError("no route to host")
        return honest(self, model, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(engines.Vllm, "complete", complete)
        patch.setattr(stations, "FIRST_WAIT", 0.05)
        with pytest.raises(Stopped, match=r"no engine has answered for 0.2 s: .*no route to host"):
            train(tmp_path / "run", ahead=1, steps=3, patience=0.2)
    kept = [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()]
    assert kept == ["2"]
    sampling._STATIONS.clear()  # another process
    _, again = train(tmp_path / "run", ahead=1, steps=3, patience=0.2)
    clock = {"time", "step_time", "tokens_per_second", "sync/seconds"}
    for row, other in zip(rows, again, strict=True):
        names = {name for name in row if name not in clock and not name.startswith(("time/", "rollout/tok"))}
        assert {name: row[name] for name in names} == {name: other[name] for name in names}


def test_another_run_s_directory_is_refused(train: Callable[..., Any], place: Path) -> None:
    (place / "taken").mkdir()
    (place / "taken" / "owner.json").write_text(json.dumps({"stage": "runs/other/policy"}))
    (place / "taken" / "policy-v0").mkdir()
    (place / "taken" / "policy-v0" / sampling.PROBE_FILE).touch()
    with pytest.raises(InputError, match="has the policies of runs/other/policy; give another directory"):
        train(place="taken")
    # The default is in the stage's own directory, which may be moved.
    moved: Any = SimpleNamespace(directory=place / "taken", options=sampler("rlhf", urls=[""]))
    moved.inputs = SimpleNamespace(directory=place)
    sampling.PublishingSampler._claim(moved)


def test_a_directory_that_is_full(
    train: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    honest = Path.rename

    def full(self: Path, target: Any) -> Any:
        if str(target).endswith("policy-v1"):
            raise OSError(28, "No space left on device")
        return honest(self, target)

    monkeypatch.setattr(Path, "rename", full)
    with pytest.raises(RunError, match=r"sampler.directory: .*: No space left on device"):
        train(tmp_path / "run", ahead=0)
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["1"]


DAMAGED = (b"", b"[]", b"null", b"\xff\xfe", b"[" * 50_000, b"9" * 5000, b"PK\x03\x04cut")


@pytest.mark.parametrize("content", DAMAGED)
def test_damaged_files_of_policies_are_an_error_or_written_again(content: bytes, tmp_path: Path) -> None:
    """An owner and a probe that cannot be read are named; the run's own name is made anew."""
    held: Any = SimpleNamespace(directory=tmp_path)
    held.options = SimpleNamespace(directory="given")
    held.inputs = SimpleNamespace(directory=tmp_path / "stage")
    (tmp_path / sampling.OWNER_FILE).write_bytes(content)
    with pytest.raises(
        InputError, match=r"owner\.json is damaged \(.*: delete it if the directory is that of"
    ):
        sampling.PublishingSampler._claim(held)
    probe = tmp_path / sampling.PROBE_FILE
    probe.write_bytes(content)
    with pytest.raises(RunError, match=rf"{probe} is damaged \(.*: delete {tmp_path} and run again"):
        sampling._read_probe(probe)
    (tmp_path / sampling.RUN_FILE).write_bytes(content)
    prefix = cached_property.__get__(
        sampling.PublishingSampler.__dict__["_prefix"], held, sampling.PublishingSampler
    )
    assert re.fullmatch("[0-9a-f]{16}", (tmp_path / sampling.RUN_FILE).read_text())
    assert re.fullmatch(rf"{sampling.PREFIX}[0-9a-f]{{8}}-v", prefix)


def test_a_policy_with_a_damaged_probe_is_written_again(tmp_path: Path) -> None:
    """And one with a whole probe is not."""
    saved: list[Path] = []
    model: Any = SimpleNamespace(logits=lambda ids, mask: np.zeros((*ids.shape, 8)))
    model.with_params = lambda params: model
    model.save = lambda path: (path.mkdir(), saved.append(path))
    held: Any = SimpleNamespace(directory=tmp_path, probe=np.ones(sampling.PROBE, int), _claim=lambda: None)
    held.inputs, held.options = (
        SimpleNamespace(model=model, definition=SimpleNamespace(vocab_size=8, absent=())),
        SimpleNamespace(weights="adapter", engine="vllm"),
    )
    held._policy = lambda version: stations.PublishedPolicy("p", tmp_path / "policy-v0", version)
    probe = tmp_path / "policy-v0" / sampling.PROBE_FILE
    for content in (None, *DAMAGED):
        if content is not None:
            probe.write_bytes(content)
        for _ in range(2):
            sampling.PublishingSampler.publish(held, None, 0)
        assert sampling._read_probe(probe)["logps"].shape == (2, 23)
    assert len(saved) == 1 + len(DAMAGED)


def test_moments_of_what_was_drawn_are_those_of_float64() -> None:
    logits = np.random.default_rng(0).normal(scale=3.0, size=(2, 5)).astype(np.float32)
    ids = np.array([[4, 0, 4], [1, 2, 3]])
    found = sampling.drawn_moments(logits, ids, 0.7).reshape(2, 3, 3)
    for context, draw in np.ndindex(2, 3):
        p = np.exp(logits[context].astype(np.float64) / 0.7)
        p /= p.sum()
        mean = (p * np.log(p)).sum()
        values = np.log(p[ids[context, draw]]), -mean, (p * np.log(p) ** 2).sum() - mean**2
        np.testing.assert_allclose(found[context, draw], values, rtol=1e-5)


def test_a_probe_with_a_changed_bit_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / sampling.PROBE_FILE
    logps = np.zeros((sampling.PROBE[0], sampling.PROBE[1] - 1))
    np.savez(
        path, ids=np.ones(sampling.PROBE, int), logps=logps, last=np.zeros(9), following=np.zeros((2, 4, 9))
    )
    assert sampling._read_probe(path)["logps"].shape == logps.shape
    content = path.read_bytes()
    at = content.index(bytes(100))
    path.write_bytes(content[:at] + b"\1" + content[at + 1 :])
    with pytest.raises(RunError, match="is damaged"):
        sampling._read_probe(path)


def test_probes_see_every_tensor(tiny: ModuleType) -> None:
    """The difference that a receipt measures, for each tensor changed by a hundredth."""
    model = tiny.make_model(scale=8)
    ids = np.random.default_rng(0).integers(0, model.definition.vocab_size, sampling.PROBE)

    def logps(changed: Any) -> Any:
        logits = np.asarray(changed.logits(ids, np.ones_like(ids)), np.float64)
        return np.take_along_axis(sampling.log_softmax(logits[:, :-1]), ids[:, 1:, None], -1)

    before = logps(model)
    leaves, tree = jax.tree.flatten(model.params)
    for i, leaf in enumerate(leaves):
        other = [each * 1.01 if k == i else each for k, each in enumerate(leaves)]
        assert np.abs(logps(model.with_params(jax.tree.unflatten(tree, other))) - before).max() > 1e-3, (
            leaf.shape
        )


def test_a_check_asks_the_engines(url: str, tiny: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.make_model()

    def check(url: str, longest: int = 64, name: str | None = "policy", **options: Any) -> Forecast:
        ahead, kind = options.pop("ahead", 0), options.pop("kind", "rlhf")
        sampling = SamplingOptions(max_completion_length=8, **options)
        wanted = RolloutOptions(32, 4, sampling, 2, ahead=ahead)
        forecast: Forecast = sampler(kind, urls=[url], weights="disk", model=name).check(
            model, wanted, longest
        )
        return forecast

    assert check(url, temperature=0.7) == Forecast(
        ("sampled by 1 × rlhf, which read each policy (whole weights) from the stage's directory",)
    )
    (warning,) = check(url, ahead=1).warnings
    assert "2 engines would not wait for each other" in warning
    (warning,) = check("http://127.0.0.1:9", kind="vllm").warnings
    assert "http://127.0.0.1:9: " in warning
    assert "start it: VLLM_SERVER_DEV_MODE=1" in warning
    assert "--port 9 --max-model-len 64 --dtype float32 --logprobs-mode processed_logprobs" in warning
    for wrong, said in (
        ({"top_p": 0.9}, "sampling.top_p: the log-probabilities of sampler 'rlhf' would contain it"),
        ({"name": "other"}, f"{url} serves policy, and not 'other'"),
        (
            {"longest": 65},
            "'policy' has a context of 64 tokens, and prompts with their completions have up to 65",
        ),
    ):
        with pytest.raises(InputError, match=re.escape(said)):
            check(url, **wrong)  # type: ignore[arg-type]
    with monkeypatch.context() as patch:
        patch.setattr(jax, "process_count", lambda: 2)
        with pytest.raises(InputError, match="sampler 'rlhf': the trainer must be one process"):
            check(url)
    with pytest.raises(InputError, match=r'weights = "adapter": the model is trained without adapters'):
        sampler("rlhf", urls=[url]).check(model, RolloutOptions(32, 4, SamplingOptions(), 2), 8)
    other = tiny.make_model(vocab_size=50)
    with pytest.raises(InputError, match="another model: its vocabulary is not the policy's, of 50 ids"):
        sampler("rlhf", urls=[url], weights="disk").check(
            other, RolloutOptions(32, 4, SamplingOptions(max_completion_length=8), 2), 8
        )


class AsSglang:
    """Answers SGLang's routes, as its http_server.py and io_struct.py have them, with a server of `rlhf serve`."""

    def __init__(self, url: str) -> None:
        self.behind, self.paused = engines.Vllm(url, None, 60), False
        self.adapters, self.version = set[str](), "default"

    def send(self, method: str, url: str, content: bytes | None = None, **limits: Any) -> engines.Answer:
        route = getattr(self, httpx.URL(url).path.strip("/").replace("/", "_"), None)
        body = json.loads(content or b"null")
        status, answer = (404, {"detail": "Not Found"}) if route is None else route(body)
        return engines.Answer(url, status, httpx.Headers(), json.dumps(answer).encode())

    def health(self, body: Any) -> tuple[int, Any]:
        return 200, {}

    def v1_models(self, body: Any) -> tuple[int, Any]:
        return 200, {"data": [{"id": "weights/first", "root": "weights/first", "max_model_len": 64}]}

    def generate(self, body: Any) -> tuple[int, Any]:
        model = body.get("lora_path", "policy")
        if model != "policy" and model not in self.adapters:
            return 400, {"error": {"message": f"LoRA adapter {model} is not loaded"}}
        many = isinstance(body["input_ids"][0], list)
        prompts = body["input_ids"] if many else [body["input_ids"]]
        settings = body["sampling_params"] if many else [body["sampling_params"]]
        answers = [self.one(model, *pair, body) for pair in zip(prompts, settings, strict=True)]
        return 200, answers if many else answers[0]

    def one(self, model: str, prompt: list[int], given: dict[str, Any], body: Any) -> Any:
        wanted = engines.Wanted(
            given["temperature"], given["max_new_tokens"], tuple(given.get("stop_token_ids", ()))
        )
        (drawn,) = self.behind.complete(model, prompt, 1, given.get("sampling_seed", 0), wanted)
        reason = {"type": "stop", "matched": drawn.ids[-1]} if drawn.finished else {"type": "length"}
        logps = [[p, i, None] for p, i in zip(drawn.logps, drawn.ids, strict=True)]
        meta = {"finish_reason": reason, "output_token_logprobs": logps, "weight_version": self.version}
        if body.get("logprob_start_len") == 0:
            read = [None, *self.behind.logps(model, prompt)]
            meta["input_token_logprobs"] = [[p, i, None] for p, i in zip(read, prompt, strict=True)]
        return {"text": "", "output_ids": drawn.ids, "meta_info": meta}

    def load_lora_adapter(self, body: Any) -> tuple[int, Any]:
        if not body or body["lora_name"] in self.adapters:
            return 400, {"success": False, "error_message": "already loaded"}
        self.adapters.add(body["lora_name"])
        self.behind.load_adapter(body["lora_name"], body["lora_path"])
        return 200, {"success": True}

    def unload_lora_adapter(self, body: Any) -> tuple[int, Any]:
        if body["lora_name"] not in self.adapters:
            return 400, {"success": False, "error_message": "not loaded"}
        self.adapters.remove(body["lora_name"])
        return 200, {"success": True}

    def pause_generation(self, body: Any) -> tuple[int, Any]:
        self.paused = body["mode"] == "retract"
        return 200, {"status": "ok"}

    def update_weights_from_disk(self, body: Any) -> tuple[int, Any]:
        if not body or not self.paused or not body["flush_cache"]:
            return 400, {"success": False, "message": "no model_path"}
        self.behind.load_weights(body["model_path"], "of the server")
        self.version = body["weight_version"]
        return 200, {"success": True, "message": "Succeeded"}

    def continue_generation(self, body: Any) -> tuple[int, Any]:
        self.paused = False
        return 200, {"status": "ok"}


@pytest.mark.parametrize("weights", ["adapter", "disk"])
def test_sglang_s_routes(
    train: Callable[..., Any], url: str, weights: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sampler `rlhf` gives the same rollouts of groups, which have seeds of their own here."""
    routes = AsSglang(url)

    def opened(url: str, key: str | None, timeout: float) -> engines.Sglang:
        engine = engines.Sglang(url, key, timeout)
        engine._client = routes
        return engine

    monkeypatch.setitem(engines.KINDS, "sglang", opened)
    directory, rows = train(name="sglang", weights=weights, urls=[f"http://{weights}"], ahead=1, steps=3)
    assert [row["rollout/lag"] for row in rows] == [0, 1, 1]
    assert all(row["sync/probe_difference"] < 1e-4 for row in rows)
    assert rows[0]["sampling/logp_difference_max"] < 1e-4
    assert not routes.paused
    samples = [
        json.loads(line) for line in (directory / "samples/update-000000.jsonl").read_text().splitlines()
    ]
    assert len({row["completion"] for row in samples}) > 2
    if weights == "adapter":
        assert not routes.adapters
    else:
        assert routes.version.endswith("-v1")


@pytest.mark.parametrize("weights", ["adapter", pytest.param("disk", marks=pytest.mark.long)])
def test_an_engine_that_was_started_again_is_given_its_policy_again(
    train: Callable[..., Any], url: str, model: Path, weights: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two requests, so that none fails: it has no adapters, or its first weights, and says so."""
    honest, again = engines.Vllm.complete, threading.Event()

    def complete(self: Any, *arguments: Any) -> Any:
        if arguments[-1].max_tokens > 1 and not again.is_set():
            again.set()
            restore(url, model)
        return honest(self, *arguments)

    monkeypatch.setattr(engines.Vllm, "complete", complete)
    _, rows = train(weights=weights, ahead=0, steps=2)
    assert again.is_set()
    assert all(row["sampling/logp_difference_max"] < 1e-4 for row in rows)


def test_a_run_leaves_no_adapters(
    train: Callable[..., Any], url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nor one that fails; of one that is killed the next start of it removes them, and no other's."""
    honest, names = engines.Vllm.complete, set[str]()
    may_fail = True

    def complete(self: Any, model: str, *arguments: Any) -> Any:
        names.add(model)
        if may_fail and model.endswith("-v1"):
            raise RunError("a bad completion")
        return honest(self, model, *arguments)

    monkeypatch.setattr(engines.Vllm, "complete", complete)
    with monkeypatch.context() as patch:
        patch.setattr(sampling.PublishingSampler, "close", lambda self: None)  # as if it was killed
        with pytest.raises(RunError, match="a bad completion"):
            train(tmp_path / "run", ahead=0, steps=2)
    (left,) = {name.rpartition("-v")[0] for name in names}
    assert sorted(adapters_of(url)) == [f"{left}-v0", f"{left}-v1"]
    with pytest.raises(RunError, match="a bad completion"):
        train(tmp_path / "other", ahead=0, steps=2)
    assert sorted(adapters_of(url)) == [f"{left}-v0", f"{left}-v1"]
    sampling._STATIONS.clear()  # another process
    may_fail = False
    train(tmp_path / "run", ahead=0, steps=2)
    assert adapters_of(url) == []
    assert len({name.rpartition("-v")[0] for name in names}) == 2


def test_runs_in_directories_of_the_same_name_have_other_adapters(tmp_path: Path) -> None:
    """As in two containers with an engine between them; the same run has the same names."""

    def named(policies: str) -> str:
        made: Any = SimpleNamespace(
            directory=tmp_path / policies, inputs=SimpleNamespace(directory="/data/run")
        )
        prefix = sampling.PublishingSampler._prefix
        assert isinstance(prefix, cached_property)
        return str(prefix.func(made))

    assert named("a") == named("a") != named("b")


LIES: dict[str, Callable[[list[float]], list[float]]] = {
    "all 0": lambda logps: [0.0] * len(logps),
    "all -1e30": lambda logps: [-1e30] * len(logps),
    "shifted by one": lambda logps: [*logps[1:], logps[0]],
}


@pytest.mark.parametrize(
    "lie", [*(pytest.param(lie, marks=pytest.mark.long) for lie in LIES), "another policy"]
)
def test_log_probabilities_of_rollouts_are_compared_with_the_trainer_s(
    train: Callable[..., Any], url: str, lie: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The probe and the token after it are right, and completions are not."""
    honest = engines.Vllm.complete

    def complete(self: Any, model: str, *arguments: Any) -> Any:
        if arguments[-1].max_tokens == 1:
            return honest(self, model, *arguments)
        if lie == "another policy":
            return honest(self, "policy", *arguments)
        drawn = honest(self, model, *arguments)
        return [each._replace(logps=LIES[lie](each.logps)) for each in drawn]

    monkeypatch.setattr(engines.Vllm, "complete", complete)
    with (
        pytest.warns(UserWarning, match=f"sampler: {url}: .* for update [12] are on average .* nats off"),
        pytest.raises(
            RunError, match=f"sampler: {url}: .* for update [23] .* So were those for update [12]:"
        ),
    ):
        train(tmp_path / "run", ahead=0, steps=4, probe_tolerance=0.02)
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert len(rows) < 4
    assert rows[-1]["sampling/logp_difference_mean"] > 0.005


def test_one_rollout_that_is_off_is_warned_of_once() -> None:
    made: Any = SimpleNamespace(options=sampler("vllm", urls=["http://a", "http://b"]))
    made._wrote, made._off, made._warned = {4: {"http://b"}}, None, False
    verdict = sampling.PublishingSampler.verdict
    assert verdict(made, 3, 0.05) is None
    with pytest.warns(UserWarning, match="sampler: http://b: .* update 5 are on average 0.051 nats off"):
        assert verdict(made, 4, 0.051) is None
    assert verdict(made, 5, 0.0) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert verdict(made, 6, 1.0) is None
    reason = verdict(made, 7, float("inf"))
    assert reason is not None
    assert "http://a or http://b: " in reason
    assert "So were those for update 7: " in reason


def test_a_prompt_whose_completions_are_too_few_is_named(
    train: Callable[..., Any], url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three of one prompt and five of the other, eight in all."""
    honest, count = engines.Client.send, itertools.cycle([3, 5])

    def send(self: Any, method: str, url: str, content: bytes | None = None, **limits: Any) -> engines.Answer:
        body = json.loads(content or b"{}")
        if not url.endswith("/v1/completions") or body["max_tokens"] != 6:
            return honest(self, method, url, content, **limits)
        content = json.dumps({**body, "n": next(count)}).encode()
        return honest(self, method, url, content, **limits)

    monkeypatch.setattr(engines.Client, "send", send)
    said = rf"row \d+: sampler 'rlhf': {url}: answered with \d completions of a prompt; asked for 4$"
    with pytest.raises(RunError, match=said):
        train()


@pytest.mark.parametrize(("share", "stale"), [(0.0, False), (0.6, False), (0.7, True), (1.0, True)])
def test_a_policy_that_is_twice_as_near_to_another_is_that(share: float, stale: bool) -> None:
    """Two policies less than the tolerance apart, and numbers some way from the right one to the other."""
    own, other = np.zeros((2, 23)), np.full((2, 23), 0.01)
    made: Any = SimpleNamespace(_probes={3: other, 4: own}, options=sampler("vllm", urls=["http://a"]))
    made.inputs = SimpleNamespace(definition=SimpleNamespace(compute_dtype="float32"))
    station: Any = SimpleNamespace(url="http://a", engine=SimpleNamespace(facts=engines.Facts))
    policy = stations.PublishedPolicy("policy-v4", Path(), 4)
    check = partial(sampling.PublishingSampler._require_policy, made, station, policy)
    if not stale:
        check(own + share * 0.01)
        return
    with pytest.raises(
        RunError, match=r"of update 4: .*; they are those of update 3: the adapter was not loaded"
    ):
        check(own + share * 0.01)


def test_an_engine_that_failed_is_left_out_for_longer_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(stations, "time", SimpleNamespace(monotonic=lambda: now))
    engine: Any = SimpleNamespace(url="http://a")
    station, waits = stations.Station(engine), list[float]()
    for _ in range(7):
        station.fail()
        station.fail()  # another request of the same time
        waits.append(station.retry_at - now)
        now = station.retry_at
    assert waits == [1, 2, 4, 8, 16, 30, 30]


def test_the_engine_that_can_begin_soonest_is_asked() -> None:
    """One that would have to load the policy comes later, and where it must first end what it does, last."""
    first, second = (stations.Station(SimpleNamespace(url=url)) for url in ("http://a", "http://b"))
    policy = stations.PublishedPolicy("policy-v1", Path(), 1)

    def chosen(*, exclusive: bool) -> str:
        with stations.choose([first, second], policy, exclusive=exclusive) as station:
            assert station is not None
            return str(station.url)

    assert chosen(exclusive=False) == "http://a"
    second.loaded = {"policy-v1"}
    assert chosen(exclusive=False) == "http://b"
    second.chosen = 2
    assert chosen(exclusive=False) == "http://a"
    assert chosen(exclusive=True) == "http://a"
    first.active = 1
    assert chosen(exclusive=False) == "http://a"
    assert chosen(exclusive=True) == "http://b"


def test_the_journal_says_which_engine_wrote_a_completion(train: Callable[..., Any], url: str) -> None:
    """Two addresses of one server."""
    urls = [url, url.replace("127.0.0.1", "localhost")]
    directory, rows = train(urls=urls, weights="disk", ahead=0, steps=3)
    (stage,) = open_run(directory).stages
    wrote = [entry.rollout.samples.engine for entry in stage.rollouts()]
    assert {each.dtype.name for each in wrote} == {"int16"}
    for row, engine in zip(rows, wrote, strict=True):
        # A group is one request.
        assert (engine.reshape(-1, 4) == engine[::4, None]).all()
        named = {name[-1] for name in row if name.startswith("sampling/surprisal_gap/e")}
        assert named == {str(each) for each in np.unique(engine)}
    assert set(np.concatenate(wrote).tolist()) == {0, 1}
