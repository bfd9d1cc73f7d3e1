"""What TensorBoard will read, and whether the logger takes all that a stage may tell it."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rlhf_tensorboard import TensorBoard

from rlhf_core.testing import check_logger

event_pb2 = pytest.importorskip("tensorboardX.proto.event_pb2")


def events(directory: Path) -> Iterator[Any]:
    """The events of all files: each is its length in 8 bytes, 4 of check sum, itself, and 4 more."""
    for file in sorted(directory.iterdir()):
        content, at = file.read_bytes(), 0
        while at < len(content):
            (size,) = struct.unpack_from("<Q", content, at)
            yield event_pb2.Event.FromString(content[at + 12 : at + 12 + size])
            at += size + 16


def test_the_kit() -> None:
    check_logger(TensorBoard)


def test_what_is_written(tmp_path: Path) -> None:
    stage: Any = SimpleNamespace(dir=tmp_path)
    logger = TensorBoard()
    logger.rlhf_step_end(stage, 1, {"loss": 0.5, "rewards/length/mean": -1.0})
    logger.rlhf_step_end(stage, 2, {"loss": 0.25, "min_reward": float("inf")})
    logger.rlhf_stage_end()
    found = [
        (e.step, v.tag, v.simple_value) for e in events(tmp_path / "tensorboard") for v in e.summary.value
    ]
    assert found == [(1, "loss", 0.5), (1, "rewards/length/mean", -1.0), (2, "loss", 0.25)]
