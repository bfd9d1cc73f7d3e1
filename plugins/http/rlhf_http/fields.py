"""The fields of requests: those of OpenAI's and vLLM's servers that clients send. One that cannot be honoured is
refused by name, unless it asks for what is done anyway.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rlhf_core.errors import InputError, suggest
from rlhf_core.tokenizer.options import text_problem

ALTERNATIVES = 20
"""Likeliest tokens that a request may ask for, as in OpenAI's and vLLM's."""
MOST_COMPLETIONS = 1024
"""Completions of one request."""
MOST_ROWS = 16_384
"""Rows of one request for scores."""
MOST_CHARACTERS = 2**20
"""Characters of a text, where the model's context is not larger."""
CHARACTERS_OF_A_TOKEN = 16
LARGEST_ID = 2**31 - 1

Id = Annotated[int, Field(ge=0, le=LARGEST_ID)]
Ids = Annotated[list[Id], Field(fail_fast=True)]
Texts = str | Annotated[list[str], Field(fail_fast=True)]
Name = Annotated[str, Field(max_length=1024)]
Stop = Annotated[str, Field(min_length=1)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**64)]


class BadRequest(InputError):
    """A request that cannot be answered. param: the field at fault. status: of the answer."""

    def __init__(
        self, message: str, param: str | None = None, status: int = 400, kind: str = "invalid_request_error"
    ) -> None:
        super().__init__(message)
        self.param, self.status, self.kind = param, status, kind


class Fields(BaseModel):
    """The fields of a body; an unknown one is refused."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, strict=True)


Body = TypeVar("Body", bound=Fields)


class StreamOptions(Fields):
    """What a stream says besides its text."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class Sampling(Fields):
    """How tokens are sampled, and what ends a completion."""

    n: int | None = Field(default=1, ge=1, le=MOST_COMPLETIONS)
    max_tokens: int | None = Field(default=None, ge=0)
    temperature: float | None = Field(default=None, ge=0, le=1e4)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1)
    min_p: float | None = Field(default=None, ge=0, le=1)
    seed: Seed | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] | None = None
    stop_token_ids: Annotated[list[Id], Field(max_length=64)] | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    prompt_logprobs: int | None = Field(default=None, ge=0, le=ALTERNATIVES)
    # Refused unless they say what is done anyway:
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    min_tokens: int | None = None
    spaces_between_special_tokens: bool = True
    use_beam_search: bool = False
    length_penalty: float | None = None
    logprob_token_ids: list[int] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    structured_outputs: dict[str, Any] | None = None


class Request(Sampling):
    """What requests for completions and for chats have in common."""

    model: Name | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = False
    return_tokens_as_token_ids: bool | None = False
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = Field(default=None, ge=1)
    request_id: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    response_format: dict[str, Any] | None = None
    # These change nothing here:
    user: str | None = None
    priority: int | None = None
    cache_salt: str | None = None
    session_id: str | None = None
    store: bool | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class Completion(Request):
    """The body of `/v1/completions`."""

    prompt: Texts | Ids | Annotated[list[Ids], Field(fail_fast=True)]
    echo: bool | None = False
    logprobs: int | None = Field(default=None, ge=0, le=ALTERNATIVES)
    best_of: int | None = None
    suffix: str | None = None


class ChatRequest(Request):
    """The body of `/v1/chat/completions`."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=0)
    logprobs: bool | None = False
    top_logprobs: int | None = Field(default=None, ge=0, le=ALTERNATIVES)
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = True
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    reasoning_effort: str | None = None
    modalities: list[str] | None = None


class GenerateSampling(Sampling):
    """`sampling_params` of `/inference/v1/generate`."""

    logprobs: int | None = Field(default=None, ge=0, le=ALTERNATIVES)
    detokenize: bool = True
    output_kind: Any = None


class Generate(Fields):
    """The body of `/inference/v1/generate`, ids in and ids out."""

    token_ids: Ids = Field(min_length=1)
    sampling_params: GenerateSampling = GenerateSampling()
    model: Name | None = None
    request_id: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    return_token_ids: bool | None = None
    output_mode: Literal["tokens", "text"] = "tokens"
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    priority: int | None = None


class Tokenize(Fields):
    """The body of `/tokenize`."""

    model: Name | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = False


class Detokenize(Fields):
    """The body of `/detokenize`."""

    model: Name | None = None
    tokens: Ids


class Score(Fields):
    """The body of `/score`."""

    model: Name | None = None
    rows: list[dict[str, Any]] | None = Field(default=None, max_length=MOST_ROWS)
    chat: bool = False
    """Whether prompts that are texts are a user's turn, and their completions replies."""
    text_1: Texts | None = None
    text_2: Texts | None = None
    queries: Texts | None = None
    documents: Texts | None = None
    items: Texts | None = None
    data_1: Texts | None = None
    data_2: Texts | None = None
    user: str | None = None
    priority: int | None = None
    encoding_format: str | None = None


class Classify(Fields):
    """The body of `/classify`."""

    model: Name | None = None
    input: Texts | Ids | Annotated[list[Ids], Field(fail_fast=True)] | list[list[dict[str, Any]]] | None = (
        None
    )
    messages: list[dict[str, Any]] | None = None
    use_activation: bool | None = None
    activation: bool | None = None
    user: str | None = None
    priority: int | None = None


NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "logit_bias": (None, {}),
    "min_tokens": (None, 0),
    "spaces_between_special_tokens": (True,),
    "use_beam_search": (False,),
    "length_penalty": (None, 1),
    "logprob_token_ids": (None, []),
    "allowed_token_ids": (None, []),
    "bad_words": (None, []),
    "structured_outputs": (None, {}),
    "suffix": (None, ""),
    "modalities": (None, ["text"]),
    "response_format": (None, {"type": "text"}),
}
"""{field that has no effect here: the values that ask for none}."""


def read(kind: type[Body], content: bytes) -> Body:
    """Read a body. Raises BadRequest that names every field at fault."""
    try:
        data = json.loads(content, parse_constant=_refuse_constant)
    except RecursionError:
        raise BadRequest("the body is nested too deeply") from None
    except ValueError as error:
        raise BadRequest(f"the body is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise BadRequest("the body must be a JSON object")
    problem = next((found for text in texts_in(data) if (found := text_problem(text))), None)
    if problem:
        raise BadRequest(f"a text of the body {problem}")
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise _refusal(kind, error) from None
    except RecursionError:
        raise BadRequest("the body is nested too deeply") from None


def _refusal(kind: type[BaseModel], error: ValidationError) -> BadRequest:
    lines: dict[str, str] = {}
    found = error.errors(include_url=False, include_context=False)
    # A field of several types has the problems that it has as each of them: the one that it was meant as fits best.
    best: dict[Any, tuple[bool, int]] = {}
    for each in found:
        field = each["loc"][:1]
        best[field] = max(_fit(each), best.get(field, (False, 0)))
    for each in found:
        fit = _fit(each)
        best_fit = best[each["loc"][:1]]
        both_of_the_type = fit[0] and best_fit[0]
        if fit != best_fit and not both_of_the_type:
            continue
        if each["type"] == "extra_forbidden":
            # A field that the client made up may look like a branch, and is none.
            *within, own = each["loc"]
            path = [*_fields_of(within), str(own)]
            line = f"there is no such field.{suggest(path[-1], kind.model_fields)}"
        elif each["type"] == "missing":
            path = _fields_of(each["loc"])
            line = "missing"
        else:
            path = _fields_of(each["loc"])
            line = str(each["msg"])
            given = each["input"]
            if isinstance(given, str | int | float | bool | None):
                line += f"; it is {json.dumps(given)[:80]}"
        lines.setdefault(".".join(path) or "the body", line)
    names = list(lines)
    shown = [f"{name}: {lines[name]}" for name in names[:5]]
    return BadRequest("; ".join(shown), param=names[0].split(".")[0])


def _fields_of(location: Iterable[str | int]) -> list[str]:
    """List the fields and indices of a problem's location, without the types of unions in it."""
    return [str(part) for part in location if isinstance(part, int) or not _is_branch(part)]


def _fit(error: Any) -> tuple[bool, int]:
    """Rank a problem by how well the value fits the type: whether it is of the type, and how deep the fault lies."""
    return not error["type"].endswith("_type"), len(error["loc"])


def require_short(texts: Iterable[str], length: int | None, name: str) -> None:
    """Raise BadRequest where texts are much longer together than the model's context can hold.

    length: tokens of the context; None: any number. Tokenizing takes 100 bytes of memory a character, and a text of any
    length may be one token.
    """
    if length is None:
        return
    most = max(MOST_CHARACTERS, CHARACTERS_OF_A_TOKEN * length)
    count = sum(map(len, texts))
    if count > most:
        raise BadRequest(
            f"{name}: {count:,} characters are too many for a context of {length:,} tokens; at most {most:,} are read",
            param=name.partition(".")[0],
            status=413,
        )


def _is_branch(part: str) -> bool:
    """Tell the name of a type in a union from the name of a field."""
    return "[" in part or part in ("str", "int", "float", "constrained-str", "constrained-int")


def refuse_ignored(body: BaseModel) -> None:
    """Raise BadRequest for a field that would have no effect, and asks for one."""
    for name, neutral in NEUTRAL.items():
        value = getattr(body, name, neutral[0])
        if value not in neutral:
            raise BadRequest(
                f"{name}: {json.dumps(value)[:80]} is not supported; leave the field out", param=name
            )


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


def texts_in(value: Any) -> Iterator[str]:
    """Yield every text in a JSON value, however deep it is nested."""
    pending = [value]
    while pending:
        each = pending.pop()
        if isinstance(each, str):
            yield each
        elif isinstance(each, dict):
            pending += each.keys()
            pending += each.values()
        elif isinstance(each, list) and not (each and isinstance(each[0], int)):
            pending += each
