"""What a run may be told: `RunConfig`, the options of offers, `--set`, and the record of both.

Everything a user gets wrong here ends in one `UserError` sentence that names the near misses.
"""

from __future__ import annotations

import difflib
import importlib.metadata
import json
import platform
import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from core.errors import UserError
from core.seams import PROJECT, SEAMS

DType = Literal["float32", "bfloat16", "float16"]
Count = Annotated[int, Field(gt=0)]


def byte_count(value: Any) -> Any:
    """Text such as 4096, 512MiB, 1.5GB in bytes: powers of 1024 with an i, of 1000 without."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(i?))?B?", value.strip(), re.IGNORECASE)
    if not match:
        raise ValueError("write a number of bytes as 4096, 512MiB or 2GiB")
    number, prefix, binary = match.groups()
    power = "_KMGT".index(prefix.upper()) if prefix else 0
    return int(float(number) * (1024 if binary else 1000) ** power)


class OfferConfig(BaseModel):
    """The options of one offer. Subclass it as `Config`, nested in the offer:

        class Config(OfferConfig):
            block_size: int = Field(32, gt=0, description="tokens of a block")

    Instances are frozen, unknown fields are refused, descriptions give the unit. A field declared
    `str` takes numbers too, because `--set` reads its value as JSON where that is possible.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", coerce_numbers_to_str=True)


class RunConfig(BaseModel):
    """One run. None means that the value is chosen by `core.plan.resolve`, or by the engine.

    In place of the name of an offer its class or a configured instance may be given.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str = Field(
        "random:tiny", description="folder, hub id, or random:SHAPE (seeded weights)"
    )
    kv: Any = Field("paged", description="key/value manager")
    fusion: Any = Field("auto", description="fusion set; auto: none on a CPU, triton on CUDA")
    graphs: Any = Field("auto", description="graph strategy; auto: none on a CPU, full on CUDA")
    sched: Any = Field("fifo", description="scheduler")
    settings: dict[str, Any] = Field({}, description='options of the offers, "kv.block_size": 32')
    plugins: tuple[str, ...] = Field((), description="modules or files to load, no:NAME to block")
    device: str | None = Field(None, description="cpu, cuda or cuda:N; auto: cuda if there is one")
    dtype: DType | None = Field(None, description="auto: float32 on a CPU, bfloat16 on CUDA")
    max_model_len: Count | None = Field(
        None, description="tokens of a sequence, prompt and output; auto: what model and cache hold"
    )
    max_num_seqs: Count | None = Field(
        None, description="sequences of one step; auto: 32 on a CPU, 256 on CUDA"
    )
    max_num_batched_tokens: Count | None = Field(
        None, description="tokens of one step; auto: 2048 on a CPU, 8192 on CUDA"
    )
    chunk_size: Count | None = Field(
        None, description="most prompt tokens of a sequence in a step; auto: what the step has left"
    )
    enable_chunked_prefill: bool = Field(
        True, description="spread long prompts over steps; off: a prompt is computed in one step"
    )
    max_bypass: int = Field(
        0, ge=0, description="sequences that may start before one that has no room yet"
    )
    preemption: Literal["recompute", "swap"] = Field(
        "recompute", description="a preempted sequence's keys: dropped, or kept on the host"
    )
    kv_cache_bytes: Annotated[Count | None, BeforeValidator(byte_count)] = Field(
        None, description="bytes of the KV cache (2GiB); auto: what gpu_memory_utilization leaves"
    )
    gpu_memory_utilization: float = Field(
        0.9, gt=0, le=1, description="share of the GPU's memory for weights, cache and graphs"
    )
    enable_prefix_caching: bool | None = Field(
        None, description="share the blocks of equal prefixes; auto: if the kv offer can"
    )
    seed: int = Field(0, ge=0, description="seed of random weights and of sampling")
    overlap: bool | None = Field(
        None, description="plan the next step while the device runs this one; auto: on CUDA"
    )

    @classmethod
    def of(cls, **fields: Any) -> RunConfig:
        """`RunConfig(**fields)`, with what is wrong said in one `UserError` sentence."""
        try:
            return cls(**fields)
        except ValidationError as error:
            raise UserError(sentence(error, "the run", "", cls.model_fields)) from error


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The near misses of `name` among `known`, as "; did you mean …?", or nothing."""
    cutoff = 0.5 if len(name) < 4 else 0.6  # 'kw' for 'kv' shares half of its letters
    near = difflib.get_close_matches(name, list(known), n=2, cutoff=cutoff)
    return f"; did you mean {' or '.join(near)}?" if near else ""


def sentence(error: ValidationError, owner: str, prefix: str, known: Iterable[str]) -> str:
    """What pydantic found, as one sentence.

    `owner` is who has the fields `known`; `prefix` goes before the name of each.
    """
    known = list(known)
    parts = []
    for item in error.errors():
        field = ".".join(map(str, item["loc"]))
        reason = item["msg"].removeprefix("Value error, ")
        if item["type"] == "extra_forbidden":
            hint = did_you_mean(field, known) or f"; its options: {', '.join(known) or 'none'}"
            parts.append(f"{owner} has no option '{field}'{hint}")
        elif item["type"] == "missing":
            parts.append(f"{owner} needs {prefix}{field}")
        elif not field:
            parts.append(f"{owner} refuses its options: {reason}")
        else:
            reason = reason[:1].lower() + reason[1:]
            parts.append(f"{owner} refuses {prefix}{field}={item['input']!r}: {reason}")
    return "; ".join(parts)


def parse_setting(text: str) -> tuple[str, Any]:
    """SEAM.FIELD=VALUE as ("SEAM.FIELD", value): the value as JSON if it parses, else as text."""
    key, equals, raw = text.partition("=")
    if not equals or "." not in key:
        raise UserError(f"--set takes SEAM.FIELD=VALUE (as in kv.block_size=32), not '{text}'")
    try:
        return key.strip(), json.loads(raw)
    except ValueError:
        return key.strip(), raw


def settings_by_seam(settings: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """{"kv.block_size": 32} as {"kv": {"block_size": 32}, "fusion": {}, …}."""
    routed: dict[str, dict[str, Any]] = {seam: {} for seam in SEAMS}
    for key, value in settings.items():
        seam, _, field = key.partition(".")
        if seam not in routed or not field:
            hint = did_you_mean(seam, SEAMS)
            raise UserError(
                f"the setting '{key}' names no option of a seam{hint or ';'} "
                f"write SEAM.FIELD with one of {', '.join(SEAMS)}"
            )
        routed[seam][field] = value
    return routed


def offer_config(
    seam: str, name: str, schema: type[OfferConfig], settings: Mapping[str, Any]
) -> OfferConfig:
    """The validated options of one offer, from its part of the settings."""
    try:
        return schema(**settings)
    except ValidationError as error:
        known = schema.model_fields
        raise UserError(sentence(error, f"{seam} '{name}'", f"{seam}.", known)) from error


def options(schema: type[OfferConfig]) -> list[dict[str, str]]:
    """The options of an offer for people: name, type, default, description."""
    rows = []
    for name, field in schema.model_fields.items():
        kind, default = field.annotation, "(required)"
        if not field.is_required():
            default = repr(field.get_default(call_default_factory=True))
        rows.append(
            {
                "name": name,
                "type": kind.__name__ if type(kind) is type else str(kind).replace("typing.", ""),
                "default": default,
                "description": field.description or "",
            }
        )
    return rows


def versions(distributions: Iterable[str] = ()) -> dict[str, str | None]:
    """Versions of outweigh, of what decides the numbers, and of `distributions`; None if absent."""
    from core import __version__

    found: dict[str, str | None] = {PROJECT: __version__, "python": platform.python_version()}
    for name in ("torch", "triton", "transformers", *distributions):
        if name not in found:
            try:
                found[name] = importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                found[name] = None
    return found
