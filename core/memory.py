"""How many bytes the KV cache gets where the user names none: what is left after weights,
activations and graphs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import psutil
import torch

from core.batch import Batch, BatchShape
from core.chain import cover, decoder_chain, execute
from core.errors import UserError
from core.model import Site

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from torch import Tensor

    from core.batch import Limits
    from core.facts import ModelFacts
    from core.seams import Span
    from core.weights import ModelWeights

_HOST_SHARE = 0.25  # of the free memory of the machine, on a CPU
_SLACK_BYTES = 1 << 29  # cuBLAS and cuDNN workspaces, split-KV partials, fragmentation


class _NoKV:
    """Stands in for a kv offer while activations are measured: stores nothing, attends to
    nothing."""

    def write(self, layer: int, k: Tensor, v: Tensor, batch: Batch) -> None:
        return None

    def attend(self, layer: int, q: Tensor, batch: Batch) -> Tensor:
        return q.flatten(1).contiguous()


def host_budget(facts: ModelFacts, limits: Limits) -> int:
    """Bytes on a CPU: every slot at full length if a quarter of the free memory holds it, else that
    quarter."""
    wanted = facts.kv_bytes_per_token * (limits.max_model_len + 256) * (limits.max_num_seqs + 1)
    return min(wanted, int(psutil.virtual_memory().available * _HOST_SHARE))


def device_budget(
    facts: ModelFacts,
    weights: ModelWeights,
    rope: tuple[Tensor, Tensor],
    spans: Seq[Span],
    limits: Limits,
    device: torch.device,
    utilization: float,
    captures: bool,
) -> int:
    """Bytes on a GPU, from a dry pass of the largest step: its peak counts once for eager steps,
    once for graphs."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    peak = _activation_bytes(facts, weights, rope, spans, limits, device)
    buffers = limits.max_num_seqs * facts.vocab_size * facts.dtype.itemsize
    used = (total - free) + (2 if captures else 1) * peak + buffers + _SLACK_BYTES
    budget = int(total * utilization) - used
    if budget <= 0:
        raise UserError(
            f"weights, activations and graphs need {used / 2**30:.1f} GiB and "
            f"{total * utilization / 2**30:.1f} GiB may be used: raise --gpu-memory-utilization, "
            "or lower --max-num-batched-tokens or --max-num-seqs"
        )
    return budget


def _activation_bytes(
    facts: ModelFacts,
    weights: ModelWeights,
    rope: tuple[Tensor, Tensor],
    spans: Seq[Span],
    limits: Limits,
    device: torch.device,
) -> int:
    """Peak bytes of one step of max_num_batched_tokens tokens, attention's own scratch apart. One
    layer is enough."""
    tokens, rows = limits.max_num_batched_tokens, limits.max_num_seqs
    stub: Any = _NoKV()
    head = Site(-1, facts, weights, None, *rope, stub, None)
    chain = decoder_chain(head, [Site(0, facts, weights, weights.layers[0], *rope, stub, None)])
    usable = [s for s in spans if s.when(tokens, facts, None)]
    zeros = torch.zeros(tokens, dtype=torch.int32, device=device)
    batch = Batch(
        shape=BatchShape(tokens, rows, tokens, tokens, False),
        token_ids=zeros,
        positions=zeros,
        token_slots=zeros,
        slots=zeros[:rows],
        query_start=zeros[:1],
        seq_lens=zeros[:rows],
        num_decodes=zeros[:1],
        logit_rows=zeros[:rows],
        sample_slots=zeros[:rows],
        temperature=torch.zeros(rows, device=device),
        sample_keys=zeros[:0].view(0, 2),
        kv={},
        last_token=zeros[:1],
    )
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    with torch.inference_mode():
        execute(cover(chain, usable), batch, {})
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    return peak
