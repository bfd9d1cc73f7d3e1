"""Every entry point gives a text the same ids as transformers, for all kinds of tokenizers and chat templates."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from rlhf_core import data
from rlhf_core.errors import InputError
from rlhf_core.scoring import Scorer, ScoringContract
from rlhf_core.tokenizer import PLAIN, Encoder, continuations, load_tokenizer
from tests.shared import chat_cases as chat

CASES = chat.cases()


def encode_full(
    tokenizer: Any, prompt: Any, completion: Any, *, chat_template: Any = None, tools: Any = None
) -> Any:
    return Encoder(tokenizer, chat_template).whole([prompt], [completion], [tools])[0]


def reference(case, turns):
    """Encode a conversation with transformers, cut after the first of its trailing stop tokens."""
    text = case.tokenizer.apply_chat_template(
        turns, chat_template=case.template or PLAIN, tools=case.tools, tokenize=False
    )
    kept, end = text, ""
    while kept.endswith((*case.stops, " ", "\n")):
        stop = next((stop for stop in case.stops if kept.endswith(stop)), kept[-1])
        kept = kept.removesuffix(stop)
        end = stop + end
    behind = next((end[: end.index(s) + len(s)] for s in _by_place(end, case.stops)), None)
    whole = text + (case.tokenizer.eos_token or "") if behind is None else kept + behind
    if case.template is None and case.tokenizer("a")["input_ids"][0] == case.tokenizer.bos_token_id:
        whole = case.tokenizer.bos_token + whole  # "plain" leaves BOS to the tokenizer
    return case.tokenizer(whole, add_special_tokens=False)["input_ids"]


def _by_place(text, stops):
    return sorted((s for s in stops if s in text), key=text.index)


def opened(case, turns):
    text = case.tokenizer.apply_chat_template(
        turns,
        chat_template=case.template or PLAIN,
        tools=case.tools,
        tokenize=False,
        add_generation_prompt=True,
    )
    bos = case.template is None and case.tokenizer("a")["input_ids"][0] == case.tokenizer.bos_token_id
    return case.tokenizer(bos * str(case.tokenizer.bos_token) + text, add_special_tokens=False)["input_ids"]


def rows(case):
    reply, other = [chat.assistant(chat.REPLY)], [chat.assistant("b")]
    tools = {} if case.tools is None else {"tools": case.tools}
    return [{"prompt": case.prompt, "chosen": reply, "rejected": other, **tools}]


def template(case):
    return "plain" if case.template is None else None


def options(case):
    return {"max_length": None, "chat_template": template(case)}


def of_pairs(case, change):
    (row,) = rows(case)
    pairs = data.encode_pairs(data.load([change(row)]), case.tokenizer, **options(case))
    return pairs.sequences["chosen"][0]


def of_texts(case, change):
    (row,) = rows(case)
    return data.encode_texts(data.load([change(row)]), case.tokenizer, **options(case)).sequences["tokens"][0]


def whole(row, side="chosen"):
    return {**{k: v for k, v in row.items() if k == "tools"}, side: [*row["prompt"], *row["chosen"]]}


def with_both(row):
    return {**whole(row), "rejected": [*row["prompt"], *row["rejected"]]}


def shared_prompt(row):
    return {**with_both(row), "prompt": row["prompt"]}


def completion(row):
    return {**{k: v for k, v in row.items() if k in ("prompt", "tools")}, "completion": row["chosen"]}


def said(row):
    return {**completion(row), "completion": chat.REPLY}


@pytest.fixture(scope="module")
def model(tiny):
    return tiny.make_model("score", vocab_size=512)


@pytest.fixture
def scorer(model, monkeypatch):
    """Make a scorer for a case, and record the sequences it would score."""
    read = []

    def record(self, sequences, group):
        read.extend(each.tolist() for each in sequences)
        return np.zeros(len(sequences), np.float32)

    monkeypatch.setattr(Scorer, "_score_some", record)

    def make(case):
        contract = ScoringContract.of(case.tokenizer, max_length=None, chat_template=template(case))
        return Scorer(dataclasses.replace(model, tokenizer=case.tokenizer), contract), read

    return make


DOORS = {
    "prompt and completion": lambda case: encode_full(
        case.tokenizer, case.prompt, chat.REPLY, chat_template=template(case), tools=case.tools
    ),
    "whole conversation": lambda case: encode_full(
        case.tokenizer,
        None,
        [*case.prompt, chat.assistant(chat.REPLY)],
        chat_template=template(case),
        tools=case.tools,
    ),
    "pairs": lambda case: of_pairs(case, dict),
    "pairs of whole conversations": lambda case: of_pairs(case, with_both),
    "pairs that repeat the prompt": lambda case: of_pairs(case, shared_prompt),
    "completions": lambda case: of_texts(case, completion),
    "completions as text": lambda case: of_texts(case, said),
    "messages": lambda case: of_texts(case, lambda row: whole(row, "messages")),
    "the chosen side": lambda case: of_texts(case, with_both),
}


@pytest.mark.parametrize("name", CASES)
def test_every_door_gives_the_ids_that_transformers_gives(name):
    case = CASES[name]
    wanted = reference(case, [*case.prompt, chat.assistant(chat.REPLY)])
    for door, encode in DOORS.items():
        assert encode(case).tolist() == wanted, door
    last = case.tokenizer.convert_ids_to_tokens(wanted)[-1]
    assert last == case.stops[0] if case.stops else last not in case.tokenizer.all_special_tokens
    assert wanted.count(case.tokenizer.bos_token_id) == wanted[:1].count(case.tokenizer.bos_token_id) or (
        case.template == chat.LLAMA2
    )


@pytest.mark.parametrize("name", CASES)
def test_scores_read_the_same_ids(name, scorer):
    case = CASES[name]
    wanted = reference(case, [*case.prompt, chat.assistant(chat.REPLY)])
    judge, read = scorer(case)
    (row,) = rows(case)
    for change in (completion, said, lambda row: whole(row, "messages"), with_both, dict):
        judge.score_rows(data.load([change(row)]))
    judge.score_completions([row["prompt"]], [row["chosen"]], [case.tools])
    judge.score_completions([row["prompt"]], [chat.REPLY], [case.tools])
    judge.score_completions([None], [[*row["prompt"], *row["chosen"]]], [case.tools])
    assert sum(each == wanted for each in read) == 8
    assert len(read) == 10  # the rejected sides


@pytest.mark.parametrize("name", CASES)
def test_rollouts_continue_what_training_reads(name):
    """Appending a sampled reply to the prompt's ids gives the ids that its text is scored on."""
    case = CASES[name]
    encoder = Encoder(case.tokenizer, template(case))
    row = {"prompt": case.prompt, **({"tools": case.tools} if case.tools else {})}
    prompts = data.encode_prompts(
        data.load([row]), case.tokenizer, max_prompt_length=None, chat_template=template(case)
    )
    start = prompts.ids[0]
    assert start.tolist() == opened(case, case.prompt)
    if case.tools is None:
        assert start.tolist() == Encoder(case.tokenizer, template(case)).prompts([case.prompt])[0].tolist()
    turns = [*case.prompt, chat.assistant(chat.REPLY)]
    (ids,) = encoder.whole([None], [turns], [case.tools])
    assert (ids[: len(start)].tolist() == start.tolist()) is case.joins
    if not case.joins:
        return
    sampled = ids[len(start) :]
    ends = [i for i in sampled.tolist() if i in encoder.special.eos]
    assert ends == sampled[-1:].tolist()[: len(case.stops)]
    (text,) = continuations(case.tokenizer, [None], [sampled])
    assert text.strip() == chat.REPLY
    assert encoder.whole([case.prompt], [text], [case.tools])[0].tolist() == ids.tolist()


@pytest.mark.parametrize("name", CASES)
def test_stop_tokens(name):
    case = CASES[name]
    special = Encoder(case.tokenizer, template(case)).special
    assert {case.tokenizer.convert_ids_to_tokens(i) for i in special.eos} == set(case.stops)
    assert special.eos[:1] == (case.tokenizer.eos_token_id,) or case.tokenizer.eos_token is None


def test_special_tokens_that_are_typed_are_special_tokens_and_come_once():
    tokenizer = chat.byte_level(bos="<s>", adds_bos=True)
    assert tokenizer.convert_ids_to_tokens(Encoder(tokenizer).prompts([""])[0]) == ["<s>"]
    for written in ("<s>ab", "ab"):
        assert tokenizer.convert_ids_to_tokens(Encoder(tokenizer).prompts([written])[0]) == ["<s>", "ab"]
        row = [{"text": written}]
        tokens = data.encode_texts(data.load(row), tokenizer, max_length=None).sequences["tokens"][0]
        assert tokenizer.convert_ids_to_tokens(tokens) == ["<s>", "ab", "</s>"]
        assert encode_full(tokenizer, written[:-1], "b").tolist() == tokens.tolist()

    case = CASES["chatml"]
    typed = "a<|im_end|>\n<|im_start|>assistant\nb"
    turns = [chat.user(typed), chat.assistant("ab")]
    found = encode_full(case.tokenizer, None, turns).tolist()
    assert found == reference(case, turns)
    assert found.count(case.tokenizer.convert_tokens_to_ids("<|im_end|>")) == 3

    case = CASES["chatml"]
    once = encode_full(case.tokenizer, case.prompt, "ab").tolist()
    for said in ("ab<|im_end|>", "ab<|im_end|>\n", "ab<|im_end|>\n<|im_end|>"):
        assert encode_full(case.tokenizer, case.prompt, said).tolist() == once


def test_what_stands_after_the_last_reply_is_read_nowhere(scorer):
    case = CASES["chatml"]
    turns = [*case.prompt, chat.assistant("ab")]
    wanted = encode_full(case.tokenizer, None, turns).tolist()
    longer = [*turns, chat.user("more?")]
    judge, read = scorer(case)
    judge.score_completions([None], [longer])
    with pytest.warns(UserWarning, match="dataset: 1 that continue after the last reply: dataset row 1"):
        judge.score_rows(data.load([{"messages": longer}]))
    records = data.load([{"chosen": longer, "rejected": [*case.prompt, chat.assistant("b")]}])
    pairs = data.encode_pairs(records, case.tokenizer, max_length=None)
    texts = data.encode_texts(data.load([{"messages": longer}]), case.tokenizer, max_length=None)
    assert read == [wanted] * 2
    assert [ids.tolist() for ids in (pairs.sequences["chosen"][0], texts.sequences["tokens"][0])] == [
        wanted
    ] * 2
    assert pairs.report.after_reply == texts.report.after_reply == ["dataset row 1"]


@pytest.mark.data
@pytest.mark.parametrize("name", ["models/stories260K", "tokenizers/chatml_bpe_2k"])
@pytest.mark.parametrize("template", [None, chat.CHATML, chat.LLAMA2, chat.GEMMA, chat.STRIPS])
def test_tokenizers_of_the_shared_data(shared, name, template):
    tokenizer = load_tokenizer(shared / "data" / name)
    if template is None and tokenizer.chat_template is None:
        pytest.skip("it has no template")
    if template == chat.LLAMA2 and tokenizer.bos_token is None:
        with pytest.raises(InputError, match=r"Name the tokenizer's bos_token in tokenizer_config\.json"):
            Encoder(tokenizer, template).prompts([chat.ASKED])[0]
        return
    special = Encoder(tokenizer, template).special
    stops = tuple(tokenizer.convert_ids_to_tokens(list(special.eos)))
    case = chat.Case(tokenizer, template or tokenizer.chat_template, stops)
    turns = [*chat.ASKED, chat.assistant("Once upon a time.\n\n A  cat")]
    assert encode_full(tokenizer, None, turns, chat_template=template).tolist() == reference(case, turns)
    assert np.array_equal(Encoder(tokenizer, template).prompts([chat.ASKED])[0], opened(case, chat.ASKED))
