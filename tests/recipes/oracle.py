"""Compute what a saved llama says, in float64 NumPy, without a line of the suite: of held-out replies and pairs.

Reads `config.json`, `model.safetensors` or a LoRA adapter beside its base, and the tokenizer's words. Used on the
models that a recipe saves; no trainer imports it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

Weights = dict[str, np.ndarray]


class Oracle:
    """A saved model, its weights in float64."""

    def __init__(self, directory: Path) -> None:
        adapter = directory / "adapter_config.json"
        self.weights = read_adapted(directory) if adapter.exists() else read_weights(directory)
        base = (
            directory / json.loads(adapter.read_text())["base_model_name_or_path"]
            if adapter.exists()
            else directory
        )
        self.config: dict[str, Any] = json.loads((base / "config.json").read_text())
        tokenizer = json.loads((directory / "tokenizer.json").read_text())
        self.ids: dict[str, int] = tokenizer["model"]["vocab"]

    def encode(self, text: str, *, end: bool) -> list[int]:
        words = ["<bos>", *text.split(), *(["<eos>"] if end else [])]
        return [self.ids[word] for word in words]

    def hidden(self, ids: Sequence[int]) -> np.ndarray:
        """[T, hidden] behind the last norm."""
        config, w = self.config, self.weights
        heads, groups, eps = (
            config["num_attention_heads"],
            config["num_key_value_heads"],
            config["rms_norm_eps"],
        )
        x = w["model.embed_tokens.weight"][list(ids)]
        time = len(ids)
        causal = np.where(np.tril(np.ones((time, time), bool)), 0.0, -np.inf)
        for layer in range(config["num_hidden_layers"]):
            at = f"model.layers.{layer}."
            normed = rms_norm(x, w[at + "input_layernorm.weight"], eps)
            q, k, v = (normed @ w[f"{at}self_attn.{name}_proj.weight"].T for name in "qkv")
            size = q.shape[-1] // heads
            q = rotate(q.reshape(time, heads, size), config["rope_theta"])
            k = rotate(k.reshape(time, groups, size), config["rope_theta"])
            k, v = (np.repeat(part.reshape(time, groups, size), heads // groups, axis=1) for part in (k, v))
            scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(size) + causal
            mixed = np.einsum("hqk,khd->qhd", softmax(scores), v).reshape(time, heads * size)
            x = x + mixed @ w[at + "self_attn.o_proj.weight"].T
            normed = rms_norm(x, w[at + "post_attention_layernorm.weight"], eps)
            gate, up = (normed @ w[f"{at}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
            x = x + (gate / (1 + np.exp(-gate)) * up) @ w[at + "mlp.down_proj.weight"].T
        return rms_norm(x, w["model.norm.weight"], eps)

    def log_probs(self, ids: Sequence[int]) -> np.ndarray:
        """[T, vocabulary], after each token."""
        head = self.weights.get("lm_head.weight", self.weights["model.embed_tokens.weight"])
        return np.log(softmax(self.hidden(ids) @ head.T))

    def score(self, text: str) -> float:
        """A reward model's score, read at the end token."""
        return float(self.hidden(self.encode(text, end=True))[-1] @ self.weights["score.weight"][0])

    def of_replies(self, rows: Sequence[dict[str, Any]]) -> dict[str, float]:
        """Of rows prompt + completion: nats per token, nats of the end tokens alone, and the share that greedy decoding
        writes.
        """
        words, ends, greedy = [], [], []
        for row in rows:
            ids = self.encode(row["prompt"] + row["completion"], end=True)
            first = len(row["prompt"].split()) + 1
            table = self.log_probs(ids)[first - 1 : -1]
            chosen = table[np.arange(len(table)), ids[first:]]
            words.extend(-chosen)
            ends.append(-chosen[-1])
            greedy.append(bool(np.all(table.argmax(-1) == ids[first:])))
        return {
            "nll": float(np.mean(words)),
            "end_nll": float(np.mean(ends)),
            "greedy": float(np.mean(greedy)),
        }

    def of_pairs(self, rows: Sequence[dict[str, Any]]) -> dict[str, float]:
        """Of rows prompt + chosen + rejected: share whose chosen reply scores higher, and the mean lead."""
        leads = [
            self.score(row["prompt"] + row["chosen"]) - self.score(row["prompt"] + row["rejected"])
            for row in rows
        ]
        return {"accuracy": float(np.mean(np.array(leads) > 0)), "lead": float(np.mean(leads))}

    def sizes(self) -> dict[str, float]:
        """Root mean squares of the norms' scales and of the matrices."""
        norms = np.concatenate([x.ravel() for x in self.weights.values() if x.ndim == 1])
        matrices = np.concatenate([x.ravel() for x in self.weights.values() if x.ndim > 1])
        return {"norms": float(norms.mean()), "matrices": float(np.sqrt(np.mean(matrices**2)))}


def read_weights(directory: Path) -> Weights:
    return {name: x.astype(np.float64) for name, x in load_file(directory / "model.safetensors").items()}


def read_adapted(directory: Path) -> Weights:
    """A LoRA adapter in PEFT's layout, added to its base: W + alpha / rank · B A."""
    config = json.loads((directory / "adapter_config.json").read_text())
    weights = read_weights(directory / config["base_model_name_or_path"])  # of the same run: relative
    adapter = load_file(directory / "adapter_model.safetensors")
    for name, a in adapter.items():
        if found := re.fullmatch(r"base_model\.model\.(.*)\.lora_A\.weight", name):
            b = adapter[name.replace("lora_A", "lora_B")].astype(np.float64)
            weights[f"{found[1]}.weight"] += config["lora_alpha"] / config["r"] * b @ a.astype(np.float64)
    return weights


def difference(one: Path, other: Path) -> float:
    """Largest difference of two saved models' parameters, relative to the root mean square of their tensor."""
    file = "model.safetensors" if (one / "model.safetensors").exists() else "adapter_model.safetensors"
    left, right = load_file(one / file), load_file(other / file)
    if left.keys() != right.keys():
        return float("inf")
    return max(
        float(np.max(np.abs(left[name].astype(np.float64) - right[name]))) / max(rms(left[name]), 1e-12)
        for name in left
    )


def rms(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(x.astype(np.float64) ** 2)))


def rms_norm(x: np.ndarray, scale: np.ndarray, eps: float) -> np.ndarray:
    normed: np.ndarray = x / np.sqrt(np.mean(x**2, -1, keepdims=True) + eps) * scale
    return normed


def rotate(x: np.ndarray, theta: float) -> np.ndarray:
    """[T, heads, size], dimension i turned with i + size / 2."""
    half = x.shape[-1] // 2
    angles = np.outer(np.arange(len(x)), theta ** (-np.arange(half) / half))[:, None]
    first, second = x[..., :half], x[..., half:]
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def softmax(x: np.ndarray) -> np.ndarray:
    powers = np.exp(x - x.max(-1, keepdims=True))
    normed: np.ndarray = powers / powers.sum(-1, keepdims=True)
    return normed
