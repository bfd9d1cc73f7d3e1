"""Completions: what is sampled, what is said about it, and what is refused."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rlhf_http import fields
from rlhf_serve.answers import NamedModel, SampledRequest, echoed, prompt_offsets
from tokenizers import Tokenizer
from tokenizers.decoders import Metaspace as MetaspaceDecoder
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Metaspace
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from rlhf_core import load_model
from rlhf_core.tokenizer import Encoder

PROMPT = [5, 6, 7, 8]


def test_log_probabilities_are_those_of_the_model(running: Any, directory: Path, tiny: Any) -> None:
    model = load_model(directory / "policy", mesh=tiny.one_device())
    body = {"prompt": [PROMPT, [9]], "n": 2, "max_tokens": 12, "temperature": 0.7, "seed": 3, "logprobs": 3}
    answer = running.post("/v1/completions", {**body, "return_token_ids": True})
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    for choice in answer["choices"]:
        prompt, tokens = choice["prompt_token_ids"], choice["token_ids"]
        assert prompt == [PROMPT, [9]][choice["index"] // 2]
        ids = np.array([[*prompt, *tokens]])
        logits = np.asarray(model.logits(ids, np.ones_like(ids)), np.float64)[0, len(prompt) - 1 : -1] / 0.7
        logps = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        served = choice["logprobs"]
        np.testing.assert_allclose(served["token_logprobs"], logps[np.arange(len(tokens)), tokens], atol=1e-4)
        best = [sorted(row.values())[-3:] for row in served["top_logprobs"]]
        np.testing.assert_allclose(best, np.sort(logps)[:, -3:], atol=1e-4)
        spans = [{"version": "default", "start": 0, "end": len(tokens)}]
        assert choice["weight_versions"] == spans
        stopped = tokens[-1] in model.stop_ids
        assert choice["finish_reason"] == ("stop" if stopped else "length")
        assert stopped or len(tokens) == 12
    written = sum(len(choice["token_ids"]) for choice in answer["choices"])
    assert answer["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": written,
        "total_tokens": 5 + written,
    }


def test_a_seed_gives_the_same_alone_and_among_31_others(running: Any) -> None:
    body = {"prompt": PROMPT, "max_tokens": 20, "seed": 11, "logprobs": 0, "return_token_ids": True}
    alone = running.post("/v1/completions", body)["choices"][0]
    others = [
        {
            "prompt": [i + 3] * (i % 7 + 1),
            "max_tokens": 5 + i % 30,
            "temperature": 0.2 + i / 10,
            "top_k": i + 1,
        }
        for i in range(31)
    ]
    with ThreadPoolExecutor(32) as pool:
        bodies = [*others[:15], body, *others[15:]]
        together = list(pool.map(lambda each: running.post("/v1/completions", each), bodies))
    choice = together[15]["choices"][0]
    assert choice["token_ids"] == alone["token_ids"]
    assert choice["logprobs"] == alone["logprobs"]


def test_text_is_what_generate_writes(running: Any, directory: Path, rlhf: Any) -> None:
    texts = ["a b c", "d e"]
    flags = [word for text in texts for word in ("--prompt", text)]
    sampled = ("--seed", "4", "--num_generations", "2", "--max_completion_length", "9", "--top_p", "0.9")
    ran = rlhf("generate", str(directory / "policy"), "--raw", *flags, *sampled)
    assert ran.code == 0, ran.message
    answer = running.post(
        "/v1/completions", {"prompt": texts, "n": 2, "seed": 4, "max_tokens": 9, "top_p": 0.9}
    )
    assert [choice["text"] for choice in answer["choices"]] == ran.out.splitlines()


def joined(parts: list[Any]) -> dict[str, Any]:
    """Join the parts of a streamed choice to what an answer without stream has."""
    whole = {**parts[-1], "text": "".join(each["text"] for each in parts)}
    whole["token_ids"] = [token for each in parts for token in each["token_ids"]]
    whole["prompt_token_ids"] = parts[0]["prompt_token_ids"]
    whole["prompt_logprobs"] = parts[0].get("prompt_logprobs")
    if parts[0]["logprobs"] is not None:
        names = parts[0]["logprobs"]
        whole["logprobs"] = {name: [x for each in parts for x in each["logprobs"][name]] for name in names}
    return whole


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"stop": ["m", "zz"]},
        {"stop": ["m", "zz"], "include_stop_str_in_output": True, "logprobs": 2},
        {"logprobs": 1, "n": 3},
        {"logprobs": 0, "prompt_logprobs": 1, "prompt": [[3, 4, 5], [6]]},
        {"logprobs": 1, "n": 2, "max_tokens": 0, "echo": True},
    ],
)
def test_a_stream_has_the_parts_of_the_answer(running: Any, more: dict[str, Any], echo: bool) -> None:
    common = {"prompt": "a b c", "max_tokens": 40, "seed": 5, "return_token_ids": True, "echo": echo}
    body = {**common, **more}
    whole = running.post("/v1/completions", body)
    parts = running.events("/v1/completions", {**body, "stream_options": {"include_usage": True}})
    assert parts[-1]["usage"] == whole["usage"]
    assert whole["usage"]["completion_tokens"] == sum(len(each["token_ids"]) for each in whole["choices"])
    for choice in whole["choices"]:
        own = [p["choices"][0] for p in parts[:-1] if p["choices"][0]["index"] == choice["index"]]
        assert [each["finish_reason"] for each in own[:-1]] == [None] * (len(own) - 1)
        assert joined(own) == choice
        if "logprobs" in more:
            offsets = choice["logprobs"]["text_offset"]
            assert offsets == sorted(offsets)
            assert len(own) == 1 or offsets[-1] > len("a b c") * echo


def test_the_same_prompt_as_ids_and_as_text_has_the_same_text(running: Any) -> None:
    common = {"max_tokens": 5, "seed": 1, "ignore_eos": True, "echo": True, "logprobs": 0}
    (text,) = running.post("/v1/completions", {**common, "prompt": "a b c"})["choices"]
    (ids,) = running.post("/v1/completions", {**common, "prompt": [3, 4, 5]})["choices"]
    assert ids == text
    assert text["text"].startswith("a b c ")
    sampling = {"max_tokens": 5, "seed": 1, "ignore_eos": True}
    body = {"model": "policy", "token_ids": [3, 4, 5], "sampling_params": sampling, "output_mode": "text"}
    (generated,) = running.post("/inference/v1/generate", body)["choices"]
    assert "a b c" + generated["text"] == text["text"]


def test_an_echo_leaves_out_what_the_tokenizer_adds(opened: dict[str, Any]) -> None:
    vocabulary = {"<bos>": 0, "<unk>": 1, "▁Dear": 2, "▁Mia": 3, "<end>": 4}
    backend = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer, backend.decoder = Metaspace(), MetaspaceDecoder()
    backend.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<bos>", unk_token="<unk>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<end>"]})
    served = replace(opened["policy"], encoder=Encoder(tokenizer))
    prompt = np.array([0, 2, 3, 4], np.int32)
    assert served.encoder.prompts(["Dear Mia<end>"])[0].tolist() == prompt.tolist()
    call = SampledRequest("x", NamedModel("policy", served, None), [prompt], 1)  # type: ignore[arg-type]
    pending = SimpleNamespace(index=0, prompt=prompt)
    for given, text in (("Dear Mia<end>", "Dear Mia<end>"), (prompt.tolist(), "Dear Mia<end>")):
        body = fields.Completion(prompt=given)
        assert echoed(body, call, pending) == text  # type: ignore[arg-type]
        assert prompt_offsets(call, pending, text) == [0, 0, 4, 8]  # type: ignore[arg-type]


def test_what_ends_a_completion(running: Any) -> None:
    greedy = {"prompt": PROMPT, "max_tokens": 30, "temperature": 0, "return_token_ids": True}
    whole = running.post("/v1/completions", {**greedy, "ignore_eos": True})["choices"][0]
    tokens, words = whole["token_ids"], whole["text"].split()
    assert len(tokens) == 30
    new = next(i for i in range(3, 30) if tokens[i] not in tokens[:i])
    cut = running.post("/v1/completions", {**greedy, "ignore_eos": True, "stop_token_ids": [tokens[new]]})
    choice = cut["choices"][0]
    assert (choice["token_ids"], choice["stop_reason"]) == (tokens[: new + 1], tokens[new])
    assert choice["text"].split() == words[:new]
    for keeps in (False, True):
        stop = {"stop": ["??", f" {words[new]}"], "include_stop_str_in_output": keeps, "ignore_eos": True}
        choice = running.post("/v1/completions", {**greedy, **stop})["choices"][0]
        assert (choice["token_ids"], choice["stop_reason"]) == (tokens[: new + 1], f" {words[new]}")
        assert choice["text"].split() == words[: new + keeps]
        assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"prompt": ""}, "the prompt has no tokens"),
        ({"prompt": "a", "model": "x" * 2000}, "model: String should have at most 1024 characters"),
        ({"prompt": "a", "x" * 2**20: 1}, "x …"),
    ],
)
def test_refusals_are_short(running: Any, body: Any, message: str) -> None:
    """Others are in tests/mistakes."""
    refusal = running.refused("/v1/completions", body)
    assert message in refusal
    assert len(refusal) < 5000


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", lambda text: {"model": "policy", "prompt": text}),
        (
            "/v1/chat/completions",
            lambda text: {"model": "policy", "messages": [{"role": "user", "content": text}]},
        ),
        ("/tokenize", lambda text: {"model": "policy", "prompt": text}),
        ("/score", lambda text: {"model": "rm", "rows": [{"prompt": "a", "completion": text}]}),
    ],
)
def test_a_text_is_refused_before_it_is_tokenized(
    path: str, body: Any, running: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fields, "MOST_CHARACTERS", 100)
    scorer = running.server.models["rm"].scorer
    monkeypatch.setattr(scorer, "contract", replace(scorer.contract, max_length=96))
    monkeypatch.setattr(Encoder, "tokenize", lambda *_: pytest.fail("tokenized"))
    refusal = running.refused(path, body("x" * (16 * 96 + 1)), 413)
    assert "characters are too many for a context of 96 tokens; at most 1,536 are read" in refusal


def test_the_prompt_echoed_and_judged(running: Any, directory: Path, tiny: Any) -> None:
    model = load_model(directory / "policy", mesh=tiny.one_device())
    prompt = [*range(4, 40), 7, 7, 9]
    body = {
        "prompt": prompt,
        "max_tokens": 2,
        "echo": True,
        "logprobs": 2,
        "prompt_logprobs": 1,
        "temperature": 0.3,
    }
    choice = running.post("/v1/completions", {**body, "seed": 1})["choices"][0]
    logits = np.asarray(model.logits(np.array([prompt]), np.ones((1, len(prompt)))), np.float64)[0]
    logps = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    expected = logps[np.arange(len(prompt) - 1), prompt[1:]]
    served = choice["logprobs"]["token_logprobs"]
    assert served[0] is None
    assert len(served) == len(prompt) + 2
    np.testing.assert_allclose(served[1 : len(prompt)], expected, atol=1e-4)
    ranks = 1 + (logps[:-1] > expected[:, None]).sum(-1)
    for i, row in enumerate(choice["prompt_logprobs"][1:]):
        own = row[str(prompt[i + 1])]
        np.testing.assert_allclose(own["logprob"], expected[i], atol=1e-4)
        assert own["rank"] == ranks[i]
        np.testing.assert_allclose(row[str(logps[i].argmax())]["logprob"], logps[i].max(), atol=1e-4)
    only = running.post("/v1/completions", {**body, "prompt": "a b c", "max_tokens": 0})["choices"][0]
    assert only["text"] == "a b c"
    assert len(only["logprobs"]["tokens"]) == 3


def test_ids_for_ids(running: Any) -> None:
    sampling = {"max_tokens": 9, "seed": 2, "n": 2, "logprobs": 1}
    answer = running.post(
        "/inference/v1/generate", {"token_ids": PROMPT, "model": "policy", "sampling_params": sampling}
    )
    same = {"prompt": PROMPT, "return_token_ids": True, "model": "policy", **sampling}
    choices = running.post("/v1/completions", same)["choices"]
    for one, other in zip(answer["choices"], choices, strict=True):
        assert one["token_ids"] == other["token_ids"]
        assert [each["logprob"] for each in one["logprobs"]["content"]] == other["logprobs"]["token_logprobs"]
        assert one["weight_versions"] == other["weight_versions"]
    parts = running.events(
        "/inference/v1/generate", {"token_ids": PROMPT, "model": "policy", "sampling_params": sampling}
    )
    own = [p["choices"][0] for p in parts if p["choices"][0]["index"] == 1]
    assert [token for each in own for token in each["token_ids"]] == choices[1]["token_ids"]


def test_tokens_there_and_back(running: Any) -> None:
    answer = running.post("/tokenize", {"model": "policy", "prompt": "a b", "return_token_strs": True})
    assert answer == {"count": 2, "max_model_len": 96, "tokens": [3, 4], "token_strs": ["a", "b"]}
    assert running.post("/detokenize", {"model": "policy", "tokens": [3, 4, 1]}) == {"prompt": "a b </s>"}


def test_metrics_and_load(running: Any) -> None:
    running.post("/v1/completions", {"model": "policy", "prompt": "a", "max_tokens": 3})
    text = running.client.get("/metrics").text
    assert 'rlhf_requests_total{path="/v1/completions",status="200"}' in text
    assert "rlhf_time_to_first_token_seconds_bucket" in text
    assert "rlhf_completions_waiting 0.0" in text
    assert running.client.get("/load").json() == {"server_load": 0}
