"""Seeded bugs of a cache that forgets: what it declares in `sees` is what it is held to."""

from __future__ import annotations

from pathlib import Path

import pytest

from core.batch import Limits
from core.registry import Registry
from core.testing.kv import MAX_LEN, KVManagerSuite

PLUGIN = "third_party/outweigh-kv-sinks/outweigh_kv_sinks.py"
Sinks = Registry([str(Path(__file__).parents[1] / PLUGIN)]).find("kv", "sinks").load()


class DeclaresOneTooMany(Sinks):
    """It says that the window is one token longer than it is."""

    honest = False

    def sees(self, asked, keys):
        window = self.config.window + (0 if self.honest else 1)
        return (keys < self.config.num_sinks) | (keys > asked - window)

    def attend(self, layer, q, batch):
        self.honest = True
        try:
            return super().attend(layer, q, batch)
        finally:
            self.honest = False


class DeclaresNothing(Sinks):
    sees = None

    def attend(self, layer, q, batch):
        self.sees = super().sees
        try:
            return super().attend(layer, q, batch)
        finally:
            self.sees = None


class ForgetsWithinAStep(Sinks):
    """The ring holds the window alone: the end of a chunk overwrites what its start reads."""

    def num_rows(self, limits):
        return self.config.num_sinks + self.config.window


class WindowOfTheLast(Sinks):
    """The whole chunk sees what its last token sees, so that chunks show."""

    def sees(self, asked, keys):
        return super().sees(asked if isinstance(asked, int) else asked.max(), keys)


BUGS = [DeclaresOneTooMany, DeclaresNothing, ForgetsWithinAStep, WindowOfTheLast]


def suite(cls):
    config = {"num_sinks": 2, "window": 8}
    fields = {"offer": cls, "config": config, "limits": Limits(MAX_LEN, 4, 64)}
    return type("Suite", (KVManagerSuite,), fields)()


def clauses(cls):
    found = suite(cls)
    found.test_write_then_read_is_dense_attention()
    found.test_chunks_do_not_show()
    found.test_gather_returns_what_was_written()
    found.test_random_traces(0)


def test_what_is_declared_holds():
    clauses(Sinks)


@pytest.mark.parametrize("cls", BUGS)
def test_a_seeded_bug_is_seen(cls):
    with pytest.raises(AssertionError):
        clauses(cls)
