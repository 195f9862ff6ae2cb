"""Does an offer fit its seam? Facts are checked on the class, methods on the object.

Argument names are checked by pluggy, their order and number by the signature.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, get_type_hints

import pluggy
from pydantic import TypeAdapter, ValidationError

from core import seams
from core.config import OfferConfig
from core.errors import UserError
from core.seams import PROJECT, PROTOCOLS


class Seam(pluggy.PluginManager):
    """One seam and the one object that was chosen for it. Plain methods count as implementations.

    A stub that the object inherits because its class subclasses the Protocol is no implementation.
    """

    def __init__(self, name: str) -> None:
        super().__init__(PROJECT)
        self.protocol = PROTOCOLS[name]
        self.add_hookspecs(self.protocol)
        self.methods = [n for n in vars(self.protocol) if n in vars(self.hook)]

    def parse_hookimpl_opts(self, plugin: Any, name: str) -> Any:
        return {} if name in self.methods and self.implements(plugin, name) else None

    def implements(self, offer: Any, name: str) -> bool:
        if not inspect.isroutine(getattr(offer, name, None)):
            return False
        return getattr(type(offer), name, None) is not getattr(self.protocol, name)

    def problems(self, offer: Any) -> list[str]:
        """What keeps `offer` from being called as the seam says, as parts of a sentence."""
        found = []
        for name in self.methods:
            method = getattr(self.protocol, name)
            if self.implements(offer, name):
                wanted = list(inspect.signature(method).parameters)[1:]
                if not _takes(getattr(offer, name), wanted):
                    found.append(f"{name} does not take ({', '.join(wanted)})")
            elif not getattr(method, "optional", False):
                found.append(f"it lacks the method {name}")
        return found


def bind(seam: str, offer: Any) -> Any:
    """`offer` itself, once it is known to fit `seam`: the engine then calls plain bound methods.

    Raises UserError that names each missing fact or method and each argument that differs.
    """
    checked = Seam(seam)
    problems = fact_problems(seam, offer)
    try:
        checked.register(offer, type(offer).__qualname__)
    except pluggy.PluginValidationError as error:
        problems.append(" ".join(str(error).split()))
    else:
        problems += checked.problems(offer)
    if problems:
        who = f"{seam} {type(offer).__qualname__}"
        raise UserError(f"{who} does not fit {checked.protocol.__name__}: {'; '.join(problems)}")
    return offer


def fact_problems(seam: str, offer: Any) -> list[str]:
    """The facts of `seam` that `offer` (a class or an object) lacks or states in the wrong type."""
    found = []
    for name, kind in fact_types(seam).items():
        if not hasattr(offer, name):
            found.append(f"it lacks the fact {name}")
            continue
        try:
            TypeAdapter(kind).validate_python(getattr(offer, name), strict=True)
        except ValidationError as error:
            reason = error.errors()[0]["msg"]
            found.append(f"its fact {name}={getattr(offer, name)!r} is wrong: {reason.lower()}")
    return found


def fact_types(seam: str) -> dict[str, Any]:
    """The facts that offers of `seam` state, name to type: the ClassVars of its Protocol."""
    annotations = PROTOCOLS[seam].__annotations__
    facts = {name: text for name, text in annotations.items() if text.startswith("ClassVar[")}
    holder = type("Facts", (), {"__annotations__": facts})
    hints = get_type_hints(holder, vars(seams), {"OfferConfig": OfferConfig})
    return {name: hint.__args__[0] for name, hint in hints.items()}


def _takes(method: Any, wanted: Sequence[str]) -> bool:
    """Whether `method` can be called with the arguments `wanted`, by position and by name.

    pluggy lets an implementation take fewer arguments, or the same in another order; a plain call
    does not.
    """
    parameters = list(inspect.signature(method).parameters.values())
    given = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return given == list(wanted[: len(given)])
    rest = [p for p in parameters if p.name not in wanted and p.kind is not p.VAR_KEYWORD]
    return given[: len(wanted)] == list(wanted) and all(p.default is not p.empty for p in rest)
