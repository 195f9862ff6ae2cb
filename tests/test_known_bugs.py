"""Bugs that real engines have had, each by its smallest trigger, with its project and number.

`ELSEWHERE` says which test proves a kind where it is not here. Left out is what this engine cannot
have: prefixes shared between adapters or salts (vLLM #15297), since it has neither.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

from core import Engine, SamplingParams
from core.batch import Sequence
from core.errors import UserError
from core.metrics import RequestMetrics
from core.testing.late import running_late
from core.testing.tiny import reference_generate, save_tiny

BLOCK = 4
ROOT = Path(__file__).parents[1]

ELSEWHERE = {
    "a running decode stands still while prompts arrive (nano-vllm)": (
        "tests/test_engine.py",
        "test_a_decode_advances_while_prompts_arrive",
    ),
    "ladders of graphs end below the largest batch (vLLM #57355)": (
        "tests/plugins/test_graph_ladders.py",
        "test_every_size_finds_a_rung_and_the_last_is_the_limit",
    ),
    "staging is written again before its copy has ended (mini-sglang #103)": (
        "tests/test_overlap.py",
        "test_a_staging_buffer_is_written_again_only_after_its_copy",
    ),
    "two plans in flight share one staging buffer (mini-sglang #89)": (
        "tests/test_overlap.py",
        "test_steps_in_flight_share_no_staging_buffer",
    ),
    "a head without room is passed for ever (vLLM #31731)": (
        "tests/test_engine.py",
        "test_a_head_without_room_is_passed_a_bounded_number_of_times",
    ),
    "padding overwrites a live page (vLLM #43810, #13418)": (
        "core/testing/kv.py",
        "test_padding_touches_nothing",
    ),
    "large key channels spoil a quantised cache (vLLM #41343)": (
        "tests/plugins/test_kv_paged_int8.py",
        "test_smoothing_tames_a_planted_outlier",
    ),
    "scales stay behind when a block moves (FastDeploy #5125)": (
        "core/testing/kv.py",
        "test_what_is_saved_comes_back",
    ),
    "a quantised cache is asked for and not used (InfiniLM #553)": (
        "tests/plugins/test_kv_paged_int8.py",
        "test_storage_is_int8_and_as_large_as_capacity_says",
    ),
    "penalties read a placeholder for the token in flight (vLLM #26467)": (
        "tests/test_sampling.py",
        "test_a_penalised_request_joins_a_running_batch",
    ),
    "penalties forget the output of a preempted request (vLLM #5349)": (
        "tests/test_sampling.py",
        "test_a_preempted_request_keeps_its_output_apart_from_its_prompt",
    ),
}


@pytest.mark.parametrize(("file", "name"), ELSEWHERE.values(), ids=ELSEWHERE)
def test_a_kind_that_is_proven_elsewhere_has_its_test_there(file, name):
    assert f"def {name}(" in (ROOT / file).read_text()


def greedy(max_tokens):
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True)


def tokens(n, seed=0):
    return np.random.default_rng(seed).integers(3, 290, n).tolist()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny") / "qwen3"
    save_tiny("qwen3", path)
    return path


def engine(model, num_blocks=64, **options):
    settings = {"kv.block_size": BLOCK, "kv.num_blocks": num_blocks}
    defaults = {"model": str(model), "device": "cpu", "max_model_len": 256, "max_num_seqs": 8}
    return Engine(settings=settings, **{**defaults, **options})


def run(e, limit=2000):
    """Step until all is done; the ids of finished requests in order, and the outputs."""
    order, outputs = [], {}
    for _ in range(limit):
        if not e.has_unfinished():
            return order, outputs
        for event in e.step():
            if event.output:
                order.append(event.request_id)
                outputs[event.request_id] = event.output
    raise AssertionError(f"{limit} steps and {len(e._schedule._waiting)} requests still wait")


def test_a_request_that_would_outgrow_the_pool_is_refused_at_once(model):
    """nano-vllm: 3 blocks of 4, prompt 8, 20 new tokens: an assertion killed the engine."""
    with engine(model, num_blocks=3) as e:
        with pytest.raises(UserError, match="28 tokens needs 7 blocks of 4 and the cache has 3"):
            e.add_request(tokens(8), greedy(20))
        assert e.generate(tokens(8), greedy(4))[0].finish_reason == "length"


def test_an_impossible_request_does_not_block_the_queue(model):
    """nano-vllm: prompt of 20 in a pool of 8 tokens, ahead of a prompt of 3."""
    with engine(model, num_blocks=2) as e:
        with pytest.raises(UserError, match="21 tokens"):
            e.add_request(tokens(20), greedy(1))
        e.add_request(tokens(3), greedy(1), "small")
        assert run(e)[0] == ["small"]


def test_a_short_prompt_behind_a_long_one(model):
    """vLLM #21495: 160 tokens, a budget of 16, and 3 tokens one step later."""
    with engine(model, max_num_batched_tokens=16, sched="shortest") as e:
        e.add_request(tokens(160), greedy(1), "long")
        e.step()
        e.add_request(tokens(3), greedy(1), "short")
        for _ in range(2):
            ended = [event.request_id for event in e.step() if event.output]
            if ended:
                break
        assert ended == ["short"]
        assert run(e)[0] == ["long"]


def test_max_model_len_ends_a_request(model):
    """vLLM #8068, nano-vllm: tables written beyond their width."""
    with engine(model, max_model_len=16) as e:
        output = e.generate(tokens(8), greedy(40))[0]
        assert (len(output.token_ids), output.finish_reason) == (8, "length")


@pytest.mark.parametrize("overlap", [False, True])
def test_identical_prompts_in_one_batch(model, overlap):
    """mini-sglang #142: the second one's pages were freed under it; a third one took them."""
    prompt, other = tokens(16), tokens(16, seed=1)
    wanted = reference_generate(model, prompt, 8)
    with engine(model, num_blocks=20, overlap=overlap, max_num_seqs=3) as e:
        e.add_request(prompt, greedy(2), "a")
        e.add_request(prompt, greedy(8), "b")
        e.add_request(other, greedy(8), "c")
        e.add_request(prompt, greedy(8), "d")
        _, outputs = run(e)
        assert outputs["a"].token_ids == wanted[:2]
        assert outputs["b"].token_ids == outputs["d"].token_ids == wanted
        assert outputs["c"].token_ids == reference_generate(model, other, 8)
        assert outputs["d"].metrics.num_cached_tokens == 12  # of 16: at least one is computed
        e._kv.check_integrity()


@pytest.mark.parametrize("device", [nullcontext, running_late], ids=["cpu", "late"])
@pytest.mark.parametrize("num_tokens", range(1, 7))
def test_pages_that_the_step_in_flight_still_uses(model, device, num_tokens):
    """mini-sglang #89: a request ends while the step behind it is in flight, and the next one takes
    its pages. Here they are all that there is."""
    prompts = [tokens(6, seed=i) for i in range(3)]
    wanted = [reference_generate(model, prompt, 6) for prompt in prompts]
    stop = wanted[0][num_tokens - 1]
    stops = SamplingParams(max_tokens=6, ignore_eos=True, stop_token_ids=(stop,))
    options = {"num_blocks": 3, "overlap": True, "enable_prefix_caching": False}
    with device(), engine(model, **options) as e:
        outputs = e.generate(prompts, [stops, greedy(6), greedy(6)])
        assert outputs[0].token_ids == wanted[0][: wanted[0].index(stop) + 1]
        assert [output.token_ids for output in outputs[1:]] == wanted[1:]
        e._kv.check_integrity()


def test_a_prompt_that_returns_after_its_blocks_were_reused(model):
    """nano-vllm #163: a stale hash led to a page with other tokens."""
    first, second = tokens(24), tokens(24, seed=1)
    with engine(model, num_blocks=8) as e:
        for prompt in (first, second, first, second):
            assert e.generate(prompt, greedy(6))[0].token_ids == reference_generate(
                model, prompt, 6
            )
            e._kv.check_integrity()


def test_a_hit_on_an_evictable_block_is_charged(model):
    """ROCm/ATOM #902: a hit in the free list was not counted, and blocks ran out mid-allocation."""
    prompt = tokens(16)
    with engine(model, num_blocks=10, max_num_seqs=4) as e:
        e.generate(prompt, greedy(1))
        e.add_request(prompt, greedy(8), "hit")
        e.add_request(tokens(16, seed=1), greedy(8), "other")
        _, outputs = run(e)
        assert outputs["hit"].token_ids == reference_generate(model, prompt, 8)
        e._kv.check_integrity()
        assert e._kv.usage().num_held == 0


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("overlap", [False, True])
def test_preempted_and_resumed_again_and_again(model, preemption, overlap):
    """vLLM #16832, #5349: tokens lost or repeated, blocks leaked."""
    prompts = [tokens(8, seed=i) for i in range(4)]
    with engine(model, num_blocks=13, overlap=overlap, preemption=preemption) as e:
        outputs = e.generate(prompts, greedy(36))
        assert e.counters.num_preemptions >= 3
        for prompt, output in zip(prompts, outputs, strict=True):
            assert output.token_ids == reference_generate(model, prompt, 36)
        e._kv.check_integrity()
        assert e._kv.usage().num_held == 0


def test_a_victim_is_not_in_the_step_that_preempts_it(model):
    """vLLM #23347, #28558: the step still counted a sequence that had given way."""
    with engine(model, num_blocks=13) as e:
        plan = e._schedule.plan

        def watched():
            made = plan()
            if made is not None:
                owners = [e._slots.owner[slot] for slot in made.slots.tolist()]
                assert None not in owners
                assert len(set(owners)) == len(owners) <= e._schedule.num_running + len(owners)
                held = [e._kv.reserved[s] for s in made.slots.tolist()]
                ends = (made.starts + made.query_lens).tolist()
                assert all(room >= end for room, end in zip(held, ends, strict=True))
            return made

        e._schedule.plan = watched
        e.generate([tokens(8, seed=i) for i in range(4)], greedy(36))
        assert e.counters.num_preemptions


def test_a_resumed_sequence_does_not_thrash(model):
    """vLLM #25538: admitted on its first chunk, preempted in its own prefill, over and over."""
    with engine(model, num_blocks=13, max_num_batched_tokens=8, enable_prefix_caching=False) as e:
        outputs = e.generate([tokens(20, seed=i) for i in range(3)], greedy(12))
        assert all(len(o.token_ids) == 12 for o in outputs)
        assert e.counters.num_recomputed_tokens <= 3 * 32


def test_something_starts_whenever_nothing_runs(model):
    """vLLM #45388: running 0, waiting more than 0, for ever."""
    with engine(model, num_blocks=9, max_num_seqs=4, overlap=True) as e:
        for i in range(12):
            e.add_request(tokens(5 + 2 * i, seed=i), greedy(3), str(i))
        idle = 0
        while e.has_unfinished():
            before = e.counters.num_steps
            ended = [event for event in e.step() if event.output]
            idle = 0 if ended or e.counters.num_steps > before or e._in_flight else idle + 1
            assert idle < 2


def test_the_same_prompt_twice_with_the_prefix_cache(model):
    """vLLM #40896: run 1 differed from run 2."""
    prompt = tokens(50)
    with engine(model) as e:
        first, second = (e.generate(prompt, greedy(12))[0] for _ in range(2))
        assert second.metrics.num_cached_tokens == 48
        assert first.token_ids == second.token_ids == reference_generate(model, prompt, 12)


def test_blocks_with_equal_tokens_behind_different_prefixes_are_not_shared(model):
    """vLLM #12621: a hash that did not know what came before, or collided."""
    same = tokens(8, seed=9)
    prompts = [tokens(8, seed=1) + same + [5], tokens(8, seed=2) + same + [5]]
    with engine(model) as e:
        for prompt in prompts:
            output = e.generate(prompt, greedy(6))[0]
            assert output.metrics.num_cached_tokens == 0
            assert output.token_ids == reference_generate(model, prompt, 6)


def test_ttft_is_no_inter_token_latency():
    """vLLM #7242: by hand, with a gap of 5 s that a preemption left, and with an empty response."""

    def metrics(*token_times, ended, **moments):
        seq = Sequence("a", np.zeros(8, np.int32), 4, greedy(4), 10.0, 0, 8, **moments)
        seq.num_known = 4 + len(token_times)
        seq.token_times = np.array([0, 0, 0, 0, *token_times], float)
        return RequestMetrics.of(seq, ended)

    seen = metrics(12, 13, 18, ended=18.5, admitted=10.5, first_scheduled=11.0)
    assert (seen.queue_ms, seen.prefill_ms, seen.ttft_ms, seen.e2e_ms) == (1000, 1000, 2000, 8500)
    assert (seen.itl_ms, seen.tpot_ms) == ((1000, 5000), 3000)
    assert seen.as_dict()["tpot_ms"] == 3000 and seen.as_dict()["admitted_s"] == 10.5
    empty = metrics(ended=11.0)
    assert empty.e2e_ms == 1000 and empty.itl_ms == ()
    waits = empty.queue_ms, empty.prefill_ms, empty.ttft_ms, empty.tpot_ms
    assert waits == (None, None, None, None)
