"""The conformance suite of the kv seam. Subclass it, name the offer, and run pytest:

    class TestPagedFp8(KVManagerSuite):       # heeds `held_to` of the offer, as core.check does
        plugin = "paged_fp8"                  # by registered name, or `offer = PagedFp8`
        config = {"block_size": 16}
        expected_failures = {"test_gather": "returns rounded values"}  # strict: a pass is a failure

Every test states one clause of the contract in `core.seams.KVManager`. `core.testing.kv_gpu` runs
all of them on CUDA, and from captured graphs too.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, ClassVar, cast

import numpy as np
import pytest
import torch

from core.batch import Limits
from core.seams import offered
from core.testing import codes, parity
from core.testing.dense import run_dense_step, worst_error
from core.testing.oracle import PageOracle, TraceCounts
from core.testing.probes import check_gather, compute, decode, run_step
from core.testing.rig import Rig, budget_for, tiny_facts
from core.testing.suite import Suite

if TYPE_CHECKING:
    from core.batch import Sequence
    from core.seams import KVManager

MAX_LEN = 96  # tokens of the longest sequence here
PLENTY = 5 * MAX_LEN  # tokens of room for everything that a test runs at once


class KVManagerSuite(Suite):
    """What every KVManager keeps. Class attributes say which one, and how exact it is.

    `tolerance` is the largest absolute error of attention over values in [-1, 1) against float64.
    `bytes_per_token` is what a token of the suite's model (`core.testing.rig.tiny_facts`: 2 layers,
    2 KV heads of 32) costs in a large cache; None: facts.kv_bytes_per_token.
    An offer that forgets declares what is left in a method `sees(asked, keys)`, see `Rig.seen`;
    its `gather` up to the newest token gives of these what that token sees.
    """

    seam: ClassVar[str] = "kv"
    device: ClassVar[str] = "cpu"
    dtype: ClassVar[torch.dtype] = torch.float32
    tolerance: ClassVar[float] = parity.CACHE[torch.float32]
    bytes_per_token: ClassVar[float | None] = None
    limits: ClassVar[Limits] = Limits(MAX_LEN, 4, 64)
    # Of a random trace: what was asked for last, and how many there may be (None: as many).
    num_drawn, most_requests = 0, None

    @pytest.fixture(autouse=True)
    def _device(self) -> None:
        """Skip a device that is not here."""
        if self.device == "cuda" and not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")

    # ------------------------------------------------------------------------------- helpers

    def make(self, *, sharing: bool | None = None) -> KVManager:
        """A fresh, unbound manager; `sharing` is what the engine may set before `bind`."""
        kv = self.made()
        if sharing is not None and kv.prefix_sharing:
            kv.sharing = sharing
        return cast("KVManager", kv)

    def rig(
        self,
        num_tokens: int = PLENTY,
        limits: Limits | None = None,
        *,
        sharing: bool | None = None,
    ) -> Rig:
        """A bound manager with room for `num_tokens`."""
        return Rig(
            self.make(sharing=sharing),
            num_tokens=num_tokens,
            limits=limits or self.limits,
            facts=tiny_facts(self.dtype),
            device=self.device,
        )

    def trace(self, rig: Rig, seed: int, num_requests: int, max_total: int) -> TraceCounts:
        """What a random trace went through, every page looked at."""
        self.num_drawn, most = num_requests, self.most_requests
        num = num_requests if most is None else min(num_requests, most)
        return PageOracle(rig, seed=seed, num_requests=num, max_total=max_total).run()

    def unit(self) -> int:
        """Tokens in which room is handed out."""
        rig = self.rig()
        seq = rig.sequence([1])
        rig.admit(seq)
        return int(rig.kv.reserved[_slot(seq)])

    def edges(self) -> list[int]:
        """Lengths around the unit, 1 and the longest among them."""
        unit = self.unit()
        lengths = {1, unit - 1, unit, unit + 1, 2 * unit, 3 * unit + 1, MAX_LEN}
        return sorted(n for n in lengths if 0 < n <= MAX_LEN)

    # ------------------------------------------------------------------------- facts and room

    def test_lossless_is_as_declared(self) -> None:
        """Who is lossless is exact to rounding and forgets nothing; who is held to less is not."""
        kv, exact = self.make(), parity.ATTENTION[self.dtype]
        if kv.lossless:
            assert self.tolerance <= exact, f"it asks for {self.tolerance:g}, rounding is {exact:g}"
            assert getattr(kv, "sees", None) is None, "it declares in `sees` what it forgets"

    def test_capacity_is_what_the_bytes_buy(self) -> None:
        """In a large cache a token costs what it is declared to; nothing outgrows the budget."""
        facts, limits = tiny_facts(self.dtype), dataclasses.replace(self.limits, max_num_seqs=1200)
        cost = self.bytes_per_token or facts.kv_bytes_per_token
        num_bytes = budget_for(self.make(), facts, limits, 1000 * MAX_LEN)
        few, many, tight = (
            self.make().capacity(int(n), facts, limits).num_tokens
            for n in (num_bytes, num_bytes + 200 * MAX_LEN * cost, 1200 * MAX_LEN * cost)
        )
        bought = many - few
        assert abs(bought - 200 * MAX_LEN) <= MAX_LEN, (
            f"a token costs {200 * MAX_LEN * cost / max(bought, 1):.1f} bytes of a model with "
            f"{facts.num_layers} layers and {facts.num_kv_heads} KV heads of {facts.head_dim}; "
            f"declared, as bytes_per_token: {cost:g}"
        )
        assert tight <= 1200 * MAX_LEN, f"bytes of {1200 * MAX_LEN} tokens give room for {tight}"
        assert self.make().capacity(0, facts, limits).num_seqs == 0

    def test_what_is_allocated_stays_within_the_budget(self) -> None:
        rig = self.rig()
        capacity = rig.kv.capacity(rig.kv_cache_bytes, rig.facts, rig.limits)
        assert rig.kv.usage() == (capacity.num_tokens, 0, 0)
        storages = [tensor.untyped_storage() for tensor in rig.storage()]
        num_bytes = {storage.data_ptr(): storage.nbytes() for storage in storages}
        assert sum(num_bytes.values()) <= rig.kv_cache_bytes

    def test_ever_fits_says_numbers(self) -> None:
        """What an empty pool can hold is accepted, and really fits; the rest is a sentence."""
        rig = self.rig(num_tokens=MAX_LEN // 2)
        fits = [n for n in range(1, MAX_LEN + 1) if rig.kv.ever_fits(n) is None]
        assert fits == list(range(1, len(fits) + 1)) and len(fits) >= MAX_LEN // 2
        assert rig.admit(rig.sequence([3] * fits[-1])) == 0
        refusal = rig.kv.ever_fits(10 * MAX_LEN)
        assert refusal is not None and str(10 * MAX_LEN) in refusal and len(refusal.split()) > 5

    def test_a_full_pool_says_none_and_changes_nothing(self) -> None:
        rig = self.rig(num_tokens=MAX_LEN, limits=Limits(MAX_LEN, 8, 64))
        running, kv = _fill(rig), rig.kv
        usage, reserved, due = kv.usage(), kv.reserved.copy(), kv.next_publish.copy()
        assert kv.acquire(rig.sequence([7] * MAX_LEN), MAX_LEN) is None
        kv.check_integrity()
        assert kv.usage() == usage, f"{usage} has become {kv.usage()}"
        assert (kv.reserved == reserved).all() and (kv.next_publish == due).all()
        for seq in running:
            compute(rig, seq)
        rig.release(running[0])
        assert rig.admit(rig.sequence([7] * running[0].num_known)) is not None

    def test_release_gives_everything_back(self) -> None:
        rig = self.rig(num_tokens=MAX_LEN, limits=Limits(MAX_LEN, 8, 64))
        counts = set()
        for _ in range(5):
            running = _fill(rig)
            counts.add(len(running))
            for seq in running:
                compute(rig, seq)
            for seq in running:
                rig.release(seq)
            assert rig.kv.usage().num_held == 0
        assert len(counts) == 1, f"one pool held {sorted(counts)} of the same sequences"

    def test_room_is_nobody_elses(self) -> None:
        """Sequences side by side, growing in turns, read back what each of them wrote."""
        rig = self.rig()
        running = [rig.sequence([10 + i] * (7 * i + 1)) for i in range(self.limits.max_num_seqs)]
        for seq in running:
            assert rig.admit(seq) == 0
            compute(rig, seq)
        for token in range(2 * 16 + 2):
            for seq in running:
                rig.append(seq, token)
            run_step(rig, running)
        for seq in running:
            check_gather(rig, seq)

    # -------------------------------------------------------------------------------- sharing

    def test_sharing_is_as_declared(self) -> None:
        """A prefix is shared if and only if the offer says so; holders do not need each other."""
        rig, unit = self.rig(), self.unit()
        prompt = list(range(MAX_LEN - 6))
        first, second, third = (rig.sequence(prompt[:n] + [60]) for n in (90, 90, 40))
        rig.admit(first)
        compute(rig, first)
        for seq in (second, third):
            cached = rig.admit(seq)
            whole_units = (seq.num_known - 1) // unit * unit
            assert cached == (whole_units if rig.kv.prefix_sharing else 0)
            compute(rig, seq)
        decode(rig, [first, second, third], 3)
        rig.release(first)
        decode(rig, [second, third], 1)
        rig.release(second)
        decode(rig, [third], 17)
        rig.release(third)
        assert rig.kv.usage().num_held == 0

    def test_a_token_is_left_to_compute(self) -> None:
        """A prompt that is cached whole still needs the logits of its last token."""
        rig = self.rig()
        for n in self.edges():
            for _ in range(2):
                seq = rig.sequence([n] * n)
                rig.admit(seq)  # asserts that fewer tokens than it knows are cached
                compute(rig, seq)
                rig.release(seq)

    def test_a_shared_block_is_never_written(self) -> None:
        """Whatever followers write, wherever they part from the first, its bytes stay."""
        rig = self.rig()
        first = rig.sequence([1 + i % 7 for i in range(50)])
        rig.admit(first)
        compute(rig, first)
        before = _bytes_of(rig, first)
        for num_common in (1, 15, 16, 17, 31, 49):
            prompt = first.token_ids[:num_common].tolist() + [55] * 12
            seq = rig.sequence(prompt)
            rig.admit(seq)
            compute(rig, seq)
            decode(rig, [seq], 2)
            rig.release(seq)
            assert _bytes_of(rig, first) == before, f"changed by a prefix of {num_common} tokens"

    def test_two_identical_prompts_in_one_step(self) -> None:
        """Both may compute the same; both read their own, both go, a third finds it."""
        rig, unit = self.rig(), self.unit()
        first, second, third = (rig.sequence([2] * 40) for _ in range(3))
        for seq in (first, second):
            rig.admit(seq)
        run_step(rig, [], [(seq, min(seq.remaining, 32)) for seq in (first, second)])
        for seq in (first, second):
            rig.publish_due(seq)
            compute(rig, seq)
        rig.release(first)
        decode(rig, [second], 3)
        cached = rig.admit(third)
        assert cached == (39 // unit * unit if rig.kv.prefix_sharing else 0)
        rig.release(second)
        compute(rig, third)
        rig.release(third)
        assert rig.kv.usage().num_held == 0

    def test_a_hit_is_verified_after_reuse(self) -> None:
        """Room given to other content is not found under its old name."""
        rig = self.rig(num_tokens=MAX_LEN + self.unit())
        known = [5] * 60
        intruders = ([6] * MAX_LEN, [5] * 20 + [6] * 70, [6] * 20 + [5] * 60, known[:33] + [9] * 40)
        for intruder in intruders:
            for prompt in (known, intruder, known[:50]):
                seq = rig.sequence(prompt)
                rig.admit(seq)
                compute(rig, seq)
                rig.release(seq)

    def test_a_hit_knows_what_came_before(self) -> None:
        """The same tokens after another history, or at another place, are other keys."""
        rig = self.rig(num_tokens=4 * PLENTY)
        a, b, c, d = (list(range(32 * i, 32 * i + 32)) for i in range(4))
        for prompt in (a + b, c + d, a + d, c + b, b + a, d, b, c + a + d):
            seq = rig.sequence([*prompt[: MAX_LEN - 1], 200])
            rig.admit(seq)
            compute(rig, seq)
            rig.release(seq)

    def test_rollback_takes_back_what_was_published(self) -> None:
        rig, unit = self.rig(), self.unit()
        first = rig.sequence([4] * 80)
        rig.admit(first)
        compute(rig, first)
        for num_kept in (unit + 1, 0):
            rig.kv.rollback(first, num_kept)
            rig.kv.check_integrity()
            follower = rig.sequence([4] * 80)
            cached = rig.admit(follower)
            assert cached is not None and cached <= num_kept, f"{cached} tokens are found again"
            rig.release(follower)
        rig.publish_due(first)
        again = rig.sequence([4] * 80)
        cached = rig.admit(again)
        assert cached is not None and (cached > 0) == (rig.kv.prefix_sharing and unit < 80)
        compute(rig, again)

    def test_sharing_can_be_switched_off(self) -> None:
        """For one sequence by `share_prefix`, for all by the engine before `bind`."""
        for sharing, share_prefix in ((True, False), (False, True)):
            rig = self.rig(sharing=sharing)
            for _ in range(2):
                seq = rig.sequence([8] * 70, share_prefix=share_prefix)
                assert rig.admit(seq) == 0
                compute(rig, seq)
                assert rig.kv.next_publish[_slot(seq)] > MAX_LEN
                rig.release(seq)
            assert rig.kv.usage().num_cached == 0

    # ---------------------------------------------------------------------- writing and reading

    def test_write_then_read_is_dense_attention(self) -> None:
        """At every edge of a block: a prompt in one piece, and a token after it."""
        rig = self.rig(limits=Limits(MAX_LEN, 4, MAX_LEN))
        errors = []  # and the number of tokens
        for n in self.edges():
            seq = rig.sequence([n] * n, share_prefix=False)
            rig.admit(seq)
            out = run_dense_step(rig, [], [(seq, n)])
            errors.append((worst_error(rig, seq, 0, out), f"a prompt of {n} tokens"))
            if n < MAX_LEN:
                rig.append(seq, 1)
                error = worst_error(rig, seq, n, run_dense_step(rig, [seq]))
                errors.append((error, f"a token after {n}"))
            rig.release(seq)
        first = next((i for i, (error, _) in enumerate(errors) if not error <= self.tolerance), 0)
        worst, where = max(errors)
        self._exact(*errors[first], f"; at most by {worst:.2g}, {where}")

    def _exact(self, error: float, what: str, more: str = "") -> None:
        allowed = f"where {self.tolerance:g} is allowed{more}"
        assert error <= self.tolerance, f"{what}: attention is off by {error:.2g}, {allowed}"

    def test_chunks_do_not_show(self) -> None:
        """Chunked anywhere, alone or beside others, a prompt reads what it reads in one piece."""
        rig = self.rig(limits=Limits(MAX_LEN, 4, MAX_LEN))
        whole, chunked, other = (rig.sequence([3] * n, share_prefix=False) for n in (80, 80, 9))
        rig.admit(whole)
        unchunked = run_dense_step(rig, [], [(whole, 80)])
        rig.release(whole)
        for seq in (chunked, other):
            rig.admit(seq)
        run_dense_step(rig, [], [(other, 9)])
        parts = []
        for n in (1, 15, 16, 17, 1, 30):
            rig.append(other, n)
            out = run_dense_step(rig, [other], [(chunked, n)])
            parts.append([layer[1:] for layer in out])
        for layer, expected in enumerate(unchunked):
            got = np.concatenate([part[layer] for part in parts])
            off = np.abs(got - expected).max((1, 2))  # [80]
            wrong = f"layer {layer}, position {off.argmax()}: off by {off.max():.2g}"
            assert off.max() <= self.tolerance, f"{wrong}, where {self.tolerance:g} is allowed"

    def test_gather_returns_what_was_written(self) -> None:
        rig = self.rig()
        for n in self.edges():
            seq = rig.sequence([n] * n)
            rig.admit(seq)
            compute(rig, seq)
            check_gather(rig, seq)
            lo, hi = n // 3, n - n // 4
            if not rig.seen(n - 1, n).all():
                hi = n  # what an earlier query saw may be gone
            k, v, positions = rig.kv.gather(_slot(seq), 1, lo, hi)
            kept = [p for p in range(lo, hi) if rig.seen(hi - 1, hi)[0, p]]
            shape = (len(kept), rig.facts.num_kv_heads, rig.facts.head_dim)
            assert k.shape == v.shape == shape
            assert positions.tolist() == kept
            hashes = [rig.hashes(seq)[p] for p in kept]
            wanted = codes.signs(hashes, 1, codes.VALUE, rig.facts)
            assert np.abs(v.float().cpu().numpy() - wanted).max(initial=0) < 0.5
            rig.release(seq)

    def test_what_is_saved_comes_back(self) -> None:
        """All that belongs to a token goes to the host and back, into other room than it had."""
        rig = self.rig()
        save, restore = (offered(rig.kv, name) for name in ("save", "restore"))
        assert (save is None) == (restore is None), "of save and restore it has one: give both"
        if save is None or restore is None:
            pytest.skip("save and restore are not offered")
        for n in self.edges()[:-1]:
            seq = rig.sequence([n] * n, share_prefix=False)
            rig.admit(seq)
            compute(rig, seq)
            saved = save(seq, n)
            assert (saved.num_tokens, saved.num_bytes > 0) == (n, True)
            rig.release(seq)
            squatter = rig.sequence([1] * n, share_prefix=False)
            rig.admit(squatter)  # in the room that was given back, and writes nothing
            cached = rig.admit(seq)
            assert cached == 0
            restore(seq, saved, cached)
            seq.num_computed = n
            decode(rig, [seq], min(5, MAX_LEN - n))
            check_gather(rig, seq)
            rig.release(seq)
            rig.release(squatter)

    def test_a_slot_that_changes_hands(self) -> None:
        """Short after long in one slot, and the long one again: nobody reads or spoils another."""
        rig = self.rig(limits=Limits(MAX_LEN, 1, 64), num_tokens=2 * MAX_LEN)
        for n in (MAX_LEN - 1, 3, MAX_LEN - 1, 40, 17, MAX_LEN - 1):
            seq = rig.sequence([n] * n)
            rig.admit(seq)
            compute(rig, seq)
            decode(rig, [seq], min(20, MAX_LEN - n))
            rig.release(seq)

    def test_a_step_that_is_given_up_leaves_nothing_behind(self) -> None:
        """Steps are planned and begun, at every edge of a block, and run only when begun again."""
        rig = self.rig(limits=Limits(MAX_LEN, 2, MAX_LEN))
        goes, stays = (rig.sequence([n] * n, share_prefix=False) for n in (2, 3))
        for seq in (goes, stays):
            rig.admit(seq)
        run_dense_step(rig, [], [(goes, 2), (stays, 3)])
        for n in range(3, 40):
            for seq in (goes, stays):
                rig.append(seq, n)
            rig.begin([goes, stays])
            out = run_dense_step(rig, [stays])  # in truth `goes` has ended by then
            self._exact(worst_error(rig, stays, n, out), f"the token after {n}")
            out = run_dense_step(rig, [goes])
            self._exact(worst_error(rig, goes, n - 1, out), f"the token after {n - 1}")

    def test_a_long_hit_arrives_whole(self) -> None:
        """What a hit tells the device may be more than one step's metadata hold."""
        rig = self.rig(limits=Limits(MAX_LEN, 2, 8))
        for _ in range(2):
            seq = rig.sequence([11] * (MAX_LEN - 2))
            rig.admit(seq)
            compute(rig, seq)
            decode(rig, [seq], 2)
            rig.release(seq)

    def test_padding_touches_nothing(self) -> None:
        """In a full pool, steps padded far beyond their rows leave every other byte as it was."""
        rig = self.rig(limits=Limits(MAX_LEN, 64, 128))
        running = [rig.sequence([20 + i] * n) for i, n in enumerate((16, 33, 5))]
        prompt = rig.sequence([40] * 21)
        for seq in (*running, prompt):
            assert rig.admit(seq, seq.num_known + 3) == 0
        bystanders = [*_fill(rig, 40), *_fill(rig, 1)]
        for seq in (*running, *bystanders):
            compute(rig, seq, num_padding_tokens=80)
        before = [_bytes_of(rig, seq) for seq in bystanders]
        for seq in running:
            rig.append(seq, 1)
        run_step(rig, running, num_padding_tokens=6, num_padding_rows=1)
        for seq in running:
            rig.append(seq, 2)
        run_step(rig, running, [(prompt, 20)], num_padding_tokens=100, num_padding_rows=1)
        run_step(rig, [], [(prompt, 1)], num_padding_tokens=4, num_padding_rows=4)
        for seq, bytes_before in zip(bystanders, before, strict=True):
            told = (
                f"what is stored for {seq.request_id} in slot {seq.slot}, in no step, has changed"
            )
            assert _bytes_of(rig, seq) == bytes_before, told

    # ----------------------------------------------------------------------------- the oracle

    @pytest.mark.parametrize("seed", range(2))
    def test_random_traces(self, seed: int) -> None:
        rig = self.rig()
        counts = self.trace(rig, seed, 20, MAX_LEN - 10)
        assert counts.num_finished == 20 and counts.num_mixed_steps and counts.num_preemptions
        hits, sharing, unit = counts.num_cached_tokens, rig.kv.prefix_sharing, self.unit()
        assert not hits or (sharing and unit < 40)
        assert hits or not sharing or unit > 20  # larger ones are hit by chance

    @pytest.mark.parametrize("num_spare_units", [0, 1, 4])
    def test_scarce_pools(self, num_spare_units: int) -> None:
        """From room for the longest request alone on, everybody finishes and reads right."""
        longest, unit = 60, self.unit()
        room = -(-longest // unit) * unit + num_spare_units * unit
        rig = self.rig(num_tokens=room)
        counts = self.trace(rig, 7, 12, longest)
        assert counts.num_finished == 12


def _slot(seq: Sequence) -> int:
    assert seq.slot is not None
    return seq.slot


def _fill(rig: Rig, num_tokens: int = 20) -> list[Sequence]:
    """Sequences without a common prefix, as many as there is room for."""
    running = [rig.sequence([50] * num_tokens)]
    while rig.admit(running[-1]) is not None:
        running.append(rig.sequence([50 + len(running)] * num_tokens))
    return running[:-1]


def _bytes_of(rig: Rig, seq: Sequence) -> bytes:
    """All that is stored for a sequence, as bytes."""
    tensors = [
        tensor
        for layer in range(rig.facts.num_layers)
        for tensor in rig.kv.gather(_slot(seq), layer, 0, seq.num_computed)[:2]
    ]
    return b"".join(tensor.float().cpu().numpy().tobytes() for tensor in tensors)
