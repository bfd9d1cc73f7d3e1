"""`help` documents every field of the classes for authors: the class's docstring names each."""

from __future__ import annotations

import pydoc
import re
from typing import Any

import pytest
from rlhf_dpo import DPOInputs

from rlhf_core import AdvantageInputs, PairInputs, PolicyInputs, RewardInputs, Rows, SamplerInputs

GIVEN = (PolicyInputs, PairInputs, AdvantageInputs, RewardInputs, SamplerInputs, Rows, DPOInputs)
PLAIN = {"tokenizer"}
"""Fields that their name and type document."""


@pytest.mark.parametrize("struct", GIVEN, ids=lambda struct: struct.__name__)
def test_help_names_every_field(struct: Any) -> None:
    shown = pydoc.render_doc(struct, renderer=pydoc.plaintext)
    told = (struct.__doc__ or "").splitlines()
    assert all(line.strip() in shown for line in told)
    for name in set(struct.__annotations__) - PLAIN:
        assert re.search(rf"\b{name}\b[`\w, ]*( is|:)", struct.__doc__), f"{struct.__name__}.{name}"
