"""The offers that ship with outweigh, by module path; one is imported when it is asked for."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from core import hookimpl
from core.errors import UserError

if TYPE_CHECKING:
    from core.engine import Engine
    from core.hookspecs import Register
    from core.plan import Plan


@hookimpl
def outweigh_register_kv(register: Register) -> None:
    register("contiguous", "plugins.kv.contiguous:Contiguous")
    register("paged", "plugins.kv.paged:Paged")
    register("paged_int8", "plugins.kv.paged_int8:PagedInt8")
    register("paged_int4", "plugins.kv.paged_int4:PagedInt4")


@hookimpl
def outweigh_register_fusion(register: Register) -> None:
    register("none", "plugins.fusion.none:NoFusion")
    register("inductor", "plugins.fusion.inductor:InductorFusion")
    register("onednn", "plugins.fusion.onednn:OneDnnFusion")
    register("triton", "plugins.fusion.triton:TritonFusion")


@hookimpl
def outweigh_register_graphs(register: Register) -> None:
    register("none", "plugins.graphs.none:NoGraphs")
    register("decode", "plugins.graphs.decode:DecodeGraphs")
    register("full", "plugins.graphs.full:FullGraphs")
    register("piecewise", "plugins.graphs.piecewise:PiecewiseGraphs")


@hookimpl
def outweigh_register_sched(register: Register) -> None:
    register("fifo", "plugins.sched.fifo:Fifo")
    register("shortest", "plugins.sched.shortest:Shortest")
    register("aging", "plugins.sched.aging:Aging")
    register("priority", "plugins.sched.priority:Priority")


@hookimpl
def outweigh_check_combination(plan: Plan) -> list[str]:
    """What the offers above need of the rest."""
    refusals = []
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if plan.fusion.name == "triton" and plan.config.device == "cpu" and not interpreted:
        refusals.append(
            "fusion 'triton' runs its kernels on CUDA and the device is cpu: choose --fusion none, "
            "or set TRITON_INTERPRET=1 to try them, slowly, in Triton's interpreter"
        )
    if plan.fusion.name == "onednn" and plan.config.dtype == "float16":
        refusals.append(
            "fusion 'onednn' has no products in float16: choose --fusion none, or --dtype bfloat16"
        )
    if plan.config.device != "cpu":
        refusals += _without_kernels(plan)
    if plan.graphs.offer.captures and getattr(plan.fusion.config, "verify", False):
        refusals.append(
            "fusion.verify compares on the host, which no captured graph can, and graphs "
            f"'{plan.graphs.name}' captures: choose --graphs none"
        )
    return refusals


def _without_kernels(plan: Plan) -> list[str]:
    """What is computed in plain torch alone."""
    why = f"has no kernels for CUDA yet and the device is {plan.config.device}: choose"
    if plan.kv.name == "paged_int4":
        return [f"kv 'paged_int4' {why} --kv paged_int8, or --device cpu"]
    if getattr(plan.kv.config, "k_scales", None) == "channel":
        return [f"kv.k_scales=channel {why} --set kv.k_scales=token, or --device cpu"]
    return []


@hookimpl
def outweigh_engine_built(engine: Engine) -> None:
    """What `fusion.verify` counts is among the engine's own counters, so that reports have it."""
    fusion = engine.plan.fusion
    verification = getattr(fusion.config, "verification", None)
    if verification is not None:
        vars(engine.counters)["verified_spans"] = verification.counts
    elif getattr(fusion.config, "verify", False):
        raise UserError(
            f"fusion '{fusion.name}' takes fusion.verify and watches no span: end its `spans` with "
            "`return self.config.chosen(...)`"
        )


@hookimpl
def outweigh_run_finished(report: Mapping[str, Any]) -> None:
    """Whether `fusion.verify` found nothing, or looked at nothing."""
    by_span = report["counters"].get("verified_spans")
    if by_span is not None:
        kinds = ("num_places", "num_right", "num_deviating")
        places, right, wrong = (sum(counts[kind] for counts in by_span.values()) for kind in kinds)
        times = f"{right + wrong} times, at {places} places; {wrong or 'none'} deviated"
        names = ", ".join(by_span)
        what = f"compared spans ({names}) {times}" if by_span else "saw no span run"
        print(f"outweigh: note: fusion.verify {what}")
