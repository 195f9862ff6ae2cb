"""The device half of a step: stage the metadata, run or replay the model, sample, send the tokens
home."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence as Seq
from functools import partial
from itertools import compress
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from core.batch import Batch, BatchShape, HostBatch
from core.capture import GraphPool, pieces
from core.chain import Decoder, Placed, cover, execute
from core.config import did_you_mean
from core.errors import RunError, UserError
from core.model import BEGIN_STEP, LM_HEAD, Operation
from core.sampler import SAMPLE, Logprobs, Sampler, token_logprobs
from core.sampling import Needs, sample_keys
from core.seams import offered
from core.staging import Staging, core_sections, token_rows

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from core.batch import Limits
    from core.metrics import StepCounters
    from core.schedule import StepPlan
    from core.seams import GraphStrategy, KVManager, Span
    from core.slots import Slots


class InFlight(NamedTuple):
    """A step that has been launched. `slots` and `epochs` tell whose tokens they are, were the
    slots reused."""

    plan: StepPlan
    slots: NDArray[np.int32]  # [n], rows that sample
    epochs: NDArray[np.int64]  # [n]
    token_ids: NDArray[np.int32]  # [n], valid once `wait` has returned
    logprobs: Logprobs | None
    wait: Callable[[], None]


class Executor:
    """Owns every per-step buffer, the operations of each token bucket, and the graphs."""

    def __init__(
        self, decoder: Decoder, kv: KVManager, spans: Seq[Span], fusion: Any, graphs: GraphStrategy,
        limits: Limits, slots: Slots, counters: StepCounters, num_in_flight: int,
    ) -> None:  # fmt: skip
        facts, device = decoder.facts, decoder.device
        self.facts, self.limits, self.device = facts, limits, device
        self._kv, self._graphs, self._slots, self._counters = kv, graphs, slots, counters
        self._spans = tuple(spans)
        self._fuel = getattr(fusion, "fuel", None)  # options of a fusion set that the core heeds
        self._strict = getattr(fusion, "only", None) is not None
        head, first, *_ = chain = decoder.chain(kv)
        self._chain = [Placed(BEGIN_STEP, head.site), *chain]
        self._sample_chain, self._sink = [Placed(SAMPLE, head.site)], first.site.sink
        self._eager = self._left_out()
        self._operations: dict[tuple[int, ...], list[Operation]] = {}
        for tokens in (1, limits.max_num_batched_tokens):  # spans that overlap are refused here
            self._cover(self._chain, tokens)
        self._kv_arrays = {n: (shape, kind) for n, (shape, kind) in kv.metadata(limits).items()}
        if taken := self._kv_arrays.keys() & core_sections(limits):
            raise UserError(f"kv calls its metadata {sorted(taken)}, as the core's is: rename it")
        self._staging = Staging(self._kv_arrays | core_sections(limits), device, num_in_flight + 1)
        trash = limits.trash_slot
        self._token_padding = np.array([[0], [0], [trash]], np.int32)
        self._row_padding = np.array([[trash], [0], [0], [trash]], np.int32)
        longest = max(limits.max_model_len, limits.max_num_batched_tokens) + 1
        self._count = np.arange(longest, dtype=np.int32)
        self._last_token = torch.zeros(trash + 1, dtype=torch.int32, device=device)
        self.sampler = Sampler(trash + 1, facts.vocab_size, self._staging.device)
        self._logits = torch.zeros(trash, facts.vocab_size, dtype=facts.dtype, device=device)
        self._pool: GraphPool | None = None
        self.graph_bytes = 0  # device memory that the graphs hold
        self._shapes: dict[BatchShape, Batch] = {}
        self._views: dict[tuple[int, int, int], tuple[Any, ...]] = {}
        self._staged: tuple[Any, ...] = (None,)  # ahead: the plan, its batch and captured shape

    # -------- launch

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> InFlight:
        """Start a step. On CUDA this returns before it has run."""
        batch, captured = self._stage(plan)
        self._counters.num_steps += 1
        if self._pool and captured:
            self._counters.num_graph_steps += 1
            for step in self._pool.models[captured]:
                step(batch)
        else:
            self._counters.num_eager_steps += 1
            self._run_step(batch)
        sampled_slots = plan.slots[plan.samples]
        epochs = self._slots.epoch[sampled_slots]
        if not len(sampled_slots):
            return InFlight(plan, sampled_slots, epochs, sampled_slots, None, self._send_home()[1])
        results = [sampled := self._sample(batch)]
        num_top = int(self._slots.num_logprobs[sampled_slots].max())
        if num_top >= 0:
            results += token_logprobs(self._logits[: len(sampled)], sampled, num_top)
        (ids, *found), wait = self._send_home(*(x[: len(sampled_slots)] for x in results))
        return InFlight(plan, sampled_slots, epochs, ids, Logprobs(*found) if found else None, wait)

    def _send_home(self, *tensors: Tensor) -> tuple[list[NDArray[Any]], Callable[[], None]]:
        """Start copies to the host; they are valid, and the step has run, once the function that is
        given back has returned."""
        # From CUDA to pinned memory, which torch keeps and reuses in stream order.
        return [x.to("cpu", non_blocking=True).numpy() for x in tensors], self._staging.mark()

    def _run_step(self, batch: Batch) -> None:
        """From the metadata to the logits: what a graph captures."""
        chain = self._chain if len(batch.logit_rows) else self._chain[:-1]
        execute(self._cover(chain, batch.shape.num_tokens), batch, {})

    def _sample(self, batch: Batch) -> Tensor:
        variant = batch.needs & (Needs.HOT | Needs.FILTERED | Needs.PENALISED)
        if replay := self._pool and self._pool.samplers.get((batch.shape.num_seqs, variant)):
            return replay()
        self._counters.num_eager_samplers += 1
        return self._run_sampler(batch)

    def _run_sampler(self, batch: Batch) -> Tensor:
        operations = self._cover(self._sample_chain, batch.shape.num_tokens)
        sampled = execute(operations, batch, {"logits": self.sampler.adjusted(batch)})["sampled"]
        self.sampler.count(batch, sampled)
        # What the next step reads as input ids, so that it can be launched before the host knows
        # them.
        batch.last_token.index_copy_(0, batch.sample_slots.long(), sampled)
        return sampled

    def _cover(self, chain: list[Placed], num_tokens: int) -> list[Operation]:
        usable = [span.when(num_tokens, self.facts, self._sink) for span in self._spans]
        key = len(chain), *usable
        if key not in self._operations:
            spans = compress(self._spans, usable)
            self._operations[key] = cover(chain, spans, self._fuel, self._strict)
        return self._operations[key]

    # -------- staging

    @torch.inference_mode()
    def stage_ahead(self, plan: StepPlan | None) -> None:
        """Stage `plan`, if there is one, long before its launch; `launch` takes it from there."""
        self._staged = (None,) if plan is None else (plan, *self._stage(plan))

    def _stage(self, plan: StepPlan, eagerly: bool = False) -> tuple[Batch, BatchShape | None]:
        """Fill the host arrays for `plan`, send them, and give the batch that views them, with the
        captured shape that runs it, if one does."""
        (planned, *staged), self._staged = self._staged, (None,)
        if planned is plan:
            return staged[0], staged[1]
        if planned is not None:  # that one will not run, and took deltas with it
            self._kv.begin_step(staged[0])
        num_rows, lens = len(plan.slots), plan.query_lens[plan.num_decodes :].tolist()
        num_tokens, max_query = plan.num_decodes + sum(lens), max(lens, default=1)
        # One token a row: all of it is decoding, whoever they are.
        num_decodes = num_rows if max_query == 1 else plan.num_decodes
        seq_lens = plan.starts + plan.query_lens
        start = int(plan.starts[0]) if num_rows == 1 < max_query else None
        wanted = BatchShape(num_tokens, num_rows, max_query, int(seq_lens.max()), start)
        captured = self._captured(wanted) if self._pool and not eagerly else None
        num_logits = int(np.count_nonzero(plan.samples))
        batch = self._padded(wanted, captured) if captured else self._view(wanted, num_logits)
        host = self._staging.host()
        tokens, query_start = self._fill_tokens(host, plan, num_tokens, batch.shape)
        step = batch.host = HostBatch(
            num_tokens, num_rows, num_decodes, plan.slots, query_start, seq_lens,
            tokens[1], tokens[2], batch.shape,
        )  # fmt: skip
        batch.needs = self._fill_rows(host, plan, step)
        rounds = 0
        while self._kv.plan(step, {name: host[name] for name in self._kv_arrays}):
            if (rounds := rounds + 1) == len(self._count):  # of a row, or a column of all, at least
                raise ValueError(f"kv.plan() is True {rounds} times, and a step has no more of it")
            self._counters.num_extra_plans += 1
            self._staging.send(batch.shape.num_tokens)
            self._kv.begin_step(batch)
            self._staging.mark()
            previous, host = host, self._staging.host()
            for name, array in host.items():
                array[...] = previous[name]
        self._staging.send(batch.shape.num_tokens)
        return batch, captured

    def _fill_tokens(
        self, host: Mapping[str, NDArray[Any]], plan: StepPlan, num_tokens: int, shape: BatchShape
    ) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Token ids, positions and slots [3, T], and the start of every row [R + 1]; views of
        `host`."""
        known, num_rows = self._slots.tokens, len(plan.slots)
        starts, tokens = host["query_start"], token_rows(host["tokens"], shape.num_tokens)
        live = tokens[:, :num_tokens]
        if num_tokens == num_rows:
            starts[: num_rows + 1] = self._count[: num_rows + 1]
            live[0], live[1], live[2] = known[plan.slots, plan.starts], plan.starts, plan.slots
        elif num_rows == 1:
            slot, first = int(plan.slots[0]), int(plan.starts[0])
            starts[:2] = 0, num_tokens
            live[0] = known[slot, first : first + num_tokens]
            live[1], live[2] = self._count[first : first + num_tokens], slot
        else:
            lens, starts[0] = plan.query_lens, 0
            np.cumsum(lens, out=starts[1 : num_rows + 1])
            offsets = np.repeat(plan.starts - starts[:num_rows], lens)
            np.add(self._count[:num_tokens], offsets, out=live[1])
            live[2] = np.repeat(plan.slots, lens)
            live[0] = known[live[2], live[1]]
        starts[num_rows + 1 : shape.num_seqs + 1] = num_tokens
        tokens[:, num_tokens:] = self._token_padding
        return live, starts[: num_rows + 1]

    def _fill_rows(self, host: Mapping[str, NDArray[Any]], plan: StepPlan, step: HostBatch) -> int:
        """Everything by row. Returns what the rows need of the sampler, as bits of `Needs`."""
        s, shape, num_rows = self._slots, step.shape, step.num_seqs
        assert shape is not None
        host["num_decodes"][0] = step.num_decodes
        rows = host["rows"]
        rows[0, :num_rows], rows[1, :num_rows] = step.slots, step.seq_lens
        rows[:, num_rows : shape.num_seqs] = self._row_padding
        samples = plan.samples
        sampling, ends = plan.slots[samples], step.query_start[1:][samples]
        n = len(sampling)
        rows[2, :n], rows[3, :n] = ends - 1, sampling
        rows[2:, n:num_rows] = self._row_padding[2:]
        host["temperature"][:n] = s.temperature[sampling]
        host["temperature"][n : shape.num_seqs] = 0
        needs = int(np.bitwise_or.reduce(s.needs[sampling]))
        # Below, padding is left as it is: what it holds reaches the trash slot alone.
        if needs & Needs.HOT:  # a row of temperature 0 reads no key
            host["sample_keys"][:n] = sample_keys(s.seed_state[sampling], step.seq_lens[samples])
        if needs & Needs.FILTERED:
            host["filters"][:n] = s.filters[sampling]
        if needs & (Needs.PENALISED | Needs.MIN_TOKENS):
            holds_off = step.seq_lens[samples] < s.min_total[sampling]
            host["penalties"][:n] = s.penalties[sampling]
            host["penalties"][:n, 3] = holds_off
            needs |= Needs.PENALISED * bool(holds_off.any())
        return needs

    def _captured(self, wanted: BatchShape) -> BatchShape | None:
        """The captured shape that a step is padded to; None where it is to run eagerly."""
        if (shape := self._graphs.select(*wanted)) is None:
            return None
        holds = all(has >= needs for has, needs in zip(shape[:4], wanted[:4], strict=True))
        starts = shape.start in (None, wanted.start)
        exact = starts and (not shape.start or shape.num_tokens == wanted.num_tokens)
        if shape not in self._shapes or not (holds and exact):
            raise RunError(f"graphs selected {shape} for {wanted}, which it does not hold")
        return shape

    def _padded(self, wanted: BatchShape, captured: BatchShape) -> Batch:
        """A step with the padding of a captured shape. Where attention runs eagerly it sees the
        step as it is, but for the number of tokens, and of rows for which a sampler was
        captured."""
        if not self._eager:
            return self._shapes[captured]
        rows = min(s.num_seqs for s in self._shapes if s.num_seqs >= wanted.num_seqs)
        shape = captured._replace(num_seqs=rows, max_query=wanted.max_query, max_kv=wanted.max_kv)
        return self._view(shape, rows)

    def _view(self, shape: BatchShape, num_logits: int) -> Batch:
        size = T, R, L = shape.num_tokens, shape.num_seqs, num_logits
        if size not in self._views:  # those of the step before, as a rule: a view costs 1 us
            d = self._staging.device
            slots, seq_lens = d["rows"][:2, :R]
            logit_rows, sample_slots = d["rows"][2:, :L]
            self._views = {size: (
                *token_rows(d["tokens"], T), slots, d["query_start"][: R + 1], seq_lens,
                d["num_decodes"], logit_rows, sample_slots, d["temperature"][:L],
                d["sample_keys"][:L], {name: d[name] for name in self._kv_arrays},
                self._last_token, self._logits[:L],
            )}  # fmt: skip
        return Batch(shape, *self._views[size])

    # -------- capture

    def _left_out(self) -> frozenset[str]:
        """The nodes that no graph has: what a strategy cuts out, and what depends on more of a
        shape than its tokens."""
        if offered(self._graphs, "cut") is None:
            return frozenset()
        names, known = list(self._graphs.cut()), {placed.node.name: None for placed in self._chain}
        if unknown := [name for name in names if name not in known]:
            hint = did_you_mean(unknown[0], known, "its nodes")
            raise UserError(f"graphs cut out '{unknown[0]}', no node of the decoder{hint}")
        return frozenset({BEGIN_STEP.name, "attention", LM_HEAD.name, *names})

    @torch.inference_mode()
    def capture(self, progress: Callable[[str, int, int], None]) -> None:
        """Capture every shape that the strategy asks for, the largest first, over padding rows
        only."""
        shapes = sorted(set(self._graphs.shapes(self.limits)), key=lambda s: s[:4], reverse=True)
        self._pool = pool = GraphPool(self.device)
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved(self.device)
        for i, shape in enumerate(shapes):
            progress("capture", i, len(shapes))
            batch = self._shapes[shape] = self._view(shape, shape.num_seqs)
            self._stage_padding(shape)
            operations = self._cover(self._chain, shape.num_tokens)
            pool.capture_model(batch, pieces(operations, self._eager))
            for batch.needs in (0, Needs.HOT):
                key = shape.num_seqs, batch.needs
                if key not in pool.samplers:
                    pool.capture_sampler(key, partial(self._run_sampler, batch))
        self.graph_bytes = torch.cuda.memory_reserved(self.device) - before
        progress("capture", len(shapes), len(shapes))

    def _stage_padding(self, shape: BatchShape) -> None:
        """A step without a single live row, of which every write goes to the trash."""
        nothing = np.zeros(0, np.int32)
        step = HostBatch(0, 0, 0, nothing, np.zeros(1, np.int32), nothing, nothing, nothing)
        host = self._staging.host()
        for array in host.values():
            array[...] = 0
        host["rows"][...] = self._row_padding
        token_rows(host["tokens"], shape.num_tokens)[...] = self._token_padding
        self._kv.plan(step, {name: host[name] for name in self._kv_arrays})
        self._staging.send(shape.num_tokens)

    # -------- score

    @torch.inference_mode()
    def hidden_states(self, plan: StepPlan) -> Tensor:
        """The final hidden states of one eager step, [T, hidden], through the stored KV path."""
        batch, _ = self._stage(plan, eagerly=True)
        return execute(self._cover(self._chain[:-1], batch.shape.num_tokens), batch, {})["hidden"]
