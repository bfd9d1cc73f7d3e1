"""Load rows from files, hub datasets, registered datasets and objects in memory."""

from __future__ import annotations

import hashlib
import inspect
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_core import hub
from rlhf_core.contracts import DATASET
from rlhf_core.data.columns import normalise_conversations, rename_columns, require_text
from rlhf_core.data.files import FORMATS, HALVES, NotARow, format_of, read_file, require_unicode, table_rows
from rlhf_core.data.report import Problems
from rlhf_core.data.table import Kinds, Records, Table, View, count_values, digest, json_text
from rlhf_core.errors import InputError, library_words, reading, suggest

if TYPE_CHECKING:
    from rlhf_core.plugins.registry import Registry

# Columns that tell a row from a table that names a dataset.
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
FILE_OPTIONS = ("split", "field")
HUB_OPTIONS = ("split", "subset", "revision", "data_files")
PREFIXES = ("input_ids_", "chosen_", "rejected_")
KEPT = 16_384
"""Rows of a `grain.MapDataset` that are kept in memory; of more, each is read when it is needed."""
ENDLESS = 2**40
"""Rows that no data in memory have; those of grain that repeat without end give the largest integer as their length."""


def load(
    spec: Any,
    *,
    registry: Registry | None = None,
    base: Path | None = None,
    columns: Mapping[str, Any] | None = None,
) -> Records:
    """Load the rows that `spec` names.

    spec: a path (jsonl, json, csv, parquet, arrow, txt with one text per line, optionally compressed as .gz or .zst,
        or a directory saved by `datasets`); the name of a registered or a `datasets` dataset; a table {name, path |
        subset, split, field, revision, data_files, weight, columns}; a list of these, concatenated; or rows in memory:
        a list of mappings, a `datasets.Dataset`, a data frame, any object with `__len__` and `__getitem__`.
    base: directory that relative paths start from; the current one by default.
    columns: as in `rename_columns`, for all data without `columns` of their own.

    `field` names the list of rows in a file that is one object, {"data": [...]}. `split` is a name, or part of the rows
    as in "train[:90%]". `weight` w repeats every row w times; its fractional part adds evenly spaced rows.

    Raises InputError for data that is missing or cannot be read.
    """
    if isinstance(spec, Records):
        return spec if columns is None else Records([with_columns(table, columns) for table in spec.tables])
    if isinstance(spec, list | tuple):
        if not spec:
            raise InputError("the data is an empty list: give rows, or names of files")
        if not all(map(_is_row, spec)):
            loaded = [load(item, registry=registry, base=base, columns=columns) for item in spec]
            return Records([table for records in loaded for table in records.tables])
        return Records([with_columns(from_memory(spec), columns)])
    if isinstance(spec, str | Path):
        return Records([with_columns(_from_name(str(spec), {}, registry, base), columns)])
    if isinstance(spec, Mapping):
        return Records([_from_table(spec, registry, base, columns)])
    return Records([with_columns(from_memory(spec), columns)])


def drop_columns(records: Records, names: Sequence[str]) -> Records:
    """Leave out columns by name; those that a table lacks are no error."""

    def without(table: Table) -> Table:
        kinds = {name: kind for name, kind in table.kinds.items() if name not in names}
        how = "\0".join(["drop", *sorted(names)])
        return table.changed(lambda row: {k: v for k, v in row.items() if k not in names}, how, kinds)

    return Records([without(table) for table in records.tables])


def with_columns(table: Table, columns: Mapping[str, Any] | None) -> Table:
    """Rename the columns of a table and convert its conversations. Raises InputError for a row with images."""
    require_text(table)
    return normalise_conversations(table if not columns else rename_columns(table, columns))


def named_sets(data: Any) -> Mapping[str, Any]:
    """Return {name: data} of a table that names several sets, { easy = "easy.jsonl", hard = … }; {} of other data.

    A set may have any name, `path` too, where one of them is rows in memory.
    """
    if holds_rows(data):
        return data if not wrong_set_names(data) else {}
    if not isinstance(data, Mapping) or {"name", "path"} & set(data) or _is_columns(data):
        return {}
    return data if all(isinstance(name, str) and name for name in data) else {}


def holds_rows(data: Any) -> bool:
    """Whether a table has rows in memory as one of its values: a list of rows, a data set, a function that yields."""
    if not isinstance(data, Mapping):
        return False

    def is_rows(value: Any) -> bool:
        if isinstance(value, str | bytes | Path | Mapping | bool | int | float | None):
            return False
        if isinstance(value, list | tuple):
            messages = {"role", "content"}  # of one row
            return bool(value) and all(isinstance(row, Mapping) and not messages <= set(row) for row in value)
        return isinstance(value, Records) or hasattr(value, "column_names") or is_stream(value)

    return any(map(is_rows, data.values()))


def wrong_set_names(data: Any) -> list[Any]:
    """List the names of sets of rows in memory that cannot begin the name of a metric."""

    def is_right(name: Any) -> bool:
        return isinstance(name, str) and bool(name) and name.isprintable() and name.strip() == name

    return [name for name in data if not is_right(name)] if holds_rows(data) else []


def require_rows(data: Any, prefix: str = "", *, streams: bool = False) -> None:
    """Raise InputError for an object in memory that holds splits, or whose rows have no end.

    To be called before any row is read, since the rows of an object without end would be read for ever. prefix: of the
    message. streams: whether a dataset of grain may repeat without end.
    """
    if isinstance(data, list | tuple):
        for each in data:
            require_rows(each, prefix, streams=streams)
    elif isinstance(data, Mapping):
        if data and all(hasattr(value, "column_names") for value in data.values()):
            splits = ", ".join(map(str, data))
            raise InputError(f"{prefix}the data has several splits ({splits}): give one of them")
    elif streams and is_endless(data):
        return
    elif hasattr(data, "__len__") and hasattr(data, "__getitem__") and len(data) >= ENDLESS:
        raise InputError(
            f"{prefix}{type(data).__name__} of {len(data):,} rows repeats without end: give it without .repeat(None); "
            "num_train_epochs or max_training_steps say how often rows are trained on"
        )


def _is_columns(data: Mapping[str, Any]) -> bool:
    return any(name in DATA_COLUMNS or str(name).startswith(PREFIXES) for name in data)


def is_stream(data: Any) -> bool:
    """Whether data, or one of a list, are read in order: a function, rows of no known length, rows that repeat without
    end, or a table with `streaming`.
    """
    if isinstance(data, list | tuple):
        return not all(map(_is_row, data)) and any(map(is_stream, data))
    if isinstance(data, Mapping):
        return data.get("streaming") is True and bool({"name", "path"} & set(data))
    iterated = hasattr(data, "__iter__") and not hasattr(data, "__len__")
    is_function = inspect.isfunction(data) or inspect.ismethod(data)
    return is_function or is_endless(data) or (iterated and not isinstance(data, type))


def is_endless(data: Any) -> bool:
    """Whether data are a `grain.MapDataset` that repeats without end."""
    return _is_grain(data) and len(data) >= ENDLESS


def _is_row(item: Any) -> bool:
    if not isinstance(item, Mapping):
        return False
    return _is_columns(item) or not ({"name", "path"} & set(item))


def _from_table(
    spec: Mapping[str, Any], registry: Registry | None, base: Path | None, columns: Mapping[str, Any] | None
) -> Table:
    options = dict(spec)
    columns = options.pop("columns", columns)
    require_rows(options)
    name = options.pop("name", None)
    weight = options.pop("weight", 1.0)
    path = options.pop("path", None)
    if name is None and path is None:
        raise _nameless(spec)
    require_weight(weight, name or path)
    if registry is not None and name not in FORMATS and name in registry.names(DATASET):
        arguments = options if path is None else {**options, "path": path}
        table = from_memory(registry.get(DATASET, name, **arguments), name)
    else:
        table = _from_parts(name, path, options, registry, base)
    return _weighted(with_columns(table, columns), weight)


def require_weight(weight: Any, name: Any) -> None:
    """Raise InputError for a weight that is no positive number."""
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < float("inf"):
        raise InputError(f"weight of {name} is {weight!r}: give a number above 0")


def _nameless(spec: Mapping[str, Any]) -> InputError:
    """Say that a data table has neither a name nor a path, and where its rows are if it is an object around them."""
    held = [key for key, value in spec.items() if isinstance(value, list) and all(map(_is_row, value))]
    if held:
        return InputError(f"the rows are in '{held[0]}' of an object: give that list, data['{held[0]}']")
    return InputError(
        f"a data table needs a name or a path; it has {', '.join(map(str, spec)) or 'nothing'}: "
        '{ name = "jsonl", path = "pairs.jsonl" }'
    )


def _from_parts(
    name: Any, path: Any, options: Mapping[str, Any], registry: Registry | None, base: Path | None
) -> Table:
    """Read the file at `path`, or what `name` stands for; with a path, the name is the file's format."""
    known = (*HUB_OPTIONS, *FILE_OPTIONS)
    unknown = [key for key in options if key not in known]
    if unknown:
        shown = ["name", "path", "weight", "columns", "field", *HUB_OPTIONS]
        raise InputError(
            *(f"data table {name or path}: no option '{k}'.{suggest(k, shown)}" for k in unknown)
        )
    if path is None:
        if name in FORMATS:
            raise InputError(
                f'{{ name = "{name}" }} needs a path: {{ name = "{name}", path = "pairs.{name}" }}'
            )
        return _from_name(str(name), options, registry, base)
    if name is not None and name not in FORMATS:
        raise InputError(f"'{name}' is not a file format ({', '.join(FORMATS)}).{suggest(name, FORMATS)}")
    return _from_file(resolve(str(path), base), str(path), name, options)


def _weighted(table: Table, weight: float) -> Table:
    """Repeat every row `weight` times; the fractional part adds evenly spaced rows, and no table becomes empty."""
    if weight == 1:
        return table
    n = len(table.rows)
    whole = int(weight)
    extra = max(round((weight - whole) * n), 0 if whole else 1)
    return table.take([*range(n)] * whole + [i * n // extra for i in range(extra)], f"weight {weight}")


def resolve(name: str, base: Path | None = None) -> Path:
    """Return the path of a file, relative to `base`; one on the hub is downloaded."""
    return hub.fetch(name) if hub.is_hub_name(name) else (base or Path()) / Path(name).expanduser()


def _from_name(name: str, options: Mapping[str, Any], registry: Registry | None, base: Path | None) -> Table:
    if hub.is_hub_name(name) and hub.parse(name).file is None:
        return from_memory(hub_dataset(name, options), name)
    path = resolve(name, base)
    if path.exists():
        return _from_file(path, name, None, options)
    if registry is not None and name in registry.names(DATASET):
        return from_memory(registry.get(DATASET, name), name)
    has_format = format_of(path) is not None
    if has_format or name.startswith((".", "/", "~")) or name.count("/") > 1 or not name.strip():
        raise InputError(missing_file(path, name))
    return from_memory(hub_dataset(name, options, path, registry), name)


def missing_file(path: Path, name: str) -> str:
    """Say that a file does not exist, and which has a similar name."""
    if not path.parent.is_dir():
        parent = path.parent.parent
        hint = suggest(path.parent.name, [p.name for p in parent.iterdir()]) if parent.is_dir() else ""
        return f"no file {name}: its directory does not exist.{hint}"
    return f"no file {name}.{suggest(path.name, [p.name for p in path.parent.iterdir()])}"


def _from_file(path: Path, name: str, kind: str | None, options: Mapping[str, Any]) -> Table:
    split = options.get("split")
    hub = [key for key in options if key not in FILE_OPTIONS]
    if hub:
        raise InputError(f"{name} is a file: {', '.join(hub)} is for datasets of the hub; leave it out")
    if not path.exists():
        raise InputError(missing_file(path, name))
    if path.is_dir():
        if "field" in options:
            raise InputError(f"{name} is a directory: field is for files; leave it out")
        return _from_directory(path, name, split)
    kind = kind or format_of(path)
    if kind is None:
        raise InputError(
            f"{name}: '{path.suffix}' is not a supported format ({', '.join(FORMATS)}); rename it, or in a "
            f'pipeline write which it is: {{ name = "jsonl", path = "{name}" }}'
        )
    table = read_file(path, name, kind)
    field = options.get("field")
    if field is not None:
        table = _rows_in_field(table, field)
    return table if split is None else _part(table, split)


def _rows_in_field(table: Table, field: Any) -> Table:
    """Take the list of rows that a file's only object has in a field."""
    rows = table.rows[0].get(field) if len(table.rows) == 1 else None
    if not isinstance(rows, list) or not rows or not all(isinstance(row, Mapping) for row in rows):
        raise InputError(
            f"field '{field}' of {table.name}: the file is not one object with a list of rows in it."
            f"{suggest(str(field), set(table.columns) - {field})}"
        )
    return Table(table.name, rows, range(1, len(rows) + 1), digest(table.fingerprint, "field", field))


def _part(table: Table, split: str) -> Table:
    """Take the part of a file that `datasets` calls "train", "train[:100]" or "[10%:]"."""
    match = re.fullmatch(r"(?:train)?(?:\[(-?\d+%?)?:(-?\d+%?)?\])?", split)
    if match is None:
        raise InputError(
            f"split '{split}' of {table.name}: a file has only train; parts are written train[:90%]"
        )
    n = len(table.rows)
    start, stop = (_row_index(end, n) for end in match.groups())
    chosen = range(n)[start:stop]
    if not chosen:
        raise InputError(f"split '{split}' of {table.name} has no rows: the file has {n:,}")
    return table.take(chosen, f"split {split}")


def _row_index(end: str | None, rows: int) -> int | None:
    """Read one end of a part: a row's index, or "10%" of the rows."""
    if end is None:
        return None
    if end.endswith("%"):
        return round(rows * int(end[:-1]) / 100)
    return int(end)


def _from_directory(path: Path, name: str, split: str | None) -> Table:
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


def hub_dataset(
    name: str,
    options: Mapping[str, Any],
    path: Path = Path(),
    registry: Registry | None = None,
    streaming: bool = False,
) -> Any:
    """Load a dataset from the Hugging Face hub, or from its cache if HF_HUB_OFFLINE is set.

    path, registry: where a similar name is looked for, of a file or of a registered dataset.
    """
    import datasets
    from huggingface_hub import dataset_info

    if "field" in options:
        raise InputError(f"{name} is not a file: field is for files; leave it out")
    if hub.is_hub_name(name):
        of_hub = hub.parse(name)
        if of_hub.type != "dataset":
            raise InputError(f"{name} is a model; a dataset is named hf://datasets/{of_hub.repository}")
        if "revision" in options:
            raise InputError(
                f"{name}: its revision is a part of the name, {name}@REVISION; leave revision out"
            )
        name, options = of_hub.repository, {**options, "revision": of_hub.revision}
    siblings = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
    registered = [] if registry is None else registry.names(DATASET)
    hint = suggest(path.name, siblings) or suggest(name, registered)
    arguments: dict[str, Any] = {"split": options.get("split") or "train"}
    for key in ("revision", "data_files"):
        if options.get(key) is not None:
            arguments[key] = options[key]
    if streaming:
        arguments["streaming"] = True
    switches = [os.environ.get(switch, "0") for switch in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")]
    offline = any(value not in ("", "0") for value in switches)
    try:
        if not offline:  # one request; loading would keep retrying
            dataset_info(name, revision=options.get("revision"), timeout=10)
        return datasets.load_dataset(name, options.get("subset"), **arguments)
    except Exception as error:  # the network, the hub and the dataset's files fail in many ways
        lines = str(error).strip().splitlines()
        reason = lines[0] if lines else type(error).__name__
        raise InputError(
            f"no data '{name}': no such file here, and the hub does not give such a dataset ({reason}). "
            f"Without network access, download it elsewhere and give its files.{hint}"
        ) from error


def from_memory(data: Any, name: str = "dataset") -> Table:
    """Read rows from a list, a `datasets.Dataset`, a data frame, or an object with `__len__` and `__getitem__`.

    Rows that a filter of grain left out are passed over; the others keep their numbers.
    """
    if isinstance(data, Records) and len(data.tables) == 1:
        return data.tables[0]  # a registered dataset that reads a file keeps the file's name and row numbers
    require_rows(data)
    if _is_grain(data):
        grained = _GrainRows(data)
        chunks: Iterable[Sequence[tuple[int, Any]]] = grained.chunks()
    else:
        given = _rows_of(data, name)
        chunks = (list(enumerate(chunk, start + 1)) for start, chunk in Table.chunks(given))
    content = hashlib.sha256()
    kinds = Kinds()
    problems = Problems()
    for chunk in chunks:
        for number, row in chunk:
            if not isinstance(row, Mapping):
                raise InputError(f"{name} row {number} is {type(row).__name__}, not a mapping of columns")
            try:
                text = json_text(row)  # unsorted, because templates write the keys of tools in their order
                if HALVES.search(text):
                    require_unicode(row)
            except NotARow as error:
                problems.add(f"{name} row {number}{error}")
                continue
            except (RecursionError, ValueError, TypeError) as error:
                problems.add(f"{name} row {number} cannot be read: {library_words(error)}")
                continue
            content.update(text.encode())
            count_values(kinds, row)
    rows, numbers = (grained.rows, grained.numbers) if _is_grain(data) else (given, range(1, len(given) + 1))
    if not len(rows):
        raise InputError(f"{name} has no rows")
    problems.raise_if_any()
    return Table(name, rows, numbers, content.hexdigest(), kinds)


class _GrainRows:
    """The rows of a `grain.MapDataset` but those that a filter left out, which are None."""

    def __init__(self, data: Any) -> None:
        self._data = data
        self.numbers: list[int] = []
        self._kept: list[Any] = []

    def chunks(self) -> Iterator[list[tuple[int, Any]]]:
        """Read all rows once, each with its number; those of small data are kept."""
        for _, which in Table.chunks(range(len(self._data))):
            read = [(i + 1, self._data[i]) for i in which]
            chunk = [(number, row) for number, row in read if row is not None]
            self.numbers += [number for number, _ in chunk]
            if len(self.numbers) <= KEPT:
                self._kept += [row for _, row in chunk]
            yield chunk

    @property
    def rows(self) -> Sequence[Any]:
        """The rows; those of large data are read on access."""
        if len(self.numbers) <= KEPT:
            return self._kept
        self._kept = []
        return View(len(self.numbers), lambda which: [self._data[self.numbers[i] - 1] for i in which])


def _is_grain(data: Any) -> bool:
    """Whether data are a `grain.MapDataset`; grain takes a second to import, and whoever made one has done so."""
    grain = sys.modules.get("grain")
    return grain is not None and isinstance(data, grain.MapDataset)


def _rows_of(data: Any, name: str) -> Sequence[Any]:
    if isinstance(data, list | tuple):
        return data
    if hasattr(data, "column_names") and hasattr(data, "with_format"):
        return table_rows(data.with_format("arrow"))
    if hasattr(data, "column_names") and hasattr(data, "to_pylist"):
        return table_rows(data)
    if hasattr(data, "iloc") and hasattr(data, "to_dict"):  # pandas
        return [
            {column: None if _is_missing(value) else value for column, value in row.items()}
            for row in data.to_dict("records")
        ]
    if hasattr(data, "to_dicts"):  # polars
        rows: list[Any] = data.to_dicts()
        return rows
    if hasattr(data, "__len__") and hasattr(data, "__getitem__"):
        return [data[i] for i in range(len(data))]
    raise InputError(
        f"{name} is {type(data).__name__}: data in memory needs __len__ and __getitem__; try list(...)"
    )


def _is_missing(value: Any) -> bool:
    """Whether a value is NaN, NaT or NA, which pandas uses for an empty cell."""
    return type(value).__name__ in ("NAType", "NaTType") or (isinstance(value, float) and value != value)
