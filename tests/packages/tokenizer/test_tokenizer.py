"""What a tokenizer brings beside its ids: templates, special tokens, a hash; where it comes from."""

from __future__ import annotations

import subprocess
import sys

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from rlhf_core.errors import InputError
from rlhf_core.tokenizer import (
    ids_without_token,
    load_tokenizer,
    special_ids,
    template_hash,
    template_text,
    tokenizer_hash,
)

CHATML = (
    "{% for m in messages %}{{ '<s>' + m['role'] + '\\n' + m['content'] + '</s>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>assistant\\n' }}{% endif %}"
)


def small_tokenizer(*, bos=False, eos=False, template=None):
    """Make a byte tokenizer that merges `ab` and has <s> and </s>, which it can add itself."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(["<s>", "</s>", *alphabet, "ab"])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[("a", "b")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    single = " ".join(["<s>"] * bos + ["$A"] + ["</s>"] * eos)
    backend.post_processor = processors.TemplateProcessing(
        single=single, special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = template
    return tokenizer


def test_a_template_may_come_from_a_file(tmp_path):
    path = tmp_path / "chat.jinja"
    path.write_text(CHATML, encoding="utf-8")
    tokenizer = small_tokenizer()
    assert template_text(tokenizer, str(path)) == CHATML
    assert template_hash(tokenizer, str(path)) == template_hash(small_tokenizer(template=CHATML))
    assert template_hash(tokenizer) is None


def test_special_ids_include_the_generation_config(tmp_path):
    small_tokenizer().save_pretrained(tmp_path)
    assert special_ids(load_tokenizer(tmp_path)).eos == (1,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 1, 99999]}')
    special = special_ids(load_tokenizer(tmp_path))
    assert special.bos == 0
    assert special.eos == (1, 5)  # the tokenizer's own comes first; ids outside its vocabulary are dropped
    assert special.pad is None


def test_hashes_tell_tokenizers_apart(tmp_path):
    tokenizer = small_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    assert tokenizer_hash(load_tokenizer(tmp_path)) == tokenizer_hash(tokenizer)
    assert tokenizer_hash(small_tokenizer(bos=True)) != tokenizer_hash(tokenizer)
    before = tokenizer_hash(tokenizer)
    tokenizer("abc", truncation=True, max_length=2)
    assert tokenizer_hash(tokenizer) == before


def test_hub_names_without_network(monkeypatch):
    import huggingface_hub

    def unreachable(*args, **kwargs):
        raise OSError("Name or service not known\nmore")

    monkeypatch.setattr(huggingface_hub, "model_info", unreachable)
    with pytest.raises(InputError, match=r"no such directory, and not on the hub \(Name or service"):
        load_tokenizer("nobody/nothing-of-this-name")


@pytest.mark.long
def test_loading_is_silent(tmp_path):
    small_tokenizer().save_pretrained(tmp_path)
    code = f"from rlhf_core.tokenizer import load_tokenizer; load_tokenizer({str(tmp_path)!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")


def test_ids_without_a_token_are_found():
    words = Tokenizer(models.WordLevel({"a": 1, "b": 2, "c": 5}, unk_token="a"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
    assert ids_without_token(tokenizer, 8) == ((0, 1), (3, 5), (6, 8))
    assert ids_without_token(tokenizer, 2) == ((0, 1),)  # a model smaller than the tokenizer
    tokenizer.add_tokens(["<x>"])
    assert ids_without_token(tokenizer, 6)[-1][1] <= 5
    pieces = Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0), ("a", -2.0)], unk_id=0))
    assert ids_without_token(PreTrainedTokenizerFast(tokenizer_object=pieces), 4) == ((3, 4),)
