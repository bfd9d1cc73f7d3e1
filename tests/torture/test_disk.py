"""What a simulated disk leaves after a power cut."""

import random
from pathlib import Path

from tests.torture.disk import Disk, Image, Operation
from tests.torture.file_calls import MARK, read
from tests.torture.translator import Translator

WRITTEN = [
    Operation("create 0 new", ((0, "new", 1),)),
    Operation("write 0 new", file=1, data=b"content"),
]
FLUSHED = Operation("fsync 0 new", sync=1)
RENAMED = Operation("rename 0 final", ((0, "new", None), (0, "final", 1)))
NAMED = Operation("fsync 1 .", sync=0)


def left(*operations: Operation) -> list[dict[str, object]]:
    """List the different trees that a power cut after these operations may leave, without torn writes."""
    disk = Disk()
    for operation in operations:
        disk.apply(operation)
    trees = []
    for crash in disk.strict(random.Random(0), 64):
        if crash.image.tree() not in trees:
            trees.append(crash.image.tree())
    return trees


def test_nothing_is_durable_unless_it_was_flushed() -> None:
    assert {} in left(*WRITTEN)
    assert {"new": b""} in left(*WRITTEN)
    assert {"new": b"content"} in left(*WRITTEN)


def test_a_flushed_file_may_lack_its_name_but_no_data() -> None:
    assert left(*WRITTEN, FLUSHED) == [{"new": b"content"}, {}]


def test_a_rename_that_was_not_flushed_leaves_either_name() -> None:
    trees = left(*WRITTEN, FLUSHED, NAMED, RENAMED)
    assert trees == [{"final": b"content"}, {"new": b"content"}]


def test_a_rename_before_the_flush_may_leave_an_empty_file() -> None:
    assert {"final": b""} in left(*WRITTEN, RENAMED)
    assert left(*WRITTEN, FLUSHED, RENAMED, NAMED) == [{"final": b"content"}]


def test_a_journal_keeps_the_order_of_names() -> None:
    disk = Disk()
    for operation in (*WRITTEN, RENAMED):
        disk.apply(operation)
    stream = random.Random(0)
    trees = [crash.image.tree() for crash in disk.ordered(stream, 200)]
    assert {frozenset(tree) for tree in trees} == {frozenset(), frozenset({"new"}), frozenset({"final"})}
    contents = {tree["final"] for tree in trees if "final" in tree}
    assert {b"", b"content", bytes(7)} <= contents


def hexadecimal(text: str) -> str:
    return "".join(f"\\x{byte:02x}" for byte in text.encode())


def test_a_file_whose_content_a_power_cut_took_is_written_again(tmp_path: Path) -> None:
    disk = Disk()
    disk.apply(WRITTEN[0])
    trace, file = tmp_path / "trace", hexadecimal("/d/new")
    trace.write_text(
        f'7  openat(AT_FDCWD<{hexadecimal("/d")}>, "{hexadecimal("new")}", O_WRONLY|O_CREAT, 0666) = 3<{file}>\n'
        f'7  write(3<{file}>, "{hexadecimal("on")}", 2) = 2\n'
    )
    translator = Translator("/d", disk.live, 1)
    assert [operation.call for operation in translator.translate(read(trace))] == ["write 0 new"]
    assert translator.live.tree() == {"new": b"on"}


def test_calls_become_changes(tmp_path: Path) -> None:
    here, file = hexadecimal("/d"), hexadecimal("/d/a")
    trace = tmp_path / "trace"
    trace.write_text(
        f'7  openat(AT_FDCWD<{here}>, "{hexadecimal("a")}", O_WRONLY|O_CREAT|O_CLOEXEC, 0666) = 3<{file}>\n'
        f'8  write(3<{file}>, "{hexadecimal("on")}", 2 <unfinished ...>\n'
        f'7  rename("{hexadecimal("nothing")}", "{hexadecimal("b")}") = -1 ENOENT (No such file or directory)\n'
        "8  <... write resumed>)             = 2\n"
        f"7  lseek(3<{file}>, 1, SEEK_SET) = 1\n"
        f'7  writev(3<{file}>, [{{iov_base="{hexadecimal("f")}", iov_len=1}}, '
        f'{{iov_base="{hexadecimal("f, ")}", iov_len=3}}], 2) = 4\n'
        f'7  access("{hexadecimal(MARK + "file a")}", F_OK) = -1 ENOENT (No such file or directory)\n'
        f'7  rename("{file}", "{hexadecimal("b")}") = 0\n'
        "7  +++ exited with 0 +++\n"
    )
    translator = Translator("/d", Image(), 0)
    operations = list(translator.translate(read(trace)))
    assert [operation.call for operation in operations] == [
        *("create 0 a", "write 0 a", "write 1 a", "mark 0 file a", "rename 0 b"),
    ]
    assert translator.live.tree() == {"b": b"off, "}
