"""Every seeded bug of `bugs/` is caught by `core.check`, in a package that somebody has installed.

CAUGHT_BY names the clauses that must fail for each; all others that are asked must hold.
"""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest

from core.registry import Registry
from core.testing.fusion import FusionSuite
from core.testing.graphs import GraphSuite
from core.testing.kv import KVManagerSuite
from core.testing.sched import SchedulerSuite

ROOT = Path(__file__).resolve().parents[2]
SUITES = {
    "kv": KVManagerSuite,
    "fusion": FusionSuite,
    "graphs": GraphSuite,
    "sched": SchedulerSuite,
}

PACKAGE = "outweigh-seeded-bugs"

DENSE, CHUNKS = "write_then_read_is_dense_attention", "chunks_do_not_show"
GATHER, TRACES = "gather_returns_what_was_written", "random_traces"
COMPUTE, STORE = "spans_compute_what_the_plain_nodes_do", "spans_store_what_kv_write_would"
FUEL, GREEDY = "any_fuel_computes_the_same", "greedy_tokens_are_those_of_the_plain_chain"
LADDERS, START = "ladders_end_at_the_maximum", "a_shape_with_a_start_is_for_steps_that_start_there"
ENDS = "a_chunk_ends_where_its_tokens_do"
ROWS, POOL = "rows_are_what_a_device_can_compute", "somebody_goes_on_in_every_pool"
BYPASS = "a_head_without_room_is_passed_a_bounded_number_of_times"

CAUGHT_BY = {
    "kv": {
        "SoundPaged": {},
        "Leaks": {"release_gives_everything_back", "sharing_is_as_declared"},
        "HandsOutTwice": {"room_is_nobody_elses", "release_gives_everything_back"},
        "PadsIntoTheLastBlock": {"padding_touches_nothing"},
        "KeepsStaleEntries": {"a_hit_is_verified_after_reuse"},
        "ForgetsWhatCameBefore": {"a_hit_knows_what_came_before"},
        "WritesOneFurther": {DENSE, GATHER},
        "ReadsOneFurther": {DENSE, CHUNKS},
        "KeepsTheOldTable": {"a_slot_that_changes_hands", "room_is_nobody_elses"},
        "DropsDeltas": {"a_long_hit_arrives_whole"},
        "AsksForEver": {"a_long_hit_arrives_whole"},
        "CountsWhatItBegins": {"a_step_that_is_given_up_leaves_nothing_behind"},
        "CachesTheWholePrompt": {"a_token_is_left_to_compute"},
        "CountsNoHolders": {"sharing_is_as_declared"},
        "SharesHalfBlocks": {"a_shared_block_is_never_written"},
        "TakesBeforeItLooks": {"a_full_pool_says_none_and_changes_nothing"},
        "KeepsFailedBlocks": {"rollback_takes_back_what_was_published"},
        "PairsHeadsWrongly": {DENSE},
        "StatesWhatItMisses": {"capacity_is_what_the_bytes_buy"},
        "SoundSinks": {},
        "DeclaresOneTooMany": {DENSE, GATHER, TRACES},
        "DeclaresNothing": {DENSE, GATHER, TRACES},
        "ForgetsWithinAStep": {DENSE, CHUNKS, GATHER, TRACES},
        "WindowOfTheLast": {CHUNKS},
    },
    "fusion": {
        "Sound": {},
        "AddsAfterTheNorm": {COMPUTE, FUEL, GREEDY},
        "SwapsWhatItReturns": {COMPUTE, FUEL, GREEDY},
        "ReturnsWhatIsDead": {"spans_return_what_is_live_after_them", FUEL, GREEDY},
        "ForgetsTheKGain": {STORE, FUEL, GREEDY},
        "PairsNeighbours": {COMPUTE, STORE, FUEL, GREEDY},
        "StoresKWithoutRope": {STORE, FUEL, GREEDY},
        "PadsIntoTheLastBlock": {STORE},
        "IgnoresTheKind": {"unknown_sinks_are_left_alone"},
        "StopsAt64Tokens": {COMPUTE},
        "TakesRowsForPacked": {"strided_values_are_read_right"},
        "ReadsUnfilledMemory": {"unfilled_memory_is_not_read"},
        "ScalesAWeightAndBack": {"weights_are_unchanged"},
        "ClaimsScatteredNodes": {"spans_are_runs_of_the_chain", GREEDY},
        "LeavesTheStaticBuffer": {COMPUTE, GREEDY},
        "SamplesGreedily": {COMPUTE},
    },
    "graphs": {
        "SoundDecode": {},
        "SoundFull": {},
        "SoundPiecewise": {},
        "EndsAtAMultiple": {LADDERS},
        "EndsBelowTheBudget": {LADDERS},
        "ExceedsTheLimits": {"shapes_are_within_the_limits", LADDERS},
        "RepeatsTheLast": {"no_shape_is_there_twice"},
        "CapturesNothing": {"captures_is_as_declared"},
        "SelectsWhatIsNotCaptured": {"select_names_captured_shapes"},
        "RoundsDown": {"the_selected_shape_holds_the_step"},
        "ForgetsTheRows": {"the_selected_shape_holds_the_step"},
        "TakesAChunkForFresh": {START, ENDS},
        "TakesAChunkForALaterOne": {START},
        "PadsAChunk": {"a_shape_behind_a_prefix_is_not_padded_to"},
        "RemembersTheLast": {"select_depends_on_the_step_alone"},
        "SharesItsLadder": {"there_is_no_state_beyond_shapes"},
        "HasALadderOfRowsToo": {"pieces_are_captured_once"},
        "CutsOutWhatIsNoNode": {"what_is_cut_out_is_a_node"},
        "PiecesEndEarly": {LADDERS},
        "CutsByTurns": {"the_cut_is_always_the_same"},
        "HasHalvesOfTokens": {"shapes_are_whole_numbers"},
        "GivesItsShapesOnce": {"shapes_are_whole_numbers"},
        "LeavesRoomBehindAChunk": {ENDS},
    },
    "sched": {
        "SoundFifo": {},
        "SoundShortest": {},
        "SoundAging": {},
        "KeepsAReserve": {},
        "ReadsTheClock": {"keys_stand_still", BYPASS},
        "ForgetsTheArrival": {"nobody_is_passed_by_those_who_come_later_than_declared"},
        "StandsInNoOrder": {"keys_are_a_total_order", BYPASS},
        "DrawsLots": {"the_same_arrivals_give_the_same_steps"},
        "EvictsTheMoreUrgent": {"a_victim_is_never_more_urgent"},
        "AsksForMore": {"chunks_are_within_the_budget"},
        "HoldsOn": {"short_behind_long_is_as_declared"},
        "PromptsFirst": {"decodes_go_on_while_prompts_arrive"},
        "CountsDecodesTwice": {"steps_keep_within_their_limits"},
        "KeepsTheVictimsRow": {ROWS},
        "AdmitsOnTheFirstChunk": {ROWS},
        "GoesOnWhereItWas": {ROWS},
        "NeverOverrules": {POOL},
        "SkipsForEver": {BYPASS},
        "RevivesOldPlaces": {BYPASS},
        "PreemptsInFlight": {"preemption_keeps_the_output", ROWS, POOL},
    },
}
CASES = [
    pytest.param(seam, bug, id=f"{seam}-{bug}") for seam, bugs in CAUGHT_BY.items() for bug in bugs
]
FORGETFUL = (
    "SoundSinks",
    "DeclaresOneTooMany",
    "DeclaresNothing",
    "ForgetsWithinAStep",
    "WindowOfTheLast",
)
AGEING = ("SoundAging", "ForgetsTheArrival", "RevivesOldPlaces")
SETTINGS = {
    **dict.fromkeys(FORGETFUL, ["num_sinks=2", "window=8"]),
    **dict.fromkeys(AGEING, ["rate=500"]),
}
# It takes memory as it comes, and that may hold NaN of its own.
PERHAPS = {"ReadsUnfilledMemory": {FUEL, GREEDY}}


def options(seam, bug, clauses):
    """What `core.check` is asked: of the long suites what must fail, and what is without a fault
    the clauses of all bugs made from it; of the short ones everything."""
    if bug in FORGETFUL:
        clauses = {DENSE, CHUNKS, GATHER, TRACES}
    elif not clauses:
        others = (by for name, by in CAUGHT_BY[seam].items() if name not in FORGETFUL)
        clauses = {clause for by in others for clause in by}
    fields = SETTINGS.get(bug, ["block_size=4"] if seam == "kv" else [])
    given = [word for field in fields for word in ("--set", field)]
    chosen = " or ".join(f"test_{name}" for name in sorted(clauses))
    return *given, *(("-k", chosen) if seam in ("kv", "sched") else ())


def sentence(seam, clause):
    """What a clause says of itself: its docstring, or its name."""
    doc = inspect.getdoc(getattr(SUITES[seam], f"test_{clause}"))
    return " ".join(doc.split()) if doc else clause.replace("_", " ")


@pytest.mark.parametrize(("seam", "bug"), CASES)
def test_the_named_clauses_catch_it_and_no_others(checked, seam, bug):
    """Each with its sentence and what was seen; what a bug is made from passes whole."""
    wanted = set(CAUGHT_BY[seam][bug])
    code, clauses = checked(seam, bug, *options(seam, bug, wanted))
    failed = {name for name, (state, *_) in clauses.items() if state == "failed"}
    assert failed - PERHAPS.get(bug, set()) == wanted
    assert code == (1 if wanted else 0)
    for name in failed:
        _, said, why = clauses[name]
        assert said == sentence(seam, name)
        assert len(why.split()) > 2 and "without words" not in why


def test_every_seeded_bug_is_in_the_table(installed):
    seeded = {
        seam: [name for name, offer in offers.items() if offer.owner.distribution == PACKAGE]
        for seam, offers in Registry().offers.items()
    }
    assert {s: sorted(names) for s, names in seeded.items()} == {
        s: sorted(bugs) for s, bugs in CAUGHT_BY.items()
    }


def test_what_is_expected_stands_in_the_table_with_its_reason(checked):
    _, clauses = checked("kv", "StatesWhatItMisses", "-k", f"{DENSE} or capacity")
    assert clauses[DENSE][::2] == ("expected", "heads are paired wrongly")
    why = clauses["capacity_is_what_the_bytes_buy"][2]
    assert why == "[XPASS(strict)] holds, and so must not be listed here"


@pytest.mark.parametrize(
    ("seam", "bug", "why"),
    [
        ("kv", "PairsHeadsWrongly", "a prompt of 1 tokens: attention is off by "),
        ("fusion", "SwapsWhatItReturns", "span 'add_norm' (attn_add · mlp_norm) of layer 0: "),
        ("graphs", "CapturesNothing", "0 shapes for Limits(max_model_len=200, max_num_seqs=1, "),
        ("sched", "AsksForMore", "49 of 48 tokens for 0, with pool=960 (of 1 requests)"),
    ],
)
def test_from_the_command_line(package, tmp_path, seam, bug, why):
    (clause, *_) = sorted(CAUGHT_BY[seam][bug], reverse=True)
    path = os.pathsep.join(map(str, (package, ROOT)))
    command = [sys.executable, "-m", "core.check", seam, bug, "-k", clause]
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "")
    (row,) = (line for line in done.stdout.splitlines() if f"│ test_{clause}" in line)
    cells = [cell.strip() for cell in row.split("│")[1:-1]]
    assert cells[:3] == [f"test_{clause}", "failed", sentence(seam, clause)]
    assert cells[3].startswith(why)
    assert done.stdout.splitlines()[-1] == f"{seam} {bug}: 1 failed"
