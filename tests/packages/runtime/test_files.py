"""Atomic files, special files, and messages when the disk fails."""

from __future__ import annotations

import errno
import json
import os
import stat
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlhf_core.errors import RunError
from rlhf_core.runtime import files


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_write_atomic_replaces_and_makes_parents(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b.json"
    files.write_atomic(path, "é")
    files.write_atomic(path, b"new")
    assert path.read_bytes() == b"new"
    assert [each.name for each in path.parent.iterdir()] == ["b.json"]


def test_a_file_keeps_its_mode_and_a_new_one_gets_the_umask(tmp_path: Path) -> None:
    private = tmp_path / "private.json"
    private.write_text("old")
    private.chmod(0o600)
    before = os.umask(0o027)
    try:
        files.write_atomic(private, "new")
        files.write_atomic(tmp_path / "new.json", "new")
    finally:
        os.umask(before)
    assert private.read_text() == "new"
    assert (mode(private), mode(tmp_path / "new.json")) == (0o600, 0o640)


def test_a_private_file_is_never_readable_under_another_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "secret"
    path.write_text("old")
    path.chmod(0o600)
    seen: list[int] = []
    plain = os.write

    def write(descriptor: int, data: bytes) -> int:
        seen.append(stat.S_IMODE(os.fstat(descriptor).st_mode))
        return plain(descriptor, data)

    monkeypatch.setattr(os, "write", write)
    files.write_atomic(path, "new")
    assert seen == [0o600]


def test_a_link_stays_and_its_target_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    target, link = tmp_path / "data" / "there.json", tmp_path / "link.json"
    link.symlink_to(Path("data") / "there.json")
    files.write_atomic(link, "made")  # it points to nothing yet
    inode = target.stat().st_ino
    files.write_atomic(link, "again")
    assert link.is_symlink()
    assert target.read_text() == "again"
    assert target.stat().st_ino != inode  # a reader that has it open still reads the whole old one
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["data", "link.json", "there.json"]


def test_devices_and_pipes_are_written_to(tmp_path: Path) -> None:
    null = os.stat("/dev/null")
    files.write_atomic("/dev/null", "gone")
    assert os.stat("/dev/null").st_ino == null.st_ino
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    pipe, got = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: got.append(pipe.read_bytes()))
    reader.start()
    files.write_atomic(pipe, b"x" * 200_000)
    reader.join(timeout=30)
    assert [len(each) for each in got] == [200_000]
    assert stat.S_ISFIFO(pipe.stat().st_mode)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full, which Linux has")
def test_a_full_device_is_one_message() -> None:
    with pytest.raises(RunError, match="full could not be written to /dev/full: no space left on the disk"):
        files.write_atomic("/dev/full", "x")


def test_two_at_once_do_not_share_a_temporary_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.json"
    inner = iter([True])
    plain = os.fsync

    def fsync(descriptor: int) -> None:
        if next(inner, False):
            files.write_atomic(path, "inner")  # as another process would, in the middle of this
        plain(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    files.write_atomic(path, "outer")
    assert path.read_text() == "outer"
    assert [each.name for each in tmp_path.iterdir()] == ["x.json"]


@pytest.mark.parametrize("failing", ["open", "write", "fsync", "replace"])
@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, r"no space left on the disk \([\d,.]+ MiB free\)"),
        (errno.EDQUOT, "disk quota exceeded"),
        (errno.EIO, "Input/output error"),
        (errno.EACCES, "Permission denied"),
        (errno.EROFS, "Read-only file system"),
    ],
)
def test_any_failure_is_one_message_and_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str, number: int, words: str
) -> None:
    path = tmp_path / "b.json"
    files.write_atomic(path, "old")

    def fails(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, failing, fails)
    with pytest.raises(
        RunError, match=rf"^b\.json could not be written to \S+: {words}\. Existing files are"
    ):
        files.write_atomic(path, "new")
    monkeypatch.undo()
    assert path.read_text() == "old"
    assert [each.name for each in tmp_path.iterdir()] == ["b.json"]


def test_leftovers_of_killed_processes_are_removed_and_nothing_else(tmp_path: Path) -> None:
    for name in (".a.json.0123abcd.tmp", ".a.json.tmp", ".120.tmp", "a.0123abcd.tmp", ".lock"):
        (tmp_path / name).write_text("")
    files.remove_leftovers(tmp_path)
    assert {each.name for each in tmp_path.iterdir()} == {
        ".a.json.tmp",
        ".120.tmp",
        "a.0123abcd.tmp",
        ".lock",
    }
    files.remove_leftovers(tmp_path / "missing")


def test_new_directories_are_on_the_disk_up_to_one_that_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[Path] = []
    monkeypatch.setattr(files, "flush", lambda path: flushed.append(Path(path)))
    files.make_directory(tmp_path / "a" / "b" / "c")
    assert flushed == [tmp_path, tmp_path / "a", tmp_path / "a" / "b"]
    files.make_directory(tmp_path / "a" / "b")
    assert len(flushed) == 3


def test_a_line_is_appended_whole_after_one_that_was_torn(tmp_path: Path) -> None:
    path = tmp_path / "new" / "rows.jsonl"
    files.append_line(path, "one", durable=True)
    with open(path, "a") as file:
        file.write("to")
    files.append_line(path, "three")
    assert path.read_text() == "one\nto\nthree\n"


def test_a_line_that_does_not_fit_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.jsonl"
    files.append_line(path, "one")
    plain, calls = os.write, iter([True])

    def write(descriptor: int, data: bytes) -> int:
        if next(calls, False):
            return plain(descriptor, data[:2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", write)
    with pytest.raises(RunError, match=r"rows\.jsonl could not be written to .*no space left on the disk"):
        files.append_line(path, "two and more")
    assert path.read_text() == "one\n"


def test_what_is_sealed_comes_back_and_nothing_else_is_taken() -> None:
    record = {"b": [1, 0.1, None], "a": "é\x1b", "n": {"x": True}}
    assert files.unseal(files.seal(record).encode()) == record
    assert list(files.unseal(files.seal(record).encode())) == ["b", "a", "n"]
    for content, reason in (
        (b"", "Expecting value"),
        (b"[]", "no JSON object"),
        (b"{}", "no checksum"),
        (b"[" * 100_000, "nested too deeply"),
        (files.seal(record).replace("1", "2").encode(), "checksum does not match"),
    ):
        with pytest.raises(ValueError, match=reason):
            files.unseal(content)


def test_a_lone_surrogate_is_written_as_json_writes_it(tmp_path: Path) -> None:
    row = {"text": "a\ud800é"}
    files.write_atomic(tmp_path / "row.json", json.dumps(row, ensure_ascii=False))
    files.append_line(tmp_path / "rows.jsonl", json.dumps(row, ensure_ascii=False))
    for path in tmp_path.iterdir():
        assert json.loads(path.read_text(encoding="utf-8")) == row


def test_what_a_killed_call_left_of_a_directory_is_removed_by_the_next(tmp_path: Path) -> None:
    for name in (".model.tmp", ".other.tmp"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "half").write_text("x")
    files.fill_directory(
        tmp_path / "model", lambda place: (place / "file").write_text("whole") and None, "the model"
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == [".other.tmp", "model"]
    assert (tmp_path / "model" / "file").read_text() == "whole"


def test_a_directory_whose_name_may_not_be_on_the_disk_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flush = files.flush

    def fail(path: Path) -> None:
        if Path(path) == tmp_path and (tmp_path / "model").exists():
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        flush(path)

    monkeypatch.setattr(files, "flush", fail)
    with pytest.raises(RunError, match=r"Read-only file system\. No partial file is left"):
        files.fill_directory(
            tmp_path / "model", lambda place: files.write_atomic(place / "file", "whole"), "the model"
        )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("aside", [False, True])
def test_a_directory_that_cannot_be_replaced_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, aside: bool
) -> None:
    """aside: an earlier replacement was killed between its renames, and the old directory has its other name."""
    new, final = tmp_path / "new", tmp_path / "final"
    old = tmp_path / ".final.replaced" if aside else final
    for path in (new, old):
        path.mkdir()
        (path / "name").write_text(path.name)
    rename = os.rename

    def fail(source: Path, target: Path) -> None:
        if source == new:
            raise OSError(errno.EIO, "Input/output error")
        rename(source, target)

    monkeypatch.setattr(os, "rename", fail)
    with pytest.raises(OSError, match="Input/output error"):
        files.replace_directory(new, final)
    assert (old / "name").read_text() == old.name
    monkeypatch.undo()
    files.replace_directory(new, final)
    assert [path.name for path in tmp_path.iterdir()] == ["final"]
    assert (final / "name").read_text() == "new"


def test_a_flush_that_fails_names_what_it_flushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fsync(_: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OSError, match="Input/output error") as raised:
        files.flush(tmp_path)
    assert raised.value.filename == str(tmp_path)


def test_what_failed_within_a_save_is_named_and_not_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    lines, partial = tmp_path / "metrics.jsonl", tmp_path / "partial"
    lines.write_text("{}")
    partial.mkdir()
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(RunError) as raised:
        files.attempt(lambda: files.flush_lines(lines), "the checkpoint", tmp_path / "4", leftover=partial)
    assert str(raised.value).startswith(f"metrics.jsonl could not be written to {lines}: Input/output error.")
    assert not partial.exists()


def test_a_flush_leaves_no_descriptor_open(tmp_path: Path) -> None:
    def lowest_free() -> int:
        descriptor = os.dup(0)
        os.close(descriptor)
        return descriptor

    before = lowest_free()
    files.flush(tmp_path)
    assert lowest_free() == before


def test_a_disk_without_room_for_files_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = SimpleNamespace(f_files=9, f_favail=0, f_bavail=256, f_frsize=4096)
    monkeypatch.setattr(os, "statvfs", lambda _: figures)

    def fails(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "open", fails)
    with pytest.raises(RunError, match=r"on the disk \(1\.0 MiB free, room for 0 more files\)\. Existing"):
        files.write_atomic(tmp_path / "file", "x")
