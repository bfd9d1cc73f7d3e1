"""Load plugins: installed distributions by entry point, files that are not installed, and objects.

    [project.entry-points."rlhf.policy_loss"]
    tanh = "my_package.losses:Tanh"

registers a component of the kind "policy loss": the group is `rlhf.` and the kind's name, with underscores. Its module
is imported when it is first asked for. The group `rlhf` has modules and objects with hooks, which are imported here.
"""

from __future__ import annotations

import inspect
import os
import types
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pluggy
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from rlhf_core.contracts import KINDS
from rlhf_core.errors import InputError, error_line, suggest, warn
from rlhf_core.hidden import scrub
from rlhf_core.plugins import hooks
from rlhf_core.plugins.component import HERE, load_file
from rlhf_core.plugins.hooks import hookimpl as hookimpl
from rlhf_core.plugins.registry import CollisionError, Registry
from rlhf_core.plugins.registry import PluginInfo as PluginInfo
from rlhf_core.runtime import distributions
from rlhf_core.runtime.caches import cached
from rlhf_core.runtime.distributions import Installed, find_distribution, owner

DISABLE = "RLHF_DISABLE_PLUGINS"
HOOKS = tuple(name for name in vars(hooks) if name.startswith("rlhf_"))
KIND = "rlhf.kind"
"""The group of entry points that name a distribution's own kinds, `dpo_loss = "rlhf_dpo:DPO_LOSS"`."""


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


@dataclass(frozen=True)
class _Plugin:
    """An installed plugin: the entry point of a distribution with hooks, its entry points of components, or both.

    name: of the entry point with hooks; without one, the distribution's without "rlhf-".
    distribution: None where it has lost its metadata. owner: the distribution, for messages.
    """

    name: str
    distribution: Installed | None
    owner: str
    components: Sequence[EntryPoint]
    hooks: EntryPoint | None = None

    def names(self) -> set[str]:
        """Collect the names under which it can be disabled."""
        names = [self.name, *([self.distribution.name] if self.distribution else ())]
        return {canonicalize_name(name) for name in names}

    def info(self, state: Any, **rest: Any) -> PluginInfo:
        name, version = self.distribution or (None, None)
        return PluginInfo(self.name, name, version, state, **rest)


def load(*, files: Sequence[Path] = (), objects: Sequence[object] = ()) -> Host:
    """Load every installed plugin, then the files, then the objects.

    Warns of an installed plugin that fails, which then registers nothing; raises InputError for a file or object that
    fails, since someone asked for it. The environment variable RLHF_DISABLE_PLUGINS lists plugins to leave out, by
    name or distribution, separated by commas.
    """
    host = empty_host()
    plugins = _find_plugins()
    disabled = {
        canonicalize_name(name.strip()) for name in os.environ.get(DISABLE, "").split(",") if name.strip()
    }
    known = {name for plugin in plugins for name in plugin.names()}
    for name in sorted(disabled - known):
        warn(f"{DISABLE}: no plugin is called '{name}'.{suggest(name, known)}", PluginWarning)
    kinds = {kind.name for kind in KINDS}
    kinds |= {_words(point.name) for plugin in plugins for point in plugin.components if point.group == KIND}
    for plugin in plugins:
        if plugin.names() & disabled:
            info = plugin.info("disabled")
            host.registry.disabled.append(info.name)
        else:
            info = _load_plugin(host, plugin, plugins, kinds)
        if info.state == "failed":
            warn(str(info.error), PluginWarning)
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


def _find_plugins() -> list[_Plugin]:
    """Find the installed plugins, sorted by name. A distribution has one for each entry point with hooks."""
    plugins = []
    points = sorted(distributions.plugin_points(), key=lambda point: point.name)
    for dist in dict.fromkeys(point.dist for point in points):
        own = [point for point in points if point.dist is dist]
        installed = find_distribution(own[0])
        components = [point for point in own if point.group != distributions.HOOKS]
        for point in own:
            if point.group == distributions.HOOKS:
                plugins.append(_Plugin(point.name, installed, owner(point), components, point))
                components = []
        if components:
            of = owner(components[0])
            name = installed.name.removeprefix("rlhf-") if installed else of
            plugins.append(_Plugin(name, installed, of, components))
    return sorted(plugins, key=lambda plugin: (plugin.name, plugin.owner))


def _load_plugin(
    host: Host, plugin: _Plugin, plugins: Sequence[_Plugin], kinds: Collection[str]
) -> PluginInfo:
    """Load all of an installed plugin, or nothing if it fails. kinds: names of all that there are."""
    registry = host.registry
    try:
        rivals = sorted(other.owner for other in plugins if other.hooks and other.name == plugin.name)
        if plugin.hooks and len(rivals) > 1:
            raise InputError(
                f"{' and '.join(rivals)} both have an entry point '{plugin.name}'; uninstall one"
            )
        _check_pin(plugin.hooks or plugin.components[0])
        with registry.transaction(plugin.owner):
            for point in plugin.components:
                _add_component(registry, point, kinds)
            if plugin.hooks:
                _register(host, plugin.hooks.load(), plugin.owner, plugin.name)
    except (Exception, SystemExit) as error:
        if isinstance(error, CollisionError):
            registry.contest(error)
        problems = error.problems if isinstance(error, InputError) else [f"it {error_line(error, HERE)}"]
        message = (
            f"plugin '{plugin.name}' (from {plugin.owner}) failed to load: {'; '.join(problems).rstrip('.')}. "
            f"Uninstall it or set {DISABLE}={plugin.name}."
        )
        info = plugin.info("failed", error=scrub(message))
        registry.failures.append(info)
        return info
    return plugin.info("loaded", components=registry.components_of(plugin.owner))


def _add_component(registry: Registry, point: EntryPoint, kinds: Collection[str]) -> None:
    """Register the component or kind that an entry point names, which is not imported."""
    if point.group == KIND:
        registry.declare(_words(point.name), point.value)
        return
    kind = _words(point.group.removeprefix(f"{distributions.HOOKS}."))
    if kind not in kinds:
        raise InputError(
            f"it has entry points '{point.group}', and no kind is called '{kind}'.{suggest(kind, kinds)} "
            f"Kinds: {', '.join(sorted(kinds))}. A package names a kind of its own in the group '{KIND}'"
        )
    registry.add_named(kind, point.name, point.value)


def _words(name: str) -> str:
    return name.replace("_", " ")


def _register(host: Host, plugin: object, owner: str, name: str | None) -> None:
    """Hand a plugin to pluggy, which calls its `rlhf_register`; undo everything if that fails."""
    require_hooks(host.pm, plugin)
    try:
        with host.registry.transaction(owner):
            # Named for messages; pluggy's default is a number.
            host.pm.register(plugin, name=name or (None if host.pm.has_plugin(owner) else owner))
        for implementation in host.hook.rlhf_translate.get_hookimpls():
            if implementation.plugin is plugin:
                host.registry.translators.append((owner, implementation))
    except BaseException:
        for registered, known in host.pm.list_name_plugin():
            if known is plugin:
                host.pm.unregister(name=registered)
        raise


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
        if canonicalize_name(requirement.name) != "rlhf-core" or not applies:
            continue
        if not requirement.specifier.contains(__version__, prereleases=True):
            raise InputError(
                f"it needs rlhf-core {requirement.specifier}, and {__version__} is installed; "
                "install versions that fit"
            )
