"""The page oracle over 2,000 random traces: every offer, pools from plenty to scarcity, sharing on
and off."""

from __future__ import annotations

import pytest
import torch

from core.batch import Limits
from core.testing.oracle import PageOracle
from core.testing.rig import Rig, tiny_facts
from plugins.kv.contiguous import Contiguous
from plugins.kv.paged import Paged
from plugins.kv.paged_int4 import PagedInt4
from plugins.kv.paged_int8 import PagedInt8

LIMITS = Limits(max_model_len=24, max_num_seqs=3, max_num_batched_tokens=12)
LONGEST = 18  # tokens of a request
OFFERS = {
    "contiguous": lambda: Contiguous(Contiguous.Config()),
    "paged-1": lambda: Paged(Paged.Config(block_size=1)),
    "paged-4": lambda: Paged(Paged.Config(block_size=4)),
    "paged-16": lambda: Paged(Paged.Config(block_size=16)),
    "paged_int8-4": lambda: PagedInt8(PagedInt8.Config(block_size=4)),
    "channel-4": lambda: PagedInt8(PagedInt8.Config(block_size=4, k_scales="channel")),
    "paged_int4-4": lambda: PagedInt4(PagedInt4.Config(block_size=4)),
}
POOLS = {"plenty": 4 * 24, "some": 2 * 24, "one block more than the longest": LONGEST + 6}
SHARDS, TRACES = 5, 10  # of each offer and pool; with both kinds of sharing, 2,100 in all


@pytest.mark.parametrize("shard", range(SHARDS))
@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("offer", OFFERS)
def test_random_traces(offer, pool, shard):
    torch.set_num_threads(1)
    facts = tiny_facts()
    for seed in range(shard * TRACES, (shard + 1) * TRACES):
        for sharing in (False, True):
            kv = OFFERS[offer]()
            kv.sharing = sharing
            num_tokens = max(POOLS[pool], 2 * 24 if offer == "contiguous" else 0)
            num_tokens = max(num_tokens, 32 if offer == "paged-16" else 0)
            rig = Rig(kv, num_tokens=num_tokens, limits=LIMITS, facts=facts, device="cpu")
            oracle = PageOracle(rig, seed=seed, num_requests=3, max_total=LONGEST)
            assert oracle.run().num_finished == 3, f"seed {seed}, sharing {sharing}"


def test_there_are_two_thousand():
    assert 2 * len(OFFERS) * len(POOLS) * SHARDS * TRACES >= 2000
