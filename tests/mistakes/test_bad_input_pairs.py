"""Preferences that say what they should not: roles, templates, lengths, ties, margins, ids; through `rlhf check`."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.shared import cases

Case, every, second, setting = cases.Case, cases.every, cases.second, cases.setting
ASKED, PAIR, TALK, TRAIN = cases.ASKED, cases.PAIR, cases.TALK, cases.TRAIN
IDS = {"input_ids_chosen": [1, 2, 3], "input_ids_rejected": [1, 2, 4]}
ALTERNATING = """{% for m in messages %}
{%- if not loop.first and m.role == messages[loop.index0 - 1].role %}
{{- raise_exception('roles must alternate') }}{% endif %}
{{- m.role + ': ' + m.content + eos_token }}{% endfor %}"""


def cells(*expected: str, **values: Any) -> Any:
    return second({**PAIR, **values}, *expected)


def talk(chosen: Any, *expected: str) -> Any:
    return second({**TALK, "chosen": chosen}, *expected, first=TALK, settings='chat_template = "plain"')


def ids(*expected: str, **values: Any) -> Any:
    return second({**IDS, **values}, *expected, first=IDS)


def template(content: str | bytes, *expected: str, lines: int = 1) -> Any:
    def make(place: Any) -> None:
        place.write("t.jinja", content)
        place.write("pairs.jsonl", (json.dumps(TALK) + "\n") * 4)
        place.settings("rm.toml", 'chat_template = "t.jinja"')

    return Case(make, expected, lines=lines)


def alternating(place: Any) -> None:
    """Two users in a row, where the template allows that of nobody."""
    twice = {side: [*ASKED, *turns] for side, turns in TALK.items()}
    place.write("t.jinja", ALTERNATING)
    place.write("pairs.jsonl", "".join(json.dumps(row) + "\n" for row in (TALK, twice)))
    place.settings("rm.toml", 'chat_template = "t.jinja"')


CASES = {
    "roles": [
        talk(
            [*ASKED, {"role": "assistant", "content": "\ude00"}],
            "'chosen' is not valid Unicode",
            "unpaired surrogate",
        ),
        talk(
            [{"role": "usr", "content": "who"}, TALK["chosen"][1]],
            "message 1 has the role 'usr'",
            "Did you mean 'user'?",
        ),
        talk(
            [ASKED[0], {"role": "tool", "content": "a"}],
            "'chosen' has no assistant turn",
            "(its roles: user, tool)",
        ),
        talk(ASKED * 2, "'chosen' has no assistant turn, the reply to be judged (its roles: user)"),
        talk([], "'chosen' is an empty conversation"),
        talk(
            [{"from": "human", "value": "a"}],
            "'chosen' has no assistant turn, the reply to be judged (its roles: user)",
        ),
        talk([{"role": "user"}], "message 1 has no content"),
        talk(
            [{"role": "assistant", "content": [{"text": "a"}, {"type": "image_url", "image_url": "x"}]}],
            "message 1: part 2 of its content is of type 'image_url', and only text is read",
        ),
        talk(["a"], "message 1 is text, not an object with role and content"),
        second(
            {"prompt": [*ASKED, *ASKED], **TALK},
            "'prompt' is not the start of 'chosen', which is a whole conversation; 'prompt'",
            first={"prompt": ASKED, **TALK},
            settings='chat_template = "plain"',
        ),
    ],
    "template": [
        every(
            TALK,
            "",
            TRAIN,
            'has conversations, and the tokenizer has no chat template: set chat_template = "plain"',
        ),
        setting('chat_template = "plian"', ".chat_template: no such file: ", "Did you mean 'plain'?"),
        setting('chat_template = "model"', "chat_template ", "model' is a directory: give the template file"),
        template(b"{#\n\xe9 #}", TRAIN, "t.jinja' line 2 is not UTF-8: save it as UTF-8"),
        template("{% for m in messages %}\n{{ m.content }", TRAIN, "t.jinja' line 2 is not valid Jinja: "),
        template(
            "{{ messages[0].contents.x }}",
            "row 1: the chat template fails on this conversation: ",
            "row 4",
            lines=4,
        ),
        Case(
            alternating,
            ("pairs.jsonl row 2: the chat template fails on this conversation: roles must alternate",),
        ),
    ],
    "lengths": [
        setting(
            "max_sequence_length = 4",
            ".train_data: ",
            "all 4 pairs are over 4 tokens (shortest 20,",
            'set max_sequence_length = 20, or overlong = "truncate"',
        ),
    ],
    "ties": [
        every(
            {**PAIR, "rejected": PAIR["chosen"]},
            "",
            TRAIN,
            "the same tokens in all 4 pairs (",
            "rows 1, 2, 3, 4)",
            "check the columns",
        ),
        setting(
            'max_sequence_length = 4\noverlong = "truncate"\ntruncation_mode = "keep_start"',
            ".train_data: ",
            "rows 1, 2, 3, 4)",
            "set a larger max_sequence_length",
        ),
        template("{{ 'hello' }}", TRAIN, "the same tokens in all 4 pairs", "and the chat template"),
    ],
    "margin": [
        cells("'margin' is 'much', not a finite number", margin="much"),
        cells("'margin' is nan, not a finite number", margin=float("nan")),
        cells("'margin' is 1e+300, not a finite number", margin=1e300),
        cells("'margin' is [1], not a finite number", margin=[1]),
        cells("'margin' is True, not a finite number", margin=True),
    ],
    "token ids": [
        ids(
            "'input_ids_chosen' holds 9999, which is not a token id of the tokenizer (0 to 128)",
            input_ids_chosen=[1, 9999],
        ),
        ids(
            "holds -100, which is not a token id",
            "mark padding in the attention mask",
            input_ids_rejected=[1, -100],
        ),
        ids("'input_ids_chosen' is not a list of integers", input_ids_chosen=[1, 0.5]),
        ids("'input_ids_chosen' is not a list of integers", input_ids_chosen="1 2"),
        ids("'input_ids_chosen' is not a list of integers", input_ids_chosen=[[1, 2]]),
        ids("'input_ids_chosen' is not a list of integers", input_ids_chosen=[1, 2**70]),
        ids("'input_ids_chosen' is null", input_ids_chosen=None),
        second(
            {**IDS, "chosen_mask": [1, 1]},
            "'chosen_mask' has 2 elements, 'input_ids_chosen' has 3",
            first={**IDS, "chosen_mask": [1, 1, 1]},
        ),
        setting(
            'model = "small"',
            ".model: ",
            "pairs.jsonl row 1: token ",
            "(vocab_size 16): use the tokenizer",
            "row 4",
            lines=4,
        ),
    ],
}


@pytest.mark.parametrize("category", CASES)
def test_one_message_with_place_and_remedy(category: str, place: Any, rlhf: Callable[..., Any]) -> None:
    wrong = cases.wrong_among(CASES[category], place, rlhf)
    assert not wrong, "\n".join(wrong)


def test_a_role_that_the_template_names_is_right(place: Any, rlhf: Callable[..., Any]) -> None:
    critic = {side: [{"role": "critic", "content": "who"}, turns[1]] for side, turns in TALK.items()}
    every(critic, 'chat_template = "t.jinja"').make(place)
    place.write("t.jinja", ALTERNATING)
    assert "message 1 has the role 'critic', which the chat template " in rlhf("check", "rm.toml").message
    place.write("t.jinja", ALTERNATING + "{# 'critic' #}")
    assert rlhf("check", "rm.toml")[:3] == (0, "", "")
