"""Control: pausing, new weights, adapters, and that nothing of it works without being asked for."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhf_core import load_model
from tests.shared import serving

PROMPT = [5, 6, 7, 8]
ASKED = {"return_token_ids": True, "logprobs": 0, "ignore_eos": True}
GREEDY = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, **ASKED}
ROUTES = (
    *("/pause", "/resume", "/abort_requests", "/collective_rpc", "/reset_prefix_cache"),
    *("/update_weight_version", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
)


@pytest.fixture(scope="module")
def models(directory: Path, tiny: Any) -> Path:
    """The policy, other weights for it, and adapters of it."""
    base = load_model(directory / "policy", mesh=tiny.one_device())
    tiny.make_model(scale=8, seed=5).save(directory / "newer")
    tiny.make_model(scale=8, num_hidden_layers=1).save(directory / "other")
    for number in range(3):
        adapted = base.with_lora(rank=2 + number, seed=number)
        noise = np.random.default_rng(number)
        adapted.with_params(filled(adapted.params, noise)).save(directory / "adapters" / f"v{number}")
    (directory / "adapters" / "out").symlink_to(directory / "newer")
    return directory


def filled(tree: dict[str, Any], draw: np.random.Generator) -> dict[str, Any]:
    """Give adapters, which begin as zeros, an effect."""
    return {
        key: filled(value, draw)
        if isinstance(value, dict)
        else draw.normal(0, 0.3, value.shape).astype(np.float32)
        if key == "lora_b"
        else value
        for key, value in tree.items()
    }


@pytest.fixture
def controlled(models: Path, tiny: Any) -> Iterator[Any]:
    opening = {"slots": 32, "length": 96, "mesh": tiny.one_device()}
    settings = {"control": True, "adapters": models / "adapters", "most_adapters": 3}
    server = serving.serve({"policy": models / "policy"}, opening=opening, **settings)
    yield server
    server.close()


def logps_of(directory: Path, tiny: Any, tokens: list[int], adapter: Path | None = None) -> np.ndarray:
    model = load_model(directory, mesh=tiny.one_device(), adapter=adapter)
    ids = np.array([[*PROMPT, *tokens]])
    logits = np.asarray(model.logits(ids, np.ones_like(ids)), np.float64)[0, len(PROMPT) - 1 : -1]
    logps = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return np.asarray(logps[np.arange(len(tokens)), tokens])


def check(choice: Any, expected: np.ndarray) -> None:
    # Rounding differs by 1e-6 for most tokens and by 2e-4 for one in a thousand; other weights, by far more.
    np.testing.assert_allclose(choice["logprobs"]["token_logprobs"], expected, atol=1e-3)


def test_without_control_no_route_changes_anything(running: Any) -> None:
    for path in ROUTES:
        assert "there is no" in running.refused(path, {}, 404)
    assert (
        running.client.get("/is_paused").status_code == running.client.get("/weight_info").status_code == 404
    )


def test_new_weights_and_their_name(controlled: Any, models: Path, tiny: Any) -> None:
    before = controlled.post("/v1/completions", GREEDY)["choices"][0]
    check(before, logps_of(models / "policy", tiny, before["token_ids"]))
    assert controlled.client.post("/pause?mode=wait&clear_cache=true").json() == {"status": "paused"}
    assert controlled.client.get("/is_paused").json() == {"is_paused": True}
    reload = {"method": "reload_weights", "kwargs": {"weights_path": str(models / "newer")}}
    assert "describes another model" in controlled.refused(
        "/collective_rpc", {**reload, "kwargs": {"weights_path": str(models / "other")}}
    )
    assert controlled.post("/collective_rpc", reload) == {"results": [None]}
    assert controlled.client.post("/reset_prefix_cache?reset_running_requests=true").json() == {
        "success": True
    }
    named = controlled.post("/update_weight_version", {"new_version": "7"})
    assert named == {"success": True, "new_version": "7"}
    waiting: list[Any] = []
    thread = threading.Thread(target=lambda: waiting.append(controlled.post("/v1/completions", GREEDY)))
    thread.start()
    while not controlled.server.calls:
        time.sleep(0.01)
    assert not waiting
    assert controlled.client.post("/resume").json() == {"status": "resumed"}
    thread.join()
    after = waiting[0]["choices"][0]
    check(after, logps_of(models / "newer", tiny, after["token_ids"]))
    assert after["weight_versions"] == [{"version": "7", "start": 0, "end": 12}]
    assert controlled.client.get("/weight_info").json() == {"weight_version": "7"}
    controlled.post("/collective_rpc", {"method": "reload_weights"})
    again = controlled.post("/v1/completions", GREEDY)["choices"][0]
    assert again["logprobs"] == before["logprobs"]
    assert "reload_weights is" in controlled.refused("/collective_rpc", {"method": "rm"})
    for path, why in (("x" * 5000, "too long to be the name of a file"), ("x\0", "no such directory")):
        body = {"method": "reload_weights", "kwargs": {"weights_path": path}}
        assert why in controlled.refused("/collective_rpc", body)


@pytest.mark.parametrize("mode", ["abort", "keep"])
def test_a_pause_in_the_middle(mode: str, controlled: Any, models: Path, tiny: Any) -> None:
    whole: list[Any] = []
    body = {**GREEDY, "max_tokens": 80}
    thread = threading.Thread(target=lambda: whole.append(controlled.post("/v1/completions", body)))
    policy = controlled.server.engine.policies[0]
    step, reached = policy.schedule.step, threading.Event()

    def slow() -> bool:  # so that the pause comes in the middle
        busy: bool = step()
        if busy:
            reached.set()
            time.sleep(0.05)
        return busy

    policy.schedule.step = slow
    thread.start()
    reached.wait()
    controlled.client.post(f"/pause?mode={mode}")
    if mode == "abort":
        thread.join()
    controlled.post(
        "/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(models / "newer")}}
    )
    controlled.client.post("/reset_prefix_cache?reset_running_requests=true")
    controlled.post("/update_weight_version", {"new_version": "2"})
    controlled.client.post("/resume")
    thread.join()
    choice = whole[0]["choices"][0]
    tokens, spans = choice["token_ids"], choice["weight_versions"]
    first = spans[0]["end"]
    old, new = (logps_of(models / name, tiny, tokens) for name in ("policy", "newer"))
    if mode == "abort":
        assert choice["finish_reason"] == "abort"
        assert 0 < len(tokens) < 80
        assert spans == [{"version": "default", "start": 0, "end": len(tokens)}]
        check(choice, old)
    else:
        assert (choice["finish_reason"], len(tokens)) == ("length", 80)
        assert spans == [
            {"version": "default", "start": 0, "end": first},
            {"version": "2", "start": first, "end": 80},
        ]
        check(choice, np.concatenate([old[:first], new[first:]]))


def test_adapters_under_their_names(controlled: Any, models: Path, tiny: Any) -> None:
    for number in range(3):
        loaded = controlled.client.post(
            "/v1/load_lora_adapter",
            json={"lora_name": f"policy-v{number}", "lora_path": str(models / f"adapters/v{number}")},
        )
        assert loaded.text == f"Success: LoRA adapter 'policy-v{number}' added successfully."
    cards = controlled.client.get("/v1/models").json()["data"]
    assert [(card["id"], card["parent"]) for card in cards][1:] == [
        (f"policy-v{i}", "policy") for i in range(3)
    ]
    results: dict[str, Any] = {}

    def ask(name: str) -> None:
        results[name] = controlled.post("/v1/completions", {**GREEDY, "model": name})["choices"][0]

    threads = [threading.Thread(target=ask, args=(card["id"],)) for card in cards]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({str(choice["token_ids"]) for choice in results.values()}) == 4
    for name, choice in results.items():
        adapter = None if name == "policy" else models / "adapters" / name.removeprefix("policy-")
        check(choice, logps_of(models / "policy", tiny, choice["token_ids"], adapter))
    # New weights of the base are also the adapters'.
    controlled.post(
        "/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(models / "newer")}}
    )
    choice = controlled.post("/v1/completions", {**GREEDY, "model": "policy-v1"})["choices"][0]
    check(choice, logps_of(models / "newer", tiny, choice["token_ids"], models / "adapters/v1"))
    again = {"lora_name": "policy-v0", "lora_path": "v1"}
    fourth = {"lora_name": "policy-v3", "lora_path": "v1"}
    assert "3 adapters are loaded" in controlled.refused("/v1/load_lora_adapter", fourth)
    assert "loaded already" in controlled.refused("/v1/load_lora_adapter", again)
    unloaded = controlled.client.post("/v1/unload_lora_adapter", json={"lora_name": "policy-v0"})
    assert unloaded.text == "Success: LoRA adapter 'policy-v0' removed successfully."
    assert "there is no 'policy-v0'" in controlled.refused(
        "/v1/completions", {**GREEDY, "model": "policy-v0"}, 404
    )
    assert "there is no adapter" in controlled.refused(
        "/v1/unload_lora_adapter", {"lora_name": "policy-v0"}, 404
    )
    # A completion keeps an adapter that is unloaded, but not once the base has other weights.
    controlled.client.post("/pause?mode=keep")
    thread = threading.Thread(target=ask, args=("policy-v2",))
    thread.start()
    while not controlled.server.calls:
        time.sleep(0.01)
    controlled.client.post("/v1/unload_lora_adapter", json={"lora_name": "policy-v2"})
    controlled.post("/collective_rpc", {"method": "reload_weights"})
    controlled.client.post("/resume")
    thread.join()
    assert (results["policy-v2"]["finish_reason"], results["policy-v2"]["token_ids"]) == ("abort", [])
    for path in ("../newer", "v1/../../newer", str(models / "newer"), "out", ".", "/", "v1\0", "~"):
        body = {"lora_name": "x", "lora_path": path}
        assert controlled.client.post("/v1/load_lora_adapter", json=body).status_code in (400, 404), path
    itself = controlled.refused("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "."})
    assert "'.' is not below the directory" in itself
    assert len(controlled.server.policies()[0].adapters) == 1
    # A directory that is below the allowed one, with a file that is not.
    linked = models / "adapters" / "linked"
    shutil.copytree(models / "adapters" / "v1", linked)
    (linked / "adapter_model.safetensors").unlink()
    (linked / "adapter_model.safetensors").symlink_to(models / "newer" / "model.safetensors")
    body = {"lora_name": "x", "lora_path": "linked"}
    assert "is not below the directory" in controlled.refused("/v1/load_lora_adapter", body)


@pytest.mark.long
def test_an_adapter_is_served_on_the_quantized_base_that_it_was_trained_on(
    models: Path, tiny: Any, tmp_path: Path
) -> None:
    base = load_model(models / "policy", mesh=tiny.one_device(), quantized="int8").with_lora(rank=2)
    noisy = base.with_params(filled(base.params, np.random.default_rng(3)))
    adapter = tiny.save_policy(noisy, tmp_path)
    opening = {"slots": 4, "length": 96, "mesh": tiny.one_device()}
    settings = {"control": True, "adapters": models / "adapters"}
    server = serving.serve({"policy": adapter}, opening=opening, **settings)
    assert server.server.models["policy"].policy.model.quantized == "int8"
    try:
        (choice,) = server.post("/v1/completions", GREEDY)["choices"]
        check(choice, logps_of(adapter, tiny, choice["token_ids"]))
        more = {"lora_name": "more", "lora_path": str(models / "adapters/v1")}
        assert "is held in int8" in server.refused("/v1/load_lora_adapter", more)
    finally:
        server.close()
