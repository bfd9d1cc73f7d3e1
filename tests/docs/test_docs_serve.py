"""docs/how-to/serve.md: its tables name the fields and routes that there are."""

from __future__ import annotations

import re
from typing import Any

import typer
from rlhf_http.fields import NEUTRAL, ChatRequest, Completion, Score
from rlhf_serve import app, control
from rlhf_serve.commands import serve

from tests.shared import documents

PAGES = ("docs/how-to/serve.md", "plugins/serve/README.md")
PAGE = documents.REPOSITORY / PAGES[0]
TEXT = PAGE.read_text(encoding="utf-8")


def cells(heading: str) -> set[str]:
    """Names in backticks of the first column of the table that begins so."""
    table = TEXT[TEXT.index(f"| {heading} |") :].split("\n\n")[0]
    return {name for line in table.splitlines()[2:] for name in re.findall(r"`([^`]+)`", line.split("|")[1])}


def test_every_field_is_in_the_table() -> None:
    written = {*cells("field"), "model", "modalities"}
    there = {*Completion.model_fields, *ChatRequest.model_fields}
    assert there - written == {"logprob_token_ids", "spaces_between_special_tokens"}  # of vLLM alone, refused
    assert written - there <= {"weight_versions"}
    assert set(NEUTRAL) <= there


def test_every_route_is_in_a_table() -> None:
    written = {re.sub(r"\?.*", "", name) for name in cells("route") if name.startswith("/")}
    own = {route.path for route in app.routes()}
    controls = {route.path for route in control.Control(None, None, None, 0).routes()}  # type: ignore[arg-type]
    assert own | controls <= written | set(re.findall(r"`(/[a-z_/0-9]+)", TEXT))
    assert {"rows", "chat", "text_1", "text_2"} <= set(Score.model_fields)


def test_its_script_parses() -> None:
    scripts = [text for language, text in documents.blocks(PAGE) if language == "python"]
    for script in scripts:
        compile(script, "ask.py", "exec")


def test_the_flags_that_pages_type_exist() -> None:
    command = typer.main.get_command(app_of(serve))
    for page in PAGES:
        text = (documents.REPOSITORY / page).read_text(encoding="utf-8")
        lines = re.findall(r"^(?:\$ )?rlhf serve (.*)$", text, re.MULTILINE)
        assert lines
        for line in lines:
            context = command.make_context("serve", line.split(), resilient_parsing=False)
            assert all("=" in model for model in context.params["models"])


def app_of(function: Any) -> typer.Typer:
    made = typer.Typer(add_completion=False)
    made.command("serve")(function)
    return made
