"""Caches that forget, with one fault each: what they declare in `sees` is what they are held to."""

from __future__ import annotations

import inspect

from outweigh_kv_sinks import Sinks

from core import hookimpl


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


@hookimpl
def outweigh_register_kv(register):
    register("SoundSinks", Sinks)
    for name, found in globals().items():
        if inspect.isclass(found) and found.__module__ == __name__:
            register(name, found)
