"""`paged` through the conformance suite, at several block sizes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from core import Engine
from core.batch import Limits
from core.testing.kv import KVManagerSuite
from core.testing.kv_gpu import KVManagerGpuSuite
from core.testing.probes import compute, decode, run_step
from core.testing.rig import Rig, tiny_facts
from plugins.kv.paged import Paged
from plugins.sched.fifo import Fifo

ROOT = Path(__file__).parents[2]
LIMITS = Limits(max_model_len=64, max_num_seqs=2, max_num_batched_tokens=16)


def test_importing_an_offer_is_light():
    code = (
        "import sys, plugins.kv.paged, plugins.kv.contiguous;"
        "sys.exit(str({'torch', 'triton'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stderr.strip() == "set()"


class TestPaged(KVManagerSuite):
    plugin = "paged"


class TestPagedByTheToken(KVManagerSuite):
    plugin = "paged"
    config = {"block_size": 1}


class TestPagedOdd(KVManagerSuite):
    plugin = "paged"
    config = {"block_size": 5}


class TestPagedOnGpu(KVManagerGpuSuite):
    plugin = "paged"


class TestPagedOddOnGpu(KVManagerGpuSuite):
    plugin = "paged"
    config = {"block_size": 5}


def test_num_blocks_overrides_the_bytes():
    config = Paged.Config(block_size=4, num_blocks=6)
    assert Paged(config).capacity(1, tiny_facts(), Limits(64, 8, 16)) == (24, 6)
    rig = Rig(Paged(config), num_tokens=24, limits=Limits(64, 8, 16))
    assert rig.kv.usage().num_tokens == 24
    refusal = rig.kv.ever_fits(25)
    assert "25" in refusal and "7 blocks of 4" in refusal and "24 tokens" in refusal


def test_deltas_that_do_not_fit_take_another_round():
    """A step of one token has 11 places here, the largest 16, and a hit on 95 blocks of one token
    brings 96 changes of the table."""
    rig = Rig(Paged(Paged.Config(block_size=1)), num_tokens=200, limits=Limits(96, 2, 4))
    for expected_rounds in (0, 6):
        seq = rig.sequence([1] * 96)
        rig.admit(seq, 4)
        rounds = rig.num_extra_plans
        while seq.remaining:
            run_step(rig, [], [(seq, min(4, seq.remaining))])
            rig.publish_due(seq)
        assert rig.num_extra_plans - rounds == expected_rounds
        rig.release(seq)


def test_a_long_hit_takes_one_round_where_the_largest_step_has_room():
    """96 changes, for which the step of one token has 13 places and the largest 108."""
    rig = Rig(Paged(Paged.Config(block_size=1)), num_tokens=200, limits=Limits(96, 2, 96))
    for _ in range(2):
        seq = rig.sequence([1] * 96)
        rig.admit(seq, 96)
        run_step(rig, [], [(seq, seq.remaining)])
        rig.publish_due(seq)
        rig.release(seq)
    assert rig.num_extra_plans == 1


def test_sequences_that_are_admitted_and_wait_take_few_rounds():
    """16 prompts of 90 blocks are admitted, and one token of one of them is in the first step."""

    class OneByOne(Fifo):
        def chunk(self, seq, budget):
            return budget if seq.order == 0 else 0

    settings = {"kv.block_size": 1, "kv.num_blocks": 1601}
    options = {"sched": OneByOne(), "max_num_seqs": 16, "max_model_len": 100, "chunk_size": 1}
    options |= {"max_num_batched_tokens": 16, "settings": settings, "device": "cpu"}
    with Engine(model="random:tiny", enable_prefix_caching=False, **options) as engine:
        for _ in range(16):
            engine.add_request([5] * 90)
        assert not engine.step() and engine.counters.num_failed_steps == 0
        assert engine.counters.num_extra_plans <= 16 * 90 // (16 + 2 * 16 + 8) + 1


def test_room_that_one_gives_back_is_the_next_ones():
    rig = Rig(Paged(Paged.Config(block_size=4, num_blocks=6)), num_tokens=24, limits=LIMITS)
    first, second = rig.sequence([1] * 8), rig.sequence([2] * 8)
    for seq in (first, second):
        rig.admit(seq)
        compute(rig, seq)
    decode(rig, [first, second], 4)
    rig.append(first, 3)
    assert not rig.has_room(first, 13)
    rig.release(second)
    assert rig.has_room(first, 13)
    run_step(rig, [first])
    assert rig.admit(second) is None
    rig.release(first)
    # The first took one of the second's three blocks, its tail; a block is kept back to compute.
    assert rig.admit(second) == 8
