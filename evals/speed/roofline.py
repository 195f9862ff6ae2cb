"""What the steps of a run had to read and compute, from records of `Engine.step`, and how near to
that they came.

A step's floor is the larger of two times: bytes over the bandwidth, floating-point operations over
the peak. Bytes are the weights, once a step, and the keys and values that its queries read from the
cache: all of the context of a decode row, what lies before its first token of a chunk. Operations
are those of the blocks for every token, of the head for every token that is sampled from, and of
causal attention. Padding, activations and what is written are not counted: they are not needed.

Contexts follow from the tokens that a request has got. Which prompts a step computed is not public:
its prompt tokens, whose number is, go to the requests in the order of their first tokens, and where
a call launches two steps (the last seat has been taken) to the first of them. So totals are exact,
and single steps are where prompts are computed one after the other. Recomputed prompt tokens count
in the blocks alone.
"""

from __future__ import annotations

from argparse import Namespace
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from evals.speed.steps import weight_bytes
from evals.speed.workloads import spread

if TYPE_CHECKING:
    from core.facts import ModelFacts
    from evals.speed.peers import Call


class Ceilings(NamedTuple):
    """Bytes and floating-point operations a second of the device."""

    bytes_per_s: float
    flops_per_s: float


@dataclass
class Step:
    """One step: when it ran, in seconds, and its work.

    It begins with the call that launches it or with the end of the step before, the later of the
    two, and ends when its tokens are on the host. `num_pairs` are queries times keys; `num_read`
    are tokens whose keys and values are read from the cache.
    """

    section: str | None
    begin_s: float
    end_s: float
    num_prefill: int
    num_decodes: int = 0
    num_sampled: int = 0
    num_pairs: int = 0
    num_read: int = 0

    @property
    def kind(self) -> str:
        if not self.num_prefill:
            return "decode"
        return "mixed" if self.num_decodes else "prefill"

    @property
    def seconds(self) -> float:
        return self.end_s - self.begin_s

    def decode(self, context: int) -> None:
        """A row whose query is the last of `context` tokens."""
        self.num_decodes += 1
        self.num_sampled += 1
        self.num_pairs += context
        self.num_read += context

    def chunk(self, start: int, num_tokens: int) -> None:
        """Tokens start .. start + num_tokens - 1 of a prompt."""
        self.num_pairs += num_tokens * start + num_tokens * (num_tokens + 1) // 2
        self.num_read += start


def floor_s(facts: ModelFacts, step: Step, ceilings: Ceilings, token_bytes: float) -> float:
    """Seconds, `token_bytes` being what the cache stores of a token over all layers."""
    head = facts.vocab_size * facts.hidden_size
    blocks = weight_bytes(facts) // facts.dtype.itemsize - head
    num_bytes = weight_bytes(facts) + step.num_read * token_bytes
    linear = 2 * blocks * (step.num_prefill + step.num_decodes) + 2 * head * step.num_sampled
    attention = 4 * step.num_pairs * facts.qkv_sizes[0] * facts.num_layers
    return max(num_bytes / ceilings.bytes_per_s, (linear + attention) / ceilings.flops_per_s)


def steps_of(calls: Iterable[Call], prompt_lens: Mapping[int, int], depth: int) -> list[Step]:
    """The steps that landed, in order. `depth` is how many a call leaves in flight, where seats are
    free."""
    in_flight: deque[Step] = deque()
    landed: list[Step] = []
    num_known = dict(prompt_lens)
    first: dict[int, None] = {}  # keys, in the order of their first tokens
    for call in calls:
        for i in range(call.num_launched):
            num_prefill = 0 if i else call.num_prefill
            in_flight.append(Step(None, call.begin_s, call.end_s, num_prefill))
        if len(in_flight) <= (depth if call.num_launched else 0):
            continue
        step = in_flight.popleft()
        step.section, step.end_s = call.section, call.end_s
        step.begin_s = max(step.begin_s, landed[-1].end_s if landed else 0.0)
        landed.append(step)
        for key, num_tokens in sorted(call.news):
            for _ in range(num_tokens):
                if key in first:
                    step.decode(num_known[key])
                else:
                    first[key] = None
                    step.num_sampled += 1
                num_known[key] += 1
    _hand_out([prompt_lens[key] for key in first], landed)
    return landed


def _hand_out(prompts: Iterable[int], steps: Iterable[Step]) -> None:
    """Give prompts, one after the other, to the steps as chunks that fill them."""
    left = deque(prompts)
    start = 0  # of what is left of the first
    for step in steps:
        room = step.num_prefill
        while room and left:
            num_tokens = min(room, left[0] - start)
            step.chunk(start, num_tokens)
            room, start = room - num_tokens, start + num_tokens
            if start == left[0]:
                left.popleft()
                start = 0


def shares(
    steps: Iterable[Step], floor: Callable[[Step], float] | None
) -> dict[str, dict[str, Any]]:
    """Section -> "all" and each kind of step -> their number, times, and floor over time."""
    groups: dict[str, dict[str, list[Step]]] = defaultdict(lambda: defaultdict(list))
    for step in steps:
        if step.section is not None:
            groups[step.section]["all"].append(step)
            groups[step.section][step.kind].append(step)
    return {
        section: {kind: _share(found, floor) for kind, found in by_kind.items()}
        for section, by_kind in groups.items()
    }


def _share(steps: Seq[Step], floor: Callable[[Step], float] | None) -> dict[str, Any]:
    total_s, times = sum(step.seconds for step in steps), [s.seconds * 1e3 for s in steps]
    found = {"step_ms": spread(times), "total_ms": total_s * 1e3}
    if floor is not None:
        floor_total_s = sum(map(floor, steps))
        found |= {"floor_ms": floor_total_s * 1e3, "share_of_roofline": floor_total_s / total_s}
    return found


def host_times(calls: Iterable[Call]) -> dict[str, dict[str, Any]]:
    """Section -> the time inside `Engine.step`, in ms, of calls that found the device idle.

    `call_ms` are calls that launched a step; `ms_a_step` is the time of all calls over the steps.
    """
    by_section: dict[str, list[Call]] = defaultdict(list)
    for call in calls:
        if call.section is not None:
            by_section[call.section].append(call)
    found = {}
    for section, group in by_section.items():
        inside = [(call.end_s - call.begin_s) * 1e3 for call in group]
        launching = [ms for ms, call in zip(inside, group, strict=True) if call.num_launched]
        num_steps = sum(call.num_launched for call in group)
        if num_steps:
            found[section] = {"call_ms": spread(launching), "ms_a_step": sum(inside) / num_steps}
    return found


def measured_bandwidth(device: str, num_bytes: int, samples: int = 10) -> dict[str, float]:
    """Bytes a second, best of `samples`: `read` by two reductions of a tensor of `num_bytes`,
    `copy` (read and written) from it to another."""
    import torch

    from evals.speed.span_times import timed

    source = torch.ones(num_bytes // 4, device=device)
    target = torch.empty_like(source)
    runs: dict[str, Callable[[], Any]] = {
        "sum": source.sum,
        "max": source.amax,
        "copy": lambda: target.copy_(source),
    }
    found = timed(runs, Namespace(samples=samples, replays=5, device=device))
    read_s, copy_s = min(*found["sum"], *found["max"]), min(found["copy"])
    return {"read": num_bytes / read_s, "copy": 2 * num_bytes / copy_s}
