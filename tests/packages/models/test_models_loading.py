"""Models from directories and tables: configs, heads, messages; and the arithmetic of a mesh."""

from __future__ import annotations

import dataclasses
import json
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from rlhf_core.errors import InputError
from rlhf_core.mesh import make_mesh
from rlhf_core.models import DECODER, Model, complete_table, find_family, fresh_model, load_model
from tests.shared.compiled import compilations
from tests.shared.decoder_configs import defined

TABLE: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 24,
}
IDS: dict[str, Any] = {"vocab_size": 30, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def test_families_are_found_by_model_type() -> None:
    assert find_family("qwen2") is DECODER
    two = {"decoder": DECODER, "other": DECODER}
    registry: Any = SimpleNamespace(get=lambda kind, name: two[name], names=lambda kind: list(two))
    with pytest.raises(InputError, match=r"'llama' is read by decoder and other"):
        find_family("llama", registry)
    del two["decoder"]
    assert find_family("llama", registry) is DECODER


def test_a_fresh_model_takes_its_vocabulary_from_the_tokenizer() -> None:
    tokenizer: Any = type(
        "Tokenizer",
        (),
        {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "__len__": lambda self: 21},
    )()
    made = fresh_model(TABLE | {"tokenizer": "somewhere/"}, tokenizer=tokenizer)
    assert made.definition.vocab_size == 21
    assert made.params["lm_head"]["kernel"].shape == (16, 21)
    assert {name: made.hf_config[name] for name in IDS} == IDS | {"vocab_size": 21}
    assert "tokenizer" not in made.hf_config
    assert complete_table(TABLE | {"vocab_size": 32}, tokenizer, None)["vocab_size"] == 32
    qwen = defined(complete_table(TABLE | IDS | {"model_type": "qwen3"}, None, None), "lm")
    assert qwen.config.head_dim == 4  # not the family's 128
    experts = TABLE | IDS | {"model_type": "qwen3_moe", "num_experts_per_tok": 2}
    for name in ("num_experts", "num_local_experts"):  # by one name, the one that was given
        table = complete_table(experts | {name: 4}, None, None)
        counts = {key: value for key, value in table.items() if key.endswith("_experts")}
        assert (counts, defined(table, "lm").config.experts) == ({name: 4}, 4)


def test_a_fresh_model_has_its_familys_defaults() -> None:
    gemma = fresh_model(TABLE | IDS | {"model_type": "gemma2", "num_hidden_layers": 2})
    config = gemma.definition.config
    assert (config.windows, config.attention_softcap, config.logit_softcap) == ((4096, None), 50.0, 30.0)
    assert (config.query_scale, config.tied, config.embedding_scale) == (0.5, True, 4.0)  # of head_dim 4
    assert gemma.hf_config["hidden_activation"] == "gelu_pytorch_tanh"
    assert (np.asarray(gemma.params["norm"]["weight"]) == 0).all()  # a factor of one
    modern = {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}}
    made = fresh_model(TABLE | IDS | modern)
    assert "rope_theta" not in made.hf_config
    assert made.definition.config.ropes[0].theta == 50


def test_transformers_reads_what_a_fresh_model_writes() -> None:
    transformers = pytest.importorskip("transformers")
    for kind in DECODER.name:
        written = complete_table(TABLE | IDS | {"model_type": kind}, None, None)
        read = transformers.AutoConfig.for_model(**written)
        sizes = "hidden_size", "intermediate_size", "tie_word_embeddings"
        assert [getattr(read, name) for name in sizes] == [written[name] for name in sizes], kind


def test_a_language_model_gets_a_reward_head_aloud(tmp_path: Path) -> None:
    language = fresh_model(TABLE | IDS)
    language.save(tmp_path / "lm")
    with pytest.warns(UserWarning, match=r"its reward head is new, drawn from seed 5"):
        scorer = load_model(tmp_path / "lm", "score", seed=5)
    assert "lm_head" not in scorer.params
    assert scorer.hf_config["architectures"] == ["LlamaForSequenceClassification"]
    assert scorer.hf_config["id2label"] == {"0": "LABEL_0"}
    assert scorer.hf_config["pad_token_id"] == 0
    in_memory = language.with_head("score", seed=5)
    jax.tree.map(np.testing.assert_array_equal, in_memory.params, scorer.params)
    assert (
        np.abs(
            scorer.params["score"]["kernel"] - language.with_head("score", seed=6).params["score"]["kernel"]
        ).max()
        > 0
    )
    scorer.save(tmp_path / "rm")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = load_model(tmp_path / "rm", "score")
    jax.tree.map(np.testing.assert_array_equal, again.params, scorer.params)
    ids, mask = np.array([[1, 5, 6, 0], [0, 1, 7, 2]]), np.array([[1, 1, 1, 0], [0, 1, 1, 1]])
    np.testing.assert_array_equal(again.scores(ids, mask), scorer.scores(ids, mask))


def test_padding_that_ends_sequences_is_warned_of() -> None:
    with pytest.warns(UserWarning, match=r"pad token \(2\) also ends sequences"):
        named = fresh_model(TABLE | IDS | {"pad_token_id": 2}, "score")
    assert (
        named.hf_config["pad_token_id"] is None
    )  # transformers then refuses batches, which it would misread
    no_padding = fresh_model({k: v for k, v in (TABLE | IDS).items() if k != "pad_token_id"}, "score")
    assert no_padding.hf_config["pad_token_id"] == 1  # the first token, which never is the last


@pytest.mark.parametrize(
    ("tokens", "config_pad", "pad"),
    [
        ({"pad_token": "<pad>"}, None, "<pad>"),
        ({"pad_token": "</s>"}, None, "<right_pad>"),
        ({}, None, "<right_pad>"),
        ({}, 3, "<s>"),
        ({"pad_token": "<pad>", "eos_token": "<pad>"}, None, "<right_pad>"),
    ],
)
def test_a_reward_model_pads_with_a_token_that_ends_nothing(
    tokens: dict[str, str], config_pad: int | None, pad: str, tiny: Any
) -> None:
    words = ["<pad>", "<unk>", "</s>", "<s>", "<right_pad>", "a"]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    backend.add_special_tokens(["</s>", "<s>", "<right_pad>"])
    given = {"eos_token": "</s>", "bos_token": "<s>", "unk_token": "<unk>", **tokens}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **given)
    before = tokenizer.pad_token

    def scorer(vocab: int) -> Model:
        language = tiny.drawn({**tiny.SIZES, "vocab_size": vocab, "pad_token_id": config_pad})
        made: Model = dataclasses.replace(language, tokenizer=tokenizer).with_head("score")
        return made

    made = scorer(len(words))
    assert (made.tokenizer.pad_token, made.hf_config["pad_token_id"]) == (pad, words.index(pad))
    assert tokenizer.pad_token == before
    assert scorer(4).tokenizer.pad_token != "<right_pad>"  # the model has no embedding for it


def test_calls_of_one_shape_are_traced_once() -> None:
    made = fresh_model(TABLE | IDS | {"vocab_size": 29})
    ids = np.ones((2, 5), np.int32)
    made.logits(ids, ids)
    others = jax.tree.map(lambda x: x + 1, made.params)
    with compilations() as compiled:
        made.with_params(others).logits(ids, ids)
        Model(defined(made.hf_config, "lm"), made.params, None, {}, None, made.mesh).logits(ids, ids)
    assert compiled == []


@pytest.mark.long
def test_a_mesh_and_one_device_draw_the_same_and_take_rows_that_do_not_divide() -> None:
    table = TABLE | IDS | {"model_type": "qwen2", "num_key_value_heads": 2, "initializer_range": 0.2}
    one, spread = (fresh_model(table, mesh=mesh, seed=2) for mesh in (None, make_mesh(2, 2, 2)))
    jax.tree.map(np.testing.assert_array_equal, one.params, spread.params)
    ids = np.random.default_rng(0).integers(0, 30, (3, 9)).astype(np.int32)
    mask = (np.arange(9)[None] >= np.array([[0], [2], [5]])).astype(np.int32)
    np.testing.assert_allclose(spread.logits(ids, mask), one.logits(ids, mask), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("named", [None, {"eos_token_id": None}, {"eos_token_id": []}, {"eos_token_id": 5}])
def test_a_saved_model_names_its_tokenizers_stop_id_whatever_its_source_named(
    tiny: Any, tmp_path: Path, named: dict[str, Any] | None
) -> None:
    """transformers reads generation_config.json, or config.json where there is none, and not the tokenizer."""
    made = tiny.make_model()
    made.save(tmp_path / "named")
    assert not (tmp_path / "named" / "generation_config.json").exists()  # config.json says it
    dataclasses.replace(made, hf_config={**made.hf_config, "eos_token_id": None}).save(tmp_path / "base")
    (tmp_path / "base" / "generation_config.json").unlink()
    if named is not None:
        (tmp_path / "base" / "generation_config.json").write_text(json.dumps({"top_k": 3} | named))
    base = load_model(tmp_path / "base")
    doors = {"whole": base, "adapter": base.with_lora(rank=2), "merged": base.with_lora(rank=2).merged()}
    for name, one in doors.items():
        one.save(tmp_path / name)
        written = json.loads((tmp_path / name / "generation_config.json").read_text())
        assert (
            written["eos_token_id"]
            == list(base.stop_ids)
            == ([1, 5] if named and named["eos_token_id"] else [1])
        )
        assert named is None or written["top_k"] == 3


def test_a_changed_tokenizer_is_saved_changed(tiny, tmp_path):
    """Though it still says that it comes from the model's directory."""
    tiny.make_model().save(tmp_path / "model")
    model = load_model(tmp_path / "model")
    model.tokenizer.chat_template = "{{ messages[0]['content'] }}"
    model.save(tmp_path / "again")
    assert load_model(tmp_path / "again").tokenizer.chat_template == model.tokenizer.chat_template
