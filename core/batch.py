"""The nouns of a step: a sequence, the shape of a batch, the batch itself on host and device.

Legend for shape suffixes used in this project: T tokens of a step (padded), R rows (sequences) of a
step (padded), S slots, L layers, H query heads, K key/value heads, D head_dim, V vocabulary, N
blocks, B tokens a block.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from core.sampling import SamplingParams
    from core.seams import Saved

    Int32 = NDArray[np.int32]
    TokenLogprob = tuple[float, dict[int, float]]  # of the token itself, and of the likeliest


@dataclass(frozen=True)
class Limits:
    """What a composed engine may be asked to hold; everything static is sized from it.

    `max_model_len`: tokens of one sequence, prompt and output together. `max_num_seqs`: rows of a
    step, and slots; slot `max_num_seqs` is the trash slot that padding writes to.
    `max_num_batched_tokens`: tokens of a step.
    """

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int

    @property
    def trash_slot(self) -> int:
        return self.max_num_seqs


class BatchShape(NamedTuple):
    """The host integers of a step, all that a captured graph may depend on; one that leaves
    attention out on `num_tokens` and `fresh` alone.

    `max_query` and `max_kv` are upper bounds over the rows, in tokens. `start` says that the step
    is one prompt chunk of two tokens or more, at tokens 0..n-1, that starts exactly at this
    position; None: it may be anything.
    """

    num_tokens: int
    num_seqs: int
    max_query: int
    max_kv: int
    start: int | None

    @property
    def fresh(self) -> bool:
        """Causal attention over this step's own keys is the whole of its attention."""
        return self.start == 0

    @property
    def lone(self) -> bool:
        """The step is a prompt chunk alone: KVSink.fresh gets its keys and values too."""
        return self.start is not None

    @property
    def decode_only(self) -> bool:
        """Every row is one token: row i is token i, and what comes behind is padding."""
        return self.max_query == 1


@dataclass(eq=False)
class Sequence:
    """One request as the core and the plugins see it. Identity is the object; ids are for people.

    `token_ids` holds prompt and known output, int32, with room to grow; only the first `num_known`
    are valid; `token_times` holds the moment at which each became known, in seconds (0 for the
    prompt). `num_tokens` counts tokens known or in flight, `num_computed` those whose keys and
    values are written or in flight: the first chases the second. Numbers of a sequence that has a
    slot live in the engine's slot arrays too, and the engine keeps both equal at the boundaries
    where a plugin is called. `metadata` carries what the caller attached, and "priority" (lower is
    more urgent); `saved` is what a preempted sequence has in host memory. The moments from
    `arrival` (when it was due) to `first_scheduled` are seconds of the engine's clock.
    """

    request_id: str
    token_ids: Int32
    num_prompt: int
    params: SamplingParams
    arrival: float
    order: int
    max_tokens_total: int
    num_known: int = 0
    num_tokens: int = 0
    num_computed: int = 0
    num_cached: int = 0
    slot: int | None = None
    share_prefix: bool = True
    metadata: dict[str, Any] = field(default_factory=dict)
    num_preemptions: int = 0
    num_bypassed: int = 0
    saved: Saved | None = None
    enqueued: float = 0.0
    admitted: float | None = None
    first_scheduled: float | None = None
    token_times: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)  # from the second token on

    @property
    def num_output(self) -> int:
        return self.num_known - self.num_prompt

    @property
    def remaining(self) -> int:
        """Tokens whose keys and values are still to be computed."""
        return self.num_tokens - self.num_computed


class HostBatch(NamedTuple):
    """A step as the host knows it. Real counts first; arrays are int32 and unpadded.

    Rows: decode rows (one token each, `num_decodes` of them) come first, then prefill rows. Row r
    owns tokens `query_start[r] : query_start[r + 1]`, at positions `seq_lens[r] - query_len ..
    seq_lens[r] - 1`.
    """

    num_tokens: int
    num_seqs: int
    num_decodes: int
    slots: Int32  # [R]
    query_start: Int32  # [R + 1]
    seq_lens: Int32  # [R], length of the context once this step has been written
    positions: Int32  # [T]
    token_slots: Int32  # [T], the slot that each token belongs to
    shape: BatchShape | None = None  # what the step is padded to, where that is known already


@dataclass(eq=False)
class Batch:
    """A step as the device sees it: views of static int32 buffers, padded to `shape`.

    Padding tokens have position 0 and the trash slot; padding rows have the trash slot, no query
    and length 0. `token_ids` is -1 where the id is still on the device, in
    `last_token[token_slots]`; the embed node resolves it. `num_decodes` is a device scalar: rows
    below it have one token each, rows from it on are prefill rows. `kv` holds the views that the kv
    plugin asked for by `metadata`. `host` is what the host knows of the step; a captured graph must
    not depend on it, so it is None while capturing.
    """

    shape: BatchShape
    token_ids: Tensor  # [T]
    positions: Tensor  # [T]
    token_slots: Tensor  # [T]
    slots: Tensor  # [R]
    query_start: Tensor  # [R + 1]
    seq_lens: Tensor  # [R]
    num_decodes: Tensor  # [1]
    logit_rows: Tensor  # [R], token index whose logits are wanted; padding names token 0
    sample_slots: Tensor  # [R], slot that receives the token of each logits row; padding: trash
    temperature: Tensor  # [R] float32, 0 for greedy
    sample_keys: Tensor  # [R, 2], the row's random key
    kv: dict[str, Tensor]
    last_token: Tensor  # [S + 1], the newest token of every slot, int32
    logits: Tensor | None = None  # [R, V], static: where lm_head writes; None: it allocates
    needs: int = 0  # what the rows ask of the sampler: bits of core.sampling.Needs
    host: HostBatch | None = None
