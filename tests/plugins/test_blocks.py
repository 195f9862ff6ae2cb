"""The pool of blocks, its prefix index and the block tables, without a device."""

from __future__ import annotations

import numpy as np
import pytest

from core.batch import Limits
from plugins.kv.blocks import (
    ROOT,
    TRASH_BLOCK,
    BlockPool,
    BlockTables,
    Held,
    delta_arrays,
    num_columns,
)


def tokens(*blocks):
    """Token ids of blocks of four equal tokens each."""
    return np.repeat(np.array(blocks, np.int32), 4)


def publish_all(pool, blocks, token_ids):
    """Publish `blocks` as the first blocks of `token_ids`; their identities."""
    chain = [ROOT]
    for i, block in enumerate(blocks):
        chain.append(pool.publish(block, chain[-1], token_ids, i))
    return chain[1:]


@pytest.fixture
def pool():
    return BlockPool(num_blocks=6, block_size=4)


def test_every_block_but_the_trash_is_handed_out_once(pool):
    assert sorted(pool.take(6)) == [1, 2, 3, 4, 5, 6]
    assert pool.num_available == 0


def test_free_blocks_go_before_cached_ones(pool):
    published = pool.take(2)
    publish_all(pool, published, tokens(1, 2))
    pool.unpin(published)
    assert pool.num_evictable == 2
    assert not set(pool.take(4)) & set(published)
    assert pool.match(tokens(1, 2), 2) == published


def test_tails_are_evicted_before_heads(pool):
    blocks = pool.take(3)
    publish_all(pool, blocks, tokens(1, 2, 3))
    pool.unpin(blocks)
    pool.take(3 + 1)
    assert pool.match(tokens(1, 2, 3), 3) == blocks[:2]
    pool.take(1)
    assert pool.match(tokens(1, 2, 3), 3) == blocks[:1]


def test_the_least_recently_used_is_evicted_first(pool):
    old, new = pool.take(1), pool.take(1)
    publish_all(pool, old, tokens(1))
    publish_all(pool, new, tokens(2))
    pool.unpin(old)
    pool.unpin(new)
    pool.pin(old)
    pool.unpin(old)
    pool.take(4 + 1)
    assert pool.match(tokens(1), 1) == old
    assert pool.match(tokens(2), 1) == []


def test_a_pinned_block_is_not_evicted(pool):
    blocks = pool.take(2)
    publish_all(pool, blocks, tokens(1, 2))
    pool.pin(blocks[:1])
    pool.unpin(blocks)
    assert pool.num_available == 5
    pool.take(5)
    assert pool.match(tokens(1, 2), 2) == blocks[:1]


def test_hits_that_nobody_holds_are_counted_as_room_once(pool):
    blocks = pool.take(2)
    publish_all(pool, blocks, tokens(1, 2))
    pool.pin(blocks[:1])
    pool.unpin(blocks)
    assert pool.num_evictable_among(blocks) == 1


def test_content_that_stands_already_stays_private(pool):
    first, second, third = pool.take(2), pool.take(2), pool.take(1)
    chain = publish_all(pool, first, tokens(1, 2))
    assert publish_all(pool, second, tokens(1, 2)) == chain
    assert pool.is_published(first[0]) and not pool.is_published(second[0])
    pool.unpin(second)
    assert pool.num_evictable == 0
    # What follows the private ones is found behind the public ones.
    pool.publish(third[0], chain[-1], tokens(1, 2, 3), 2)
    assert pool.match(tokens(1, 2, 3), 3) == [*first, *third]


def test_an_evicted_parent_takes_its_children_out_of_reach(pool):
    head, tail = pool.take(1), pool.take(1)
    identity = pool.publish(head[0], ROOT, tokens(1, 2), 0)
    pool.publish(tail[0], identity, tokens(1, 2), 1)
    pool.unpublish(head[0])
    assert pool.match(tokens(1, 2), 2) == []
    # Same tokens in the same block, and yet another identity: the old child stays out of reach.
    assert pool.publish(head[0], ROOT, tokens(1, 2), 0) != identity
    assert pool.match(tokens(1, 2), 2) == head


def test_a_match_compares_tokens_and_history(pool):
    blocks = pool.take(3)
    publish_all(pool, blocks, tokens(1, 2, 3))
    assert pool.match(tokens(1, 2, 3), 2) == blocks[:2]
    assert pool.match(tokens(1, 3), 2) == blocks[:1]
    assert pool.match(tokens(2, 3), 2) == []
    assert pool.match(np.array([1, 1, 1, 7], np.int32), 1) == []


@pytest.mark.parametrize("mistake", ["lost", "twice", "trash", "pins", "stale"])
def test_check_integrity_sees(pool, mistake):
    held = Held(pool.take(2))
    publish_all(pool, held.blocks, tokens(1, 2))
    pool.check_integrity([held])
    if mistake == "lost":
        pool._free.pop()
    elif mistake == "twice":
        pool._free.append(held.blocks[0])
    elif mistake == "trash":
        held.blocks.append(TRASH_BLOCK)
    elif mistake == "pins":
        pool._refs[held.blocks[0]] += 1
    else:
        pool._keys[held.blocks[0]] = None
    with pytest.raises(AssertionError):
        pool.check_integrity([held])


LIMITS = Limits(max_model_len=10, max_num_seqs=2, max_num_batched_tokens=8)


def test_the_table_is_as_wide_as_the_longest_sequence():
    assert [num_columns(LIMITS, size) for size in (1, 4, 5, 16)] == [10, 3, 2, 1]


def test_deltas_name_places_and_padding_names_the_trash_row():
    tables = BlockTables(LIMITS, block_size=4)
    index, block = np.zeros(5, np.int64), np.zeros(5, np.int32)
    tables.set(1, 1, [7, 8])
    tables.send(index, block)
    assert not tables.num_pending
    assert index.tolist() == [4, 5, 6, 6, 6]
    assert block.tolist() == [7, 8, TRASH_BLOCK, TRASH_BLOCK, TRASH_BLOCK]


def test_what_does_not_fit_is_sent_next():
    tables = BlockTables(LIMITS, block_size=4)
    index, block = np.zeros(2, np.int64), np.zeros(2, np.int32)
    tables.set(0, 0, [5, 6, 7])
    tables.send(index, block)
    assert tables.num_pending == 1 and block.tolist() == [5, 6]
    tables.send(index, block)
    assert tables.num_pending == 0 and index.tolist() == [2, 6]


def test_a_place_changed_twice_is_sent_in_its_last_version():
    tables = BlockTables(LIMITS, block_size=4)
    index, block = np.zeros(4, np.int64), np.zeros(4, np.int32)
    tables.set(0, 0, [5])
    tables.set(0, 0, [9])
    tables.send(index, block)
    assert {(int(i), int(b)) for i, b in zip(index, block, strict=True)} == {(0, 9), (6, 0)}


def test_a_full_step_fits_into_the_deltas():
    """Every row of a full step begins a block, and a new one has its whole chunk's blocks."""
    (num,), _ = delta_arrays(LIMITS, 4)["delta_index"]
    assert num >= LIMITS.max_num_batched_tokens // 4 + LIMITS.max_num_seqs
