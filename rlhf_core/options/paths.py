"""Which fields of a configuration name files and models, told by how the fields are called."""

from __future__ import annotations

INPUT_FIELDS = {"chat_template", "tokenizer", "path"}
INPUT_ENDINGS = ("_data", "_file")


def is_input_field(field: str) -> bool:
    """Whether strings in this field may be paths: a trainer's own `replay_data` or `words_file` too."""
    return field in INPUT_FIELDS or field.endswith(INPUT_ENDINGS) or is_model_field(field)


def is_model_field(field: str) -> bool:
    """Whether strings in this field name models: `model` itself, or a plugin's `teacher_model`."""
    return field == "model" or field.endswith("_model")
