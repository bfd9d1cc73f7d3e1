"""The fields of a stage that hold paths: core's, and a trainer's own, recognized by name."""

import pytest

from rlhf_core.pipeline.file import resolve_paths


@pytest.mark.parametrize("field", ["train_data", "model", "teacher_model", "replay_data", "words_file"])
def test_paths_are_relative_to_the_file(field, tmp_path):
    (tmp_path / "here").mkdir()
    problems = []
    assert resolve_paths(field, "here", tmp_path, "stage", problems) == str(tmp_path / "here")
    resolve_paths(field, "./gone.jsonl", tmp_path, f"stage.{field}", problems)
    assert len(problems) == 1
    assert problems[0].startswith(f"stage.{field}: no such file")


def test_other_texts_are_left_alone(tmp_path):
    (tmp_path / "linear").mkdir()
    assert resolve_paths("lr_scheduler_type", "linear", tmp_path, "stage", []) == "linear"


def test_the_file_of_a_reward_is_an_input_below_a_directory_with_a_colon(tmp_path):
    from rlhf_core.stage.identity import _paths

    base = tmp_path / "run:1"
    base.mkdir()
    (base / "judge.py").write_text("")
    name = resolve_paths("name", "judge.py:score", base, "stage", [])
    assert name == f"{base / 'judge.py'}:score"
    assert list(_paths({"rewards": [{"name": name}]})) == [("rewards[0].name", base / "judge.py")]
