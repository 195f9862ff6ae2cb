"""Who offers what: discovery of plugins, owners of names, and the errors of both.

Built-ins are found by module path, so that a bare checkout has them; third parties by the
entry-point group `outweigh`, or by `-p MODULE`, `-p FILE.py`. `-p no:NAME` blocks a plugin; the
environment variable OUTWEIGH_PLUGINS, where set, is the whole list of entry points to load (empty:
none).

A third party that does not load is kept aside with its reason. It stops nobody, unless `-p` asked
for it. A `Registry` is made for each composition and holds all of the state: two engines in one
process may differ in their plugins.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.metadata
import importlib.util
import inspect
import itertools
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pluggy

from core import hookspecs
from core.config import did_you_mean
from core.conform import bind as bind, fact_problems
from core.errors import UserError
from core.seams import API, PROJECT, SEAMS

BUILTIN = ("plugins.builtin",)
PREFIX = f"{PROJECT}_"
ENVIRONMENT = f"{PROJECT.upper()}_PLUGINS"


@dataclass(frozen=True)
class Owner:
    """Who stands behind a name. `distribution` is empty for a module or file given by `-p`."""

    name: str
    distribution: str
    version: str
    origin: str
    builtin: bool = False

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}" if self.distribution else self.origin


@dataclass(frozen=True)
class Offer:
    """One name of one seam. `target` is a class, or "package.module:Class" to import on use."""

    seam: str
    name: str
    target: type | str
    owner: Owner

    def load(self) -> type:
        """The class, its API number and facts checked. Raises UserError with the reason."""
        who = f"{self.seam} '{self.name}' of {self.owner}"
        try:
            offer = _resolve(self.target) if isinstance(self.target, str) else self.target
        except (Exception, SystemExit) as error:
            raise UserError(
                f"{who} cannot be loaded: {_reason(error)}; repair it or choose another {self.seam}"
            ) from error
        api = getattr(offer, "api", API[self.seam])
        if api != API[self.seam]:
            raise UserError(
                f"{who} was written for {self.seam} API {api}, this is API {API[self.seam]}; "
                f"install a version of it made for API {API[self.seam]}"
            )
        if problems := fact_problems(self.seam, offer):
            raise UserError(f"{who} does not fit the seam: {'; '.join(problems)}")
        return offer


@dataclass(frozen=True)
class Broken:
    """A plugin that was found and could not be used, and why."""

    owner: Owner
    reason: str


class _Plugins(pluggy.PluginManager):
    """Functions of a plugin are hooks by their prefix: a forgotten `@hookimpl` hides none."""

    def parse_hookimpl_opts(self, plugin: Any, name: str) -> Any:
        marked = super().parse_hookimpl_opts(plugin, name)
        if marked is None and name.startswith(PREFIX) and inspect.isfunction(getattr(plugin, name)):
            return {}
        return marked


class Registry:
    """The plugins and offers of one composition.

    `plugins` is what `-p` was given, in order; `environ` is the environment, `builtin` the modules
    of the project's own plugins. Raises UserError for two owners of one name, for a name that
    matches nothing, and for a plugin given by `-p` that does not load.
    """

    def __init__(
        self,
        plugins: Iterable[str] = (),
        *,
        environ: Mapping[str, str] | None = None,
        builtin: Sequence[str] = BUILTIN,
    ) -> None:
        asked = list(dict.fromkeys(plugins))
        self.blocked: list[Owner] = []
        self.broken: list[Broken] = []
        self.owners: dict[str, Owner] = {}
        self.offers: dict[str, dict[str, Offer]] = {seam: {} for seam in SEAMS}
        self._block = {p.removeprefix("no:") for p in asked if p.startswith("no:")}
        self._manager = _Plugins(PROJECT)
        self._manager.add_hookspecs(hookspecs)
        self.hooks = hookspecs.Hooks(self._manager, self.owners)
        for module in builtin:
            self._add_builtin(module)
        self._add_entry_points(os.environ if environ is None else environ)
        for plugin in asked:
            if not plugin.startswith("no:"):
                self._add_asked(plugin)
        self._check_blocked()

    def find(self, seam: str, name: str) -> Offer:
        """The offer of that name; a UserError with near misses, known names and broken plugins."""
        known = self.offers[seam]
        if name in known:
            return known[name]
        message = (
            f"there is no {seam} called '{name}'{did_you_mean(name, known) or ';'} "
            f"known: {', '.join(sorted(known)) or 'none'}"
        )
        if self.broken:
            broken = ", ".join(f"{_who(b.owner)} ({b.reason})" for b in self.broken)
            message += f"; plugins that did not load: {broken}"
        if self.blocked:
            message += f"; blocked: {', '.join(owner.name for owner in self.blocked)}"
        raise UserError(message)

    def _add_builtin(self, module: str) -> None:
        from core import __version__

        plugin = importlib.import_module(module)
        name = module.rpartition(".")[2]
        owner = Owner(name, PROJECT, __version__, _file(plugin), builtin=True)
        if not self._is_blocked(owner):
            self._take(self._install(plugin, owner))

    def _add_entry_points(self, environ: Mapping[str, str]) -> None:
        points = sorted(
            importlib.metadata.entry_points(group=PROJECT),
            key=lambda point: (point.name, _owner(point).distribution),
        )
        if (only := environ.get(ENVIRONMENT)) is not None:
            wanted = {name.strip() for name in only.split(",") if name.strip()}
            names = sorted({point.name for point in points})
            for name in sorted(wanted.difference(names)):
                raise UserError(
                    f"{ENVIRONMENT} names '{name}', which no installed distribution has"
                    f"{did_you_mean(name, names) or ';'} "
                    f"entry points installed: {', '.join(names) or 'none'}"
                )
            points = [point for point in points if point.name in wanted]
        points = [point for point in points if not self._is_blocked(_owner(point))]
        for first, second in itertools.pairwise(points):
            if first.name == second.name:
                raise UserError(_two_plugins(_owner(first), _owner(second)))
        for point in points:
            owner = _owner(point)
            self._refuse_taken(owner)
            try:
                offers = self._install(point.load(), owner)
            except (Exception, SystemExit) as error:
                self.broken.append(Broken(owner, _reason(error)))
            else:
                self._take(offers)

    def _add_asked(self, plugin: str) -> None:
        """A module or a file given by `-p`; whatever is wrong with it is fatal."""
        is_file = plugin.endswith(".py") or os.sep in plugin
        if is_file and not Path(plugin).is_file():
            raise UserError(f"plugin file '{plugin}' (-p) does not exist; give its path")
        try:
            module = _load_file(Path(plugin)) if is_file else importlib.import_module(plugin)
        except (Exception, SystemExit) as error:
            raise UserError(_not_loaded(plugin, error)) from error
        if self._manager.is_registered(module):
            return
        owner = Owner(Path(plugin).stem if is_file else plugin, "", "", _file(module))
        if self._is_blocked(owner):
            raise UserError(f"plugin '{owner.name}' is both loaded and blocked; drop one -p")
        self._refuse_taken(owner)
        try:
            offers = self._install(module, owner)
        except (Exception, SystemExit) as error:
            raise UserError(f"plugin '{plugin}' (-p) cannot be used: {_reason(error)}") from error
        self._take(offers)

    def _is_blocked(self, owner: Owner) -> bool:
        if owner.name in self._block:
            self.blocked.append(owner)
            return True
        return False

    def _check_blocked(self) -> None:
        known = [*self.owners, *(b.owner.name for b in self.broken)]
        for name in sorted(self._block.difference(owner.name for owner in self.blocked)):
            raise UserError(
                f"-p no:{name} blocks nothing: there is no plugin called '{name}'"
                f"{did_you_mean(name, known) or ';'} plugins: {', '.join(known) or 'none'}"
            )

    def _refuse_taken(self, owner: Owner) -> None:
        if owner.name in self.owners:
            raise UserError(_two_plugins(self.owners[owner.name], owner))

    def _install(self, plugin: Any, owner: Owner) -> list[Offer]:
        """Check the hooks of one plugin and let it register: its offers. All or none."""
        owner = dataclasses.replace(owner, origin=_file(plugin) or owner.origin)
        self._manager.register(plugin, owner.name)
        try:
            self._check_hooks(plugin)
            offers = self._collect(owner)
        except BaseException:
            self._manager.unregister(plugin)
            raise
        self.owners[owner.name] = owner
        return offers

    def _take(self, offers: Iterable[Offer]) -> None:
        for offer in offers:
            other = self.offers[offer.seam].setdefault(offer.name, offer)
            if other is not offer:
                raise UserError(
                    f"two plugins offer {offer.seam} '{offer.name}': {_who(other.owner)} and "
                    f"{_who(offer.owner)}; block one with -p no:{offer.owner.name}"
                )

    def _check_hooks(self, plugin: Any) -> None:
        known = [name for name in vars(hookspecs) if name.startswith(PREFIX)]
        callers = self._manager.get_hookcallers(plugin) or []
        if not callers:
            raise TypeError(f"it has no hook (a function called {PREFIX}…)")
        for caller in callers:
            for impl in caller.get_hookimpls():
                if impl.plugin is not plugin:
                    continue
                if not caller.has_spec() and not impl.optionalhook:
                    hint = did_you_mean(caller.name, known)
                    raise TypeError(f"there is no hook {caller.name}{hint}")
                if impl.wrapper or impl.hookwrapper:
                    raise TypeError(f"{caller.name} is a wrapper, and these hooks take none")

    def _collect(self, owner: Owner) -> list[Offer]:
        """What the plugin registers, seam by seam."""
        offers: dict[tuple[str, str], Offer] = {}

        def register(seam: str, name: str, target: type | str) -> None:
            lazy = isinstance(target, str) and ":" in target
            if not lazy and not isinstance(target, type):
                raise TypeError(f"{seam} '{name}' is neither a class nor 'package.module:Class'")
            if name == "auto" or (seam, name) in offers:
                raise TypeError(f"{seam} '{name}' is reserved or registered twice")
            offers[seam, name] = Offer(seam, name, target, owner)

        for seam in SEAMS:
            self.hooks.register(seam, owner.name, functools.partial(register, seam))
        return list(offers.values())


def _who(owner: Owner) -> str:
    return f"{owner.name} of {owner}"


def _two_plugins(one: Owner, other: Owner) -> str:
    return (
        f"two plugins are called '{one.name}': {one} and {other}; "
        f"uninstall one, or block both with -p no:{one.name}"
    )


def _owner(point: importlib.metadata.EntryPoint) -> Owner:
    """Who an entry point belongs to; until it is loaded, its origin is where its metadata lies."""
    dist = point.dist
    assert dist is not None, "entry points that were discovered know their distribution"
    return Owner(point.name, dist.name, dist.version, str(dist.locate_file("")))


def _resolve(target: str) -> Any:
    module, _, path = target.partition(":")
    return functools.reduce(getattr, path.split("."), importlib.import_module(module))


def _load_file(path: Path) -> Any:
    """Run a plugin file afresh, as a module whose name no other module has."""
    path = path.resolve()
    name = f"{PROJECT}_file_{path.stem}_{hashlib.sha256(bytes(path)).hexdigest()[:8]}"
    found = importlib.util.spec_from_file_location(name, path)
    if found is None or found.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module  # dataclasses, pickle and lazy "module:Class" strings look there
    found.loader.exec_module(module)
    return module


def _not_loaded(plugin: str, error: BaseException) -> str:
    if isinstance(error, ModuleNotFoundError) and f"{plugin}.".startswith(f"{error.name}."):
        return (
            f"plugin module '{plugin}' (-p) was not found; install it, put its folder on "
            "PYTHONPATH, or give the path of a .py file"
        )
    return f"plugin '{plugin}' (-p) cannot be imported: {_reason(error)}"


def _reason(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def _file(plugin: Any) -> str:
    """The file a plugin module or object comes from, or ''."""
    module = plugin if inspect.ismodule(plugin) else inspect.getmodule(plugin)
    return getattr(module, "__file__", None) or ""
