"""Sampling parameters, and random keys that are a function of (seed, token position).

A token's noise depends on the request's seed, on the position of the token in its sequence and on
the vocabulary entry, and on nothing else: not on the batch, the row, the step, or on a preemption
in between (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011, is the idea; the
device half is in `core.sampler`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

import numpy as np

from core.config import did_you_mean
from core.errors import UserError, explained

if TYPE_CHECKING:
    from numpy.typing import NDArray

_GOLDEN = 0x9E3779B97F4A7C15
_MASK64 = (1 << 64) - 1
_COLDEST = 1e-5  # lower temperatures are greedy, as in vLLM: float32 could not hold the quotients
_NO_LIMIT = 1e38
_KINDS: dict[str, Any] = {"int": Integral, "float": Real, "bool": bool, "str": str}
_NOT_OFFERED = """n best_of use_beam_search beam_width length_penalty early_stopping logit_bias
    bad_words allowed_token_ids logits_processors structured_outputs guided_decoding detokenize
    skip_special_tokens spaces_between_special_tokens truncate_prompt_tokens output_kind
    flat_logprobs extra_args""".split()


class Needs:
    """What requests ask of the sampler, as bits, so that one look tells it of all rows."""

    HOT, FILTERED, PENALISED, MIN_TOKENS = 1, 2, 4, 8


def _option(
    default: Any, about: str, low: float = 0, high: float = _NO_LIMIT, takes: str | None = None
) -> Any:
    """A field: what it does, and what it takes, both for people; `low` and `high` are inclusive."""
    kind = "a number" if isinstance(default, float) else "a whole number"
    span = f"{kind} from {low:g} " + ("up" if high == _NO_LIMIT else f"to {high:g}")
    metadata = {"help": about, "takes": takes or span, "low": low, "high": high}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled and when it ends; names and meanings are vLLM's.

    What a field does and takes stands in its metadata, which the command line shows. The order is
    vLLM's too: log-probabilities are those of the raw logits; then come min_tokens, penalties,
    temperature, min-p, top-k, top-p. `stop` and `stop_token_ids` may be given as one value or as
    several, and are tuples afterwards. `seed` None takes the engine's seed and the order of
    arrival. Raises UserError for values out of range, and by name for what vLLM has and this engine
    does not.
    """

    max_tokens: int = _option(16, "most tokens to write", 1)
    min_tokens: int = _option(0, "tokens before which nothing but max_tokens ends the text")
    temperature: float = _option(0.0, "0 is greedy")
    top_k: int = _option(0, "sample from the k likeliest tokens; 0 or -1 is all", -1)
    top_p: float = _option(1.0, "sample from the likeliest tokens, up to this sum", 1e-6, 1)
    min_p: float = _option(0.0, "sample from what is this share as likely as the likeliest", 0, 1)
    repetition_penalty: float = _option(1.0, "divides the logits of what was there before", 1e-6)
    presence_penalty: float = _option(0.0, "is taken off the logits of what was written", -2, 2)
    frequency_penalty: float = _option(0.0, "is taken off once for each time it was", -2, 2)
    seed: int | None = _option(None, "of the request's randomness", -_NO_LIMIT, takes="any number")
    stop: tuple[str, ...] = _option((), "what ends the request", 1, takes="text that is not empty")
    stop_token_ids: tuple[int, ...] = _option((), "ends the request too", takes="ids of tokens")
    include_stop_str_in_output: bool = _option(False, "show what ended it", takes="true or false")
    ignore_eos: bool = _option(False, "write on after the model's end", takes="true or false")
    logprobs: int | None = _option(None, "likeliest tokens to give beside each written", 0, 20)
    prompt_logprobs: int | None = _option(None, "the same for each token of the prompt", 0, 20)

    def __new__(cls, *_: Any, **given: Any) -> SamplingParams:
        """Refuses keywords that are no fields; the generated __init__ does the rest."""
        for name in given:
            if name in _NOT_OFFERED:
                raise UserError(f"vLLM's sampling parameter '{name}' is not offered: leave it out")
            if name not in cls.__dataclass_fields__:
                hint = did_you_mean(name, cls.__dataclass_fields__, "choose from")
                raise UserError(f"there is no sampling parameter '{name}'{hint}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for name in ("stop", "stop_token_ids"):
            given: Any = getattr(self, name)
            given = (given,) if isinstance(given, str | Real) else () if given is None else given
            with explained(f"{name} is {given!r}", "give one value or several"):
                object.__setattr__(self, name, tuple(given))
        for name, f in self.__dataclass_fields__.items():
            value = getattr(self, name)
            if value is not f.default and not _is_valid(value, str(f.type), f.metadata):
                raise UserError(f"{name} is {value!r}: give {f.metadata['takes']}")
            if isinstance(value, np.integer):  # of a width that sums may not fit into
                object.__setattr__(self, name, int(value))
        if self.min_tokens > self.max_tokens:
            what = f"min_tokens is {self.min_tokens} and max_tokens is {self.max_tokens}"
            raise UserError(f"{what}: raise max_tokens or lower min_tokens")

    @cached_property
    def needs(self) -> int:
        """Bits of `Needs`."""
        hot = self.temperature >= _COLDEST
        filtered = hot and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)
        penalties = self.repetition_penalty, self.presence_penalty, self.frequency_penalty
        wanted = hot, filtered, penalties != (1, 0, 0), self.min_tokens > 0
        return sum(bit << i for i, bit in enumerate(wanted))

    @property
    def ignored(self) -> list[str]:
        """What was set and has no effect, because greedy tokens are not drawn."""
        drawn = {"top_k": (0, -1), "top_p": (1,), "min_p": (0,), "seed": (None,)}
        cold = self.temperature < _COLDEST
        return [name for name, off in drawn.items() if cold and getattr(self, name) not in off]

    @property
    def keeps_history(self) -> bool:
        """Whether the sampler must know the request's tokens, or those that may not come yet."""
        return bool(self.needs & (Needs.PENALISED | Needs.MIN_TOKENS))


def _is_valid(value: Any, kind: str, span: Any) -> bool:
    """Whether `value` has the type that the annotation `kind` names, and is in `span`, which has
    "low" and "high"."""
    if isinstance(value, tuple):
        return kind[:5] == "tuple" and all(_is_valid(item, kind[6:9], span) for item in value)
    name = kind.removesuffix(" | None")
    if value is None or not isinstance(value, _KINDS[name]):
        return value is None and name != kind
    size = len(value) if isinstance(value, str) else value
    return isinstance(value, bool) == (name == "bool") and bool(span["low"] <= size <= span["high"])


def _mix64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's finaliser (Steele, Lea, Flood 2014), elementwise."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def seed_state(seed: int) -> int:
    """The 64-bit state that stands for a request's seed; neighbouring seeds are far apart."""
    x = (int(seed) * 0xD1342543DE82EF95 + _GOLDEN) & _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    return x ^ (x >> 27)


def sample_keys(states: NDArray[np.uint64], positions: NDArray[np.int32]) -> NDArray[np.int32]:
    """Keys [n, 2] int32 of the tokens at `positions` of requests with these seed states."""
    keys = _mix64(states + positions.astype(np.uint64) * np.uint64(_GOLDEN))
    return keys.view(np.int32).reshape(-1, 2)
