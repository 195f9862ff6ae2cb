"""What the attention kernels can compute, asked once when a cache is bound."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from core.facts import ModelFacts

MAX_GROUP = 16  # query heads of one KV head: the rows of one tensor-core tile


def refusal(facts: ModelFacts) -> str | None:
    """None if these kernels serve the model, else why not, as a sentence with the numbers."""
    head_dim, group = facts.head_dim, facts.num_heads // facts.num_kv_heads
    if head_dim % 16 or not 16 <= head_dim <= 256:
        return f"head_dim is {head_dim}, the Triton kernels take multiples of 16 from 16 to 256"
    if group > MAX_GROUP:
        return f"{group} query heads share a KV head, the Triton kernels take at most {MAX_GROUP}"
    return None
