"""`system_prompt` of a stage and `--system`: what conversations begin with, for policies and reward models alike."""

from __future__ import annotations

import warnings
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlhf_core import TrainerConfig, artifacts, data, plugins
from rlhf_core.errors import InputError
from rlhf_core.rollouts import RolloutOptions
from rlhf_core.rollouts.open_collector import open_prompts, system_prompt_warnings
from rlhf_core.sampling import SamplingOptions
from rlhf_core.scoring import Scorer, ScoringContract
from rlhf_core.tokenizer import Encoder, TextOptions
from rlhf_core.training import OnDevices
from tests.shared import chat_cases as chat
from tests.shared.plans import forecast_of

BRIEF = "ab ba"
SYSTEM = {"role": "system", "content": BRIEF}
OWN = {"role": "system", "content": "b"}
ASKED, REPLY = chat.user("a bab"), chat.assistant("ab")
OPTIONS = TextOptions(read_at="template", system_prompt=BRIEF)
NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + chat.CHATML
)
DROPS_SYSTEM = chat.CHATML.replace("{% for m in messages %}", "{% for m in messages if m.role != 'system' %}")


def tokenizer_with(template: str = chat.CHATML) -> Any:
    tokenizer = chat.byte_level(eos="<|im_end|>", pad="<|endoftext|>")
    tokenizer.chat_template = template
    return tokenizer


def test_every_kind_of_data_begins_with_it_unless_it_has_one() -> None:
    tokenizer = tokenizer_with()

    def ids(rows: Any, options: TextOptions) -> list[Any]:
        records = data.load([rows])
        prompts = data.encode_prompts(records, tokenizer, max_prompt_length=None, chat_template=options)
        pairs = data.encode_pairs(
            records, tokenizer, max_length=None, chat_template=options, completions=True
        )
        texts = data.encode_texts(records, tokenizer, max_length=None, chat_template=options)
        assert pairs.starts is not None
        assert texts.learned is not None
        sequences = {**pairs.sequences, **texts.sequences}
        found = [prompts.ids[0], *(ids[0] for ids in sequences.values()), pairs.starts[0], texts.learned[0]]
        return [np.asarray(each).tolist() for each in found]

    row = {"chosen": [REPLY], "rejected": [chat.assistant("b")]}
    written = ids({"prompt": [SYSTEM, ASKED], **row}, TextOptions(read_at="template"))
    assert ids({"prompt": [ASKED], **row}, OPTIONS) == written
    assert ids({"prompt": [ASKED], **row}, TextOptions(read_at="template")) != written
    own = {"prompt": [OWN, ASKED], **row}
    assert ids(own, OPTIONS) == ids(own, TextOptions(read_at="template"))


def test_a_system_prompt_is_not_trained_on_and_plain_texts_are_refused(tmp_path: Path) -> None:
    encoder, plain = Encoder(tokenizer_with(), OPTIONS), Encoder(tokenizer_with())
    found, wanted = encoder.marked([REPLY]), plain.marked([SYSTEM, REPLY])
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(a, b)
    assert encoder.prompt_text(None, [REPLY]) == plain.prompt_text([SYSTEM], [REPLY])

    config = TrainerConfig(system_prompt=BRIEF)
    stage = stage_of([{"prompt": "a", "completion": "b"}], tmp_path)
    with pytest.raises(InputError, match=r"stage 's'.train_data: system_prompt: .*plain texts"):
        context_of(config, stage).texts("train_data")
    stage = stage_of([{"prompt": [ASKED]}], tmp_path)
    options = RolloutOptions(99, 1, SamplingOptions(), 1)
    opened: Any = open_prompts(context_of(config, stage), options, "train_data")
    assert BRIEF in tokenizer_with().decode(opened.ids[0])


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (NO_SYSTEM, "system_prompt: .*no system role"),
        (DROPS_SYSTEM, "system_prompt: .* does not write system"),
    ],
)
def test_a_template_that_cannot_write_it_is_refused(template: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Encoder(tokenizer_with(template), OPTIONS)
    Encoder(tokenizer_with(template))


def stage_of(rows: Any, tmp_path: Path) -> Any:
    return SimpleNamespace(
        name="s", seed=0, is_main=True, mesh=None, inputs={"train_dataset": rows},
        registry=plugins.load().registry, dir=tmp_path, template_date=None, say=print,
    )  # fmt: skip


def context_of(config: TrainerConfig, stage: Any) -> OnDevices:
    context = OnDevices(config, stage)
    context.tokenizer = tokenizer_with()
    return context


def test_a_reward_model_keeps_it_in_its_contract(tiny: ModuleType, tmp_path: Path) -> None:
    model = tiny.make_model("score", scale=4.0)
    model.tokenizer.chat_template = "{% for m in messages %}{{ m.content + ' </s> ' }}{% endfor %}"
    config = TrainerConfig(system_prompt="a b")
    contract = ScoringContract.from_dict(
        Scorer.contract_of(OnDevices(config, stage_of([], tmp_path)), model), "here"
    )
    assert contract.system_prompt == "a b"
    with_it, without = (
        Scorer(model, contract),
        Scorer(model, ScoringContract.of(model.tokenizer, max_length=None)),
    )
    prompt, system = [chat.user("c")], {"role": "system", "content": "a b"}
    scores = with_it.score_completions([prompt, [system, *prompt]], ["d", "d"])
    np.testing.assert_allclose(scores[0], scores[1], rtol=1e-5)
    np.testing.assert_allclose(scores[:1], without.score_completions([[system, *prompt]], ["d"]), rtol=1e-5)


def test_a_run_warns_where_policy_and_reward_model_read_different_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    artifacts.write_manifest(tmp_path, {
        "format": 1, "name": "model", "kind": "reward_model", "files": {}, "contract": {"system_prompt": BRIEF},
    })  # fmt: skip
    reward: Any = SimpleNamespace(label="model", function=SimpleNamespace(model=str(tmp_path)))
    plain: Any = SimpleNamespace(label="length", function=len)

    def lines(prompt: str | None) -> list[str]:
        return system_prompt_warnings(
            OnDevices(TrainerConfig(system_prompt=prompt), stage_of([], tmp_path)), [reward, plain]
        )

    assert lines(BRIEF) == []
    assert [
        f"the system_prompt '{BRIEF}', the policy with no system_prompt" in each for each in lines(None)
    ] == [True]
    assert [f"'{BRIEF}', the policy with the system_prompt 'b'" in each for each in lines("b")] == [True]
    (tmp_path / artifacts.MANIFEST).unlink()  # a model from elsewhere
    assert lines(None) == []
    assert ["with no system_prompt, the policy" in each for each in lines(BRIEF)] == [True]
    (tmp_path / "chat_template.jinja").write_text('{% set messages = [{"content": "ab ba"}] %}')
    assert lines(BRIEF) == []


PIPELINE = """
[[stage]]
name = "rm"
trainer = "reward"
model = {{ {sizes}, tokenizer = "tokenizer" }}
train_data = "pairs.jsonl"
{of_rm}
[[stage]]
name = "policy"
trainer = "grpo"
model = {{ {sizes}, tokenizer = "tokenizer" }}
train_data = "pairs.jsonl"
system_prompt = "ab ba"
rewards = [{{ name = "model", model = "rm.model" }}]
"""


@pytest.mark.parametrize(("of_rm", "warned"), [("", True), ('system_prompt = "ab ba"', False)])
def test_a_check_warns_before_the_reward_model_exists(
    of_rm: str, warned: bool, tiny: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tokenizer_with().save_pretrained("tokenizer")
    row = {"prompt": [ASKED], "chosen": [REPLY], "rejected": [chat.assistant("b")]}
    tiny.write_rows(tmp_path / "pairs.jsonl", [row] * 8)
    sizes = ", ".join(f'{k} = "{v}"' if isinstance(v, str) else f"{k} = {v}" for k, v in tiny.SIZES.items())
    Path("p.toml").write_text(PIPELINE.format(sizes=sizes, of_rm=of_rm))
    host = plugins.load()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = forecast_of("p.toml", host, dir="run")["policy"]
    assert any("reads conversations with no system_prompt" in line for line in made.warnings) is warned
