"""Cached tokens equal freshly encoded ones, whatever happens to the files."""

from __future__ import annotations

import subprocess
import sys
import types

import numpy as np
import pytest

from rlhf_core import data
from rlhf_core.data import cache
from rlhf_core.errors import InputError
from rlhf_core.tokenizer import Encoder, TextOptions
from tests.shared import chat_cases as chat


@pytest.fixture(autouse=True)
def directory(kept_from):
    return kept_from(1)


ROWS = [
    {"prompt": "a b", "chosen": " c d", "rejected": " e", "completion": " c", "margin": 0.1},
    {"prompt": "a b", "chosen": "a b c", "rejected": " e", "completion": "a b c", "margin": None},
    {"prompt": "a", "chosen": "", "rejected": " e", "completion": " ", "margin": 1},
    {"prompt": "b", "chosen": " c d e f g", "rejected": " c d e f h", "completion": " c d e f", "margin": 2},
    {"prompt": "a b", "chosen": " e", "rejected": " c d", "completion": " c", "margin": 3},
]
SIDES = [{name: row[name] for name in ("prompt", "chosen", "rejected", "margin")} for row in ROWS]
WRITTEN = [{name: row[name] for name in ("prompt", "completion")} for row in ROWS]
CALLS = {
    "pairs": (data.encode_pairs, SIDES, "max_length"),
    "texts": (data.encode_texts, WRITTEN, "max_length"),
    "prompts": (data.encode_prompts, WRITTEN, "max_prompt_length"),
}


def plain(value):
    """Convert arrays to comparable dtypes, shapes and bytes."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, tuple | list):
        return [plain(each) for each in value]
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    return [plain(each) for each in vars(value).values()] if hasattr(value, "__dict__") else value


@pytest.mark.parametrize("kind", CALLS)
def test_from_the_disk_is_as_without_it(kind, tokenizer, monkeypatch, directory, kept_from):
    encode, rows, limit = CALLS[kind]
    ways = [{limit: None}, {limit: 5}, {limit: 4, "overlong": "truncate", "truncation_mode": "keep_start"}]
    kept_from(1000)
    wanted = [encode(data.load(rows), tokenizer, **way) for way in ways]
    assert not directory.exists()
    kept_from(1)
    first = encode(data.load(rows), tokenizer, **ways[0])
    plain_tokenize = Encoder.tokenize

    def tokenize(self, texts):
        assert len(texts) == 1, "encoded again"  # one text shows what the tokenizer adds
        return plain_tokenize(self, texts)

    monkeypatch.setattr(Encoder, "tokenize", tokenize)
    again = [encode(data.load(rows), tokenizer, **way) for way in ways]
    assert plain([first, *again]) == plain([wanted[0], *wanted])
    assert first.digests.tolist() == again[0].digests.tolist() == wanted[0].digests.tolist()
    assert [each.name for each in directory.iterdir()] == [each.name for each in directory.glob(f"{kind}-*")]
    assert len(list(directory.iterdir())) == 1


def test_sources_are_kept_apart_and_names_are_not_kept(tokenizer, tiny, tmp_path, directory):
    for name in ("a.jsonl", "b.jsonl"):
        tiny.write_rows(tmp_path / name, SIDES)
    one, other = str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")
    data.encode_pairs(data.load(one), tokenizer, max_length=None)
    encoded = data.encode_pairs(data.load([other, {"path": one, "weight": 2}]), tokenizer, max_length=None)
    assert len(list(directory.iterdir())) == 2  # equal content shares an entry; repeated rows have their own
    assert encoded.where(0) == f"{other} row 1"


def test_whatever_decides_the_ids_is_part_of_the_key(tokenizer, tiny, directory, monkeypatch):
    talk = [{"chosen": [{"role": "assistant", "content": c}], "rejected": "b"} for c in "ab"]
    for row in talk:
        row["rejected"] = [{"role": "assistant", "content": "c d e"}]
    other = tiny.make_tokenizer()
    other.add_special_tokens({"eos_token": "a"})
    dated = "{{ strftime_now('%d') }}{{ messages[0].content }}"

    def count(rows, tokenizer, template=None):
        data.encode_pairs(data.load(rows), tokenizer, max_length=None, chat_template=template)
        return len(list(directory.iterdir()))

    assert [count(talk, tokenizer, "plain"), count(talk, tokenizer, "plain")] == [1, 1]
    assert count(talk, tokenizer, "{{ messages[0].content }}") == 2
    assert count(talk, other, "plain") == 3
    assert count(talk, tokenizer, dated) == 4
    monkeypatch.setattr(
        cache, "date", types.SimpleNamespace(today=lambda: np.datetime64("2020-01-01").item())
    )
    assert count(talk, tokenizer, dated) == 5
    assert count(talk, tokenizer, "plain") == 5
    monkeypatch.setattr(cache, "code_hash", lambda: "other rules")
    assert count(talk, tokenizer, "plain") == 6


def test_tokens_of_other_options_are_not_taken(directory):
    rows = [
        {"prompt": [chat.user("a bab")], "chosen": [chat.assistant("ab")], "rejected": [chat.assistant("b")]}
    ]
    named = {"default": chat.CHATML, "tool_use": chat.TOOLS}
    dated = "{{ strftime_now('%d %b %Y') }}" + chat.CHATML
    ways = [
        (chat.CHATML, TextOptions()),
        (chat.CHATML, TextOptions(chat_template_kwargs={"x": 1})),
        (chat.CHATML, TextOptions(read_at="template")),
        (chat.CHATML, TextOptions(prompt_repeated=True)),
        (chat.CHATML, TextOptions(system_prompt="ab ba")),
        (named, TextOptions()),
        ({**named, "tool_use": chat.CHATML}, TextOptions()),
        (dated, TextOptions(template_date="2026-01-30")),
        (dated, TextOptions(template_date="2026-01-31")),
    ]

    def count(template, options):
        tokenizer = chat.byte_level(eos="<|im_end|>", pad="<|endoftext|>")
        tokenizer.chat_template = template
        data.encode_pairs(data.load(rows), tokenizer, max_length=None, chat_template=options)
        return len(list(directory.iterdir()))

    for number, way in enumerate(ways, 1):
        assert [count(*way), count(*way)] == [number, number]
    undated = TextOptions(template_date="2026-01-31")  # only dated templates depend on it
    assert count(chat.CHATML, undated) == len(ways)


def test_wrong_rows_are_reported_every_time(tokenizer, directory):
    for _ in range(2):
        with pytest.raises(InputError, match="dataset row 6: 'chosen' is null"):
            data.encode_pairs(data.load([*SIDES, {**SIDES[0], "chosen": None}]), tokenizer, max_length=None)
    assert not directory.exists()


def build():
    """Yield two parts, with three rows and one row."""
    yield {**cache.flatten("ids", [np.arange(4), None, np.arange(2)]), "odd": np.array([False, False, True])}
    yield {**cache.flatten("ids", [np.arange(3)]), "odd": np.array([True])}


WHOLE = {
    "ids": np.array([0, 1, 2, 3, 0, 1, 0, 1, 2]),
    "ids_ends": np.array([4, 4, 6, 9]),
    "odd": np.array([False, False, True, True]),
}


def test_an_entry_in_the_place_of_another_is_built_anew(directory):
    cache.load_or_build("other", lambda: [{"ids": np.arange(2), "ids_ends": np.array([2])}])
    (directory / "other").rename(directory / "asked")
    for build_it in (build, lambda: pytest.fail("built again")):
        arrays = cache.load_or_build("asked", build_it)
        assert {name: plain(array) for name, array in arrays.items()} == {
            name: plain(array) for name, array in WHOLE.items()
        }


def damage(path, how):
    target = path / ("manifest.json" if how.startswith("manifest") else "ids")
    content = target.read_bytes()
    if how.endswith("missing"):
        target.unlink()
    elif how.endswith("truncated"):
        target.write_bytes(content[:-3])
    elif how == "changed":
        target.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    else:
        target.write_text('{"format": 0}')


@pytest.mark.parametrize(
    "how",
    [
        "missing",
        "truncated",
        "changed",
        "manifest missing",
        "manifest truncated",
        "manifest of another format",
    ],
)
def test_what_is_damaged_is_built_anew(how, directory):
    cache.load_or_build("key", build)
    damage(directory / "key", how)
    built = []
    found = cache.load_or_build("key", lambda: built.append(1) or build())
    assert built
    assert plain([found[name] for name in WHOLE]) == plain(list(WHOLE.values()))
    again = cache.load_or_build("key", lambda: pytest.fail("built again"))
    assert plain([again[name] for name in WHOLE]) == plain(list(WHOLE.values()))
    assert not again["ids"].flags.writeable
    assert [each.name for each in directory.iterdir()] == ["key"]


PROCESS = """
import sys, time
import numpy as np
from rlhf_core.data import cache
print("ready", flush=True)
sys.stdin.readline()
for i in range(20):
    found = cache.load_or_build(f"key{i}", lambda: [{"x": np.arange(10000) + i}])
    assert found["x"].tolist() == list(range(i, 10000 + i))
"""


@pytest.mark.long
def test_processes_do_not_disturb_each_other(directory):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    started = [subprocess.Popen([sys.executable, "-c", PROCESS], **pipes) for _ in range(3)]
    for each in started:
        assert each.stdout.readline() == "ready\n"
    for each in started:
        each.stdin.write("go\n")
        each.stdin.flush()
    for each in started:
        _, err = each.communicate(timeout=60)
        assert (each.returncode, err) == (0, "")
    assert sorted(each.name for each in directory.iterdir()) == sorted(f"key{i}" for i in range(20))


def test_where_nothing_can_be_written_nothing_is_kept(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RLHF_CACHE", str(tmp_path / "file"))
    with pytest.warns(
        UserWarning, match=r"tokens are not cached in .*file/tokens: Not a directory; set RLHF_CACHE"
    ):
        found = cache.load_or_build("key", build)
    assert plain([found[name] for name in WHOLE]) == plain(list(WHOLE.values()))

    monkeypatch.delenv("RLHF_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.cache_directory() == tmp_path / "rlhf" / "tokens"
