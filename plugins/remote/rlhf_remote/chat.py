"""A conversation with a model behind a URL in the terminal: input, and replies while they are written."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from rlhf_core import InputError, RunError
from rlhf_core.errors import UNREADABLE
from rlhf_core.runtime.files import append_line
from rlhf_core.runtime.terminal import SafeConsole, escape_control
from rlhf_core.workers.event_loop import run_async
from rlhf_remote.models import Remote, prompt_tokens
from rlhf_remote.service import describe_answer, json_bytes
from rlhf_remote.transport import Answer, shorten, words

LONGEST_LINE = 2**20
"""Bytes of a line of a streamed reply."""
CHUNKS_SHOWN = 16
"""Parts of an answer that refuses a request that are read, to say why."""
HELP = """\
/system TEXT   set the system message; without a text, remove it
/reset         forget the conversation, and keep the system message
/undo          forget the last question and its reply
/save FILE     add the conversation to FILE.jsonl, a row with `messages`
/exit          leave; so does Ctrl-D, or Ctrl-C twice
//…            say something that begins with /"""


@dataclass(frozen=True)
class ReplySettings:
    """How replies are sampled, as the command's flags say."""

    max_completion_length: int = 512
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float | None = None
    seed: int = 0


@dataclass
class Dialogue:
    """A system message, if any, and the messages after it."""

    system: str | None = None
    turns: list[dict[str, str]] = field(default_factory=list)

    def messages(self) -> list[dict[str, str]]:
        """Return all messages, as a row of data has them."""
        return ([{"role": "system", "content": self.system}] if self.system else []) + self.turns


class ReplyPart(NamedTuple):
    """A part of a reply."""

    text: str
    thought: bool = False
    """Whether it is thought, in a channel of its own, and not said."""


@dataclass
class Speaker:
    """The model, which streams its replies. name: as the person calls it."""

    remote: Remote
    settings: ReplySettings
    name: str

    def reply(self, messages: Sequence[dict[str, str]], number: int) -> Generator[ReplyPart, None, None]:
        """Yield the parts of reply `number` as they are written. Closing the iterator ends the reply.

        Raises InputError for a conversation that cannot be replied to, and RunError if the server fails.
        """
        given = self.settings
        body: dict[str, Any] = {
            "model": self.remote.name,
            **self.remote.neutral,
            "messages": list(messages),
            "max_tokens": given.max_completion_length,
            "temperature": given.temperature,
            "top_p": given.top_p,
            "seed": (given.seed + number) % 2**32,
            "stream": True,
        }
        body |= {name: value for name, value in (("top_k", given.top_k), ("min_p", given.min_p)) if value}
        body["max_tokens"] = self._limit(body)
        url = f"{self.remote.api}/chat/completions"
        timeout = httpx.Timeout(10, read=300)
        try:
            with httpx.stream(
                "POST", url, content=json_bytes(body), headers=self.remote.headers, timeout=timeout
            ) as answer:
                if answer.status_code != 200:
                    start = b"".join(islice(answer.iter_bytes(), CHUNKS_SHOWN))
                    message = describe_answer(Answer(url, answer.status_code, answer.headers, start))
                    refused = 400 <= answer.status_code < 500
                    raise (InputError if refused else RunError)(f"{url}: {message}")
                for line in _lines(url, answer.iter_bytes()):
                    yield from self._part(url, line)
        except httpx.HTTPError as error:
            raise RunError(f"{url}: {words(error)}") from None

    def _limit(self, body: dict[str, Any]) -> int:
        """Return how many tokens a reply may have. Raises InputError where the context leaves none."""
        most: int = body["max_tokens"]
        context = self.remote.context
        read = run_async(prompt_tokens(self.remote, body))
        if read is None or context is None:
            return most
        if read >= context:
            raise InputError(
                f"the conversation has {read:,} tokens, and {context:,} are possible: type /undo or /reset"
            )
        return min(most, context - read)

    def _part(self, url: str, line: str) -> Iterator[ReplyPart]:
        """Read a line of an event stream."""
        if not line.startswith("data:") or line.removeprefix("data:").strip() == "[DONE]":
            return
        try:
            event = json.loads(line.removeprefix("data:"))
            if "error" in event:
                error = event["error"]
                raise RunError(f"{url}: {shorten(str(error.get('message', error)))}")
            for choice in event["choices"]:
                delta = choice["delta"]
                thought = delta.get("reasoning_content") or delta.get("reasoning")
                if thought:
                    yield ReplyPart(str(thought), thought=True)
                text = delta.get("content")
                if text:
                    yield ReplyPart(str(text))
        except UNREADABLE:
            raise RunError(f"{url}: expected an event of a chat, got {shorten(line)}") from None


def _lines(url: str, parts: Iterable[bytes]) -> Iterator[str]:
    """Yield the lines of a stream. Raises RunError for one that does not end."""
    rest = b""
    for part in parts:
        *lines, rest = (rest + part).split(b"\n")
        yield from (line.decode(errors="replace").rstrip("\r") for line in lines)
        if len(rest) > LONGEST_LINE:
            raise RunError(f"{url}: a line of the reply has more than {LONGEST_LINE:,} bytes")
    yield rest.decode(errors="replace")


class Interrupted(Exception):
    """Ctrl-C, while a reply was written."""


@contextmanager
def _stoppable() -> Iterator[None]:
    """Turn the first Ctrl-C inside the block into Stopped, the second one into KeyboardInterrupt."""
    pressed = False

    def press(*_: Any) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True
        raise Interrupted

    before = signal.signal(signal.SIGINT, press)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@dataclass
class Terminal:
    """Reads lines and prints replies. Piped input is read line by line, without a prompt."""

    console: SafeConsole = field(
        default_factory=lambda: SafeConsole(highlight=False, markup=False, soft_wrap=True)
    )
    pressed: bool = False
    """Whether Ctrl-C was the last thing typed."""

    def line(self) -> str | None:
        """Return what was typed; None at the end of input, or after Ctrl-C twice."""
        while True:
            try:
                text = input("> ") if sys.stdin.isatty() else sys.stdin.readline()
                if not text and not sys.stdin.isatty():
                    return None
                self.pressed = False
                return text.strip()
            except EOFError:
                return None
            except KeyboardInterrupt:
                if self.pressed:
                    return None
                self.pressed = True
                self.note("Ctrl-C again leaves")

    def note(self, text: str) -> None:
        """Print what the command itself says."""
        self.console.print(text, style="dim")

    def error(self, text: str) -> None:
        """Print what went wrong; the conversation continues."""
        print(escape_control(text), file=sys.stderr, flush=True)

    def write(self, parts: Generator[ReplyPart, None, None]) -> str:
        """Print a reply as it comes, thoughts dim; return what was said of it, all or until Ctrl-C."""
        message = ""
        thinks = False
        try:
            with _stoppable():
                for part in parts:
                    if thinks and not part.thought:
                        self.console.print()
                    thinks = part.thought
                    self.console.print(part.text, end="", style="dim" if thinks else None)
                    message += "" if thinks else part.text
        except Interrupted:
            self.pressed = True
            self.console.print(" (stopped)", style="dim", end="")
        finally:
            parts.close()
            if message or self.pressed:
                self.console.print()
        return message


def talk(conversation: Dialogue, speaker: Speaker, terminal: Terminal | None = None) -> None:
    """Let a person and a model talk until the person leaves.

    Raises RunError at the end of piped input of which a line had no reply.
    """
    terminal = terminal or Terminal()
    with suppress(ImportError):
        import readline  # noqa: F401  (lines can be edited and called back)
    if sys.stdin.isatty():
        terminal.note(f"{speaker.name}: /help lists the commands, /exit leaves")
    number = 0
    failed = 0
    try:
        for line in iter(terminal.line, None):
            if line == "/exit":
                break
            if line.startswith("/") and not line.startswith("//"):
                obey(line, conversation, terminal)
            elif line:
                question = {
                    "role": "user",
                    "content": line.removeprefix("/") if line.startswith("//") else line,
                }
                try:
                    parts = speaker.reply([*conversation.messages(), question], number)
                    message = terminal.write(parts)
                except (InputError, RunError) as error:
                    terminal.error(str(error))
                    failed += 1
                    continue
                number += 1
                if message:
                    conversation.turns += [question, {"role": "assistant", "content": message}]
                else:
                    terminal.note("no reply; the question is forgotten")
    except KeyboardInterrupt:  # the second one during a reply
        terminal.console.print()
    if failed and not sys.stdin.isatty():
        raise RunError(f"{failed} of {number + failed} lines had no reply")


def obey(line: str, conversation: Dialogue, terminal: Terminal) -> None:
    """Follow a line that begins with /."""
    command, _, rest = line.partition(" ")
    if command == "/system":
        conversation.system = rest.strip() or None
        terminal.note("system message set" if conversation.system else "no system message")
    elif command == "/reset":
        conversation.turns.clear()
        terminal.note("conversation forgotten")
    elif command == "/undo":
        del conversation.turns[-2:]
        terminal.note(f"{len(conversation.turns) // 2} exchanges left")
    elif command == "/save":
        _save(rest.strip(), conversation, terminal)
    elif command == "/help":
        terminal.note(HELP)
    else:
        terminal.error(
            f"{command}: no such command; /help lists them, and // says something that begins with /"
        )


def _save(file: str, conversation: Dialogue, terminal: Terminal) -> None:
    path = Path(file).expanduser()
    if not file or not conversation.turns:
        terminal.error("/save FILE.jsonl: name a file" if not file else "/save: nothing has been said")
        return
    if path.suffix != ".jsonl":
        terminal.error(f"/save {file}: name a file that ends in .jsonl")
        return
    try:
        append_line(path, json.dumps({"messages": conversation.messages()}, ensure_ascii=False))
    except (RunError, OSError) as error:
        terminal.error(f"/save {file}: {error}")
        return
    terminal.note(f"{path}: {len(conversation.messages())} messages added")
