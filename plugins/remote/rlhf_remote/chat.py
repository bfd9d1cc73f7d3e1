"""A conversation with a model in the terminal: input, output while it is sampled, and where replies come from."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import httpx
import numpy as np

from rlhf_core import InputError, RunError
from rlhf_core.errors import UNREADABLE
from rlhf_core.runtime.files import append_line
from rlhf_core.runtime.terminal import SafeConsole, escape_control
from rlhf_core.workers import run_async
from rlhf_remote.models import Remote, room
from rlhf_remote.service import describe_answer, json_bytes
from rlhf_remote.transport import Answer, shorten, words

STEPS = 8
"""Tokens that are sampled before they are shown."""
LONGEST_LINE = 2**20
"""Bytes of a line of a streamed reply."""
CHUNKS_SHOWN = 16
"""Parts of an answer that refuses a request that are read, to say why."""
LONGEST = 8192
"""Tokens of a conversation with a model that takes more or does not say."""
UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""What the last bytes of a text decode to while the rest of a character is missing."""
HELP = """\
/system TEXT   set the system message; without a text, remove it
/reset         forget the conversation, and keep the system message
/undo          forget the last question and its reply
/save FILE     add the conversation to FILE.jsonl, a row with `messages`
/exit          leave; so does Ctrl-D, or Ctrl-C twice
//…            say something that begins with /"""


@dataclass(frozen=True)
class Settings:
    """How replies are sampled, as the command's flags say."""

    max_completion_length: int = 512
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float | None = None
    seed: int = 0


@dataclass
class Conversation:
    """A system message, if any, and the messages after it."""

    system: str | None = None
    turns: list[dict[str, str]] = field(default_factory=list)

    def messages(self) -> list[dict[str, str]]:
        """Return all messages, as a row of data has them."""
        return ([{"role": "system", "content": self.system}] if self.system else []) + self.turns


class Part(NamedTuple):
    """A part of a reply."""

    text: str
    thought: bool = False
    """Whether it is thought, in a channel of its own, and not said."""


class Speaker(Protocol):
    """Who replies. waits: whether it waits for others, where Ctrl-C may interrupt it; else it is asked to end."""

    name: str
    waits: bool

    def reply(self, messages: Sequence[dict[str, str]], number: int) -> Generator[Part, None, None]:
        """Yield the parts of reply `number` as they are written. Closing the iterator ends the reply.

        Raises InputError for a conversation that cannot be replied to, and RunError if the speaker fails.
        """
        ...


class Streamed:
    """A model behind a URL, which streams its replies."""

    waits = True

    def __init__(self, remote: Remote, settings: Settings) -> None:
        self.remote, self.settings, self.name = remote, settings, remote.name

    def reply(self, messages: Sequence[dict[str, str]], number: int) -> Generator[Part, None, None]:
        """Yield the parts of a reply, see `Speaker`."""
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
        body["max_tokens"] = run_async(room(self.remote, body))
        url, timeout = f"{self.remote.api}/chat/completions", httpx.Timeout(10, read=300)
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

    def _part(self, url: str, line: str) -> Iterator[Part]:
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
                if thought := delta.get("reasoning_content") or delta.get("reasoning"):
                    yield Part(str(thought), thought=True)
                if text := delta.get("content"):
                    yield Part(str(text))
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


class Local:
    """A model in this process: an `OpenWorld` of the sampler of conversations."""

    steps, waits = STEPS, False

    def __init__(self, name: str, model: Any, encoder: Any, settings: Settings) -> None:
        from rlhf_core import SamplerInputs
        from rlhf_core.environments import CallParser, ConversationEncoder
        from rlhf_core.sampling import ConversationSampler, SamplingOptions
        from rlhf_core.sampling.turns import STOP_IDS

        self.name, self.model, self.encoder, self.settings = name, model, encoder, settings
        self.length = min(model.hf_config.get("max_position_embeddings") or LONGEST, LONGEST)
        inputs = SamplerInputs(
            definition=model.definition,
            options=SamplingOptions(max_completion_length=self.length),
            mesh=model.mesh,
            stop_ids=model.stop_ids,
            prompts_per_call=1,
            max_prompt_length=1,
            tokenizer=model.tokenizer,
            conversation_length=self.length,
        )
        sampler = ConversationSampler(inputs, 1)
        sampler.warm_up(model.params, [1])
        self.weights = sampler.place(model.params)
        self.schedule = sampler.open(self.weights, self)
        self.stop_ids = tuple(map(int, model.stop_ids))[:STOP_IDS]
        self.parser = CallParser(ConversationEncoder(model.tokenizer, stop_ids=model.stop_ids))
        self.incoming: list[Any] = []
        self.written: list[int] = []
        self.over: str | None = ""

    @classmethod
    def open(
        cls,
        path: str,
        settings: Settings,
        *,
        chat_template: str | None = None,
        base: str | None = None,
        quantize: Literal["nf4", "int8", "none"] | None = None,
        plugins: Sequence[Path] = (),
    ) -> Local:
        """Load a language model with a chat template. Raises InputError for any other."""
        import dataclasses

        from rlhf_core import artifacts, runtime
        from rlhf_core import plugins as loading
        from rlhf_core.models import load_model, local_directory, stored_head
        from rlhf_core.sampling.sampler import keeps_caches
        from rlhf_core.tokenizer import template_text, with_template_and_stop_ids
        from rlhf_core.tokenizer.encoding import Encoder, TextOptions

        runtime.prepare()
        registry = loading.load(files=plugins).registry
        if stored_head(local_directory(path)) == "score":
            raise InputError(f"{path} is a reward model, which does not write: use it with rlhf score")
        model = load_model(base or path, adapter=base and path, registry=registry, quantized=quantize)
        if model.tokenizer is None:
            raise InputError(
                f"{path}: no tokenizer files; add tokenizer.json and tokenizer_config.json next to config.json"
            )
        tokenizer = with_template_and_stop_ids(model.tokenizer, chat_template, model.source)
        if template_text(tokenizer) is None:
            raise InputError(
                f"{path} has no chat template: give one, --chat_template FILE, or complete texts with rlhf generate"
            )
        model = dataclasses.replace(model, tokenizer=tokenizer)
        if not keeps_caches(model.definition, model.mesh):
            raise InputError(
                f"{path}: its caches cannot stay on these devices between tokens; use rlhf generate"
            )
        day = artifacts.read_contract(local_directory(path)).get("template_date")
        return cls(path, model, Encoder(tokenizer, TextOptions(None, {}, day)), settings)

    def replies(self, *, wait: bool) -> list[Any]:
        """Hand the sampler what to begin or to end."""
        begun, self.incoming = self.incoming, []
        return begun

    def sampled(self, conversation: int, tokens: np.ndarray, logps: np.ndarray, likeliest: Any) -> None:
        """Take tokens as they are sampled."""
        self.written += tokens.tolist()

    def read(self, conversation: int, logps: np.ndarray, ranks: np.ndarray, likeliest: Any) -> None:
        """Do nothing: no reply asks what the policy thinks of its context."""

    def submit(self, conversation: int, tokens: np.ndarray, logps: np.ndarray, finished: bool) -> None:
        """Note that the reply is over."""
        self.over = "length" if not finished else "stop"

    def failed(self, conversation: int) -> None:
        """Note that the reply cannot go on."""
        self.over = None

    def reply(self, messages: Sequence[dict[str, str]], number: int) -> Generator[Part, None, None]:
        """Yield the parts of a reply, see `Speaker`."""
        import jax

        from rlhf_core.contracts import Beginning, Continuation, TurnSettings

        given = self.settings
        (prompt,) = self.encoder.prompts([list(messages)])
        room = self.length - len(prompt)
        if room < 1:
            raise InputError(
                f"the conversation has {len(prompt):,} tokens, and {self.length:,} are possible: type /undo or /reset"
            )
        key = np.asarray(jax.random.key_data(jax.random.fold_in(jax.random.key(given.seed), number)))
        settings = TurnSettings(
            self.weights, key, given.temperature, given.top_p, given.top_k, given.min_p or 0.0, self.stop_ids
        )
        limit = min(given.max_completion_length, room)
        self.written, self.over = [], ""
        shown = {False: "", True: ""}
        self.incoming.append(Beginning(number, prompt, limit, settings))
        try:
            while self.over == "":
                self.schedule.step()
                for is_thought, text in self._text_so_far().items():
                    before, shown[is_thought] = shown[is_thought], text
                    if more := text[len(before) * text.startswith(before) :]:
                        yield Part(more, is_thought)
            if self.over is None:
                raise RunError(f"{self.name}: the distribution of a next token is not finite")
        finally:
            self.incoming.append(Continuation(number, None))
            self.schedule.step()  # the slot is free for the next reply

    def _text_so_far(self) -> dict[bool, str]:
        """Return what was thought (True) and said (False) so far."""
        from rlhf_core.tokenizer.encoding import continuations

        if not self.parser.has_channels:
            (text,) = continuations(self.model.tokenizer, [None], [np.array(self.written, np.int32)])
            return {False: text if self.over else text.rstrip(UNFINISHED)}
        if not self.over:
            content, thought = self.parser.so_far(self.written)
            return {True: thought, False: content}
        message = self.parser.message(self.written)
        return {
            True: message.get("thinking") or message.get("reasoning_content") or "",
            False: message["content"],
        }


class Stopped(Exception):
    """Ctrl-C, while a reply was written."""


@contextmanager
def _stoppable(waits: bool) -> Iterator[Callable[[], bool]]:
    """Turn the first Ctrl-C inside the block into Stopped where it waits, else into True of the function given; the
    second one into KeyboardInterrupt.
    """
    pressed = False

    def press(*_: Any) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True
        if waits:
            raise Stopped

    before = signal.signal(signal.SIGINT, press)
    try:
        yield lambda: pressed
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

    def write(self, parts: Generator[Part, None, None], *, waits: bool) -> str:
        """Print a reply as it comes, thoughts dim; return what was said of it, all or until Ctrl-C."""
        message, thinks = "", False
        try:
            with _stoppable(waits) as stopped:
                for part in parts:
                    if thinks and not part.thought:
                        self.console.print()
                    thinks = part.thought
                    self.console.print(part.text, end="", style="dim" if thinks else None)
                    message += "" if thinks else part.text
                    if stopped():
                        raise Stopped
                if stopped():
                    raise Stopped
        except Stopped:
            self.pressed = True
            self.console.print(" (stopped)", style="dim", end="")
        finally:
            parts.close()
            if message or self.pressed:
                self.console.print()
        return message


def talk(conversation: Conversation, speaker: Speaker, terminal: Terminal | None = None) -> None:
    """Let a person and a model talk until the person leaves.

    Raises RunError at the end of piped input of which a line had no reply.
    """
    terminal = terminal or Terminal()
    with suppress(ImportError):
        import readline  # noqa: F401  (lines can be edited and called back)
    if sys.stdin.isatty():
        terminal.note(f"{speaker.name}: /help lists the commands, /exit leaves")
    number = failed = 0
    try:
        while (line := terminal.line()) is not None and line != "/exit":
            if line.startswith("/") and not line.startswith("//"):
                obey(line, conversation, terminal)
            elif line:
                question = {
                    "role": "user",
                    "content": line.removeprefix("/") if line.startswith("//") else line,
                }
                try:
                    parts = speaker.reply([*conversation.messages(), question], number)
                    message = terminal.write(parts, waits=speaker.waits)
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


def obey(line: str, conversation: Conversation, terminal: Terminal) -> None:
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


def _save(file: str, conversation: Conversation, terminal: Terminal) -> None:
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
