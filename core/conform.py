"""Does an offer fit its seam? Facts are checked on the class, methods on the object.

Argument names are checked by pluggy, their order and number by the signature.
"""

from __future__ import annotations

import contextlib
import inspect
from typing import Any, get_type_hints

import pluggy
from pydantic import TypeAdapter, ValidationError

from core import seams
from core.config import OfferConfig
from core.errors import UserError
from core.seams import API, PROJECT, PROTOCOLS


class _Seam(pluggy.PluginManager):
    """One seam and the one object that was chosen for it. Plain methods count as implementations.

    A stub that the object inherits because its class subclasses the Protocol is no implementation.
    """

    def parse_hookimpl_opts(self, plugin: Any, name: str) -> Any:
        caller = vars(self.hook).get(name)
        if caller is None or not inspect.isroutine(getattr(plugin, name, None)):
            return None
        return None if getattr(type(plugin), name, None) is caller.spec.function else {}


def bind(seam: str, offer: Any) -> Any:
    """`offer` itself, once it is known to fit `seam`: the engine then calls plain bound methods.

    Raises UserError that names each missing fact or method and each argument that differs.
    """
    manager = _Seam(PROJECT)
    manager.add_hookspecs(PROTOCOLS[seam])
    problems = fact_problems(seam, offer)
    try:
        manager.register(offer)
        found = (_problem(caller, offer) for caller in vars(manager.hook).values())
        problems += [problem for problem in found if problem]
    except pluggy.PluginValidationError as error:
        problems.append(" ".join(str(error).split()))
    if problems:
        who = f"{seam} {type(offer).__qualname__}"
        raise UserError(f"{who} does not fit {PROTOCOLS[seam].__name__}: {'; '.join(problems)}")
    return offer


def _problem(caller: pluggy.HookCaller, offer: Any) -> str:
    """What keeps one method from being called as the seam says, if anything."""
    assert caller.spec is not None, "every method of a Protocol is a specification"
    if not caller.get_hookimpls():
        optional = getattr(caller.spec.function, "optional", False)
        return "" if optional else f"it lacks the method {caller.name}"
    # pluggy lets a method take fewer arguments, or them in another order; a plain call does not.
    wanted = caller.spec.argnames
    with contextlib.suppress(TypeError):
        given = inspect.signature(getattr(offer, caller.name)).bind(*wanted)
        if tuple(given.arguments) == wanted:
            return ""
    return f"{caller.name} does not take ({', '.join(wanted)})"


def fact_problems(seam: str, offer: Any) -> list[str]:
    """The facts of `seam` that `offer` (a class or an object) lacks or states wrongly."""
    found = []
    for name, kind in fact_types(seam).items():
        try:
            TypeAdapter(kind).validate_python(getattr(offer, name), strict=True)
        except AttributeError:
            found.append(f"it lacks the fact {name}")
        except ValidationError as error:
            why = error.errors()[0]["msg"].lower()
            found.append(f"its fact {name}={getattr(offer, name)!r} is wrong: {why}")
    if not found and offer.api != API[seam]:
        found.append(f"it was written for {seam} API {offer.api}, this is API {API[seam]}")
    return found


def fact_types(seam: str) -> dict[str, Any]:
    """The facts that offers of `seam` state, name to type: the ClassVars of its Protocol."""
    annotations = PROTOCOLS[seam].__annotations__
    facts = {name: text for name, text in annotations.items() if text.startswith("ClassVar[")}
    holder = type("Facts", (), {"__annotations__": facts})
    hints = get_type_hints(holder, vars(seams), {"OfferConfig": OfferConfig})
    return {name: hint.__args__[0] for name, hint in hints.items()}
