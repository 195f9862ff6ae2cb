"""The options that every set of spans has: which of them, at how many places, and watched or not.

A set of anybody's has them too: its `Config` subclasses `SpanOptions`, and its `spans` ends with
`chosen`:

    class Mine:
        api, lossless = 1, True

        class Config(SpanOptions):
            names = ("my_norm",)

        def __init__(self, config=None):
            self.config = config or self.Config()

        def spans(self, facts, device):
            return self.config.chosen([Span("my_norm", ("mlp_norm",), my_norm, always)])
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field, PrivateAttr, field_validator

from core.config import OfferConfig

if TYPE_CHECKING:
    from core.seams import Span
    from plugins.fusion.verify import Verification


class SpanOptions(OfferConfig):
    """A set's `Config` subclasses this and says what its spans are called."""

    names: ClassVar[tuple[str, ...]] = ()

    only: tuple[str, ...] | None = Field(
        None, description="names of spans to use, by commas; null: all"
    )
    fuel: int | None = Field(
        None, ge=0, description="places that spans may claim, from the start; null: all"
    )
    verify: bool = Field(
        False, description="compare every span in place with its nodes; the first that deviates "
        "ends the requests of its step"
    )  # fmt: skip
    _verification: Any = PrivateAttr(None)

    @field_validator("only", mode="before")
    @classmethod
    def _by_commas(cls, only: Any) -> Any:
        return tuple(only.split(",")) if isinstance(only, str) else only

    @field_validator("only")
    @classmethod
    def _known(cls, only: tuple[str, ...] | None) -> tuple[str, ...] | None:
        for name in only or ():
            if name not in cls.names:
                raise ValueError(f"there is no span '{name}'; choose from {', '.join(cls.names)}")
        return only

    def chosen(self, spans: Iterable[Span]) -> tuple[Span, ...]:
        """Those of `spans` that are asked for: what `FusionSet.spans` returns.

        With `verify` they compare themselves; a set that calls this for several groups of spans has
        its places counted over all of them.
        """
        wanted = tuple(s for s in spans if self.only is None or s.name in self.only)
        if not self.verify:
            return wanted
        from plugins.fusion.verify import Verification

        verification = self.verification or Verification()
        self._verification = verification
        return verification.watched(wanted)

    @property
    def verification(self) -> Verification | None:
        """What `verify` has seen so far; None without it, and before `chosen`."""
        verification: Verification | None = self._verification
        return verification
