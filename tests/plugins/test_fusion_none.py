"""`none` through the conformance suite: no span, the plain chain."""

from __future__ import annotations

from core.testing.fusion import FusionSuite


class TestNone(FusionSuite):
    plugin = "none"
