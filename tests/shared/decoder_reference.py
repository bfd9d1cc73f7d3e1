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
    if kind in ("gemma2", "gpt_oss"):
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


def kinds_of(hf: dict[str, Any]) -> list[str]:
    """The kind of each layer, where their parameters differ."""
    if "first_k_dense_replace" in hf:
        return [
            "dense" if i < hf["first_k_dense_replace"] else "experts" for i in range(hf["num_hidden_layers"])
        ]
    if hf["model_type"] == "lfm2_moe":
        return ["dense_" * (i < hf["num_dense_layers"]) + kind for i, kind in enumerate(hf["layer_types"])]
    return hf["layer_types"] if hf["model_type"] in ("qwen3_5_text", "qwen3_5_moe_text") else []


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
    if hf["model_type"] == "gemma4_text":
        return hidden_of_gemma4(hf, params, tokens, positions, seen)
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    gemma, heads, kv_heads = (
        hf["model_type"].startswith("gemma"),
        hf["num_attention_heads"],
        hf["num_key_value_heads"],
    )
    offset = gemma or hf["model_type"].startswith("qwen3_5")
    size = hf.get("head_dim", hf["hidden_size"] // heads)
    name = hf.get("hidden_activation", hf.get("hidden_act", "silu"))
    scale = hf.get("attention_multiplier", hf.get("query_pre_attn_scalar", size) ** -0.5)
    olmo, added = hf["model_type"].startswith("olmo"), hf.get("residual_multiplier", 1.0)

    def norm(x: np.ndarray, group: dict[str, np.ndarray], layer: int | None = None) -> np.ndarray:
        weight = group["weight"] if layer is None else group["weight"][layer]
        return (
            x
            / np.sqrt((x * x).mean(-1, keepdims=True) + hf.get("norm_eps", hf["rms_norm_eps"]))
            * (weight + offset)
        )

    def linear(x: np.ndarray, group: dict[str, np.ndarray], layer: int) -> np.ndarray:
        return x @ group["kernel"][layer] + (group["bias"][layer] if "bias" in group else 0.0)

    def attend(x: np.ndarray, group: dict[str, Any], i: int) -> np.ndarray:
        if "qkv_proj" in group:
            q, k, v = np.split(linear(x, group["qkv_proj"], i), [heads * size, (heads + kv_heads) * size], -1)
        else:
            q, k, v = (linear(x, group[f"{which}_proj"], i) for which in "qkv")
        gate = 1.0
        if hf["model_type"].startswith("qwen3_5"):
            q, gate = (y.reshape(len(x), -1) for y in np.split(q.reshape(len(x), heads, 2 * size), 2, -1))
            gate = 1 / (1 + np.exp(-gate))
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
                    weight = np.exp(logit)
                    sink = np.exp(group["sinks"][i, head]) if "sinks" in group else 0.0
                    mixed[t, head] = weight @ v[keys, source] / (weight.sum() + sink)
        return linear(gate * mixed.reshape(len(x), -1), group["o_proj"], i)

    def taps(x: np.ndarray, group: dict[str, Any], i: int) -> np.ndarray:
        kernel, out = group["weight"][i][:, 0], np.zeros_like(x)  # [channels, taps]
        for t in range(len(x)):
            before = np.flatnonzero(seen[t])[-kernel.shape[1] :]
            out[t] = (x[before].T * kernel[:, kernel.shape[1] - len(before) :]).sum(-1)
        return out + (group["bias"][i] if "bias" in group else 0.0)

    def convolve(x: np.ndarray, group: dict[str, Any], i: int) -> np.ndarray:
        before, after, inner = np.split(linear(x, group["in_proj"], i), 3, -1)
        return linear(after * taps(before * inner, group["conv"], i), group["out_proj"], i)

    def recur(x: np.ndarray, group: dict[str, Any], i: int) -> np.ndarray:
        """The gated delta rule: every token runs its own sequence again, from its beginning."""
        keys, values = hf["linear_num_key_heads"], hf["linear_num_value_heads"]
        d, e = hf["linear_key_head_dim"], hf["linear_value_head_dim"]
        mixed = activation(taps(linear(x, group["in_proj_qkv"], i), group["conv1d"], i), "silu")
        q, k, v = np.split(mixed, [keys * d, 2 * keys * d], -1)
        q, k = (y.reshape(len(x), keys, d) for y in (q, k))
        q, k = (y / np.sqrt((y * y).sum(-1, keepdims=True) + 1e-6) for y in (q, k))
        v = v.reshape(len(x), values, e)
        beta = 1 / (1 + np.exp(-linear(x, group["in_proj_b"], i)))
        rate = np.log1p(np.exp(linear(x, group["in_proj_a"], i) + group["dt_bias"][i]))
        keep = np.exp(-np.exp(group["A_log"][i]) * rate)
        out = np.zeros((len(x), values, e))
        for t in range(len(x)):
            state = np.zeros((values, d, e))
            for s in np.flatnonzero(seen[t]):
                key = np.repeat(k[s], values // keys, 0)
                state = state * keep[s][:, None, None]
                error = v[s] - np.einsum("hde,hd->he", state, key)
                state = state + beta[s][:, None, None] * key[:, :, None] * error[:, None]
            out[t] = np.einsum("hde,hd->he", state, np.repeat(q[t], values // keys, 0)) / math.sqrt(d)
        out = (
            out
            / np.sqrt((out * out).mean(-1, keepdims=True) + hf["rms_norm_eps"])
            * group["norm"]["weight"][i]
        )
        gate = activation(linear(x, group["in_proj_z"], i), "silu").reshape(out.shape)
        return linear((out * gate).reshape(len(x), -1), group["out_proj"], i)

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
        if "shared_expert" in group:
            share = 1 / (1 + np.exp(-linear(x, group["shared_expert_gate"], i)))
            out = out + share * gated(x, group["shared_expert"], i)
        return out

    def clamped(x: np.ndarray, group: dict[str, Any], i: int) -> np.ndarray:
        """gpt-oss: a softmax over the chosen experts; gate and up in turn, clamped."""
        logit, out = linear(x, group["gate"], i), np.zeros_like(x)
        both, down = group["experts"]["gate_up_proj"], group["experts"]["down_proj"]
        for t in range(len(x)):
            taken = np.argsort(-logit[t])[: hf["num_experts_per_tok"]]
            for e in taken:
                inner = x[t] @ both["kernel"][i, e] + both["bias"][i, e]
                gate, up = (
                    np.minimum(inner[::2], hf["swiglu_limit"]),
                    np.clip(inner[1::2], -hf["swiglu_limit"], hf["swiglu_limit"]),
                )
                made = (up + 1) * gate / (1 + np.exp(-hf["swiglu_alpha"] * gate)) @ down["kernel"][i, e]
                share = np.exp(logit[t, e]) / np.exp(logit[t, taken]).sum()
                out[t] += share * (made + down["bias"][i, e])
        return out

    def grouped(x: np.ndarray, group: dict[str, Any], i: int) -> np.ndarray:
        """GLM-4.5, LFM2: the experts of the groups with the best two; the correction counts for the choice alone."""
        share, out = 1 / (1 + np.exp(-linear(x, group["gate"], i))), np.zeros_like(x)
        for t in range(len(x)):
            score = (share[t] + group["gate"]["e_score_correction_bias"][i]).reshape(hf.get("n_group", 1), -1)
            allowed = np.argsort(-np.sort(score, -1)[:, -2:].sum(-1))[: hf.get("topk_group", 1)]
            score = np.where(np.isin(np.arange(len(score)), allowed)[:, None], score, -np.inf).reshape(-1)
            taken = np.argsort(-score)[: hf["num_experts_per_tok"]]
            for e in taken:
                one = {part: {"kernel": g["kernel"][:, e]} for part, g in group["experts"].items()}
                floor = 1e-6 * hf["model_type"].startswith("lfm2")
                weight = hf["routed_scaling_factor"] * share[t, e] / (share[t, taken].sum() + floor)
                out[t] += weight * gated(x[t : t + 1], one, i)[0]
        return out + gated(x, group["shared_expert"], i) if "shared_expert" in group else out

    x = p["embed_tokens"]["embedding"][tokens]
    x = x * (math.sqrt(hf["hidden_size"]) if gemma else hf.get("embedding_multiplier", 1.0))
    for number in range(hf["num_hidden_layers"]):
        stack, i = p["layers"], number
        if kinds := kinds_of(hf):
            stack, i = stack[kinds[number]], kinds[:number].count(kinds[number])
        mlp = gated if "experts" not in stack["mlp"] else grouped if "routed_scaling_factor" in hf else routed
        mlp = clamped if "swiglu_limit" in hf else mlp
        first, second = stack.get("input_layernorm"), stack["post_attention_layernorm"]
        if olmo:
            x = x + norm(attend(x, stack["self_attn"], i), second, i)
            x = x + norm(mlp(x, stack["mlp"], i), stack["post_feedforward_layernorm"], i)
        elif gemma:
            x = x + norm(attend(norm(x, first, i), stack["self_attn"], i), second, i)
            inner = mlp(norm(x, stack["pre_feedforward_layernorm"], i), stack["mlp"], i)
            x = x + norm(inner, stack["post_feedforward_layernorm"], i)
        else:
            mixer = {"conv": convolve, "linear_attn": recur}.get(
                next(iter(stack.keys() & {"conv", "linear_attn"}), "")
            )
            own = stack.get("conv") or stack.get("linear_attn") or stack["self_attn"]
            x = x + added * (mixer or attend)(norm(x, first, i), own, i)
            x = x + added * mlp(norm(x, second, i), stack["mlp"], i)
    return norm(x, p["norm"])


def hidden_of_gemma4(
    hf: dict[str, Any], params: Any, tokens: np.ndarray, positions: np.ndarray, seen: np.ndarray
) -> np.ndarray:
    """As `hidden`; a layer's keys and values are those that the last layer of its type with any has made."""
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    count, heads, time = hf["num_hidden_layers"], hf["num_attention_heads"], len(tokens)
    own, size = count - hf["num_kv_shared_layers"], hf["hidden_size_per_layer_input"]
    types, made = hf["layer_types"], {}

    def norm(x: np.ndarray, weight: np.ndarray | float = 1.0) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + hf["rms_norm_eps"]) * weight

    def turned(x: np.ndarray, kind: str) -> np.ndarray:
        """[T, heads, size]: the first pairs of a head turn, with the wavelengths of a head that turns whole."""
        table, half = hf["rope_parameters"][kind], x.shape[-1] // 2
        angle = np.array([table["rope_theta"] ** (-i / half) for i in range(half)]) / table.get("factor", 1)
        angle[int(table.get("partial_rotary_factor", 1) * half) :] = 0
        pair = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * positions[:, None, None] * angle)
        return np.concatenate([pair.real, pair.imag], -1)

    def gated(x: np.ndarray, gate: np.ndarray, up: np.ndarray, down: np.ndarray) -> np.ndarray:
        return (activation(x @ gate, hf["hidden_activation"]) * (x @ up)) @ down

    x = p["embed_tokens"]["embedding"][tokens] * math.sqrt(hf["hidden_size"])
    if size:
        group = p["per_layer_inputs"]
        found = group["embed_tokens_per_layer"]["embedding"][tokens].reshape(time, count, size) * math.sqrt(
            size
        )
        mixed = (x @ group["per_layer_model_projection"]["kernel"]).reshape(time, count, size)
        mixed = norm(mixed / math.sqrt(hf["hidden_size"]), group["per_layer_projection_norm"]["weight"])
        given = (mixed + found) / math.sqrt(2)
    kinds = [kind if i < own else f"shared_{kind}" for i, kind in enumerate(types)]
    for number, kind in enumerate(types):
        i = kinds[:number].count(kinds[number])
        layer = jax.tree.map(lambda y, i=i: y[i], p["layers"][kinds[number]])
        attention, y = layer["self_attn"], norm(x, layer["input_layernorm"]["weight"])
        width = hf["global_head_dim"] if kind == "full_attention" else hf["head_dim"]

        def project(which: str, y: np.ndarray = y, group: Any = attention, width: int = width) -> np.ndarray:
            made = y @ group[f"{which}_proj"]["kernel"] + group[f"{which}_proj"].get("bias", 0.0)
            return made.reshape(time, -1, width)

        q = turned(norm(project("q"), attention["q_norm"]["weight"]), kind)
        if number < own:
            k = project("k")
            v = k if kind == "full_attention" and hf["attention_k_eq_v"] else project("v")
            made[kind] = turned(norm(k, attention["k_norm"]["weight"]), kind), norm(v)
        k, v = made[kind]
        mixed = np.zeros((time, heads, width))
        for t in range(time):
            keys = np.flatnonzero(seen[t])
            if kind == "sliding_attention":
                keys = keys[positions[t] - positions[keys] < hf["sliding_window"]]
            for head in range(heads if len(keys) else 0):
                of = head // (heads // k.shape[1])
                weight = np.exp(k[keys, of] @ q[t, head])
                mixed[t, head] = weight @ v[keys, of] / weight.sum()
        out = mixed.reshape(time, -1) @ attention["o_proj"]["kernel"] + attention["o_proj"].get("bias", 0.0)
        x = x + norm(out, layer["post_attention_layernorm"]["weight"])
        parts = [layer["mlp"][f"{part}_proj"]["kernel"] for part in ("gate", "up", "down")]
        inner = gated(norm(x, layer["pre_feedforward_layernorm"]["weight"]), *parts)
        if "moe" in layer:
            router, out = layer["moe"]["gate"], np.zeros_like(x)
            logit = (norm(x, router["scale"]) / math.sqrt(hf["hidden_size"])) @ router["kernel"]
            share, y = np.exp(logit), norm(x, layer["pre_feedforward_layernorm_2"]["weight"])
            for t in range(time):
                taken = np.argsort(-share[t])[: hf["top_k_experts"]]
                for e in taken:
                    parts = [
                        layer["moe"]["experts"][f"{part}_proj"]["kernel"][e]
                        for part in ("gate", "up", "down")
                    ]
                    factor = share[t, e] / share[t, taken].sum() * router["per_expert_scale"][e]
                    out[t] += factor * gated(y[t], *parts)
            inner = norm(inner, layer["post_feedforward_layernorm_1"]["weight"])
            inner = inner + norm(out, layer["post_feedforward_layernorm_2"]["weight"])
        x = x + norm(inner, layer["post_feedforward_layernorm"]["weight"])
        if size:
            gate = activation(x @ layer["per_layer_input_gate"]["kernel"], hf["hidden_activation"])
            out = (gate * given[:, number]) @ layer["per_layer_projection"]["kernel"]
            x = x + norm(out, layer["post_per_layer_input_norm"]["weight"])
        x = x * layer["layer_scalar"]
    return norm(x, p["norm"]["weight"])
