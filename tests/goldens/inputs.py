"""What the golden pipelines read: a tokenizer, rows, rewards, a tool and a model's module, written without our code.

A later version of the suite must make the same of them, so nothing here imports it.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

WORDS = "red green blue kite boat drum ball for from with the a one two three four five six"
NAMES = "mia tom ana leo eva max"
TEMPLATE = """{%- if tools %}{{ '<|system|>' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}\
{{ '<|end|>' }}{% endif %}
{%- for message in messages %}{{ '<|' + message.role + '|> ' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}{{ '<tool_call>' + call.function | tojson + '</tool_call>' }}{% endfor %}
{{- ' <|end|>' }}{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|> ' }}{% endif %}"""
REWARDS = '''
import os
from pathlib import Path


def brevity(completions):
    return [-float(len(text.split())) for text in completions]


def names_it(completions, wanted, log_metric):
    log_metric("asked", float(len(wanted)))
    return [float(word in text.split()) for text, word in zip(completions, wanted)]


def sometimes(completions, wanted):
    """Apply to some completions, and not to the others."""
    return [None if word == "kite" else float(len(text) % 3) for text, word in zip(completions, wanted)]


def last_words(completions):
    return [-float(len((messages[-1]["content"] or "").split())) for messages in completions]


def interrupted(completions):
    """End the process at the third call after which there is a checkpoint, once."""
    there = sorted(Path("run").glob("policy/checkpoints/*"))
    if there and not Path("interrupted").exists():
        Path("interrupted").touch()
        raise RuntimeError("interrupted on purpose")
    return [-float(len(text.split())) for text in completions]
'''
TOOLS = '''
def price(thing: str) -> int:
    """Look up what a thing costs.

    Args:
        thing: The thing.
    """
    return {"kite": 3, "boat": 5}[thing]
'''
WORLD = '''
from rlhf_core import Turn


class Tries:
    """Ask for a word; after a wrong answer, say so, and ask again."""

    def __init__(self, tries=3):
        self.tries = tries

    def reset(self, row, seed):
        self.wanted, self.tried = row["wanted"], seed % 2
        return [{"role": "user", "content": row["prompt"]}]

    def step(self, completion):
        self.tried += 1
        if self.wanted in completion["content"] or self.tried >= self.tries:
            return Turn(reward=float(len(completion["content"]) % 5), done=True, metrics={"tries": self.tried})
        return Turn([{"role": "user", "content": "with the " + self.wanted + " ?"}], reward=-0.1)
'''
METRICS = """
def spread(predictions):
    values = [float(value) for value in predictions]
    return {"spread": max(values) - min(values)}
"""
SMALL = """
from flax import nnx

from rlhf_core import MODEL, hookimpl

try:
    from rlhf_families import nnx_family
except ImportError:
    from rlhf_core import nnx_family


class Small(nnx.Module):
    def __init__(self, config, rngs):
        width = config["hidden_size"]
        self.words = nnx.Embed(config["vocab_size"], width, rngs=rngs)
        self.places = nnx.Embed(64, width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, width, rngs=rngs, decode=False)

    def hidden(self, input_ids, positions, attention_mask):
        x = self.words(input_ids) + self.places(positions)
        return x + self.attention(x, mask=attention_mask[:, None])

    def __call__(self, input_ids, positions, attention_mask):
        return self.words.attend(self.hidden(input_ids, positions, attention_mask))


@hookimpl
def rlhf_register(registry):
    registry.add(MODEL, "small", nnx_family("small", Small))
"""
INTERPRETED = '''
"""Attention by the Pallas kernels, interpreted: the one place that knows where a version has them."""

from rlhf_core import hookimpl
from rlhf_core.contracts import ATTENTION

try:
    from rlhf_kernels.attention import Kernels, attend_pallas
except ImportError:
    from rlhf_core.models.attention_pallas import Kernels, attend_pallas


def interpreted(q, k, v, positions, visible_until, *, window=None, softcap=None, sinks=None, starts=None):
    given = {"window": window, "softcap": softcap, "sinks": sinks, "starts": starts}
    return attend_pallas(q, k, v, positions, visible_until, **given, kernels=Kernels("tpu", interpret=True))


@hookimpl
def rlhf_register(registry):
    registry.add(ATTENTION, "interpreted", interpreted)
'''


def write(directory: Path) -> None:
    """Write all inputs into a directory."""
    write_tokenizer(directory / "tok")
    files = {
        "rewards.py": REWARDS,
        "tools.py": TOOLS,
        "my_metrics.py": METRICS,
        "small.py": SMALL,
        "world.py": WORLD,
    }
    files |= {"interpreted.py": INTERPRETED}
    for name, text in files.items():
        (directory / name).write_text(text.lstrip())
    for name, rows in rows_of_files().items():
        (directory / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_tokenizer(directory: Path) -> None:
    """Write a tokenizer of whole words, with a chat template."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    marks = ["<pad>", "<|end|>", "<unk>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"]
    words = [*marks, *WORDS.split(), *NAMES.split(), "?", "!", ",", "{", "}", '"', ":", "name", "arguments"]
    words += ["price", "thing", "<tool_call>", "</tool_call>"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in marks])
    tokenizer.add_tokens(["<tool_call>", "</tool_call>"])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<pad>", unk_token="<unk>"
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(directory)


def rows_of_files() -> dict[str, list[dict[str, object]]]:
    """Return the rows of every file of data: lengths differ, so that rows are packed."""
    draw = random.Random(7)
    words, names = WORDS.split(), NAMES.split()

    def text(most: int) -> str:
        return " ".join(draw.choices(words, k=draw.randint(1, most)))

    prompts = [
        {"prompt": f"{draw.choice(names)} with {text(5)}", "wanted": draw.choice(words)} for _ in range(20)
    ]
    texts = [{"prompt": row["prompt"], "completion": f" {text(7)}"} for row in prompts]
    pairs = [{"prompt": row["prompt"], "chosen": f" {text(6)}", "rejected": f" {text(6)}"} for row in prompts]
    margins = [{**row, "margin": round(draw.random(), 2)} for row in pairs]
    chats = [
        {"messages": [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": text(6)}]}
        for row in prompts
    ]
    asked = [
        {"prompt": [{"role": "user", "content": row["prompt"]}], "wanted": row["wanted"]} for row in prompts
    ]
    return {
        "prompts.jsonl": prompts[:16],
        "prompts.heldout.jsonl": prompts[16:],
        "texts.jsonl": texts[:16],
        "texts.heldout.jsonl": texts[16:],
        "chats.jsonl": chats[:12],
        "pairs.jsonl": margins[:16],
        "pairs.heldout.jsonl": pairs[16:],
        "asked.jsonl": asked,
    }
