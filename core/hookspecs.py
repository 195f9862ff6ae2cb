"""The hooks of outweigh: to register offers, to refuse combinations, to see an engine and a report.

Hooks run while an engine is composed and after a run, never in a step. A plugin is a module (or an
object) with some of the functions below, marked with `core.hookimpl`:

    from core import hookimpl

    @hookimpl
    def outweigh_register_kv(register):
        register("paged_fp8", "my_package.kv:PagedFp8")  # imported when somebody asks for it

`Hooks` is the typed way to call them: it names the plugin that raised, which pluggy does not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import pluggy

from core.errors import RunError, explained
from core.seams import PROJECT

if TYPE_CHECKING:
    from core.engine import Engine
    from core.plan import Plan
    from core.registry import Owner

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)

Register: TypeAlias = "Callable[[str, type | str], None]"


@hookspec
def outweigh_register_kv(register: Register) -> None:
    """Offer key/value managers: `register(name, class)`, or for the class "package.mod:Class"."""


@hookspec
def outweigh_register_fusion(register: Register) -> None:
    """Offer fusion sets, as above."""


@hookspec
def outweigh_register_graphs(register: Register) -> None:
    """Offer graph strategies, as above."""


@hookspec
def outweigh_register_sched(register: Register) -> None:
    """Offer schedulers, as above."""


@hookspec
def outweigh_register_eval(register: Register) -> None:
    """Offer tasks of `evals.quality`, which calls it: `register(name, task)`, a Task of its own."""


@hookspec
def outweigh_check_combination(plan: Plan) -> list[str]:  # type: ignore[empty-body]
    """Refusals of this plan, a sentence each, ending with what to change; empty if it may run.

    Called before anything is allocated. `plan.kv.offer`, `plan.graphs.offer` … are the classes, and
    have the facts; `plan.kv.config` is the validated options; `plan.config` is the resolved run.
    """


@hookspec
def outweigh_engine_built(engine: Engine) -> None:
    """An engine stands ready: weights loaded, cache allocated, graphs captured."""


@hookspec
def outweigh_run_finished(report: dict[str, Any]) -> None:
    """A run of the command line has ended; `report` is what `Engine.report()` returned."""


class Hooks:
    """How the core calls hooks. An exception becomes a sentence that names the plugin."""

    def __init__(self, manager: pluggy.PluginManager, owners: Mapping[str, Owner]) -> None:
        self._manager, self._owners = manager, owners

    def check_combination(self, plan: Plan) -> list[str]:
        """The refusals of all plugins, those of third parties with their owner."""
        refusals = []
        for owner, answer in self.call("outweigh_check_combination", plan):
            said = [answer] if isinstance(answer, str) else answer or ()
            refusals += [s if owner.distribution == PROJECT else f"{s} ({owner})" for s in said]
        return refusals

    def call(self, name: str, argument: object) -> list[tuple[Owner, Any]]:
        """Call each implementation of the one-argument hook `name`: owners and answers."""
        answers = []
        for impl in getattr(self._manager.hook, name).get_hookimpls():
            owner = self._owners[impl.plugin_name]
            advice = f"report that to its authors, or block it with -p no:{owner.name}"
            with explained(f"plugin {owner} failed in {name}", advice, RunError):
                answers.append((owner, impl.function(*(argument for _ in impl.argnames))))
        return answers
