"""Stop strings: found wherever they begin, held back until decided, the same at any depth."""

from __future__ import annotations

import random

import numpy as np
import pytest

from core import Engine, SamplingParams
from core.stops import RequestText, StopStrings
from core.testing.tiny import save_tiny
from core.tokenizer import ByteTokenizer, Tokenizer

NEW_TOKENS = 12
DEPTHS = [False, True]


# -------- the matcher alone


def ended(text, strings, keep, unwatched=0):
    """The text up to the match that is complete first, and the match, by trying every end."""
    for end in range(unwatched + 1, len(text) + 1):
        found = [string for string in strings if text[:end].endswith(string)]
        if found:
            longest = max(found, key=len)
            return text[: end if keep else end - len(longest)], longest
    return text, None


def in_pieces(text, rng):
    while text:
        width = rng.choice((0, 1, 1, 2, 5))
        yield text[:width]
        text = text[width:]


def could_begin(text, strings):
    return any(text and s.startswith(text) and s != text for s in strings)


@pytest.mark.parametrize("keep", [False, True])
def test_any_pieces_give_the_match_that_is_complete_first(keep):
    rng, num_found = random.Random(0), 0
    for _ in range(4000):
        strings = [
            "".join(rng.choices("ab", k=rng.randint(1, 5))) for _ in range(rng.randint(1, 3))
        ]
        text = "".join(rng.choices("abc", k=rng.randint(0, 25)))
        matcher, out, fed = StopStrings(strings, keep), "", ""
        for piece in in_pieces(text, rng):
            out, fed = out + matcher.push(piece, watched=True), fed + piece
            if matcher.found is None:
                held = fed[len(out) :]
                assert fed.startswith(out)
                assert not held or could_begin(held, strings), "held back for nothing"
                longer = (fed[i:] for i in range(len(out)))
                assert not any(could_begin(end, strings) for end in longer), "let out too early"
        out += matcher.flush()
        assert (out, matcher.found) == ended(text, strings, keep), (text, strings)
        assert matcher.found is None or matcher.push("more", watched=True) == ""
        num_found += matcher.found is not None
    assert 1000 < num_found < 3900


def test_text_that_is_not_watched_may_begin_a_match_but_not_end_one():
    rng, num_found = random.Random(1), 0
    for _ in range(2000):
        strings = [
            "".join(rng.choices("ab", k=rng.randint(1, 4))) for _ in range(rng.randint(1, 3))
        ]
        text, unwatched = "".join(rng.choices("abc", k=12)), rng.randint(0, 8)
        matcher, out = StopStrings(strings, False), ""
        for piece in in_pieces(text[:unwatched], rng):
            out += matcher.push(piece, watched=False)
        for piece in in_pieces(text[unwatched:], rng):
            out += matcher.push(piece, watched=True)
        out += matcher.flush()
        wanted, found = ended(text, strings, False, unwatched)
        # What was let out before it was watched cannot be taken back.
        assert (out, matcher.found) == (wanted, found), (text, strings, unwatched)
        num_found += found is not None
    assert 500 < num_found < 1900


def test_text_is_decoded_before_it_is_matched():
    """A character of two tokens, and one that the end of the text decides."""
    text = RequestText(ByteTokenizer(), SamplingParams(stop="é"))
    text.push([0x61, 0xC3], watched=True)
    assert (text.delta(), text.stopped) == ("a", False)
    text.push([0xA9, 0x62], watched=True)
    assert (text.delta(), text.stopped, text.whole()) == ("", True, "a")
    text = RequestText(ByteTokenizer(), SamplingParams(stop="a\ufffd"))
    text.push([0x62, 0x61, 0xC3], watched=True)
    assert (text.delta(), text.stopped) == ("b", False)
    text.push([], watched=True, final=True)
    assert (text.delta(), text.stopped, text.whole()) == ("", True, "b")


# -------- in the engine


class Spelled(Tokenizer):
    """Every id is two letters and a full stop, so that strings begin and end inside tokens."""

    def incremental(self):
        return lambda ids, final: "".join(f"{chr(97 + i // 26)}{chr(97 + i % 26)}." for i in ids)


def prompts():
    rng = np.random.default_rng(5)
    return [rng.integers(3, 290, n).tolist() for n in (5, 9, 16, 30)]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny") / "qwen3"
    save_tiny("qwen3", path)
    return path


def tiny_engine(path, tokenizer=None, **options):
    defaults = {"model": str(path), "device": "cpu", "max_model_len": 128, "max_num_seqs": 4}
    engine = Engine(**{**defaults, **options})
    engine.tokenizer = tokenizer or Spelled()
    return engine


def params_of(**given):
    return SamplingParams(**{"max_tokens": NEW_TOKENS, "ignore_eos": True, **given})


@pytest.fixture(scope="module")
def greedy(path):
    with tiny_engine(path) as engine:
        return [o.token_ids for o in engine.generate(prompts(), params_of())]


def expected(ids, params):
    """Token ids, text and finish reason of a greedy request, one token at a time."""
    for n in range(1, len(ids) + 1):
        unwatched = len(Spelled().decode(ids[: min(params.min_tokens, n)]))
        text = Spelled().decode(ids[:n])
        keep = params.include_stop_str_in_output
        cut, found = ended(text, params.stop, keep, unwatched)
        if found is not None:
            return ids[:n], cut, "stop"
    return ids, text, "length"


def run(engine, all_params):
    """Outputs by prompt; the events of each add up to it and never show what is taken back."""
    for i, params in enumerate(all_params):
        engine.add_request(prompts()[i % 4], params, str(i))
    outputs, ids = {}, {str(i): [] for i in range(len(all_params))}
    text = dict.fromkeys(ids, "")
    while engine.has_unfinished():
        for event in engine.step():
            ids[event.request_id] += event.token_ids
            text[event.request_id] += event.text
            if event.output:
                outputs[event.request_id] = event.output
    for i, output in outputs.items():
        assert (ids[i], text[i]) == (output.token_ids, output.text)
        assert output.metrics.num_output_tokens == len(output.token_ids)
    engine._kv.check_integrity()
    assert engine._kv.usage().num_held == 0
    return [outputs[str(i)] for i in range(len(all_params))]


@pytest.mark.parametrize("overlap", DEPTHS)
@pytest.mark.parametrize(
    "options", [{}, {"settings": {"kv.num_blocks": 5}}, {"chunk_size": 7}], ids=str
)
def test_a_stop_string_ends_a_request_where_it_is_complete(path, greedy, options, overlap):
    """Pieces of the greedy text from one letter to three tokens, at every offset, several at once;
    neighbours go on, and the queue takes over the slots."""
    rng, all_params = random.Random(2), []
    for i in range(60):
        text = Spelled().decode(greedy[i % 4])
        start = rng.randrange(len(text) - 8)
        stop = [text[start : start + rng.randint(1, 9)], "nowhere"]
        all_params.append(
            params_of(
                stop=stop[: rng.randint(1, 2)],
                include_stop_str_in_output=rng.random() < 0.3,
                min_tokens=rng.choice((0, 0, 0, 4)),
            )
        )
    all_params[5] = params_of(stop="nowhere")
    with tiny_engine(path, overlap=overlap, **options) as engine:
        outputs = run(engine, all_params)
        if "settings" in options:
            assert engine.counters.num_preemptions > 0
    for i, (output, params) in enumerate(zip(outputs, all_params, strict=True)):
        found = output.token_ids, output.text, output.finish_reason
        assert found == expected(greedy[i % 4], params), params
    assert {len(output.token_ids) for output in outputs} == set(range(1, NEW_TOKENS + 1))


@pytest.mark.parametrize("offset", range(NEW_TOKENS))
def test_depths_agree_wherever_something_ends(path, greedy, offset):
    """EOS, a stop string and an abort land on the same step, beside a request that goes on."""
    text = Spelled().decode(greedy[1][: offset + 1])
    all_params = [
        params_of(stop_token_ids=[greedy[0][offset]]),
        params_of(stop=text[-5:], logprobs=1, presence_penalty=0.0),
        params_of(max_tokens=40),
        params_of(repetition_penalty=1.2, temperature=0.8, seed=1, top_k=20),
        params_of(stop=["nowhere"]),  # waits, and takes over a slot
    ]
    found = {}
    for overlap in DEPTHS:
        with tiny_engine(path, overlap=overlap) as engine:
            step, made = engine.step, [0]

            def abort_then_step(step=step, made=made, engine=engine):
                if made[0] == offset:
                    engine.abort("2")
                made[0] += 1
                return step()

            engine.step = abort_then_step
            outputs = run(engine, all_params)
        aborted = outputs.pop(2)
        assert aborted.finish_reason == "abort"
        assert len(aborted.token_ids) == max(0, offset - overlap)
        found[overlap] = [(o.token_ids, o.text, o.finish_reason) for o in outputs]
        assert len(outputs[1].logprobs) == len(outputs[1].token_ids)
        first = greedy[0].index(greedy[0][offset])
        assert found[overlap][0][::2] == (greedy[0][: first + 1], "stop")
        assert found[overlap][1] == expected(greedy[1], all_params[1])
    assert found[False] == found[True]


def test_what_might_be_a_stop_string_is_held_back(path, greedy):
    text = Spelled().decode(greedy[0])
    stop = text[3:7] + "!"  # it never comes: what is held is let out when that is certain
    with tiny_engine(path) as engine:
        engine.add_request(prompts()[0], params_of(stop=stop, max_tokens=4))
        deltas = []
        while engine.has_unfinished():
            deltas += [(event.token_ids, event.text) for event in engine.step()]
    assert [ids for ids, _ in deltas] == [[i] for i in greedy[0][:4]]
    assert [delta for _, delta in deltas] == [text[:3], "", text[3:9], text[9:12]]


def test_held_text_comes_out_at_the_end(path, greedy):
    text = Spelled().decode(greedy[0])
    with tiny_engine(path) as engine:
        (output,) = engine.generate(prompts()[0], params_of(stop=text[4:9] + "!", max_tokens=3))
    assert (output.text, output.finish_reason) == (text[:9], "length")


@pytest.mark.parametrize("overlap", DEPTHS)
def test_a_stop_string_in_what_only_the_end_decides(path, greedy, overlap):
    """The third token is half a character: that it stays one is known at the end."""
    assert greedy[0][:3] == [181, 104, 208]
    with tiny_engine(path, ByteTokenizer(), overlap=overlap) as engine:
        (output,) = engine.generate(prompts()[0], params_of(stop="h\ufffd", max_tokens=3))
    assert (output.text, output.finish_reason) == ("\ufffd", "stop")
    assert output.token_ids == greedy[0][:3]


@pytest.mark.parametrize("overlap", DEPTHS)
@pytest.mark.parametrize(("num_tokens", "num_shared"), [(6, 0), (9, 16)])
def test_tokens_past_a_stop_string_are_never_shared(path, greedy, num_tokens, num_shared, overlap):
    """The prompt has 9 tokens, a block 16: with overlap the step past the stop string is in flight,
    and the token that it brings would fill the block."""
    prompt, ids = prompts()[1], greedy[1]
    stop = Spelled().decode(ids[:num_tokens])[-4:]
    with tiny_engine(path, overlap=overlap, settings={"kv.block_size": 16}) as engine:
        (output,) = engine.generate(prompt, params_of(stop=stop))
        assert output.token_ids == ids[:num_tokens]
        again = engine.generate(prompt + ids, params_of())[0]
        assert again.metrics.num_cached_tokens == num_shared
        engine._kv.check_integrity()
    with tiny_engine(path, enable_prefix_caching=False) as engine:
        assert engine.generate(prompt + ids, params_of())[0].token_ids == again.token_ids
