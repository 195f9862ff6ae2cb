"""Host bookkeeping of a paged cache: pool of blocks, prefix index, block tables. No torch here."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence as Seq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from core.batch import Limits

TRASH_BLOCK = 0  # padding is written here; no sequence owns it
ROOT = 0  # the identity of "nothing comes before"
NEVER = int(np.iinfo(np.int32).max)  # a length that no sequence reaches

Key = tuple[int, bytes]


@dataclass(eq=False)
class Held:
    """What one sequence holds: its blocks in order, the first `num_shared` found in the index.

    `chain` has the identity of every published block. Where another block already stands in the
    index for the same content, it is that block's identity, and this one stays private.
    """

    blocks: list[int]
    num_shared: int = 0
    chain: list[int] = field(default_factory=list)
    slot: int | None = None


class BlockPool:
    """Blocks 1..num_blocks: each is free, or pinned, or kept for later hits until it is needed.

    A published block has an identity, a number that is never used twice, and stands in the index
    under the identity of the block before it and its own tokens. So a hit compares the tokens and,
    through the chain, all tokens before them; and once a block is evicted nothing can name its
    identity any more, so that no stale entry is ever found (the bug of a hash left behind when its
    block is given to other content).
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self._free = list(range(num_blocks, 0, -1))
        self._evictable: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._refs = [0] * (num_blocks + 1)
        self._index: dict[Key, int] = {}
        self._keys: list[Key | None] = [None] * (num_blocks + 1)
        self._identities = [ROOT] * (num_blocks + 1)
        self._last_identity = ROOT

    @property
    def num_available(self) -> int:
        """Blocks that `take` can give."""
        return len(self._free) + len(self._evictable)

    @property
    def num_evictable(self) -> int:
        """Blocks that nobody holds, kept for prefix hits."""
        return len(self._evictable)

    def match(self, token_ids: NDArray[np.int32], max_blocks: int) -> list[int]:
        """The longest run of published blocks, at most `max_blocks`, of the first tokens."""
        found: list[int] = []
        parent = ROOT
        for i in range(max_blocks):
            block = self._index.get((parent, self._tokens(token_ids, i)))
            if block is None:
                break
            found.append(block)
            parent = self._identities[block]
        return found

    def num_evictable_among(self, blocks: Iterable[int]) -> int:
        """How many of `blocks` count as available now and will not once they are pinned."""
        return sum(block in self._evictable for block in blocks)

    def pin(self, blocks: Iterable[int]) -> None:
        """One more sequence holds each of these published blocks."""
        for block in blocks:
            if not self._refs[block]:
                del self._evictable[block]
            self._refs[block] += 1

    def take(self, num_blocks: int) -> list[int]:
        """Pin `num_blocks` blocks for new content: free ones first, then the least recently used.

        The caller has compared with `num_available`.
        """
        taken = self._free[: -num_blocks - 1 : -1]
        del self._free[len(self._free) - len(taken) :]
        taken += [self._evict() for _ in range(num_blocks - len(taken))]
        for block in taken:
            self._refs[block] = 1
        return taken

    def _evict(self) -> int:
        block, _ = self._evictable.popitem(last=False)
        self.unpublish(block)
        return block

    def unpin(self, blocks: Seq[int]) -> None:
        """A sequence lets its blocks go. Tails age before heads: a head alone is still a hit."""
        refs, keys = self._refs, self._keys
        for block in reversed(blocks):
            refs[block] -= 1
            if refs[block]:
                continue
            if keys[block] is None:
                self._free.append(block)
            else:
                self._evictable[block] = None

    def publish(self, block: int, parent: int, token_ids: NDArray[np.int32], i: int) -> int:
        """Index `block` as the i-th block of `token_ids`; returns the identity of that content."""
        key = (parent, self._tokens(token_ids, i))
        standing = self._index.get(key)
        if standing is not None:
            return self._identities[standing]
        self._last_identity += 1
        self._index[key], self._keys[block] = block, key
        self._identities[block] = self._last_identity
        return self._last_identity

    def is_published(self, block: int) -> bool:
        return self._keys[block] is not None

    def identity(self, block: int) -> int:
        return self._identities[block]

    def unpublish(self, block: int) -> None:
        """No later sequence finds `block`; those that hold it keep it."""
        key = self._keys[block]
        assert key is not None
        del self._index[key]
        self._keys[block], self._identities[block] = None, ROOT

    def _tokens(self, token_ids: NDArray[np.int32], i: int) -> bytes:
        return token_ids[i * self.block_size : (i + 1) * self.block_size].tobytes()

    def check_integrity(self, held: Iterable[Held]) -> None:
        """Raise AssertionError unless every block is free, kept or held, and only one of them."""
        refs = [0] * (self.num_blocks + 1)
        for h in held:
            assert len(set(h.blocks)) == len(h.blocks), f"a sequence holds a block twice {h.blocks}"
            for block in h.blocks:
                refs[block] += 1
        assert not refs[TRASH_BLOCK], "a sequence holds the trash block"
        assert refs == self._refs, "pins and holders differ"
        pinned = [block for block, count in enumerate(refs) if count]
        blocks = sorted([*self._free, *self._evictable, *pinned])
        assert blocks == list(range(1, self.num_blocks + 1)), "a block is lost or listed twice"
        assert not any(self.is_published(block) for block in self._free), (
            "a published block is free"
        )
        assert all(self.is_published(block) for block in self._evictable), "a private block is kept"
        published = {key: block for block, key in enumerate(self._keys) if key is not None}
        assert published == self._index, "the index names other blocks than those published"
        identities = [self._identities[block] for block in published.values()]
        assert len(set(identities)) == len(identities), "two blocks have one identity"


class BlockTables:
    """The block tables of all slots on the host, and the changes not yet sent to the device.

    A row is never cleared: reads are bounded by the sequence's length, so what stands beyond is
    never used. A change is remembered by place alone and its value looked up when sent, so a place
    changed twice (its slot got another owner) cannot be sent in two versions, whose order a scatter
    does not promise.
    """

    def __init__(self, limits: Limits, block_size: int) -> None:
        self.num_columns = num_columns(limits, block_size)
        self.host = np.full((limits.max_num_seqs + 1, self.num_columns), TRASH_BLOCK, np.int32)
        self._trash_place = limits.trash_slot * self.num_columns
        self._pending: list[int] = []

    def set(self, slot: int, first_column: int, blocks: Seq[int]) -> None:
        """Columns from `first_column` on of a slot now name `blocks`."""
        self.host[slot, first_column : first_column + len(blocks)] = blocks
        place = slot * self.num_columns + first_column
        self._pending.extend(range(place, place + len(blocks)))

    @property
    def num_pending(self) -> int:
        """Changes that have not been sent."""
        return len(self._pending)

    def send(self, index: NDArray[np.int64], block: NDArray[np.int32]) -> None:
        """Fill both arrays with the oldest changes and padding."""
        n = min(len(self._pending), len(index))
        index[:n] = self._pending[:n]
        index[n:] = self._trash_place
        block[:] = self.host.reshape(-1)[index]
        del self._pending[:n]


def num_columns(limits: Limits, block_size: int) -> int:
    """Blocks of the longest sequence: the width of a block table."""
    return -(-limits.max_model_len // block_size)


def num_deltas(num_tokens: int, num_seqs: int, block_size: int) -> int:
    """Places for table changes of a step: every block that it can begin, and more.

    A prompt that is admitted whole and computed in chunks, or a long prefix hit, brings more than
    that; `plan` then asks for another round, in which as many travel as of the largest step.
    """
    return -(-num_tokens // block_size) + 2 * num_seqs + 8


def delta_arrays(limits: Limits, block_size: int) -> dict[str, tuple[tuple[int, ...], str]]:
    """Metadata for the table changes of any step."""
    n = num_deltas(limits.max_num_batched_tokens, limits.max_num_seqs, block_size)
    return {"delta_index": ((n,), "int64"), "delta_block": ((n,), "int32")}


def slot_rows(limits: Limits, value: int) -> NDArray[Any]:
    """One int32 a slot, the trash slot included."""
    return np.full(limits.max_num_seqs + 1, value, np.int32)
