"""Read and write the decoder's parameters as Hugging Face's safetensors files."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import rlhf_core.models.quantized as quantized
import rlhf_core.models.quantized_files as quantized_files
from rlhf_core.errors import UNREADABLE, InputError, library_words, suggest, warn
from rlhf_core.mesh import fetch_array
from rlhf_core.models.safetensors import DTYPES, NAMES, TensorFile, Writer, copy, described
from rlhf_core.runtime.signals import stop_if_asked

if TYPE_CHECKING:
    from rlhf_core.models.config import DecoderConfig
    from rlhf_core.models.decoder import Decoder
    from rlhf_core.models.quantized import Quantization

SHARD_BYTES = 5 * 10**9
THREADS = 8
"""The most threads that read tensors: more would take too much memory."""
INDEX = "model.safetensors.index.json"
HEAD = "lm_head.weight"
FREQUENCIES = "rotary_emb.inv_freq"
"""A table in older files, which is not read: the config determines it."""


def open_weights(directory: Path) -> dict[str, TensorFile]:
    """Open model.safetensors, or the files that its index names: {tensor name: the file that holds it}.

    Raises InputError naming the file that is missing or damaged.
    """
    single = directory / "model.safetensors"
    if single.is_file():
        reader = TensorFile(single)
        return dict.fromkeys(reader.header, reader)
    index = directory / INDEX
    if not index.is_file():
        other = sorted(p.name for p in directory.glob("*.bin"))
        hint = f" It has {other[0]}: save it in safetensors format first." if other else ""
        raise InputError(f"{directory}: no model.safetensors and no {INDEX}.{hint}")
    return _open_shards(directory, index)


def _open_shards(directory: Path, index: Path) -> dict[str, TensorFile]:
    """Open the files that an index names."""
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
        files = {name: directory / Path(file).name for name, file in weight_map.items()}
        absent = sorted({path.name for path in files.values() if not path.is_file()})
    except UNREADABLE as error:
        raise InputError(f"{index}: damaged ({library_words(error)}): fetch it again") from None
    if absent:
        raise InputError(*(f"{directory}: {name} is missing, though {INDEX} names it" for name in absent))
    readers = {path: TensorFile(path) for path in sorted(set(files.values()))}
    lost = [name for name, path in files.items() if name not in readers[path].header]
    if lost:
        raise InputError(
            *(f"{files[name]}: '{name}' is missing, though {INDEX} places it there" for name in lost[:5])
        )
    # As in transformers, a shard may hold tensors that the index does not list.
    unlisted = {name: reader for reader in readers.values() for name in reader.header}
    return unlisted | {name: readers[path] for name, path in files.items()}


@dataclass(frozen=True, eq=False)
class Kept:
    """What the files of a model say that its parameters do not, so that `save` can write them again.

    dtype: of most of the parameters' tensors, "float32", "float16" or "bfloat16"; None: another one.
    dtypes: {parameter path: dtype} of the parameters that have another one of these.
    carried: {name: its file} of tensors that belong to another part of the model, such as a vision tower. They are
    never read, only copied from file to file.
    tied_head: the name of a copy of the embeddings that is stored as the output head; None: there is no such copy.
    """

    dtype: str | None
    dtypes: Mapping[tuple[str, ...], str]
    carried: Mapping[str, TensorFile]
    tied_head: str | None

    @property
    def carried_bytes(self) -> int:
        return sum(reader.description(name)[2] for name, reader in self.carried.items())


def kept(decoder: Decoder, directory: Path) -> Kept:
    """Find what `save` has to know of a directory, from the headers of its files."""
    readers = open_weights(directory)
    plain = quantized_files.shown(readers)
    dtypes: list[str] = []
    by_leaf = {}
    wanted = set[str]()
    for leaf in _leaves(decoder):
        wanted |= leaf.tensors.keys()
        found = [plain[name].dtype(name) for name in leaf.tensors if name in plain]
        dtypes += found
        by_leaf[leaf.keys] = "float32" if NAMES["float32"] in found else usual_dtype(found)
    usual = usual_dtype(dtypes)
    head = _head(decoder.config, "lm_head")
    return Kept(
        usual,
        {keys: dtype for keys, dtype in by_leaf.items() if dtype not in (None, usual)},
        {name: readers[name] for name in _others(decoder, plain, wanted)[0]},
        head if decoder.config.tied and decoder.head == "lm" and head in plain else None,
    )


def with_stored_head(decoder: Decoder, kept: Kept | None) -> Kept:
    """Return what to write of a model with a tied head whose copy is to be stored, too."""
    return replace(kept or Kept(None, {}, {}, None), tied_head=_head(decoder.config, "lm_head"))


def usual_dtype(dtypes: Sequence[str]) -> str | None:
    """Find the most frequent of dtypes in headers: "float32", "float16", "bfloat16"; None for any other."""
    most = max(set(dtypes), key=dtypes.count) if dtypes else ""
    return {short: name for name, short in NAMES.items()}.get(most)


def placed(decoder: Decoder, directory: Path, *, contained: bool) -> Decoder:
    """Return the decoder with the names that its tensors have in the directory's files.

    Experts may be stored one by one or fused. contained: the files may hold more than this model, whose names then
    begin with a prefix of their own; the embeddings' name tells which. Raises InputError where several begin so.
    """
    try:
        readers = quantized_files.shown(open_weights(directory))
    except InputError:
        return decoder  # `check` says what is wrong
    choices = _stored_forms(decoder.config, _prefixes(readers) if contained else [decoder.config.prefix])
    if len(choices) == 1 and not contained:
        return decoder
    missing = [
        sum(name not in readers for leaf in _leaves(decoder, choice) for name in leaf.tensors)
        for choice in choices
    ]
    best = [choice for choice, count in zip(choices, missing, strict=True) if count == min(missing)]
    if len({choice.prefix for choice in best}) > 1:
        names = " and ".join(f"{choice.prefix}embed_tokens.weight" for choice in best)
        raise InputError(f"{directory}: {names} could both belong to its text model")
    config = _with_head_names(best[0], readers) if contained else best[0]
    return decoder if config == decoder.config else replace(decoder, config=config)


def _stored_forms(config: DecoderConfig, prefixes: Sequence[str]) -> list[DecoderConfig]:
    """List the names that tensors may have: beginning with each of these prefixes, experts stored in either form."""
    fusions = (config.fused_experts, not config.fused_experts) if config.experts else (config.fused_experts,)
    return [replace(config, prefix=prefix, fused_experts=fused) for prefix in prefixes for fused in fusions]


def _with_head_names(config: DecoderConfig, readers: Container[str]) -> DecoderConfig:
    """Name the heads of a model in the files of a larger one as they are there; without a head, it is tied."""
    stem = config.prefix.split(".")
    above = [".".join([*stem[:i], ""]) if i else "" for i in range(len(stem))]
    for head in ("lm_head", "score"):
        inner = next((start for start in above if f"{start}{head}.weight" in readers), "")
        if inner:
            config = replace(config, weight_names=(*config.weight_names, (head, inner + head)))
    return config if _head(config, "lm_head") in readers else replace(config, tied=True)


def _prefixes(names: Iterable[str]) -> list[str]:
    """List what the names of a model in the files of a larger one may begin with."""
    ending = "embed_tokens.weight"
    found = [name.removesuffix(ending) for name in names if name.endswith(f".{ending}")]
    return found or ["model.language_model."]


def _head(config: DecoderConfig, head: str) -> str:
    """Return the name of a head's tensor."""
    return f"{dict(config.weight_names).get(head, head)}.weight"


def usual_name(path: str) -> str:
    """Return a parameter path's name in the files, without its last word: `model.layers.{layer}.mlp.up_proj` for
    layers.mlp.up_proj. The files have one tensor per layer and expert."""
    name = path if path in ("lm_head", "score") else f"model.{path}"
    return name.replace("layers.", "layers.{layer}.").replace(".experts.", ".experts.{expert}.")


FUSED = re.compile(r"(.*\.experts)\.\{expert\}\.(gate|up|down)_proj\.weight")


class _Leaf:
    """One parameter and its tensors in the files; `lead`: their numbers by layer and by expert.

    places: (name of a tensor, the parameter's first element in it), by layer and expert. tensors: {name: shape}.
    """

    def __init__(self, path: tuple[Any, ...], shape: tuple[int, ...], config: DecoderConfig) -> None:
        self.keys = tuple(str(entry.key) for entry in path)
        self.shape = shape
        *words, last = self.keys
        layers = tuple(range(config.num_layers))
        if words[0] == "layers" and config.kinds:  # the files know nothing of kinds
            layers = config.stacks[words[1]].layers
            words = ["layers", *words[2:]]
        module = ".".join(words)
        named = dict(config.weight_names)
        whole = named.get(f"{module}.{last}")
        if whole:  # a tensor in the layout of the parameter
            self.transposed = False
            name = whole
        else:
            self.transposed = last == "kernel"
            stored = "weight" if last in ("kernel", "embedding") else last
            name = f"{named.get(module) or usual_name(module)}.{stored}"
        if config.prefix and name.startswith("model."):
            name = config.prefix + name.removeprefix("model.")
        axes = [axis for axis in ("layer", "expert") if f"{{{axis}}}" in name]
        self.lead = shape[: len(axes)]
        inner = shape[len(axes) :]
        self.tensor_shape = inner[::-1] if self.transposed else inner
        tensor_shape = self.tensor_shape
        # Elements of a fused tensor before the first expert's part, and from one expert's part to the next.
        first, size = 0, 0
        fused = FUSED.fullmatch(name) if config.fused_experts else None
        if fused is not None:
            experts, projection = fused.groups()
            joined = ("down",) if projection == "down" else ("gate", "up")
            name = f"{experts}.{'_'.join(joined)}_proj"
            first = joined.index(projection) * math.prod(inner)
            size = len(joined) * math.prod(inner)
            tensor_shape = (self.lead[-1], len(joined) * self.tensor_shape[0], *self.tensor_shape[1:])
        self.places = []
        for index in np.ndindex(self.lead):
            number = dict(zip(axes, index, strict=True))
            if "layer" in number:
                number["layer"] = layers[number["layer"]]
            self.places.append((name.format(**number), first + size * number.get("expert", 0)))
        self.tensors = dict.fromkeys((name for name, _ in self.places), tensor_shape)

    def parts(self, value: Any) -> Iterator[tuple[str, int, np.ndarray]]:
        """Yield (name of the tensor, its first element that is written, values) for the parameter's value."""
        places = iter(self.places)
        inner = self.shape[len(self.lead) :]
        for some in _on_host(value, by_layer=bool(self.lead)):
            for part in some.reshape(-1, *inner):
                yield *next(places), part.T if self.transposed else part

    def read(self, view: Callable[[str], np.ndarray], sharding: Any, threads: Executor) -> jax.Array:
        """Read the parameter; its transfer to the devices may not have ended."""
        parts: dict[Any, np.ndarray] = {}  # devices that hold the same part share one read

        def part(index: Any) -> np.ndarray:
            spans = tuple(slice(*s.indices(n)) for s, n in zip(index, self.shape, strict=True))
            key = tuple((s.start, s.stop) for s in spans)
            if key not in parts:
                out = np.empty([stop - start for start, stop in key], np.float32)
                leading = spans[: len(self.lead)]
                inner = spans[len(self.lead) :]
                numbers = np.arange(len(self.places)).reshape(self.lead)[(*leading, None)].reshape(-1)

                def fill(slot: np.ndarray, number: int) -> None:
                    tensor = self._part(view, self.places[number])
                    copy(tensor.T[inner] if self.transposed else tensor[inner], slot)

                list(threads.map(fill, out.reshape(-1, *out.shape[len(leading) :]), numbers))
                parts[key] = out
            return parts[key]

        return jax.make_array_from_callback(self.shape, sharding, part)

    def read_quantized(
        self, kind: Quantization, readers: Mapping[str, Any], shardings: Any, threads: Executor
    ) -> dict[str, jax.Array]:
        """Read a kernel as the arrays of `quantized.layout`, unchanged where the files have them.

        Every process quantizes all of it, matrix by matrix: the last scales of a matrix depend on the whole.
        """
        shapes = quantized.layout(kind, self.shape, (None,) * len(self.shape))
        made = {name: np.empty(shape, dtype) for name, (shape, dtype, _) in shapes.items()}

        def fill(index: tuple[int, ...], place: tuple[str, int]) -> None:
            reader = readers[place[0]]
            arrays = reader.arrays(kind) if isinstance(reader, quantized_files.Stored) else None
            if arrays is None:
                part = self._part(reader.view, place)
                arrays = quantized.quantize(kind, part if self.transposed else part.T)
            for name, value in arrays.items():
                made[name][index] = value

        list(threads.map(fill, np.ndindex(self.lead), self.places))
        return {
            name: jax.make_array_from_callback(whole.shape, shardings[name], whole.__getitem__)
            for name, whole in made.items()
        }

    def _part(self, view: Callable[[str], np.ndarray], place: tuple[str, int]) -> np.ndarray:
        """Return the values of one layer and expert as they lie in the files."""
        name, first = place
        tensor = view(name)
        if tensor.shape != self.tensor_shape:  # one expert's part
            tensor = tensor.reshape(-1)[first : first + math.prod(self.tensor_shape)].reshape(
                self.tensor_shape
            )
        return tensor


def _leaves(decoder: Decoder, config: DecoderConfig | None = None) -> list[_Leaf]:
    """List the parameters, none of them quantized; config: one with other names, if any."""
    return [
        _Leaf(path, leaf.shape, config or decoder.config)
        for path, leaf in jax.tree.leaves_with_path(decoder.quantized_as(None).abstract_params())
    ]


def tensor_names(decoder: Decoder) -> dict[tuple[str, ...], np.ndarray]:
    """Return {path: the names of its tensors, an array by layer and expert}; without adapters, whose files differ."""
    leaves = _leaves(decoder.with_lora(None))
    return {
        leaf.keys: np.array([name for name, _ in leaf.places], object).reshape(leaf.lead) for leaf in leaves
    }


def module_prefix(config: DecoderConfig) -> str:
    """Return how the names of the text model's modules begin in transformers 5, which PEFT's files use.

    Older files of models with a vision tower have other names, which transformers changes when it loads them.
    """
    old = config.prefix in ("language_model.", "language_model.model.", "model.")
    return "model.language_model." if old else config.prefix or "model."


def load(decoder: Decoder, directory: Path, shardings: Any) -> dict[str, Any]:
    """Load the parameters, float32 or quantized, each device's own part; leave out a missing score head.

    Raises InputError naming file and tensor for what is missing, unexpected or of another shape.
    """
    readers, leaves = check(decoder, directory)
    flat = {leaf.keys: leaf for leaf in leaves}
    params: dict[str, Any] = {}
    before: Any = None

    def view(name: str) -> np.ndarray:
        return readers[name].view(name)

    with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1)) as threads:
        places = jax.tree.leaves_with_path(shardings, is_leaf=lambda x: isinstance(x, dict) and "codes" in x)
        for path, sharding in places:
            keys = tuple(str(entry.key) for entry in path)
            stop_if_asked(f"while {directory} was read")
            stored = (*keys[:-1], "kernel") if isinstance(sharding, dict) else keys
            if stored in flat:
                inner = params
                for key in keys[:-1]:
                    inner = inner.setdefault(key, {})
                parameter: Any
                if decoder.quantized and isinstance(sharding, dict):
                    parameter = flat[stored].read_quantized(decoder.quantized, readers, sharding, threads)
                else:
                    parameter = flat[stored].read(view, sharding, threads)
                inner[keys[-1]] = parameter
                # The host holds a parameter until its transfer ends: two at most.
                jax.block_until_ready(before)
                before = parameter
    return jax.block_until_ready(params)


def check(decoder: Decoder, directory: Path) -> tuple[dict[str, TensorFile], list[_Leaf]]:
    """Compare the files' headers with the config; return the files, by tensor, and the parameters to read.

    Raises InputError as `load` does.
    """
    readers = quantized_files.shown(open_weights(directory))
    leaves = _leaves(decoder)
    score = _head(decoder.config, "score")
    if decoder.head == "score" and score not in readers:
        leaves = [leaf for leaf in leaves if leaf.keys[0] != "score"]
    problems = list(_mismatches(decoder, directory, readers, leaves))
    if problems:
        raise InputError(*problems)
    if {HEAD, score} <= set(readers):
        warn(f"{directory}: '{HEAD}' is not used: this is a reward model")
    return readers, leaves


def has_other_head(decoder: Decoder, directory: Path) -> bool:
    """Tell whether the files of a model with a tied head hold an output head that differs from the embeddings.

    It is False where the files cannot be read: `check` says why.
    """
    try:
        tensors = open_weights(directory) if decoder.config.tied else {}
        names = _head(decoder.config, "lm_head"), f"{decoder.config.prefix or 'model.'}embed_tokens.weight"
        head, embeddings = (tensors[name].view(name) for name in names)
    except (InputError, KeyError):
        return False
    return head.shape != embeddings.shape or any(
        not np.array_equal(head[i : i + 4096].astype(np.float32), embeddings[i : i + 4096].astype(np.float32))
        for i in range(0, len(head), 4096)
    )


def _mismatches(
    decoder: Decoder, directory: Path, readers: Mapping[str, TensorFile], leaves: list[_Leaf]
) -> Iterator[str]:
    wanted = {name: shape for leaf in leaves for name, shape in leaf.tensors.items()}
    missing = [name for name in wanted if name not in readers]
    if missing == [HEAD] and "score.weight" in readers:
        yield f"{directory}: a reward model (score.weight, no lm_head.weight): load it with head='score'"
        return
    for name in missing[:5]:
        yield f"{directory}: '{name}' is missing from its safetensors.{suggest(name, readers)}"
    if len(missing) > 5:
        yield f"{directory}: and {len(missing) - 5} other tensors are missing; is config.json of this model?"
    for name in _others(decoder, readers, wanted)[1][:5]:
        where, kind = readers[name].path, decoder.config.model_type
        yield f"{where}: '{name}' is unexpected: a {kind} of this config.json has none"
    yield from islice(_misfits(wanted, readers), 5)


def _others(
    decoder: Decoder, readers: Mapping[str, Any], wanted: Collection[str]
) -> tuple[list[str], list[str]]:
    """Divide tensors that are no parameters into (those that are carried, those that are wrong)."""
    config = decoder.config
    prefix = config.prefix or "model."
    parts = {name.removeprefix(prefix).partition(".")[0] for name in wanted if name.startswith(prefix)}
    known = set(wanted)
    if decoder.head == "score" or config.tied:
        known.add(_head(config, "lm_head"))
    carried, wrong = [], []
    for name in readers:
        if name in known:
            continue
        if name.startswith(prefix):
            inner = name.removeprefix(prefix)
            usual = f"model.{inner}"
            within = inner.partition(".")[0] in parts
        else:
            usual = name
            within = False
        of_another = bool(config.prefix) and not within  # such as a vision tower
        if of_another or any(re.match(pattern, usual) for pattern in config.carried):
            carried.append(name)
        elif not name.endswith(FREQUENCIES):
            wrong.append(name)
    return carried, wrong


def _misfits(wanted: Mapping[str, tuple[int, ...]], readers: Mapping[str, TensorFile]) -> Iterator[str]:
    for name, shape in wanted.items():
        if name not in readers:
            continue
        dtype = readers[name].dtype(name)
        if dtype not in DTYPES:
            yield f"{readers[name].path}: '{name}' has dtype {dtype}; only {', '.join(DTYPES)} can be read"
        stored = readers[name].header[name]["shape"]
        if name == "score.weight" and stored and stored[0] != 1:
            yield (
                f"{readers[name].path}: its head gives {stored[0]} numbers (num_labels in config.json), and a reward "
                "model gives 1: start from the language model, or from a reward model"
            )
        elif tuple(stored) != shape:
            yield f"{readers[name].path}: '{name}' has shape {stored}; config.json makes it {list(shape)}"


def save(
    decoder: Decoder,
    params: dict[str, Any],
    directory: Path,
    dtype: str = "float32",
    kept: Kept | None = None,
) -> None:
    """Write model.safetensors, or shards of at most 5 GB and their index, in Hugging Face's names.

    dtype: "float32", "float16" or "bfloat16". kept: what else the files of the model's directory say, if anything.
    Weights already in the directory are replaced. Every process takes part; the first one writes.
    """
    kept = Kept(dtype, {}, {}, None) if kept is None else kept
    leaves = sorted(_leaves(decoder), key=lambda leaf: leaf.keys)
    values = chain.from_iterable(leaf.parts(_at(params, leaf.keys)) for leaf in leaves)
    if jax.process_index() != 0:
        for _ in values:  # each one needs all processes
            pass
        return
    for old in [*directory.glob("model*.safetensors"), directory / INDEX]:
        old.unlink(missing_ok=True)  # open files can still be read
    tensors = dict[str, tuple[str, Sequence[int], int]]()
    for leaf in leaves:
        stored = kept.dtypes.get(leaf.keys, dtype)
        tensors |= {name: described(stored, shape) for name, shape in leaf.tensors.items()}
    embeddings = f"{decoder.config.prefix or 'model.'}embed_tokens.weight"
    copy_of_head = kept.tied_head if decoder.head == "lm" else None
    if copy_of_head is not None:
        tensors[copy_of_head] = tensors[embeddings]
    tensors |= {name: reader.description(name) for name, reader in kept.carried.items()}
    with Writer(directory, tensors, SHARD_BYTES) as writer:
        lost = []
        for name, first, value in values:
            if not writer.put(name, value, first):
                lost.append(name)
            if copy_of_head is not None and name == embeddings:
                writer.put(copy_of_head, value)
            del value  # frees its parameter before the next one is fetched
        for name, reader in kept.carried.items():
            writer.copy(name, reader)
    _warn_of_lost(list(dict.fromkeys(lost)), dtype)


def _warn_of_lost(lost: Sequence[str], dtype: str) -> None:
    """Warn of tensors with values that the dtype in which they are written does not have."""
    if lost:
        more = f" and {len(lost) - 3} other tensors" if len(lost) > 3 else ""
        holds = "hold" if len(lost) > 1 else "holds"
        warn(
            f"the model that is saved: {', '.join(map(repr, lost[:3]))}{more} {holds} values that are NaN, infinite or "
            f"too large for {dtype}, in which they are written: its outputs will not be finite"
        )


def _at(params: dict[str, Any], keys: tuple[str, ...]) -> Any:
    value: Any = params
    for key in keys:
        value = value[key]
    return value


def _on_host(value: Any, by_layer: bool) -> Iterator[np.ndarray]:
    """Yield the value on the host, whole or in parts along its first axis."""
    if not isinstance(value, jax.Array):
        yield np.asarray(value)
    elif value.is_fully_addressable:
        whole = np.empty(value.shape, value.dtype)
        for shard in value.addressable_shards:
            if shard.replica_id == 0:
                # An array caches its NumPy value; without a copy, the host would hold the whole model in the end.
                whole[shard.index] = jax.device_put(shard.data, shard.device, may_alias=False)
        yield whole
    elif not by_layer:
        yield fetch_array(value)
    else:  # briefly on every device, which has room for one layer of a large model, but perhaps not for all
        assert isinstance(value.sharding, NamedSharding)
        gather = jax.jit(_entry, out_shardings=NamedSharding(value.sharding.mesh, PartitionSpec()))
        for layer in range(value.shape[0]):
            yield np.asarray(gather(value, np.int32(layer)))


def _entry(x: jax.Array, at: jax.Array) -> jax.Array:
    return x[at]


def save_tensors(tensors: Mapping[str, jax.Array], directory: Path, dtype: str) -> None:
    """Write the weights of a model, by their names in the files, in place of those that the directory has.

    dtype: "float32", "float16" or "bfloat16". Every process calls it; the main one writes.
    """
    if jax.process_index() != 0:
        for tensor in tensors.values():  # each one needs all processes
            fetch_array(tensor)
        return
    for old in [*directory.glob("model*.safetensors"), directory / INDEX]:
        old.unlink(missing_ok=True)
    shapes = {name: described(dtype, tensor.shape) for name, tensor in tensors.items()}
    with Writer(directory, shapes, SHARD_BYTES) as writer:
        for name, tensor in tensors.items():
            writer.put(name, fetch_array(tensor))
