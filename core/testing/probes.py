"""Two probes that tell from the output of attention what it has read, without weights.

Keys and values are codes of ±1 that name a token and all tokens before it (`core.testing.codes`).
Two probes:

- *what was read*: q = 0 makes attention uniform, so output × length is the sum of the codes that
were read, an
  integer that is exact in float32, bfloat16, INT8 and INT4 alike. A page that is stale, aliased,
  foreign, missing or read twice changes it in about half of the dimensions.
- *where it was read*: q = gain · code of one key makes the softmax one-hot, so the output is the
value beside that
  key. This sees keys, their order and the pairing of heads, which a sum does not.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

import numpy as np
import torch

from core.testing import codes

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from core.batch import Sequence
    from core.testing.rig import Rig, Row, Step

# Keys of 32 dimensions that differ in one sign stay 2 * 64 / sqrt(32) = 22 apart in the exponent.
_GAIN = 64.0
_HALF = 0.5  # sums are integers, codes are ±1: nearer than half a unit is right


def run_step(
    rig: Rig,
    decodes: Seq[Sequence],
    prefills: Seq[tuple[Sequence, int]] = (),
    *,
    num_padding_tokens: int = 0,
    num_padding_rows: int = 0,
) -> None:
    """One whole step, both probes on every token, and a guard on what it must not touch."""
    step = rig.begin(
        decodes,
        prefills,
        num_padding_tokens=num_padding_tokens,
        num_padding_rows=num_padding_rows,
    )
    for layer in range(rig.facts.num_layers):
        guard = WriteGuard(rig, step, layer)
        rig.write(step, codes.signs, layer)
        guard.check()
        check_sums(rig, step, layer)
        check_places(rig, step, layer)
    rig.end(step)


def compute(rig: Rig, seq: Sequence, *, num_padding_tokens: int = 0) -> None:
    """All that is left of a prompt, in chunks of the step's budget, published when it is due."""
    budget = rig.limits.max_num_batched_tokens - num_padding_tokens
    while seq.remaining:
        chunk = min(seq.remaining, budget)
        run_step(rig, [], [(seq, chunk)], num_padding_tokens=num_padding_tokens if chunk > 1 else 0)
        rig.publish_due(seq)


def decode(rig: Rig, running: Seq[Sequence], num_tokens: int) -> None:
    """`num_tokens` more tokens of each, one step for one token of all."""
    for i in range(num_tokens):
        for seq in running:
            rig.append(seq, (seq.order + i) % 50)
        run_step(rig, running)
        for seq in running:
            rig.publish_due(seq)


def check_sums(rig: Rig, step: Step, layer: int) -> None:
    """Uniform attention: the sum over all that a token may see, and nothing else."""
    facts = rig.facts
    num_tokens = sum(row.hi - row.lo for row in step.rows)
    out = rig.attend(step, layer, torch.zeros(num_tokens, facts.num_heads, facts.head_dim))
    for row in step.rows:
        values = _values(rig, row, layer)
        seen = rig.seen(row.lo, row.hi).astype(np.float32)
        wanted = np.tensordot(seen, values, 1)
        lengths = seen.sum(1)[:, None, None]
        got = out[row.start : row.start + row.hi - row.lo] * lengths
        _compare(row, layer, got, wanted, "the sum of the values read")


def check_places(rig: Rig, step: Step, layer: int) -> None:
    """One-hot attention: each token and head asks for one key and must get the value beside it."""
    facts = rig.facts
    group = facts.num_heads // facts.num_kv_heads
    questions, answers = [], []
    for row in step.rows:
        hashes = rig.hashes(row.seq)[: row.hi]
        keys, values = codes.signs(hashes, layer, codes.KEY, facts), _values(rig, row, layer)
        seen = rig.seen(row.lo, row.hi)
        heads, num_seen = range(facts.num_heads), seen.sum(1)
        drawn = [codes.pick(hashes[row.lo :], layer, head, num_seen) for head in heads]
        in_order = np.argsort(~seen, 1, kind="stable")  # what is seen first
        asked = np.take_along_axis(in_order, np.stack(drawn, 1), 1)
        shared = np.array([head // group for head in heads])
        questions.append(keys[asked, shared] * _GAIN)
        answers.append(values[asked, shared])
    out = rig.attend(step, layer, rig.tensor(np.concatenate(questions)))
    for row, wanted in zip(step.rows, answers, strict=True):
        got = out[row.start : row.start + row.hi - row.lo]
        _compare(row, layer, got, wanted, "the value beside the key asked for", group=1)


def check_gather(rig: Rig, seq: Sequence) -> None:
    """`gather` gives back what the last query sees, by position, for every layer."""
    assert seq.slot is not None
    n = seq.num_computed
    wanted_positions = rig.seen(n - 1, n)[0].nonzero()[0]
    hashes = [rig.hashes(seq)[p] for p in wanted_positions]
    for layer in range(rig.facts.num_layers):
        k, v, positions = rig.kv.gather(seq.slot, layer, 0, n)
        assert positions.tolist() == wanted_positions.tolist(), "positions out of order"
        for kind, got in ((codes.KEY, k), (codes.VALUE, v)):
            wanted = codes.signs(hashes, layer, kind, rig.facts)
            off = np.abs(got.float().cpu().numpy() - wanted).max(initial=0)
            assert off < _HALF, f"gather of {seq.request_id} is off by {off} in layer {layer}"


class WriteGuard:
    """What a write may change: the places of the step's own tokens, and the trash block.

    It looks through sinks of kind "blocks", which say where tokens go; a plugin without them is
    held to the probes.
    """

    def __init__(self, rig: Rig, step: Step, layer: int) -> None:
        sink = rig.kv.sink(layer)
        self._sink = sink if sink is not None and sink.kind == "blocks" else None
        if self._sink is None:
            return
        self._before = self._sink.k.clone(), self._sink.v.clone()
        places = self._sink.slot_map[: step.batch.shape.num_tokens].cpu().numpy()
        num_tokens = sum(row.hi - row.lo for row in step.rows)
        self._own, self._padding = places[:num_tokens], places[num_tokens:]

    def check(self) -> None:
        """Compare all bytes but those with what they were."""
        if self._sink is None:
            return
        size = self._sink.block_size
        trash = np.unique(self._padding // size)
        assert len(set(self._own.tolist())) == len(self._own), "two tokens of a step share a place"
        assert not np.isin(self._own // size, trash).any(), "padding goes to a block in use"
        for before, now in zip(self._before, (self._sink.k, self._sink.v), strict=True):
            changed = (before != now).any(3).any(1).cpu().numpy()  # [N, B]
            changed.reshape(-1)[self._own] = False
            changed[trash] = False
            where = np.argwhere(changed).tolist()
            assert not where, f"a write touched (block, offset) {where}, which nobody wrote to"


def _values(rig: Rig, row: Row, layer: int) -> NDArray[np.float32]:
    return codes.signs(rig.hashes(row.seq)[: row.hi], layer, codes.VALUE, rig.facts)


def _compare(
    row: Row,
    layer: int,
    got: NDArray[np.float32],
    wanted: NDArray[np.float32],
    what: str,
    group: int | None = None,
) -> None:
    """Assert that [n, H, D] is [n, K or H, D] within half a unit; name the first that is not."""
    repeats = group or got.shape[1] // wanted.shape[1]
    wrong = ~(np.abs(got - np.repeat(wanted, repeats, 1)) < _HALF)  # a NaN is wrong, too
    if wrong.any():
        token, head, _ = np.argwhere(wrong)[0].tolist()
        raise AssertionError(
            f"layer {layer}, {row.seq.request_id} in slot {row.seq.slot}, "
            f"position {row.lo + token}, head {head}: {what} is wrong in "
            f"{int(wrong[token, head].sum())} of {got.shape[2]} dimensions"
        )
