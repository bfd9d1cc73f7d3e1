"""`rlhf generate` with options that change how completions are sampled and end."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
from typer.testing import CliRunner

from rlhf_core import cli


@pytest.fixture(scope="module")
def directory(tiny: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("model")
    tiny.make_model(scale=6.0).save(path)
    return path


def generate(directory: Path, *flags: str) -> str:
    limits = ["--max_completion_length", "12", "--temperature", "0"]
    result = CliRunner().invoke(cli.app, ["generate", str(directory), "--prompt", "a b", *limits, *flags])
    if result.exception is not None:
        raise result.exception
    return result.stdout.rstrip("\n")


def test_flags_reach_the_sampler(directory: Path, tiny: ModuleType) -> None:
    plain = generate(directory).split()
    assert len(plain) > 5
    stop = " ".join(plain[3:5])
    ended = generate(directory, "--stop_strings", "no such words", "--stop-strings", stop)
    at = " ".join(plain).index(stop)
    assert ended.strip() == " ".join(plain)[: at + len(stop)]
    ids = [str(tiny.WORDS.index(word)) for word in ("Q", plain[3])]
    ended = generate(directory, "--stop_token_ids", ids[0], "--stop_token_ids", ids[1])
    assert ended.split() == plain[: plain.index(plain[3])]  # without the token that ended it
    varied = generate(directory, "--repetition_penalty", "50").split()
    assert len(set(varied)) > len(set(plain))
