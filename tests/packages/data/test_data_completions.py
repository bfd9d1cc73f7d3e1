"""Completion starts of preferences: in texts, conversations and token ids, whole and cut."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rlhf_core import data

CHATML = (
    "{% for m in messages %}{{ '[' + m['role'] + ']' + m['content'] + '</s>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer():
    """Make a byte tokenizer that merges "g" and "o", even across the end of a prompt."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(["</s>", *alphabet, "go"])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[("g", "o")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def pairs(rows, tokenizer, **options):
    given = {"max_length": None, "completions": True, "chat_template": CHATML}
    return data.encode_pairs(data.load(rows), tokenizer, **{**given, **options})


def completions(encoded, tokenizer):
    return [
        tuple(tokenizer.decode(ids[start:]) for ids, start in zip(pair, starts, strict=True))
        for *pair, starts in zip(*encoded.sequences.values(), encoded.starts, strict=True)
    ]


ASKED = [user("who"), assistant("me"), user("you?")]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": "ask ", "chosen": "yes", "rejected": "yet"}, ("yes</s>", "yet</s>")),
        ({"chosen": "ask yes", "rejected": "ask yet"}, ("s</s>", "t</s>")),
        ({"prompt": "ask g", "chosen": "ood", "rejected": "bad"}, ("good</s>", "bad</s>")),
        ({"prompt": "", "chosen": "ab", "rejected": "ac"}, ("ab</s>", "ac</s>")),
        ({"prompt": ASKED, "chosen": "yes", "rejected": "no"}, ("yes</s>", "no</s>")),
        (
            {"prompt": "you?", "chosen": [assistant("yes")], "rejected": [assistant("no")]},
            ("yes</s>", "no</s>"),
        ),
        (
            {"chosen": [*ASKED, assistant("yes")], "rejected": [*ASKED, assistant("yet")]},
            ("yes</s>", "yet</s>"),
        ),
    ],
    ids=["text", "no prompt", "a merge across", "empty prompt", "turns", "a question", "whole conversations"],
)
def test_a_completion_starts_after_its_prompt(row, expected, tokenizer):
    assert completions(pairs([row], tokenizer), tokenizer) == [expected]


def test_nothing_but_completions_is_trained_of_token_ids_too(tokenizer):
    rows = [{"chosen_ids": [5, 6, 7, 8], "rejected_ids": [5, 6, 9]}]
    assert pairs(rows, None).starts.tolist() == [[2, 2]]
    given = [{"prompt_ids": [5, 6], "chosen_ids": [7, 8], "rejected_ids": [7, 9]}]
    assert pairs(given, None).starts.tolist() == [[2, 2]]
    both = [*given, {"prompt_ids": [5, 6], "chosen_ids": [7], "rejected_ids": []}]
    encoded = pairs(both, None)
    assert (len(encoded), encoded.report.empty) == (1, ["dataset row 2"])

    (tree,) = pairs([{"prompt": "ask ", "chosen": "yes", "rejected": "yet"}], tokenizer)
    assert tokenizer.decode(tree.prefix) == "ask "
    assert [tokenizer.decode(own) for own in tree.branches] == ["yes</s>", "yet</s>"]
    assert [w.tolist() for w in tree.weights] == [[1] * 4, [1] * 4]
    plain = data.encode_pairs(
        data.load([{"prompt": "a", "chosen": "b", "rejected": "c"}]), tokenizer, max_length=9
    )
    assert plain.starts is None
    assert plain[0].weights is None


def test_cut_pairs(tokenizer):
    rows = [{"prompt": "ask ", "chosen": "yes", "rejected": "never"}]
    end = pairs(rows, tokenizer, max_length=7, overlong="truncate")
    assert end.sequence_lengths.tolist() == [[7, 7]]
    assert end.starts.tolist() == [[3, 1]]  # after "sk " and " "
    assert completions(end, tokenizer) == [("yes</s>", "never</s>")]
    start = pairs(rows, tokenizer, max_length=6, overlong="truncate", truncation_mode="keep_start")
    assert completions(start, tokenizer) == [("ye", "ne")]
    rows.append({"prompt": "a question ", "chosen": "b", "rejected": "c"})
    kept = pairs(rows, tokenizer, max_length=6, overlong="truncate", truncation_mode="keep_start")
    assert (len(kept), kept.report.filtered) == (1, ["dataset row 2"])  # its completions are cut away
    digests = [each.digests.tolist() for each in (kept, start, end)]
    assert digests[0] == digests[1] != digests[2]
