"""Template variables, dates and named templates: every entry point renders what transformers renders."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import numpy as np
import pytest

from rlhf_core import artifacts, data
from rlhf_core.config import TrainerConfig
from rlhf_core.errors import InputError
from rlhf_core.models import load_model
from rlhf_core.scoring import Scorer, ScoringContract
from rlhf_core.stage import text_settings
from rlhf_core.tokenizer import Encoder, TextOptions, continuations, load_tokenizer, template_hash
from tests.shared import chat_cases as chat

THINKING = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think></think>' }}{% endif %}{% endif %}"
    "{% if enable_thinking is defined %}{{ mood }}{% endif %}"
)
DATED = "{{ strftime_now('%d %b %Y') }}" + chat.CHATML
OFF = {"enable_thinking": False, "mood": "in"}
PROMPT = [chat.user("a bab")]
REPLY = [chat.assistant("ab")]


def tokenizer_with(template: Any) -> Any:
    tokenizer = chat.byte_level(eos="<|im_end|>", pad="<|endoftext|>")
    tokenizer.chat_template = template
    return tokenizer


def written(tokenizer: Any, turns: Any, **options: Any) -> list[int]:
    found: list[int] = tokenizer.apply_chat_template(turns, return_dict=False, **options)
    return found


@pytest.mark.parametrize("where", ["row", "stage", "both", "json"])
def test_variables_reach_every_door(where: str, tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tokenizer_with(THINKING)
    stage = {"row": {}, "stage": OFF, "both": {"enable_thinking": True, "mood": "in"}, "json": {}}[where]
    column = {"row": OFF, "stage": None, "both": {"enable_thinking": False}, "json": json.dumps(OFF)}[where]
    row = {} if column is None else {"chat_template_kwargs": column}
    options = TextOptions(chat_template_kwargs=stage, read_at="template")
    opened = written(tokenizer, PROMPT, add_generation_prompt=True, **OFF)
    assert opened != written(tokenizer, PROMPT, add_generation_prompt=True)
    prompts = data.encode_prompts(
        data.load([{"prompt": PROMPT, **row}]), tokenizer, max_prompt_length=None, chat_template=options
    )
    assert prompts.ids[0].tolist() == opened
    whole = written(tokenizer, [*PROMPT, *REPLY], **OFF)
    assert whole != written(tokenizer, [*PROMPT, *REPLY])
    pair = {"prompt": PROMPT, "chosen": REPLY, "rejected": [*PROMPT, chat.assistant("b")], **row}
    pairs = data.encode_pairs(
        data.load([pair]), tokenizer, max_length=None, chat_template=options, completions=True
    )
    assert pairs.sequences["chosen"][0].tolist() == whole
    assert pairs.starts is not None
    for rows in ({"messages": [*PROMPT, *REPLY]}, {"prompt": PROMPT, "completion": REPLY}):
        [part] = data.whole_parts(data.load([{**rows, **row}]), Encoder(tokenizer, options))
        [read] = part.sequences
        assert read is not None
        assert read[0].tolist() == whole
        # Learned tokens end with the stop token after the reply, wherever the score is read.
        text = data.encode_texts(
            data.load([{**rows, **row}]), tokenizer, max_length=None, chat_template=options
        ).sequences["tokens"][0]
        assert (
            text.tolist()[: len(written(tokenizer, PROMPT))]
            == written(tokenizer, PROMPT)[:-2]
            + whole[len(written(tokenizer, PROMPT)) - 2 : len(written(tokenizer, PROMPT))]
        )
    model = dataclasses.replace(tiny.make_model("score", vocab_size=512), tokenizer=tokenizer)
    contract = ScoringContract.of(tokenizer, max_length=None, chat_template=options)
    recorded = json.loads(json.dumps(contract.to_dict()))
    scorer = Scorer(model, ScoringContract.from_dict(recorded, "here"))
    read = []
    monkeypatch.setattr(Scorer, "score_ids", lambda self, ids, group: read.extend(ids) or np.zeros(len(ids)))
    scorer.score_completions([PROMPT], [REPLY], None, None if column is None else [column])
    assert read[0].tolist() == whole


def test_the_date_is_that_of_the_options_which_a_run_keeps(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(DATED)
    dated = Encoder(tokenizer, TextOptions(template_date="2024-02-29"))
    text = dated.text(PROMPT)[0]
    assert text.startswith("29 Feb 2024<|im_start|>")
    today = tokenizer.apply_chat_template(PROMPT, tokenize=False)
    assert not today.startswith("29 Feb 2024")  # without a date, the real one is used
    assert Encoder(tokenizer).text(PROMPT)[0] == today

    config = TrainerConfig()
    stage = SimpleNamespace(dir=tmp_path / "rm", inputs={}, template_date=None, mesh=None)
    today = text_settings.day_begun(tmp_path)
    assert text_settings.template_date(config, stage) == today  # type: ignore[arg-type]
    for name, day in (("rm", "2026-01-31"), ("base", "2026-01-30")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "stage.json").write_text(json.dumps({"started": f"{day}T23:59:00+0000"}))
    assert text_settings.day_begun(tmp_path) == "2026-01-30"
    # The clock was set back before this stage began, which wrote the day of the run beside its own.
    (tmp_path / "rm" / "stage.json").write_text(
        json.dumps({"started": "2026-01-01T12:00:00+0000", "day": "2026-01-30"})
    )
    assert text_settings.day_begun(tmp_path) == "2026-01-30"
    stage.template_date = "2026-01-30"
    assert text_settings.text_options(config, stage).template_date == "2026-01-30"  # type: ignore[arg-type]
    artifact = tmp_path / "base" / "artifacts" / "model"
    artifact.mkdir(parents=True)
    manifest = {"format": 1, "name": "model", "kind": "language_model", "files": {}}
    artifacts.write_manifest(artifact, {**manifest, "contract": {"template_date": "2025-12-24"}})
    from_model = TrainerConfig(model=str(artifact))
    assert text_settings.template_date(from_model, stage) == "2025-12-24"  # type: ignore[arg-type]
    set_ = from_model.replace(template_date="2020-02-20")
    assert text_settings.template_date(set_, stage) == "2020-02-20"  # type: ignore[arg-type]


def test_every_template_of_a_tokenizer_is_kept(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = tiny.make_tokenizer()
    tokenizer.chat_template = {"default": chat.CHATML, "tool_use": chat.TOOLS, "rag": "{{ messages }}"}
    before = template_hash(tokenizer)
    source = tmp_path / "hub"
    dataclasses.replace(tiny.make_model("lm"), tokenizer=tokenizer).save(source)
    assert (source / "additional_chat_templates" / "tool_use.jinja").is_file()
    asked: list[list[str]] = []

    def download(name: str, **options: Any) -> str:
        asked.append(options["allow_patterns"])
        return str(source)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.chdir(tmp_path)
    copied = load_model("owner/model")  # saved with its original files
    assert "additional_chat_templates/*.jinja" in asked[0]
    copied.save(tmp_path / "copy")
    kept = load_tokenizer(tmp_path / "copy")
    assert kept.chat_template == tokenizer.chat_template
    assert template_hash(kept) == before
    kept.chat_template = {**kept.chat_template, "tool_use": chat.CHATML}
    assert template_hash(kept) != before
    contract = ScoringContract.of(tokenizer, max_length=None)
    model = dataclasses.replace(tiny.make_model("score"), tokenizer=kept)
    with pytest.raises(InputError, match="its chat template is not the one it was trained with"):
        Scorer(model, contract)
    # A single named template hashes like an unnamed one, so hashes of earlier artifacts stay valid.
    kept.chat_template = {"default": chat.CHATML}
    alone = tokenizer_with(chat.CHATML)
    assert template_hash(kept) == template_hash(alone)


def test_tools_choose_the_template_as_in_transformers() -> None:
    tokenizer = tokenizer_with({"default": chat.CHATML, "tool_use": chat.TOOLS})
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"x": "int"}}}]
    plain, called = (
        data.encode_prompts(
            data.load([{"prompt": PROMPT, **row}]), tokenizer, max_prompt_length=None
        ).ids[0].tolist()
        for row in ({}, {"tools": tools})
    )  # fmt: skip
    assert plain == written(tokenizer, PROMPT, add_generation_prompt=True)
    assert called == written(tokenizer, PROMPT, add_generation_prompt=True, tools=tools)
    given = Encoder(tokenizer, chat.STRIPS).text(PROMPT, tools=tools)[0]
    assert given == tokenizer.apply_chat_template(PROMPT, chat_template=chat.STRIPS, tokenize=False)
    # Without a default template, only conversations with tools have a template.
    tokenizer.chat_template = {"tool_use": chat.TOOLS}
    encoder = Encoder(tokenizer)
    assert encoder.tokenize([encoder.text(PROMPT, open_turn=True, tools=tools)])[0].tolist() == called
    with pytest.raises(InputError, match="no chat template"):
        encoder.text(PROMPT)


def test_conversations_that_are_learned_begin_once() -> None:
    """BOS appears once even if both the tokenizer and the template write it."""
    tokenizer = chat.byte_level(bos="<s>", adds_bos=True)
    bos = tokenizer.bos_token_id
    turns = [chat.user("<s>a"), chat.assistant("b")]
    template = "{{ bos_token }}" + chat.STRIPS
    tokenizer.chat_template = template
    for options in ("plain", None):
        encoder = Encoder(tokenizer, options)
        ids, learned = encoder.marked(turns)
        assert ids.tolist() == encoder.whole([None], [turns])[0].tolist()
        assert len(ids) == len(learned)
        assert tokenizer.decode(ids[learned]).strip() in ("b</s>", "b</s>\n".strip())
    doubled = Encoder(tokenizer, "<s><s>" + chat.STRIPS)
    ids, learned = doubled.marked(turns)
    assert ids.tolist() == doubled.whole([None], [turns])[0].tolist()
    assert ids[:2].tolist().count(bos) == 1
    assert tokenizer.decode(ids[learned]).strip() == "b</s>"


def test_the_token_that_ended_a_completion_is_no_part_of_its_text(tiny: Any) -> None:
    tokenizer = tiny.make_tokenizer()
    ids = [
        np.array(tokenizer.convert_tokens_to_ids(words.split()), np.int32)
        for words in ("a b h", "h a", "b </s>")
    ]
    stop = tokenizer.convert_tokens_to_ids("h")
    assert continuations(tokenizer, [None] * 3, ids) == ["a b h", "h a", "b"]
    assert continuations(tokenizer, [None] * 3, ids, [stop]) == ["a b", "h a", "b"]
