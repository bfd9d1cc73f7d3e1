"""The registry of named components: kinds are open, a name has one owner, and a misspelt name gets a suggestion."""

from __future__ import annotations

import importlib
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, Literal, NamedTuple, TypeVar

from pluggy import HookImpl
from pydantic.fields import FieldInfo

from rlhf_core.config.translation import Answer
from rlhf_core.contracts import ATTENTION, EXPERTS, KINDS, LOGGER, MODEL, REWARD, TRAINER, Kind
from rlhf_core.errors import InputError, error_line, suggest
from rlhf_core.plugins.component import (
    HERE,
    RegistryEntry,
    load_function,
    make_entry,
    qualified_name,
)

T = TypeVar("T")
REWARDS = ("exact_match", "length", "math_verify", "numeric_answer", "regex", "repetition", "soft_overlong")
FAMILIES = ("gemma4", "lfm2", "lfm2_moe", "qwen3_5", "qwen3_5_moe")
TRAINERS = ("sft", "reward", "grpo", "dpo", "kto", "distill")
DISTRIBUTED: dict[tuple[Kind[Any], str], str] = {(TRAINER, name): f"rlhf-{name}" for name in TRAINERS}
DISTRIBUTED |= {(TRAINER, "online_dpo"): "rlhf-dpo"}
DISTRIBUTED |= {(REWARD, name): "rlhf-rewards" for name in REWARDS}
DISTRIBUTED |= {(REWARD, name): "rlhf-remote" for name in ("http", "judge")}
DISTRIBUTED |= {(kind, "pallas"): "rlhf-kernels" for kind in (ATTENTION, EXPERTS)}
DISTRIBUTED |= {(MODEL, name): "rlhf-families" for name in FAMILIES}
DISTRIBUTED |= {
    (LOGGER, name): f"rlhf-trackers[{name}]" for name in ("wandb", "tensorboard", "trackio", "mlflow")
}
"""{(kind, name): the distribution that has it, with its extra}, of those that are released together with this one."""


@dataclass(frozen=True)
class PluginInfo:
    """One plugin, as `rlhf plugins` lists it.

    name: of its entry point, file or object; of a distribution without hooks, its name without "rlhf-".
    distribution, version: None if it is not installed.
    error: why it failed, and what to do. components: {kind: [names]}.
    """

    name: str
    distribution: str | None
    version: str | None
    state: Literal["loaded", "failed", "disabled"]
    error: str | None = None
    components: Mapping[str, list[str]] = field(default_factory=dict)


class CollisionError(InputError):
    """A name that two owners registered for one kind, by the kind's name."""

    def __init__(self, kind: str, name: str, message: str) -> None:
        super().__init__(message)
        self.kind, self.name = kind, name


class NamedComponent(NamedTuple):
    """A component, or a kind, that has not been asked for: the text that names it, and who registered it."""

    thing: str
    owner: str

    def load(self, what: str) -> Any:
        """Import what the text names. Raises InputError, which begins with `what`, if it cannot be."""
        home, _, attribute = self.thing.partition(":")
        try:
            return getattr(importlib.import_module(home), attribute)
        except Exception as error:
            raise InputError(
                f"{what} (from {self.owner}) failed to load: it {error_line(error, HERE)}"
            ) from error


class Registry:
    """The named components that plugins add and trainers get.

    failures: plugins that could not be loaded, whose errors are quoted when a name is missing.
    disabled: names of plugins left out on request, which are mentioned then too.
    translators: of the plugins that have the hook `rlhf_translate`, (their distribution, the implementation).
    """

    def __init__(self) -> None:
        self._kinds: dict[str, Kind[Any] | NamedComponent] = {kind.name: kind for kind in KINDS}
        self._entries: dict[str, dict[str, RegistryEntry | NamedComponent]] = {}
        self._contested: dict[tuple[str, str], str] = {}
        self._owner: str | None = None
        self.translators: list[tuple[str, HookImpl]] = []
        self.failures: list[PluginInfo] = []
        self.disabled: list[str] = []

    def add(self, kind: Kind[T], name: str, thing: T | Callable[..., T] | str) -> None:
        """Register a component.

        thing: a dataclass, whose fields are its options (frozen for losses and advantages); a function, whose options
        are its keyword parameters with defaults, other than the call's own arguments; or a finished object, such as a
        `Trainer`. For kinds with `factory`, a class or function that makes the component. A text names any of these,
        "package.module:name": it is imported when the component is first asked for, so that listing names is fast.
        An option called `name` can only be given from Python: in a file `name` is the component's.
        Raises InputError if the name is taken, naming both owners, or if the thing cannot be of that kind.
        """
        if not isinstance(kind, Kind):
            raise InputError(
                f"registry.add({kind!r}, …): that is not a kind; import one, such as rlhf_core.REWARD"
            )
        if self._find_kind(kind.name) not in (None, kind):
            raise InputError(
                f"{kind.name} '{name}' ({qualified_name(thing)}): another kind is called '{kind.name}' too; "
                "rename one of the kinds"
            )
        self._kinds[kind.name] = kind
        if isinstance(thing, str):
            self.add_named(kind.name, name, thing)
        else:
            entry = make_entry(kind, name, thing, self._owner or qualified_name(thing))
            self._keep(kind.name, name, entry)

    def add_named(self, kind: str, name: str, text: str) -> None:
        """Register what a text names, "package.module:name", for the kind of that name.

        Raises InputError if the name is taken, naming both owners, or if the text is none.
        """
        self._keep(kind, name, self._named(f"{kind} '{name}'", text))

    def declare(self, kind: str, text: str) -> None:
        """Say which object the kind of that name is, "package.module:KIND"; it is imported where the kind is needed.

        Raises InputError if core or another distribution has a kind of this name, and if the text names none.
        """
        named = self._named(f"kind '{kind}'", text)
        known = self._kinds.get(kind)
        if known in KINDS or isinstance(known, NamedComponent):
            of = f" of {known.owner}" if isinstance(known, NamedComponent) else ""
            raise InputError(f"another kind{of} is called '{kind}' too; rename one of the kinds")
        # Where a hook that was called before has added to the kind, its name is there already.
        self._kinds.setdefault(kind, named)

    def _named(self, what: str, text: str) -> NamedComponent:
        home, _, attribute = text.partition(":")
        if not all(part.isidentifier() for part in (*home.split("."), attribute)):
            raise InputError(f"{what}: '{text}' is not module:name, such as my_package.losses:MyLoss")
        return NamedComponent(text, self._owner or qualified_name(text))

    def _keep(self, kind: str, name: str, entry: RegistryEntry | NamedComponent) -> None:
        if not name or ":" in name:
            raise InputError(
                f"{kind} '{name}' ({qualified_name(entry.thing)}): a name must not be empty or contain ':'"
            )
        entries = self._entries.setdefault(kind, {})
        first = entries.get(name)
        if first is not None:
            raise CollisionError(
                kind,
                name,
                f"{kind} '{name}' is registered twice: {qualified_name(first.thing)} by {first.owner}, and "
                f"{qualified_name(entry.thing)} by {entry.owner}. Rename one, or disable a plugin with "
                "RLHF_DISABLE_PLUGINS=NAME",
            )
        entries[name] = entry

    def _find_kind(self, name: str) -> Kind[Any] | None:
        """Find the kind of that name, and import it if a distribution declares it; None if nobody does."""
        kind = self._kinds.get(name)
        if not isinstance(kind, NamedComponent):
            return kind
        found = kind.load(f"kind '{name}'")
        if not isinstance(found, Kind) or found.name != name:
            raise InputError(f"kind '{name}' (from {kind.owner}): {kind.thing} is not a kind of this name")
        self._kinds[name] = found
        return found

    def _entries_of(self, kind: Kind[Any]) -> dict[str, RegistryEntry | NamedComponent]:
        """Return {name: what is registered} of a kind. Raises InputError if its name stands for another kind."""
        if self._find_kind(kind.name) not in (None, kind):
            raise InputError(f"another kind is called '{kind.name}' too; rename one of the kinds")
        return self._entries.get(kind.name, {})

    def get(self, kind: Kind[T], name: str, /, **options: Any) -> T:
        """Make the component of that name with the options.

        For kinds with `by_path` it may be `module:function` or `file.py:function`, relative to the current directory.
        Raises InputError for an unknown name or option.
        """
        component: T = self._entry(kind, name).make(options)
        return component

    def make(self, kind: Kind[T], name: str, values: Mapping[str, Any], /) -> T:
        """Make the component of values that come from Python: a number may be NumPy's, or traced.

        Raises InputError for an unknown name, and for what the component refuses.
        """
        component: T = self._entry(kind, name).make_of(values)
        return component

    def check(
        self, kind: Kind[Any], name: str, options: Mapping[str, Any], /, *, also: Sequence[str] = ()
    ) -> list[tuple[str, str]]:
        """List what `get` would object to, as (dotted path below the component, message).

        also: names that the trainer takes in the same table, which a misspelt option may mean.
        """
        try:
            entry = self._entry(kind, name)
        except InputError as error:
            return [("name", message) for message in error.problems]
        return [(problem.path, problem.message) for problem in entry.check(options, also)]

    def translate(
        self, config_class: type[Any], unknown: Mapping[str, Any], given: Mapping[str, Any], base: Any, /
    ) -> dict[str, Answer] | None:
        """Ask every plugin that has the hook `rlhf_translate`; None: there is none.

        Raises InputError for a key that two plugins answer for, naming both, and for a plugin that raises.
        """
        if not self.translators:
            return None
        answers: dict[str, Answer] = {}
        owners: dict[str, str] = {}
        arguments = {"config_class": config_class, "unknown": unknown, "given": given, "base": base}
        for owner, hook in self.translators:
            try:
                found: Any = hook.function(*(arguments[name] for name in hook.argnames))
            except InputError:
                raise
            except Exception as error:
                raise InputError(f"plugin {owner}: rlhf_translate {error_line(error, HERE)}") from error
            for key, answer in (found or {}).items():
                if key in owners:
                    raise InputError(f"{key}: {owners[key]} and {owner} both translate it; uninstall one")
                answers[key] = answer
                owners[key] = owner
        return answers

    def option_field(self, kind: Kind[Any], name: str, option: str) -> FieldInfo | None:
        """Return the declaration of an option of a component; None if there is no such component or option."""
        try:
            models = self._entry(kind, name).options or {}
        except InputError:
            return None
        return models[option].model_fields["value"] if option in models else None

    def secret_options(self, kind: Kind[Any], name: str, /) -> frozenset[str]:
        """Return the options of a component that hold a SecretStr; none for a name that is not registered."""
        try:
            return self._entry(kind, name).secrets
        except InputError:
            return frozenset()

    def options(self, kind: Kind[Any], name: str) -> list[str]:
        """Return the options of a component, sorted. Raises InputError for an unknown name."""
        return sorted(self._entry(kind, name).options or {})

    def names(self, kind: Kind[Any]) -> list[str]:
        """List every registered name of a kind, sorted."""
        return sorted(self._entries_of(kind))

    def kinds(self) -> list[Kind[Any]]:
        """List every kind that has a component, sorted by name."""
        kinds = (self._find_kind(name) for name in sorted(self._entries) if self._entries[name])
        return [kind for kind in kinds if kind is not None]

    def owner(self, kind: Kind[Any], name: str) -> str:
        """Describe the owner that registered a name. Raises InputError for an unknown name."""
        return self._entry(kind, name).owner

    def source(self, kind: Kind[Any], name: str) -> tuple[Any, str]:
        """Return what was registered under a name, and its owner. Raises InputError for an unknown name."""
        entry = self._entry(kind, name)
        return entry.thing, entry.owner

    def components_of(self, owner: str) -> dict[str, list[str]]:
        """Collect {kind: [names]} that one owner registered."""
        names_by_kind = {
            kind: [name for name, entry in sorted(entries.items()) if entry.owner == owner]
            for kind, entries in sorted(self._entries.items())
        }
        return {kind: names for kind, names in names_by_kind.items() if names}

    @contextmanager
    def transaction(self, owner: str) -> Iterator[None]:
        """Register everything added inside under `owner`; if anything raises, undo all of it."""
        kinds = dict(self._kinds)
        entries = {kind: dict(named) for kind, named in self._entries.items()}
        outer, self._owner = self._owner, owner
        try:
            yield
        except BaseException:
            self._kinds = kinds
            self._entries = entries
            raise
        finally:
            self._owner = outer

    def contest(self, collision: CollisionError) -> None:
        """Make using a name that two plugins claim an error, so that the order of loading decides nothing."""
        self._contested[collision.kind, collision.name] = str(collision)

    def _entry(self, kind: Kind[Any], name: str) -> RegistryEntry:
        if (kind.name, name) in self._contested:
            raise InputError(self._contested[kind.name, name])
        entries = self._entries_of(kind)
        if name in entries:
            entry = entries[name]
            if isinstance(entry, NamedComponent):
                thing = entry.load(f"{kind.name} '{name}'")
                entry = entries[name] = make_entry(kind, name, thing, entry.owner)
            return entry
        if kind.by_path and ":" in name:
            return make_entry(kind, name, load_function(name), name)
        raise InputError(self._explain_missing(kind, name))

    def _explain_missing(self, kind: Kind[Any], name: str) -> str:
        installed = self.names(kind)
        # Short names of methods are alike by chance, so a trainer is suggested only for a very close name.
        alike = kind != TRAINER or get_close_matches(name, installed, n=1, cutoff=0.7)
        hint = suggest(name, installed) if alike else ""
        message = f"no {kind.name} named '{name}'.{hint}"
        message += f" Installed: {', '.join(installed)}." if installed else f" No {kind.name} is installed."
        elsewhere = [other for other, entries in sorted(self._entries.items()) if name in entries]
        if elsewhere:
            message += f" '{name}' is of another kind: {', '.join(elsewhere)}."
        message += _path_hint(kind, name)
        is_path = ":" in name or name.endswith(".py")
        if not (hint or elsewhere or is_path or self.failures or self.disabled):
            message += (
                f" Install the package that has it{_pip_line(kind, name)}, or give its file with --plugin."
            )
        if self.disabled:
            message += f" Left out by RLHF_DISABLE_PLUGINS: {', '.join(self.disabled)}."
        return " ".join([message, *(str(plugin.error) for plugin in self.failures)])


def _path_hint(kind: Kind[Any], name: str) -> str:
    """Say how a component of the user's own is named, or that components of this kind have no path."""
    if kind.by_path:
        article = "An" if kind.name[0] in "aeiou" else "A"
        hint = f" {article} {kind.name} of yours is module:name or file.py:name."
        return hint + (f" Write {name}:NAME." if name.endswith(".py") else "")
    if ":" in name or name.endswith(".py"):
        return f" Give the name under which a file registers its {kind.name}, and that file with --plugin."
    return ""


def _pip_line(kind: Kind[Any], name: str) -> str:
    """Return how to install the distribution of ours that has a component; empty for one that none has."""
    distribution = DISTRIBUTED.get((kind, name))
    return "" if distribution is None else f" (pip install {shlex.quote(distribution)})"
