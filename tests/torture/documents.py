"""Make documents that are almost valid: an example, a few changes to its structure, a few to its bytes.

A document follows from its name alone. Each of its changes draws from a stream of its own, so that a failing document
can be reduced by leaving changes out.
"""

from __future__ import annotations

import copy
import json
import math
import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any


class Table(list[list[Any]]):
    """An object or table as a list of [key, value], which can hold a key twice."""


class Raw(str):
    """Text that is written as it is, where a value is expected."""


def table(value: Any) -> Any:
    """Convert dicts, at any depth, to `Table`."""
    if isinstance(value, dict):
        return Table([key, table(each)] for key, each in value.items())
    return [table(each) for each in value] if isinstance(value, list) else value


@dataclass(frozen=True)
class Form:
    """One kind of file. examples: trees of `Table`, list and scalars; write: makes a file of such a tree.

    structural: the part of the changes that change the tree and not the bytes. depth: of values that are changed.
    """

    examples: Sequence[Any]
    write: Callable[[Any], bytes]
    structural: float = 0.8
    depth: int = 1 << 30


@dataclass(frozen=True)
class Document:
    """A file's content, and the number and description of each change that made it from an example."""

    content: bytes
    changes: dict[int, str]


def make(form: Form, name: str, kept: Collection[int] | None = None) -> Document:
    """Make the document of this name. kept: the changes to make; all of them by default."""
    draw = random.Random(name)
    tree = copy.deepcopy(draw.choice(form.examples))
    numbers = range(draw.choice((1, 1, 1, 2, 2, 3, 5)))
    streams = {i: random.Random(f"{name} {i}") for i in numbers if kept is None or i in kept}
    of_bytes = {i for i, stream in streams.items() if stream.random() >= form.structural}
    changes: dict[int, str] = {}
    for i in streams.keys() - of_bytes:
        tree, changes[i] = change_tree(tree, streams[i], form.depth)
    content = form.write(tree)
    for i in sorted(of_bytes):
        content, changes[i] = change_bytes(content, streams[i])
    return Document(content, changes)


LONE = "\ud800"
TEXTS = (
    *(
        "",
        " ",
        "a",
        "\0",
        "a\0b",
        "\ufeff",
        LONE,
        f"x{LONE}",
        "\u202e\u0645",
        "e\u0301",
        "\U0001f600",
        "ﬀ",
        "İ",
    ),
    *("\r\n", "\u2028", "\x1b[2J", "x" * 5000, "é" * 300, "a/b", "../..", "/", "~", "~nobody/x", "/dev/null"),
    *(
        "null",
        "true",
        "1",
        "-1",
        "NaN",
        "(",
        "[",
        "{{",
        "{% for %}",
        "%s",
        "\\",
        '"',
        "'",
        "a.b",
        "file.py:f",
    ),
    *("auto", "none", "default", "__class__", "name", "F64", "float32", "float8_e4m3fn"),
)
NUMBERS: tuple[Any, ...] = (
    *(0, 1, -1, 2, 3, 7, 255, 2**15, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64, -(2**63)),
    *(10**30, 0.5, -0.0, 1e-320, 1e300, -1e308, 1.0, 2.5),
)
WRITTEN = (
    "NaN",
    "Infinity",
    "-Infinity",
    "nan",
    "inf",
    "1e999",
    "-1e999",
    "1" * 400,
    "9" * 5000,
    "0x10",
    "01",
)
DEPTHS = (3, 50, 900, 3000, 100_000)


def odd_value(draw: random.Random) -> Any:
    """Draw a scalar, text or small structure that few readers expect."""
    kind = draw.randrange(10)
    if kind < 3:
        return draw.choice(TEXTS)
    if kind < 6:
        return draw.choice(NUMBERS)
    if kind == 6:
        return Raw(draw.choice(WRITTEN))
    if kind == 7:
        return draw.choice((None, True, False))
    return copy.deepcopy(
        draw.choice(([], Table(), [1], [None], [[]], ["a", 1], Table([["a", 1]]), Table([["", None]])))
    )


def places(tree: Any, depth: int) -> list[tuple[Any, Any, str]]:
    """List (container, index, path) of the values below the root, the index of a `Table` being a row's."""
    listed: list[tuple[Any, Any, str]] = []
    waiting: list[tuple[Any, str, int]] = [(tree, "", 0)]
    while waiting:
        node, path, level = waiting.pop()
        if isinstance(node, list) and level < depth:
            for i, each in enumerate(node):
                below = f"{path}.{each[0]}" if isinstance(node, Table) else f"{path}[{i}]"
                listed.append((node, i, below))
                waiting.append((each[1] if isinstance(node, Table) else each, below, level + 1))
    return listed


def _value(container: Any, i: int) -> Any:
    return container[i][1] if isinstance(container, Table) else container[i]


def _put(container: Any, i: int, value: Any) -> None:
    if isinstance(container, Table):
        container[i] = [container[i][0], value]
    else:
        container[i] = value


def change_tree(tree: Any, draw: random.Random, depth: int) -> tuple[Any, str]:
    """Change one value of a tree in place, or its root; return the tree, and what was changed."""
    listed = places(tree, depth)
    if not listed or draw.random() < 0.01:
        value = odd_value(draw)
        return value, f"all of it replaced by {shown(value)}"
    container, i, path = draw.choice(listed)
    before, kind = _value(container, i), draw.randrange(12)
    if kind < 4:
        value = odd_value(draw)
    elif kind == 4:
        del container[i]
        return tree, f"{path} removed"
    elif kind == 5:
        container.insert(draw.randint(0, len(container)), copy.deepcopy(container[i]))
        return tree, f"{path} doubled"
    elif kind == 6 and isinstance(container, Table):
        key = draw.choice((*TEXTS, *(path.rpartition(".")[2] for _, _, path in listed)))
        container[i] = [key, before]
        return tree, f"{path} renamed to {shown(key)}"
    elif kind == 7:
        other = draw.choice(listed)
        value = copy.deepcopy(_value(other[0], other[1]))
    elif kind == 8:
        value, opening = before, draw.choice(("[", "{"))
        depth = draw.choice(DEPTHS)
        if depth > 50:
            nested = "[" * depth + "]" * depth if opening == "[" else '{"a":' * depth + "1" + "}" * depth
            value = Raw(nested)
        else:
            for _ in range(depth):
                value = [value] if opening == "[" else Table([["a", value]])
    elif kind == 9:
        value = neighbour(before, draw)
    elif kind == 10 and isinstance(before, list) and before:
        value = type(before)(before * draw.choice((2, 50)))
    else:
        value = other_type(before, draw)
    _put(container, i, value)
    return tree, f"{path} = {shown(value)}"


def neighbour(value: Any, draw: random.Random) -> Any:
    """Return a value of the same type nearby."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return draw.choice((value + 1, value - 1, -value, value * 2, value * 1000, value / 3))
    if isinstance(value, Raw) or not isinstance(value, str):
        return odd_value(draw)
    at = draw.randint(0, len(value))
    return draw.choice(
        (value[:at] + draw.choice(TEXTS) + value[at:], value[:at], value.upper(), f"{value} ", value[::-1])
    )


def other_type(value: Any, draw: random.Random) -> Any:
    """Return the same value as another type."""
    if isinstance(value, list):
        return draw.choice((str(value)[:200], len(value), Table([["a", value]]), [value], None))
    if isinstance(value, int | float) and not math.isinf(value):
        return draw.choice(
            (str(value), float(value) if abs(value) < 1e300 else 0.5, [value], bool(value), None)
        )
    return draw.choice(([value], Table([["name", value]]), 1, None, True))


PIECES = (
    *(
        b"",
        b"\0",
        b"\xff",
        b"\xef\xbb\xbf",
        b'"',
        b"'",
        b",",
        b":",
        b"=",
        b"\n",
        b"\r",
        b"{",
        b"}",
        b"[",
        b"]",
        b"#",
    ),
    *(
        b"\\ud800",
        b"\\u0000",
        b"\\",
        b"1" * 5000,
        b"null",
        b"NaN",
        b"1e999",
        b"-",
        b"\xed\xa0\x80",
        b"\xc3",
        b"\t",
    ),
    *(b"a." * 50_000 + b"a = 1\n", b"[" + b"a." * 500 + b"a]\n", b"a" * 100_000 + b" = 1\n"),
    *(b"[" * 3000, b" " * 100_000, b"\xf0\x9f\x98\x80", b"\x00\x00\x00\x7f", b"\xe2\x80\xa8"),
)


def change_bytes(content: bytes, draw: random.Random) -> tuple[bytes, str]:
    """Change bytes in one place, or everywhere; return the content, and what was changed."""
    at, end = sorted(draw.randint(0, len(content)) for _ in range(2))
    end = min(end, at + 40)
    piece = draw.choice(PIECES)
    match draw.randrange(9):
        case 0:
            return content[:at] + piece + content[at:], f"{shown(piece)} inserted at {at}"
        case 1:
            return content[:at] + piece + content[end:], f"bytes {at}-{end} replaced by {shown(piece)}"
        case 2:
            return content[:at] + content[at:end] * 2 + content[end:], f"bytes {at}-{end} doubled"
        case 3:
            return content[:at], f"cut after {at} bytes"
        case 4:
            flipped = bytes([content[at] ^ 1 << draw.randrange(8)]) if at < len(content) else b"\x80"
            return content[:at] + flipped + content[at + 1 :], f"a bit of byte {at} flipped"
        case 5:
            return content.replace(b"\n", b"\r\n"), "line ends CRLF"
        case 6:
            return b"\xef\xbb\xbf" + content, "a byte order mark in front"
        case 7:
            return content[:at] + content[end:], f"bytes {at}-{end} removed"
        case _:
            return content.decode(errors="replace").encode("utf-16"), "written as UTF-16"


def shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:40]}… ({len(text):,} characters)"


def write_json(tree: Any) -> bytes:
    """Write JSON; what JSON cannot hold, such as NaN, is written as Python's json reads it."""
    return json_text(tree).encode(errors="surrogatepass")


def json_text(tree: Any) -> str:
    if isinstance(tree, Raw):
        return tree
    if isinstance(tree, Table):
        return "{" + ", ".join(f"{json_key(key)}: {json_text(value)}" for key, value in tree) + "}"
    if isinstance(tree, list):
        return "[" + ", ".join(map(json_text, tree)) + "]"
    if isinstance(tree, str):
        return json.dumps(tree, ensure_ascii=len(tree) % 2 == 0)
    return json.dumps(tree)


def json_key(key: Any) -> str:
    return json_text(key if isinstance(key, str) else str(key))


def write_sealed(tree: Any) -> bytes:
    """Write JSON with a valid checksum, as another version of the suite might, or without where it has no place."""
    from rlhf_core.runtime.files import seal

    text = write_json(tree)
    if b"[" * 99 in text or b'{"a":' * 99 in text:  # no version writes that
        return text
    try:
        return seal(json.loads(text)).encode()
    except (ValueError, TypeError, RecursionError):
        return text


def write_json_lines(tree: Any) -> bytes:
    """Write each entry of a list in a line."""
    rows = tree if isinstance(tree, list) and not isinstance(tree, Table) else [tree]
    return b"".join(write_json(row) + b"\n" for row in rows)


def write_toml(tree: Any) -> bytes:
    """Write TOML: lists of tables at the top as [[name]], every other table inline."""
    lines: list[str] = []
    for key, value in tree if isinstance(tree, Table) else [["stage", tree]]:
        if isinstance(value, list) and value and all(isinstance(each, Table) for each in value):
            for each in value:
                lines += [f"[[{_toml_key(key)}]]", *(f"{_toml_key(k)} = {_toml(v)}" for k, v in each)]
        else:
            lines.append(f"{_toml_key(key)} = {_toml(value)}")
    return ("\n".join(lines) + "\n").encode(errors="surrogatepass")


def _toml_key(key: Any) -> str:
    text = str(key)
    return (
        text if text and all(c.isascii() and (c.isalnum() or c in "-_.") for c in text) else json.dumps(text)
    )


def _toml(value: Any) -> str:
    if isinstance(value, Raw):
        return value
    if isinstance(value, Table):
        return "{ " + ", ".join(f"{_toml_key(k)} = {_toml(v)}" for k, v in value) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return '""' if value is None else json.dumps(value)


def write_csv(tree: Any) -> bytes:
    """Write rows of cells; `Raw` cells are not quoted."""
    lines = []
    for row in tree if isinstance(tree, list) else [tree]:
        cells = row if isinstance(row, list) else [row]
        lines.append(",".join(_cell(cell) for cell in cells))
    return ("\n".join(lines) + "\n").encode(errors="surrogatepass")


def _cell(value: Any) -> str:
    text = "" if value is None else value if isinstance(value, str) else json_text(value)
    quoted = not isinstance(value, Raw) and any(c in text for c in ',"\r\n')
    return '"' + text.replace('"', '""') + '"' if quoted else text


def write_safetensors(tree: Any) -> bytes:
    """Write a file of {header, length: added to the header's, bytes: of tensors}."""
    fields = {str(key): value for key, value in tree} if isinstance(tree, Table) else {}

    def number(name: str, default: int) -> int:
        value = fields.get(name)
        return value if isinstance(value, int) and not isinstance(value, bool) else default

    text = write_json(fields.get("header"))
    length = (len(text) + number("length", 0)) % 2**64
    body = random.Random(len(text)).randbytes(min(max(number("bytes", 0), 0), 1 << 20))
    return length.to_bytes(8, "little") + text + body


def write_parquet(tree: Any) -> bytes:
    """Write a file of {columns: {name: {type, values}}, compression, rows: of a group}; a misfit becomes text."""
    import io

    import pyarrow as pa
    import pyarrow.parquet as pq

    fields = {str(key): value for key, value in tree} if isinstance(tree, Table) else {}
    columns = fields.get("columns")
    names: list[str] = []
    arrays: list[Any] = []
    for name, column in columns if isinstance(columns, Table) else ():
        about = {str(key): value for key, value in column} if isinstance(column, Table) else {}
        values = about.get("values")
        values = [_plain(each) for each in values] if isinstance(values, list) else [_plain(values)]
        try:
            array = pa.array(values, parquet_types()[int(about.get("type", 0)) % len(parquet_types())])
        except (pa.ArrowException, ValueError, TypeError, OverflowError):
            array = pa.array([str(each).encode(errors="replace").decode() for each in values])
        names.append(str(name).encode(errors="replace").decode())
        arrays.append(array)
    longest = max(map(len, arrays), default=0)
    arrays = [pa.concat_arrays([array, pa.nulls(longest - len(array), array.type)]) for array in arrays]
    out = io.BytesIO()
    compression = fields.get("compression")
    known = ("none", "snappy", "gzip", "zstd", "brotli", "lz4")
    rows = fields.get("rows")
    try:
        pq.write_table(
            pa.table(arrays, names=names),
            out,
            compression=compression if compression in known else "none",
            row_group_size=rows if isinstance(rows, int) and rows > 0 else None,
        )
    except (pa.ArrowException, ValueError, OverflowError, NotImplementedError) as error:
        return f"PAR1 {error}".encode()
    return out.getvalue()


def parquet_types() -> list[Any]:
    """List the column types of parquet documents; text comes first and often."""
    import pyarrow as pa

    text = pa.string()
    message = pa.struct([("role", text), ("content", text)])
    return [
        *(
            text,
            text,
            pa.large_string(),
            pa.string_view(),
            pa.dictionary(pa.int32(), text),
            pa.list_(message),
        ),
        *(
            pa.list_(text),
            pa.list_(pa.int64()),
            pa.map_(text, pa.int64()),
            pa.float64(),
            pa.float16(),
            pa.int8(),
        ),
        *(pa.uint64(), pa.bool_(), pa.null(), pa.binary(), pa.timestamp("ns"), pa.timestamp("s", "UTC")),
        *(pa.date32(), pa.time64("us"), pa.duration("s"), pa.decimal128(30, 5), pa.struct([]), message),
        *(pa.list_(pa.int32(), 2), pa.large_list(text)),
    ]


def _plain(value: Any) -> Any:
    """Convert a tree to Python values that pyarrow takes or refuses."""
    if isinstance(value, Table):
        return {str(key): _plain(each) for key, each in value}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return value.encode(errors="replace").decode() if isinstance(value, str) else value
