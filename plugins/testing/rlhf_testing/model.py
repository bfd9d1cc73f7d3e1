"""Check model families."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlhf_core.contracts import MODEL, ModelFamily
from rlhf_core.errors import InputError
from rlhf_core.logprobs import unembed
from rlhf_core.mesh import make_mesh, replicated_sharding
from rlhf_core.models import Definition
from rlhf_core.models.params import paths
from rlhf_testing.findings import Broken, Findings, make_component, require_close, require_finite
from rlhf_testing.fixtures import MODEL_TABLE

FIRST, SECOND = 7, 5
"""Tokens of the two sequences that all checks use."""
SPARE = 3
SEED = 1
"""Of the parameters."""


def check_model(family: ModelFamily, hf_config: Mapping[str, Any] | None = None) -> None:
    """Raise AssertionError that lists every property that the model family breaks.

    hf_config: a small model's config.json; default: a llama's fields under the family's first model_type. Tokens are
    drawn below its vocab_size. Weights should be large enough that differences show: initializer_range 0.3.

    component: it can be registered.
    parameters: `abstract_params`, `logical_axes` and `init` describe the same tree, float32.
    finite: hidden states and their gradient.
    padding: unused positions before and after a sequence change nothing.
    packing: other sequences in a row change nothing, and two sequences may share a prefix.
    later tokens: no token sees later ones.
    some tokens: `hidden_at` returns the same states as `hidden`.
    cache: `prefill`, `ring` and `decode`, `decode_groups` and `extend` give the same states as `hidden` on the whole
        sequence.
    score: one number per position, of families with a reward head.
    saving: `load` returns what `save` wrote, bit for bit.
    mesh: all available devices give the same.
    """
    __tracebackhide__ = True
    findings = Findings("model family", family)
    make_component(findings, MODEL, family)
    config = dict(MODEL_TABLE | {"vocab_size": 36, "initializer_range": 0.3, "model_type": family.name[0]})
    config = config if hf_config is None else dict(hf_config)
    definition = family.define(config, "lm")
    params = _parameters(findings, definition)
    findings.stop_if_broken()
    draw = np.random.default_rng(0)
    tokens = draw.integers(3, definition.vocab_size, FIRST + SECOND).astype(np.int32)
    findings.always = {"hf_config": config, "seed": SEED, "tokens": tokens}
    hidden = jax.jit(definition.hidden)
    with findings.property("finite"):
        first, second = (_alone(hidden, params, part) for part in (tokens[:FIRST], tokens[FIRST:]))
        require_finite(np.concatenate([first, second]), "hidden states")
        slopes = jax.jit(jax.grad(lambda p: jnp.square(definition.hidden(p, *_row(tokens))).sum()))(params)
        for path, x in paths(slopes):
            require_finite(x, f"gradient of {'.'.join(path)}")
    findings.stop_if_broken()
    with findings.property("padding"):
        before = (np.pad(x, ((0, 0), (SPARE, 0))) for x in _row(tokens[:FIRST]))
        ids, positions, until = before
        padded = hidden(params, ids, positions, np.where(until > 0, until + SPARE, 0))
        require_close(padded[0, SPARE:], first, f"with {SPARE} unused positions before", rtol=1e-4)
        after = hidden(params, *(np.pad(x, ((0, 0), (0, SPARE))) for x in _row(tokens[:FIRST])))
        require_close(after[0, :FIRST], first, f"with {SPARE} unused positions after", rtol=1e-4)
    with findings.property("packing"):
        _packing(hidden, params, tokens, first, second)
    with findings.property("later tokens"):
        other = tokens[:FIRST].copy()
        other[-1] = 3 + (other[-1] - 2) % (definition.vocab_size - 3)
        changed = _alone(hidden, params, other)
        require_close(changed[:-1], first[:-1], "with another last token, the states before it", rtol=1e-4)
        if np.allclose(changed[-1], first[-1], rtol=0, atol=1e-6):
            raise Broken("another last token does not change its own state; does hidden read its tokens?")
    with findings.property("some tokens"):
        at = np.array([[FIRST - 1, 0, FIRST - 2, 0]], np.int32)
        some = jax.jit(definition.hidden_at)(params, *_row(tokens[:FIRST]), at)
        require_close(some[0], first[at[0]], "hidden_at of the last, first and last but one", rtol=1e-4)
    with findings.property("cache"):
        _cache(definition, params, tokens[:FIRST], first)
    with findings.property("score"):
        _score(family, config, first)
    with findings.property("saving"):
        _saving(definition, params)
    if len(jax.devices()) > 1:
        with findings.property("mesh"):
            _mesh(definition, params, tokens[:FIRST], first)
    findings.end()


def _row(tokens: Any) -> tuple[Any, Any, Any]:
    """Return (tokens, positions, visible_until), int32 [1, time], of one sequence."""
    count = len(tokens)
    return tokens[None], np.arange(count, dtype=np.int32)[None], np.full((1, count), count, np.int32)


def _alone(hidden: Any, params: Any, tokens: Any) -> Any:
    return np.asarray(hidden(params, *_row(tokens))[0], np.float32)


def _parameters(findings: Findings, definition: Definition) -> Any:
    params = None
    with findings.property("parameters"):
        params = jax.jit(definition.init)(jax.random.key(SEED))
        described = {path: (x.shape, str(x.dtype)) for path, x in paths(definition.abstract_params())}
        drawn = {path: (x.shape, str(x.dtype)) for path, x in paths(params)}
        if drawn != described:
            path = next(p for p in {**drawn, **described} if drawn.get(p) != described.get(p))
            raise Broken(
                f"'{'.'.join(path)}': init makes {drawn.get(path, 'nothing')}, abstract_params says "
                f"{described.get(path, 'nothing')}"
            )
        wrong = [p for p, (_, dtype) in drawn.items() if dtype != "float32"]
        if wrong:
            raise Broken(f"'{'.'.join(wrong[0])}' is {drawn[wrong[0]][1]}; parameters are float32")
        axes = dict(_named(definition.logical_axes()))
        for path, (shape, _) in described.items():
            if len(axes.get(path, ())) != len(shape) or path not in axes:
                raise Broken(
                    f"'{'.'.join(path)}': axes names {axes.get(path)} for shape {list(shape)}; name each dimension"
                )
    return params


def _named(tree: Any, path: tuple[str, ...] = ()) -> Any:
    """Yield (path, axes) of every leaf; paths() would descend into the tuples."""
    for name, value in tree.items():
        yield from _named(value, (*path, name)) if isinstance(value, Mapping) else [((*path, name), value)]


def _packing(hidden: Any, params: Any, tokens: Any, first: Any, second: Any) -> None:
    count = FIRST + SECOND
    positions = np.concatenate([np.arange(FIRST), np.arange(SECOND)]).astype(np.int32)
    until = np.where(np.arange(count) < FIRST, FIRST, count).astype(np.int32)
    packed = hidden(params, tokens[None], positions[None], until[None])[0]
    require_close(packed[:FIRST], first, "with another sequence after it in the row", rtol=1e-4)
    require_close(
        packed[FIRST:], second, "with another sequence before it in the row (positions restart)", rtol=1e-4
    )
    start, one, two = tokens[:3], tokens[3:FIRST], tokens[FIRST:]
    tree = np.concatenate([start, one, two])
    positions = np.concatenate([np.arange(FIRST), 3 + np.arange(SECOND)]).astype(np.int32)
    until = np.where((np.arange(count) >= 3) & (np.arange(count) < FIRST), FIRST, count).astype(np.int32)
    branches = hidden(params, tree[None], positions[None], until[None])[0]
    whole = _alone(hidden, params, np.concatenate([start, two]))
    require_close(branches[:FIRST], first, "followed by another continuation of its start", rtol=1e-4)
    require_close(branches[FIRST:], whole[3:], "as the second continuation of a shared start", rtol=1e-4)


def _cache(definition: Definition, params: Any, tokens: Any, whole: Any) -> None:
    prompt = 3
    ids, positions, until = (np.pad(x, ((0, 0), (1, 0))) for x in _row(tokens[:prompt]))
    prefill = jax.jit(definition.prefill)
    states, read = prefill(params, ids, positions, np.where(until > 0, until + 1, 0))
    require_close(states[0, 1:], whole[:prompt], "prefill of a left-padded prompt", rtol=1e-4)
    for x in jax.tree.leaves(read):
        if x.shape[:1] != (1,):
            raise Broken(
                f"prefill of one row returns a cache with an array {list(x.shape)}; rows must be the first axis"
            )
    # Two rows, with fewer slots than tokens and padding, so that the ring wraps around.
    length = FIRST
    first = FIRST - 2
    twice = jax.tree.map(lambda x: jnp.concatenate([x, x]), read)
    cache = jax.jit(definition.ring, static_argnums=1)(twice, length, np.int32(first))
    prepared = definition.prepare(params)
    decode = jax.jit(definition.decode)
    own, longer = (definition.ring(twice, size, 0) for size in (FIRST - prompt, FIRST))
    alike = jax.tree.map(lambda x, y: x.shape == y.shape, own, longer)  # states, which begin as the prompt's
    own = jax.tree.map(lambda state, x: x if state else jnp.zeros_like(x), alike, own)
    shared = jax.jit(definition.decode_groups)
    for i in range(prompt, FIRST):
        slot = (first + i - prompt) % length
        visible = (slot - np.arange(length)) % length <= i
        pair = np.full(2, tokens[i], np.int32), np.full(2, i, np.int32)
        state, cache = decode(
            prepared,
            cache,
            *pair,
            np.stack([visible, visible]),
            np.int32(slot),
        )
        for row in state:
            require_close(row, whole[i], f"decode of token {i}, in slot {slot} of {length}", rtol=1e-4)
        if not definition.has("decode_groups"):
            continue
        state, own = shared(prepared, read, until > 0, own, *pair, np.int32(i - prompt))
        for row in state:
            require_close(row, whole[i], f"decode_groups of token {i}", rtol=1e-4)
    if definition.has("extend"):
        _extended(definition, prepared, cache, tokens, whole, any(jax.tree.leaves(alike)))
    kernel, softcap = definition.unembedding(params)
    logits = unembed(state, kernel, softcap)
    if logits.shape != (2, definition.vocab_size):
        raise Broken(
            f"unembedding gives logits {list(logits.shape)} for 2 states; the kernel must be [hidden, vocab]"
        )


def _extended(
    definition: Definition, prepared: Any, cache: Any, tokens: Any, whole: Any, has_states: bool
) -> None:
    """Feed two rows of different lengths to a used cache of FIRST entries, with padding behind one; then decode a
    token.
    """
    ends = np.array([2, 4], np.int32)
    chunks = np.stack([np.where(np.arange(4) < end, tokens[:4], 0) for end in ends]).astype(np.int32)
    count = (ends,) if has_states else ()
    states, cache = jax.jit(definition.extend)(prepared, cache, chunks, np.zeros(2, np.int32), *count)
    for row, end in zip(states, ends, strict=True):
        require_close(row[:end], whole[:end], f"extend by {end} tokens", rtol=1e-4)
    more = np.stack([tokens[end : end + 2] for end in ends]).astype(np.int32)
    states, cache = jax.jit(definition.extend)(prepared, cache, more, ends)
    for row, end in zip(states, ends, strict=True):
        require_close(
            row, whole[end : end + 2], f"extend of a cache by tokens {end} and {end + 1}", rtol=1e-4
        )
    at = ends + 2
    visible = np.arange(FIRST) <= at[:, None]
    state, _ = jax.jit(definition.decode)(prepared, cache, tokens[at].astype(np.int32), at, visible, at)
    for row, i in zip(state, at, strict=True):
        require_close(row, whole[i], f"decode of token {i} with a slot per row", rtol=1e-4)


def _score(family: ModelFamily, config: Mapping[str, Any], states: Any) -> None:
    try:
        definition = family.define(config, "score")
    except InputError:  # it has no reward head
        return
    scores = definition.score(definition.init(jax.random.key(2)), jnp.asarray(states))
    if scores.shape != states.shape[:-1] or scores.dtype != jnp.float32:
        raise Broken(
            f"score returns {scores.dtype}{list(scores.shape)} for states {list(states.shape)}; return "
            f"float32{list(states.shape[:-1])}"
        )
    require_finite(scores, "scores")


def _saving(definition: Definition, params: Any) -> None:
    mesh = make_mesh(devices=jax.devices()[:1])
    with tempfile.TemporaryDirectory() as directory:
        definition.save(params, Path(directory), "float32")
        read = definition.load(Path(directory), definition.shardings(mesh))
    before, after = dict(paths(params)), dict(paths(read))
    if set(before) != set(after):
        raise Broken(
            f"load and save differ in {', '.join('.'.join(p) for p in sorted(set(before) ^ set(after)))}"
        )
    for path, x in before.items():
        require_close(after[path], x, f"'{'.'.join(path)}' read again", rtol=0.0)


def _mesh(definition: Definition, params: Any, tokens: Any, whole: Any) -> None:
    count = len(jax.devices())
    mesh = make_mesh(data=1, fsdp=-1, tensor=2 if count % 2 == 0 else 1)
    spread = jax.device_put(params, definition.shardings(mesh))
    rows = jax.device_put(_row(tokens), replicated_sharding(mesh))
    states = jax.jit(definition.hidden, out_shardings=replicated_sharding(mesh))(spread, *rows)
    require_close(states[0], whole, f"on {count} devices", rtol=1e-4)
