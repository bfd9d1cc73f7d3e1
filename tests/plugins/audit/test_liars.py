"""Samplers and engines that lie: the run refuses them, or a check of `rlhf audit` names them after three rollouts."""

import json
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import jax
import numpy as np
import pytest
from rlhf_audit import audit
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rlhf_core import run_pipeline
from rlhf_core.errors import RunError
from rlhf_core.models import fresh_model
from rlhf_core.testing import LIES, lying_sampler
from tests.shared import serving

LETTERS = "abcde"
FILE = """
dir = "run"
[[stage]]
name = "policy"
trainer = "grpo"
model = "lm"
train_data = "prompts.jsonl"
rewards = ["here.py:early"]
total_batch_size = 96
num_generations = 8
max_completion_length = 12
max_training_steps = 3
learning_rate = 5e-3
weight_decay = 0.0
log_steps = 1
save_steps = 1
num_preview_samples = 0
"""
HERE = """
from rlhf_core import SAMPLER, hookimpl
from rlhf_core.testing import LIES, lying_sampler


def early(completions):
    return [text.count("a") / 6 for text in completions]


@hookimpl
def rlhf_register(registry):
    for lie in LIES:
        registry.add(SAMPLER, lie, lying_sampler(lie))
"""


def ambiguous():
    """A byte-level BPE with all pairs of its letters: most texts have many encodings, one of which is its own."""
    pairs = [(one, other) for one in LETTERS for other in LETTERS]
    vocabulary = ["<pad>", "</s>", "Ġ", *LETTERS, *map("".join, pairs)]
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(vocabulary)}, pairs))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", pad_token="<pad>")


@pytest.fixture(scope="module")
def place(tiny, tmp_path_factory):
    place = tmp_path_factory.mktemp("liars")
    made = fresh_model(tiny.SIZES, "lm", tokenizer=ambiguous(), mesh=tiny.one_device(), seed=1)
    scaled = jax.tree.map(lambda x: x * np.float32(SCALE) if x.ndim > 1 else x, made.params)
    made.with_params(scaled).save(place / "lm")
    draw = np.random.default_rng(0)
    words = ["".join(draw.choice([*LETTERS], draw.integers(3, 9))) for _ in range(48)]
    tiny.write_rows(place / "prompts.jsonl", [{"prompt": word} for word in words])
    (place / "here.py").write_text(HERE)
    return place


SCALE = 12.0


def run_and_audit(place, directory, options):
    """Run three updates; return what ended the run, or "", and the checks by name."""
    (place / "p.toml").write_text(FILE + options)
    ended = ""
    try:
        run_pipeline(place / "p.toml", dir=directory, plugins=[place / "here.py"])
    except RunError as error:
        ended = str(error)
    found = audit(directory, exact=True, plugins=[place / "here.py"]).get("policy", [])
    return ended, {check.name: check for check in found}


ENDED = {
    **dict.fromkeys(("greedy", "colder", "top_k"), "not drawn from the policy"),
    "one_fewer": "completions for 96",
    "one_more": "completions for 96",
}
"""What ends the run of a liar within three rollouts."""
NAMED = {
    **dict.fromkeys(("greedy", "colder", "top_k"), "sampling test"),
    "other_prompt": "trainer against sampler",
    "one_late": "policy that sampled",
    "two_late": "policy that sampled",
    "two_digits": "rounded log-probabilities",
    "sent_twice": "equal completions",
    "encoded_again": "ids of our own sampler",
}
"""The check of the audit that names a lie."""
SAID = {"one_late": "1 rollout late", "two_late": "2 rollouts late"}


def require_named(lie, ended, checks):
    failed = {name: check for name, check in checks.items() if check.verdict == "FAIL"}
    if lie is None:
        assert (ended, failed) == ("", {})
        applied = {name for name, check in checks.items() if check.verdict == "pass"}
        assert {"sampling test, exact", "policy that sampled", "ids of our own sampler"} <= applied
        return
    if lie in NAMED:
        assert NAMED[lie] in failed
        assert SAID.get(lie, "") in failed[NAMED[lie]].why


@pytest.mark.long
@pytest.mark.parametrize("lie", [None, "ahead", *LIES])
def test_a_lie_is_named(lie, place, tmp_path):
    honest = lie in (None, "ahead")
    options = "" if honest else f'sampler = {{ name = "{lie}" }}\n'
    ended, checks = run_and_audit(
        place, tmp_path / "run", options + "rollouts_ahead = 1\n" * (lie == "ahead")
    )
    assert ENDED.get(lie, "") in ended
    require_named(None if honest else lie, ended, checks)


def test_every_lie_has_a_check():
    with pytest.raises(ValueError, match="no lie is called 'white': greedy"):
        lying_sampler("white")
    assert {*NAMED, "one_fewer", "one_more"} == {*LIES}


ASKED = {
    "greedy": {"temperature": 0.0},
    "colder": {"temperature": 0.7},
    "top_k": {"top_k": 5},
    "one_fewer": {"n": 7},
    "one_more": {"n": 9},
}
"""Lies of an engine that asks for something else than it was asked."""
DRAWN_TOGETHER = 8
"""How many tokens a sampler asks for at once to test how they are drawn."""
LATE = {"one_late": 1, "two_late": 2}


class LyingEngine:
    """A proxy of an engine. It lies about completions and draws for the sampling test; probes have honest answers."""

    def __init__(self, url, lie):
        self.lie, self.held, self.client = lie, [], httpx.Client(base_url=url, timeout=60)
        self.tokenizer = ambiguous()
        engine = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *arguments):
                pass

            def answer(self):
                content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                status, answered = engine.ask(self.command, self.path, content)
                self.send_response(status)
                self.send_header("Content-Length", str(len(answered)))
                self.end_headers()
                self.wfile.write(answered)

            do_GET = do_POST = answer  # noqa: N815

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self):
        self.server.shutdown()
        self.server.server_close()

    def ask(self, method, path, content):
        body = json.loads(content) if content else {}
        if path == "/v1/unload_lora_adapter" and self.lie in LATE:
            return 200, b"{}"
        if path == "/v1/load_lora_adapter":
            self.held.append(body.get("lora_name"))
        probe = body.get("max_tokens") == 1 and body.get("n", 1) != DRAWN_TOGETHER
        if path != "/v1/completions" or probe:
            answered = self.client.request(method, path, content=content)
            return answered.status_code, answered.content
        asked = {**body, **ASKED.get(self.lie, {})}
        if self.lie in LATE:
            asked["model"] = self.held[max(self.held.index(body["model"]) - LATE[self.lie], 0)]
        if self.lie in ("other_prompt", "other_prompt_quietly"):
            asked["prompt"] = [body["prompt"][0][::-1]]
        answered = self.client.post(path, json=asked)
        said = answered.json()
        self.change(body, said["choices"])
        return answered.status_code, json.dumps(said).encode()

    def change(self, body, choices):
        for choice in choices:
            logps = choice["logprobs"]["token_logprobs"]
            if self.lie == "two_digits":
                choice["logprobs"]["token_logprobs"] = [round(each, 2) for each in logps]
            if self.lie == "other_prompt_quietly":
                choice["prompt_token_ids"] = body["prompt"][0]
            if self.lie == "encoded_again" and choice["finish_reason"] == "stop":
                ids = choice["token_ids"]
                again = [
                    *self.tokenizer.encode(self.tokenizer.decode(ids[:-1]), add_special_tokens=False),
                    ids[-1],
                ]
                if len(again) <= body["max_tokens"]:
                    choice["token_ids"] = again
                    choice["logprobs"]["token_logprobs"] = [*logps, *logps[-1:] * 12][: len(again)]
        if self.lie == "sent_twice":
            choices[1] = {**choices[0], "index": 1}


@pytest.fixture(scope="module")
def url(tiny, place):
    """The address of `rlhf serve policy=DIR --control --adapters DIRECTORY` in a thread."""
    opening = {"slots": 64, "length": 64, "mesh": tiny.one_device()}
    running = serving.serve({"policy": place / "lm"}, opening=opening, control=True, adapters=place)
    yield str(running.client.base_url).rstrip("/")
    running.close()


ENGINES_END = {
    **ENDED,
    "one_fewer": "7 completions",
    "one_more": "9 completions",
    "other_prompt": "other ids",
}


@pytest.mark.long
@pytest.mark.parametrize(
    ("lie", "ahead"),
    [
        (None, 0),
        (None, 1),
        ("greedy", 1),
        ("top_k", 1),
        *((lie, 0) for lie in ("other_prompt_quietly", *LIES)),
    ],
)
def test_an_engine_that_lies_is_named(lie, ahead, url, place, tmp_path):
    engine = LyingEngine(url, lie)
    directory = place / "policies" / f"{lie}-{ahead}"
    options = (
        f'sampler = {{ name = "rlhf", urls = ["{engine.url}"], directory = "{directory}" }}\n'
        f"lora = {{ rank = 4, alpha = 16 }}\nrollouts_ahead = {ahead}\n"
    )
    try:
        ended, checks = run_and_audit(place, tmp_path / "run", options)
    finally:
        engine.close()
    with suppress(KeyError):
        assert ENGINES_END[lie] in ended
    if lie == "other_prompt_quietly":
        require_named("other_prompt", ended, checks)
    elif lie not in ("other_prompt", "one_fewer", "one_more"):
        require_named(lie, ended, checks)
