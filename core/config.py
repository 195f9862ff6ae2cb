"""What a run may be told: `RunConfig`, the options of offers, `--set`, and the record of both.

Everything a user gets wrong here ends in one `UserError` sentence that names the near misses.
"""

from __future__ import annotations

import difflib
import json
import platform
from collections.abc import Iterable, Mapping
from importlib import metadata
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ByteSize, ConfigDict, Field, ValidationError

from core import __version__
from core.errors import UserError, explained
from core.seams import PROJECT, SEAMS

DType = Literal["float32", "bfloat16", "float16"]
Count = Annotated[int, Field(gt=0)]
_Schema = TypeVar("_Schema", bound=BaseModel)


class OfferConfig(BaseModel):
    """The options of one offer. Subclass it as `Config`, nested in the offer:

        class Config(OfferConfig):
            block_size: int = Field(32, gt=0, description="tokens of a block")

    Instances are frozen, unknown fields are refused, descriptions give the unit. A field declared
    `str` takes numbers too, because `--set` reads its value as JSON where that is possible.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", coerce_numbers_to_str=True)


class RunConfig(BaseModel):
    """One run. In place of the name of an offer its class or a configured instance may be given.

    "auto" and None are values that `core.plan.DEFAULTS` says, but for four: `max_model_len` is what
    model and cache hold, `kv_cache_bytes` what `gpu_memory_utilization` leaves,
    `enable_prefix_caching` whether the kv offer can, `overlap` whether the graphs offer captures.
    Without `chunk_size` a prompt gets what the step has left.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str = Field("tiny", description="folder, hub id, tiny (embedded), or random:SHAPE")
    kv: Any = Field("paged", description="key/value manager")
    fusion: Any = Field("auto", description="fusion set")
    graphs: Any = Field("auto", description="graph strategy")
    sched: Any = Field("fifo", description="scheduler")
    settings: dict[str, Any] = Field({}, description='options of the offers, "kv.block_size": 32')
    plugins: tuple[str, ...] = Field((), description="modules or files to load, no:NAME to block")
    device: str | None = Field(None, description="cpu, cuda or cuda:N; auto: cuda if there is one")
    dtype: DType | None = Field(None, description="of weights and activations")
    max_model_len: Count | None = Field(None, description="tokens of a sequence; auto: what fits")
    max_num_seqs: Count | None = Field(None, description="sequences of one step")
    max_num_batched_tokens: Count | None = Field(None, description="tokens of one step")
    chunk_size: Count | None = Field(None, description="most prompt tokens of a sequence in a step")
    enable_chunked_prefill: bool = Field(True, description="spread long prompts over several steps")
    max_bypass: int = Field(0, ge=0, description="sequences that may start before one without room")
    preemption: Literal["recompute", "swap"] = Field("recompute", description="of victims' keys")
    kv_cache_bytes: ByteSize | None = Field(None, gt=0, description="of the KV cache, as 2GiB")
    gpu_memory_utilization: float | None = Field(None, gt=0, le=1, description="share of the GPU")
    enable_prefix_caching: bool | None = Field(None, description="share blocks of equal prefixes")
    seed: int = Field(0, ge=0, lt=2**63, description="seed of random weights and of sampling")
    overlap: bool | None = Field(None, description="plan a step while one runs; auto: with graphs")

    @classmethod
    def of(cls, **fields: Any) -> RunConfig:
        """`RunConfig(**fields)`, with what is wrong said in one `UserError` sentence."""
        return validated(cls, fields, "the run")


def did_you_mean(name: str, known: Iterable[str], what: str = "known") -> str:
    """What follows "there is no NAME": its near misses, or where there are none all that is known.

    `what` says what the names of `known` are.
    """
    names = list(known)
    cutoff = 0.5 if len(name) < 4 else 0.6  # 'kw' for 'kv' shares half of its letters
    if near := difflib.get_close_matches(name, names, n=2, cutoff=cutoff):
        return f"; did you mean {' or '.join(near)}?"
    return f"; {what}: {', '.join(names) or 'none'}"


def validated(
    schema: type[_Schema], values: Mapping[str, Any], owner: str, prefix: str = ""
) -> _Schema:
    """`values` as a `schema`, or one UserError with all that `owner` refuses.

    `prefix` goes before the name of each field.
    """
    try:
        return schema.model_validate(values)
    except ValidationError as error:
        parts = []
        for item in error.errors():
            field, why = ".".join(map(str, item["loc"])), item["msg"].removeprefix("Value error, ")
            if item["type"] == "extra_forbidden":
                hint = did_you_mean(field, schema.model_fields, "its options")
                parts.append(f"{owner} has no option '{field}'{hint}")
            elif item["type"] == "missing":
                parts.append(f"{owner} needs {prefix}{field}")
            else:
                what = f"{prefix}{field}={item['input']!r}" if field else "its options"
                parts.append(f"{owner} refuses {what}: {why[:1].lower()}{why[1:]}")
        raise UserError("; ".join(parts)) from error


def parse_setting(text: str) -> tuple[str, Any]:
    """SEAM.FIELD=VALUE as ("SEAM.FIELD", value): the value as JSON if it parses, else as text."""
    key, equals, raw = text.partition("=")
    if not equals or "." not in key:
        raise UserError(f"--set takes SEAM.FIELD=VALUE (as in kv.block_size=32), not '{text}'")
    try:
        return key.strip(), json.loads(raw)
    except ValueError:
        return key.strip(), raw


def json_object(text: str, where: str, advice: str) -> dict[str, Any]:
    """The object that `text` is in JSON, or a UserError about `where`."""
    with explained(f"{where} is no JSON object", advice):
        return {**json.loads(text)}


def settings_by_seam(settings: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """{"kv.block_size": 32} as {"kv": {"block_size": 32}, "fusion": {}, …}."""
    routed: dict[str, dict[str, Any]] = {seam: {} for seam in SEAMS}
    for key, value in settings.items():
        seam, _, field = key.partition(".")
        if seam not in routed or not field:
            hint = did_you_mean(seam, SEAMS, "write SEAM.FIELD with one of the seams")
            raise UserError(f"the setting '{key}' names no option of a seam{hint}")
        routed[seam][field] = value
    return routed


def versions(distributions: Iterable[str] = ()) -> dict[str, str | None]:
    """Versions of outweigh, of what decides the numbers, and of `distributions`; None if absent."""
    names = ("torch", "triton", "transformers", *distributions)
    found = {name: [d.version for d in metadata.distributions(name=name)] for name in names}
    own = {PROJECT: __version__, "python": platform.python_version()}
    return {name: next(iter(installed), None) for name, installed in found.items()} | own
