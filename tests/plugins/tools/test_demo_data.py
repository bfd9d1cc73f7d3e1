"""The demo's generator, tokenizer and judge."""

from __future__ import annotations

import ast
import itertools
import json
import tomllib
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from rlhf_tools.demo import generate, judge, words

HERE = Path(words.__file__).parent


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data of `make demo`, in full size."""
    directory = tmp_path_factory.mktemp("quickstart")
    generate.generate(directory, seed=0)
    return directory


def rows(file: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def small() -> generate.Sizes:
    return generate.Sizes(
        demonstrations=50,
        pairs=60,
        prompts=20,
        heldout_demonstrations=10,
        heldout_pairs=4,
        heldout_prompts=10,
        heldout_orders=100,
    )


def contents(directory: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(directory)): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()
    }


def test_words_are_distinct_and_take_the_article_a() -> None:
    slots = [*words.NAMES, *words.COLOURS, *words.ITEMS]
    assert len(set(slots)) == len(slots)
    assert all(colour[0] not in "aeiou" for colour in words.COLOURS)
    assert 100 <= len(words.vocabulary()) <= 256
    assert len(set(words.vocabulary())) == len(words.vocabulary())


def test_the_judge_accepts_exactly_one_reply() -> None:
    prompt, good = "Mia wants a red kite .", "Dear Mia , here is your red kite . Thank you !"
    assert judge.judge(prompt, good).success
    assert judge.judge(prompt, f" {good}").success, "a completion starts with the space after its prompt"
    assert not judge.judge(prompt, good, finished=False).success
    cases = {
        "Dear Tom , here is your red kite . Thank you !": ("name",),
        "Dear Mia , here is your blue kite . Thank you !": ("colour",),
        "Dear Mia , here is your red lamp . Thank you !": ("item",),
        "Dear Mia , here is your red kite . Now go away .": ("close",),
        "Dear Tom , here is your blue lamp . Not my problem .": ("name", "colour", "item", "close"),
    }
    for reply, mistakes in cases.items():
        assert judge.judge(prompt, reply).mistakes == mistakes
    for position in range(len(good.split())):
        said = good.split()
        dropped = " ".join(said[:position] + said[position + 1 :])
        doubled = " ".join(said[: position + 1] + said[position:])
        unfinished = " ".join(said[:position])
        for reply in (dropped, doubled, unfinished):
            assert judge.judge(prompt, reply).mistakes == ("well_formed",), reply
    for reply in (good + " Thank you !", good.replace(" ", ""), good.lower(), good.replace("red", "kite")):
        assert not judge.judge(prompt, reply).well_formed, reply
    with pytest.raises(ValueError, match="not an order"):
        judge.judge("Mia wants a kite .", good)


def test_the_judge_knows_only_the_words() -> None:
    tree = ast.parse((HERE / "judge.py").read_text(encoding="utf-8"))
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    imported |= {a.name for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names}
    assert imported == {"__future__", "re", "typing", "rlhf_tools.demo.words"}


def test_no_reward_sees_the_judge() -> None:
    """Nor does a trainer: import-linter keeps rlhf_tools from core and from every other plugin."""
    pipeline = tomllib.loads((HERE / "quickstart.toml").read_text(encoding="utf-8"))
    rewards = [reward for stage in pipeline["stage"] for reward in stage.get("rewards", [])]
    assert rewards == [{"name": "model", "model": "rm.model"}]
    assert "judge" not in json.dumps(pipeline)


def test_half_of_the_demonstrations_are_right(data: Path) -> None:
    verdicts = [judge.judge(row["prompt"], row["completion"]) for row in rows(data / "corpus.jsonl")]
    assert len(verdicts) == 8192
    assert np.mean([v.success for v in verdicts]) == pytest.approx(0.5, abs=0.02)
    well_formed = [v for v in verdicts if v.well_formed]
    q = 1 - 0.5 ** (1 / 6)
    assert len(well_formed) / len(verdicts) == pytest.approx((1 - q) ** 2, abs=0.02)
    for slot in ("name", "colour", "item", "close"):
        wrong = np.mean([not getattr(v, slot) for v in well_formed])
        assert wrong == pytest.approx(q, abs=0.015), slot
    both = np.mean([not v.name and not v.colour for v in well_formed])
    assert both == pytest.approx(q * q, abs=0.006), "mistakes are independent"


@pytest.mark.parametrize("file", ["pairs.jsonl", "pairs.heldout.jsonl"])
def test_a_rejected_reply_has_the_one_mistake_it_names(data: Path, file: str) -> None:
    seen: Counter[str] = Counter()
    for row in rows(data / file):
        assert judge.judge(row["prompt"], row["chosen"]).success
        mistake = row["mistake"]
        expected = "well_formed" if mistake in ("malformed", "unfinished") else mistake
        assert judge.judge(row["prompt"], row["rejected"]).mistakes == (expected,), row
        seen[mistake] += 1
        good, bad = row["chosen"].split(), row["rejected"].split()
        assert (bad == good[: len(bad)]) == (mistake == "unfinished"), row
    assert set(seen) == set(generate.KINDS)
    wanted = generate.KINDS if "heldout" in file else generate.PAIRS
    assert all(
        abs(seen[kind] / len(rows(data / file)) - wanted.count(kind) / len(wanted)) < 0.001 for kind in seen
    )


def test_malformed_replies_come_in_every_form(data: Path) -> None:
    lengths = Counter(
        len(row["rejected"].split()) - len(row["chosen"].split())
        for row in rows(data / "pairs.jsonl")
        if row["mistake"] == "malformed"
    )
    assert set(lengths) == set(range(-1, 9)), (
        "dropped, swapped, doubled or inserted, and running on to 8 words"
    )


def test_held_out_orders_are_in_no_stage(data: Path) -> None:
    held_out = {
        judge.parse_order(row["prompt"]) for file in data.glob("*.heldout.jsonl") for row in rows(file)
    }
    assert len(held_out) > 1500
    names, colours, items = set(words.NAMES), set(words.COLOURS), set(words.ITEMS)
    for file in ("corpus.jsonl", "pairs.jsonl", "prompts.jsonl"):
        for row in rows(data / file):
            for column in ("prompt", "completion", "chosen", "rejected"):
                said = row.get(column, "").split()
                mentioned = itertools.product(
                    *([w for w in said if w in slot] for slot in (names, colours, items))
                )
                for order in mentioned:
                    assert order not in held_out, (file, row)


def test_orders_are_distinct_within_a_file(data: Path) -> None:
    for file in data.glob("*.jsonl"):
        prompts = [row["prompt"] for row in rows(file)]
        assert len(set(prompts)) == len(prompts), file


def test_a_seed_decides_every_byte(tmp_path: Path) -> None:
    sizes = small()
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        generate.generate(tmp_path / name, seed=seed, sizes=sizes)
    a, b, c = (contents(tmp_path / name) for name in "abc")
    assert a == b
    differing = {name for name in a if a[name] != c[name]}
    assert differing == {name for name in a if not name.startswith("tokenizer")}


def test_shuffled_labels_flip_half_of_the_training_pairs_only(tmp_path: Path) -> None:
    sizes = generate.Sizes(pairs=1200, demonstrations=50, prompts=20)
    generate.generate(tmp_path / "true", sizes=sizes)
    generate.generate(tmp_path / "shuffled", sizes=sizes, shuffle_labels=True)
    true, shuffled = (contents(tmp_path / name) for name in ("true", "shuffled"))
    assert {name for name in true if true[name] != shuffled[name]} == {"pairs.jsonl", "data.json"}
    right = [
        judge.judge(row["prompt"], row["chosen"]).success for row in rows(tmp_path / "shuffled/pairs.jsonl")
    ]
    assert np.mean(right) == pytest.approx(0.5, abs=0.06)
    for true_row, row in zip(
        rows(tmp_path / "true/pairs.jsonl"), rows(tmp_path / "shuffled/pairs.jsonl"), strict=True
    ):
        assert {true_row["chosen"], true_row["rejected"]} == {row["chosen"], row["rejected"]}


def test_the_tokenizer_is_read_by_transformers(data: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(data / "tokenizer")
    assert len(tokenizer) == len(words.vocabulary())
    special = (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id)
    assert special == (0, 1, 2, 3)
    for row in rows(data / "pairs.jsonl")[:300]:
        prompt = tokenizer(row["prompt"])["input_ids"]
        for reply in (row["chosen"], row["rejected"]):
            whole = tokenizer(row["prompt"] + reply)["input_ids"]
            assert whole[: len(prompt)] == prompt
            assert whole[0] == 1
            assert 3 not in whole
            assert tokenizer.decode(whole, skip_special_tokens=True) == row["prompt"] + reply
            # A sampled reply is decoded without the space in front; scored after its prompt it is the same.
            said = tokenizer.decode([*whole[len(prompt) :], 2], skip_special_tokens=True)
            assert said == reply.strip()
            assert tokenizer(row["prompt"] + said)["input_ids"] == whole


def test_everything_fits_the_lengths_of_the_pipeline(data: Path) -> None:
    pipeline = tomllib.loads((HERE / "quickstart.toml").read_text(encoding="utf-8"))
    base, rm, policy = pipeline["stage"]
    longest = max(
        len(row["prompt"].split()) + len(row[column].split()) + 2  # <bos> and <eos>
        for file, column in (("corpus.jsonl", "completion"), ("pairs.jsonl", "rejected"))
        for row in rows(data / file)
    )
    assert longest <= base["max_sequence_length"] == rm["max_sequence_length"]
    assert longest <= base["model"]["max_position_embeddings"]
    replies = max(len(row["completion"].split()) + 1 for row in rows(data / "corpus.jsonl"))
    assert replies <= policy["sampling"]["max_completion_length"]
    assert (
        max(len(row["prompt"].split()) + 1 for row in rows(data / "prompts.jsonl"))
        <= policy["max_prompt_length"]
    )
