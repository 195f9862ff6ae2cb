"""`paged` through the conformance suite, at several block sizes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from core.batch import Limits
from core.testing.kv import KVManagerSuite
from core.testing.kv_gpu import KVManagerGpuSuite
from core.testing.probes import compute, decode, run_step
from core.testing.rig import Rig, tiny_facts
from plugins.kv.paged import Paged

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
    """A step of one token has 11 places here, and a hit on 95 blocks of one token brings 96 changes
    of the table."""
    rig = Rig(Paged(Paged.Config(block_size=1)), num_tokens=200, limits=Limits(96, 2, 4))
    for expected_rounds in (0, 8):
        seq = rig.sequence([1] * 96)
        rig.admit(seq, 4)
        rounds = rig.num_extra_plans
        while seq.remaining:
            run_step(rig, [], [(seq, min(4, seq.remaining))])
            rig.publish_due(seq)
        assert rig.num_extra_plans - rounds == expected_rounds
        rig.release(seq)


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
