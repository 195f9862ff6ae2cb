"""The options that every set of spans has: which of them, and at how many places."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field, field_validator

from core.config import OfferConfig


class SpanOptions(OfferConfig):
    """A set's `Config` subclasses this and says what its spans are called."""

    names: ClassVar[tuple[str, ...]] = ()

    only: tuple[str, ...] | None = Field(
        None, description="names of spans to use, by commas; null: all"
    )
    fuel: int | None = Field(
        None, ge=0, description="places that spans may claim, from the start; null: all"
    )

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
