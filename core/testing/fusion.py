"""The conformance suite of the fusion seam. Subclass it, name the offer, and run pytest:

    class TestMine(FusionSuite):
        plugin = "mine"                       # by registered name, or `offer = Mine`
        config = {"only": ["add_norm"]}
        tolerance = 1e-4
        expected_failures = {"test_…": "why"}  # strict: a pass is a failure

Every test states one clause of the contract in `core.seams.Span` and `FusionSet`. `FusionGpuSuite`
runs all of them on CUDA in bfloat16. `verify` compares the spans of one step by hand.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence as Seq
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, cast
from unittest import mock

import pytest
import torch

from core import Engine, SamplingParams
from core.chain import Placed, check_spans, cover, execute
from core.config import OfferConfig
from core.errors import UserError
from core.seams import offered
from core.testing import parity
from core.testing.decoder import HIDDEN, UNKNOWN, DecoderRig, save_decoder
from core.testing.spans import ROW_VALUES, Deviation, compare, covers, difference, verify
from core.testing.suite import Suite
from core.testing.tiny import KINDS
from core.weights import checkpoint_views

if TYPE_CHECKING:
    from torch import Tensor

    from core.batch import Batch
    from core.model import Operation
    from core.seams import FusionSet, Span

__all__ = ["FusionGpuSuite", "FusionSuite", "PlainNodes", "memory_filled_with", "verify"]

_DEPTH = 10  # how much more the end of a chain may be off than a span
_NUM_MOVING = 6  # different tokens of 24 greedy ones


@contextlib.contextmanager
def memory_filled_with(value: float) -> Iterator[None]:
    """Until it exits, floating-point memory that torch hands out unfilled holds `value`."""

    def filling(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def made(*args: Any, **kwargs: Any) -> Tensor:
            memory = make(*args, **kwargs)
            return memory.fill_(value) if memory.is_floating_point() else memory

        return made

    owners: dict[Any, tuple[str, ...]] = {
        torch: ("empty", "empty_like", "empty_strided"),
        torch.Tensor: ("new_empty", "new_empty_strided"),
    }
    with contextlib.ExitStack() as stack:
        for owner, names in owners.items():
            for name in names:
                made = filling(getattr(owner, name))
                stack.enter_context(mock.patch.object(owner, name, made))
        yield


class PlainNodes:
    """The fusion set that fuses nothing."""

    api = 1
    lossless = True

    class Config(OfferConfig):
        """No options."""

    def __init__(self) -> None:
        self.config = self.Config()

    def spans(self, facts: Any, device: torch.device) -> list[Span]:
        return []


class Tried(NamedTuple):
    """What came of running all spans: what deviates, by the length of the step, and which of the
    model's tensors are other than before."""

    found: Mapping[int, Seq[Deviation]]
    changed: Seq[str]

    def deviations(self, token_counts: Seq[int]) -> list[Deviation]:
        return [deviation for count in token_counts for deviation in self.found[count]]


class FusionSuite(Suite):
    """What every FusionSet keeps. Class attributes say which one, and how exact it is.

    `tolerance` is how far a value may be off, times (1 + the plain value). `kinds` are decoders of
    `core.testing.tiny`, `caches` are kv offers whose sinks spans must cope with ("none": no sink),
    `token_counts` lengths of steps.
    """

    seam: ClassVar[str] = "fusion"
    device: ClassVar[str] = "cpu"
    dtype: ClassVar[torch.dtype] = torch.float32
    tolerance: ClassVar[float] = parity.SPAN[torch.float32]
    kinds: ClassVar[tuple[str, ...]] = tuple(KINDS)
    caches: ClassVar[tuple[str, ...]] = ("paged", "contiguous", HIDDEN)
    token_counts: ClassVar[tuple[int, ...]] = (1, 2, 7, 63, 100)
    _tried: ClassVar[dict[tuple[Any, ...], Tried]]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._tried = {}

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        self.hold()
        for name, values in (("kind", self.kinds), ("cache", self.caches)):
            if name in metafunc.fixturenames:
                metafunc.parametrize(name, values)

    @pytest.fixture(autouse=True)
    def _device(self) -> None:
        """Skip a device that is not here."""
        if self.device == "cuda" and not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")

    # ------------------------------------------------------------------------------- helpers

    def make(self, **options: Any) -> FusionSet:
        """A fresh fusion set."""
        return cast("FusionSet", self.made(**options))

    def decoder(self, kind: str, cache: str = "paged") -> tuple[DecoderRig, list[Span]]:
        """A decoder and what is on offer for it. Skips where the offer refuses to run on a CPU."""
        decoder = DecoderRig(kind, cache, self.dtype, self.device)
        try:
            made = self.make()
            spans = list(made.spans(decoder.facts, torch.device(self.device)))
            if (prepare := offered(made, "weights")) is not None:
                prepare(decoder.weights)
        except UserError as error:
            if self.device != "cpu":
                raise
            pytest.skip(str(error))
        return decoder, spans

    def tried(
        self,
        kind: str,
        cache: str = "paged",
        *,
        token_counts: Seq[int] = (),
        strided: bool = False,
        memory: float = 0.0,
    ) -> Tried:
        """What comes of all spans in steps of these lengths, or of all `token_counts`, where
        unfilled memory holds `memory`. Clauses that ask for the same are told what the first was
        told: a class runs it once."""
        asked = (kind, cache, tuple(token_counts or self.token_counts), strided, memory)
        if asked not in self._tried:
            self._tried[asked] = self._try(*asked)
        return self._tried[asked]

    def _try(
        self, kind: str, cache: str, token_counts: Seq[int], strided: bool, memory: float
    ) -> Tried:
        decoder, spans = self.decoder(kind, cache)
        found: dict[int, list[Deviation]] = {count: [] for count in token_counts}
        views = {**checkpoint_views(decoder.facts, decoder.weights)}
        views |= dict(zip(("RoPE's cos", "RoPE's sin"), decoder.rope, strict=True))
        before = {name: view.clone() for name, view in views.items()}

        def check(chain: Seq[Placed], batch: Batch) -> None:
            fit = _fit(spans, decoder, batch)
            live: dict[str, Tensor] = {}
            for operations in list(covers(chain, fit)) or [cover(chain, [])]:
                live = {}
                each(operations, chain, batch, live)
            if "logits" in live:
                for operations in covers(decoder.sample_chain, fit):
                    each(operations, decoder.sample_chain, batch, dict(live))

        def each(
            operations: Seq[Operation], chain: Seq[Placed], batch: Batch, live: dict[str, Tensor]
        ) -> None:
            compared = compare(
                operations, chain, batch, tolerance=self.tolerance, strided=strided, live=live
            )
            size = f"in a step of {batch.host.num_tokens if batch.host else 0} tokens"
            for _, wrong in compared:
                found[num_tokens] += [d._replace(how=f"{d.how}, {size}") for d in wrong]

        with memory_filled_with(memory):
            for num_tokens in token_counts:
                decoder.steps(num_tokens, check)
        bits = torch.uint8
        changed = [n for n, v in views.items() if not v.view(bits).equal(before[n].view(bits))]
        return Tried(found, changed)

    # -------------------------------------------------------------------------------- the offer

    def test_spans_are_runs_of_the_chain(self, kind: str) -> None:
        """The nodes of a span exist and follow each other somewhere."""
        _, spans = self.decoder(kind)
        check_spans(spans)

    def test_spans_return_what_is_live_after_them(self, kind: str) -> None:
        """A tuple of as many values, in the order of `core.model.VALUES`."""
        found = self.tried(kind).deviations(self.token_counts[:2])
        _no([d for d in found if d.what == "number"])

    def test_spans_compute_what_the_plain_nodes_do(self, kind: str, cache: str) -> None:
        """In steps of odd lengths, padded, whatever sink they find."""
        found = self.tried(kind, cache).deviations(self.token_counts)
        _no([d for d in found if d.what in ("value", "error")])

    def test_spans_store_what_kv_write_would(self, kind: str, cache: str) -> None:
        """The same keys and values in the same places, and nothing anywhere else."""
        found = self.tried(kind, cache).deviations(self.token_counts[:3])
        _no([d for d in found if d.what == "cache"])

    def test_unknown_sinks_are_left_alone(self, kind: str) -> None:
        """A sink of a kind that a span has not heard of is for the plain nodes, or for kv.write."""
        self._no_worse(kind, UNKNOWN)

    def test_strided_values_are_read_right(self, kind: str) -> None:
        """Rows have unit stride; what lies between them is nobody's."""
        self._no_worse(kind, strided=True)

    def test_unfilled_memory_is_not_read(self, kind: str) -> None:
        """What torch.empty hands out is NaN here."""
        self._no_worse(kind, memory=torch.nan)

    def _no_worse(self, kind: str, cache: str = "paged", **options: Any) -> None:
        """Spans that are right elsewhere are right with these options."""
        counts = self.token_counts[1:]
        found = self.tried(kind, cache, token_counts=counts, **options).deviations(counts)
        if found:
            elsewhere = {d.where for d in self.tried(kind).deviations(counts)}
            _no([deviation for deviation in found if deviation.where not in elsewhere])

    def test_weights_are_unchanged(self, kind: str) -> None:
        """Bit for bit, RoPE tables too, whatever has been run."""
        changed = self.tried(kind).changed
        assert not changed, f"{', '.join(changed)} changed"

    # -------------------------------------------------------------------------------- the model

    @torch.inference_mode()
    def test_any_fuel_computes_the_same(self, kind: str) -> None:
        """No fuel is the plain chain; and no place needs another one to be fused too."""
        decoder, spans = self.decoder(kind)

        def check(chain: Seq[Placed], batch: Batch) -> None:
            (result,) = chain[-1].node.writes
            fit = _fit(spans, decoder, batch)
            plain, unfused = cover(chain, []), cover(chain, fit, fuel=0)
            assert [(op.name, op.run) for op in unfused] == [(op.name, op.run) for op in plain]
            host = batch.host
            assert host is not None
            num_live = host.num_seqs if result in ROW_VALUES else host.num_tokens
            wanted = execute(plain, batch, {})[result][:num_live].clone()
            num_places = sum(isinstance(op.sites, tuple) for op in cover(chain, fit))
            for fuel in sorted({min(1, num_places), num_places // 2, num_places}):
                found = execute(cover(chain, fit, fuel), batch, {})[result][:num_live]
                problem = difference(found, wanted, _DEPTH * self.tolerance)
                assert not problem, f"with fuel {fuel}: {result} {problem}"

        decoder.steps(self.token_counts[1], check)

    def test_greedy_tokens_are_those_of_the_plain_chain(self, kind: str, tmp_path: Path) -> None:
        """In float32, through an engine that chunks, decodes and batches."""
        if not self.make().lossless:
            pytest.skip("lossless is False: other tokens may come out")
        self.decoder(kind)  # skips where the offer does not run here
        model = save_decoder(kind, tmp_path)
        wanted, found = (self._generate(model, fusion) for fusion in (PlainNodes(), self.make()))
        for ids, other in zip(wanted, found, strict=True):
            assert other == ids, f"tokens {other} where the plain chain gives {ids}"
        num_different = len({token for tokens in wanted for token in tokens})
        assert num_different > _NUM_MOVING, "greedy text stands still, and shows nothing"

    def _generate(self, model: Path, fusion: Any) -> list[list[int]]:
        with Engine(
            model=str(model),
            fusion=fusion,
            graphs="none",
            device=self.device,
            dtype="float32",
            max_model_len=64,
            max_num_seqs=3,
            max_num_batched_tokens=24,
            kv_cache_bytes=1 << 22,
        ) as engine:
            prompts = [[5 + i * 7 + n for i in range(n)] for n in (1, 2, 7, 26)]
            params = SamplingParams(max_tokens=6, ignore_eos=True)
            return [output.token_ids for output in engine.generate(prompts, params)]


@pytest.mark.gpu
class FusionGpuSuite(FusionSuite):
    """On CUDA, in bfloat16: a value may round to the neighbour of the plain one's."""

    device: ClassVar[str] = "cuda"
    dtype: ClassVar[torch.dtype] = torch.bfloat16
    tolerance: ClassVar[float] = parity.SPAN[torch.bfloat16]


def _fit(spans: Seq[Span], decoder: DecoderRig, batch: Batch) -> list[Span]:
    """The spans that apply to a step of this length over these sinks."""
    num_tokens = batch.shape.num_tokens
    return [span for span in spans if span.when(num_tokens, decoder.facts, decoder.sink)]


def _no(deviations: Seq[Deviation]) -> None:
    assert not deviations, f"{deviations[0]} ({len(deviations)} such deviations)"
