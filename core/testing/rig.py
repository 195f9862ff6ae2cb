"""A KVManager on the bench: bound, with slots, and driven step by step without an engine.

The rig does for one plugin what the core does in a run, in the same order: acquire, on_slot, plan,
begin_step, then write and attend of every layer, publish, release. It trusts nothing it can look
at: padding that it adds on purpose must not show anywhere, and the plugin's books must balance
after every call.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence as Seq
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from core.batch import Batch, BatchShape, HostBatch, Limits, Sequence
from core.facts import ModelFacts
from core.sampling import SamplingParams
from core.testing import codes

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from core.seams import KVManager

GARBAGE = (
    1000.0  # what padding carries and unwritten memory holds: one read of it shows in any sum of ±1
)

Content = Callable[[Seq[int], int, int, ModelFacts], "NDArray[np.float32]"]


def tiny_facts(dtype: torch.dtype = torch.float32) -> ModelFacts:
    """Two layers, four query heads on two key/value heads of 32: small, and grouped."""
    return ModelFacts(
        num_layers=2,
        hidden_size=128,
        intermediate_size=128,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        vocab_size=64,
        max_position=1024,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        dtype=dtype,
    )


class Row(NamedTuple):
    """`seq` computes its tokens lo..hi-1, which stand at tokens start.. of the step."""

    seq: Sequence
    lo: int
    hi: int
    start: int


class Step(NamedTuple):
    """A step that has begun: its batch, its rows, and what every row holds as keys and values."""

    batch: Batch
    rows: list[Row]


class Rig:
    """One bound KVManager, its slots and sequences.

    `num_tokens` is the room to bind with: the smallest byte budget that buys it is searched through
    `capacity`, and the number of rows is lowered to what fits, as an engine does.
    """

    def __init__(
        self,
        kv: KVManager,
        *,
        num_tokens: int,
        limits: Limits,
        facts: ModelFacts | None = None,
        device: str = "cpu",
    ) -> None:
        self.kv, self.device = kv, torch.device(device)
        self.facts = facts or tiny_facts(torch.float32 if device == "cpu" else torch.bfloat16)
        self.kv_cache_bytes = budget_for(kv, self.facts, limits, num_tokens)
        capacity = kv.capacity(self.kv_cache_bytes, self.facts, limits)
        self.limits = dataclasses.replace(limits, max_num_seqs=capacity.num_seqs)
        kv.bind(self.facts, self.limits, self.kv_cache_bytes, self.device)
        self._arrays = {
            name: np.zeros(shape, dtype)
            for name, (shape, dtype) in kv.metadata(self.limits).items()
        }
        self._staged = {
            name: torch.from_numpy(array).to(self.device, copy=True)
            for name, array in self._arrays.items()
        }
        self._free_slots = list(range(self.limits.max_num_seqs - 1, -1, -1))
        self._hashes: dict[Sequence, list[int]] = {}
        self.num_extra_plans = 0
        self._fill_with_garbage()

    # ------------------------------------------------------------------------------- sequences

    def sequence(self, token_ids: Seq[int], *, share_prefix: bool = True) -> Sequence:
        """A sequence whose known tokens are `token_ids`; it holds nothing yet."""
        tokens = np.zeros(self.limits.max_model_len, np.int32)
        n = len(token_ids)
        tokens[:n] = token_ids
        order = len(self._hashes)
        seq = Sequence(
            f"r{order}", tokens, n, SamplingParams(), 0.0, order, self.limits.max_model_len
        )
        seq.num_known = seq.num_tokens = n
        seq.share_prefix = share_prefix
        self._hashes[seq] = []
        return seq

    def admit(self, seq: Sequence, upto: int | None = None) -> int | None:
        """Room for the first `upto` tokens (None: all that are known), and a slot.

        Returns how many are cached; they count as computed. None where there is no room, or no
        slot: then nothing has changed.
        """
        if not self._free_slots:
            return None
        cached = self.kv.acquire(seq, seq.num_tokens if upto is None else upto)
        self.kv.check_integrity()
        if cached is None:
            return None
        assert 0 <= cached < seq.num_known, f"{cached} cached tokens of {seq.num_known} known"
        seq.num_computed = seq.num_cached = cached
        seq.slot = self._free_slots.pop()
        self.kv.on_slot(seq, seq.slot)
        self.kv.check_integrity()
        return cached

    def has_room(self, seq: Sequence, upto: int) -> bool:
        """Whether `seq`, admitted, can hold `upto` tokens, after asking for the room if need be."""
        assert seq.slot is not None
        if upto > self.kv.reserved[seq.slot]:
            if self.kv.acquire(seq, upto) is None:
                self.kv.check_integrity()
                return False
            self.kv.check_integrity()
            reserved = int(self.kv.reserved[seq.slot])
            assert reserved >= upto, f"acquired {upto} tokens, reserved says {reserved}"
        return True

    def append(self, seq: Sequence, token_id: int) -> None:
        """One more token of `seq` is known."""
        seq.token_ids[seq.num_known] = token_id
        seq.num_known += 1
        seq.num_tokens = seq.num_known

    def publish_due(self, seq: Sequence) -> None:
        """Publish what is computed, if the plugin asks for it by now."""
        if seq.slot is not None and seq.num_computed >= self.kv.next_publish[seq.slot]:
            self.kv.publish(seq, seq.num_computed)
            due = int(self.kv.next_publish[seq.slot])
            assert due > seq.num_computed, "publish is due again at once"
            self.kv.check_integrity()

    def release(self, seq: Sequence) -> None:
        """`seq` ends or is preempted: slot and room go back."""
        assert seq.slot is not None
        slot, seq.slot, seq.num_computed = seq.slot, None, 0
        self.kv.on_slot(seq, None)
        self.kv.release(seq)
        self._free_slots.append(slot)
        assert self.kv.reserved[slot] == 0, "room is still reserved for a slot that nobody has"
        self.kv.check_integrity()

    # ------------------------------------------------------------------------------------ steps

    def begin(
        self,
        decodes: Seq[Sequence],
        prefills: Seq[tuple[Sequence, int]] = (),
        *,
        num_padding_tokens: int = 0,
        num_padding_rows: int = 0,
    ) -> Step:
        """Begin a step: a token of each of `decodes`, then chunks (sequence, tokens), then padding.

        A step whose rows have one token each is padded by as many rows as tokens, as a graph's
        would be.
        """
        rows: list[Row] = []
        start = 0
        for seq, n in [*((seq, 1) for seq in decodes), *prefills]:
            rows.append(Row(seq, seq.num_computed, seq.num_computed + n, start))
            start += n
        host = _host_batch(rows, len(decodes))
        for row in rows:
            assert self.has_room(row.seq, row.hi), "the step was planned without room for it"
        padding = (num_padding_tokens, num_padding_rows)
        batch = to_batch(host, self.limits, self._staged, self.device, padding=padding)
        self._send(host, batch)
        return Step(batch, rows)

    def end(self, step: Step) -> None:
        """The step's tokens are computed."""
        for row in step.rows:
            row.seq.num_computed = row.hi

    def write(self, step: Step, content: Content, layer: int) -> None:
        """Write the keys and values of the step's tokens, and garbage for its padding."""
        k, v = (
            self.content(step, content, layer, kind, self.facts)
            for kind in (codes.KEY, codes.VALUE)
        )
        self.kv.write(layer, k, v, step.batch)

    def content(
        self, step: Step, content: Content, layer: int, kind: int, facts: ModelFacts
    ) -> Tensor:
        """`content` of the step's tokens and garbage for its padding, [T, heads of facts, D]."""
        parts = [
            content(self.hashes(row.seq)[row.lo : row.hi], layer, kind, facts) for row in step.rows
        ]
        num_padding = step.batch.shape.num_tokens - sum(len(part) for part in parts)
        parts.append(np.full((num_padding, *parts[0].shape[1:]), GARBAGE, np.float32))
        return self.tensor(np.concatenate(parts))

    def attend(self, step: Step, layer: int, q: Tensor) -> NDArray[np.float32]:
        """Attention of q [n, H, D] of the real tokens, float32 [n, H, D]; padding asks garbage."""
        n, facts = len(q), self.facts
        asked = torch.full(
            (step.batch.shape.num_tokens, facts.num_heads, facts.head_dim),
            GARBAGE,
            dtype=facts.dtype,
            device=self.device,
        )
        asked[:n] = q
        out = self.kv.attend(layer, asked, step.batch)
        assert out.shape == (len(asked), facts.num_heads * facts.head_dim)
        return out[:n].float().cpu().numpy().reshape(n, facts.num_heads, facts.head_dim)

    def hashes(self, seq: Sequence) -> list[int]:
        """The rolling hash of every known token of `seq`."""
        known = self._hashes[seq]
        codes.extend_hashes(known, seq.token_ids[: seq.num_known].tolist())
        return known

    def seen(self, lo: int, hi: int) -> NDArray[np.bool_]:
        """Which keys each query at lo..hi-1 sees, [hi - lo, hi]: all up to its own position, but
        for an offer that forgets, and says so in `sees(asked [n, 1], keys [m])`: bool [n, m]."""
        asked, keys = np.arange(lo, hi)[:, None], np.arange(hi)
        declared = getattr(self.kv, "sees", None)
        seen: NDArray[np.bool_] = keys <= asked
        return seen if declared is None else seen & declared(asked, keys)

    def tensor(self, array: NDArray[Any]) -> Tensor:
        """`array` on the device, in the dtype of the cache."""
        return torch.from_numpy(array).to(self.device, self.facts.dtype)

    def storage(self) -> list[Tensor]:
        """Keys and values of each layer behind sinks of kind "blocks"; none without such sinks."""
        sinks = [self.kv.sink(layer) for layer in range(self.facts.num_layers)]
        return [t for sink in sinks if sink and sink.kind == "blocks" for t in (sink.k, sink.v)]

    def _fill_with_garbage(self) -> None:
        for tensor in self.storage():
            tensor.fill_(GARBAGE)

    def _send(self, host: HostBatch, batch: Batch) -> None:
        """plan and begin_step, as often as the plugin asks for, within what the core allows."""
        most = max(self.limits.max_model_len, self.limits.max_num_batched_tokens)
        for _ in range(most + 1):
            more = self.kv.plan(host, self._arrays)
            for name, array in self._arrays.items():
                self._staged[name].copy_(torch.from_numpy(array))
            self.kv.begin_step(batch)
            if not more:
                return
            self.num_extra_plans += 1
        raise AssertionError(f"plan is True {most + 1} times, and a step has no more of it")


def budget_for(kv: KVManager, facts: ModelFacts, limits: Limits, num_tokens: int) -> int:
    """The fewest bytes that buy `num_tokens` of room and a row, found by bisection of `capacity`.

    Where the limits allow less room than that, the fewest bytes that buy all of it.
    """
    plenty = 1 << 40
    wanted = min(num_tokens, kv.capacity(plenty, facts, limits).num_tokens)
    low, high = 0, plenty
    while high - low > 1:
        middle = (low + high) // 2
        capacity = kv.capacity(middle, facts, limits)
        is_enough = capacity.num_tokens >= wanted and capacity.num_seqs >= 1
        low, high = (low, middle) if is_enough else (middle, high)
    return high


def _host_batch(rows: Seq[Row], num_decodes: int) -> HostBatch:
    lens = np.array([row.hi - row.lo for row in rows], np.int32)
    slots = np.array([row.seq.slot for row in rows], np.int32)
    if (lens == 1).all():
        num_decodes = len(
            rows
        )  # as in the core: a step of single tokens is decoding, whoever they are
    return HostBatch(
        num_tokens=int(lens.sum()),
        num_seqs=len(rows),
        num_decodes=num_decodes,
        slots=slots,
        query_start=np.concatenate(([0], np.cumsum(lens))).astype(np.int32),
        seq_lens=np.array([row.hi for row in rows], np.int32),
        positions=np.concatenate([np.arange(row.lo, row.hi, dtype=np.int32) for row in rows]),
        token_slots=np.repeat(slots, lens),
    )


def to_batch(
    host: HostBatch,
    limits: Limits,
    kv_arrays: dict[str, Tensor],
    device: torch.device,
    *,
    padding: tuple[int, int] = (0, 0),
) -> Batch:
    """The device's view of a step, padded by (tokens, rows): what the core would stage.

    Padding tokens have position 0 and the trash slot; padding rows have the trash slot, no query,
    length 0.
    """
    num_tokens, num_seqs, max_query = (
        host.num_tokens,
        host.num_seqs,
        int(np.diff(host.query_start).max()),
    )
    tokens, rows = num_tokens + padding[0], num_seqs + padding[1]
    if max_query == 1:
        tokens = max(tokens, rows)  # pieces of a graph are padded in tokens alone
    start = int(host.positions[0]) if num_seqs == 1 and max_query > 1 else None
    if start and any(padding):
        start = None  # the core pads a chunk behind a prefix to a shape of any step
    trash = limits.trash_slot

    def staged(values: NDArray[Any], width: int, fill: int) -> Tensor:
        padded = np.full(width, fill, np.int32)
        padded[: len(values)] = values
        return torch.from_numpy(padded).to(device)

    nothing = np.zeros(0, np.int32)
    return Batch(
        shape=BatchShape(tokens, rows, max_query, int(host.seq_lens.max()), start),
        token_ids=staged(nothing, tokens, 0),
        positions=staged(host.positions, tokens, 0),
        token_slots=staged(host.token_slots, tokens, trash),
        slots=staged(host.slots, rows, trash),
        query_start=staged(host.query_start, rows + 1, num_tokens),
        seq_lens=staged(host.seq_lens, rows, 0),
        num_decodes=staged(np.array([host.num_decodes], np.int32), 1, 0),
        logit_rows=staged(nothing, rows, 0),
        sample_slots=staged(nothing, rows, trash),
        temperature=torch.zeros(rows, device=device),
        sample_keys=torch.zeros(rows, 2, dtype=torch.int32, device=device),
        kv=kv_arrays,
        last_token=torch.zeros(limits.max_num_seqs + 1, dtype=torch.int32, device=device),
        host=host,
    )
