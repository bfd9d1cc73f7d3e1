"""Models and judges behind a URL: what a server does not have or follow, and what it answers."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from tests.mistakes.mistake import Mistake, call
from tests.shared import commands, services

WRITTEN = {"choices": [{"index": 0, "text": "x"}]}
CARDS = [{"id": "policy", "kind": "language_model"}, {"id": "rm", "kind": "reward_model"}]


def asking(
    name: str, command: str, reply: Callable[[Any], Any] = str, models: Any = None, **files: Any
) -> Mistake:
    """A command with a server at URL; `files` are rows of files in the current directory."""

    def typed(place: Any) -> None:
        with services.serve(reply) as service:
            service.models = {"data": CARDS} if models is None else models
            for file, rows in files.items():
                lines = [json.dumps(row) for row in rows] if isinstance(rows, list) else [rows]
                place.write(file.replace("_", "."), "\n".join(lines).replace("URL", service.url))
            commands.rlhf(*command.replace("URL", service.url).split())

    return call(f"$ rlhf {command}" + (f", {name}" if name else ""), typed)


def named(*names: str) -> Any:
    return {"data": [{"id": name} for name in names]}


def refused(code: int, message: str) -> tuple[int, Any, dict[str, str]]:
    return code, {"error": {"message": message}}, {}


JUDGES = """
dir = "run"
[[stage]]
name = "policy"
trainer = "grpo"
model = "model"
train_data = "prompts.jsonl"
rewards = [
    { name = "http", url = "URL", columns = ["siez"] },
    { name = "judge", url = "URL", model = "gpt-9", rubric_file = "rubric.txt" },
    { name = "judge", label = "misspelt", url = "URL", model = "policy", rubric_file = "misspelt.txt" },
]
"""
MODELS = [
    asking("two models", "generate URL --prompt Mia --raw", models=named("a", "b")),
    asking("aa and b", "generate URL#a --prompt Mia --raw", models=named("aa", "b")),
    asking("no models", "generate URL --prompt Mia --raw", models=named()),
    asking("", "generate URL#rm --prompt Mia"),
    asking("", "generate URL --prompt Mia --base x --chat_template plain"),
    asking("", "generate URL --prompt Mia --system S --raw"),
    asking("HTTP 401", "generate URL --prompt Mia", models=refused(401, "who are you?")),
    asking(
        "HTTP 400 for the second row",
        "generate URL rows.jsonl",
        lambda body: refused(400, "bad words") if "bad" in body.values() else WRITTEN,
        rows_jsonl=[{"prompt": "good"}, {"prompt": "bad"}],
    ),
    asking("", "chat URL --chat_template x"),
    asking("a model without a template", "chat URL", lambda body: refused(400, "no template")),
    asking(
        "lists of completions",
        "score URL rows.jsonl",
        rows_jsonl=[{"prompt": "p", "chosen": ["a"], "rejected": ["b", "c"]}],
    ),
    asking("", "score URL rows.jsonl --normalize", rows_jsonl=[{"prompt": "p", "completion": "c"}]),
]
REWARDS = [
    asking(
        "of a column, a model and a place in a rubric that are not there",
        "check judges.toml",
        judges_toml=JUDGES,
        rubric_txt="{completion}",
        misspelt_txt="{completion}\n\nlike {siez}?",
    ),
]
SECTIONS = {"Models behind a URL": MODELS, "Judges and other services": REWARDS}
