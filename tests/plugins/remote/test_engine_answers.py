"""What an engine answers, read and checked field by field."""

from __future__ import annotations

import copy
import json
import re
import threading
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rlhf_remote import engines, sampling, stations

from rlhf_core import SAMPLER, installed_registry
from rlhf_core.errors import RunError, SequenceError
from tests.shared import services

sampler: Any = partial(installed_registry().get, SAMPLER)
PROMPT, STOP = [5, 6], 1
WANTED = engines.Wanted(0.7, 3, (STOP,))
CHOICES = [
    {
        "index": index,
        "finish_reason": reason,
        "token_ids": ids,
        "prompt_token_ids": PROMPT,
        "logprobs": {"token_logprobs": [-0.5] * len(ids)},
    }
    for index, reason, ids in [(0, "length", [7, 8, 9]), (1, "stop", [7, STOP])]
]
Change = Callable[[Any], Any]
Completions = Callable[..., list[engines.SampledCompletion]]


def as_sglang(choices: list[Any]) -> list[Any]:
    return [
        {
            "meta_info": {
                "prompt_tokens": len(each["prompt_token_ids"]),
                "finish_reason": {"type": each["finish_reason"]},
                "output_token_logprobs": [
                    [logp, i, None]
                    for logp, i in zip(each["logprobs"]["token_logprobs"], each["token_ids"], strict=True)
                ],
            }
        }
        for each in choices
    ]


def edited(**fields: Any) -> Change:
    """Change fields of the second completion; `logps` are its token_logprobs."""

    def edit(choices: list[Any]) -> list[Any]:
        choices = copy.deepcopy(choices)
        if "logps" in fields:
            choices[1]["logprobs"] = {"token_logprobs": fields["logps"]}
        choices[1] |= {name: value for name, value in fields.items() if name != "logps"}
        return choices

    return edit


@pytest.fixture(scope="module")
def service() -> Iterator[services.Service]:
    with services.serve(lambda body: None) as running:
        yield running


@pytest.fixture(scope="module")
def opened(service: services.Service) -> dict[str, Any]:
    return {kind: engines.KINDS[kind](service.url, None, 5.0) for kind in ("vllm", "sglang")}


@pytest.fixture
def completions(service: services.Service, opened: dict[str, Any]) -> Completions:
    """Sample two completions as a trainer does, of an engine that gives an answer."""

    def completions(answer: Any, kind: str = "vllm", **settings: Any) -> list[engines.SampledCompletion]:
        service.reply = lambda body: answer
        engine = opened[kind]
        asked = SimpleNamespace(
            options=SimpleNamespace(engine=kind),
            stations=[SimpleNamespace(engine=engine)],
            inputs=SimpleNamespace(definition=SimpleNamespace(vocab_size=128)),
            _anywhere=lambda policy, ask: ask(engine, "policy"),
            _has_stop_string=lambda ids: 42 in ids,
        )
        wanted = WANTED if not settings else engines.Wanted(0.7, 3, (STOP,), **settings)
        made: Any = asked
        policy: Any = None
        return sampling.PublishingSampler._complete(made, policy, 3, np.array(PROMPT), 2, 0, wanted)

    return completions


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_an_honest_answer_is_taken(kind: str, completions: Completions) -> None:
    answer = {"choices": CHOICES[::-1]} if kind == "vllm" else as_sglang(CHOICES)
    first, second = completions(answer, kind)
    assert (first.ids, first.logps, first.finished) == ([7, 8, 9], [-0.5] * 3, False)
    assert (second.ids, second.finished) == ([7, STOP], True)


IMPOSSIBLE: dict[str, tuple[Change, str]] = {
    "one short": (lambda choices: choices[:1], "answered with 1 completions of a prompt; asked for 2"),
    "one more": (
        lambda choices: [*choices, {**choices[0], "index": 2}],
        "answered with 3 completions of a prompt; asked for 2",
    ),
    "none": (lambda choices: [], "answered with 0 completions of a prompt; asked for 2"),
    "twice the same": (edited(index=0), "numbered 2 completions of a prompt [0, 0], and not 0 to 1"),
    "of the next prompt": (edited(index=2), "numbered 2 completions of a prompt [0, 2], and not 0 to 1"),
    "another prompt": (edited(prompt_token_ids=[5, 7]), "answered a prompt of other ids than were sent"),
    "an id that is no integer": (edited(token_ids=[5.7, STOP]), "token id 5.7 is not an integer"),
    "a whole number as a float": (edited(token_ids=[5.0, STOP]), "token id 5.0 is not an integer"),
    "an id that is true": (edited(token_ids=[True, STOP]), "token id true is not an integer"),
    "an id past the last": (
        edited(token_ids=[128, STOP]),
        "token id 128 is out of range (vocab_size 128): it serves another model",
    ),
    "an id below the first": (edited(token_ids=[-1, STOP]), "token id -1 is out of range (vocab_size 128)"),
    "no ids": (edited(token_ids=[], logps=[]), "0 ids with 0 log-probabilities in a completion"),
    "a number too few": (edited(logps=[-0.5]), "2 ids with 1 log-probabilities in a completion"),
    "no log-probabilities": (edited(logprobs=None), "2 ids with 0 log-probabilities in a completion"),
    "above 0": (edited(logps=[-0.5, 0.1]), "0.1 is not a log-probability"),
    "not finite": (edited(logps=[-0.5, -np.inf]), "-inf is not a log-probability"),
    "not a number": (edited(logps=[-0.5, np.nan]), "nan is not a log-probability"),
    "not finite in float32": (edited(logps=[-0.5, -1e39]), "-1e+39 is not a log-probability"),
    "too long": (
        edited(token_ids=[7, 7, 7, STOP], logps=[-0.5] * 4),
        "a completion has 4 tokens; asked for at most 3",
    ),
    "halved": (edited(token_ids=[7, 8]), "says that a completion stopped, which has no stop token or text"),
    "cut": (edited(finish_reason="length", token_ids=[7, 8]), "cut a completion after 2 tokens; asked for 3"),
    "not stopped": (edited(token_ids=[STOP, 8]), "a completion goes on after the stop token 1"),
}


@pytest.mark.parametrize(("change", "said"), IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_what_cannot_be_an_answer_ends_the_run(change: Change, said: str, completions: Completions) -> None:
    """The collector puts the row of the prompt, of this number, in front."""
    with pytest.raises(
        SequenceError, match=rf"^sampler 'vllm': http://127.0.0.1:\d+: {re.escape(said)}"
    ) as error:
        completions({"choices": change(CHOICES)})
    assert error.value.sequence == 3


@pytest.mark.parametrize("name", ["one short", "one more", "an id that is true", "above 0", "halved"])
def test_what_cannot_be_an_answer_of_sglang_s(name: str, completions: Completions) -> None:
    change, said = IMPOSSIBLE[name]
    with pytest.raises(SequenceError, match=re.escape(said)):
        completions(as_sglang(change(CHOICES)), "sglang")
    with pytest.raises(SequenceError, match="answered a prompt of 3 tokens; 2 were sent"):
        completions(as_sglang(edited(prompt_token_ids=[5, 6, 7])(CHOICES)), "sglang")


def test_a_stop_text_ends_a_completion_too(completions: Completions) -> None:
    halved = {"choices": edited(token_ids=[7, 42])(CHOICES)}
    assert completions(halved, stop=("b",))[1].finished
    with pytest.raises(SequenceError, match="no stop token or text at its end"):
        completions({"choices": edited(token_ids=[7, 41])(CHOICES)}, stop=("b",))


def test_stop_texts_are_looked_for_across_tokens(tiny: Any) -> None:
    words = tiny.make_tokenizer()
    ids = words("a b c")["input_ids"]
    seen: Any = SimpleNamespace(_texts=None, inputs=SimpleNamespace(tokenizer=words))
    for stop, found in [("a b", True), (" c", True), ("d", False)]:
        seen.wanted = engines.Wanted(1.0, 3, stop=(stop,))
        assert sampling.PublishingSampler._has_stop_string(seen, ids) == found


DEEP = json.loads("[" * 400 + "]" * 400)
OTHER = [
    (200, b"<html>busy</html>", {}),
    (200, b"", {}),
    (200, b"[" * 100_000, {}),
    (200, b'{"choices": %s}' % (b"9" * 400), {}),
    *({}, [], [1, 2], "text", DEEP),
    {"choices": None},
    {"choices": {"0": {}}},
    {"choices": [1, 2]},
    {"choices": [{}, {}]},
    *(
        {"choices": edited(**fields)(CHOICES)}
        for fields in (
            {"index": "1"},
            {"index": True},
            {"token_ids": "78"},
            {"token_ids": ["7", "1"]},
            {"token_ids": None},
            {"logps": ["-0.5", "-0.5"]},
            {"logps": [None, None]},
            {"logps": [True, False]},
            {"logps": {"0": -0.5}},
            {"logprobs": [-0.5, -0.5]},
            {"finish_reason": "abort"},
            {"finish_reason": None},
            {"finish_reason": ["stop"]},
            {"weight_versions": [{"version": 3}]},
            {"weight_versions": 3},
        )
    ),
]


@pytest.mark.parametrize("answer", OTHER, ids=range(len(OTHER)))
def test_an_answer_of_another_form_is_no_answer(answer: Any, completions: Completions) -> None:
    """Another engine is asked; see `test_another_engine_is_asked`."""
    with pytest.raises(engines.EngineDownError, match=r"^http://127.0.0.1:\d+"):
        completions(answer)


def test_answers_are_limited(service: services.Service, completions: Completions) -> None:
    """In bytes, by the ids that they may have to name, and in seconds."""
    with pytest.raises(engines.EngineDownError, match=r": the answer has more than 1,053,696 bytes$"):
        completions((200, b" " * (2**20 + 512 * 2 * 5 + 1), {}))
    assert completions((200, json.dumps({"choices": CHOICES}).encode().ljust(2**20 + 512 * 2 * 5), {}))
    over = threading.Event()
    service.reply = lambda body: over.wait(20)
    slow = engines.Vllm(service.url, None, 0.1)
    for ask in (lambda: slow.logps("policy", PROMPT), lambda: slow.status("/collective_rpc")):
        with pytest.raises(engines.EngineDownError, match=rf"^{service.url}: no answer within 0.1 s$"):
            ask()
    over.set()


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
@pytest.mark.parametrize("answer", [OTHER[0], OTHER[2], *OTHER[4:14]], ids=range(12))
def test_every_other_answer_of_another_form(
    kind: str, answer: Any, service: services.Service, opened: dict[str, Any]
) -> None:
    """Of the probe, the models, and what the engine says of itself."""
    service.reply, service.models = lambda body: answer, answer
    engine = opened[kind]
    asked: list[Callable[[], Any]] = [lambda: engine.logps("policy", [3, 4, 5]), engine.models]
    if kind == "vllm":
        asked += [engine.facts, engine.weights_name, lambda: engine.base(None)]
    for ask in asked:
        with pytest.raises(engines.EngineDownError, match=f"^{service.url}/"):
            ask()


@pytest.mark.parametrize(
    "card",
    [
        {},
        {"id": 3},
        {"id": "a", "max_model_len": "64"},
        {"id": "a", "max_model_len": True},
        {"id": "a", "root": 1},
    ],
)
def test_a_model_is_described_by_texts_and_numbers(
    card: Any, service: services.Service, opened: dict[str, Any]
) -> None:
    service.models = {"data": [card]}
    with pytest.raises(engines.EngineDownError, match="expected a list of models, got"):
        opened["vllm"].models()


@pytest.mark.parametrize("answer", OTHER[:9], ids=range(9))
def test_whether_an_id_is_known_is_no_question_for_another_form(
    answer: Any, service: services.Service, opened: dict[str, Any]
) -> None:
    service.reply = lambda body: answer
    with pytest.raises(engines.EngineDownError, match=r"^http://"):
        opened["vllm"].knows(3, "policy")


@pytest.mark.parametrize(
    ("path", "hint"),
    [("/v1/completions", ""), ("/v1/load_lora_adapter", ": start it with its control routes")],
)
def test_only_control_routes_may_be_missing(
    path: str, hint: str, service: services.Service, opened: dict[str, Any]
) -> None:
    service.reply = lambda body: (404, {"error": {"message": "there is no 'a'"}}, {})
    with pytest.raises(RunError, match=f"^{service.url}{path}: HTTP 404: there is no 'a'{hint}$"):
        opened["vllm"].post(path, {}, lambda answer: answer, "")


def test_what_an_engine_does_not_say_of_itself(service: services.Service, opened: dict[str, Any]) -> None:
    engine = opened["vllm"]
    unsaid: list[Any] = ["a text", {}, {"model_config": {}, "parallel_config": {}}]
    for told in unsaid:
        service.models = {"vllm_config": told}
        assert engine.facts() == engines.Facts()
    service.models = {"vllm_config": {"lora_config": None, "model_config": {"dtype": "torch.float32"}}}
    assert engine.facts() == engines.Facts("float32", 0)
    service.models = {"data": []}
    with pytest.raises(engines.EngineDownError, match=r"/v1/models: lists no model"):
        engine.base(None)


def test_another_engine_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that answers in another form is left out for a while."""
    answers = iter([{"choices": None}])
    with (
        services.serve(lambda body: next(answers)) as odd,
        services.serve(lambda body: {"choices": CHOICES}) as honest,
    ):
        made: Any = SimpleNamespace(
            options=sampler("vllm", urls=[odd.url, honest.url], patience=5.0),
            stations=[stations.Station(engines.Vllm(url, None, 5.0)) for url in (odd.url, honest.url)],
        )
        made._closed, made._wrote = False, {}
        made.inputs = SimpleNamespace(draws=False)
        made._ask = lambda station, policy, ask: ask(station.engine, policy.name)
        monkeypatch.setattr(sampling.PublishingSampler, "_load", lambda *_: None)
        made._load = lambda *_: None
        policy: Any = stations.PublishedPolicy("policy", None, 0)  # type: ignore[arg-type]
        for _ in range(2):
            drawn = sampling.PublishingSampler._anywhere(
                made, policy, lambda engine, model: engine.complete(model, PROMPT, 2, 0, WANTED)
            )
            assert [each.ids for each in drawn] == [[7, 8, 9], [7, STOP]]
        assert (len(odd.requests), len(honest.requests)) == (1, 2)


def test_sampling_options_are_neutral_whatever_the_model_s_files_say(
    service: services.Service, opened: dict[str, Any]
) -> None:
    """An engine takes what a request leaves out from generation_config.json, which may say top_k = 1."""
    told = {
        "top_k": 1,
        "top_p": 0.5,
        "min_p": 0.5,
        "repetition_penalty": 1.5,
        "presence_penalty": 1,
        "frequency_penalty": 1,
        "temperature": 0,
        "max_tokens": 1,
        "max_new_tokens": 1,
    }
    used = list[dict[str, Any]]()

    def vllm(body: Any) -> Any:
        used.append({**told, **body})
        return {
            "choices": CHOICES
            if "prompt_logprobs" not in body
            else [{"prompt_logprobs": [None, {"6": {"logprob": -1.0}}]}]
        }

    def sglang(body: Any) -> Any:
        given = body["sampling_params"]
        used.extend({**told, **each} for each in (given if isinstance(given, list) else [given]))
        read = {"meta_info": {"input_token_logprobs": [[None, 5, None], [-1.0, 6, None]]}}
        return as_sglang(CHOICES) if isinstance(given, list) else read

    for kind, service.reply in (("vllm", vllm), ("sglang", sglang)):
        engine = opened[kind]
        engine.complete("policy", PROMPT, 2, 0, WANTED)
        assert engine.logps("policy", PROMPT) == [-1.0]
        engine.knows(3, "policy")
    assert len(used) == 6
    for each in used:
        assert each["top_k"] in (-1, 0)
        assert (each["top_p"], each["min_p"], each["repetition_penalty"]) == (1, 0, 1)
        assert (each["presence_penalty"], each["frequency_penalty"]) == (0, 0)
        assert each["temperature"] in (0.7, 1.0)
