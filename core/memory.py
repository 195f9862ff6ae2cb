"""How many bytes the KV cache gets where the user names none: what is left after weights,
activations and graphs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import psutil
import torch

from core.batch import Batch, BatchShape
from core.chain import Decoder, cover, execute
from core.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from core.batch import Limits
    from core.facts import ModelFacts
    from core.seams import Span

_HOST_SHARE = 0.25  # of the free memory of the machine, on a CPU
_SLACK_BYTES = 1 << 29  # cuBLAS and cuDNN workspaces, split-KV partials, fragmentation


def host_budget(facts: ModelFacts, limits: Limits) -> int:
    """Bytes on a CPU: every slot at full length if a quarter of the free memory holds it, else that
    quarter."""
    num_tokens = (limits.max_model_len + 256) * (limits.max_num_seqs + 1)
    num_tokens += limits.max_num_batched_tokens  # scratch
    wanted = facts.kv_bytes_per_token * num_tokens + (1 << 24)  # tables
    return min(wanted, int(psutil.virtual_memory().available * _HOST_SHARE))


def device_budget(
    decoder: Decoder, spans: Seq[Span], limits: Limits, utilization: float, captures: bool
) -> int:
    """Bytes on a GPU, from a dry pass of the largest step: its peak counts once for eager steps,
    once for graphs."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(decoder.device)
    peak = _activation_bytes(decoder, spans, limits)
    buffers = limits.max_num_seqs * decoder.facts.vocab_size * decoder.facts.dtype.itemsize
    used = (total - free) + (2 if captures else 1) * peak + buffers + _SLACK_BYTES
    budget = int(total * utilization) - used
    if budget <= 0:
        most = f"{total * utilization / 2**30:.1f} GiB may be used"
        what = f"weights, activations and graphs need {used / 2**30:.1f} GiB and {most}"
        advice = "or lower --max-num-batched-tokens or --max-num-seqs"
        raise UserError(f"{what}: raise --gpu-memory-utilization, {advice}")
    return budget


def _activation_bytes(decoder: Decoder, spans: Seq[Span], limits: Limits) -> int:
    """Peak bytes of one step of max_num_batched_tokens tokens, attention's own scratch apart. One
    layer is enough."""
    tokens, rows = limits.max_num_batched_tokens, limits.max_num_seqs
    # Stores nothing, attends to nothing.
    stub: Any = SimpleNamespace(
        write=lambda *_: None, attend=lambda _, q, __: q.flatten(1), sink=lambda _: None
    )
    usable = [s for s in spans if s.when(tokens, decoder.facts, None)]
    operations = cover(decoder.chain(stub, num_layers=1), usable)
    zeros = torch.zeros(tokens, dtype=torch.int32, device=decoder.device)
    # By token, by row, kv, last_token.
    fields: Any = [*[zeros] * 3, *[zeros[:rows]] * 8, {}, zeros[:1]]
    batch = Batch(BatchShape(tokens, rows, tokens, tokens, None), *fields)
    torch.cuda.reset_peak_memory_stats(decoder.device)
    before = torch.cuda.memory_allocated(decoder.device)
    with torch.inference_mode():
        execute(operations, batch, {})
    torch.cuda.synchronize(decoder.device)
    peak = torch.cuda.max_memory_allocated(decoder.device) - before
    torch.cuda.empty_cache()
    return peak
