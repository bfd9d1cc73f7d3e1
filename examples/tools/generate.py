"""Write the data of the example: sums that are too large for the model's head, and some that show how to call a tool.

    python examples/tools/generate.py examples/tools/data

    tokenizer/             byte-level, a token per digit, with the chat template chat.jinja
    shown.jsonl            messages, tools: conversations in which the tool is called, mostly with other numbers than
                           those that were asked for
    told.jsonl             messages: the same sums, answered at once: the control without a tool
    sums.jsonl             prompt, answer: what GRPO trains on
    sums.heldout.jsonl     the same, about numbers that no other file has

The same seed writes the same bytes.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
MISREAD = 0.3
"""Probability that a digit in a call is wrong, so that one call in seventeen has both numbers right."""
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"]


@dataclass(frozen=True)
class Sizes:
    """Rows of each file, and the digits of each number."""

    shown: int = 4096
    sums: int = 4096
    heldout: int = 256
    digits: int = 4


def question(a: int, b: int) -> list[dict[str, Any]]:
    """Ask for a sum."""
    return [{"role": "user", "content": f"What is {a} + {b}?"}]


def with_tool(a: int, b: int, rng: random.Random) -> list[dict[str, Any]]:
    """Answer a sum with the tool's help, mostly with wrong digits in the call."""
    said = [misread(number, rng) for number in (a, b)]
    call = {"type": "function", "function": {"name": "add", "arguments": dict(zip("ab", said, strict=True))}}
    return [
        *question(a, b),
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "add", "content": str(sum(said))},
        {"role": "assistant", "content": f"The answer is {sum(said)}."},
    ]


def misread(number: int, rng: random.Random) -> int:
    """Replace each digit of a number by another one with the probability MISREAD."""
    digits = [
        rng.choice([other for other in "123456789" if other != digit]) if rng.random() < MISREAD else digit
        for digit in str(number)
    ]
    return int("".join(digits))


def at_once(a: int, b: int) -> list[dict[str, Any]]:
    """Answer a sum without help."""
    return [*question(a, b), {"role": "assistant", "content": f"The answer is {a + b}."}]


def sums(rng: random.Random, digits: int) -> Iterator[tuple[int, int]]:
    """Draw pairs of numbers, none of them twice."""
    seen = set()
    while True:
        pair = tuple(rng.randrange(10 ** (digits - 1), 10**digits) for _ in range(2))
        if pair not in seen:
            seen.add(pair)
            yield pair[0], pair[1]


def generate(directory: Path, *, seed: int = 0, sizes: Sizes | None = None) -> None:
    """Write all files into `directory`."""
    from calc import add
    from transformers.utils import get_json_schema

    sizes, tools = sizes or Sizes(), [get_json_schema(add)]
    drawn = sums(random.Random(f"sums {seed}"), sizes.digits)
    shown, rng = [next(drawn) for _ in range(sizes.shown)], random.Random(f"misread {seed}")
    rows = {
        "shown.jsonl": [{"messages": with_tool(a, b, rng), "tools": tools} for a, b in shown],
        "told.jsonl": [{"messages": at_once(a, b)} for a, b in shown],
        "sums.jsonl": list(_asked(drawn, sizes.sums)),
        "sums.heldout.jsonl": list(_asked(drawn, sizes.heldout)),
    }
    directory.mkdir(parents=True, exist_ok=True)
    for name, lines in rows.items():
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        (directory / name).write_text(text, encoding="utf-8")
    tokenizer = train_tokenizer([*rows["shown.jsonl"], *rows["told.jsonl"]])
    tokenizer.save_pretrained(directory / "tokenizer")


def _asked(drawn: Iterator[tuple[int, int]], count: int) -> Iterator[dict[str, Any]]:
    for _ in range(count):
        a, b = next(drawn)
        yield {"prompt": question(a, b), "answer": str(a + b)}


def train_tokenizer(rows: list[dict[str, Any]]) -> Any:
    """Train a byte-level tokenizer on rendered conversations; every digit is a token."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    raw.decoder = decoders.ByteLevel()
    blank = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    blank.chat_template = (HERE / "chat.jinja").read_text(encoding="utf-8")
    texts = [
        blank.apply_chat_template(row["messages"], tools=row.get("tools"), tokenize=False) for row in rows
    ]
    trainer = trainers.BpeTrainer(
        vocab_size=512, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    raw.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = blank.chat_template
    return tokenizer


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    generate(arguments.directory, seed=arguments.seed)
