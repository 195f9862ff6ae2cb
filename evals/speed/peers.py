"""Engines under one interface: requests go in, counts of tokens come out, step by step.

`Peer` is what a third party implements and names by `--peer MODULE:CLASS`. The engine of this
project is behind the same interface (`Ours`), where each step also leaves a record of what was
launched and what came of it. vLLM is imported only when it is asked for, from the environment of
whoever asks.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import json
import os
import tempfile
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence as Seq
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from core.config import did_you_mean
from core.errors import RunError, UserError, explained

if TYPE_CHECKING:
    from torch import Tensor

    from core.engine import Engine, RequestOutput
    from evals.speed.workloads import Request

TEMPERATURE = 0.6


class Setup(NamedTuple):
    """What every engine of a run is built with. Prefix caching is off, EOS ignored, the
    temperature is TEMPERATURE."""

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


class News(NamedTuple):
    """What a step brought for the request `key`: tokens on the host, and whether it has ended."""

    key: int
    num_tokens: int
    finished: bool


class Peer(ABC):
    """An engine. Subclasses take a Setup and their own options, as text or JSON, by keyword."""

    name, version = "", ""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self._num_submitted = 0

    @classmethod  # noqa: B027  # most can be had wherever they can be imported
    def check(cls) -> None:
        """Raise UserError where this engine cannot be had here; called before anything is built."""

    @abstractmethod
    def add(self, key: int, prompt: list[int], max_tokens: int) -> None:
        """Queue a request of exactly `max_tokens` output tokens."""

    @abstractmethod
    def step(self) -> Seq[News]:
        """Advance, or wait for tokens; those returned are on the host."""

    @abstractmethod
    def pending(self) -> bool:
        """Whether a request has not ended."""

    def submit(self, prompt: list[int], max_tokens: int) -> int:
        """Queue a request under a key of its own, which is returned."""
        self._num_submitted += 1
        self.add(self._num_submitted, prompt, max_tokens)
        return self._num_submitted

    def generate(self, requests: Seq[Request]) -> int:
        """Run requests that come at once to their end, in whatever way is fastest; the number of
        tokens."""
        for request in requests:
            self.submit(request.prompt, request.num_output)
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
        self.engine.add_request(prompt, params, str(key))
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

    def __init__(self, setup: Setup, **options: Any) -> None:
        from core.engine import Engine

        fields = {name: value for name, value in options.items() if "." not in name}
        settings = {name: value for name, value in options.items() if "." in name}
        shared = setup._asdict()
        del shared["vocab_size"]
        given = {**shared, "enable_prefix_caching": False, "settings": settings, **fields}
        super().__init__(Engine(**given), setup.model)


def _synchronize() -> None:
    import torch

    torch.cuda.synchronize()


def free_memory() -> None:
    """Give what nothing refers to any more back to the device."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class Vllm(Peer):
    """vLLM's synchronous engine, its core in this process.

    Options are arguments of `vllm.LLM`; `max_capture` is a shorthand for graphs of up to that many
    tokens. `random:SHAPE` becomes random weights of that shape there too.
    """

    name = "vllm"

    @classmethod
    def check(cls) -> None:
        if importlib.util.find_spec("vllm") is None:
            raise UserError(
                "vLLM is not installed in this environment: install it beside outweigh, put its "
                "folder on PYTHONPATH, or leave --peer vllm out"
            )

    def __init__(self, setup: Setup, max_capture: int | None = None, **options: Any) -> None:
        super().__init__(setup)
        # Before the import: without the first its steps would run in another process.
        for name, value in {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": "WARNING",
        }.items():
            os.environ.setdefault(name, value)
        self._module: Any = importlib.import_module("vllm")
        self.version = self._module.__version__
        self._folder = tempfile.TemporaryDirectory()
        arguments = self._arguments(setup) | options
        if max_capture is not None:
            arguments["cudagraph_capture_sizes"] = capture_sizes(max_capture)
        self._options = arguments
        before = {id(one): one for one in tensors_on(setup.device)}  # held: ids stay theirs
        self._llm: Any = self._module.LLM(**arguments)
        self._made = [weakref.ref(t) for t in tensors_on(setup.device) if id(t) not in before]
        self._engine: Any = self._llm.llm_engine
        self._kinds: Any = importlib.import_module("vllm.sampling_params").RequestOutputKind

    def _arguments(self, setup: Setup) -> dict[str, Any]:
        from core.loading import EMBEDDED, RANDOM_SHAPES
        from evals.tiny import MODEL

        found: dict[str, Any] = {
            "model": MODEL if setup.model == EMBEDDED else setup.model,
            "skip_tokenizer_init": True,
            "generation_config": "vllm",
            "dtype": setup.dtype,
            "seed": setup.seed,
            "max_model_len": setup.max_model_len,
            "max_num_seqs": setup.max_num_seqs,
            "max_num_batched_tokens": setup.max_num_batched_tokens,
            "enable_prefix_caching": False,
            # It refuses to start unless this share is free, of which the process holds some.
            "gpu_memory_utilization": min(setup.gpu_memory_utilization or 0.85, 0.85),
        }
        if setup.kv_cache_bytes is not None:  # then that share sizes nothing
            size = int(setup.kv_cache_bytes)
            found |= {"kv_cache_memory_bytes": size, "gpu_memory_utilization": 0.05}
        if setup.model in RANDOM_SHAPES:
            write_config(Path(self._folder.name), RANDOM_SHAPES[setup.model])
            found |= {"model": self._folder.name, "load_format": "dummy"}
        return found

    def _params(self, max_tokens: int, kind: Any) -> Any:
        return self._module.SamplingParams(
            temperature=TEMPERATURE,
            ignore_eos=True,
            max_tokens=max_tokens,
            detokenize=False,
            output_kind=kind,
        )

    def add(self, key: int, prompt: list[int], max_tokens: int) -> None:
        params = self._params(max_tokens, self._kinds.DELTA)
        self._engine.add_request(str(key), {"prompt_token_ids": prompt}, params)

    def step(self) -> list[News]:
        return [
            News(int(one.request_id), sum(len(c.token_ids) for c in one.outputs), one.finished)
            for one in self._engine.step()
        ]

    def pending(self) -> bool:
        return bool(self._engine.has_unfinished_requests())

    def generate(self, requests: Seq[Request]) -> int:
        """By `LLM.generate`, which makes one output a request, at its end."""
        params = [self._params(r.num_output, self._kinds.FINAL_ONLY) for r in requests]
        prompts = [{"prompt_token_ids": r.prompt} for r in requests]
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        return sum(len(one.outputs[0].token_ids) for one in outputs)

    def describe(self) -> dict[str, Any]:
        config = self._engine.vllm_config
        chosen = {
            "async_scheduling": config.scheduler_config.async_scheduling,
            "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
            "cudagraph_mode": str(config.compilation_config.cudagraph_mode),
            "cudagraph_capture_sizes": config.compilation_config.cudagraph_capture_sizes,
        }
        return {**super().describe(), "options": self._options, "resolved": chosen}

    def close(self) -> None:
        self._engine.engine_core.shutdown()
        del self._engine, self._llm
        importlib.import_module("vllm.distributed.parallel_state").cleanup_dist_env_and_memory()
        self._folder.cleanup()
        # Its weights and its cache stay referred to by its caches of compiled code, and whoever
        # comes next needs the memory.
        for made in self._made:
            if (tensor := made()) is not None:
                tensor.untyped_storage().resize_(0)
        free_memory()


def tensors_on(device: str) -> list[Tensor]:
    """All plain ones, and parameters, that anything in this process refers to."""
    import torch

    kind = torch.device(device).type
    found: list[Tensor] = [
        one
        for one in gc.get_objects()
        if type(one) is torch.Tensor or issubclass(type(one), torch.nn.Parameter)
    ]
    return [one for one in found if one.device.type == kind]


def capture_sizes(most: int) -> list[int]:
    """Numbers of tokens to capture up to `most`, each at most an eighth above the one before it
    from 64 on."""
    sizes = [1, 2, 4, *range(8, 65, 8)]
    while sizes[-1] < most:
        sizes.append(sizes[-1] + (1 << sizes[-1].bit_length() - 1) // 8)
    return [size for size in sizes if size < most] + [most]


def write_config(folder: Path, shape: Mapping[str, Any]) -> None:
    """A config.json that other engines read: the shape and the class of transformers for it."""
    kind = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}[shape["model_type"]]
    content = json.dumps({"architectures": [kind], **shape})
    (folder / "config.json").write_text(content, encoding="utf-8")


KNOWN: Mapping[str, type[Peer]] = {"outweigh": Composition, "vllm": Vllm}


def find(spec: str) -> Callable[[Setup], Peer]:
    """The maker of the peer that NAME, MODULE:CLASS, or either with `:KEY=VALUE,…` behind it names.

    Raises UserError where there is none, or where it cannot be had here.
    """
    head, colon, tail = spec.rpartition(":")
    path, options = (head, tail) if colon and "=" in tail else (spec, "")
    module, colon, name = path.partition(":")
    found: Any = KNOWN.get(path)
    if colon:
        advice = "give --peer MODULE:CLASS of something that can be imported"
        with explained(f"the peer {path} cannot be imported", advice):
            found = getattr(importlib.import_module(module), name)
        if not (isinstance(found, type) and issubclass(found, Peer)):
            raise UserError(f"{path} is no subclass of evals.speed.peers.Peer: make it one")
    elif found is None:
        raise UserError(f"there is no peer '{path}'{did_you_mean(path, KNOWN)}, or MODULE:CLASS")
    given = dict(_option(text) for text in options.split(",") if text)
    found.check()

    def make(setup: Setup) -> Peer:
        with explained(
            f"{spec} could not be built", "leave it out or change its options", RunError
        ):
            return found(setup, **given)  # type: ignore[no-any-return]

    return make


def _option(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals:
        raise UserError(f"the option {text!r} of a peer has no value: write KEY=VALUE")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value
