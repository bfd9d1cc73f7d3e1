"""Secrets in options are read when used, and hidden wherever a configuration is written."""

from __future__ import annotations

import dataclasses
import json
import threading
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any
from urllib.parse import quote

import pytest
from pydantic import SecretStr

from rlhf_core import REWARD, Registry, TrainerConfig, plugins
from rlhf_core.config import HIDDEN, Component, build, public_table, remember
from rlhf_core.errors import InputError, error_line
from rlhf_core.hidden import hide_in_output, scrub
from rlhf_core.rollouts import open_rewards
from rlhf_core.stage import events
from rlhf_core.testing import check_reward

CANARY = "canary-3f9a77"


@dataclasses.dataclass
class Judge:
    """A reward that calls a service."""

    pin: SecretStr | None = None
    api_key: str | None = None
    headers: dict[str, str] = dataclasses.field(default_factory=dict)
    anything: Any = None
    table: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __call__(self, completions: list[str]) -> list[float]:
        return [0.0] * len(completions)


class Config(TrainerConfig):
    rewards: list[Annotated[Component, REWARD]] = []  # noqa: RUF012
    judge: Annotated[Component, REWARD] = Component(name="grader")


@pytest.fixture
def registry() -> Registry:
    registry = plugins.load().registry
    registry.add(REWARD, "grader", Judge)
    return registry


def test_an_option_is_read_from_the_environment_when_the_component_is_made(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And messages are scrubbed of it."""
    monkeypatch.setenv("JUDGE_KEY", "canary-scrub-51c2")
    env = {"env": "JUDGE_KEY"}
    judge = registry.get(REWARD, "grader", api_key=env, pin=env, headers={"Authorization": env}, anything=env)
    assert judge.api_key == judge.anything == judge.headers["Authorization"] == "canary-scrub-51c2"
    assert judge.pin.get_secret_value() == "canary-scrub-51c2"
    assert scrub("401 for key canary-scrub-51c2.") == f"401 for key {HIDDEN}."
    monkeypatch.setenv("A_NAME_THAT_SAYS_NOTHING", "web-of-words")
    assert (
        registry.get(REWARD, "grader", anything={"env": "A_NAME_THAT_SAYS_NOTHING"}).anything
        == "web-of-words"
    )
    assert scrub("401 for web-of-words.") == f"401 for {HIDDEN}."
    # An option that takes such a table keeps it.
    assert registry.get(REWARD, "grader", table=env).table == env


def test_threads_and_warnings_hide_secrets(capfd: pytest.CaptureFixture[str]) -> None:
    remember(CANARY)

    def fails() -> None:
        raise ValueError(CANARY)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading, "excepthook", threading.excepthook)
        patch.setattr(warnings, "formatwarning", warnings.formatwarning)
        hide_in_output()
        thread = threading.Thread(target=fails)
        thread.start()
        thread.join()
        assert CANARY not in warnings.formatwarning(CANARY, UserWarning, "a.py", 1, f"warn({CANARY})")
    said = capfd.readouterr().err
    assert "ValueError: *" in said
    assert CANARY not in said


def test_a_variable_that_is_not_set_is_named_with_its_place(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NOT_SET_HERE", raising=False)
    table = {"rewards": [{"name": "grader", "api_key": {"env": "NOT_SET_HERE"}}]}
    with pytest.raises(InputError, match=r"policy\.rewards\[0\]\.api_key: .*NOT_SET_HERE is not set"):
        build(Config, table, where="policy", registry=registry)


def test_written_configurations_hide_secrets_by_type_and_by_name(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", CANARY)
    table = {
        "rewards": [
            {"name": "grader", "pin": CANARY, "headers": {"authorization": CANARY, "user": "me"}},
            {"name": "grader", "api_key": {"env": "JUDGE_KEY"}},
        ],
        "judge": {"name": "grader", "api_key": CANARY},
        "train_data": {"name": "sql", "hf_token": CANARY, "eos_token": "</s>"},
    }
    config = build(Config, table, registry=registry)
    written = public_table(config, registry)
    assert CANARY not in str(written)
    first, second = written["rewards"]
    assert first["pin"] == first["headers"]["authorization"] == written["judge"]["api_key"] == HIDDEN
    assert first["headers"]["user"] == "me"
    assert written["train_data"]["eos_token"] == "</s>"
    assert second["api_key"] == {"env": "JUDGE_KEY"}
    # The configuration itself keeps them, for the component.
    assert config.rewards[0].options["pin"] == CANARY


def test_a_secret_with_a_quotation_mark_is_hidden_in_events(tmp_path: Path) -> None:
    secret = remember('canary"quoted\\7e')
    events.log_event(tmp_path, "policy", "failed", message=f"refused key {secret}")
    assert json.loads((tmp_path / events.FILE).read_text())["message"] == f"refused key {HIDDEN}"


def test_what_was_hidden_is_not_taken_for_the_secret(registry: Registry) -> None:
    """A pipeline.resolved.toml that is run again holds asterisks where the secret was."""
    for options in ({"pin": HIDDEN}, {"api_key": HIDDEN}, {"headers": {"authorization": HIDDEN}}):
        table = {"rewards": [{"name": "grader", **options}]}
        with pytest.raises(InputError, match=r"policy\.rewards\[0\]\.\w+: was hidden when this was written"):
            build(Config, table, where="policy", registry=registry)


def test_messages_hide_secrets_of_the_environment_however_they_quote_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    secret = 'a"b\\c/d é'
    monkeypatch.setenv("JUDGE_API_KEY", secret)
    monkeypatch.setenv("HF_TOKEN", "hf_canary")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "falsefalse")
    monkeypatch.setenv("A_TOKEN", "short")
    monkeypatch.setenv("B_TOKEN", "barely")
    for message in (
        f"refused {secret}",
        f"{KeyError(secret)}",
        json.dumps({"key": secret}),
        f"?key={quote(secret, safe='')}",
        "hf_canary",
        "barely",
    ):
        assert scrub(message) != message
        assert "b" not in scrub(message).replace(HIDDEN, "")
    assert scrub("falsefalse short") == "falsefalse short"


def test_a_secret_that_does_not_fit_its_option_is_not_quoted() -> None:
    registry = Registry()
    registry.add(REWARD, "grader", Judge)
    for option, value in (("pin", [CANARY]), ("api_key", {"value": CANARY})):
        with pytest.raises(InputError, match=f"{option}: expected text") as raised:
            registry.get(REWARD, "grader", **{option: value})
        assert CANARY not in str(raised.value)
    assert scrub(f"refused {CANARY}") == f"refused {HIDDEN}"


LINES = "-----BEGIN KEY-----\nMIIcanary7\n  line two"


@pytest.mark.parametrize(
    "said",
    [
        LINES,
        " ".join(LINES.split()),
        repr(LINES),
        repr({"key": LINES.encode()}),
        json.dumps([LINES]),
        "in line 2: MIIcanary7",
        quote(LINES),
    ],
)
def test_a_secret_of_several_lines_is_hidden_in_every_form(said: str) -> None:
    remember(LINES)
    assert not any(part in scrub(said) for part in ("MIIcanary7", "line two"))


def test_what_a_component_raises_is_hidden_before_it_is_cut() -> None:
    secret = remember("canary cut-4d1e in words")
    assert "canary" not in error_line(ValueError("x " * 142 + secret))


def test_configurations_and_components_show_no_secret_in_python() -> None:
    assert CANARY not in repr(Component(name="grader", api_key=CANARY, headers={"authorization": CANARY}))
    assert CANARY not in str(Config(judge={"name": "grader", "api_key": CANARY}))

    @dataclasses.dataclass
    class Fails(Judge):
        def __call__(self, completions: list[str]) -> list[float]:
            raise PermissionError(f"401 for {self.api_key} at {self.headers}")

    with pytest.raises(AssertionError, match=r"PermissionError: 401 for \*+ at") as broken:
        check_reward(Fails(api_key="canary-typed-8b0", headers={"token": "canary-header-2"}))
    assert "canary" not in str(broken.value)


def test_secrets_of_objects_made_in_python_and_of_defaults_are_hidden() -> None:
    @dataclasses.dataclass
    class Keyed:
        api_key: str = "canary-field-51"

        def __post_init__(self) -> None:
            self.pin, self.headers = SecretStr("canary-pin-52"), {"authorization": "canary-header-53"}

        def __call__(self, completions: list[str]) -> list[float]:
            return [0.0 for _ in completions]

    stage: Any = SimpleNamespace(name="policy", registry=Registry(), inputs={"rewards": [Keyed()]})
    open_rewards([], stage)
    assert "canary" not in scrub("canary-field-51 canary-pin-52 canary-header-53")
    registry = Registry()
    with registry.transaction("test"):
        registry.add(
            REWARD,
            "keyed",
            dataclasses.make_dataclass("Own", [("token", str, "canary-own-54")], bases=(Keyed,)),
        )
    registry.get(REWARD, "keyed")
    assert "canary" not in scrub("canary-own-54")
