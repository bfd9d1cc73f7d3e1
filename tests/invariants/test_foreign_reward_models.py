"""Reward models that were trained elsewhere: read where their chat template ends, and language models refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import numpy as np
import pytest
from rlhf_reward import RewardConfig, RewardTrainer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rlhf_core import REWARD, artifacts, data, plugins
from rlhf_core.errors import InputError
from rlhf_core.models import load_model
from rlhf_core.scoring import Scorer, ScoringContract

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + ' ' + m.content + ' <|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant ' }}{% endif %}"
)
WORDS = ["<pad>", "<unk>", "<|im_start|>", "<|im_end|>", "\n", "user", "assistant", *"abcdefgh"]
CHAT = [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c"}]
IDS = [2, 5, 7, 8, 3, 4, 2, 6, 9, 3, 4]
"""What the template writes of CHAT, the line end behind the last turn included."""


def make_tokenizer() -> Any:
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>", "\n"])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<pad>", unk_token="<unk>"
    )
    tokenizer.chat_template = CHATML
    return tokenizer


@pytest.fixture(scope="module")
def foreign(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reward model as transformers would have saved it: no manifest."""
    path = tmp_path_factory.mktemp("models") / "foreign"
    model = tiny.make_model("score", scale=4.0)
    dataclasses.replace(model, tokenizer=make_tokenizer()).save(path)
    return path


def score_of(path: Path, ids: list[int]) -> float:
    return float(load_model(path, "score").scores(np.array([ids]), np.ones((1, len(ids)), int))[0])


def test_a_foreign_model_is_scored_where_its_template_ends(
    foreign: Path, tiny: Any, tmp_path: Path, rlhf: Any
) -> None:
    wanted, at_stop = score_of(foreign, IDS), score_of(foreign, IDS[:-1])
    assert abs(wanted - at_stop) > 1e-3
    assert make_tokenizer().apply_chat_template(CHAT, return_dict=False) == IDS
    scorer = Scorer.load(foreign, mesh=tiny.one_device())
    assert scorer.contract.read_at == "template"
    rows = [{"messages": CHAT}], [{"prompt": CHAT[:1], "completion": CHAT[1:]}]
    for each in rows:
        np.testing.assert_allclose(scorer.score_rows(data.load(each))["score"], [wanted], rtol=1e-5)
    np.testing.assert_allclose(scorer.score_completions([CHAT[:1]], ["c"]), [wanted], rtol=1e-5)
    host = plugins.load()
    judge = host.registry.get(REWARD, "model", model=str(foreign))
    judge.setup(SimpleNamespace(devices=tiny.one_device, registry=host.registry))
    np.testing.assert_allclose(judge([CHAT[:1]], [CHAT[1:]]), [wanted], rtol=1e-5)
    source, target = tiny.write_rows(tmp_path / "rows.jsonl", rows[0]), tmp_path / "scored.jsonl"
    assert rlhf("score", str(foreign), str(source), "-o", str(target)).code == 0
    np.testing.assert_allclose([row["score"] for row in tiny.read_rows(target)], [wanted], rtol=1e-5)
    # A text has no template to end it, and gets EOS as ever.
    np.testing.assert_allclose(
        scorer.score_completions(["a "], ["b"]), [score_of(foreign, [7, 8, 3])], rtol=1e-5
    )


@pytest.mark.parametrize("architectures", [["LlamaForCausalLM"], []])
def test_a_language_model_is_refused_at_every_door(
    architectures: list[str], tiny: Any, tmp_path: Path, rlhf: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a hub name as by a path, and where config.json does not say what it is."""
    snapshot = tmp_path / "snapshot"
    tiny.make_model("lm").save(snapshot)
    config = json.loads((snapshot / "config.json").read_text())
    (snapshot / "config.json").write_text(json.dumps({**config, "architectures": architectures}))
    asked = []

    def download(name: str, **options: Any) -> str:
        asked.append(options["allow_patterns"])
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.chdir(tmp_path)
    rows = tiny.write_rows(tmp_path / "rows.jsonl", [{"prompt": "a", "completion": "b"}])
    host = plugins.load()
    for name in ("owner/model", str(snapshot)):
        judge = host.registry.get(REWARD, "model", model=name)
        stage = SimpleNamespace(devices=tiny.one_device, registry=host.registry)
        doors = (
            lambda name=name: Scorer.load(name),
            lambda judge=judge, stage=stage: judge.setup(stage),
        )
        for door in doors:
            with pytest.raises(InputError, match=f"{name} is a language model, without a reward head"):
                door()
        said = f"{name} is a language model, without a reward head"
        assert said in rlhf("score", name, str(rows)).message
    assert artifacts.MANIFEST in asked[0]  # else a model of ours would lose its contract on the hub


def test_a_reward_model_of_the_hub_writes_nothing(
    foreign: Path, rlhf: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **_: str(foreign))
    monkeypatch.chdir(tmp_path)
    ended = rlhf("generate", "owner/model", "--prompt", "a")
    assert ended.code == 2
    assert "is a reward model, which does not generate" in ended.message


@pytest.mark.parametrize(
    ("length", "side", "limit", "mode"),
    [(64, "left", 64, "keep_end"), (64, "right", 64, "keep_start"), (128, "right", None, "keep_start")],
)
def test_its_tokenizers_length_is_a_limit_below_its_positions(
    length: int, side: str, limit: int | None, mode: str, tiny: Any
) -> None:
    tokenizer = make_tokenizer()
    tokenizer.model_max_length, tokenizer.truncation_side = length, side
    contract = ScoringContract.of_foreign(dataclasses.replace(tiny.make_model("score"), tokenizer=tokenizer))
    assert (contract.max_length, contract.truncation_mode) == (limit, mode)


@pytest.mark.long
@pytest.mark.parametrize(("read_at", "kept"), [(None, "template"), ("eos", "eos")])
def test_training_it_on_keeps_where_it_is_read(
    foreign: Path, tmp_path: Path, read_at: Any, kept: str
) -> None:
    rows = [
        {"prompt": CHAT[:1], "chosen": CHAT[1:], "rejected": [{"role": "assistant", "content": letter}]}
        for letter in "defgh"
    ]
    config = RewardConfig(
        max_training_steps=1, total_batch_size=4, save_directory=str(tmp_path / "run"), read_at=read_at
    )
    trained = RewardTrainer(config, model=str(foreign), train_dataset=rows).train().artifact
    assert trained.metadata["contract"]["read_at"] == kept
    scorer = Scorer.load(trained.path)
    ids = IDS if kept == "template" else IDS[:-1]
    np.testing.assert_allclose(
        scorer.score_completions([CHAT[:1]], ["c"]), [score_of(trained.path, ids)], rtol=1e-5
    )
    # And once more, from our artifact: its contract says it.
    config = config.replace(save_directory=str(tmp_path / "again"), read_at=None)
    again = RewardTrainer(config, model=str(trained.path), train_dataset=rows).train().artifact
    assert again.metadata["contract"]["read_at"] == kept
