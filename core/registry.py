"""Who offers what: discovery of plugins, owners of names, and the errors of both.

Built-ins are found by module path, so that a bare checkout has them; third parties by the
entry-point group `outweigh`, or by `-p MODULE`, `-p FILE.py`. `-p no:NAME` blocks a plugin,
wherever it comes from; the environment variable OUTWEIGH_PLUGINS, where set, is the whole list of
entry points to load (empty: none).

A third party that does not load is kept aside with its reason. It stops nobody, unless `-p` asked
for it. A `Registry` is made for each composition and holds all of the state: two engines in one
process may differ in their plugins.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import inspect
import os
import pkgutil
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, NamedTuple, cast

import pluggy

from core import __version__, hookspecs
from core.config import did_you_mean
from core.conform import fact_problems
from core.errors import UserError, explained, reason
from core.seams import PROJECT, SEAMS

BUILTIN = ("plugins.builtin",)
PREFIX = f"{PROJECT}_"
ENVIRONMENT = f"{PROJECT.upper()}_PLUGINS"
HOOKS = tuple(name for name in vars(hookspecs) if name.startswith(PREFIX))


class Owner(NamedTuple):
    """Who stands behind a name. `distribution` is empty for what `-p` or a caller brought."""

    name: str
    distribution: str
    version: str
    origin: str

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}" if self.distribution else self.origin


class Offer(NamedTuple):
    """One name of one seam. `target` is a class, or "package.module:Class" to import on use."""

    seam: str
    name: str
    target: type | str
    owner: Owner

    def load(self) -> type:
        """The class, its API number and facts checked. Raises UserError with the reason."""
        who, offer = f"{self.seam} '{self.name}' of {self.owner}", self.target
        if isinstance(offer, str):
            with explained(f"{who} cannot be loaded", f"repair it or choose another {self.seam}"):
                offer = pkgutil.resolve_name(offer)
        if problems := fact_problems(self.seam, offer):
            raise UserError(f"{who} does not fit the seam: {'; '.join(problems)}")
        return cast(type, offer)


class _Plugins(pluggy.PluginManager):
    """Functions of a plugin are hooks by their prefix: a forgotten `@hookimpl` hides none."""

    def parse_hookimpl_opts(self, plugin: Any, name: str) -> Any:
        hook = name.startswith(PREFIX) and inspect.isfunction(getattr(plugin, name))
        return super().parse_hookimpl_opts(plugin, name) or ({} if hook else None)


class Registry:
    """The plugins and offers of one composition.

    `plugins` is what `-p` was given, in order; `builtin` the modules of the project's own plugins.
    `owners` are the plugins in use, by name; `aside` those that are not, with the reason. Raises
    UserError for two owners of one name, for a name that matches nothing, and for a plugin given by
    `-p` that does not load.
    """

    def __init__(self, plugins: Iterable[str] = (), builtin: Sequence[str] = BUILTIN) -> None:
        given = list(dict.fromkeys(plugins))
        self.owners: dict[str, Owner] = {}
        self.aside: dict[Owner, str] = {}
        self.offers: dict[str, dict[str, Offer]] = {seam: {} for seam in SEAMS}
        self._blocked = {p.removeprefix("no:") for p in given if p.startswith("no:")}
        self._manager = _Plugins(PROJECT)
        self._manager.add_hookspecs(hookspecs)
        self.hooks = hookspecs.Hooks(self._manager, self.owners)
        for module in builtin:
            owner = Owner(module.rpartition(".")[2], PROJECT, __version__, "")
            self._add(owner, functools.partial(_load, module), module)
        for point in _entry_points():
            dist: Any = point.dist  # known of what was discovered
            self._add(Owner(point.name, dist.name, dist.version, point.value), point.load)
        for plugin in given:
            loaded = self._manager.is_registered(sys.modules.get(plugin))
            if not loaded and not plugin.startswith("no:"):
                owner = Owner(os.path.basename(plugin).removesuffix(".py"), "", "", plugin)
                self._add(owner, functools.partial(_load, plugin), plugin)
        for name in sorted(self._blocked.difference(owner.name for owner in self.aside)):
            hint = did_you_mean(name, [*self.owners, *(o.name for o in self.aside)], "plugins")
            raise UserError(f"-p no:{name} blocks nothing, no plugin is called '{name}'{hint}")

    def find(self, seam: str, name: str) -> Offer:
        """The offer of that name; a UserError with near misses and the plugins kept aside."""
        if seam not in SEAMS:
            raise UserError(f"there is no seam '{seam}'{did_you_mean(seam, SEAMS, 'seams')}")
        if found := self.offers[seam].get(name):
            return found
        aside = ", ".join(f"{_who(owner)} ({why})" for owner, why in self.aside.items())
        hint = did_you_mean(name, sorted(self.offers[seam]))
        message = f"there is no {seam} called '{name}'{hint}"
        raise UserError(f"{message}; plugins kept aside: {aside}" if aside else message)

    def _add(self, owner: Owner, load: Callable[[], Any], asked: str = "") -> None:
        """Load a plugin and take its offers, all or none.

        One that cannot be used is kept aside; where it was `asked` for, that is an error.
        """
        if owner.name in self._blocked:
            self.aside[owner] = "blocked"
            return
        if other := self.owners.get(owner.name):
            what = f"two plugins are called '{owner.name}': {other} and {owner}"
            raise UserError(f"{what}; uninstall one, or block both with -p no:{owner.name}")
        try:
            plugin = load()
            owner = owner._replace(origin=origin(plugin) or owner.origin)
            self._manager.register(plugin, owner.name)
            offers = self._collect(plugin, owner)
        except (Exception, SystemExit) as error:
            self._manager.unregister(name=owner.name)
            if asked:
                what = f"plugin '{asked}' cannot be used: {reason(error)}"
                takes = "-p takes a module that can be imported, or the path of a .py file"
                advice = "mend it" if asked.endswith(".py") and os.path.isfile(asked) else takes
                raise UserError(f"{what}; {advice}") from error
            self.aside[owner] = f"broken: {reason(error)}"
            return
        self.owners[owner.name] = owner
        for offer in offers:
            taken = self.offers[offer.seam].setdefault(offer.name, offer)
            if taken is not offer:
                owners = f"{_who(taken.owner)} and {_who(owner)}; block one with -p no:{owner.name}"
                raise UserError(f"two plugins offer {offer.seam} '{offer.name}': {owners}")

    def _collect(self, plugin: Any, owner: Owner) -> list[Offer]:
        """Check the hooks of a plugin and call those that register: its offers."""
        offers: dict[tuple[str, str], Offer] = {}

        def register(seam: str, name: str, target: type | str) -> None:
            lazy = isinstance(target, str) and ":" in target
            if not lazy and not isinstance(target, type):
                raise TypeError(f"{seam} '{name}' is neither a class nor 'package.module:Class'")
            if name == "auto" or (seam, name) in offers:
                raise TypeError(f"{seam} '{name}' is reserved or registered twice")
            offers[seam, name] = Offer(seam, name, target, owner)

        callers = self._manager.get_hookcallers(plugin)
        if not callers:
            raise TypeError(f"it has no hook (a function called {PREFIX}…)")
        for caller in callers:
            if not caller.has_spec():
                hint = did_you_mean(caller.name, HOOKS, "hooks")
                raise TypeError(f"there is no hook {caller.name}{hint}")
            (impl,) = (impl for impl in caller.get_hookimpls() if impl.plugin is plugin)
            if impl.wrapper or impl.hookwrapper:
                raise TypeError(f"{caller.name} is a wrapper, and these hooks take none")
            seam = caller.name.removeprefix(f"{PREFIX}register_")
            if seam in SEAMS:
                impl.function(*(functools.partial(register, seam) for _ in impl.argnames))
        return list(offers.values())


def origin(found: Any) -> str:
    """The file that a module, a class or an object comes from, or ''."""
    return getattr(inspect.getmodule(found), "__file__", None) or ""


def _who(owner: Owner) -> str:
    return f"{owner.name} of {owner}"


def _entry_points() -> list[EntryPoint]:
    """The entry points of the group, or those of them that OUTWEIGH_PLUGINS names, by name."""
    found = sorted(entry_points(group=PROJECT), key=lambda point: (point.name, point.value))
    if (only := os.environ.get(ENVIRONMENT)) is None:
        return found
    installed = [point.name for point in found]
    wanted = {name.strip() for name in only.split(",")} - {""}
    for name in sorted(wanted.difference(installed)):
        hint = did_you_mean(name, installed, "entry points installed")
        raise UserError(f"{ENVIRONMENT} names '{name}', which nobody installed has{hint}")
    return [point for point in found if point.name in wanted]


def _load(plugin: str) -> Any:
    """Import a module, or run a .py file afresh under a name that no other module has."""
    if not plugin.endswith(".py"):
        return importlib.import_module(plugin)
    path = Path(plugin).resolve()
    name = f"{PROJECT}_file_{path.stem}_{hashlib.sha256(bytes(path)).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, "the name ends in .py"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses, pickle and lazy "module:Class" strings look there
    spec.loader.exec_module(module)
    return module
