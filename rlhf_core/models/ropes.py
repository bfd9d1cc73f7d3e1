"""Rotary embeddings as config.json describes them: one for all layers, or one for each kind of layer.

transformers 4 writes `rope_theta` and `rope_scaling` (gemma3 also `rope_local_base_freq`, for its sliding layers),
transformers 5 `rope_parameters`, with a table for each kind of layer where they differ.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_core.models.config import Rope, RopeKind
from rlhf_core.models.families import FULL, SLIDING, Architecture
from rlhf_core.models.fields import Fields, shown

ALWAYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
UNUSED = {"finetuned", "original_max_position_embeddings"}
NEEDED: Mapping[RopeKind, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
}
OPTIONAL: Mapping[RopeKind, tuple[str, ...]] = {
    "yarn": ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    "longrope": ("attention_factor", "factor"),
}


def read_ropes(
    read: Fields, rules: Architecture, kinds: Sequence[str], turned: Sequence[bool], head_dim: int
) -> tuple[tuple[Rope, ...], tuple[int, ...]]:
    """(the different rotary embeddings, which of them each layer has: empty where all have the first).

    kinds: FULL or SLIDING a layer; turned: whether the layer has a rotary embedding at all.
    """
    tables = _tables(read)
    made = {kind: _rope(read, rules, *tables[kind], head_dim) for kind in dict.fromkeys(kinds)}
    layers = [made[kind] if turn else Rope("none") for kind, turn in zip(kinds, turned, strict=True)]
    distinct = tuple(dict.fromkeys(layers))
    return distinct, tuple(distinct.index(rope) for rope in layers) if len(distinct) > 1 else ()


def _tables(read: Fields) -> dict[str, tuple[str, dict[str, Any]]]:
    """{kind of layer: (where its table is, the table, `rope_theta` in it)}."""
    modern, legacy = read.get("rope_parameters"), read.get("rope_scaling")
    if modern and legacy and modern != legacy:
        read.problem("rope_parameters and rope_scaling both say how to turn positions; keep one of them")
    where, table = ("rope_parameters", modern) if modern else ("rope_scaling", legacy or {})
    parts: dict[str, Any] = {FULL: table, SLIDING: table}
    names = {FULL: where, SLIDING: where}
    if isinstance(table, Mapping) and (FULL in table or SLIDING in table):
        for stranger in set(table) - {FULL, SLIDING}:
            read.problem(f"{where}.{stranger} is not supported beside {FULL} and {SLIDING}")
        parts = {kind: table.get(kind) or {} for kind in parts}
        names = {kind: f"{where}.{kind}" for kind in parts}
    elif read.has("rope_local_base_freq"):
        if modern:
            read.problem(f"rope_parameters must have the tables {FULL} and {SLIDING}")
        parts[SLIDING] = {}
    out = {}
    for kind, part in parts.items():
        if not isinstance(part, Mapping):
            read.problem(f"{names[kind]} must be a table; it is {shown(part)}")
            part = {}
        local = kind == SLIDING and read.has("rope_local_base_freq")
        theta = read.number("rope_local_base_freq" if local else "rope_theta", 10_000.0)
        out[kind] = names[kind], {"rope_theta": theta, **{k: v for k, v in part.items() if v is not None}}
    return out


def _rope(read: Fields, rules: Architecture, where: str, table: dict[str, Any], head_dim: int) -> Rope:
    named: Any = table.get("rope_type", table.get("type")) or "default"
    kind: RopeKind = "longrope" if named in rules.longrope else named
    known = [name for name in NEEDED if name != "longrope" or rules.longrope]
    if kind not in known:
        read.problem(f"{where}.rope_type {shown(kind)} is not supported; the decoder has {', '.join(known)}")
        return Rope()
    used = {*NEEDED[kind], *OPTIONAL.get(kind, ())}
    for name in sorted(set(table) - used - ALWAYS - UNUSED):
        read.problem(f"{where}.{name} {shown(table[name])} has no meaning for rope_type {shown(kind)}")
    missing = [name for name in NEEDED[kind] if table.get(name) is None]
    for name in missing:
        read.problem(f"{where}.{name} is missing")
    share = table.get("partial_rotary_factor", read.get("partial_rotary_factor"))
    share = 1.0 if share is None else share
    if share != 1 and not (rules.partial_rotary and isinstance(share, float) and 0 < share < 1):
        read.problem(
            f"{where}.partial_rotary_factor other than 1 is not supported here; it is {shown(share)}"
        )
        share = 1.0
    if share != 1 and int(head_dim * share) % 2:
        read.problem(
            f"{where}.partial_rotary_factor {shown(share)} of head_dim {head_dim} is not an even number"
        )
    # As in transformers, the file's own field goes before the table's.
    longest, original = read.whole("max_position_embeddings", 2048), "original_max_position_embeddings"
    numbers = Fields({**table, original: read.get(original) or table.get(original)}, dict.fromkeys(used))
    for name in sorted((used | {"rope_theta"}) - {"short_factor", "long_factor", "truncate"}):
        numbers.positive(name)
    length = numbers.whole(original, longest)
    read.problems += [line.replace("config.json: ", f"config.json: {where}.") for line in numbers.problems]
    if missing or numbers.problems:
        return Rope()
    rope = Rope(
        kind,
        float(table["rope_theta"]),
        float(table.get("factor", 1.0)),
        float(table.get("low_freq_factor", 1.0)),
        float(table.get("high_freq_factor", 4.0)),
        length,
        share=float(share),
    )
    if kind == "yarn":
        return _yarn(rope, table)
    return _longrope(read, where, rope, table, longest, head_dim) if kind == "longrope" else rope


def _yarn(rope: Rope, table: Mapping[str, Any]) -> Rope:
    """Logits are `magnitude`² larger: 0.1 ln(factor) + 1, or a ratio of two of that form with other slopes."""

    def gain(slope: float) -> float:
        return 0.1 * slope * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    magnitude = table.get("attention_factor")
    if magnitude is None:
        up, down = table.get("mscale"), table.get("mscale_all_dim")
        magnitude = gain(up) / gain(down) if up and down else gain(1.0)
    return Rope(
        rope.kind,
        rope.theta,
        rope.factor,
        original_length=rope.original_length,
        beta_fast=float(table.get("beta_fast") or 32),
        beta_slow=float(table.get("beta_slow") or 1),
        truncate=bool(table.get("truncate", True)),
        magnitude=float(magnitude),
        share=rope.share,
    )


def _longrope(
    read: Fields, where: str, rope: Rope, table: Mapping[str, Any], longest: int, head_dim: int
) -> Rope:
    """The frequencies of short contexts; the long ones would turn a sequence by what else is in its batch."""
    divisors, pairs = table["short_factor"], int(head_dim * rope.share) // 2
    numeric = isinstance(divisors, list) and all(isinstance(x, int | float) for x in divisors)
    if not numeric or len(divisors) != pairs:
        read.problem(f"{where}.short_factor must be a list of {pairs} numbers; it is {shown(divisors)}")
        return Rope()
    magnitude, factor = table.get("attention_factor"), table.get("factor", longest / rope.original_length)
    if magnitude is None:
        magnitude = math.sqrt(1 + math.log(factor) / math.log(rope.original_length)) if factor > 1 else 1.0
    return Rope(
        rope.kind,
        rope.theta,
        original_length=rope.original_length,
        magnitude=float(magnitude),
        divisors=tuple(float(x) for x in divisors),
        share=rope.share,
    )
