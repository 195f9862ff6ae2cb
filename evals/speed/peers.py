"""Engines under one interface: requests go in, counts of tokens come out, step by step.

`Peer` is what a third party implements and names by `--peer MODULE:CLASS`. The engine of this
project is behind the same interface (`Ours`), where each step also leaves a record of what was
launched and what came of it. Peers that ship (`KNOWN`) are imported only when they are asked for.
"""

from __future__ import annotations

import gc
import importlib
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence as Seq
from typing import TYPE_CHECKING, Any, NamedTuple

from core.config import did_you_mean
from core.errors import RunError, UserError, explained
from core.seams import SEAMS

if TYPE_CHECKING:
    from core.engine import Engine, RequestOutput
    from evals.speed.driving import Request

TEMPERATURE = 0.6


class Setup(NamedTuple):
    """What every engine of a run is built with. EOS is ignored, the temperature is TEMPERATURE."""

    model: str
    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    dtype: str
    device: str
    kv_cache_bytes: int | None = None
    gpu_memory_utilization: float | None = None
    seed: int = 0
    enable_prefix_caching: bool = False
    plugins: tuple[str, ...] = ()  # of this project; what they register its compositions may name


class News(NamedTuple):
    """What a step brought for the request `key`: tokens on the host, and whether it has ended."""

    key: int
    num_tokens: int
    finished: bool


class Peer(ABC):
    """An engine. Subclasses take a Setup and their own options, as text or JSON, by keyword."""

    name, version = "", ""
    due_s: float | None = None  # of the request that is added, `time.perf_counter`; None: now

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self._num_submitted = 0

    @classmethod  # noqa: B027  # most can be had wherever they can be imported
    def check(cls) -> None:
        """Raise UserError where this engine cannot be had here; called before anything is built."""

    @classmethod  # noqa: B027  # most learn that from what they are built with
    def check_options(cls, options: Mapping[str, Any], plugins: Seq[str]) -> None:
        """Raise UserError for options that it does not have, where that can be told before anything
        is built; `plugins` are those of the run."""

    @abstractmethod
    def add(self, key: int, prompt: list[int], max_tokens: int) -> None:
        """Queue a request of exactly `max_tokens` output tokens. Raises UserError for one that this
        engine cannot be given: it has failed, and the others go on."""

    @abstractmethod
    def step(self) -> Seq[News]:
        """Advance, or wait for tokens; those returned are on the host."""

    @abstractmethod
    def pending(self) -> bool:
        """Whether a request has not ended."""

    def submit(self, prompt: list[int], max_tokens: int, due_s: float | None = None) -> int:
        """Queue a request under a key of its own, which is returned. `due_s` is told to engines
        that ask for it."""
        self._num_submitted += 1
        self.due_s = due_s
        self.add(self._num_submitted, prompt, max_tokens)
        return self._num_submitted

    def generate(self, requests: Seq[Request]) -> int:
        """Run requests that come at once to their end, in whatever way is fastest; the number of
        tokens."""
        for request in requests:
            self.submit(list(request.prompt), request.num_output)
        num_tokens = 0
        while self.pending():
            num_tokens += sum(news.num_tokens for news in self.step())
        return num_tokens

    def abandon(self) -> None:
        """Bring requests that a failure has left behind to their end, whatever becomes of them."""
        while self.pending():
            self.step()

    def section(self, name: str | None) -> None:  # noqa: B027  # most keep no records
        """What follows is measured under `name`; None: it is not. For engines that keep records."""

    def num_preemptions(self) -> int | None:
        """So far; None where the engine does not say."""
        return None

    def num_cached_tokens(self) -> int | None:
        """Of the prompts of requests that have ended, what was found in a cache of prefixes; None
        where the engine does not say."""
        return None

    def describe(self) -> dict[str, Any]:
        """Options and versions, JSON-able."""
        return {"name": self.name, "version": self.version}

    def close(self) -> None:  # noqa: B027  # some have none
        """Give back the memory."""


class Call(NamedTuple):
    """One call of `Engine.step`: when, what it launched, what arrived with it.

    `num_prefill` and `num_decodes` are tokens of what was launched; `news` has (key, tokens) of
    steps that landed.
    """

    begin_s: float
    end_s: float
    num_launched: int
    num_prefill: int
    num_decodes: int
    news: list[tuple[int, int]]
    section: str | None


class Ours(Peer):
    """An Engine of this project. `calls` and `prompt_lens` (by key) record what it was asked,
    `ended` what became of it."""

    name = "outweigh"

    def __init__(self, engine: Engine, model: str) -> None:
        config, limits = engine.config, engine.limits
        super().__init__(
            Setup(
                model=model,
                vocab_size=engine.facts.vocab_size,
                max_model_len=limits.max_model_len,
                max_num_seqs=limits.max_num_seqs,
                max_num_batched_tokens=limits.max_num_batched_tokens,
                dtype=str(config.dtype),
                device=str(config.device),
                kv_cache_bytes=config.kv_cache_bytes,
                gpu_memory_utilization=config.gpu_memory_utilization,
                seed=config.seed,
                enable_prefix_caching=bool(config.enable_prefix_caching),
                plugins=config.plugins,
            )
        )
        self.engine, self.depth = engine, int(bool(config.overlap))
        self.calls: list[Call] = []
        self.prompt_lens: dict[int, int] = {}
        self.ended: list[RequestOutput] = []
        self.is_alone = False  # whether the device is made to end its work before each step
        self._section: str | None = None

    def forget(self) -> None:
        """Begin new records."""
        self.calls, self.prompt_lens, self.ended = [], {}, []

    def add(self, key: int, prompt: list[int], max_tokens: int) -> None:
        from core.sampling import SamplingParams

        params = SamplingParams(max_tokens=max_tokens, temperature=TEMPERATURE, ignore_eos=True)
        self.engine.add_request(prompt, params, str(key), arrival=self.due_s)
        self.prompt_lens[key] = len(prompt)

    def step(self) -> list[News]:
        counters = self.engine.counters
        before = counters.num_steps, counters.num_prefill_tokens, counters.num_decode_tokens
        if self.is_alone:
            _synchronize()
        begin = time.perf_counter()
        events = self.engine.step()
        end = time.perf_counter()
        news = [News(int(e.request_id), len(e.token_ids), e.output is not None) for e in events]
        after = counters.num_steps, counters.num_prefill_tokens, counters.num_decode_tokens
        launched, prefill, decodes = (now - then for now, then in zip(after, before, strict=True))
        arrived = [(one.key, one.num_tokens) for one in news if one.num_tokens]
        self.calls.append(Call(begin, end, launched, prefill, decodes, arrived, self._section))
        ended = [e.output for e in events if e.output is not None]
        self.ended += ended
        if errors := [output.error for output in ended if output.error]:
            raise RunError(f"{len(errors)} requests failed: {errors[0]}")
        return news

    def pending(self) -> bool:
        return self.engine.has_unfinished()

    def abandon(self) -> None:
        while self.engine.has_unfinished():
            self.engine.step()

    def section(self, name: str | None) -> None:
        self._section = name

    def num_preemptions(self) -> int:
        return self.engine.counters.num_preemptions

    def num_cached_tokens(self) -> int:
        return sum(output.metrics.num_cached_tokens for output in self.ended)

    def describe(self) -> dict[str, Any]:
        return self.engine.report()

    def close(self) -> None:
        self.engine.close()
        del self.engine
        free_memory()


class Composition(Ours):
    """This project's engine once more, composed otherwise.

    Options are fields of `core.config.RunConfig` and, as SEAM.FIELD, of its offers.
    """

    @classmethod
    def check_options(cls, options: Mapping[str, Any], plugins: Seq[str]) -> None:
        from core.config import RunConfig
        from core.registry import Registry

        fields, settings = _parted(options)
        config = RunConfig.of(settings=settings, plugins=tuple(plugins), **fields)
        registry = Registry(config.plugins)
        for seam in SEAMS:
            name = getattr(config, seam)
            if isinstance(name, str) and name != "auto":
                registry.find(seam, name)

    def __init__(self, setup: Setup, **options: Any) -> None:
        from core.engine import Engine

        fields, settings = _parted(options)
        shared = setup._asdict()
        del shared["vocab_size"]
        given = {**shared, "settings": settings, **fields}
        super().__init__(Engine(**given), setup.model)


def _parted(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Fields of a run, and settings of its offers."""
    fields = {name: value for name, value in options.items() if "." not in name}
    return fields, {name: value for name, value in options.items() if "." in name}


def _synchronize() -> None:
    import torch

    torch.cuda.synchronize()


def free_memory() -> None:
    """Give what nothing refers to any more back to the device."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


KNOWN = {"outweigh": "evals.speed.peers:Composition", "vllm": "evals.speed.vllm_peer:Vllm"}


def find(spec: str, plugins: Seq[str] = ()) -> Callable[[Setup], Peer]:
    """The maker of the peer that NAME, MODULE:CLASS, or either with `:KEY=VALUE,…` behind it names.
    `plugins` are those of the run.

    Raises UserError where there is none, or where it cannot be had here.
    """
    head, colon, _ = spec.partition("=")[0].rpartition(":")  # a value may have colons too
    if head in KNOWN and "=" not in spec:
        raise UserError(f"the peer {spec} has an option without a value: write {head}:KEY=VALUE")
    path, options = (head, spec[len(head) + 1 :]) if colon and "=" in spec else (spec, "")
    module, colon, name = KNOWN.get(path, path).partition(":")
    if not colon:
        raise UserError(f"there is no peer '{path}'{did_you_mean(path, KNOWN)}, or MODULE:CLASS")
    advice = "give --peer MODULE:CLASS of something that can be imported"
    with explained(f"the peer {path} cannot be imported", advice):
        found: Any = getattr(importlib.import_module(module), name)
    if not (isinstance(found, type) and issubclass(found, Peer)):
        raise UserError(f"{path} is no subclass of evals.speed.peers.Peer: make it one")
    pairs = [_option(text) for text in options.split(",") if text]
    given = dict(pairs)
    if len(given) < len(pairs):
        raise UserError(f"the peer {spec} has an option twice: give each once")
    found.check()
    found.check_options(given, plugins)

    def make(setup: Setup) -> Peer:
        with explained(
            f"{spec} could not be built", "leave it out or change its options", RunError
        ):
            return found(setup, **given)

    return make


def _option(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals:
        raise UserError(f"the option {text!r} of a peer has no value: write KEY=VALUE")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value
