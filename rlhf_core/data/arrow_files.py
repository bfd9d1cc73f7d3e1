"""Parquet and Arrow files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

from rlhf_core.data.column_kinds import Kinds, note
from rlhf_core.data.lazy_rows import Content, TableRows, spool
from rlhf_core.data.text_files import Found
from rlhf_core.errors import InputError


def parquet(content: Content) -> Found:
    import pyarrow.parquet as pq

    return _table(content, "parquet", lambda file: pq.ParquetFile(file).iter_batches(4096))


def arrow(content: Content) -> Found:
    import pyarrow as pa

    def batches(file: Any) -> Iterator[Any]:
        opener = pa.ipc.open_file if content.read(0, 6) == b"ARROW1" else pa.ipc.open_stream
        reader = opener(file)
        if isinstance(reader, pa.ipc.RecordBatchFileReader):
            return map(reader.get_batch, range(reader.num_record_batches))
        return iter(reader)

    return _table(content, "arrow", batches)


def _table(content: Content, what: str, batches: Callable[[Any], Iterator[Any]]) -> Found:
    """Rows of an Arrow table: of a large one on the disk, in a file of our own that nobody changes."""
    import pyarrow as pa

    try:
        source = pa.BufferReader(content.read(0, content.size)) if content.held else content.stream()
        found = batches(source)
        first = next(found, None)
        if first is None:
            return [], [], {}
        if content.held:
            table, owner = pa.Table.from_batches([first, *found]), None
        else:

            def write(file: BinaryIO) -> None:
                with pa.ipc.new_file(file, first.schema) as writer:
                    for batch in (first, *found):
                        writer.write_batch(batch)

            owner = spool(write)
            table = pa.ipc.open_file(pa.memory_map(f"/dev/fd/{owner.fileno()}")).read_all()
        table.validate(full=True)
        rows = TableRows(table, owner)
        kinds: Kinds = {}
        for start in range(0, len(rows), 4096):
            for row in rows[start : start + 4096]:
                note(kinds, row)
    except (pa.ArrowException, OSError, ValueError, TypeError, KeyError, NotImplementedError) as error:
        raise InputError(f"{content.name} is not a readable {what} file: {error}") from error
    return rows, range(1, len(rows) + 1), kinds
