"""Rows to token ids: every layout of preferences gives the same pairs, and every wrong row is named."""

from __future__ import annotations

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from rlhf_core import data
from rlhf_core.errors import InputError
from rlhf_core.tokenizer import encode_full, load_tokenizer, prompt_ids

CHATML = (
    "{% for m in messages %}{{ '<s>' + m['role'] + '\\n' + m['content'] + '</s>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>assistant\\n' }}{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer():
    """Bytes after <s>, closed by </s>; no chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(["<s>", "</s>", *alphabet])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def pairs(rows, tokenizer, **options):
    return data.encode_pairs(data.load(rows), tokenizer, **{"max_length": None, **options})


def decoded(encoded, tokenizer):
    return [(tokenizer.decode(pair.chosen), tokenizer.decode(pair.rejected)) for pair in encoded.pairs]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "ask ", "chosen": "good", "rejected": "bad"},
        {"chosen": "ask good", "rejected": "ask bad"},
        {"prompt": "ask ", "chosen": "ask good", "rejected": "ask bad"},  # whole texts beside their prompt
        {"chosen": "ask good</s>", "rejected": "ask bad"},
    ],
)
def test_text_layouts(row, tokenizer):
    encoded = pairs([row], tokenizer)
    assert decoded(encoded, tokenizer) == [("<s>ask good</s>", "<s>ask bad</s>")]
    (tree,) = encoded.trees()
    assert tokenizer.decode(tree.prefix) == "<s>ask "
    assert [tokenizer.decode(branch) for branch in tree.branches] == ["good</s>", "bad</s>"]
    assert encoded.pairs[0].chosen.dtype == np.int32


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [user("ask")], "chosen": [assistant("good")], "rejected": [assistant("bad")]},
        {"prompt": [user("ask")], "chosen": "good", "rejected": "bad"},
        {"prompt": "ask", "chosen": [assistant("good")], "rejected": [assistant("bad")]},
        {
            "prompt": "ask",
            "chosen": [user("ask"), assistant("good")],
            "rejected": [user("ask"), assistant("bad")],
        },
        {
            "prompt": [user("ask")],
            "chosen": [user("ask"), assistant("good")],
            "rejected": [user("ask"), assistant("bad")],
        },
        {"chosen": [user("ask"), assistant("good")], "rejected": [user("ask"), assistant("bad")]},
    ],
)
@pytest.mark.parametrize("template", ["plain", CHATML])
def test_conversation_layouts(row, template, tokenizer):
    wanted = tuple(
        tokenizer.decode(encode_full(tokenizer, [user("ask")], answer, chat_template=template))
        for answer in ("good", "bad")
    )
    assert decoded(pairs([row], tokenizer, chat_template=template), tokenizer) == [wanted]
    assert wanted[0].endswith("assistant\ngood</s>" if template == CHATML else "assistant:\ngood</s>")


def test_a_prompt_inside_a_longer_conversation(tokenizer):
    before = [{"role": "system", "content": "be kind"}, user("ask")]
    row = {"prompt": "ask", "chosen": [*before, assistant("good")], "rejected": [*before, assistant("bad")]}
    whole = {"chosen": row["chosen"], "rejected": row["rejected"]}
    assert pairs([row], tokenizer, chat_template="plain").fingerprint == (
        pairs([whole], tokenizer, chat_template="plain").fingerprint
    )


@pytest.mark.parametrize(
    ("chosen", "rejected", "mask"),
    [
        ("input_ids_chosen", "input_ids_rejected", "attention_mask_{}"),
        ("chosen_ids", "rejected_ids", "{}_mask"),
        ("chosen_input_ids", "rejected_input_ids", "{}_attention_mask"),
    ],
)
def test_pretokenised_layouts(chosen, rejected, mask):
    row = {chosen: [5, 6, 7, 0], rejected: [0, 0, 5, 8], "margin": 0.5}
    masks = {mask.format("chosen"): [1, 1, 1, 0], mask.format("rejected"): [0, 0, 1, 1]}
    encoded = pairs([{**row, **masks}, {**row, **masks}], None)  # no tokenizer needed
    assert [(p.chosen.tolist(), p.rejected.tolist(), p.margin) for p in encoded.pairs] == [
        ([5, 6, 7], [5, 8], 0.5)
    ] * 2
    assert [p.chosen.tolist() for p in pairs([row], None).pairs] == [[5, 6, 7, 0]]
    assert [p.rejected.tolist() for p in pairs([{**row, "prompt_input_ids": [9]}], None).pairs] == [
        [9, 0, 0, 5, 8]
    ]


def test_margins_reach_both_sequences(tokenizer):
    rows = [{"chosen": "a", "rejected": "b", "margin": m} for m in (1.5, None, "2")]
    values = [tree.sequence_values["margin"] for tree in pairs(rows, tokenizer).trees()]
    assert [(v.dtype, v.tolist()) for v in values] == [(np.float32, [m, m]) for m in (1.5, 0.0, 2.0)]


def test_over_long_pairs(tokenizer):
    rows = [{"prompt": "p" * n, "chosen": "good", "rejected": "bad"} for n in (1, 20, 2)]
    encoded = pairs(rows, tokenizer, max_length=10)
    assert str(encoded.report) == "3 pairs: 2 kept, 1 over 10 tokens filtered (33 %)"
    assert encoded.report.filtered == ["dataset row 2"]
    assert [encoded.where(i) for i in range(2)] == ["dataset row 1", "dataset row 3"]
    cut = pairs(rows, tokenizer, max_length=8, overlong="truncate")
    assert decoded(cut, tokenizer)[1] == ("pppgood</s>", "ppppbad</s>")
    assert cut.report.truncated == ["dataset row 2"]
    start = pairs(rows, tokenizer, max_length=8, overlong="truncate", truncation_mode="keep_start")
    assert decoded(start, tokenizer)[1] == ("<s>ppppppp", "<s>ppppppp")
    assert (start.report.identical, start.report.alike_once_cut) == ([], ["dataset row 2"])
    message = (
        r"all 3 pairs are over 3 tokens \(shortest 7, median 8, longest 26\): set max_sequence_length = 26"
    )
    with pytest.raises(InputError, match=message):
        pairs(rows, tokenizer, max_length=3)
    with pytest.raises(InputError, match="overlong 'drop' is neither filter nor truncate"):
        pairs(rows, tokenizer, overlong="drop")


def test_empty_and_identical_pairs_are_counted(tokenizer):
    rows = [
        {"prompt": "p", "chosen": "good", "rejected": "bad"},
        {"prompt": "p", "chosen": "  ", "rejected": "bad"},
        {"prompt": "p", "chosen": "same", "rejected": "same"},
    ]
    report = pairs(rows, tokenizer).report
    assert (report.empty, report.identical, report.kept) == (["dataset row 2"], ["dataset row 3"], 2)
    assert str(report) == (
        "3 pairs: 2 kept, 1 empty dropped (dataset row 2), 1 with chosen and rejected alike (dataset row 3)"
    )
    with pytest.raises(InputError, match=r"all 1 pairs are empty \(dataset row 1\)"):
        pairs(rows[1:2], tokenizer)


FINE = {"prompt": "p", "chosen": "good", "rejected": "bad"}
TALK = {"prompt": [user("p")], "chosen": [assistant("good")], "rejected": [assistant("bad")]}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([FINE, {**FINE, "chosen": None}], r"dataset row 2: 'chosen' is null"),
        ([FINE, {**FINE, "rejected": 3}], r"dataset row 2: 'rejected' is a number, not text"),
        (
            [FINE, {"prompt": "p", "chosen": "good"}],
            r"dataset row 2: has no 'rejected' \(it has prompt, chosen\)",
        ),
        ([{**FINE, "margin": "big"}], r"dataset row 1: 'margin' is 'big', not a finite number"),
        ([{**FINE, "margin": float("nan")}], r"dataset row 1: 'margin' is nan"),
        (
            [{"prompt": "p", "chosen": "g", "reject": "b"}],
            r"no column 'rejected'; it has prompt, chosen, reject\. Did you mean 'reject'\? Accepted: prompt",
        ),
        (
            [TALK, {**TALK, "chosen": [{"from": "gpt", "value": "x"}]}],
            r"dataset row 2: 'chosen' message 1 has no role \(its keys: from, value\)",
        ),
        ([TALK, {**TALK, "chosen": []}], r"dataset row 2: 'chosen' is an empty conversation"),
        ([TALK, {**TALK, "chosen": "good"}], r"dataset row 2: 'chosen' is text, not a list of messages"),
        (
            [TALK, {**TALK, "chosen": [{"role": "assistant", "content": 1}]}],
            r"message 1's content is a number",
        ),
        (
            [{**TALK, "chosen": [user("other"), assistant("x")]}],
            r"dataset row 1: 'prompt' is not the start of 'chosen'",
        ),
        (
            [{**TALK, "prompt": "q", "chosen": [user("p"), assistant("x")]}],
            r"'prompt' is no user turn of 'chosen'",
        ),
        ([{**TALK, "chosen": "good"}], r"one of 'chosen' and 'rejected' is a conversation"),
        (
            [{"prompt": "ab", "chosen": "ab c", "rejected": "ab d"}] * 2
            + [{"prompt": "ab", "chosen": "ab", "rejected": "c"}],
            r"dataset row 3: 'prompt' is not the start of 'rejected'",
        ),
        (
            [{"chosen_ids": [1, -2], "rejected_ids": [1]}],
            r"dataset row 1: 'chosen_ids' holds -2, which is no token",
        ),
        ([{"chosen_ids": [1, 9999], "rejected_ids": [1]}], r"dataset row 1: 'chosen_ids' holds 9999"),
        (
            [{"chosen_ids": [1, 2.5], "rejected_ids": [1]}],
            r"dataset row 1: 'chosen_ids' is not a list of integers",
        ),
        ([{"chosen_ids": None, "rejected_ids": [1]}], r"dataset row 1: 'chosen_ids' is null"),
        (
            [{"chosen_ids": [1, 2], "chosen_mask": [1], "rejected_ids": [1]}],
            r"'chosen_mask' has 1 elements, 'chosen_ids' has 2",
        ),
    ],
)
def test_wrong_rows_are_named(rows, message, tokenizer):
    with pytest.raises(InputError, match=message):
        pairs(rows, tokenizer, chat_template="plain")


def test_the_first_few_problems_are_told_together(tokenizer):
    with pytest.raises(InputError) as error:
        pairs([FINE] + [{**FINE, "chosen": None}] * 7, tokenizer)
    assert len(error.value.problems) == 6
    assert error.value.problems[5] == "… and 2 more rows like these"


def test_conversations_need_a_template(tokenizer):
    message = r'dataset has conversations.*chat_template = "plain"'
    with pytest.raises(InputError, match=message):
        pairs([TALK], tokenizer)
    with pytest.raises(InputError, match=message):
        data.encode_prompts(data.load([TALK]), tokenizer, max_prompt_length=None)
    with pytest.raises(InputError, match=message):
        data.encode_texts(data.load([{"messages": [user("a"), assistant("b")]}]), tokenizer, max_length=None)
    refuses = "{{ raise_exception('no') }}"
    with pytest.raises(InputError, match="dataset row 1: the chat template fails on this conversation: no"):
        pairs([TALK], tokenizer, chat_template=refuses)


def test_several_files_may_have_several_layouts(tokenizer, tmp_path):
    (tmp_path / "a.csv").write_text("prompt,chosen,rejected\np,good,bad\n")
    (tmp_path / "b.jsonl").write_text('{"chosen": "pgood", "rejected": "pbad"}\n')
    encoded = pairs([str(tmp_path / "a.csv"), str(tmp_path / "b.jsonl")], tokenizer)
    assert decoded(encoded, tokenizer) == [("<s>pgood</s>", "<s>pbad</s>")] * 2
    assert encoded.where(1).endswith("b.jsonl row 1")


def texts(rows, tokenizer, **options):
    return data.encode_texts(data.load(rows), tokenizer, **{"max_length": None, **options})


def learned(encoded, tokenizer):
    return [tokenizer.decode(tokens[weights == 1]) for tokens, weights in encoded.texts]


def test_texts_are_learned_whole(tokenizer):
    encoded = texts([{"text": "abc"}, {"text": " "}], tokenizer)
    assert learned(encoded, tokenizer) == ["<s>abc</s>"]
    assert encoded.report.empty == ["dataset row 2"]
    (tree,) = encoded.trees()
    assert (len(tree.prefix), len(tree.branches), tree.weights[0].dtype) == (0, 1, np.float32)


@pytest.mark.parametrize("template", ["plain", CHATML])
def test_completions_are_learned_without_their_prompts(template, tokenizer):
    assert learned(texts([{"prompt": "ask ", "completion": "good"}], tokenizer), tokenizer) == ["good</s>"]
    rows = [{"prompt": [user("ask")], "completion": [assistant("good")]}]
    assert learned(texts(rows, tokenizer, chat_template=template), tokenizer) == ["good</s>"]
    rows = [{"prompt": "ask", "completion": [assistant("good")]}]
    assert learned(texts(rows, tokenizer, chat_template=template), tokenizer) == ["good</s>"]


def test_every_reply_of_a_conversation_is_learned(tokenizer):
    rows = [
        {"messages": [user("a"), assistant("b"), user("c"), assistant("d"), user("left out")]},
        {"messages": [user("nobody answers")]},
    ]
    plain = texts(rows, tokenizer, chat_template="plain")
    assert learned(plain, tokenizer) == ["b</s>d</s>"]
    assert plain.report.empty == ["dataset row 2"]
    assert "left out" not in tokenizer.decode(plain.texts[0].tokens)
    assert plain.report.after_reply == ["dataset row 1"]
    assert learned(texts(rows, tokenizer, chat_template=CHATML), tokenizer) == ["b</s>d</s>"]


def test_the_chosen_side_of_preferences_is_learned(tokenizer):
    assert learned(texts([FINE], tokenizer), tokenizer) == ["good</s>"]
    assert learned(texts([TALK], tokenizer, chat_template=CHATML), tokenizer) == ["good</s>"]
    assert learned(texts([{"chosen": "ask good", "rejected": "ask bad"}], tokenizer), tokenizer) == [
        "good</s>"
    ]
    whole = {"chosen": [user("a"), assistant("good")], "rejected": [user("a"), assistant("bad")]}
    assert learned(texts([whole], tokenizer, chat_template=CHATML), tokenizer) == ["good</s>"]


def test_over_long_texts(tokenizer):
    rows = [{"prompt": "p" * 20, "completion": "good"}, {"prompt": "p", "completion": "x"}]
    assert texts(rows, tokenizer, max_length=10).report.filtered == ["dataset row 1"]
    cut = texts(rows, tokenizer, max_length=7, overlong="truncate")
    assert learned(cut, tokenizer) == ["good</s>", "x</s>"]
    assert [len(t.tokens) for t in cut.texts] == [7, 4]
    # Cut to its prompt, nothing of a row is left to learn.
    start = texts(rows, tokenizer, max_length=7, overlong="truncate", truncation_mode="keep_start")
    assert start.report.filtered == ["dataset row 1"]
    with pytest.raises(
        InputError, match=r"dataset has no column 'completion'; it has prompt, complete\. Did you mean"
    ):
        texts([{"prompt": "a", "complete": "b"}], tokenizer)


def test_prompts_keep_the_other_columns(tokenizer):
    rows = [{"prompt": "ask", "answer": 4}, {"prompt": "p" * 30}, {"prompt": "b", "tag": "x"}]
    encoded = data.encode_prompts(data.load(rows), tokenizer, max_prompt_length=8)
    assert [tokenizer.decode(ids) for ids in encoded.ids] == ["<s>ask", "<s>b"]
    assert encoded.raw == ["ask", "b"]
    assert encoded.columns == {"answer": [4, None], "tag": [None, "x"]}
    assert not encoded.chat
    assert encoded.where(1) == "dataset row 3"
    assert str(encoded.report) == "3 prompts: 2 kept, 1 over 8 tokens filtered (33 %)"
    cut = data.encode_prompts(data.load(rows), tokenizer, max_prompt_length=8, overlong="truncate")
    assert tokenizer.decode(cut.ids[1]) == "p" * 8
    with pytest.raises(InputError, match="set max_prompt_length = 31"):
        data.encode_prompts(data.load(rows), tokenizer, max_prompt_length=1)


def test_prompts_of_conversations(tokenizer):
    rows = [{"prompt": [user("ask")], "answer": "4"}]
    encoded = data.encode_prompts(data.load(rows), tokenizer, max_prompt_length=None, chat_template="plain")
    assert encoded.chat
    assert encoded.raw == [[user("ask")]]
    assert encoded.ids[0].tolist() == prompt_ids(tokenizer, [user("ask")], chat_template="plain").tolist()


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"promt": "x"}], r"no column 'prompt'; it has promt\. Did you mean 'promt'\?"),
        ([{"prompt": "x"}, {"prompt": None}], r"dataset row 2: 'prompt' is null"),
        ([{"prompt": "x"}, {"prompt": [user("x")]}], r"dataset row 2: 'prompt' is a list, not text"),
        ([{"prompt": "x", "completions": 1}], r"rename column 'completions'"),
    ],
)
def test_wrong_prompts_are_named(rows, message, tokenizer):
    with pytest.raises(InputError, match=message):
        data.encode_prompts(data.load(rows), tokenizer, max_prompt_length=None)


@pytest.mark.data
@pytest.mark.parametrize("name", ["hh_harmless.eval", "gsm8k_solutions"])
@pytest.mark.parametrize(
    ("folder", "template"), [("models/stories260K", "plain"), ("tokenizers/chatml_bpe_2k", None)]
)
def test_real_preferences(shared, name, folder, template):
    tokenizer = load_tokenizer(shared / "data" / folder)
    records = data.load(shared / "data" / "prefs" / f"{name}.jsonl")
    encoded = data.encode_pairs(records, tokenizer, max_length=512, chat_template=template)
    report = encoded.report
    assert report.total == len(records) == report.kept + len(report.filtered) + len(report.empty)
    assert report.kept == len(encoded) > 0.6 * len(records)
    for tree in encoded.trees():  # at least the whole prompt but its last tokens is shared
        assert len(tree.prefix) >= 8
    row = int(encoded.where(7).rsplit(" ", 1)[1]) - 1
    alone = encode_full(tokenizer, records[row]["prompt"], records[row]["chosen"], chat_template=template)
    assert alone.tolist() == encoded.pairs[7].chosen.tolist()
    opened = prompt_ids(tokenizer, records[row]["prompt"], chat_template=template)
    assert alone[: len(opened)].tolist() == opened.tolist()
