"""The engine and the host shell of outweigh.

Importing this package imports neither torch nor a plugin: the names below are loaded when they are
first asked for, as in `from core import Engine, SamplingParams`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from core.hookspecs import hookimpl as hookimpl

if TYPE_CHECKING:
    from core.config import OfferConfig as OfferConfig, RunConfig as RunConfig
    from core.engine import Engine as Engine
    from core.errors import RunError as RunError, UserError as UserError
    from core.sampling import SamplingParams as SamplingParams

__version__ = "0.1.0"

# The module that each name is loaded from.
_HOMES = {
    **dict.fromkeys(("OfferConfig", "RunConfig"), "config"),
    **dict.fromkeys(("RunError", "UserError"), "errors"),
    "Engine": "engine",
    "SamplingParams": "sampling",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"core.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'core' has no attribute {name!r}")
