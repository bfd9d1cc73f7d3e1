"""Load and hash tokenizers, and encode single texts and conversations as `Encoder` does."""

from __future__ import annotations

import copy
import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlhf_core import hub
from rlhf_core.errors import (
    UNREADABLE,
    InputError,
    is_library_error,
    library_words,
    read_limited,
    suggest,
    suggest_model,
)
from rlhf_core.tokenizer.chat_template import templates_of
from rlhf_core.tokenizer.encoding import (
    PLAIN,
    Encoder,
    Message,
    Special,
    TextOptions,
    Turns,
    join,
    special_ids,
    template_text,
)
from rlhf_core.tokenizer.encoding import continuations as continuations
from rlhf_core.tokenizer.encoding import ids_without_token as ids_without_token

__all__ = [
    "PLAIN",
    "Encoder",
    "Message",
    "Special",
    "TextOptions",
    "Turns",
    "join",
    "load_tokenizer",
    "special_ids",
    "template_hash",
    "template_text",
    "tokenizer_hash",
    "with_template_and_stop_ids",
]


TOKENIZER_FILES = [
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
]
SMALL_FILES = (*TOKENIZER_FILES, "config.json", "generation_config.json")
"""Files of a model that a tokenizer and its special tokens are read from."""
PLAIN_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""Two names of the class that does what tokenizer.json says and no more."""


def load_tokenizer(source: str | Path) -> Any:
    """Load a transformers tokenizer from a local directory or the hub, without running code that comes with it.

    Raises InputError if there is neither, or if the directory has no tokenizer or one that does not work.
    """
    # Silences transformers' advice to install PyTorch, and tokenizers' warnings about forks.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    path = hub.fetch(str(source), SMALL_FILES) if hub.is_hub_name(source) else Path(source).expanduser()
    _require_tokenizer(path, source)
    is_here = path.is_dir()
    loader = _loader(path)
    unreachable = "" if is_here else _hub_problem(str(source))
    try:
        tokenizer = loader.from_pretrained(
            str(path if is_here else source),
            local_files_only=bool(unreachable),
            trust_remote_code=False,
        )
        _try_tokenizer(tokenizer)
    except BaseException as error:  # damaged files raise all kinds of errors
        if isinstance(error, InputError) or not is_library_error(error):
            raise
        if is_here:
            raise InputError(_load_problem(path, error)) from error
        reason = unreachable or (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise InputError(
            f"no tokenizer '{source}': no such directory, and not on the hub ({reason})."
            f"{_suggest_directory(path)} Without network access, download its files elsewhere and give their directory"
        ) from error
    return tokenizer


def _require_tokenizer(path: Path, source: str | Path) -> None:
    """Raise InputError for a path that is no directory of a tokenizer, unless the source may be a name on the hub."""
    if path.is_file():
        raise InputError(f"{source} is a file: give the directory that holds tokenizer.json")
    if path.is_dir():
        known = {"tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt"}
        if any((path / name).exists() for name in known):
            return
        below = suggest_model(path)
        if below:
            raise InputError(f"{source} is not a model directory.{below}")
        present = ", ".join(sorted(p.name for p in path.iterdir())[:8]) or "nothing"
        raise InputError(
            f"{source} has no tokenizer files; put tokenizer.json and tokenizer_config.json there "
            f"(it has {present})"
        )
    if not _is_hub_name(str(source)):
        where = "" if path.parent.is_dir() else f" ({path.parent} does not exist either)"
        raise InputError(f"no tokenizer at {source}: no such directory{where}.{_suggest_directory(path)}")


def _loader(path: Path) -> Any:
    """Return the class of transformers that loads the tokenizer of a directory, or of a name on the hub.

    `AutoTokenizer` finds it by the model's config.json, and its import, of what all families are called, takes 0.3 s.
    A tokenizer without a model that is of the plain class is loaded by that class.
    """
    import transformers

    if not (path / "config.json").exists() and (path / "tokenizer.json").exists():
        with suppress(*UNREADABLE):  # errors are raised where the file is needed
            config = json.loads(read_limited(path / "tokenizer_config.json"))
            if "auto_map" not in config and config["tokenizer_class"] in PLAIN_CLASSES:
                return transformers.PreTrainedTokenizerFast
    return transformers.AutoTokenizer


def _try_tokenizer(tokenizer: Any) -> None:
    """Use the tokenizer once, because some invalid files fail only then."""
    special = tokenizer.special_tokens_map
    odd = [name for name, token in special.items() if not isinstance(token, str)]
    if odd:
        raise ValueError(f"its {odd[0]} is not text")
    for name, text in templates_of(tokenizer).items():
        if not isinstance(name, str) or not isinstance(text, str):
            raise ValueError(f"its chat template {name!r} is not text")
    for text in (*special.values(), *templates_of(tokenizer).values()):
        text.encode()  # half a surrogate pair in JSON is a text that has no UTF-8
    ids = tokenizer(["a b"], add_special_tokens=True, verbose=False)["input_ids"][0]
    tokenizer.decode(ids)
    len(tokenizer)
    special_ids(tokenizer)


def _load_problem(path: Path, error: BaseException) -> str:
    for name in ("config.json", "tokenizer_config.json", "tokenizer.json"):
        try:
            content = json.loads((path / name).read_text(encoding="utf-8"))
        except OSError:
            continue
        except (ValueError, RecursionError) as damage:
            return f"{path / name} cannot be read: {library_words(damage)}; fetch it again"
        if not isinstance(content, dict):
            return f"{path / name} must hold a JSON object; fetch it again"
    if "trust_remote_code" in str(error):
        return (
            f"the tokenizer in {path} needs Python code that comes with it (auto_map), which is never run: use "
            "a tokenizer with a tokenizer.json, or convert it with transformers"
        )
    if type(error).__name__.startswith("StrictDataclass"):  # how transformers refuses a config.json
        return f"{path / 'config.json'}: {error.__cause__ or error}"
    reason = library_words(error)
    if not any((path / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        reason = "it has no tokenizer.json; put it there"
    return f"the tokenizer in {path} cannot be read: {reason}"


def _suggest_directory(path: Path) -> str:
    """Return ` Did you mean 'x'?` for a directory next to a missing one, or an empty string."""
    beside = [p.name for p in path.parent.iterdir() if p.is_dir()] if path.parent.is_dir() else []
    return suggest(path.name, beside)


def _is_hub_name(source: str) -> bool:
    owner, slash, name = source.partition("/")
    if source.startswith((".", "/", "~")) or "/" in name or (slash and not name):
        return False
    return not (slash and Path(owner).is_dir())


def _hub_problem(name: str) -> str:
    """Ask the hub for `name` once and describe its failure, if any; loading would retry for a minute."""
    from huggingface_hub import model_info

    try:
        model_info(name, timeout=10)
    except Exception as error:  # a cached copy may still load
        return str(error).strip().splitlines()[0]
    return ""


def with_template_and_stop_ids(tokenizer: Any, chat_template: str | None, model: Path | None) -> Any:
    """Give the tokenizer the chat template and the model's stop ids to use, so that both are saved with the model.

    chat_template: as in `template_text`; None keeps the tokenizer's own. model: a directory whose
    generation_config.json lists stop ids. Returns the tokenizer itself if nothing changes, else a copy.
    """
    changes: dict[str, Any] = {}
    if chat_template is not None:
        changes["chat_template"] = template_text(tokenizer, chat_template)
    if model is not None and (model / "generation_config.json").is_file():
        changes["name_or_path"] = str(model)  # where `special_ids` looks for generation_config.json
    if all(getattr(tokenizer, name, None) == value for name, value in changes.items()):
        return tokenizer
    tokenizer = copy.copy(tokenizer)
    for name, value in changes.items():
        setattr(tokenizer, name, value)
    return tokenizer


def tokenizer_hash(tokenizer: Any) -> str:
    """Hash all that affects token ids: vocabulary, merges, normalisation and special tokens (sha256)."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    content = json.loads(backend.to_str()) if backend is not None else dict(tokenizer.get_vocab())
    # Left behind by calls that pad or truncate.
    content.pop("padding", None)
    content.pop("truncation", None)
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    return hashlib.sha256(json.dumps([content, special], sort_keys=True).encode()).hexdigest()


def template_hash(tokenizer: Any, chat_template: str | None = None) -> str | None:
    """Hash the template, or all named templates if there are several (sha256); None if there is none."""
    named = templates_of(tokenizer) if chat_template is None else {}
    if set(named) - {"default"}:
        return hashlib.sha256(json.dumps(named, sort_keys=True).encode()).hexdigest()
    text = template_text(tokenizer, chat_template)
    return None if text is None else hashlib.sha256(text.encode()).hexdigest()
