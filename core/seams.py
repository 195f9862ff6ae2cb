"""The four seams. Each is one Protocol whose methods are pluggy hook specifications at the same
time.

pluggy checks names and arguments when an offer is composed; after that the engine holds plain bound
methods, because a hook call costs about 2 µs and a method about 0.1 µs. A step makes no hook call.

An *offer* is a class. Its facts are class attributes, read by vetoes, by `--show` and by the
conformance suites; a fact claimed and not held is a failure. A lossy offer declares what it is held
to in `held_to`: class attributes of its suite, by name. Its options are a nested
`Config(OfferConfig)`; it is constructed as `Offer(config)`. Importing the module of an offer must
import neither torch nor triton. Methods marked `optional` may be missing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Protocol, TypeVar

import pluggy

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray
    from torch import Tensor

    from core.batch import Batch, BatchShape, HostBatch, Limits, Sequence
    from core.config import OfferConfig
    from core.facts import ModelFacts
    from core.weights import ModelWeights

PROJECT = "outweigh"
SEAMS = ("kv", "fusion", "graphs", "sched")

_F = TypeVar("_F", bound=Callable[..., Any])
_marker = pluggy.HookspecMarker(PROJECT)


def spec(function: _F) -> _F:
    """A method every offer of the seam has."""
    return _marker(function, firstresult=True)


def optional(function: _F) -> _F:
    """A method that an offer may leave out."""
    function.optional = True  # type: ignore[attr-defined]  # read back by core.conform
    return _marker(function, firstresult=True)


# -------- kv


class Capacity(NamedTuple):
    """What a byte budget buys: tokens of context in all, and sequences at once."""

    num_tokens: int
    num_seqs: int


class Usage(NamedTuple):
    """Tokens of room: in all, held by running sequences, kept only for prefix hits (evictable)."""

    num_tokens: int
    num_held: int
    num_cached: int


class Saved(NamedTuple):
    """The keys and values of a preempted sequence's first `num_tokens` tokens, in host memory."""

    num_tokens: int
    num_bytes: int
    data: Any


@dataclass(frozen=True)
class KVSink:
    """Where a fused span may write a layer's keys and values itself.

    kind "blocks": `k` and `v` are [N, K, B, D]; token t goes to block `slot_map[t] // B`, offset
    `slot_map[t] % B`. `slot_map` is int32 [T], filled by `begin_step`, and names the trash block
    for padding. `fresh` is a pair of [max_num_batched_tokens, K, D] scratch tensors, or None: token
    t of a step whose shape is `lone` leaves its keys and values in row t too, as attention must see
    them. A span that does not know a kind leaves it to the plain nodes.
    """

    kind: str
    k: Tensor
    v: Tensor
    block_size: int
    slot_map: Tensor
    fresh: tuple[Tensor, Tensor] | None = None


class KVManager(Protocol):
    """Where keys and values live, and the attention that reads them.

    Read semantics on every path: a query at position p sees the keys at 0..p as they are stored
    after p. Offers that see less (evictors) declare it.

    The core reads two int32 rows [S + 1]: `reserved`, tokens that a slot can hold now (it acquires
    for rows that cross it), and `next_publish`, the known length at which publishing is due. It
    sets `sharing` before `bind`: whether prefixes may be shared at all.
    """

    api: ClassVar[int]
    lossless: ClassVar[bool]
    prefix_sharing: ClassVar[bool]
    graph_safe: ClassVar[bool]
    Config: ClassVar[type[OfferConfig]]

    reserved: NDArray[Any]
    next_publish: NDArray[Any]
    sharing: bool

    # Host half: bookkeeping, no device work.

    @spec
    def capacity(self, kv_cache_bytes: int, facts: ModelFacts, limits: Limits) -> Capacity:
        """What `kv_cache_bytes` buy, trash block, tails and scratch counted."""

    @spec
    def ever_fits(self, num_tokens: int) -> str | None:
        """None if an empty pool holds a sequence of `num_tokens`, else the refusal as a sentence
        with numbers."""

    @spec
    def acquire(self, seq: Sequence, upto: int) -> int | None:
        """Room for the first `upto` tokens of `seq`, in one atomic step.

        The first call for a sequence may find shared blocks (compared by tokens, at most
        seq.num_known - 1 of them, only if seq.share_prefix) and pins them. Returns the number of
        tokens already cached (0 on later calls), or None with nothing changed where there is no
        room.
        """

    @spec
    def on_slot(self, seq: Sequence, slot: int | None) -> None:
        """`seq` now runs in `slot` (called after its first acquire), or gives its slot back
        (None)."""

    @spec
    def publish(self, seq: Sequence, num_tokens: int) -> None:
        """The first `num_tokens` tokens of `seq` are known and their keys are written or in flight:
        share them."""

    @spec
    def rollback(self, seq: Sequence, num_tokens: int) -> None:
        """A step failed: nothing of `seq` beyond `num_tokens` counts as published any more."""

    @spec
    def release(self, seq: Sequence) -> None:
        """`seq` ends or is preempted: unpin everything it holds. Safe to call once only."""

    @optional
    def save(self, seq: Sequence, num_tokens: int) -> Saved:
        """Start copying what is stored for the first `num_tokens` tokens to the host, scales and
        tails too.

        In stream order: the core releases the room at once, and whoever gets it writes later.
        """

    @optional
    def restore(self, seq: Sequence, saved: Saved, num_cached: int) -> None:
        """Write `saved` into the room that `seq` has acquired again, beyond the `num_cached` tokens
        that it shares."""

    @spec
    def usage(self) -> Usage:
        """Tokens of room in all, held and cached."""

    @spec
    def check_integrity(self) -> None:
        """Raise AssertionError where the books do not balance. For tests and idle engines."""

    # Device half.

    @optional
    def weights(self, weights: ModelWeights) -> None:
        """Called once before `bind`, for offers whose layout depends on the weights.

        They are read only; what is kept must be a copy.
        """

    @spec
    def bind(
        self, facts: ModelFacts, limits: Limits, kv_cache_bytes: int, device: torch.device
    ) -> None:
        """Allocate everything, once, in facts.dtype. Pointers stay valid until the engine
        closes."""

    @spec
    def metadata(self, limits: Limits) -> Mapping[str, tuple[tuple[int, ...], str]]:
        """Per-step host arrays that travel with the core's own copy: name -> (shape, numpy dtype
        name)."""

    @spec
    def plan(self, step: HostBatch, host: Mapping[str, NDArray[Any]]) -> bool:
        """Fill the host arrays for this step, padding included. True if deltas are left over.

        On True the core sends what is there, runs `begin_step`, and calls `plan` again: as often as
        max_model_len or max_num_batched_tokens says, whichever is more; then the step fails.
        """

    @spec
    def begin_step(self, batch: Batch) -> None:
        """The device half of `plan`: the first node of a step, and of the graph of a whole one.

        A step that is planned ahead may be given up. Its `begin_step` runs and no more of it does,
        and the next one is planned for rows that stand where that one found them.
        """

    @spec
    def write(self, layer: int, k: Tensor, v: Tensor, batch: Batch) -> None:
        """Store keys (after RoPE) and values of this step, both [T, K, D] with unit stride in D."""

    @spec
    def attend(self, layer: int, q: Tensor, batch: Batch) -> Tensor:
        """Attention of q [T, H, D] (after RoPE, unscaled) over what is stored, this step included:
        [T, H * D]."""

    @spec
    def gather(self, slot: int, layer: int, lo: int, hi: int) -> tuple[Tensor, Tensor, Tensor]:
        """True values stored for positions lo..hi-1 of a slot: k [n, K, D], v [n, K, D], positions
        [n]."""

    @spec
    def sink(self, layer: int) -> KVSink | None:
        """Where a fused span may write this layer, or None if only `write` may."""


# -------- fusion


@dataclass(frozen=True)
class Span:
    """A run of consecutive nodes computed by one function.

    `when(num_tokens, facts, sink)` tells whether it applies to a token bucket. `run(sites, batch,
    *values)` gets one Site a node (they differ where the span crosses the edge of a layer) and the
    values that it reads, in the order of `core.model.VALUES`; it returns those it leaves live, in
    the same order, as a tuple. It may write a value that it reads in place, if it returns that
    value or nothing reads it afterwards. Of two spans that want the same node the higher `priority`
    wins, then the longer; two of one priority that were asked for by name are refused.
    """

    name: str
    nodes: tuple[str, ...]
    run: Callable[..., tuple[Tensor, ...]]
    when: Callable[[int, ModelFacts, KVSink | None], bool]
    priority: int = 0


class FusionSet(Protocol):
    """How spans of the decoder's nodes are computed. Weights are never changed."""

    api: ClassVar[int]
    lossless: ClassVar[bool]
    Config: ClassVar[type[OfferConfig]]

    @optional
    def weights(self, weights: ModelWeights) -> None:
        """Called once after `spans`, for what a set makes of weights before the first request.

        They are read only; what is kept must be a copy.
        """

    @spec
    def spans(self, facts: ModelFacts, device: torch.device) -> Seq[Span]:
        """Every span on offer for this model and device."""


# -------- graphs


class GraphStrategy(Protocol):
    """Which shapes are captured once and replayed. Policy only: the core captures, pads and
    replays."""

    api: ClassVar[int]
    captures: ClassVar[bool]  # False: never, runs on any device; True: steps overlap by default
    Config: ClassVar[type[OfferConfig]]

    @spec
    def shapes(self, limits: Limits) -> Seq[BatchShape]:
        """Every shape to capture. The core captures the largest first, into one memory pool."""

    @spec
    def select(
        self, num_tokens: int, num_seqs: int, max_query: int, max_kv: int, start: int | None
    ) -> BatchShape | None:
        """The captured shape that a step is padded to, or None: the step runs eagerly, and is
        counted.

        Arguments are the fields of the step's own BatchShape. A shape with a `start` serves only
        steps that start exactly there; behind a prefix (start > 0) only those of exactly its
        number of tokens, since the length of the prefix and every row are baked in.
        """

    @optional
    def cut(self) -> Seq[str]:
        """Nodes that run eagerly between captured pieces: their names in core.model.

        Without this method a graph is a whole step. With it `begin_step`, `attention` and `lm_head`
        are left out whatever it says, and a fused span is if it computes a node that is. Eager
        operations see the batch of the step, padded in tokens to the shape that was selected, and
        in rows to the fewest that any shape has room for; pieces may depend on `num_tokens` and
        `fresh` alone.
        """


# -------- sched


class Scheduler(Protocol):
    """Who runs next, how much of it, who gives way. Admission, budget and liveness belong to the
    core. An offer that states `heeds_priority = False` gets no request that carries a priority."""

    api: ClassVar[int]
    rekey: ClassVar[Literal["never", "step"]]  # "never": keys are static and live in a heap
    Config: ClassVar[type[OfferConfig]]

    @spec
    def key(self, seq: Sequence, clock: float) -> Any:
        """Sort key among sequences with prompt work left; smallest first, ties by arrival."""

    @spec
    def chunk(self, seq: Sequence, budget: int) -> int:
        """Tokens of `seq` to compute this step, of at most `budget`; 0 lets it wait."""

    @spec
    def victim(self, running: Seq[Sequence], for_seq: Sequence) -> Sequence | None:
        """Who of `running` gives its room to `for_seq`; None if nobody is less urgent."""

    @optional
    def may_start(self, seq: Sequence, usage: Usage) -> bool:
        """Whether a waiting sequence may be admitted now. Overridden when nothing else runs."""

    @optional
    def observe(self, num_tokens: int, num_seqs: int, seconds: float) -> None:
        """Called once a step that has ended, with what it carried and its wall time."""


_IN_ORDER = (KVManager, FusionSet, GraphStrategy, Scheduler)
PROTOCOLS: Mapping[str, type] = dict(zip(SEAMS, _IN_ORDER, strict=True))
API: Mapping[str, int] = {"kv": 1, "fusion": 1, "graphs": 1, "sched": 1}


def offered(offer: Any, name: str) -> Any:
    """The optional method `name` of an offer or of its class, None where it has none.

    What a class inherits by subclassing a Protocol is a stub, and counts as none.
    """
    cls = offer if isinstance(offer, type) else type(offer)
    stubs = [vars(protocol).get(name) for protocol in PROTOCOLS.values()]
    return None if getattr(cls, name, None) in (None, *stubs) else getattr(offer, name)
