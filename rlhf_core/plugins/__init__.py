"""Load plugins: installed distributions by entry point, files that are not installed, and objects."""

from __future__ import annotations

import inspect
import os
import re
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pluggy
from packaging.requirements import InvalidRequirement, Requirement

from rlhf_core.config.translation import set_installed
from rlhf_core.errors import InputError, error_line, suggest, warn
from rlhf_core.hidden import scrub
from rlhf_core.plugins import hooks
from rlhf_core.plugins.component import HERE, load_file
from rlhf_core.plugins.hooks import hookimpl as hookimpl
from rlhf_core.plugins.registry import CollisionError, Registry
from rlhf_core.plugins.registry import PluginInfo as PluginInfo
from rlhf_core.runtime import distributions
from rlhf_core.runtime.caches import cached
from rlhf_core.runtime.distributions import GROUP, find_distribution, owner

DISABLE = "RLHF_DISABLE_PLUGINS"
HOOKS = tuple(name for name in vars(hooks) if name.startswith("rlhf_"))


class PluginWarning(UserWarning):
    """Warns of a plugin that could not be loaded; everything else works."""


@dataclass(frozen=True)
class Host:
    """The loaded plugins. pm: calls their hooks; registry: their components; plugins: all of them, even failed ones."""

    pm: pluggy.PluginManager
    registry: Registry
    plugins: list[PluginInfo]

    @property
    def hook(self) -> Any:
        """`host.hook.rlhf_step_end(stage=..., step=..., metrics=...)` calls every implementation."""
        return self.pm.hook


def empty_host() -> Host:
    """Make a host without any plugin."""
    host = Host(pluggy.PluginManager("rlhf"), Registry(), [])
    host.pm.add_hookspecs(hooks)
    host.pm.hook.rlhf_register.call_historic(kwargs={"registry": host.registry})
    return host


def load(*, files: Sequence[Path] = (), objects: Sequence[object] = ()) -> Host:
    """Load every installed plugin, then the files, then the objects.

    Warns of an installed plugin that fails, which then registers nothing; raises InputError for a file or object that
    fails, since someone asked for it. The environment variable RLHF_DISABLE_PLUGINS lists plugins to leave out, by
    entry point or distribution, separated by commas.
    """
    host = empty_host()
    points = sorted(distributions.find_points(GROUP), key=lambda p: (p.name, owner(p)))
    disabled = {_canonical(name) for name in os.environ.get(DISABLE, "").split(",") if name.strip()}
    known = {name for point in points for name in _names_of(point)}
    for name in sorted(disabled - known):
        warn(f"{DISABLE}: no plugin is called '{name}'.{suggest(name, known)}", PluginWarning)
    for point in points:
        info = _info(point, "disabled") if _names_of(point) & disabled else _load_point(host, point, points)
        if info.state == "failed":
            warn(str(info.error), PluginWarning)
        if info.state == "disabled":
            host.registry.disabled.append(info.name)
        host.plugins.append(info)
    for file in files:
        _load_object(host, load_file(Path(file)), str(file))
    for thing in objects:
        _load_object(host, thing, getattr(thing, "__name__", type(thing).__name__))
    return host


def installed_registry() -> Registry:
    """Load every installed plugin, for callers without a registry; return their components.

    They are loaded once until the next run, and again where RLHF_DISABLE_PLUGINS changes.
    """
    return _installed(os.environ.get(DISABLE, ""))


@cached
def _installed(disabled: str) -> Registry:
    return load().registry


set_installed(installed_registry)


def _load_object(host: Host, plugin: object, name: str) -> None:
    try:
        _register(host, plugin, name, None)
    except CollisionError:
        raise
    except InputError as error:
        raise InputError(*(f"plugin {name}: {problem}" for problem in error.problems)) from error
    except Exception as error:
        raise InputError(f"plugin {name}: {error_line(error, HERE)}") from error
    components = host.registry.components_of(name)
    host.plugins.append(PluginInfo(name, None, None, "loaded", components=components))


def _load_point(host: Host, point: EntryPoint, points: Sequence[EntryPoint]) -> PluginInfo:
    try:
        rivals = sorted(owner(other) for other in points if other.name == point.name)
        if len(rivals) > 1:
            raise InputError(f"{' and '.join(rivals)} both have an entry point '{point.name}'; uninstall one")
        _check_pin(point)
        _register(host, point.load(), owner(point), point.name)
    except (Exception, SystemExit) as error:
        if isinstance(error, CollisionError):
            host.registry.contest(error)
        problems = error.problems if isinstance(error, InputError) else [f"it {error_line(error, HERE)}"]
        message = (
            f"plugin '{point.name}' (from {owner(point)}) failed to load: {'; '.join(problems).rstrip('.')}. "
            f"Uninstall it or set {DISABLE}={point.name}."
        )
        info = _info(point, "failed", error=scrub(message))
        host.registry.failures.append(info)
        return info
    return _info(point, "loaded", components=host.registry.components_of(owner(point)))


def _register(host: Host, plugin: object, owner: str, name: str | None) -> None:
    """Hand a plugin to pluggy, which calls its `rlhf_register`; undo everything if that fails."""
    require_hooks(host.pm, plugin)
    try:
        with host.registry.transaction(owner):
            # Named for messages; pluggy's default is a number.
            host.pm.register(plugin, name=name or (None if host.pm.has_plugin(owner) else owner))
        for implementation in host.hook.rlhf_translate.get_hookimpls():
            if implementation.plugin is plugin:
                host.registry.translators.append((owner, _by_name(implementation)))
    except BaseException:
        for registered, known in host.pm.list_name_plugin():
            if known is plugin:
                host.pm.unregister(name=registered)
        raise


def _by_name(implementation: pluggy.HookImpl) -> Callable[..., Any]:
    """Make an implementation, which may take fewer arguments, take all of its hook's by name."""

    def call(**arguments: Any) -> Any:
        return implementation.function(*[arguments[name] for name in implementation.argnames])

    return call


def require_hooks(pm: pluggy.PluginManager, plugin: object) -> None:
    """Raise InputError for what pluggy would ignore silently: no hook, an undecorated one or an unknown one."""
    hooks_found, problems = 0, []
    for name in list(vars(plugin)) if isinstance(plugin, types.ModuleType) else dir(plugin):
        options = pm.parse_hookimpl_opts(plugin, name)
        if options is not None:
            hooks_found += 1
            hook = options.get("specname") or name
            if hook not in HOOKS and not options.get("optionalhook"):
                problems.append(f"unknown hook '{hook}'.{suggest(hook, HOOKS)} Hooks: {', '.join(HOOKS)}")
            elif hook in HOOKS:
                problems += unknown_arguments(hook, getattr(plugin, name))
        elif name.startswith("rlhf_") and inspect.isroutine(getattr(plugin, name)):
            problems.append(
                f"{name} would never be called, since it has no @hookimpl; add it or rename {name}"
            )
    if not hooks_found and not problems:
        problems.append("it has no hook; define rlhf_register(registry) with @hookimpl")
    if problems:
        raise InputError(*problems)


def unknown_arguments(hook: str, implementation: Callable[..., object]) -> list[str]:
    """Describe the arguments of an implementation that its hook is not called with."""
    known = list(inspect.signature(getattr(hooks, hook)).parameters)
    asked = inspect.signature(implementation).parameters.values()
    return [
        f"{hook} is not called with '{each.name}'.{suggest(each.name, known)} Its arguments: {', '.join(known)}"
        for each in asked
        if each.name not in known and each.default is each.empty
    ]


def _check_pin(point: EntryPoint) -> None:
    """Raise InputError for a distribution that requires another version of rlhf-core."""
    from rlhf_core import __version__

    for text in (point.dist.requires if point.dist else None) or ():
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue  # not about rlhf-core, and pip's to judge
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if _canonical(requirement.name) != "rlhf-core" or not applies:
            continue
        if not requirement.specifier.contains(__version__, prereleases=True):
            raise InputError(
                f"it needs rlhf-core {requirement.specifier}, and {__version__} is installed; "
                "install versions that fit"
            )


def _names_of(point: EntryPoint) -> set[str]:
    """Collect the names under which a plugin can be disabled."""
    dist = find_distribution(point)
    return {_canonical(point.name)} | ({_canonical(dist.name)} if dist else set())


def _info(point: EntryPoint, state: Any, **rest: Any) -> PluginInfo:
    dist = find_distribution(point)
    return PluginInfo(point.name, dist.name if dist else None, dist.version if dist else None, state, **rest)


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name.strip()).lower()
