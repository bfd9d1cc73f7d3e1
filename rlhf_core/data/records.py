"""Where rows come from: files, hub datasets, registered datasets and objects in memory, as one sequence."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_core.contracts import DATASET
from rlhf_core.data.adapting import adapted, with_columns
from rlhf_core.data.files import FORMATS, format_of, read
from rlhf_core.data.memory import from_memory
from rlhf_core.data.source import Records, Source
from rlhf_core.errors import InputError, reading, suggest

if TYPE_CHECKING:
    from rlhf_core.plugins.registry import Registry

# What a row of data may have and a table that names a dataset does not.
DATA_COLUMNS = {
    "prompt",
    "chosen",
    "rejected",
    "messages",
    "text",
    "completion",
    "input_ids",
    "conversations",
}
HUB_OPTIONS = ("split", "subset", "revision", "data_files")
PREFIXES = ("input_ids_", "chosen_", "rejected_")


def load(
    spec: Any,
    *,
    registry: Registry | None = None,
    base: Path | None = None,
    columns: Mapping[str, str] | None = None,
) -> Records:
    """The rows that `spec` names.

    spec: a path (jsonl, json, csv, parquet, arrow, txt with a text a line, also compressed as .gz or .zst, or what
        `datasets` saved); the name of a registered or a `datasets` dataset; a table {name, path | subset, split,
        revision, data_files, weight, columns}; a list of these, concatenated; or rows in memory: a list of mappings, a
        `datasets.Dataset`, a data frame, any object with `__len__` and `__getitem__`.
    base: directory that relative paths start from (the current one).
    columns: {name that is read: name in the data}, for every source that has no `columns` of its own.

    `split` is a name, or part of the rows as in "train[:90%]". `weight` w takes every row w times; a fraction
    takes rows evenly spread.

    Raises InputError for what is missing or cannot be read.
    """
    if isinstance(spec, Records):
        return spec if columns is None else Records([_read_as(source, columns) for source in spec.sources])
    if isinstance(spec, list | tuple):
        if not spec:
            raise InputError("the data is an empty list: give rows, or names of files")
        if not all(map(_is_row, spec)):
            each = [load(item, registry=registry, base=base, columns=columns) for item in spec]
            return Records([source for records in each for source in records.sources])
        return Records([_read_as(from_memory(spec), columns)])
    if isinstance(spec, str | Path):
        return Records([_read_as(_from_name(str(spec), {}, registry, base), columns)])
    if isinstance(spec, Mapping):
        return Records([_from_table(spec, registry, base, columns)])
    return Records([_read_as(from_memory(spec), columns)])


def _read_as(source: Source, columns: Mapping[str, str] | None) -> Source:
    return adapted(source if not columns else with_columns(source, columns))


def _is_row(item: Any) -> bool:
    if not isinstance(item, Mapping):
        return False
    has_data = any(k in DATA_COLUMNS or str(k).startswith(PREFIXES) for k in item)
    return has_data or not ({"name", "path"} & set(item))


def _from_table(
    table: Mapping[str, Any], registry: Registry | None, base: Path | None, columns: Mapping[str, str] | None
) -> Source:
    options = dict(table)
    columns = options.pop("columns", columns)
    if options and all(hasattr(value, "column_names") for value in options.values()):
        raise InputError(f"the data has several splits ({', '.join(options)}): give one of them")
    name, weight, path = options.pop("name", None), options.pop("weight", 1.0), options.pop("path", None)
    if name is None and path is None:
        raise InputError(
            f"a data table needs a name or a path; it has {', '.join(map(str, table)) or 'nothing'}: "
            '{ name = "jsonl", path = "pairs.jsonl" }'
        )
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < float("inf"):
        raise InputError(f"weight of {name or path} is {weight!r}: give a number above 0")
    if registry is not None and name not in FORMATS and name in registry.names(DATASET):
        given = options if path is None else {**options, "path": path}
        source = from_memory(registry.get(DATASET, name, **given), name)
    else:
        if unknown := [key for key in options if key not in HUB_OPTIONS]:
            known = ["name", "path", "weight", "columns", *HUB_OPTIONS]
            raise InputError(
                *(f"data table {name or path}: no option '{k}'.{suggest(k, known)}" for k in unknown)
            )
        if path is not None:
            if name is not None and name not in FORMATS:
                raise InputError(
                    f"'{name}' is no file format ({', '.join(FORMATS)}).{suggest(name, FORMATS)}"
                )
            source = _from_file(_resolve(str(path), base), str(path), name, options)
        elif name in FORMATS:
            raise InputError(
                f'{{ name = "{name}" }} needs a path: {{ name = "{name}", path = "pairs.{name}" }}'
            )
        else:
            source = _from_name(str(name), options, registry, base)
    source = _read_as(source, columns)
    if weight == 1:
        return source
    n, whole = len(source.rows), int(weight)
    extra = max(round((weight - whole) * n), 0 if whole else 1)
    return source.take([*range(n)] * whole + [i * n // extra for i in range(extra)], f"weight {weight}")


def _resolve(name: str, base: Path | None) -> Path:
    return (base or Path()) / Path(name).expanduser()


def _from_name(name: str, options: Mapping[str, Any], registry: Registry | None, base: Path | None) -> Source:
    path = _resolve(name, base)
    if path.exists():
        return _from_file(path, name, None, options)
    if registry is not None and name in registry.names(DATASET):
        return from_memory(registry.get(DATASET, name), name)
    known = format_of(path) is not None
    if known or name.startswith((".", "/", "~")) or name.count("/") > 1 or not name.strip():
        raise InputError(_missing(path, name))
    return _from_hub(name, options, path, registry)


def _missing(path: Path, name: str) -> str:
    if not path.parent.is_dir():
        above = path.parent.parent
        hint = suggest(path.parent.name, [p.name for p in above.iterdir()]) if above.is_dir() else ""
        return f"no file {name}: its directory does not exist.{hint}"
    return f"no file {name}.{suggest(path.name, [p.name for p in path.parent.iterdir()])}"


def _from_file(path: Path, name: str, kind: str | None, options: Mapping[str, Any]) -> Source:
    split = options.get("split")
    if hub := [key for key in options if key != "split"]:
        raise InputError(f"{name} is a file: {', '.join(hub)} is for datasets of the hub; leave it out")
    if not path.exists():
        raise InputError(_missing(path, name))
    if path.is_dir():
        return _from_directory(path, name, split)
    kind = kind or format_of(path)
    if kind is None:
        raise InputError(
            f"{name}: '{path.suffix}' is no format that is read ({', '.join(FORMATS)}); to say which it is: "
            f'{{ name = "jsonl", path = "{name}" }}'
        )
    rows, numbers, kinds, fingerprint = read(path, name, kind)
    source = Source(name, rows, numbers, fingerprint, kinds)
    return source if split is None else _part(source, split)


def _part(source: Source, split: str) -> Source:
    """The part of a file that `datasets` would call "train", "train[:100]", "[10%:]"."""
    match = re.fullmatch(r"(?:train)?(?:\[(-?\d+%?)?:(-?\d+%?)?\])?", split)
    if match is None:
        raise InputError(
            f"split '{split}' of {source.name}: a file has only train; parts are written train[:90%]"
        )
    n = len(source.rows)
    start, stop = (
        None if end is None else round(n * int(end[:-1]) / 100) if end.endswith("%") else int(end)
        for end in match.groups()
    )
    chosen = range(n)[start:stop]
    if not chosen:
        raise InputError(f"split '{split}' of {source.name} has no rows: the file has {n:,}")
    return source.take(chosen, f"split {split}")


def _from_directory(path: Path, name: str, split: str | None) -> Source:
    if not any((path / marker).is_file() for marker in ("dataset_info.json", "dataset_dict.json")):
        files = sorted(p.name for p in path.iterdir() if format_of(p) is not None)
        hint = f"; it has {', '.join(files[:8])}: give one of these, or a list" if files else ""
        raise InputError(f"{name} is a directory, not a file or a saved `datasets` dataset{hint}")
    from datasets import load_from_disk

    with reading(name):
        dataset = load_from_disk(str(path))
    if isinstance(dataset, Mapping):
        if split not in dataset:
            splits = ", ".join(dataset)
            raise InputError(
                f'{name} has the splits {splits}: {{ name = "{name}", split = "{next(iter(dataset))}" }}'
            )
        dataset = dataset[split]
    return from_memory(dataset, name)


def _from_hub(name: str, options: Mapping[str, Any], path: Path, registry: Registry | None) -> Source:
    """A dataset of the Hugging Face hub, or of its cache where HF_HUB_OFFLINE is set."""
    import datasets
    from huggingface_hub import dataset_info

    here = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
    registered = [] if registry is None else registry.names(DATASET)
    hint = suggest(path.name, here) or suggest(name, registered)
    offline = any(os.environ.get(v, "0") not in ("", "0") for v in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"))
    try:
        revision = options.get("revision")
        if not offline:
            dataset_info(
                name, revision=revision, timeout=10
            )  # one request, where loading would retry for long
        dataset = datasets.load_dataset(
            name,
            options.get("subset"),
            split=options.get("split") or "train",
            **{key: options[key] for key in ("revision", "data_files") if options.get(key) is not None},
        )
    except Exception as error:  # the network, the hub and the dataset's files fail in many ways
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise InputError(
            f"no data '{name}': no such file here, and the hub does not give such a dataset ({reason}). "
            f"Without network, fetch it elsewhere and give its files.{hint}"
        ) from error
    return from_memory(dataset, name)
