"""The engine: requests in, tokens out, one step at a time.

    waiting ──▶ plan of step N+1 ──▶ launch ──▶ (step N+1 runs) ──▶ harvest N: tokens, stops
                                                                    settle N: text, publishing

With overlap (depth 1, the default with CUDA graphs) a step is launched before the tokens of the one
before it are known: the ids are gathered on the device, stops by length are known in advance, an
EOS overruns by one step whose token is dropped. Without overlap (depth 0) every step is harvested
before the next is planned.

Between the tokens of a step and the next launch stands what a plan depends on, done by arrays: the
tokens, who has ended, whose room is free. What is done for each request (text, events, outputs) is
settled afterwards.
"""

from __future__ import annotations

import asyncio
import gc
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence as Seq
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeVar

import numpy as np

from core.batch import Sequence
from core.compose import Parts, compose
from core.errors import RunError, UserError, explained, reason
from core.metrics import KVUse, RequestMetrics, StepCounters
from core.sampling import SamplingParams
from core.schedule import Schedule, StepPlan
from core.scoring import score, score_prompt
from core.seams import offered
from core.show import progress_bar
from core.stops import RequestText

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from core.executor import InFlight
    from core.show import Progress

_T = TypeVar("_T")
_MANY = 8  # prompts from which on `generate` shows a bar in a terminal
Prompt = str | Seq[int]


@dataclass(frozen=True)
class RequestOutput:
    """One finished request. `finish_reason`: "stop", "length", "abort", or "error" (then `error`
    says why).

    `token_ids` has what ended it, `text` only if include_stop_str_in_output is set. `logprobs` has
    a number a token, `top_logprobs` the likeliest tokens there, {id: log-probability}, best first;
    both are None unless asked for. Those of a prompt begin with None: nothing predicts its first.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: str
    logprobs: list[float] | None
    metrics: RequestMetrics
    error: str | None = None
    top_logprobs: list[dict[int, float]] | None = None
    prompt_logprobs: list[float | None] | None = None
    prompt_top_logprobs: list[dict[int, float] | None] | None = None


class StepEvent(NamedTuple):
    """What a step brought for one request: new tokens, the text they decide, and the output if it
    ended."""

    request_id: str
    token_ids: list[int]
    text: str
    output: RequestOutput | None = None


@dataclass(eq=False)
class _Request:
    """What the engine keeps of a request beside its sequence."""

    seq: Sequence
    prompt: str | None
    stop_ids: tuple[int, ...]
    text: RequestText
    num_read: int = 0
    unread: list[int] = field(default_factory=list)  # known, and in no text yet
    fresh: list[int] = field(default_factory=list)  # read, and in no event yet
    output: RequestOutput | None = None


class Engine(AbstractContextManager["Engine"]):
    """A model and four plugins, composed. Keyword arguments are the fields of
    `core.config.RunConfig`.

    A seam (`kv`, `fusion`, `graphs`, `sched`) takes a name or an instance. `progress(stage, done,
    total)` is called while weights load and graphs are captured. `weights_of` is an open engine of
    the same model, dtype, device and seed: both read the same weights then. Raises UserError for
    what the caller can mend.

    On CUDA what exists when it has been built is kept from Python's garbage collector until it is
    closed (`gc.freeze`): to look through it all takes as long as ten decode steps.
    """

    _parts: Parts

    def __init__(
        self, *, progress: Progress | None = None, weights_of: Engine | None = None, **config: Any
    ) -> None:
        self.counters, self.kv_use = StepCounters(), KVUse()
        self._requests: dict[str, _Request] = {}
        self._in_flight: deque[tuple[float, InFlight]] = deque()  # after the moment of launch
        # Landed and not settled: the step, which rows still count, whose they are, who has ended,
        # and whom of these the token stopped.
        self._unsettled: list[tuple[InFlight, Any, Any, Any, Any]] = []
        self._num_added, self._landed_s, self._closed = 0, 0.0, False
        self._news: dict[_Request, None] = {}  # got tokens or an end, and no event of it yet
        self._streams: set[_Request] = set()
        like = weights_of._open()._parts if weights_of else None
        self._parts = parts = compose(config, self.counters, progress or (lambda *_: None), like)
        self.plan, self.config, self.limits = parts.plan, parts.plan.config, parts.limits
        self.facts, self.tokenizer = parts.model.facts, parts.model.tokenizer
        self.notes = list(parts.model.notes)
        self._kv, self._executor, self._slots = parts.kv, parts.executor, parts.slots
        self._observe = offered(parts.sched, "observe")
        self._depth = 1 if self.config.overlap else 0
        self._schedule = Schedule(
            parts.limits, parts.kv, parts.sched, parts.slots, self.counters, self.config,
            clock=perf_counter, drain=self._drain, admit=self._take_slot,
        )  # fmt: skip
        self.plan.registry.hooks.call("outweigh_engine_built", self)
        if parts.executor.device.type == "cuda":
            gc.collect()  # what is garbage already would be kept as well
            gc.freeze()

    # -------- requests

    def add_request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        metadata: Mapping[str, Any] | None = None,
        arrival: float | None = None,
    ) -> str:
        """Queue a request, given as text or as token ids; refuses what can never run, with the
        numbers.

        Schedulers see `priority` (lower is more urgent) and `metadata` in `Sequence.metadata`.
        `arrival` is when it was due, in seconds of `time.perf_counter`; None: now.
        """
        self._open()
        arrival = perf_counter() if arrival is None else arrival
        params = params or SamplingParams()
        request_id = request_id if request_id is not None else str(self._num_added)
        if request_id in self._requests:
            raise UserError(f"request {request_id!r} is running: give every request its own id")
        sched = self.plan.sched
        if not isinstance(priority, int) or arrival != arrival:
            raise UserError(f"priority is {priority!r} and arrival {arrival}: give numbers")
        if priority and not getattr(sched.offer, "heeds_priority", True):
            raise UserError(f"sched '{sched.name}' heeds no priority: choose --sched priority")
        ids = self._encode(prompt)
        total = min(len(ids) + params.max_tokens, self.limits.max_model_len)
        seq = Sequence(
            request_id, ids, len(ids), params, arrival, self._num_added, total,
            num_known=len(ids), num_tokens=len(ids), token_times=np.zeros(len(ids)),
            share_prefix=params.prompt_logprobs is None,  # see score_prompt
            metadata={**(metadata or {}), "priority": priority},
        )  # fmt: skip
        ends = () if params.ignore_eos else self.facts.eos_token_ids
        given = prompt if isinstance(prompt, str) else None
        text = RequestText(self.tokenizer, params)
        request = _Request(seq, given, (*ends, *params.stop_token_ids), text)
        with self.plan.blaming():
            self._refuse_impossible(len(ids), total, params)
            seq.enqueued = perf_counter()
            self._schedule.enqueue(seq)
        self._num_added += 1
        self._requests[request_id] = request
        return request_id

    def _encode(self, prompt: Prompt) -> NDArray[np.int32]:
        with explained("the prompt is neither text nor token ids", "give a str or whole numbers"):
            if isinstance(prompt, str) and prompt:
                prompt.encode()  # bytes that are no UTF-8 arrive as lone surrogates
                prompt = self.tokenizer.encode(prompt)
            array = np.asarray(list(prompt))
            if array.size and (array.ndim > 1 or array.dtype.kind not in "iu"):
                raise TypeError(f"{array.dtype} in {array.ndim} dimensions")
        if not array.size:
            raise UserError("the prompt is empty: give at least one token")
        self._refuse_ids(array)
        return array.astype(np.int32)

    def _refuse_ids(self, ids: NDArray[Any]) -> None:
        size = self.facts.vocab_size
        bad = ids[(ids < 0) | (ids >= size)]
        if bad.size:
            what = f"token id {bad[0]} is outside the model's vocabulary of {size}"
            raise UserError(f"{what}: give ids from 0 to {size - 1}")

    def _refuse_impossible(self, num_prompt: int, total: int, params: SamplingParams) -> None:
        longest = self.limits.max_model_len
        if num_prompt >= longest:
            what = f"the prompt has {num_prompt} tokens and max_model_len is {longest}, which must"
            advice = "shorten it or raise --max-model-len"
            raise UserError(f"{what} hold it and at least one new token: {advice}")
        step = self.limits.max_num_batched_tokens
        if not self.config.enable_chunked_prefill and num_prompt > step:
            what = f"the prompt has {num_prompt} tokens, one step holds {step}"
            advice = "raise --max-num-batched-tokens or turn --enable-chunked-prefill on"
            raise UserError(f"{what}: {advice}")
        if refusal := "".join(self._kv.ever_fits(total) or ()):  # a TypeError of what is no text
            raise UserError(refusal)
        if params.stop_token_ids:
            self._refuse_ids(np.array(params.stop_token_ids))
        if params.stop and not self.tokenizer.has_text:
            what = f"stop is {params.stop!r} and the model has no tokenizer, so there is no text"
            advice = "give stop_token_ids, or add tokenizer.json to the model's directory"
            raise UserError(f"{what} to look at: {advice}")
        if params.keeps_history:
            self._executor.sampler.reserve()

    def abort(self, request_id: str) -> None:
        """End a request now; what it has written so far is its output. Unknown and finished ids are
        ignored."""
        self._settle()
        if request := self._requests.get(request_id):
            self._finish(request, "abort")

    def has_unfinished(self) -> bool:
        return bool(self._requests or self._news.keys() - self._streams)

    # -------- step

    def step(self) -> list[StepEvent]:
        """Advance every running request by one step; what it brought, in the order of arrival of
        the rows."""
        self._advance()
        return [self._event(r) for r in list(self._news) if r not in self._streams]

    def _advance(self) -> None:
        """Plan and launch a step, then land those that are due."""
        with self.plan.blaming():
            self._open()
            if len(self._in_flight) > self._depth or self._launch():
                if len(self._in_flight) > self._depth:
                    self._harvest(*self._in_flight.popleft())
                    # Whoever comes after this call is to be in the next step, where a seat is free.
                    # Where none is, that step need not wait for the events of this one, and the one
                    # behind it is prepared while the host has time to.
                    if self._depth and not self._slots.num_free and self._launch():
                        self._attempt(self._executor.stage_ahead, self._schedule.foresee())
            elif not self._drain() and not self._schedule.num_running:
                if top := self._schedule.head():  # nothing runs, and it has no room: it never will
                    self._finish(self._requests[top[2].request_id], "error", self._no_room(top[2]))
            self._settle()

    def _launch(self) -> bool:
        """Plan and launch a step; False where nothing can run now."""
        plan, begun = self._schedule.plan(), perf_counter()
        if plan is None:
            return False
        if step := self._attempt(self._executor.launch, plan):
            self._in_flight.append((begun, step))
        self.kv_use.look(self._kv, self._slots.num_computed, begun)
        return True

    def _attempt(self, do: Callable[[Any], Any], plan: Any) -> Any:
        """Launch or stage a step. Where a plugin raises its requests fail, the others go on."""
        try:
            return do(plan)
        except Exception as error:  # noqa: BLE001
            self._drain()  # what is in flight did not fail, and may have ended some of them
            return self._fail(plan, error)

    def _fail(self, plan: StepPlan, error: Exception) -> None:
        """End the requests of a step that was not run, or not to its end."""
        self.counters.num_failed_steps += 1
        for seq in filter(None, [self._slots.owner[slot] for slot in plan.slots.tolist()]):
            self._slots.sync(seq)
            self._kv.rollback(seq, 0)
            why = self.plan.blame(error) or reason(error)
            self._finish(self._requests[seq.request_id], "error", why)

    def _harvest(self, begun: float, step: InFlight) -> None:
        """Take the tokens of a step that was launched earlier, and free the room of whom they
        end."""
        self._settle()
        s = self._slots  # of which nothing changes while the host waits
        live = s.epoch[step.slots] == step.epochs
        slots = step.slots[live]
        owners, stop_ids, known = s.owner[slots], s.stop_ids[slots], s.num_known[slots]
        ended = known + 1 >= s.max_total[slots]
        s.token_times[slots, known] = s.tokens[slots, known]  # fetched while the host has time to
        try:
            step.wait()
        except Exception as error:  # noqa: BLE001  # of the device; the next step may fare better
            return self._fail(step.plan, error)
        now = perf_counter()
        # A step begins with its launch, or with the end of the one before it.
        begun, self._landed_s = max(begun, self._landed_s), now
        ids = step.token_ids[live]
        s.tokens[slots, known] = ids
        s.token_times[slots, known] = now
        s.num_known[slots] = known + 1
        stopped = (ids[:, None] == stop_ids).any(1)
        ended |= stopped
        self._unsettled.append((step, live, owners, ended, stopped))
        for seq in owners[ended].tolist():
            self._schedule.remove(seq)
        if self._observe is not None:  # last: it may abort requests
            self._observe(int(step.plan.query_lens.sum()), len(step.plan.slots), now - begun)

    def _settle(self) -> None:
        """What is to be done for each row of a step that has landed, and no plan waits for."""
        while self._unsettled:
            step, live, owners, ended, stopped = self._unsettled.pop()
            slots, token_ids = step.slots[live], step.token_ids[live].tolist()
            requests = [self._requests[seq.request_id] for seq in owners.tolist()]
            for request, token_id in zip(requests, token_ids, strict=True):
                request.unread.append(token_id)
            self._news.update(dict.fromkeys(requests))
            if step.logprobs is not None:
                for row, request in zip(np.flatnonzero(live).tolist(), requests, strict=True):
                    if (num_top := request.seq.params.logprobs) is not None:
                        request.seq.logprobs.append(step.logprobs.pairs(row, num_top))
            for i in ended.nonzero()[0].tolist():
                self._conclude(requests[i], "stop" if stopped[i] else "length")
            for i in (self._slots.has_stop_strings[slots] & ~ended).nonzero()[0].tolist():
                self._read(requests[i])
                if requests[i].text.stopped:
                    ended[i] = True
                    self._finish(requests[i], "stop")
            self._schedule.publish(slots[~ended])

    def _drain(self) -> bool:
        """Land every step in flight; True if there was one."""
        busy = bool(self._in_flight)
        while self._in_flight:
            self._harvest(*self._in_flight.popleft())
        self._settle()
        return busy

    def _no_room(self, seq: Sequence) -> str:
        most, held, _ = self._kv.usage()
        what = f"request {seq.request_id!r} needs room for {seq.num_tokens} tokens, {most - held}"
        return f"{what} of the pool's {most} are free with nothing running: raise --kv-cache-bytes"

    def _take_slot(self, seq: Sequence) -> int:
        given, stop_ids = seq.params.seed, self._requests[seq.request_id].stop_ids
        seed = (self.config.seed << 32) ^ seq.order if given is None else given
        slot = self._slots.take(seq, seed, stop_ids)
        if seq.params.keeps_history:
            self._executor.sampler.admit(seq, stop_ids)
        return slot

    # -------- ending

    def _finish(self, request: _Request, how: str, error: str | None = None) -> None:
        """End a request whose tokens are settled. `how` is the finish_reason."""
        self._schedule.remove(request.seq)
        self._conclude(request, how, error)

    def _conclude(self, request: _Request, how: str, error: str | None = None) -> None:
        """Keep the output of a request that has ended for its last event."""
        seq = request.seq
        seq.saved = None  # the queue may hold a stale entry of it for long
        if seq.params.prompt_logprobs is not None and how in ("stop", "length"):
            try:
                seq.prompt_logprobs += score_prompt(self._parts, seq)
            except Exception as failure:  # noqa: BLE001  # a plugin's; the others go on
                how, error = "error", self.plan.blame(failure) or reason(failure)
        self._read(request, final=True)
        if request.text.stopped and how == "length":
            how = "stop"  # in text that was decided only with its end
        n = seq.num_prompt
        request.output = RequestOutput(
            request_id=seq.request_id,
            prompt=request.prompt,
            prompt_token_ids=seq.token_ids[:n].tolist(),
            token_ids=seq.token_ids[n : seq.num_known].tolist(),
            text=request.text.whole(),
            finish_reason=how,
            **_split("", seq.params.logprobs, seq.logprobs),
            **_split("prompt_", seq.params.prompt_logprobs, [(None, None), *seq.prompt_logprobs]),
            metrics=RequestMetrics.of(seq, perf_counter()),
            error=error,
        )
        del self._requests[seq.request_id]
        self._news[request] = None

    def _read(self, request: _Request, final: bool = False) -> None:
        """Bring the text of a request up to its known tokens."""
        ids, request.unread = request.unread, []
        request.num_read += len(ids)
        request.fresh += ids
        params = request.seq.params
        if ids and ids[-1] in request.stop_ids and not params.include_stop_str_in_output:
            ids.pop()  # what ends a request is not part of its text
        request.text.push(ids, watched=request.num_read > params.min_tokens, final=final)

    def _event(self, request: _Request) -> StepEvent:
        """The news of a request: tokens since its last event, the text that they decide, its
        end."""
        del self._news[request]
        if request.output is None:
            self._read(request)
        ids, request.fresh = request.fresh, []
        return StepEvent(request.seq.request_id, ids, request.text.delta(), request.output)

    # -------- whole batches

    def generate(
        self,
        prompts: Prompt | Seq[Prompt],
        params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """Run prompts to their end, with one SamplingParams for all or one each; outputs in order
        of prompts.

        Nothing is queued unless everything can be. Requests added before go on beside these. With
        `progress`, long batches show a bar where stderr is a terminal.
        """
        batch: list[Any] = [prompts] if isinstance(prompts, str) else list(prompts)
        if batch and isinstance(batch[0], int | np.integer):
            batch = [batch]  # one prompt given as ids
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(batch)
        if not all(isinstance(one, SamplingParams) for one in params):
            raise UserError(f"{params!r} are no SamplingParams: give one for all, or one each")
        if len(params) != (n := len(batch)):
            raise UserError(f"{n} prompts and {len(params)} SamplingParams: give one, or one each")
        requests: list[_Request] = []
        try:
            for prompt, one in zip(batch, params, strict=True):
                requests.append(self._requests[self.add_request(prompt, one)])
        except (UserError, RunError):
            for request in requests:
                self._schedule.remove(request.seq)
                del self._requests[request.seq.request_id]
            raise
        shows = progress and len(requests) >= _MANY
        with progress_bar(sys.stderr) if shows else nullcontext(lambda *_: None) as bar:
            for request in requests:
                while request.output is None:
                    self._advance()
                    bar("generate", sum(r.output is not None for r in requests), len(requests))
        return [output for r in requests if (output := self._event(r).output)]

    async def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, **fields: Any
    ) -> AsyncIterator[StepEvent]:
        """The events of one request as they come, the last with its output. `fields` are the
        others of `add_request`.

        Any number of streams share the engine on one event loop: whoever waits runs the next step,
        which holds the loop while it lasts. A stream that is cancelled or closed aborts its
        request; `contextlib.aclosing` closes it at once where a loop over it may be left early.
        """
        request = self._requests[self.add_request(prompt, params, **fields)]
        self._streams.add(request)
        try:
            while request.output is None or request in self._news:
                await asyncio.sleep(0)  # first whoever has news already
                if request not in self._news:
                    self._advance()
                if request in self._news:
                    yield self._event(request)
        finally:
            self._streams.remove(request)
            if request.output is None:
                self.abort(request.seq.request_id)
            self._news.pop(request, None)

    def score(
        self, token_ids: Seq[int], reducer: Callable[[int, Tensor, Tensor], _T], rows: int = 256
    ) -> list[_T]:
        """Teacher-forced logits of `token_ids`, streamed: what generation reads, through the stored
        KV path.

        `reducer(first, logits, targets)` is called for slices in order; logits [n, V] are those at
        positions first .. first + n - 1, targets [n] int64 the tokens that follow (one fewer for
        the last position). Returns what the reducer returned. Prefix hits are not used.
        """
        return score(self._open()._parts, self._encode(token_ids), reducer, rows)

    # -------- closing

    def report(self) -> dict[str, Any]:
        """What this engine is and has done so far, JSON-able."""
        seen = {"counters": {**vars(self.counters)}, "kv_use": self.kv_use.as_dict()}
        return self._open()._parts.describe() | seen

    def close(self) -> None:
        """Give back the device memory. Unfinished requests are dropped."""
        if not self._closed:
            self._drain()
            self._closed = True
            self._requests, self._news = {}, {}
            if self._executor.device.type == "cuda":
                gc.unfreeze()
            del self._schedule, self._executor, self._kv, self._parts

    def _open(self) -> Self:
        if self._closed:
            raise UserError("this engine is closed: build a new one")
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _split(prefix: str, asked: int | None, pairs: Seq[tuple[Any, Any]]) -> dict[str, Any]:
    """Log-probabilities as two fields of an output, None where they were not asked for."""
    kept = None if asked is None else pairs
    return {
        f"{prefix}{name}logprobs": kept and [pair[i] for pair in kept]
        for i, name in enumerate(("", "top_"))
    }
