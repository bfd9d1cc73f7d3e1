"""Read Parquet and Arrow files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

from rlhf_core.data.column_kinds import Kinds, count_values
from rlhf_core.data.lazy_rows import Content, TableRows, spool
from rlhf_core.data.text_files import ParsedFile
from rlhf_core.errors import InputError


def read_parquet(content: Content) -> ParsedFile:
    import pyarrow.parquet as pq

    return _read_table(content, "parquet", lambda file: pq.ParquetFile(file).iter_batches(4096))


def read_arrow(content: Content) -> ParsedFile:
    import pyarrow as pa

    def batches(file: Any) -> Iterator[Any]:
        opener = pa.ipc.open_file if content.read(0, 6) == b"ARROW1" else pa.ipc.open_stream
        reader = opener(file)
        if isinstance(reader, pa.ipc.RecordBatchFileReader):
            return map(reader.get_batch, range(reader.num_record_batches))
        return iter(reader)

    return _read_table(content, "arrow", batches)


def _read_table(content: Content, what: str, batches: Callable[[Any], Iterator[Any]]) -> ParsedFile:
    """Read record batches as rows; those of a large file from an uncompressed private copy on disk."""
    import pyarrow as pa

    try:
        source = pa.BufferReader(content.read(0, content.size)) if content.in_memory else content.stream()
        remaining = batches(source)
        first = next(remaining, None)
        if first is None:
            return [], [], {}
        if content.in_memory:
            table, owner = pa.Table.from_batches([first, *remaining]), None
        else:

            def write(file: BinaryIO) -> None:
                with pa.ipc.new_file(file, first.schema) as writer:
                    for batch in (first, *remaining):
                        writer.write_batch(batch)

            owner = spool(write)
            table = pa.ipc.open_file(pa.memory_map(f"/dev/fd/{owner.fileno()}")).read_all()
        table.validate(full=True)
        rows = TableRows(table, owner)
        kinds: Kinds = {}
        for start in range(0, len(rows), 4096):
            for row in rows[start : start + 4096]:
                count_values(kinds, row)
    except (pa.ArrowException, OSError, ValueError, TypeError, KeyError, NotImplementedError) as error:
        raise InputError(f"{content.name} is not a readable {what} file: {error}") from error
    return rows, range(1, len(rows) + 1), kinds
