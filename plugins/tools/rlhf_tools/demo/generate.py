"""Write the quickstart's data: a word tokenizer, demonstrations, preference pairs and prompts.

A prompt is an order, "Mia wants a red kite .", and the one good reply to it is "Dear Mia , here is your red
kite . Thank you !". A careless reply has one or more of six mistakes: a wrong name, colour or item, a rude
close, words in disarray, or an early end.

    tokenizer/                       word-level, about 130 words, in Hugging Face's layout
    corpus.jsonl, corpus.heldout…    prompt, completion: demonstrations, half of them good, half careless
    pairs.jsonl, pairs.heldout…      prompt, chosen, rejected, mistake: a good reply and a careless one
    prompts.jsonl, prompts.heldout…  prompt
    data.json                        the settings that made it all, written last

In demonstrations each mistake is made independently with probability q = 1 - 0.5^(1/6), so that a model
that copies their manners succeeds half of the time. A rejected reply has one mistake, so that what the reward
model has learned can be measured kind by kind. Orders of the held-out files are combinations of name, colour
and item that the other files never mention, in an order or in a reply.

The same seed writes the same bytes.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from rlhf_tools.demo.words import COLOURS, ITEMS, NAMES, POLITE, RUDE, ShopOrder, vocabulary

KINDS = ("name", "colour", "item", "close", "malformed", "unfinished")
PAIRS = ("name", "item", "colour", "malformed") * 2 + ("name", "item", "colour", "close", "unfinished")
"""Mistakes of the training pairs, in turn: the hardest to learn come most often."""
MISTAKE_PROBABILITY = 1 - 0.5 ** (1 / len(KINDS))
LONGEST_RAMBLE = 8
"""Words that a malformed reply may add at its end."""


@dataclass(frozen=True)
class Sizes:
    """Rows of each file; `heldout_pairs` of each kind; `heldout_orders` to draw the held-out from."""

    demonstrations: int = 8192
    pairs: int = 8192
    prompts: int = 1920
    heldout_demonstrations: int = 512
    heldout_pairs: int = 256
    heldout_prompts: int = 512
    heldout_orders: int = 4096


class Shop:
    """Draw different orders, and replies to them, from one seeded stream.

    held_out: the orders that only held-out files mention; inside: whether this is one of those files.
    """

    def __init__(self, seed: str, held_out: frozenset[ShopOrder], *, inside: bool) -> None:
        self.rng = random.Random(seed)
        self.held_out, self.inside = held_out, inside

    def orders(self, count: int) -> list[ShopOrder]:
        """Draw `count` different orders."""
        if self.inside:
            return self.rng.sample(sorted(self.held_out), count)
        return draw_orders(self.rng, count, without=self.held_out)

    def careless(self, order: ShopOrder, mistakes: Iterable[str]) -> str:
        """Write a reply with these mistakes; outside the held-out files it mentions no held-out order."""
        kinds = set(mistakes)
        while True:
            said = ShopOrder(*(self._slot(order, slot, slot in kinds) for slot in ShopOrder._fields))
            if self.inside or said not in self.held_out:
                break
        good = said.reply(self.rng.choice(RUDE) if "close" in kinds else POLITE).split()
        words = self._disarranged(good) if "malformed" in kinds else good
        if "unfinished" in kinds:
            words = words[: self.rng.randrange(1, min(len(words), len(good)))]
        return " ".join(words)

    def demonstration(self, order: ShopOrder) -> str:
        """Write a reply that makes each mistake independently with `MISTAKE_PROBABILITY`."""
        return self.careless(order, [kind for kind in KINDS if self.rng.random() < MISTAKE_PROBABILITY])

    def _slot(self, order: ShopOrder, slot: str, wrong: bool) -> str:
        right: str = getattr(order, slot)
        words = {"name": NAMES, "colour": COLOURS, "item": ITEMS}[slot]
        return self.rng.choice([word for word in words if word != right]) if wrong else right

    def _disarranged(self, words: list[str]) -> list[str]:
        """Return `words` with one of them doubled, dropped, swapped with the next or moved, or with more at the end."""
        at = self.rng.randrange(len(words) - 1)
        match self.rng.randrange(5):
            case 0:
                return [*words[:at], words[at], *words[at:]]
            case 1:
                return [*words[:at], *words[at + 1 :]]
            case 2:
                return [*words[:at], words[at + 1], words[at], *words[at + 2 :]]
            case 3:
                stray = self.rng.choice([word for word in words if word != words[at]])
                return [*words[:at], stray, *words[at:]]
            case _:
                start = self.rng.choice((0, len(words) - len(POLITE.split())))
                return [*words, *words[start:][: self.rng.randint(1, LONGEST_RAMBLE)]]


def draw_orders(
    rng: random.Random, count: int, *, without: frozenset[ShopOrder] = frozenset()
) -> list[ShopOrder]:
    """Draw `count` different orders, none of them in `without`."""
    found: dict[ShopOrder, None] = {}
    while len(found) < count:
        order = ShopOrder(rng.choice(NAMES), rng.choice(COLOURS), rng.choice(ITEMS))
        if order not in without:
            found[order] = None
    return list(found)


def pair(shop: Shop, order: ShopOrder, mistake: str, *, flip: bool) -> dict[str, str]:
    """Make a preference row; replies begin with the space after the prompt. `flip` prefers the careless reply."""
    good = f" {order.reply()}"
    bad = f" {shop.careless(order, [mistake])}"
    chosen, rejected = (bad, good) if flip else (good, bad)
    return {"prompt": order.prompt, "chosen": chosen, "rejected": rejected, "mistake": mistake}


def write_tokenizer(directory: Path) -> None:
    """Write a word-level tokenizer for `transformers.AutoTokenizer`, which puts `<bos>` in front of a text."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = vocabulary()
    ids = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    # Every mark is its own word, so that a reply may begin with one right after the prompt's full stop.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Punctuation()]
    )
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
        "model_max_length": 64,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def write_rows(path: Path, rows: Iterable[Mapping[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def settings(seed: int, shuffle_labels: bool, sizes: Sizes) -> dict[str, object]:
    """Return the content of `data.json`."""
    return {"seed": seed, "shuffle_labels": shuffle_labels, "sizes": asdict(sizes)}


def write_side(
    directory: Path,
    seed: int,
    held_out: frozenset[ShopOrder],
    *,
    inside: bool,
    demonstrations: int,
    pairs: int,
    prompts: int,
    shuffle_labels: bool,
) -> None:
    """Make the three files of either the held-out or all other orders."""
    suffix = ".heldout" if inside else ""
    kinds = KINDS if inside else PAIRS
    shop = Shop(f"{seed} corpus{suffix}", held_out, inside=inside)
    write_rows(
        directory / f"corpus{suffix}.jsonl",
        (
            {"prompt": order.prompt, "completion": f" {shop.demonstration(order)}"}
            for order in shop.orders(demonstrations)
        ),
    )
    shop = Shop(f"{seed} pairs{suffix}", held_out, inside=inside)
    labels = random.Random(f"{seed} labels{suffix}")
    write_rows(
        directory / f"pairs{suffix}.jsonl",
        (
            pair(shop, order, kinds[index % len(kinds)], flip=shuffle_labels and labels.random() < 0.5)
            for index, order in enumerate(shop.orders(pairs))
        ),
    )
    shop = Shop(f"{seed} prompts{suffix}", held_out, inside=inside)
    write_rows(
        directory / f"prompts{suffix}.jsonl", ({"prompt": order.prompt} for order in shop.orders(prompts))
    )


def generate(
    directory: Path, *, seed: int = 0, shuffle_labels: bool = False, sizes: Sizes | None = None
) -> None:
    """Write the files listed at the top of this module under `directory`.

    shuffle_labels: in `pairs.jsonl`, prefer either reply at random: a control, from which nothing can be
        learned. The held-out pairs keep their true labels.
    """
    sizes = sizes or Sizes()
    held_out = frozenset(draw_orders(random.Random(f"{seed} held out"), sizes.heldout_orders))
    write_tokenizer(directory / "tokenizer")
    write_side(
        directory,
        seed,
        held_out,
        inside=False,
        demonstrations=sizes.demonstrations,
        pairs=sizes.pairs,
        prompts=sizes.prompts,
        shuffle_labels=shuffle_labels,
    )
    write_side(
        directory,
        seed,
        held_out,
        inside=True,
        demonstrations=sizes.heldout_demonstrations,
        pairs=sizes.heldout_pairs * len(KINDS),
        prompts=sizes.heldout_prompts,
        shuffle_labels=False,
    )
    text = json.dumps(settings(seed, shuffle_labels, sizes), indent=2)
    (directory / "data.json").write_text(text + "\n", encoding="utf-8")
