"""Write the data of the recipes: a word tokenizer, demonstrations, preference pairs and prompts.

A prompt such as "please please say kite three :" has one right reply, "kite kite kite": the word, said as often as the
number asks. A careless reply says another word, or the word too often or too rarely.

    tokenizer/          word-level, in Hugging Face's layout
    corpus.jsonl        prompt, completion: demonstrations, about half of them careless
    corpus.heldout…     the same, all of them right
    pairs.jsonl         prompt, chosen, rejected, margin: a right reply and a careless one
    pairs.heldout…      the same; the rejected reply always says another word
    prompts.jsonl       prompt, word, count: the columns that the rewards read
    prompts.heldout…    the same
    right.heldout…      prompt, completion: the right replies to the held-out prompts

The held-out files differ from the training files in kind, not only in rows, so that an evaluation which reads the
wrong file shows it. The same seed writes the same bytes.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

WORDS = ["kite", "book", "lamp", "drum", "boat", "hat", "ball", "chair", "bell", "spoon", "rope", "stone"]
COUNTS = ("one", "two", "three", "four")
VOCABULARY = ["<pad>", "<bos>", "<eos>", "<unk>", "please", "say", ":", *COUNTS, *WORDS]
LONGEST = 4
"""The most words of a reply."""
OTHER_WORD, OTHER_COUNT = 0.25, 0.35
"""How often a demonstration makes each mistake."""


class Draw:
    """Prompts and replies from one seeded stream."""

    def __init__(self, seed: int, file: str) -> None:
        self.random = random.Random(f"{seed} {file}")

    def task(self) -> tuple[str, str, int]:
        """(prompt, word, count)."""
        word, count = self.random.choice(WORDS), self.random.randint(1, LONGEST)
        polite = "please " * self.random.randint(0, 3)
        return f"{polite}say {word} {COUNTS[count - 1]} :", word, count

    def other_word(self, word: str) -> str:
        return self.random.choice([other for other in WORDS if other != word])

    def other_count(self, count: int) -> int:
        return self.random.choice([other for other in range(1, LONGEST + 1) if other != count])

    def demonstration(self, *, careless: bool) -> dict[str, object]:
        prompt, word, count = self.task()
        if careless and self.random.random() < OTHER_WORD:
            word = self.other_word(word)
        if careless and self.random.random() < OTHER_COUNT:
            count = self.other_count(count)
        return {"prompt": prompt, "completion": reply(word, count)}

    def pair(self, *, words_only: bool) -> dict[str, object]:
        prompt, word, count = self.task()
        if words_only or self.random.random() < 0.5:
            rejected, margin = reply(self.other_word(word), count), 0.5
        else:
            rejected, margin = reply(word, self.other_count(count)), 0.0
        return {"prompt": prompt, "chosen": reply(word, count), "rejected": rejected, "margin": margin}

    def prompt(self) -> dict[str, Any]:
        prompt, word, count = self.task()
        return {"prompt": prompt, "word": word, "count": count}


def reply(word: str, count: int) -> str:
    """A reply, led by the space after its prompt."""
    return f" {word}" * count


def answered(row: Mapping[str, Any]) -> dict[str, object]:
    """A prompt with its right reply."""
    return {"prompt": row["prompt"], "completion": reply(row["word"], row["count"])}


def write_tokenizer(directory: Path) -> None:
    """A word-level tokenizer for `transformers.AutoTokenizer`; it puts `<bos>` in front of a text."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    ids = {word: index for index, word in enumerate(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", ids["<bos>"])]
    )
    tokenizer.add_special_tokens(["<pad>", "<bos>", "<eos>", "<unk>"])
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "unk_token": "<unk>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 32,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def write_rows(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def generate(directory: Path, seed: int) -> None:
    """Write the files listed at the top of this module under `directory`."""
    write_tokenizer(directory / "tokenizer")
    for suffix, scale in (("", 1), (".heldout", 8)):
        held_out = bool(suffix)
        draw = Draw(seed, f"corpus{suffix}")
        rows = [draw.demonstration(careless=not held_out) for _ in range(2048 // scale)]
        write_rows(directory / f"corpus{suffix}.jsonl", rows)
        draw = Draw(seed, f"pairs{suffix}")
        write_rows(
            directory / f"pairs{suffix}.jsonl", [draw.pair(words_only=held_out) for _ in range(2048 // scale)]
        )
        draw = Draw(seed, f"prompts{suffix}")
        prompts = [draw.prompt() for _ in range(1024 // scale)]
        write_rows(directory / f"prompts{suffix}.jsonl", prompts)
    write_rows(directory / "right.heldout.jsonl", map(answered, prompts))
