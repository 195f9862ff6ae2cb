"""What the conformance suites of the four seams have in common: whose they are, and what it is
held to."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import pytest

from core.config import did_you_mean
from core.conform import bind
from core.errors import UserError
from core.registry import Registry

_OF_PYTEST = ("pytestmark",)
# Whose suite it is, and what a clause sets while it runs.
_NO_PROMISE = ("plugin", "offer", "config", "seam", "device", "num_drawn", "most_requests")


class Suite:
    """Class attributes say which offer, and what is promised of it beyond the contract.

    `plugin` is a registered name, or `offer` a class; `config` holds options, as `--set` does.
    What the offer says in its own `held_to` holds here too, unless the subclass says otherwise. An
    attribute that neither suite nor subclass reads is refused: it would hold nobody to anything.
    """

    seam: ClassVar[str] = ""
    plugin: ClassVar[str] = ""
    offer: ClassVar[type | None] = None
    config: ClassVar[Mapping[str, Any]] = {}
    expected_failures: ClassVar[Mapping[str, str]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if _ships(cls):
            return
        suite = next(base for base in cls.__mro__ if _ships(base))
        inherited = {name for base in cls.__bases__ for name in dir(base)}
        own = {name for base in cls.__mro__ if not _ships(base) for name in _names_read(base)}
        for name, value in vars(cls).items():
            plain = not callable(value) and not hasattr(value, "__get__")
            known = name.startswith("_") or name in {*inherited, *_OF_PYTEST, *own}
            if plain and not known:
                settings = [n for n in dir(suite) if _is_setting(suite, n)]
                hint = did_you_mean(name, settings, "attributes")
                raise UserError(f"{cls.__name__} sets {name}, which {suite.__name__} lacks{hint}")

    @pytest.fixture(autouse=True)
    def _expect(self, request: pytest.FixtureRequest) -> None:
        """Hold the offer to what it says, and mark what is expected to fail."""
        self.hold()
        name = getattr(request.node, "originalname", request.node.name)
        if name in self.expected_failures:
            reason = self.expected_failures[name]
            request.applymarker(pytest.mark.xfail(reason=reason, strict=True))

    def hold(self) -> None:
        """Take over `held_to` of the offer, but for what a subclass of a suite sets itself."""
        own = {name for base in type(self).__mro__ if not _ships(base) for name in vars(base)}
        for name, value in self.stated_by(self.loaded()).items():
            if name not in own:
                setattr(self, name, value)

    @classmethod
    def stated_by(cls, offer: Any) -> Mapping[str, Any]:
        """`held_to` of an offer. A UserError where it has more than promises and limits of this
        suite, as one of its clauses, or nothing."""
        held_to = getattr(offer, "held_to", {})
        who = f"{cls.seam} {getattr(offer, '__name__', offer)}"
        expected = held_to.get("expected_failures", {}) if isinstance(held_to, Mapping) else None
        if not isinstance(expected, Mapping):
            raise UserError(f"{who}: held_to is {held_to!r}: give a dict, of expected failures one")
        promises = [name for name in dir(cls) if cls._is_promise(name)]
        for name in held_to:
            if name not in promises:
                hint = did_you_mean(name, promises, "it can set")
                raise UserError(f"{who}: held_to names '{name}', which no offer can set{hint}")
        clauses = [name for name in dir(cls) if name.startswith("test_")]
        for name in expected:
            if name not in clauses:
                hint = did_you_mean(name, clauses, "clauses")
                what = f"expected_failures names '{name}', which is no clause{hint}"
                raise UserError(f"{who}: {what}")
        return held_to

    @classmethod
    def _is_promise(cls, name: str) -> bool:
        private = name.startswith(("_", "test_", "pytest_")) or name in _NO_PROMISE
        static = inspect.getattr_static(cls, name)
        return not (private or inspect.isfunction(static) or isinstance(static, classmethod))

    def loaded(self) -> Any:
        """The class of the offer; None for a subclass that makes it in another way."""
        if self.offer or not self.plugin:
            return self.offer
        return Registry().find(self.seam, self.plugin).load()

    def made(self, **options: Any) -> Any:
        """A fresh offer that fits its seam; `options` go before those of `config`."""
        offer = self.loaded()
        return bind(self.seam, offer(offer.Config(**{**self.config, **options})))

    def make(self) -> Any:
        """A fresh offer, as the tests use it."""
        return self.made()

    def test_fits_the_seam(self) -> None:
        """Facts have their types, methods their arguments, options a description."""
        config = type(self.make()).Config
        settings = {key: config.model_config.get(key) for key in ("frozen", "extra")}
        assert settings == {"frozen": True, "extra": "forbid"}, (
            f"Config has {settings}: derive it from core.OfferConfig"
        )
        mute = [name for name, field in config.model_fields.items() if not field.description]
        assert mute == [], f"options without a description: {', '.join(mute)}"


def _names_read(cls: type) -> Iterator[str]:
    """What the methods, fixtures and properties of a class look at."""
    for value in vars(cls).values():
        for part in ("__func__", "fget", "__wrapped__"):
            value = getattr(value, part, value)
        codes = [value.__code__] if inspect.isfunction(value) else []
        for code in codes:  # and what is defined in them: comprehensions, lambdas
            codes += filter(inspect.iscode, code.co_consts)
            yield from code.co_names


def _ships(cls: type) -> bool:
    """Whether a class is a suite of this package, not somebody's subclass."""
    return cls.__module__.startswith("core.testing.") or cls is object


def _is_setting(suite: type, name: str) -> bool:
    return not name.startswith(("_", "test")) and not callable(getattr(suite, name))
