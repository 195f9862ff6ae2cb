"""Where the distributions come from: scipy, which a plain installation does not have."""

from __future__ import annotations

import importlib
from typing import Any

from core.errors import explained


def scipy(module: str) -> Any:
    """`scipy.special` or `scipy.stats`. Raises UserError where it cannot be imported."""
    with explained("speeds cannot be compared", "pip install 'outweigh[speed]' brings scipy"):
        return importlib.import_module(f"scipy.{module}")
