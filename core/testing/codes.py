"""Keys and values that name the token they belong to: the output then tells what was read.

The keys of a real model depend on a token and on all tokens before it. So do these: a rolling hash
of the prefix gives each position 64 bits, which are mixed with layer, key or value, head and
dimension. Two sequences agree exactly as far as their tokens do, and a block that is found under
the wrong history reads wrong.

Shapes: n tokens, K key/value heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from core.facts import ModelFacts

KEY, VALUE, QUERY = 1, 2, 3  # the kinds of a code
_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of SplitMix64 (Steele et al., 2014): each bit of it depends on all of x."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def extend_hashes(hashes: list[int], token_ids: Seq[int]) -> None:
    """Continue the rolling hash: `hashes[p]` stands for tokens 0..p, those there are kept."""
    state = hashes[-1] if hashes else 0
    for token in token_ids[len(hashes) :]:
        state = ((state ^ (int(token) + 1)) * 0xD6E8FEB86659FD93 + _GOLDEN) & _MASK
        state ^= state >> 32
        hashes.append(state)


def words(
    hashes: Seq[int], layer: int, kind: int, num_heads: int, num_words: int
) -> NDArray[np.uint64]:
    """`num_words` random words of 64 bits for every token and head: [n, K, num_words]."""
    place = np.arange(num_heads * num_words, dtype=np.uint64).reshape(num_heads, num_words)
    salt = mix(place + np.uint64((layer * 4 + kind) << 20))
    return mix(np.array(hashes, np.uint64).reshape(-1, 1, 1) ^ salt)


def signs(hashes: Seq[int], layer: int, kind: int, facts: ModelFacts) -> NDArray[np.float32]:
    """Codes of -1 and +1, [n, K, D]."""
    drawn = words(hashes, layer, kind, facts.num_kv_heads, -(-facts.head_dim // 64))
    ones = np.unpackbits(drawn.view(np.uint8), axis=-1, count=facts.head_dim)
    return ones.astype(np.float32) * 2 - 1


def floats(hashes: Seq[int], layer: int, kind: int, facts: ModelFacts) -> NDArray[np.float32]:
    """Numbers spread evenly over [-1, 1), [n, K, D]."""
    drawn = words(hashes, layer, kind, facts.num_kv_heads, facts.head_dim)
    fraction = (drawn >> np.uint64(40)).astype(np.float64)
    return (fraction * 2.0**-23 - 1).astype(np.float32)


def pick(hashes: Seq[int], layer: int, head: int, below: NDArray[np.int64]) -> NDArray[Any]:
    """A number in 0..below[i]-1 for every token, by its hash, layer and query head."""
    salt = np.uint64((((layer << 8) + head) << 2) + QUERY)
    drawn = mix(np.array(hashes, np.uint64) ^ mix(np.array([salt], np.uint64)))
    return (drawn % below.astype(np.uint64)).astype(np.int64)
