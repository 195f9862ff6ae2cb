"""The offers that ship with outweigh, by module path; one is imported when it is asked for."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from core import hookimpl

if TYPE_CHECKING:
    from core.hookspecs import Register
    from core.plan import Plan


@hookimpl
def outweigh_register_kv(register: Register) -> None:
    register("contiguous", "plugins.kv.contiguous:Contiguous")
    register("paged", "plugins.kv.paged:Paged")
    register("paged_int8", "plugins.kv.paged_int8:PagedInt8")


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
    return refusals
