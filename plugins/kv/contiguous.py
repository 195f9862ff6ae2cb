"""`contiguous`, the baseline: a row of `max_model_len` tokens a slot, no table, no sharing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from core.config import OfferConfig
from core.seams import Capacity, Saved, Usage
from plugins.kv.blocks import NEVER, slot_rows

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from numpy.typing import NDArray
    from torch import Tensor

    from core.batch import Batch, HostBatch, Limits, Sequence
    from core.facts import ModelFacts
    from core.seams import KVSink


class Contiguous:
    """The slot is the row: a block of max_model_len tokens. The trash slot has one too."""

    api: ClassVar[int] = 1
    lossless: ClassVar[bool] = True
    prefix_sharing: ClassVar[bool] = False
    graph_safe: ClassVar[bool] = True

    class Config(OfferConfig):
        """No options."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self._held: dict[Sequence, int | None] = {}

    # ------------------------------------------------------------------------------------ host half

    def capacity(self, kv_cache_bytes: int, facts: ModelFacts, limits: Limits) -> Capacity:
        from plugins.kv.storage import overhead_bytes

        room = kv_cache_bytes - overhead_bytes(facts, limits, table_width=0)
        num_rows = room // (facts.kv_bytes_per_token * limits.max_model_len) - 1
        num_seqs = min(limits.max_num_seqs, max(0, num_rows))
        return Capacity(num_seqs * limits.max_model_len, num_seqs)

    def ever_fits(self, num_tokens: int) -> str | None:
        if num_tokens <= self._limits.max_model_len:
            return None
        return (
            f"a sequence of {num_tokens} tokens is longer than a row of max_model_len "
            f"{self._limits.max_model_len}; shorten it or raise --max-model-len"
        )

    def acquire(self, seq: Sequence, upto: int) -> int | None:
        if seq not in self._held:
            if len(self._held) == self._limits.max_num_seqs:
                return None
            self._held[seq] = None
        return 0

    def on_slot(self, seq: Sequence, slot: int | None) -> None:
        previous = self._held[seq]
        if previous is not None:
            self.reserved[previous] = 0
        self._held[seq] = slot
        if slot is not None:
            self.reserved[slot] = self._limits.max_model_len

    def publish(self, seq: Sequence, num_tokens: int) -> None:
        """Rows are not shared."""

    def rollback(self, seq: Sequence, num_tokens: int) -> None:
        """Nothing was published."""

    def release(self, seq: Sequence) -> None:
        self.on_slot(seq, None)
        del self._held[seq]

    def save(self, seq: Sequence, num_tokens: int) -> Saved:
        slot = self._held[seq]
        assert slot is not None, "only what runs can be saved"
        data = self.storage.save([slot], num_tokens)
        return Saved(num_tokens, sum(plane.nbytes for plane in data), data)

    def restore(self, seq: Sequence, saved: Saved, num_cached: int) -> None:
        slot = self._held[seq]
        assert slot is not None, "only what runs can be restored"
        self.storage.restore([slot], 0, saved.data)

    def usage(self) -> Usage:
        length = self._limits.max_model_len
        return Usage(self._limits.max_num_seqs * length, len(self._held) * length, 0)

    def check_integrity(self) -> None:
        slots = [slot for slot in self._held.values() if slot is not None]
        assert len(self._held) <= self._limits.max_num_seqs, "more sequences than rows"
        assert len(set(slots)) == len(slots), "two sequences run in one slot"
        reserved = slot_rows(self._limits, 0)
        reserved[slots] = self._limits.max_model_len
        assert (reserved == self.reserved).all(), "reserved does not follow the slots"

    # ---------------------------------------------------------------------------------- device half

    def bind(
        self, facts: ModelFacts, limits: Limits, kv_cache_bytes: int, device: torch.device
    ) -> None:
        from plugins.kv.storage import allocate, device_path

        self._limits = limits
        self.reserved: NDArray[Any] = slot_rows(limits, 0)
        self.next_publish: NDArray[Any] = slot_rows(limits, NEVER)
        self.storage = allocate(
            facts,
            limits,
            device,
            num_blocks=limits.max_num_seqs + 1,
            block_size=limits.max_model_len,
            table_width=0,
        )
        self.path = device_path(facts, self.storage)

    def metadata(self, limits: Limits) -> Mapping[str, tuple[tuple[int, ...], str]]:
        return self.path.metadata(limits)

    def plan(self, step: HostBatch, host: Mapping[str, NDArray[Any]]) -> bool:
        self.path.plan(step, host)
        return False

    def begin_step(self, batch: Batch) -> None:
        self.path.begin_step(batch)

    def write(self, layer: int, k: Tensor, v: Tensor, batch: Batch) -> None:
        self.path.write(layer, k, v, batch)

    def attend(self, layer: int, q: Tensor, batch: Batch) -> Tensor:
        return self.path.attend(layer, q, batch)

    def gather(self, slot: int, layer: int, lo: int, hi: int) -> tuple[Tensor, Tensor, Tensor]:
        return self.storage.gather(slot, layer, lo, hi)

    def sink(self, layer: int) -> KVSink | None:
        return self.storage.sink(layer)
