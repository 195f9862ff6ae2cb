"""The engine: requests in, tokens out, one step at a time.

    waiting ──▶ plan of step N+1 ──▶ launch ──▶ (step N+1 runs) ──▶ harvest N: tokens, stops,
    publishing

With overlap (depth 1, the default on CUDA) a step is launched before the tokens of the one before
it are known: the ids are gathered on the device, stops by length are known in advance, an EOS
overruns by one step whose token is dropped. Without overlap (depth 0, a synchronous device) every
step is harvested before the next is planned.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence as Seq
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from core.batch import Sequence
from core.compose import compose
from core.errors import UserError
from core.metrics import RequestMetrics, StepCounters, request_metrics
from core.sampler import Logprobs
from core.sampling import SamplingParams
from core.schedule import Schedule, StepPlan
from core.scoring import score, score_prompt
from core.show import progress_bar
from core.stops import RequestText

if TYPE_CHECKING:
    from types import TracebackType

    from numpy.typing import NDArray
    from torch import Tensor

    from core.executor import InFlight

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


@dataclass(frozen=True)
class StepEvent:
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
    text: RequestText
    num_read: int = 0
    fresh: list[int] = field(default_factory=list)  # read, and in no event yet


class Engine:
    """A model and four plugins, composed. Keyword arguments are the fields of
    `core.config.RunConfig`.

    A seam (`kv`, `fusion`, `graphs`, `sched`) takes a name or an instance. `progress(stage, done,
    total)` is called while weights load and graphs are captured. Raises UserError for what the
    caller can mend.
    """

    def __init__(
        self, *, progress: Callable[[str, int, int], None] | None = None, **config: Any
    ) -> None:
        self.counters = StepCounters()
        self._clock = time.perf_counter
        self._requests: dict[str, _Request] = {}
        self._in_flight: deque[InFlight] = deque()
        self._launched: deque[float] = deque()
        self._landed = 0.0
        self._num_added = 0
        self._finished: list[StepEvent] = []
        self._touched: list[_Request] = []
        self._streams: dict[str, deque[StepEvent]] = {}
        self._closed = False
        self._parts = parts = compose(config, self.counters, progress or _no_progress)
        self.plan, self.config, self.limits = parts.plan, parts.plan.config, parts.limits
        self.facts, self.tokenizer = parts.model.facts, parts.model.tokenizer
        self.notes = list(parts.model.notes)
        self._kv, self._executor, self._slots = parts.kv, parts.executor, parts.slots
        self._observe = getattr(parts.sched, "observe", None)
        self._depth = 1 if self.config.overlap else 0
        self._schedule = Schedule(
            parts.limits,
            parts.kv,
            parts.sched,
            parts.slots,
            self.counters,
            chunk_size=self.config.chunk_size,
            chunked=self.config.enable_chunked_prefill,
            max_bypass=self.config.max_bypass,
            swap=self.config.preemption == "swap",
            clock=self._clock,
            drain=self._drain,
            admit=self._take_slot,
        )
        self.plan.registry.hooks.engine_built(self)

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
        self._check_open()
        arrival = self._clock() if arrival is None else arrival
        params = params or SamplingParams()
        request_id = request_id if request_id is not None else str(self._num_added)
        if request_id in self._requests:
            raise UserError(
                f"request {request_id!r} is already running: give every request its own id"
            )
        ids = self._encode(prompt)
        total = min(len(ids) + params.max_tokens, self.limits.max_model_len)
        self._refuse_impossible(len(ids), total)
        self._refuse_params(params)
        seq = Sequence(
            request_id=request_id,
            token_ids=ids,
            num_prompt=len(ids),
            params=params,
            arrival=arrival,
            order=self._num_added,
            max_tokens_total=total,
            num_known=len(ids),
            num_tokens=len(ids),
            token_times=np.zeros(len(ids)),
            share_prefix=params.prompt_logprobs is None,  # see score_prompt
            metadata={**(metadata or {}), "priority": priority},
        )
        self._num_added += 1
        self._requests[request_id] = _Request(
            seq, prompt if isinstance(prompt, str) else None, RequestText(self.tokenizer, params)
        )
        self._schedule.enqueue(seq)
        return request_id

    def _encode(self, prompt: Prompt) -> NDArray[np.int32]:
        ids: Seq[int] = ()
        if len(prompt):
            ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        if not ids:
            raise UserError("the prompt is empty: give at least one token")
        array = np.asarray(ids, np.int64)
        if array.min() < 0 or array.max() >= self.facts.vocab_size:
            bad = int(array[(array < 0) | (array >= self.facts.vocab_size)][0])
            raise UserError(
                f"token id {bad} is outside the model's vocabulary of {self.facts.vocab_size}: "
                f"give ids from 0 to {self.facts.vocab_size - 1}"
            )
        return array.astype(np.int32)

    def _refuse_impossible(self, num_prompt: int, total: int) -> None:
        longest = self.limits.max_model_len
        if num_prompt >= longest:
            raise UserError(
                f"the prompt has {num_prompt} tokens and max_model_len is {longest}, which must "
                "hold it and at least one new token: shorten it or raise --max-model-len"
            )
        step = self.limits.max_num_batched_tokens
        if not self.config.enable_chunked_prefill and num_prompt > step:
            raise UserError(
                f"the prompt has {num_prompt} tokens, a step holds {step} and chunked prefill is "
                "off: raise --max-num-batched-tokens or turn --enable-chunked-prefill on"
            )
        refusal = self._kv.ever_fits(total)
        if refusal:
            raise UserError(refusal)

    def _refuse_params(self, params: SamplingParams) -> None:
        if params.stop and not self.tokenizer.has_text:
            raise UserError(
                f"stop is {params.stop!r} and the model has no tokenizer, so there is no text to "
                "look at: give stop_token_ids, or add tokenizer.json to the model's directory"
            )
        if params.keeps_history:
            self._executor.sampler.reserve()

    def abort(self, request_id: str) -> None:
        """End a request now; what it has written so far is its output. Unknown and finished ids are
        ignored."""
        request = self._requests.get(request_id)
        if request is not None:
            self._finish(request, "abort")

    @property
    def num_decoding(self) -> int:
        """Sequences whose prompts are through and that will get a token from the next step."""
        return len(self._schedule.decoding)

    def has_unfinished(self) -> bool:
        return bool(self._requests or self._finished)

    # -------- step

    def step(self) -> list[StepEvent]:
        """Advance every running request by one step; what it brought, in the order of arrival of
        the rows."""
        self._check_open()
        touched = dict.fromkeys(self._advance())
        events = [
            self._event(request) for request in touched if request.seq.request_id in self._requests
        ]
        finished, self._finished = self._finished, []
        rest: deque[StepEvent] = deque()
        for event in [event for event in events if event.token_ids] + finished:
            self._streams.get(event.request_id, rest).append(event)
        return list(rest)

    def _advance(self) -> list[_Request]:
        """Plan and launch a step, then land those that are due. Returns the requests that got a
        token."""
        touched: list[_Request] = []
        self._touched = touched
        plan = self._schedule.plan()
        if plan is not None:
            self._launch(plan)
        due = 0 if plan is None else self._depth
        while len(self._in_flight) > due:
            self._harvest(self._in_flight.popleft())
        if plan is None and not touched and self._schedule.num_waiting and not self._in_flight:
            self._unblock()
        return touched

    def _launch(self, plan: StepPlan) -> None:
        begun = self._clock()
        try:
            self._in_flight.append(self._executor.launch(plan))
            self._launched.append(begun)
        except Exception as error:  # noqa: BLE001  # a plugin's step: its requests fail, the others go on
            self.counters.num_failed_steps += 1
            for slot in plan.slots.tolist():
                seq = self._slots.owner[slot]
                if seq is not None:
                    self._slots.sync(seq)
                    self._kv.rollback(seq, 0)
                    self._finish(self._requests[seq.request_id], "error", _sentence(error))

    def _harvest(self, step: InFlight) -> None:
        """Take the tokens of a step that was launched earlier, and end whom they end."""
        step.wait()
        now = self._clock()
        # A step begins with its launch, or with the end of the one before it.
        begun, self._landed = max(self._launched.popleft(), self._landed), now
        if self._observe is not None:
            self._observe(int(step.plan.query_lens.sum()), len(step.plan.slots), now - begun)
        s = self._slots
        live = s.epoch[step.slots] == step.epochs
        slots, ids = step.slots[live], step.token_ids[live]
        known = s.num_known[slots]
        s.tokens[slots, known] = ids
        s.token_times[slots, known] = now
        s.num_known[slots] = known + 1
        stopped = (ids[:, None] == s.stop_ids[slots]).any(1)
        for i in np.flatnonzero(s.has_stop_strings[slots] & ~stopped).tolist():
            request = self._requests[s.owner[slots[i]].request_id]
            self._read(request)
            stopped[i] = request.text.stopped
        ended = stopped | (known + 1 >= s.max_total[slots])
        if step.logprobs is not None:
            self._keep_logprobs(slots, Logprobs(*(values[live] for values in step.logprobs)))
        self._schedule.publish_known(slots[~ended])
        for slot in slots.tolist():
            self._touched.append(self._requests[s.owner[slot].request_id])
        for i in np.flatnonzero(ended).tolist():
            request = self._requests[s.owner[slots[i]].request_id]
            self._finish(request, "stop" if stopped[i] else "length")

    def _keep_logprobs(self, slots: NDArray[np.int32], logprobs: Logprobs) -> None:
        for row, slot in enumerate(slots.tolist()):
            seq = self._slots.owner[slot]
            if seq is not None and seq.params.logprobs is not None:
                seq.logprobs.append(logprobs.pairs(row, seq.params.logprobs))

    def _drain(self) -> bool:
        """Land every step in flight; True if there was one."""
        busy = bool(self._in_flight)
        while self._in_flight:
            self._harvest(self._in_flight.popleft())
        return busy

    def _unblock(self) -> None:
        """Nothing runs, nothing is in flight, and the head of the queue still has no room: it never
        will."""
        if self._schedule.num_running:
            return
        head = self._schedule.head()
        if head is not None:
            usage = self._kv.usage()
            self._finish(
                self._requests[head.request_id],
                "error",
                f"request {head.request_id!r} needs room for {head.num_tokens} tokens and "
                f"{usage.num_tokens - usage.num_held} of the pool's {usage.num_tokens} are free "
                "with nothing running: raise --kv-cache-bytes",
            )

    def _take_slot(self, seq: Sequence) -> int:
        params = seq.params
        seed = params.seed if params.seed is not None else (self.config.seed << 32) ^ seq.order
        stop = () if params.ignore_eos else self.facts.eos_token_ids
        stop_ids = (*stop, *params.stop_token_ids)
        slot = self._slots.take(seq, seed, stop_ids)
        if params.keeps_history:
            self._executor.sampler.admit(seq, stop_ids)
        return slot

    # -------- ending

    def _finish(self, request: _Request, reason: str, error: str | None = None) -> None:
        """End a request: give back its slot and room, and queue its last event."""
        seq = request.seq
        self._schedule.remove(seq)
        if seq.slot is not None:
            self._kv.on_slot(seq, None)
            self._kv.release(seq)
            self._slots.give_back(seq)
        if seq.params.prompt_logprobs is not None and reason in ("stop", "length"):
            try:
                seq.prompt_logprobs += score_prompt(self._parts, seq)
            except Exception as failure:  # noqa: BLE001  # a plugin's; the others go on
                reason, error = "error", _sentence(failure)
        event = self._event(request, final=True)
        if request.text.stopped and reason == "length":
            reason = "stop"  # in text that was decided only with its end
        output = self._output(request, reason, error)
        del self._requests[seq.request_id]
        self._finished.append(StepEvent(seq.request_id, event.token_ids, event.text, output))

    def _read(self, request: _Request, final: bool = False) -> None:
        """Bring the text of a request up to its known tokens."""
        seq = request.seq
        self._slots.sync(seq)
        lo = seq.num_prompt + request.num_read
        ids = seq.token_ids[lo : seq.num_known].tolist()
        request.num_read += len(ids)
        request.fresh += ids
        watched = seq.num_output > seq.params.min_tokens
        request.text.push(self._visible(ids, seq), watched=watched, final=final)

    def _event(self, request: _Request, final: bool = False) -> StepEvent:
        """The tokens of a request since its last event, and the text that they decide."""
        self._read(request, final)
        ids, request.fresh = request.fresh, []
        return StepEvent(request.seq.request_id, ids, request.text.delta())

    def _visible(self, ids: list[int], seq: Sequence) -> list[int]:
        """Ids whose text is shown: a stop id ends a request and is not part of its text."""
        params = seq.params
        stops = () if params.ignore_eos else self.facts.eos_token_ids
        hides = not params.include_stop_str_in_output
        return ids[:-1] if ids and hides and ids[-1] in (*stops, *params.stop_token_ids) else ids

    def _output(self, request: _Request, reason: str, error: str | None) -> RequestOutput:
        seq = request.seq
        n = seq.num_prompt
        return RequestOutput(
            request_id=seq.request_id,
            prompt=request.prompt,
            prompt_token_ids=seq.token_ids[:n].tolist(),
            token_ids=seq.token_ids[n : seq.num_known].tolist(),
            text=request.text.whole(),
            finish_reason=reason,
            **_split("", seq.params.logprobs, seq.logprobs),
            **_split("prompt_", seq.params.prompt_logprobs, [(None, None), *seq.prompt_logprobs]),
            metrics=request_metrics(
                arrival=seq.arrival,
                first_scheduled=seq.first_scheduled,
                ended=self._clock(),
                token_times=seq.token_times[n : seq.num_known],
                num_prompt=n,
                num_cached=seq.num_cached,
                num_preemptions=seq.num_preemptions,
            ),
            error=error,
        )

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
        batch = _as_prompts(prompts)
        each = _as_params(params, len(batch))
        ids: list[str] = []
        try:
            for prompt, one in zip(batch, each, strict=True):
                ids.append(self.add_request(prompt, one))
        except UserError:
            for request_id in ids:
                self._discard(request_id)
            raise
        wanted, others = set(ids), list[StepEvent]()
        outputs: dict[str, RequestOutput] = {}
        shows = progress and len(ids) >= _MANY
        with progress_bar(sys.stderr) if shows else nullcontext() as bar:
            while len(outputs) < len(ids):
                self._advance()
                finished, self._finished = self._finished, []
                for event in finished:
                    if event.request_id in wanted and event.output is not None:
                        outputs[event.request_id] = event.output
                    else:
                        others.append(event)
                if bar is not None and finished:
                    bar("generate", len(outputs), len(ids))
        self._finished = others
        return [outputs[request_id] for request_id in ids]

    async def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, request_id: str | None = None
    ) -> AsyncIterator[StepEvent]:
        """The events of one request as they come, the last with its output.

        Any number of streams share the engine on one event loop: whoever waits runs the next step,
        which holds the loop while it lasts. A stream that is cancelled or closed aborts its
        request; `contextlib.aclosing` closes it at once where a loop over it may be left early.
        """
        request_id = self.add_request(prompt, params, request_id)
        events = self._streams[request_id] = deque()
        try:
            event = None
            while event is None or event.output is None:
                while not events:
                    # Those of requests without a stream stay for whoever calls `step`.
                    kept = [e for e in self.step() if e.output is not None]
                    self._finished += kept
                    await asyncio.sleep(0)
                event = events.popleft()
                yield event
        finally:
            del self._streams[request_id]
            self.abort(request_id)
            self._finished = [e for e in self._finished if e.request_id != request_id]

    def _discard(self, request_id: str) -> None:
        """Take back a request that was queued and never ran."""
        self._schedule.remove(self._requests.pop(request_id).seq)

    def score(
        self,
        token_ids: Seq[int],
        reducer: Callable[[int, Tensor, Tensor], _T],
        rows: int = 256,
    ) -> list[_T]:
        """Teacher-forced logits of `token_ids`, streamed: what generation reads, through the stored
        KV path.

        `reducer(first, logits, targets)` is called for slices in order; logits [n, V] are those at
        positions first .. first + n - 1, targets [n] int64 the tokens that follow (one fewer for
        the last position). Returns what the reducer returned. Prefix hits are not used.
        """
        self._check_open()
        ids = self._encode(token_ids)
        if len(ids) > self.limits.max_model_len:
            raise UserError(
                f"{len(ids)} tokens to score and max_model_len is {self.limits.max_model_len}: "
                "raise --max-model-len"
            )
        return score(self._parts, ids, self._num_added, reducer, rows)

    # -------- closing

    def report(self) -> dict[str, Any]:
        """What this engine is and has done so far, JSON-able."""
        return {**self._parts.describe(), "counters": self.counters.as_dict()}

    def close(self) -> None:
        """Give back the device memory. Unfinished requests are dropped."""
        if not self._closed:
            self._drain()
            self._closed = True
            self._requests.clear()
            del self._schedule, self._executor, self._kv, self._parts

    def _check_open(self) -> None:
        if self._closed:
            raise UserError("this engine is closed: build a new one")

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _as_prompts(prompts: Prompt | Seq[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    batch = list(prompts)
    if batch and isinstance(batch[0], (int, np.integer)):
        return [batch]  # type: ignore[list-item]  # one prompt given as ids
    return batch  # type: ignore[return-value]


def _as_params(
    params: SamplingParams | Seq[SamplingParams] | None, num_prompts: int
) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * num_prompts
    if len(params) != num_prompts:
        raise UserError(
            f"{num_prompts} prompts and {len(params)} SamplingParams: give one for all, or one each"
        )
    return list(params)


def _split(prefix: str, asked: int | None, pairs: Seq[tuple[Any, Any]]) -> dict[str, Any]:
    """Log-probabilities as two fields of an output, None where they were not asked for."""
    kept = None if asked is None else pairs
    return {
        f"{prefix}{name}logprobs": kept and [pair[i] for pair in kept]
        for i, name in enumerate(("", "top_"))
    }


def _sentence(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else 'no message'}"


def _no_progress(stage: str, done: int, total: int) -> None:
    return None
