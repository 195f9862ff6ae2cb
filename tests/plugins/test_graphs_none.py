"""`none` through the conformance suite: nothing is captured."""

from __future__ import annotations

from core.testing.graphs import GraphSuite


class TestNone(GraphSuite):
    plugin = "none"
