"""What is timed: the model shapes, the six works, their useful tokens and the products they need.

Every runner imports this file, so it needs NumPy and nothing else.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

SEED = 0
WARM_UP = 2
"""Steps that are not timed, after the first."""


@dataclass(frozen=True)
class Model:
    """A llama decoder, float32, its head not tied to the embedding; heads are hidden / heads wide."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocab: int

    @property
    def layer_params(self) -> int:
        """Parameters of the layers' matrices: those that every token is multiplied with."""
        kv = self.hidden // self.heads * self.kv_heads
        attention = 2 * self.hidden * (self.hidden + kv)
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def config(self) -> dict[str, Any]:
        """By Hugging Face's names."""
        return {
            "model_type": "llama",
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "intermediate_size": self.intermediate,
            "vocab_size": self.vocab,
            "max_position_embeddings": 1024,
            "tie_word_embeddings": False,
        }


MODELS = {
    # 7.1M parameters, 5.0M as a reward model. The name rounds up, as the peers' first table did.
    "10m": Model(256, 4, 4, 2, 688, 8192),
    # 56M parameters, 40M as a reward model.
    "50m": Model(512, 8, 8, 4, 1376, 32000),
}
WIDE = Model(256, 2, 4, 2, 688, 151936)
"""The model of W5, whatever --model says."""

PAIRS, PAIR_TOKENS = 8, 256
PROMPTS, GROUP, PROMPT, COMPLETION = 2, 4, 64, 192
BETA = 0.04
SEQUENCES, LENGTH = 8, 512
EPOCH_PAIRS, SHORTEST, LONGEST = 2000, 20, 256
REAL_LONGEST = 512
LEARNING_RATE = 1e-5

WORKS = {
    "W1": "reward step: 8 pairs of 256 + 256 tokens, nothing shared, AdamW",
    "W2": "GRPO update on given completions: 2 prompts x 4 x (64 + 192), the reference included",
    "W3": "rollouts: 2 prompts of 64 tokens x 4, 192 new tokens each, temperature 1",
    "W4": "the whole GRPO step through the trainer: rollout, a Python reward, update",
    "W5": "log-probabilities forward and backward: vocabulary 151,936, hidden 256, 2 layers, 8 x 512",
    "W6": "an epoch of 2,000 pairs of 20-256 tokens, 8 a step, from text to trained model",
    "W6hh": "the same on real pairs (--data, at most 2,000) of at most 512 tokens, with shared prompts",
}


class Group(NamedTuple):
    """Sequences that share their start: lengths, tokens."""

    prompt: int
    own: tuple[int, ...]


def groups(work: str) -> list[Group]:
    """What one step reads; those of W6 depend on the data."""
    if work == "W1":
        return [Group(0, (PAIR_TOKENS, PAIR_TOKENS))] * PAIRS
    if work == "W5":
        return [Group(0, (LENGTH,))] * SEQUENCES
    return [Group(PROMPT, (COMPLETION,) * GROUP)] * PROMPTS


def tokens(work: str, read: Sequence[Group]) -> int:
    """Count useful tokens of a step: no padding, a shared prompt once; of rollouts, the sampled ones."""
    if work == "W3":
        return sum(sum(group.own) for group in read)
    return sum(group.prompt + sum(group.own) for group in read)


def forward_flops(model: Model, read: Sequence[Group], logits: int) -> float:
    """Floating-point operations of the products of one pass over `read` that gives `logits` rows of logits.

    Two a parameter of the layers' matrices and token, two a parameter of the head and row of logits, and
    4 x hidden a layer for each pair of a query and a key it sees: causal, so half a square. What an implementation
    does beyond that is not counted: what is masked, padding, prompts repeated, passes done again, element-wise work.
    Nor are the embedding, which is no product, and the reward head, which is one vector a sequence.
    """
    seen = sum(
        g.prompt * (g.prompt + 1) / 2 + sum(n * g.prompt + n * (n + 1) / 2 for n in g.own) for g in read
    )
    count = sum(group.prompt + sum(group.own) for group in read)
    return (
        2.0 * model.layer_params * count
        + 4.0 * model.hidden * model.layers * seen
        + 2.0 * model.hidden * model.vocab * logits
    )


def flops(work: str, model: Model, read: Sequence[Group], beta: float = BETA) -> float:
    """Count the FLOPs of a step. A backward pass takes two forward passes; a reference (beta above 0) one more."""
    sampled = sum(sum(group.own) for group in read)
    if work in ("W1", "W6", "W6hh"):
        return 3 * forward_flops(model, read, 0)
    if work == "W5":
        return 3 * forward_flops(model, read, sampled - len(read))  # nothing predicts a first token
    update = (4 if beta else 3) * forward_flops(model, read, sampled)
    # A prompt gives one row of logits for its whole group, and the token sampled last is never read.
    fed = [Group(group.prompt, tuple(n - 1 for n in group.own)) for group in read]
    rollout = forward_flops(model, fed, len(read) + sum(sum(group.own) for group in fed))
    return {"W2": update, "W3": rollout, "W4": update + rollout}[work]


def token_ids(rows: int, length: int, vocab: int, number: int = 0) -> np.ndarray:
    """int32 [rows, length], random, no two rows with the same first token."""
    draw = np.random.default_rng([SEED, number])
    ids = draw.integers(3, vocab, (rows, length)).astype(np.int32)
    ids[:, 0] = 3 + draw.permutation(vocab - 3)[:rows]
    return ids


def words(ids: Sequence[int] | np.ndarray) -> str:
    """The text that the benchmark's tokenizer reads as these ids."""
    return " ".join(f"w{int(i)}" for i in ids)


def word_pairs(vocab: int) -> list[dict[str, str]]:
    """Make up the pairs of W6: nothing shared, uniform lengths, with room for the token that ends a sequence."""
    draw = np.random.default_rng(SEED)
    lengths = draw.integers(SHORTEST - 1, LONGEST, (EPOCH_PAIRS, 2))
    return [
        {
            name: words(draw.integers(3, vocab, n))
            for name, n in zip(("chosen", "rejected"), pair, strict=True)
        }
        for pair in lengths
    ]


def epoch_rows(task: Task) -> tuple[list[dict[str, Any]], int]:
    """Return the pairs of W6 and the maximum length in tokens; longer sequences are dropped."""
    if task.data is None:
        return word_pairs(task.model.vocab), LONGEST
    lines = task.data.read_text(encoding="utf-8").splitlines()[:EPOCH_PAIRS]
    names = ("prompt", "chosen", "rejected")
    return [{name: row[name] for name in names} for row in map(json.loads, lines)], REAL_LONGEST


def write_tokenizer(directory: Path, vocab: int, *, stops: bool) -> Path:
    """A tokenizer directory: id i is the word "wi"; 1 pads.

    stops: whether a model of `vocab` tokens can end a sequence: with id 2, else with an id it does not have, so that
    every completion gets its full length in every library without an option that costs it something.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    ids = {f"w{i}": i for i in range(vocab)} | ({} if stops else {"</s>": vocab})
    names = {0: "<unk>", 1: "<pad>"} | ({2: "</s>"} if stops else {})
    for i, name in names.items():
        del ids[f"w{i}"]
        ids[name] = i
    backend = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    )
    made.save_pretrained(directory)
    return directory


def reward(completions: Sequence[str], **_: Any) -> list[float]:
    """The Python reward of W4: the share of even words, which differs between completions."""
    shares = []
    for text in completions:
        numbers = [int(word[1:]) for word in text.split() if word[1:].isdigit()]
        shares.append(sum(n % 2 == 0 for n in numbers) / max(len(numbers), 1))
    return shares


def versions(*distributions: str) -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in distributions}


@dataclass(frozen=True)
class Task:
    """What a runner is asked for."""

    work: str
    size: str
    beta: float
    steps: int
    data: Path | None
    tokenizer: Path | None

    @property
    def model(self) -> Model:
        return WIDE if self.work == "W5" else MODELS[self.size]

    @property
    def is_epoch(self) -> bool:
        """Whether it is timed whole, and not step by step."""
        return self.work.startswith("W6")

    @property
    def command(self) -> list[str]:
        """The arguments that `parse` makes this of."""
        given = {"work": self.work, "model": self.size, "beta": self.beta, "steps": self.steps}
        given |= {"data": self.data, "tokenizer": self.tokenizer} if self.data else {}
        return [part for name, value in given.items() for part in (f"--{name}", str(value))]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--work", required=True, choices=[*WORKS, "W2b0", "W4b0"], help="b0: with beta 0")
    parser.add_argument("--model", default="10m", choices=tuple(MODELS))
    parser.add_argument("--beta", type=float, default=BETA, help="weight of the KL term; 0: no reference")
    parser.add_argument("--steps", type=int, default=10, help="steps that are timed")
    parser.add_argument("--data", type=Path, help="W6hh: a JSON lines file of prompt, chosen and rejected")
    parser.add_argument(
        "--tokenizer", type=Path, help="W6hh: a tokenizer directory, with a chat template if needed"
    )


def task_of(given: argparse.Namespace) -> Task:
    work, beta = (given.work[:2], 0.0) if given.work.endswith("b0") else (given.work, given.beta)
    if work == "W6hh" and (given.data is None or given.tokenizer is None):
        raise SystemExit(
            "W6hh needs --data FILE and --tokenizer DIRECTORY (make: DATA=FILE TOKENIZER=DIRECTORY)"
        )
    return Task(work, given.model, beta, given.steps, given.data, given.tokenizer)
