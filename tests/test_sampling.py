"""Sampling parameters: each has its effect, the effect is transformers', nothing else moves it."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import io
import pickle

import numpy as np
import pytest
import torch

from core import Engine, SamplingParams
from core.errors import UserError
from core.sampler import filtered, gumbel_scores, penalised, token_logprobs
from core.sampling import Needs, sample_keys, seed_state
from core.testing.tiny import VOCAB_SIZE, reference_logits, save_tiny, save_tokenizer

FIELDS = [field.name for field in dataclasses.fields(SamplingParams)]
NEW_TOKENS = 16
DEPTHS = [False, True]


def prompts():
    rng = np.random.default_rng(5)
    return [rng.integers(3, 290, n).tolist() for n in (5, 9, 16, 17, 30, 40)]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny") / "qwen3"
    save_tiny("qwen3", path)
    save_tokenizer(path)
    return path


def tiny_engine(path, **options):
    defaults = {"model": str(path), "device": "cpu", "max_model_len": 128, "max_num_seqs": 8}
    return Engine(**{**defaults, **options})


def params_of(**given):
    return SamplingParams(**{"max_tokens": NEW_TOKENS, "ignore_eos": True, **given})


def generate(path, which, params, **options):
    with tiny_engine(path, **options) as engine:
        outputs = engine.generate([prompts()[i] for i in which], params)
        engine._kv.check_integrity()
        assert engine._kv.usage().num_held == 0
        return outputs


def tokens(outputs):
    return [output.token_ids for output in outputs]


@pytest.fixture(scope="module")
def greedy(path):
    return generate(path, range(6), params_of())


# -------- every field changes the outcome, in the way it says


def case_max_tokens(run, greedy):
    for n in (1, 7):
        (output,) = run(max_tokens=n)
        assert (output.token_ids, output.finish_reason) == (greedy.token_ids[:n], "length")


def case_min_tokens(run, greedy):
    stop = greedy.token_ids[2]
    assert len(run(stop_token_ids=[stop])[0].token_ids) == 3
    (output,) = run(stop_token_ids=[stop], min_tokens=6)
    assert stop not in output.token_ids[:6]
    assert len(output.token_ids) >= 7


def case_temperature(run, greedy):
    assert run(temperature=1.0, seed=1)[0].token_ids != greedy.token_ids
    assert run(temperature=1e-6, seed=1)[0].token_ids == greedy.token_ids


def case_top_k(run, greedy):
    free = run(temperature=3.0, seed=1)[0].token_ids
    assert run(temperature=3.0, seed=1, top_k=1)[0].token_ids == greedy.token_ids != free
    assert run(temperature=3.0, seed=1, top_k=-1)[0].token_ids == free
    assert run(temperature=3.0, seed=1, top_k=10**9)[0].token_ids == free
    assert run(temperature=3.0, seed=1, top_k=3)[0].token_ids not in (free, greedy.token_ids)


def case_top_p(run, greedy):
    free = run(temperature=3.0, seed=1)[0].token_ids
    assert run(temperature=3.0, seed=1, top_p=1e-6)[0].token_ids == greedy.token_ids
    assert run(temperature=3.0, seed=1, top_p=0.5)[0].token_ids not in (free, greedy.token_ids)


def case_min_p(run, greedy):
    free = run(temperature=3.0, seed=1)[0].token_ids
    assert run(temperature=3.0, seed=1, min_p=1.0)[0].token_ids == greedy.token_ids
    assert run(temperature=3.0, seed=1, min_p=0.4)[0].token_ids not in (free, greedy.token_ids)


def case_repetition_penalty(run, greedy):
    (output,) = run(repetition_penalty=1e6)
    assert len(set(output.token_ids)) == NEW_TOKENS, "no token comes again"
    assert set(output.token_ids).isdisjoint(output.prompt_token_ids)
    assert len(set(greedy.token_ids)) < NEW_TOKENS


def case_presence_penalty(run, greedy):
    (less,) = run(presence_penalty=2.0)
    (more,) = run(presence_penalty=-2.0)
    assert len(set(less.token_ids)) > len(set(greedy.token_ids)) > len(set(more.token_ids))


def case_frequency_penalty(run, greedy):
    (less,) = run(frequency_penalty=2.0)
    (more,) = run(frequency_penalty=-2.0)
    assert len(set(less.token_ids)) > len(set(greedy.token_ids)) > len(set(more.token_ids))
    assert run(frequency_penalty=0.3)[0].token_ids != run(presence_penalty=0.3)[0].token_ids


def case_seed(run, greedy):
    one, again, other, large = (
        run(temperature=1.0, seed=seed)[0].token_ids for seed in (1, 1, 2, 1 + (1 << 40))
    )
    assert one == again
    assert len({tuple(one), tuple(other), tuple(large)}) == 3


def case_stop(run, greedy):
    cut = greedy.text.index("the")
    for stop in ("the", ["no such text", "the"]):
        (output,) = run(stop=stop)
        assert (output.text, output.finish_reason) == (greedy.text[:cut], "stop")


def case_include_stop_str_in_output(run, greedy):
    cut = greedy.text.index("the")
    (output,) = run(stop="the", include_stop_str_in_output=True)
    assert output.text == greedy.text[: cut + 3]
    at = greedy.token_ids.index(91)  # "z"
    for included, text in ((False, ""), (True, "z")):
        (output,) = run(stop_token_ids=[91], include_stop_str_in_output=included)
        assert output.token_ids == greedy.token_ids[: at + 1]
        assert output.text.endswith("the" + text)


def case_stop_token_ids(run, greedy):
    for at in (0, 3):
        (output,) = run(stop_token_ids=[299, greedy.token_ids[at]])
        assert (output.token_ids, output.finish_reason) == (greedy.token_ids[: at + 1], "stop")


def case_ignore_eos(run, greedy):
    eos = greedy.token_ids[3]
    (output,) = run(eos=eos, ignore_eos=False)
    assert (output.token_ids, output.finish_reason) == (greedy.token_ids[:4], "stop")
    assert run(eos=eos, ignore_eos=True)[0].token_ids == greedy.token_ids


def case_logprobs(run, greedy):
    assert greedy.logprobs is None and greedy.top_logprobs is None
    for n in (0, 3, 20):
        (output,) = run(logprobs=n)
        assert output.token_ids == greedy.token_ids
        assert len(output.logprobs) == len(output.top_logprobs) == NEW_TOKENS
        assert all(len(top) == n for top in output.top_logprobs)


def case_prompt_logprobs(run, greedy):
    assert greedy.prompt_logprobs is None and greedy.prompt_top_logprobs is None
    (output,) = run(prompt_logprobs=2)
    assert output.token_ids == greedy.token_ids
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    assert output.prompt_logprobs[0] is None and output.prompt_top_logprobs[0] is None
    assert all(len(top) == 2 for top in output.prompt_top_logprobs[1:])


@pytest.mark.parametrize("field", FIELDS)
def test_every_field_changes_the_outcome(path, greedy, field, monkeypatch):
    with tiny_engine(path) as engine:
        facts = engine.facts

        def run(eos=None, **given):
            eos_ids = () if eos is None else (eos,)
            monkeypatch.setattr(engine, "facts", dataclasses.replace(facts, eos_token_ids=eos_ids))
            return engine.generate(prompts()[0], params_of(**given))

        globals()[f"case_{field}"](run, greedy[0])


# -------- what is refused


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"max_tokens": 0}, ["max_tokens is 0", "from 1 up"]),
        ({"max_tokens": 2.5}, ["max_tokens is 2.5", "whole number"]),
        ({"max_tokens": True}, ["max_tokens is True"]),
        ({"max_tokens": None}, ["max_tokens is None"]),
        ({"min_tokens": -1}, ["min_tokens is -1", "from 0 up"]),
        ({"min_tokens": 5, "max_tokens": 4}, ["min_tokens is 5", "max_tokens is 4"]),
        ({"temperature": -0.1}, ["temperature is -0.1", "from 0 up"]),
        ({"temperature": float("nan")}, ["temperature is nan"]),
        ({"temperature": float("inf")}, ["temperature is inf"]),
        ({"temperature": "hot"}, ["temperature is 'hot'", "a number"]),
        ({"top_k": -2}, ["top_k is -2", "from -1 up"]),
        ({"top_p": 0}, ["top_p is 0", "to 1"]),
        ({"top_p": 1.1}, ["top_p is 1.1", "to 1"]),
        ({"min_p": -0.5}, ["min_p is -0.5", "from 0 to 1"]),
        ({"repetition_penalty": 0.0}, ["repetition_penalty is 0.0"]),
        ({"presence_penalty": 3}, ["presence_penalty is 3", "from -2 to 2"]),
        ({"frequency_penalty": -2.5}, ["frequency_penalty is -2.5", "from -2 to 2"]),
        ({"seed": "x"}, ["seed is 'x'"]),
        ({"stop": ["a", ""]}, ["stop is ('a', '')", "not empty"]),
        ({"stop": 5.5}, ["stop is (5.5,)"]),
        ({"stop": [5]}, ["stop is (5,)"]),
        ({"stop_token_ids": ["x"]}, ["stop_token_ids is ('x',)"]),
        ({"stop_token_ids": [-1]}, ["stop_token_ids is (-1,)"]),
        ({"ignore_eos": 1}, ["ignore_eos is 1", "true or false"]),
        ({"logprobs": 21}, ["logprobs is 21", "from 0 to 20"]),
        ({"prompt_logprobs": -1}, ["prompt_logprobs is -1", "from 0 to 20"]),
        ({"temperature": (1,)}, ["temperature is (1,)", "a number"]),
        ({"seed": ()}, ["seed is ()"]),
        ({"stop": 5j}, ["stop is 5j", "several"]),
        ({"topk": 3}, ["no sampling parameter 'topk'", "did you mean top_k"]),
        ({"zzz": 3}, ["no sampling parameter 'zzz'", "max_tokens", "prompt_logprobs"]),
        *(
            ({name: None}, ["vLLM's", f"'{name}'", "not offered"])
            for name in ("n", "best_of", "logit_bias", "bad_words", "structured_outputs")
        ),
        *(
            ({name: None}, ["vLLM's", f"'{name}'", "not offered"])
            for name in ("guided_decoding", "allowed_token_ids", "logits_processors", "detokenize")
        ),
    ],
)
def test_a_bad_value_is_refused_in_one_sentence(given, words):
    with pytest.raises(UserError) as caught:
        SamplingParams(**given)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_subclass_may_keep_what_is_its_own():
    class Mine(SamplingParams):
        def __post_init__(self):
            object.__setattr__(self, "mine", 3)
            super().__post_init__()

    assert Mine(max_tokens=5).mine == 3 and Mine(max_tokens=5).needs == 0
    with pytest.raises(UserError, match="max_tokens is 0"):
        Mine(max_tokens=0)


def test_several_may_be_an_array():
    params = SamplingParams(stop_token_ids=np.array([3, 5]), max_tokens=np.int8(7))
    assert params == SamplingParams(stop_token_ids=(3, 5), max_tokens=7)
    assert type(params.max_tokens) is int


def test_params_are_values():
    params = SamplingParams(stop=["a"], stop_token_ids=range(3), seed=np.int64(-7))
    assert params == SamplingParams(stop="a", stop_token_ids=(0, 1, 2), seed=-7)
    assert params == copy.copy(params) == pickle.loads(pickle.dumps(params))
    assert dataclasses.replace(params, top_k=5).top_k == 5
    assert seed_state(np.int64(-7)) == seed_state(-7)
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.top_k = 3
    with pytest.raises(TypeError):
        SamplingParams(*range(40))


def test_stop_strings_need_text(tmp_path):
    save_tiny("qwen3", tmp_path)
    with tiny_engine(tmp_path) as engine:
        with pytest.raises(UserError, match="no tokenizer.*stop_token_ids"):
            engine.add_request([5, 6], SamplingParams(stop="x"))
        assert not engine.has_unfinished()


# -------- the same as transformers


def random_logits(num_rows, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return 4 * torch.randn(num_rows, VOCAB_SIZE, generator=generator)


FILTERS = [
    {"top_k": 1}, {"top_k": 7}, {"top_k": 300}, {"top_k": 5000}, {"top_k": -1},
    {"top_p": 0.1}, {"top_p": 0.9}, {"top_p": 0.999}, {"min_p": 0.02}, {"min_p": 0.5}, {"min_p": 1},
    {"top_k": 20, "top_p": 0.8}, {"top_k": 40, "top_p": 0.95, "min_p": 0.05}, {},
]  # fmt: skip


def filters_of(params):
    return torch.tensor([[params.top_k, params.top_p, params.min_p]], dtype=torch.float32)


def filtered_by_transformers(logits, params):
    """vLLM's order: temperature, min-p, top-k, top-p."""
    from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    scores = logits / params.temperature
    if params.min_p:
        scores = MinPLogitsWarper(min_p=float(params.min_p))(None, scores)
    if params.top_k > 0:
        scores = TopKLogitsWarper(top_k=params.top_k)(None, scores)
    if params.top_p < 1:
        scores = TopPLogitsWarper(top_p=params.top_p)(None, scores)
    return logits.masked_fill(scores == float("-inf"), float("-inf"))


@pytest.mark.parametrize("temperature", [0.6, 1.0, 2.5])
@pytest.mark.parametrize("given", FILTERS, ids=str)
def test_filters_keep_what_transformers_keeps(given, temperature):
    params = SamplingParams(temperature=temperature, **given)
    logits = random_logits(50)
    heat = torch.full((50,), temperature)
    found = filtered(logits, heat, filters_of(params).expand(50, -1))
    assert torch.equal(found, filtered_by_transformers(logits, params))


def test_rows_with_different_filters_do_not_meet():
    all_params = [SamplingParams(temperature=1.3, **given) for given in FILTERS]
    logits = random_logits(len(all_params), seed=1)
    heat = torch.full((len(all_params),), 1.3)
    together = filtered(logits, heat, torch.cat([filters_of(params) for params in all_params]))
    for row, params in enumerate(all_params):
        alone = filtered(logits[row : row + 1], heat[:1], filters_of(params))
        assert torch.equal(together[row : row + 1], alone), params


@pytest.mark.parametrize("given", FILTERS, ids=str)
def test_equal_logits_stay_or_go_together(given):
    """bf16 logits are full of ties; what stays must not hang on how a sort breaks them."""
    logits = random_logits(20).bfloat16().float()
    params = SamplingParams(temperature=1.0, **given)
    order = torch.randperm(VOCAB_SIZE, generator=torch.Generator().manual_seed(2))
    filters = filters_of(params).expand(20, -1)
    found = filtered(logits, torch.ones(20), filters)
    assert torch.equal(filtered(logits[:, order], torch.ones(20), filters), found[:, order])
    for row, values in zip(found, logits, strict=True):
        kept = row > float("-inf")
        assert kept.any() and set(values[kept].tolist()).isdisjoint(values[~kept].tolist())


def history_of(prompt, output, stops=()):
    history = np.zeros(VOCAB_SIZE, np.int32)
    np.add.at(history, output, 4)
    history[prompt] |= 1
    history[list(stops)] |= 2
    return torch.from_numpy(history)[None]


@pytest.mark.parametrize("penalty", [0.5, 1.0, 1.2, 3.0])
def test_the_repetition_penalty_is_that_of_transformers(penalty):
    from transformers import RepetitionPenaltyLogitsProcessor

    rng = np.random.default_rng(0)
    logits = random_logits(1)
    prompt, output = rng.integers(0, VOCAB_SIZE, 30), rng.integers(0, VOCAB_SIZE, 20)
    ids = torch.from_numpy(np.concatenate((prompt, output)))[None]
    wanted = RepetitionPenaltyLogitsProcessor(penalty)(ids, logits.clone())
    found = penalised(logits, history_of(prompt, output), torch.tensor([[penalty, 0.0, 0.0, 0.0]]))
    assert torch.equal(found, wanted)


def test_presence_and_frequency_penalty_count_the_output_alone():
    logits = random_logits(1)
    penalties = torch.tensor([[1.0, 0.5, 0.25, 0.0]])
    found = penalised(logits, history_of([1, 2, 3], [3, 7, 7, 7]), penalties)
    wanted = logits.clone()
    wanted[0, 3] -= 0.5 + 0.25
    wanted[0, 7] -= 0.5 + 3 * 0.25
    assert torch.equal(found, wanted)


def test_stops_are_held_off_only_where_the_row_says_so():
    logits = random_logits(2)
    history = history_of([1, 2], [2, 5], stops=[2, 9]).expand(2, -1)
    found = penalised(logits, history, torch.tensor([[1.0, 0, 0, 1], [1, 0, 0, 0]]))
    assert (found[0] == float("-inf")).nonzero()[:, 0].tolist() == [2, 9]
    assert torch.equal(found[1], logits[1])


def test_neutral_rows_are_untouched_bit_for_bit():
    logits = random_logits(3).bfloat16().float()
    logits[:, :5] = -500.0  # a probability of 0 in float32
    history = history_of([1, 2, 3], [4, 4, 5], stops=[6]).expand(3, -1)
    penalties = torch.tensor([[1.0, 0, 0, 0], [1.7, 1, 1, 1], [1, 0, 0, 0]])
    found = penalised(logits, history, penalties)
    assert torch.equal(found[::2], logits[::2]) and not torch.equal(found[1], logits[1])
    filters = torch.tensor([[0, 1.0, 0], [3, 0.5, 0.1], [-1, 1, 0]])
    found = filtered(logits, torch.tensor([0.3, 1.0, 0.0]), filters)
    assert torch.equal(found[::2], logits[::2]) and not torch.equal(found[1], logits[1])


def test_filtering_does_not_change_the_noise_of_a_token():
    logits, heat = random_logits(200), torch.full((200,), 1.5)
    keys = sample_keys(np.full(200, seed_state(1), np.uint64), np.arange(200, dtype=np.int32))
    keys = torch.from_numpy(keys)
    kept = filtered(logits, heat, torch.tensor([[0, 0.7, 0.0]]).expand(200, -1))
    scores, fewer = gumbel_scores(logits, heat, keys), gumbel_scores(kept, heat, keys)
    stays = kept > float("-inf")
    assert torch.equal(scores[stays], fewer[stays])
    assert (fewer[~stays] == float("-inf")).all()
    picks, free = fewer.argmax(-1), scores.argmax(-1)
    still = stays[torch.arange(200), free]
    assert 20 < int((~still).sum()) and torch.equal(picks[still], free[still])


def expected_tokens(path, output, params):
    """What transformers' logits and processors choose after every prefix of an output."""
    from transformers import RepetitionPenaltyLogitsProcessor

    prompt, ids = output.prompt_token_ids, output.token_ids
    logits = reference_logits(path, prompt + ids)[len(prompt) - 1 : -1]
    chosen = []
    for i, row in enumerate(logits[:, None]):
        past = torch.tensor([prompt + ids[:i]])
        row = RepetitionPenaltyLogitsProcessor(float(params.repetition_penalty))(past, row.clone())
        counts = torch.bincount(torch.tensor(ids[:i], dtype=torch.int64), minlength=VOCAB_SIZE)
        row = row - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)
        if i < params.min_tokens:
            row[0, list(params.stop_token_ids)] = float("-inf")
        if params.temperature:
            row = filtered_by_transformers(row, params)
            state = np.array([seed_state(params.seed)], np.uint64)
            keys = sample_keys(state, np.array([len(prompt) + i], np.int32))
            row = gumbel_scores(row, torch.tensor([params.temperature]), torch.from_numpy(keys))
        chosen.append(int(row.argmax()))
    return chosen


MIXED = [
    params_of(),
    params_of(repetition_penalty=1.3),
    params_of(temperature=1.0, seed=3),
    params_of(presence_penalty=1.5, frequency_penalty=-0.5, min_tokens=8, stop_token_ids=(59, 260)),
    params_of(temperature=1.7, seed=4, top_k=30, top_p=0.9, min_p=0.02),
    params_of(temperature=0.8, seed=5, top_p=0.7, frequency_penalty=1.0, repetition_penalty=1.1),
]  # every variant of the sampler, and neighbours that ask for something else


@pytest.fixture(scope="module")
def mixed_alone(path):
    """Each request of MIXED in an engine of its own."""
    outputs = [generate(path, [i], params)[0] for i, params in enumerate(MIXED)]
    for output, params in zip(outputs, MIXED, strict=True):
        assert output.token_ids == expected_tokens(path, output, params), params
    return outputs


@pytest.mark.parametrize("overlap", DEPTHS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"chunk_size": 7, "max_num_seqs": 3},
        {"chunk_size": 3},
        {"kv": "contiguous", "max_num_batched_tokens": 16},
        {"settings": {"kv.num_blocks": 6}, "enable_prefix_caching": False},
        {"settings": {"kv.num_blocks": 6}, "preemption": "swap"},
    ],
    ids=str,
)
def test_a_mixed_batch_gives_what_each_request_gives_alone(path, mixed_alone, options, overlap):
    """B14 and B25: neighbours, chunks, depth, preemption and slots that change hands."""
    with tiny_engine(path, overlap=overlap, **options) as engine:
        for _ in range(2):  # the second time over slots with a history
            outputs = engine.generate(prompts(), MIXED)
            assert tokens(outputs) == tokens(mixed_alone)
            outputs = engine.generate(prompts()[::-1], MIXED[::-1])
            assert tokens(outputs) == tokens(mixed_alone)[::-1]
        if "settings" in options:
            assert engine.counters.num_preemptions > 0


@pytest.mark.gpu
@pytest.mark.parametrize("overlap", DEPTHS)
@pytest.mark.parametrize("graphs", ["none", "full"])
@pytest.mark.parametrize("fusion", ["none", "triton"])
def test_a_gpu_gives_what_a_cpu_gives(path, mixed_alone, fusion, graphs, overlap):
    """In float32, so that rounding does not decide; eager samplers behind captured models too."""
    options = {"device": "cuda", "dtype": "float32", "kv_cache_bytes": 1 << 26}
    params = [dataclasses.replace(p, logprobs=3, prompt_logprobs=3) for p in MIXED]
    on_cpu = generate(path, range(len(params)), params)
    with tiny_engine(path, fusion=fusion, graphs=graphs, overlap=overlap, **options) as engine:
        for asked in (MIXED, params):
            outputs = engine.generate(prompts(), asked)
            assert tokens(outputs) == tokens(mixed_alone)
        if graphs == "full":
            assert 0 < engine.counters.num_eager_samplers < 2 * engine.counters.num_steps
    for one, other in zip(outputs, on_cpu, strict=True):
        assert np.allclose(one.logprobs, other.logprobs, atol=1e-4)
        assert np.allclose(one.prompt_logprobs[1:], other.prompt_logprobs[1:], atol=1e-4)


@pytest.mark.parametrize("overlap", DEPTHS)
@pytest.mark.parametrize("late", [0, 1, 2, 5])
def test_a_penalised_request_joins_a_running_batch(path, mixed_alone, late, overlap):
    """B25: penalties read the token before, which is still on the device, and nobody else's."""
    with tiny_engine(path, overlap=overlap) as engine:
        for i in (0, 2):
            engine.add_request(prompts()[i], MIXED[i], str(i))
        found = {}
        while engine.has_unfinished():
            late -= 1
            if late == -1:
                for i in (1, 3, 5):
                    engine.add_request(prompts()[i], MIXED[i], str(i))
            for event in engine.step():
                if event.output:
                    found[int(event.request_id)] = event.output.token_ids
    assert found == {i: mixed_alone[i].token_ids for i in (0, 1, 2, 3, 5)}


@pytest.mark.parametrize("overlap", DEPTHS)
def test_a_preempted_request_keeps_its_output_apart_from_its_prompt(path, overlap):
    """B14: presence and frequency look at the output, of which a resumed prefill is full."""
    params = [params_of(max_tokens=40, presence_penalty=2.0, frequency_penalty=0.3)] * 3
    wanted = generate(path, range(3), params)
    settings = {"kv.num_blocks": 7, "kv.block_size": 8}
    with tiny_engine(path, settings=settings, overlap=overlap) as engine:
        outputs = engine.generate(prompts()[:3], params)
        assert engine.counters.num_preemptions > 1
    assert tokens(outputs) == tokens(wanted)
    assert wanted[0].token_ids == expected_tokens(path, wanted[0], params[0])


def test_nobody_pays_for_what_no_row_asks_for(path, monkeypatch):
    from core import sampler

    calls = []
    for name in ("filtered", "penalised"):
        real = getattr(sampler, name)

        def counted(*arguments, name=name, real=real):
            calls.append(name)
            return real(*arguments)

        monkeypatch.setattr(sampler, name, counted)
    with tiny_engine(path) as engine:
        engine.generate(prompts()[:2], params_of(top_k=3, top_p=0.5, min_p=0.1))
        engine.generate(prompts()[:2], params_of(temperature=1.0, seed=1))
        assert calls == [] and engine._executor.sampler._history is None
        engine.generate(prompts()[:2], params_of(temperature=1.0, top_k=3))
        assert calls == ["filtered"] * NEW_TOKENS
        engine.generate(prompts()[:2], params_of(frequency_penalty=1.0))
        assert calls[NEW_TOKENS:] == ["penalised"] * NEW_TOKENS
        calls.clear()
        engine.generate(prompts()[:2], params_of(min_tokens=3, stop_token_ids=[299]))
        assert calls == ["penalised"] * 3
        assert engine.counters.num_eager_samplers == 5 * NEW_TOKENS


def test_a_device_without_room_for_histories_says_so(path, monkeypatch):
    with tiny_engine(path) as engine:

        def full(*_, **__):
            raise torch.OutOfMemoryError("full")

        with monkeypatch.context() as patch:
            patch.setattr(torch, "zeros", full)
            with pytest.raises(UserError, match="need 0 MiB on cpu.*lower"):
                engine.add_request([5], SamplingParams(presence_penalty=1))
        assert not engine.has_unfinished()
        assert engine.generate([5], SamplingParams(presence_penalty=1, max_tokens=3))[0].token_ids


def test_a_temperature_that_float32_cannot_divide_by_is_greedy_beside_others_too(path, greedy):
    params = [params_of(temperature=1e-40), params_of(temperature=1.0)]
    assert generate(path, range(2), params)[0].token_ids == greedy[0].token_ids


def test_needs_are_what_the_fields_ask_for():
    assert SamplingParams().needs == SamplingParams(top_k=5, top_p=0.5).needs == 0
    assert SamplingParams(temperature=0.5).needs == Needs.HOT
    for given in ({"top_k": 1}, {"top_p": 0.99}, {"min_p": 0.01}):
        assert SamplingParams(temperature=1, **given).needs == Needs.HOT | Needs.FILTERED
    for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
        assert SamplingParams(**{name: 0.5}).needs == Needs.PENALISED
    assert SamplingParams(min_tokens=1).needs == Needs.MIN_TOKENS


# -------- log-probabilities


@pytest.mark.parametrize("overlap", DEPTHS)
def test_logprobs_are_raw_and_ranked(path, overlap):
    """Raw: before penalties, temperature and filters. Each request gets as many as it asks for."""
    params = [
        params_of(logprobs=5, temperature=0.7, seed=1, top_k=2, repetition_penalty=1.5),
        params_of(),
        params_of(logprobs=0, presence_penalty=2.0),
        params_of(logprobs=20, max_tokens=7),
    ]
    outputs = generate(path, range(4), params, overlap=overlap)
    assert outputs[1].logprobs is None
    for output, one in zip(outputs, params, strict=True):
        if one.logprobs is None:
            continue
        prompt, ids = output.prompt_token_ids, output.token_ids
        wanted = reference_logits(path, prompt + ids)[len(prompt) - 1 : -1].log_softmax(-1)
        assert len(output.logprobs) == len(ids)
        chosen = wanted.gather(-1, torch.tensor(ids)[:, None])[:, 0]
        assert torch.allclose(torch.tensor(output.logprobs), chosen, atol=1e-4)
        top = wanted.topk(one.logprobs)
        for row, found in enumerate(output.top_logprobs):
            assert list(found) == top.indices[row].tolist()
            assert torch.allclose(torch.tensor(list(found.values())), top.values[row], atol=1e-4)


@pytest.mark.parametrize("overlap", DEPTHS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"chunk_size": 7},
        {"max_num_seqs": 1, "kv_cache_bytes": 1 << 24},
        {"settings": {"kv.num_blocks": 5}},
    ],
    ids=str,
)
def test_prompt_logprobs_are_those_of_the_logits(path, greedy, options, overlap):
    """Beside others, with a full house of slots and with a pool that is just large enough."""
    which = [4, 5, 0, 4]
    params = [params_of(prompt_logprobs=3), *[params_of(prompt_logprobs=0, logprobs=1)] * 3]
    outputs = generate(path, which, params, overlap=overlap, **options)
    assert tokens(outputs) == [greedy[i].token_ids for i in which]
    for output, one in zip(outputs, params, strict=True):
        wanted = reference_logits(path, output.prompt_token_ids).log_softmax(-1)[:-1]
        targets = torch.tensor(output.prompt_token_ids[1:])
        chosen = wanted.gather(-1, targets[:, None])[:, 0]
        assert output.prompt_logprobs[0] is None
        assert torch.allclose(torch.tensor(output.prompt_logprobs[1:]), chosen, atol=1e-4)
        top = wanted.topk(one.prompt_logprobs).indices.tolist()
        assert [list(found) for found in output.prompt_top_logprobs[1:]] == top


def test_a_prompt_is_scored_in_the_room_of_its_own_request(path):
    """A prefix shared with a request that runs on would leave too little room at the end."""
    prompt = prompts()[5]  # 40 tokens: 3 blocks, of which 2 could be shared
    settings = {"kv.num_blocks": 5, "kv.block_size": 16}
    with tiny_engine(path, settings=settings) as engine:
        engine.add_request(prompt, params_of(max_tokens=20), "runs on")
        engine.step()
        (output,) = engine.generate(prompt, params_of(max_tokens=2, prompt_logprobs=1))
        assert (output.finish_reason, len(output.prompt_logprobs)) == ("length", 40)


def test_prompt_logprobs_of_the_shortest_and_the_aborted(path):
    with tiny_engine(path, max_num_seqs=1, kv_cache_bytes=1 << 24) as engine:
        assert engine.generate([5], params_of(prompt_logprobs=2))[0].prompt_logprobs == [None]
        for name in ("runs", "waits"):
            engine.add_request(prompts()[0], params_of(prompt_logprobs=2), name)
        engine.step()
        for name in ("runs", "waits"):
            engine.abort(name)
        outputs = [event.output for event in engine.step()]
        assert [(o.finish_reason, o.prompt_logprobs) for o in outputs] == [("abort", [None])] * 2
        engine._kv.check_integrity()


def test_a_failure_to_score_a_prompt_ends_that_request_alone(path, greedy, monkeypatch):
    with tiny_engine(path) as engine:
        monkeypatch.setattr(engine._executor, "hidden_states", lambda plan: 1 / 0)
        outputs = engine.generate(prompts()[:2], [params_of(prompt_logprobs=1), params_of()])
        assert outputs[0].finish_reason == "error" and "ZeroDivisionError" in outputs[0].error
        assert outputs[1].token_ids == greedy[1].token_ids
        engine._kv.check_integrity()
        assert engine._slots.num_free == 8


def test_token_logprobs_of_a_vocabulary_smaller_than_asked():
    found = token_logprobs(torch.tensor([[1.0, 3.0, 2.0]]), torch.tensor([2]), 20)
    assert found.top_ids.tolist() == [[1, 2, 0]] and found.top_ids.dtype == torch.int32
    assert found.pairs(0, 20) == (
        found.top[0, 1].item(),
        dict(zip((1, 2, 0), found.top[0].tolist(), strict=True)),
    )
    assert abs(found.top.exp().sum().item() - 1) < 1e-6


# -------- streams and bars


def test_streams_share_the_engine_and_add_up(path, mixed_alone):
    async def one(engine, i, started):
        ids, text = [], ""
        async for event in engine.stream(prompts()[i], MIXED[i]):
            started.append(i)
            ids += event.token_ids
            text += event.text
            await asyncio.sleep(0)
        assert event.output.token_ids == ids and event.output.text == text
        return event.output

    async def together(engine, started):
        return await asyncio.gather(*(one(engine, i, started) for i in range(len(MIXED))))

    for overlap in DEPTHS:
        with tiny_engine(path, overlap=overlap) as engine:
            started = []
            outputs = asyncio.run(together(engine, started))
            assert tokens(outputs) == tokens(mixed_alone)
            assert set(started[:12]) == set(range(len(MIXED))), "they take turns"
            assert engine.counters.num_steps < 2 * NEW_TOKENS
            assert not engine.has_unfinished() and not engine._streams
            outputs = asyncio.run(together(engine, started))  # on another event loop
            assert tokens(outputs) == tokens(mixed_alone)


async def last_output(stream):
    return [event async for event in stream][-1].output


@pytest.mark.parametrize("after", [0, 1, 4])
def test_a_stream_that_is_left_aborts_its_request(path, greedy, after):
    async def left(engine, how):
        stream = engine.stream(prompts()[0], params_of(max_tokens=80), request_id="left")
        for _ in range(after + 1):
            await anext(stream)
        if how == "cancel":
            await asyncio.sleep(3600)
        await stream.aclose()

    async def main(engine, how):
        task = asyncio.create_task(left(engine, how))
        other = await last_output(engine.stream(prompts()[1], params_of()))
        if how == "cancel":
            task.cancel()
        (ended,) = await asyncio.gather(task, return_exceptions=True)
        await asyncio.sleep(0)
        assert isinstance(ended, asyncio.CancelledError) == (how == "cancel")
        return other

    with tiny_engine(path) as engine:
        for how in ("cancel", "close"):
            assert asyncio.run(main(engine, how)).token_ids == greedy[1].token_ids
            assert not engine.has_unfinished() and not engine._streams
            assert engine._kv.usage().num_held == 0


def test_a_stream_refuses_and_leaves_others_alone(path, greedy):
    async def main(engine):
        with pytest.raises(UserError, match="empty"):
            async for _ in engine.stream(""):
                pass
        engine.add_request(prompts()[0], params_of(), "mine")
        stream = engine.stream(prompts()[1], params_of(max_tokens=30))
        return (await last_output(stream)).token_ids

    with tiny_engine(path) as engine:
        assert asyncio.run(main(engine))[:NEW_TOKENS] == greedy[1].token_ids
        events = []
        while engine.has_unfinished():
            events += engine.step()
    assert [e.output.token_ids for e in events if e.output] == [greedy[0].token_ids]


def test_a_failing_step_reaches_whoever_runs_it(path, monkeypatch):
    async def main(engine):
        async for _ in engine.stream(prompts()[0], params_of()):
            monkeypatch.setattr(engine, "_harvest", lambda *_: 1 / 0)

    with tiny_engine(path) as engine:
        with pytest.raises(ZeroDivisionError):
            asyncio.run(main(engine))
        assert not engine._streams


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_long_batches_show_a_bar_in_a_terminal_alone(path, monkeypatch):
    params = SamplingParams(max_tokens=2)
    with tiny_engine(path) as engine:
        for num_prompts, progress, stderr, shows in (
            (8, True, Terminal(), True),
            (7, True, Terminal(), False),
            (8, False, Terminal(), False),
            (8, True, io.StringIO(), False),
        ):
            monkeypatch.setattr("sys.stderr", stderr)
            engine.generate([[5, 6]] * num_prompts, params, progress=progress)
            assert ("generate" in stderr.getvalue()) == shows
