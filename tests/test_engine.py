"""The engine against transformers, token for token, over compositions, chunk sizes and depths."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from core import Engine, SamplingParams
from core.errors import RunError, UserError
from core.metrics import KVUse
from core.seams import Usage
from core.testing.parity import FLOAT32_LOGITS
from core.testing.tiny import reference_generate, reference_logits, save_tiny

KINDS = ("qwen2", "qwen2.5-yarn", "qwen3", "llama")
KV = {
    "contiguous": {"kv": "contiguous"},
    "paged": {"kv": "paged", "enable_prefix_caching": False},
    "paged+prefix": {"kv": "paged", "enable_prefix_caching": True},
}
CHUNKS = (7, 16, 64, None)
NEW_TOKENS = 12


def prompts() -> list[list[int]]:
    """Lengths around blocks and chunks; a shared prefix of 40 tokens, a prompt twice, a prompt of
    one token."""
    rng = np.random.default_rng(5)
    shared = rng.integers(3, 290, 40).tolist()
    alone = [rng.integers(3, 290, n).tolist() for n in (1, 15, 16, 17, 70)]
    return [shared + alone[1], shared + alone[3], *alone, shared + alone[1]]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """kind -> (path, greedy continuations by transformers)."""
    made = {}
    for kind in KINDS:
        path = tmp_path_factory.mktemp("tiny") / kind
        save_tiny(kind, path)
        made[kind] = path, [reference_generate(path, ids, NEW_TOKENS) for ids in prompts()]
    return made


def tiny_engine(path, **options):
    defaults = {"model": str(path), "device": "cpu", "max_model_len": 128, "max_num_seqs": 8}
    return Engine(**{**defaults, **options})


@pytest.mark.parametrize(
    ("kind", "kv", "chunk", "overlap"), list(itertools.product(KINDS, KV, CHUNKS, (False, True)))
)
def test_greedy_tokens_equal_transformers(checkpoints, kind, kv, chunk, overlap):
    path, expected = checkpoints[kind]
    with tiny_engine(path, chunk_size=chunk, overlap=overlap, **KV[kv]) as engine:
        for _ in range(2):  # the second time with whatever the first left in the prefix cache
            outputs = engine.generate(
                prompts(), SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)
            )
            assert [o.token_ids for o in outputs] == expected
        engine._kv.check_integrity()
        assert engine._kv.usage().num_held == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kv", KV)
@pytest.mark.parametrize("chunk", CHUNKS)
def test_logits_within_1e_4_of_transformers(checkpoints, kind, kv, chunk):
    path, _ = checkpoints[kind]
    ids = prompts()[1] + prompts()[-2]
    with tiny_engine(path, chunk_size=chunk, **KV[kv]) as engine:
        pieces = engine.score(ids, lambda first, logits, targets: logits.clone(), rows=50)
    logits = torch.cat(pieces)
    assert (logits - reference_logits(path, ids)).abs().max().item() <= FLOAT32_LOGITS


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("num_blocks", [200, 12, 8])
@pytest.mark.parametrize("sched", ["fifo", "shortest", "aging", "priority"])
@pytest.mark.parametrize("sharing", [False, True])
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_scarcity_changes_no_token(checkpoints, sched, num_blocks, overlap, sharing, preemption):
    """From a pool that holds everything to one block more than the longest request: preempted,
    resumed, equal."""
    path, expected = checkpoints["qwen3"]
    settings = {"kv.num_blocks": num_blocks + 1, "kv.block_size": 16}
    with tiny_engine(
        path,
        settings=settings,
        overlap=overlap,
        enable_prefix_caching=sharing,
        preemption=preemption,
        sched=sched,
    ) as engine:
        outputs = engine.generate(prompts(), SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True))
        assert [o.token_ids for o in outputs] == expected
        engine._kv.check_integrity()
        assert engine._kv.usage().num_held == 0


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_scarcity_really_preempts(checkpoints, preemption):
    path, _ = checkpoints["qwen3"]
    scarce = {"settings": {"kv.num_blocks": 9}, "enable_prefix_caching": False}
    with tiny_engine(path, preemption=preemption, **scarce) as engine:
        outputs = engine.generate([[5] * 31, [6] * 31, [7] * 31], SamplingParams(max_tokens=40))
        counters = engine.counters
        assert counters.num_preemptions > 0
        assert sum(o.metrics.num_preemptions for o in outputs) == counters.num_preemptions
        assert (counters.num_recomputed_tokens > 0) == (preemption == "recompute")
        assert (counters.num_swapped_bytes > 0) == (preemption == "swap")
        prompt_tokens = 3 * 31
        assert counters.num_prefill_tokens > prompt_tokens  # a resumed one comes back as a chunk


def test_a_prompt_in_one_step_where_chunking_is_off(checkpoints):
    path, expected = checkpoints["qwen3"]
    options = {"max_num_batched_tokens": 80, "enable_chunked_prefill": False}
    options["enable_prefix_caching"] = False
    params = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)
    with tiny_engine(path, **options) as engine:
        lens, plan = [], engine._schedule.plan

        def watched():
            made = plan()
            if made is not None:
                lens.extend(made.query_lens[made.num_decodes :].tolist())
            return made

        engine._schedule.plan = watched
        assert [o.token_ids for o in engine.generate(prompts(), params)] == expected
        assert sorted(lens) == sorted(len(p) for p in prompts())
        with pytest.raises(UserError, match="81 tokens.*80.*max-num-batched-tokens"):
            engine.add_request([5] * 81)
    with pytest.raises(UserError, match="chunk_size is 16 and chunked prefill is off"):
        tiny_engine(path, chunk_size=16, enable_chunked_prefill=False)


@pytest.mark.parametrize("max_bypass", [0, 2])
def test_a_head_without_room_is_passed_a_bounded_number_of_times(checkpoints, max_bypass):
    """A long request waits for blocks that a running one holds; short ones would fit at once."""
    path, _ = checkpoints["qwen3"]
    settings = {"kv.num_blocks": 9, "kv.block_size": 16}
    with tiny_engine(path, settings=settings, max_bypass=max_bypass) as engine:
        engine.add_request([5] * 60, SamplingParams(max_tokens=20, ignore_eos=True), "runs")
        engine.step()
        engine.add_request([6] * 100, SamplingParams(max_tokens=1, ignore_eos=True), "long")
        for i in range(5):
            engine.add_request([7 + i] * 5, SamplingParams(max_tokens=9, ignore_eos=True), f"{i}")
        ended = []
        while engine.has_unfinished():
            ended += [event.request_id for event in engine.step() if event.output]
    assert sorted(ended) == sorted(["runs", "long", *"01234"])
    before = [request_id for request_id in ended[: ended.index("long")] if request_id != "runs"]
    assert len(before) == max_bypass


def test_swap_needs_an_offer_that_can_save():
    from plugins.kv.paged import Paged

    class NoSave(Paged):
        save = None

    with pytest.raises(UserError, match="cannot save to the host"):
        Engine(model="random:tiny", device="cpu", kv=NoSave(Paged.Config()), preemption="swap")


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("stop_at", range(NEW_TOKENS))
def test_a_stop_token_ends_at_every_offset(checkpoints, overlap, stop_at):
    """EOS landing on any step, with neighbours that go on and a request that takes over the
    slot."""
    path, expected = checkpoints["qwen3"]
    wanted = expected[0]
    stop = wanted[stop_at]
    first = wanted.index(stop)
    with tiny_engine(path, overlap=overlap, max_num_seqs=2) as engine:
        outputs = engine.generate(
            prompts()[:4],
            [
                SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True, stop_token_ids=(stop,)),
                *[SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)] * 3,
            ],
        )
    assert outputs[0].token_ids == wanted[: first + 1]
    assert outputs[0].finish_reason == "stop"
    assert [o.token_ids for o in outputs[1:]] == expected[1:4]
    assert all(o.finish_reason == "length" for o in outputs[1:])


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("abort_after", range(6))
def test_abort_at_every_step_harms_nobody(checkpoints, overlap, abort_after):
    path, expected = checkpoints["qwen3"]
    params = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)
    with tiny_engine(path, overlap=overlap, max_num_seqs=2, chunk_size=16) as engine:
        for i, prompt in enumerate(prompts()[:4]):
            engine.add_request(prompt, params, str(i))
        done = {}
        for step in range(200):
            if step == abort_after:
                engine.abort("0")
            for event in engine.step():
                if event.output:
                    done[event.request_id] = event.output
            if not engine.has_unfinished():
                break
        assert done["0"].finish_reason == "abort"
        assert done["0"].token_ids == expected[0][: len(done["0"].token_ids)]
        assert [done[str(i)].token_ids for i in (1, 2, 3)] == expected[1:4]
        assert engine._kv.usage().num_held == 0


def test_events_add_up_to_the_outputs(checkpoints):
    path, expected = checkpoints["qwen2"]
    with tiny_engine(path) as engine:
        for i, prompt in enumerate(prompts()):
            engine.add_request(
                prompt, SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True), str(i)
            )
        tokens = {str(i): [] for i in range(len(prompts()))}
        texts = dict.fromkeys(tokens, "")
        outputs = {}
        while engine.has_unfinished():
            for event in engine.step():
                tokens[event.request_id] += event.token_ids
                texts[event.request_id] += event.text
                if event.output:
                    outputs[event.request_id] = event.output
    assert [tokens[str(i)] for i in range(len(prompts()))] == expected
    assert all(texts[i] == outputs[i].text for i in outputs)


def test_sampling_depends_on_seed_and_position_alone(checkpoints):
    """Not on the batch, the chunk, the depth, or a preemption."""
    path, _ = checkpoints["qwen3"]
    params = [SamplingParams(max_tokens=20, temperature=1.0, seed=i) for i in range(7)]

    def run(which, **options):
        with tiny_engine(path, **options) as engine:
            outputs = engine.generate([prompts()[i] for i in which], [params[i] for i in which])
            return {i: o.token_ids for i, o in zip(which, outputs, strict=True)}

    alone = {i: run([i])[i] for i in range(7)}
    assert len({tuple(ids) for ids in alone.values()}) == 7
    assert run(range(7), overlap=True) == alone
    assert run(range(6, -1, -1), chunk_size=7, max_num_seqs=3) == alone
    scarce = {"kv.num_blocks": 9}
    assert run(range(7), settings=scarce, enable_prefix_caching=False) == alone


def test_sampled_frequencies_follow_the_softmax():
    from core.sampler import gumbel_scores
    from core.sampling import sample_keys, seed_state

    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0, -20.0]])
    n = 40_000
    states = np.full(n, seed_state(3), np.uint64)
    keys = torch.from_numpy(sample_keys(states, np.arange(n, dtype=np.int32)))
    for temperature in (0.5, 1.0, 2.0):
        picks = gumbel_scores(logits.expand(n, -1), torch.full((n,), temperature), keys).argmax(-1)
        found = torch.bincount(picks, minlength=5) / n
        wanted = (logits[0] / temperature).softmax(-1)
        sigma = (wanted * (1 - wanted) / n).sqrt()
        assert ((found - wanted).abs() <= 5 * sigma + 1e-4).all(), (found, wanted)


def test_logprobs_are_those_of_the_raw_logits(checkpoints):
    path, _ = checkpoints["qwen3"]
    prompt = prompts()[0]
    with tiny_engine(path) as engine:
        outputs = engine.generate(
            [prompt, prompts()[1]],
            [
                SamplingParams(max_tokens=5, temperature=0.7, seed=1, logprobs=0),
                SamplingParams(max_tokens=5),
            ],
        )
    assert outputs[1].logprobs is None
    ids = outputs[0].token_ids
    logits = reference_logits(path, prompt + ids)[len(prompt) - 1 : -1]
    wanted = logits.log_softmax(-1).gather(-1, torch.tensor(ids)[:, None])[:, 0]
    assert torch.allclose(torch.tensor(outputs[0].logprobs), wanted, atol=1e-4)


def test_two_engines_in_one_process_give_what_each_gives_alone(checkpoints):
    path, expected = checkpoints["qwen3"]
    other_path, other_expected = checkpoints["qwen2"]
    params = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)
    with (
        tiny_engine(path, kv="contiguous", overlap=True) as one,
        tiny_engine(other_path, kv="paged", chunk_size=16) as two,
    ):
        for i, prompt in enumerate(prompts()):
            one.add_request(prompt, params, str(i))
            two.add_request(prompt, params, str(i))
        found = ({}, {})
        while one.has_unfinished() or two.has_unfinished():
            for engine, outputs in zip((one, two), found, strict=True):
                for event in engine.step():
                    if event.output:
                        outputs[int(event.request_id)] = event.output.token_ids
    assert [found[0][i] for i in range(len(expected))] == expected
    assert [found[1][i] for i in range(len(expected))] == other_expected


def test_a_step_makes_no_hook_call(checkpoints, monkeypatch):
    """Every pluggy call goes through HookCaller.__call__ or the manager's exec: count both."""
    import pluggy

    path, _ = checkpoints["qwen3"]
    calls = []
    with tiny_engine(path) as engine:
        engine.add_request(prompts()[0], SamplingParams(max_tokens=8))
        engine.step()
        original = pluggy.HookCaller.__call__
        monkeypatch.setattr(
            pluggy.HookCaller,
            "__call__",
            lambda self, **kw: (calls.append(self.name), original(self, **kw))[1],
        )
        monkeypatch.setattr(
            pluggy.PluginManager, "_hookexec", lambda self, *a: calls.append(a[0]), raising=True
        )
        while engine.has_unfinished():
            engine.step()
    assert calls == []


@pytest.mark.parametrize(
    ("prompt", "params", "words"),
    [
        ([], {}, ["empty"]),
        ("", {}, ["empty"]),
        ([5] * 128, {}, ["128", "max_model_len"]),
        ([5] * 500, {}, ["500", "128"]),
        ([300_000], {}, ["300000", "vocabulary"]),
        ([-1], {}, ["-1", "vocabulary"]),
        ([5] * 100, {"max_tokens": 20}, ["120", "--kv-cache-bytes"]),
    ],
)
def test_a_bad_request_is_refused_and_the_engine_goes_on(checkpoints, prompt, params, words):
    path, expected = checkpoints["qwen3"]
    settings = {"kv.num_blocks": 7}
    with tiny_engine(path, settings=settings) as engine:
        with pytest.raises(UserError) as caught:
            engine.generate([prompts()[3], prompt], SamplingParams(**params))
        assert all(word in str(caught.value) for word in words), str(caught.value)
        assert not engine.has_unfinished()
        params = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)
        assert engine.generate(prompts()[3], params)[0].token_ids == expected[3]


def test_a_failed_step_ends_its_requests_and_no_others(checkpoints, monkeypatch):
    path, expected = checkpoints["qwen3"]
    params = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)
    with tiny_engine(path) as engine:
        attend = engine._kv.attend
        monkeypatch.setattr(engine._kv, "attend", lambda *a: 1 / 0)
        failed = engine.generate(prompts()[0], params)[0]
        assert failed.finish_reason == "error"
        assert "ZeroDivisionError" in failed.error
        monkeypatch.setattr(engine._kv, "attend", attend)
        outputs = engine.generate(prompts(), params)
        assert [o.token_ids for o in outputs] == expected
        engine._kv.check_integrity()


def test_a_decode_advances_while_prompts_arrive(checkpoints):
    """One running decode and a new prompt every step: the decode gets a token every step."""
    path, expected = checkpoints["qwen3"]
    with tiny_engine(path, max_num_seqs=4, max_num_batched_tokens=16) as engine:
        engine.add_request(
            prompts()[3], SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True), "first"
        )
        got = []
        for i in range(NEW_TOKENS + 1):
            got += [len(e.token_ids) for e in engine.step() if e.request_id == "first"]
            engine.add_request([7, 8, 9, 10], SamplingParams(max_tokens=1), f"late{i}")
        assert sum(got) == NEW_TOKENS
        assert all(n == 1 for n in got)


def test_prefix_hits_are_counted_and_capped(checkpoints):
    path, expected = checkpoints["qwen3"]
    params = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)
    prompt = prompts()[2 + 2]  # 16 tokens: one block, of which at most 15 tokens may be reused
    with tiny_engine(path, enable_prefix_caching=True) as engine:
        first = engine.generate(prompts()[0], params)[0]
        again = engine.generate(prompts()[0], params)[0]
        engine.generate(prompt, params)
        whole = engine.generate(prompt, params)[0]
    assert first.metrics.num_cached_tokens == 0
    assert again.metrics.num_cached_tokens == 48  # of 55
    assert whole.metrics.num_cached_tokens == 0
    assert first.token_ids == again.token_ids == expected[0]


def test_length_stops_at_max_model_len(checkpoints):
    path, _ = checkpoints["qwen3"]
    with tiny_engine(path, max_model_len=24) as engine:
        output = engine.generate([5] * 20, SamplingParams(max_tokens=50, ignore_eos=True))[0]
    assert (len(output.token_ids), output.finish_reason) == (4, "length")


@pytest.mark.parametrize("overlap", [False, True])
def test_the_scheduler_observes_every_step(checkpoints, overlap):
    from plugins.sched.fifo import Fifo

    seen = []

    class Watching(Fifo):
        def observe(self, num_tokens, num_seqs, seconds):
            seen.append((num_tokens, num_seqs, seconds))

    path, _ = checkpoints["qwen3"]
    with tiny_engine(path, sched=Watching(), overlap=overlap, chunk_size=16) as engine:
        engine.generate([[5] * 20, [6] * 8], SamplingParams(max_tokens=3, ignore_eos=True))
        assert len(seen) == engine.counters.num_steps
    assert [(tokens, seqs) for tokens, seqs, _ in seen] == [(24, 2), (5, 2), (2, 2), (1, 1)]
    # The last of two that overlap has run when the one before it lands: what is left is host work.
    assert all(seconds > 1e-5 for _, _, seconds in seen), "a step of two layers in no time at all"


def test_priority_and_metadata_reach_the_scheduler(checkpoints):
    path, _ = checkpoints["qwen3"]
    with tiny_engine(path, sched="priority", max_num_seqs=1) as engine:
        for name, priority in (("low", 5), ("mid", 0), ("high", -1)):
            engine.add_request([7] * 5, SamplingParams(max_tokens=2), name, priority=priority)
        request = engine._requests["low"].seq
        assert request.metadata == {"priority": 5}
        ended = []
        while engine.has_unfinished():
            ended += [event.request_id for event in engine.step() if event.output]
    assert ended == ["high", "mid", "low"]


@pytest.mark.parametrize("sched", ["fifo", "shortest"])
def test_a_priority_that_nobody_heeds_is_refused(checkpoints, sched):
    path, _ = checkpoints["qwen3"]
    with tiny_engine(path, sched=sched) as engine:
        with pytest.raises(UserError, match=f"sched '{sched}' heeds no priority"):
            engine.add_request([5], priority=3)
        assert not engine.has_unfinished()


def test_ttft_counts_from_the_scheduled_arrival(checkpoints):
    import time

    path, _ = checkpoints["qwen3"]
    with tiny_engine(path) as engine:
        engine.add_request([5] * 8, SamplingParams(max_tokens=1), arrival=time.perf_counter() - 3)
        (output,) = [event.output for event in engine.step() if event.output]
    moments = output.metrics
    ordered = [moments.arrival_s, moments.enqueued_s, moments.admitted_s, moments.first_scheduled_s]
    ordered += [*moments.token_times_s, moments.ended_s]
    assert ordered == sorted(ordered)
    assert 3000 <= output.metrics.queue_ms <= output.metrics.ttft_ms <= output.metrics.e2e_ms


def test_a_scheduler_that_holds_everybody_back_does_not_stall_the_engine(checkpoints):
    from plugins.sched.fifo import Fifo

    class Stalling(Fifo):
        def chunk(self, seq, budget):
            return 0

    path, expected = checkpoints["qwen3"]
    with tiny_engine(path, sched=Stalling()) as engine:
        for i, prompt in enumerate(prompts()[:3]):
            engine.add_request(prompt, SamplingParams(max_tokens=4, ignore_eos=True), str(i))
        found = {}
        for _ in range(100):
            for event in engine.step():
                if event.output:
                    found[event.request_id] = event.output.token_ids
        assert found == {str(i): expected[i][:4] for i in range(3)}


def test_stubs_inherited_from_a_protocol_count_as_nothing(checkpoints):
    """An author may subclass the Protocol: optional methods that were left out stay left out."""
    from core.seams import Scheduler
    from plugins.sched.fifo import Fifo

    class Inherits(Fifo, Scheduler):
        pass

    path, expected = checkpoints["qwen3"]
    params = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)
    with tiny_engine(path, sched=Inherits(), max_num_seqs=2) as engine:
        assert [o.token_ids for o in engine.generate(prompts(), params)] == expected


def test_the_report_tells_the_use_of_the_cache_over_time(checkpoints):
    """By hand: one prompt of 8 tokens in blocks of 16, then the 5 steps of its output."""
    path, _ = checkpoints["qwen3"]
    settings = {"kv.block_size": 16}
    with tiny_engine(path, settings=settings, enable_prefix_caching=False) as engine:
        assert engine.report()["kv_use"]["over_time"] == []
        engine.generate([5] * 14, SamplingParams(max_tokens=6, ignore_eos=True))
        use = engine.report()["kv_use"]
    looks = use["over_time"]
    assert [look["num_live_tokens"] for look in looks] == [14, 15, 16, 17, 18, 19]
    assert [look["num_held_tokens"] for look in looks] == [16, 16, 16, 32, 32, 32]
    assert all(a["at_s"] < b["at_s"] for a, b in itertools.pairwise(looks))
    assert use["peak_held_tokens"] == 32
    waste = [2 / 16, 1 / 16, 0, 15 / 32, 14 / 32, 13 / 32]
    assert use["fragmentation"] == pytest.approx(sum(waste) / 6)


def test_the_cache_is_looked_at_evenly_however_long_the_run():
    class Cache:
        reserved = np.array([1, 0], np.int32)

        def usage(self):
            return Usage(64, 16 if step == 7 else 8, 0)

    use, num_steps = KVUse(), 5000
    for step in range(num_steps):
        use.look(Cache(), np.array([step, 9], np.int32), float(step))
        assert use.as_dict()["peak_held_tokens"] == (8 if step < 7 else 16)
    steps = [look["at_s"] for look in use.as_dict()["over_time"]]
    gaps = set(np.diff(steps).tolist())
    assert 256 <= len(steps) <= 512 and len(gaps) == 1
    assert steps[0] <= gaps.pop() and steps[-1] >= num_steps * 0.99


def test_a_pool_that_shortens_sequences_is_a_note(checkpoints):
    path, _ = checkpoints["qwen3"]
    with tiny_engine(path) as engine:
        longest = engine.limits.max_model_len
        assert not any("KV cache hold" in note for note in engine.notes)
    with tiny_engine(path, settings={"kv.num_blocks": 4}, max_model_len=None) as engine:
        assert engine.limits.max_model_len == 64 < longest
        (note,) = [note for note in engine.notes if "KV cache hold" in note]
        assert "sequences of 64 tokens and the model 512" in note


def test_a_cache_too_small_for_a_sequence_says_what_to_lower(checkpoints):
    path, _ = checkpoints["qwen3"]
    wanted = r"^4,096 bytes of KV cache hold no sequence of kv 'paged' at max_model_len \d+ \(.*: "
    wanted += "raise --kv-cache-bytes, or lower --max-model-len, --max-num-seqs, --max-num-batched"
    with pytest.raises(UserError, match=wanted):
        tiny_engine(path, settings={}, kv_cache_bytes=4096)


def test_a_machine_without_memory_is_a_sentence(checkpoints):
    path, _ = checkpoints["qwen3"]
    with pytest.raises(RunError, match="cpu ran out of memory .*: lower --kv-cache-bytes"):
        tiny_engine(path, settings={"kv.num_blocks": 10**10})


def test_an_engine_reads_the_weights_of_another(checkpoints, monkeypatch):
    path, expected = checkpoints["qwen2"]
    with tiny_engine(path) as first:
        with monkeypatch.context() as patch:
            twice = lambda *_, **__: pytest.fail("the model is loaded a second time")  # noqa: E731
            patch.setattr("core.compose.load_model", twice)
            second = tiny_engine(path, kv="contiguous", weights_of=first)
        for other in ({"dtype": "bfloat16"}, {"model": "random:tiny"}, {"seed": 7}):
            with pytest.raises(UserError, match="weights_of has another model, dtype"):
                tiny_engine(path, **{**other, "weights_of": first})
    with second:  # which outlives the first
        outputs = second.generate(prompts()[:3], SamplingParams(max_tokens=NEW_TOKENS))
        assert [one.token_ids for one in outputs] == expected[:3]
    with pytest.raises(UserError, match="closed: build a new one"):
        tiny_engine(path, weights_of=first)


def test_a_report_is_a_copy_and_a_closed_engine_has_none(checkpoints):
    path, _ = checkpoints["qwen3"]
    with tiny_engine(path) as engine:
        report = engine.report()
        report["limits"]["max_model_len"] = report["counters"]["num_steps"] = 7
        assert (engine.limits.max_model_len, engine.counters.num_steps) == (128, 0)
    with pytest.raises(UserError, match="this engine is closed"):
        engine.report()
