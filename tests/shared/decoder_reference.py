"""The decoder in float64 NumPy, straight from a config.json, a token at a time where that is plainest.

Written from the papers and the families' own descriptions, so that it shares nothing with what it checks.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np


def visible(until: np.ndarray) -> np.ndarray:
    """[T, T] query, key, straight from the definition: k <= q < visible_until[k]."""
    time = len(until)
    return np.array([[k <= q < until[k] for k in range(time)] for q in range(time)])


def slides(hf: dict[str, Any], layer: int) -> bool:
    kind = hf["model_type"]
    if "layer_types" in hf:
        return hf["layer_types"][layer] == "sliding_attention"
    if kind == "gemma2":
        return layer % 2 == 0
    if kind == "gemma3_text":
        return (layer + 1) % hf["sliding_window_pattern"] != 0
    if kind == "olmo3":
        return (layer + 1) % 4 != 0
    if kind in ("mistral", "phi3", "mixtral"):
        return hf["sliding_window"] is not None
    if kind == "smollm3":
        return bool(hf.get("use_sliding_window")) and not turns(hf, layer)
    return bool(hf.get("use_sliding_window")) and layer >= hf.get("max_window_layers", 0)


def turns(hf: dict[str, Any], layer: int) -> bool:
    return not (hf["model_type"] == "smollm3" and (layer + 1) % hf["no_rope_layer_interval"] == 0)


def rope_table(hf: dict[str, Any], layer: int) -> dict[str, Any]:
    kind = "sliding_attention" if slides(hf, layer) else "full_attention"
    if kind in (hf.get("rope_parameters") or {}):
        return dict(hf["rope_parameters"][kind])
    if kind == "sliding_attention" and "rope_local_base_freq" in hf:
        return {"rope_theta": hf["rope_local_base_freq"]}
    table = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    if hf["model_type"] == "olmo3" and kind == "sliding_attention":
        table = {}
    return {"rope_theta": hf["rope_theta"], **table}


def frequencies(table: dict[str, Any], size: int) -> tuple[np.ndarray, float]:
    """(radians a position, of each pair of `size` dimensions; magnitude of cosine and sine)."""
    theta, kind = table["rope_theta"], table.get("rope_type", "default")
    frequency = np.array([theta ** (-2 * i / size) for i in range(size // 2)])
    original = table.get("original_max_position_embeddings")
    if kind == "linear":
        return frequency / table["factor"], 1.0
    if kind == "longrope":
        growth = table["attention_factor"]
        return frequency / np.array(table["short_factor"]), growth
    for i, f in enumerate(frequency):
        length = 2 * math.pi / f
        if kind == "llama3":
            low, high = table["low_freq_factor"], table["high_freq_factor"]
            if length > original / low:
                frequency[i] = f / table["factor"]
            elif length >= original / high:
                smooth = (original / length - low) / (high - low)
                frequency[i] = (1 - smooth) * f / table["factor"] + smooth * f
        if kind == "yarn":  # the index at which a pair turns so often within the original length
            first, last = (
                size * math.log(original / (turned * 2 * math.pi)) / (2 * math.log(theta))
                for turned in (32, 1)
            )
            first, last = max(math.floor(first), 0), min(math.ceil(last), size - 1)
            slow = min(max((i - first) / (last - first), 0), 1)
            frequency[i] = (1 - slow) * f + slow * f / table["factor"]
    return frequency, 0.1 * math.log(table["factor"]) + 1 if kind == "yarn" else 1.0


def turn(x: np.ndarray, positions: np.ndarray, hf: dict[str, Any], layer: int) -> np.ndarray:
    """[T, heads, size]: a pair of dimensions as a complex number."""
    if not turns(hf, layer):
        return x
    table = rope_table(hf, layer)
    size = int(x.shape[-1] * table.get("partial_rotary_factor", 1))
    frequency, magnitude = frequencies(table, size)
    pair = x[..., : size // 2] + 1j * x[..., size // 2 : size]
    pair = pair * magnitude * np.exp(1j * positions[:, None, None] * frequency)
    return np.concatenate([pair.real, pair.imag, x[..., size:]], -1)


def activation(x: np.ndarray, name: str) -> np.ndarray:
    if name == "gelu":
        return x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))
    if name == "gelu_pytorch_tanh":
        return x * 0.5 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return x / (1 + np.exp(-x))


def cap(x: np.ndarray, limit: float | None) -> np.ndarray:
    return x if limit is None else limit * np.tanh(x / limit)


def hidden(
    hf: dict[str, Any], params: Any, tokens: np.ndarray, positions: np.ndarray, seen: np.ndarray
) -> np.ndarray:
    """Hidden states float64 [T, D] of one row; seen bool [T, T]: query, key."""
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    gemma, heads, kv_heads = (
        hf["model_type"].startswith("gemma"),
        hf["num_attention_heads"],
        hf["num_key_value_heads"],
    )
    size = hf.get("head_dim", hf["hidden_size"] // heads)
    name = hf.get("hidden_activation", hf.get("hidden_act", "silu"))
    scale = hf.get("attention_multiplier", hf.get("query_pre_attn_scalar", size) ** -0.5)
    olmo, added = hf["model_type"].startswith("olmo"), hf.get("residual_multiplier", 1.0)

    def norm(x: np.ndarray, group: dict[str, np.ndarray], layer: int | None = None) -> np.ndarray:
        weight = group["weight"] if layer is None else group["weight"][layer]
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + hf["rms_norm_eps"]) * (weight + gemma)

    def linear(x: np.ndarray, group: dict[str, np.ndarray], layer: int) -> np.ndarray:
        return x @ group["kernel"][layer] + (group["bias"][layer] if "bias" in group else 0.0)

    def attend(x: np.ndarray, group: dict[str, Any], i: int) -> np.ndarray:
        if "qkv_proj" in group:
            q, k, v = np.split(linear(x, group["qkv_proj"], i), [heads * size, (heads + kv_heads) * size], -1)
        else:
            q, k, v = (linear(x, group[f"{which}_proj"], i) for which in "qkv")
        if olmo:
            q, k = norm(q, group["q_norm"], i), norm(k, group["k_norm"], i)
        q, k, v = (y.reshape(len(x), -1, size) for y in (q, k, v))
        if "q_norm" in group and not olmo:
            q, k = norm(q, group["q_norm"], i), norm(k, group["k_norm"], i)
        q, k = turn(q, positions, hf, i), turn(k, positions, hf, i)
        if beta := rope_table(hf, i).get("llama_4_scaling_beta"):
            original = rope_table(hf, i)["original_max_position_embeddings"]
            q = q * (1 + beta * np.log(1 + np.floor(positions / original)))[:, None, None]
        near = seen
        if slides(hf, i):
            near = seen & (positions[:, None] - positions[None] < hf["sliding_window"])
        mixed = np.zeros((len(x), heads, size))
        for head in range(heads):
            source = head // (heads // kv_heads)
            for t in range(len(x)):
                keys = np.flatnonzero(near[t])
                if len(keys):
                    logit = cap(scale * k[keys, source] @ q[t, head], hf.get("attn_logit_softcapping"))
                    weight = np.exp(logit - logit.max())
                    mixed[t, head] = weight @ v[keys, source] / weight.sum()
        return linear(mixed.reshape(len(x), -1), group["o_proj"], i)

    def gated(x: np.ndarray, group: dict[str, Any], i: int) -> np.ndarray:
        if "gate_up_proj" in group:
            gate, up = np.split(linear(x, group["gate_up_proj"], i), 2, -1)
        else:
            gate, up = linear(x, group["gate_proj"], i), linear(x, group["up_proj"], i)
        return linear(activation(gate, name) * up, group["down_proj"], i)

    def routed(x: np.ndarray, group: dict[str, Any], i: int) -> np.ndarray:
        logit, out = linear(x, group["gate"], i), np.zeros_like(x)
        share = np.exp(logit) / np.exp(logit).sum(-1, keepdims=True)
        for t in range(len(x)):
            taken = np.argsort(-share[t])[: hf["num_experts_per_tok"]]
            whole = share[t, taken].sum() if hf.get("norm_topk_prob", True) else 1.0
            for e in taken:
                one = {part: {"kernel": g["kernel"][:, e]} for part, g in group["experts"].items()}
                out[t] += share[t, e] / whole * gated(x[t : t + 1], one, i)[0]
        return out

    def grouped(x: np.ndarray, group: dict[str, Any], i: int) -> np.ndarray:
        """GLM-4.5: the experts of the groups with the best two; the correction counts for the choice alone."""
        share, out = 1 / (1 + np.exp(-linear(x, group["gate"], i))), np.zeros_like(x)
        for t in range(len(x)):
            score = (share[t] + group["gate"]["e_score_correction_bias"][i]).reshape(hf["n_group"], -1)
            allowed = np.argsort(-np.sort(score, -1)[:, -2:].sum(-1))[: hf["topk_group"]]
            score = np.where(np.isin(np.arange(len(score)), allowed)[:, None], score, -np.inf).reshape(-1)
            taken = np.argsort(-score)[: hf["num_experts_per_tok"]]
            for e in taken:
                one = {part: {"kernel": g["kernel"][:, e]} for part, g in group["experts"].items()}
                weight = hf["routed_scaling_factor"] * share[t, e] / share[t, taken].sum()
                out[t] += weight * gated(x[t : t + 1], one, i)[0]
        return out + gated(x, group["shared_expert"], i)

    x = p["embed_tokens"]["embedding"][tokens]
    x = x * (math.sqrt(hf["hidden_size"]) if gemma else hf.get("embedding_multiplier", 1.0))
    for number in range(hf["num_hidden_layers"]):
        stack, i = p["layers"], number
        if "first_k_dense_replace" in hf:
            dense = hf["first_k_dense_replace"]
            stack, i = stack["dense" if number < dense else "experts"], number - dense * (number >= dense)
        mlp = gated if "experts" not in stack["mlp"] else grouped if "n_group" in hf else routed
        first, second = stack.get("input_layernorm"), stack["post_attention_layernorm"]
        if olmo:
            x = x + norm(attend(x, stack["self_attn"], i), second, i)
            x = x + norm(mlp(x, stack["mlp"], i), stack["post_feedforward_layernorm"], i)
        elif gemma:
            x = x + norm(attend(norm(x, first, i), stack["self_attn"], i), second, i)
            inner = mlp(norm(x, stack["pre_feedforward_layernorm"], i), stack["mlp"], i)
            x = x + norm(inner, stack["post_feedforward_layernorm"], i)
        else:
            x = x + added * attend(norm(x, first, i), stack["self_attn"], i)
            x = x + added * mlp(norm(x, second, i), stack["mlp"], i)
    return norm(x, p["norm"])
