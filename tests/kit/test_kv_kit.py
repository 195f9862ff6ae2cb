"""Seeded bugs in what is read, given to the page oracle alone, with the plugin's own
`check_integrity` blinded: a plugin that books its mistakes consistently is caught by what it reads.
"""

from __future__ import annotations

import pytest

from core.batch import Limits
from core.testing.kv import MAX_LEN, PLENTY
from core.testing.oracle import PageOracle
from core.testing.rig import Rig
from tests.kit.bugs.kv import (
    CountsNoHolders,
    ForgetsWhatCameBefore,
    HandsOutTwice,
    KeepsStaleEntries,
    KeepsTheOldTable,
    PadsIntoTheLastBlock,
    PairsHeadsWrongly,
    ReadsOneFurther,
    SharesHalfBlocks,
    WritesOneFurther,
)

BLOCK_SIZE = 4

# What the oracle alone sees. The others lose room, or break a promise that nobody reads.
SEEN_BY_READING = [
    HandsOutTwice,
    PadsIntoTheLastBlock,
    KeepsStaleEntries,
    ForgetsWhatCameBefore,
    WritesOneFurther,
    ReadsOneFurther,
    KeepsTheOldTable,
    CountsNoHolders,
    SharesHalfBlocks,
    PairsHeadsWrongly,
]


@pytest.mark.parametrize("bug", SEEN_BY_READING, ids=lambda bug: bug.__name__)
def test_the_page_oracle_sees_it_in_what_is_read(bug):
    """No books, only probes: in a few traces attention's output gives the bug away."""
    blind = type("Blind", (bug,), {"check_integrity": lambda self: None})
    limits = Limits(MAX_LEN, 4, 64)
    with pytest.raises(AssertionError, match="is wrong in|touched|share a place|in use"):
        for seed in range(3):
            kv = blind(bug.Config(block_size=BLOCK_SIZE))
            rig = Rig(kv, num_tokens=PLENTY // 3, limits=limits)
            PageOracle(rig, seed=seed, num_requests=30, max_total=MAX_LEN - 10).run()
