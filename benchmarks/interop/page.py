"""What docs/how-to/hugging_face.md shows of PyTorch, run in PyTorch's environment on models of prepare.py."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import task

from rlhf_core import load_model

FILE = "in_torch.py"
DOCUMENT = task.REPOSITORY / "docs" / "how-to" / "hugging_face.md"


def follow(python: str, place: Path) -> dict[str, Any]:
    """The largest difference between what the page's code prints and what is computed here."""
    found = re.search(rf"```python\n# {re.escape(FILE)}\n(.*?)```", DOCUMENT.read_text("utf-8"), re.DOTALL)
    if found is None:
        raise SystemExit(f"{DOCUMENT} has no {FILE}")
    texts = re.search(r"in (\(\".*?\"\))\]", found[1])
    assert texts is not None
    (place / FILE).write_text(found[1], encoding="utf-8")
    done = subprocess.run([python, FILE], cwd=place, check=True, capture_output=True, text=True)
    printed = dict(re.findall(r"^(scores|adapter against merged) (.*)$", done.stdout, re.MULTILINE))
    scorer = load_model(place / "reward", "score")
    ours = []
    for text in json.loads(texts[1].replace("(", "[").replace(")", "]")):
        ids = np.array([scorer.tokenizer(text + scorer.tokenizer.eos_token)["input_ids"]])
        ours.append(float(scorer.scores(ids, np.ones_like(ids))[0]))
    theirs = json.loads(printed["scores"])
    return {
        "difference": max(
            float(printed["adapter against merged"]),
            *(abs(a - b) for a, b in zip(ours, theirs, strict=True)),
        )
    }
