"""From stage to stage: the template a model is trained with is its own, and every stage ends a reply alike."""

from __future__ import annotations

import json

import pytest
from rlhf_grpo import GRPOConfig
from rlhf_reward import RewardConfig
from rlhf_sft import SFTConfig
from transformers import AutoTokenizer, GenerationConfig

from rlhf_core import load_model, sampling
from rlhf_core.fit import ExampleUpdates
from rlhf_core.scoring import Scorer
from tests.shared import chat_cases as chat
from tests.shared import commands

ONE = {"learning_rate": 1e-3, "max_training_steps": 1, "total_batch_size": 2}
ROWS = [
    {
        "prompt": [chat.SYSTEM, chat.user("a bab")],
        "chosen": [chat.assistant(a)],
        "rejected": [chat.assistant(b)],
    }
    for a, b in (("in: é", "b"), (" ab", "a  b"))
]
TOLD = [{"messages": [*row["prompt"], *row["chosen"]]} for row in ROWS]


def tokenizer():
    """Its EOS is not what ends a turn of the template, which it does not know."""
    return chat.byte_level(eos="<|endoftext|>", pad="<|endoftext|>")


def trained_on(monkeypatch):
    seen, inner = [], ExampleUpdates.__init__

    def spy(self, source, *arguments, **options):
        seen.extend(source.trees)
        inner(self, source, *arguments, **options)

    monkeypatch.setattr(ExampleUpdates, "__init__", spy)
    return seen


@pytest.fixture(scope="module")
def chain(tiny, tmp_path_factory):
    """{stage: (artifact, the trees it was trained on)}; only the first stage names the template, a file."""
    place = tmp_path_factory.mktemp("chain")
    (place / "chat.jinja").write_text(chat.CHATML, encoding="utf-8")
    stages = {}
    with pytest.MonkeyPatch.context() as patch:
        seen = trained_on(patch)
        config = SFTConfig(**ONE, chat_template=str(place / "chat.jinja"))
        model = tiny.make_model(vocab_size=512)
        base = tiny.run("sft", config, place / "sft", model=model, tokenizer=tokenizer(), train_dataset=TOLD)
        stages["sft"] = base, list(seen)
        seen.clear()
        rm = tiny.run("reward", RewardConfig(**ONE), place / "rm", model=str(base.path), train_dataset=ROWS)
        stages["reward"] = rm, list(seen)
    return stages


def ids_of(trees):
    return [[*tree.prefix.tolist(), *branch.tolist()] for tree in trees for branch in tree.branches]


def wanted(*, whole):
    """The chosen and rejected conversations of each row as transformers writes them, whole or up to the turn's end."""
    reader = tokenizer()
    found = []
    for row in ROWS:
        for side in ("chosen", "rejected"):
            text = reader.apply_chat_template(
                [*row["prompt"], *row[side]], chat_template=chat.CHATML, tokenize=False
            )
            text = text if whole else text.removesuffix("\n")
            found.append(reader(text, add_special_tokens=False)["input_ids"])
    return found


def test_stages_are_trained_on_the_same_ids(chain):
    assert ids_of(chain["sft"][1]) == wanted(whole=False)[::2]
    assert ids_of(chain["reward"][1]) == wanted(whole=True)
    end = tokenizer().convert_tokens_to_ids("<|im_end|>")
    for tree in chain["sft"][1]:
        assert (tree.branches[0][-1], tree.weights[0][-1]) == (end, 1)


@pytest.mark.parametrize("stage", ["sft", "reward"])
def test_template_and_stop_tokens_are_saved_with_the_model(chain, stage):
    path = chain[stage][0].path
    reader = tokenizer()
    stops = reader.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"])
    assert AutoTokenizer.from_pretrained(path).chat_template == chat.CHATML
    assert GenerationConfig.from_pretrained(path).eos_token_id == stops
    assert load_model(path, head="lm" if stage == "sft" else "score").stop_ids == tuple(stops)


@pytest.fixture
def stops(monkeypatch):
    """The stop tokens of every sampler that is made."""
    seen, inner = [], sampling.Sampler.__init__

    def spy(self, *arguments, **options):
        inner(self, *arguments, **options)
        seen.append(self.stop_ids)

    monkeypatch.setattr(sampling.Sampler, "__init__", spy)
    return seen


def generate(model, asked):
    commands.rlhf("generate", model, asked, "--max_completion_length", 2)


def test_texts_stop_at_the_end_of_the_turn(chain, tiny, tmp_path, stops):
    asked = tiny.write_rows(tmp_path / "asked.jsonl", [{"prompt": row["prompt"]} for row in ROWS])
    generate(chain["sft"][0].path, asked)
    assert stops == [tuple(tokenizer().convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"]))]


@pytest.mark.long
def test_rollouts_stop_at_the_end_of_the_turn(chain, tiny, tmp_path, stops):
    config = GRPOConfig(
        **{**ONE, "total_batch_size": 4}, num_generations=2, max_completion_length=4, beta=0.0
    )
    asked = [{"prompt": row["prompt"]} for row in ROWS]
    path = str(chain["sft"][0].path)
    grpo = tiny.run(
        "grpo", config, tmp_path, model=path, train_dataset=asked, rewards=[str(chain["reward"][0].path)]
    )
    generate(grpo.path, tiny.write_rows(tmp_path / "asked.jsonl", asked))
    assert len(stops) == 2
    assert set(stops) == {tuple(tokenizer().convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"]))}


def test_a_tokenizer_from_elsewhere_gets_the_stop_tokens_of_the_model(chain, tiny, tmp_path):
    """The model's generation_config.json says what ends a completion, for the sampler as for the texts."""
    elsewhere = tokenizer()
    elsewhere.chat_template = chat.LLAMA3.replace("{{ bos_token }}", "").replace("<|eot|>", "<|end|>")
    rm = tiny.run(
        "reward",
        RewardConfig(**ONE),
        tmp_path,
        model=str(chain["sft"][0].path),
        tokenizer=elsewhere,
        train_dataset=ROWS,
    )
    scorer = Scorer.load(rm.path)
    names = elsewhere.convert_ids_to_tokens(scorer.contract.special_tokens["eos"])
    assert names == ["<|endoftext|>", "<|im_end|>", "<|end|>"]
    assert elsewhere.name_or_path == ""  # the caller's own is left as it was


def test_a_check_knows_the_template_of_an_earlier_stage(tiny, tmp_path):
    tokenizer().save_pretrained(tmp_path / "tokenizer")
    tiny.write_rows(tmp_path / "told.jsonl", TOLD)
    tiny.write_rows(tmp_path / "asked.jsonl", [{"prompt": row["prompt"]} for row in ROWS])
    model = {**tiny.SIZES, "tokenizer": "tokenizer"}
    table = ", ".join(f"{name} = {json.dumps(value)}" for name, value in model.items())
    pipeline = f"""
        dir = "run"
        [[stage]]
        name = "base"
        trainer = "sft"
        model = {{ {table} }}
        train_data = "told.jsonl"
        chat_template = "plain"
        [[stage]]
        name = "policy"
        trainer = "grpo"
        model = "base.model"
        train_data = "asked.jsonl"
        rewards = [{{ name = "length", target = 4 }}]
    """
    for text, fine in ((pipeline, True), (pipeline.replace('chat_template = "plain"', ""), False)):
        (tmp_path / "pipeline.toml").write_text(text)
        commands.rlhf("check", tmp_path / "pipeline.toml", fails=not fine)
