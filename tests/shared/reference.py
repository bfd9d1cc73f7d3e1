"""The decoder and the three trainers' objectives in float64 NumPy, sequence by sequence, from the definitions."""

from __future__ import annotations

from typing import Any

import numpy as np

Params = dict[str, Any]
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "max_position_embeddings": 128,
}
"""A small llama."""


def as_float64(params: Params) -> Params:
    return {k: as_float64(v) if isinstance(v, dict) else np.asarray(v, np.float64) for k, v in params.items()}


def move(params: Params, direction: Params, by: float) -> Params:
    return {
        k: move(v, direction[k], by) if isinstance(v, dict) else v + by * direction[k]
        for k, v in params.items()
    }


def inner(a: Params, b: Params) -> float:
    return sum(
        inner(a[k], b[k]) if isinstance(a[k], dict) else float((np.asarray(a[k], np.float64) * b[k]).sum())
        for k in a
    )


def random_direction(params: Params, rng: np.random.Generator) -> Params:
    return {
        k: random_direction(v, rng) if isinstance(v, dict) else rng.normal(size=v.shape)
        for k, v in params.items()
    }


def norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def rotate(x: np.ndarray, theta: float) -> np.ndarray:
    """x: [time, heads, dim]; dimension i turns with dimension i + dim/2."""
    time, _, dim = x.shape
    angle = np.arange(time)[:, None] / theta ** (np.arange(0, dim, 2) / dim)
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    a, b = x[..., : dim // 2], x[..., dim // 2 :]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def hidden(params: Params, config: dict, tokens: np.ndarray) -> np.ndarray:
    """Hidden states [time, hidden] of one sequence, after the last norm."""
    heads, kv = config["num_attention_heads"], config["num_key_value_heads"]
    dim, eps = config["hidden_size"] // heads, config["rms_norm_eps"]
    x = params["embed_tokens"]["embedding"][tokens]
    time = len(tokens)
    layers = params["layers"]
    for i in range(config["num_hidden_layers"]):
        h = norm(x, layers["input_layernorm"]["weight"][i], eps)
        q, k, v = ((h @ layers["self_attn"][f"{n}_proj"]["kernel"][i]).reshape(time, -1, dim) for n in "qkv")
        q, k = rotate(q, config["rope_theta"]), rotate(k, config["rope_theta"])
        k, v = np.repeat(k, heads // kv, 1), np.repeat(v, heads // kv, 1)
        weights = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(dim)
        weights = np.where(np.tril(np.ones((time, time), bool)), weights, -np.inf)
        weights = np.exp(weights - weights.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        mixed = np.einsum("hqk,khd->qhd", weights, v).reshape(time, -1)
        x = x + mixed @ layers["self_attn"]["o_proj"]["kernel"][i]
        h = norm(x, layers["post_attention_layernorm"]["weight"][i], eps)
        gate, up = (h @ layers["mlp"][f"{n}_proj"]["kernel"][i] for n in ("gate", "up"))
        x = x + (gate / (1 + np.exp(-gate)) * up) @ layers["mlp"]["down_proj"]["kernel"][i]
    return norm(x, params["norm"]["weight"], eps)


def logps(params: Params, config: dict, tokens: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    """Log-probability of tokens[1:], nats."""
    logits = hidden(params, config, tokens)[:-1] @ params["lm_head"]["kernel"] / temperature
    logits = logits - logits.max(-1, keepdims=True)
    return logits[np.arange(len(tokens) - 1), tokens[1:]] - np.log(np.exp(logits).sum(-1))


def score(params: Params, config: dict, tokens: np.ndarray) -> float:
    return float((hidden(params, config, tokens)[-1] @ params["score"]["kernel"]).item())


def sft_loss(params: Params, config: dict, texts: list[tuple[np.ndarray, np.ndarray]]) -> float:
    """texts: (tokens, weights); the weight of a first token is not used."""
    total = sum(-(logps(params, config, tokens) * weights[1:]).sum() for tokens, weights in texts)
    return float(total / sum(weights[1:].sum() for _, weights in texts))


def reward_loss(
    params: Params, config: dict, pairs: list[tuple[np.ndarray, np.ndarray, float]], coefficient: float
) -> float:
    values = []
    for chosen, rejected, margin in pairs:
        c, r = score(params, config, chosen), score(params, config, rejected)
        values.append(np.log1p(np.exp(-(c - r - float(margin)))) + coefficient * (c + r) ** 2)
    return float(np.mean(values))
