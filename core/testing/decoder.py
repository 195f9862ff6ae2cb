"""A tiny decoder over a real cache, step by step and without an engine: where spans are tried.

Its kinds are those of `core.testing.tiny`, but its weights are made here, so that nothing needs
transformers or a disk. A step is composed as the core does it: decode rows, chunks, padding.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence as Seq
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from core.batch import Limits
from core.chain import Placed, cover, decoder_chain, execute
from core.conform import bind
from core.facts import ModelFacts, facts_from_config
from core.model import Site
from core.registry import Registry
from core.rope import rope_tables
from core.sampler import SAMPLE
from core.sampling import Needs
from core.slots import NO_TOKEN
from core.testing.rig import Rig
from core.testing.tiny import KINDS
from core.weights import ModelWeights, allocate, checkpoint_views

if TYPE_CHECKING:
    from core.batch import Batch, Sequence
    from core.seams import KVSink

LIMITS = Limits(max_model_len=384, max_num_seqs=5, max_num_batched_tokens=384)
ROOM = LIMITS.max_num_seqs * LIMITS.max_model_len  # tokens
UNKNOWN = "unknown"  # a cache whose sinks are of a kind that nobody knows
HIDDEN = "none"  # a cache that shows no sink
_PADDING = {"num_padding_tokens": 3, "num_padding_rows": 1}


def config_of(kind: str) -> dict[str, Any]:
    """The config.json of one of the kinds."""
    model_type, fields = KINDS[kind]
    return {"model_type": model_type, **fields}


def lively_weights(facts: ModelFacts, device: torch.device | str) -> ModelWeights:
    """Random weights under which every gain and bias shows, and greedy text keeps moving."""
    weights = allocate(facts, device)
    generator = torch.Generator().manual_seed(11)
    for name, view in checkpoint_views(facts, weights).items():
        mean, deviation = 0.0, 0.3
        if name.endswith("norm.weight"):
            mean = 1.0
        elif view.ndim == 2:
            deviation = 1.5 * view.shape[1] ** -0.5
        view.copy_(torch.randn(view.shape, generator=generator) * deviation + mean)
    return weights


def save_decoder(kind: str, path: Path) -> Path:
    """The decoder of a kind in float32 as a Hugging Face directory, without a tokenizer."""
    from safetensors.torch import save_file

    facts = facts_from_config(config_of(kind), torch.float32)
    views = checkpoint_views(facts, lively_weights(facts, "cpu"))
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config_of(kind)))
    save_file({name: view.clone() for name, view in views.items()}, path / "model.safetensors")
    return path


class DecoderRig:
    """Facts, weights and cache of one kind, the chain over them, and sequences under way.

    `cache` names a kv offer; the caches "none" and "unknown" are `paged`, whose sinks are hidden or
    replaced by decoys of an unknown kind.
    """

    def __init__(self, kind: str, cache: str, dtype: torch.dtype, device: str) -> None:
        self.facts = facts_from_config(config_of(kind), dtype)
        self.weights = lively_weights(self.facts, device)
        name = "paged" if cache in (HIDDEN, UNKNOWN) else cache
        offer: Any = Registry().find("kv", name).load()
        kv = bind("kv", offer(offer.Config()))
        self.rig = Rig(kv, num_tokens=ROOM, limits=LIMITS, facts=self.facts, device=device)
        self.rope = rope_tables(self.facts, LIMITS.max_model_len, device)
        sites = [
            Site(i, self.facts, self.weights, layer, *self.rope, kv, _shown(kv.sink(i), cache))
            for i, layer in enumerate(self.weights.layers)
        ]
        head = Site(-1, self.facts, self.weights, None, *self.rope, kv, None)
        self.sink = sites[0].sink
        self.chain = decoder_chain(head, sites)
        self.sample_chain = [Placed(SAMPLE, head)]

    def steps(self, num_tokens: int, check: Callable[[Seq[Placed], Batch], None]) -> None:
        """A lone prompt of `num_tokens`, up to its final norm, as if it were a chunk of a longer
        one, and another up to its logits; then decodes and a chunk behind a prefix, as many tokens
        in all, up to the logits.

        `check(chain, batch)` is called with each step, once it has begun, and the chain to run it
        through, which fills the cache. There is something in the cache to read by then.
        """
        rng = np.random.default_rng(num_tokens)
        lengths = (9, 20, 5 + num_tokens, num_tokens, num_tokens)
        first, second, third, lone, whole = running = [
            self.rig.sequence(
                rng.integers(1, self.facts.vocab_size, n).tolist(), share_prefix=False
            )
            for n in lengths
        ]
        for seq in running:
            assert self.rig.admit(seq) == 0
        self._run([], [(first, 8), (second, 19), (third, 5)], _run_plain, wants_logits=False)
        if num_tokens > 1:
            self._run([], [(lone, num_tokens)], check, wants_logits=False)
            self._run([], [(whole, num_tokens)], check)
        decodes = [first, second][: max(1, num_tokens - 1)]
        rest = num_tokens - len(decodes)
        self._run(decodes, [(third, rest)] if rest else [], check)
        for seq in running:
            self.rig.release(seq)

    def _run(
        self,
        decodes: Seq[Sequence],
        prefills: Seq[tuple[Sequence, int]],
        check: Callable[[Seq[Placed], Batch], None],
        *,
        wants_logits: bool = True,
    ) -> None:
        step = self.rig.begin(decodes, prefills, **_PADDING)
        batch, rows = step.batch, step.rows
        assert batch.host is not None
        num_decodes, num_rows, facts = batch.host.num_decodes, len(rows), self.facts
        ids = np.concatenate([row.seq.token_ids[row.lo : row.hi] for row in rows])
        slots = torch.from_numpy(batch.host.slots).to(batch.slots)
        batch.token_ids[: len(ids)] = torch.from_numpy(ids).to(batch.token_ids)
        # The ids of decode rows are known to the device alone, as in an overlapped step.
        batch.last_token[slots[:num_decodes].long()] = batch.token_ids[:num_decodes]
        batch.token_ids[:num_decodes] = NO_TOKEN
        batch.logit_rows[:num_rows] = batch.query_start[1 : num_rows + 1] - 1
        batch.sample_slots[:num_rows] = slots
        batch.temperature[1::2] = 0.7
        generator = torch.Generator().manual_seed(len(ids))
        batch.sample_keys.copy_(
            torch.randint(-(2**31), 2**31, (len(batch.slots), 2), generator=generator)
        )
        batch.needs = Needs.HOT
        batch.logits = torch.zeros(
            len(batch.slots), facts.vocab_size, dtype=facts.dtype, device=self.rig.device
        )
        check(self.chain if wants_logits else self.chain[:-1], batch)
        self.rig.end(step)


def _run_plain(chain: Seq[Placed], batch: Batch) -> None:
    execute(cover(chain, []), batch, {})


def _shown(sink: KVSink | None, cache: str) -> KVSink | None:
    """What sites show of a layer's sink."""
    if cache == HIDDEN or sink is None:
        return None
    if cache == UNKNOWN:
        return dataclasses.replace(sink, kind=UNKNOWN, k=sink.k.clone(), v=sink.v.clone())
    return sink
