"""`help` on what authors are given says what every field is: the class's own text names each."""

from __future__ import annotations

import pydoc
import re
from typing import Any

import pytest
from rlhf_dpo import DPOInputs

from rlhf_core import AdvantageInputs, PairInputs, PolicyInputs, RewardInputs, Rows, SamplerInputs

GIVEN = (PolicyInputs, PairInputs, AdvantageInputs, RewardInputs, SamplerInputs, Rows, DPOInputs)
PLAIN = {"tokenizer"}
"""Fields whose name and type say all."""


@pytest.mark.parametrize("struct", GIVEN, ids=lambda struct: struct.__name__)
def test_help_names_every_field(struct: Any) -> None:
    shown = pydoc.render_doc(struct, renderer=pydoc.plaintext)
    told = (struct.__doc__ or "").splitlines()
    assert all(line.strip() in shown for line in told)
    for name in set(struct.__annotations__) - PLAIN:
        assert re.search(rf"\b{name}\b[`\w, ]*( is|:)", struct.__doc__), f"{struct.__name__}.{name}"
