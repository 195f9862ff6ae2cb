"""Whoever raises is named, in one sentence: while an engine is made, in a plan, in a step."""

from __future__ import annotations

import inspect
import re

import pytest
import torch

from core import Engine, RunError, SamplingParams
from core.batch import BatchShape
from core.seams import Span
from plugins.fusion.none import NoFusion
from plugins.graphs.none import NoGraphs
from plugins.kv.contiguous import Contiguous
from plugins.sched.fifo import Fifo

SMALL = {"model": "random:tiny", "device": "cpu", "max_model_len": 64, "kv_cache_bytes": 1 << 22}
PARAMS = SamplingParams(max_tokens=2, ignore_eos=True)


def fail(*_, **__):
    raise KeyError("gone")


def broken(base, method):
    """A class of this module, one of whose methods raises."""

    def raises(self, *_, **__):
        raise KeyError("gone")

    raises.__signature__ = inspect.signature(getattr(base, method))
    return type(f"Broken{base.__name__}", (base,), {method: raises, "__module__": __name__})


@pytest.mark.parametrize(
    ("seam", "base", "method"),
    [
        ("kv", Contiguous, "capacity"),
        ("kv", Contiguous, "bind"),
        ("kv", Contiguous, "metadata"),
        ("kv", Contiguous, "sink"),
        ("fusion", NoFusion, "spans"),
    ],
)
def test_a_method_that_raises_while_an_engine_is_made(seam, base, method):
    found = rf"^{seam} 'Broken\w+' of .*test_blame.py failed in raises: KeyError: 'gone'; choose"
    with pytest.raises(RunError, match=found):
        Engine(**SMALL, **{seam: broken(base, method)})


class Looks(NoFusion):
    """Raises where it looks at the weights, or where the engine looks at its span."""

    spans_made = ()

    def weights(self, weights):
        return fail()

    def spans(self, facts, device):
        return self.spans_made


class Asks(NoFusion):
    def spans(self, facts, device):
        return [Span("asks", ("act_mul",), fail, fail)]


class Cuts(NoGraphs):
    def cut(self):
        return [f"{self.nothing} attention"]


@pytest.mark.parametrize(
    ("seam", "offer", "said"),
    [
        ("fusion", Looks, "failed in fail: KeyError"),
        ("fusion", Asks, "failed in fail: KeyError"),
        ("graphs", Cuts, "failed in cut: AttributeError"),
    ],
)
def test_optional_methods_and_functions_of_a_span(seam, offer, said):
    with pytest.raises(RunError, match=f"{seam} '{offer.__name__}' of .*test_blame.py {said}"):
        Engine(**SMALL, **{seam: offer})


class Dies(Fifo):
    """A scheduler that raises in one of its methods."""

    def __init__(self, at):
        super().__init__()
        self.at = at

    def key(self, seq, clock):
        return fail() if self.at == "key" else seq.order

    def chunk(self, seq, budget):
        return fail() if self.at == "chunk" else budget


def test_a_scheduler_that_raises():
    """In `key` nothing has been queued; in `chunk` the run ends, and ends again if one goes on."""
    with Engine(**SMALL, sched=Dies("key")) as engine:
        with pytest.raises(RunError, match="sched 'Dies' of .* failed in fail: KeyError"):
            engine.generate("The sea", PARAMS)
        assert not engine.has_unfinished()
    with Engine(**SMALL, sched=Dies("chunk")) as engine:
        engine.add_request("The sea", PARAMS)
        for _ in range(2):
            with pytest.raises(RunError, match="sched 'Dies' of .* failed in fail"):
                engine.step()


def test_a_cache_that_raises_where_it_is_asked_for_room():
    with Engine(**SMALL, kv=broken(Contiguous, "ever_fits")) as engine:
        with pytest.raises(RunError, match="kv 'BrokenContiguous' of .* failed in raises: KeyErr"):
            engine.add_request("The sea", PARAMS)
        assert not engine.has_unfinished()


class Stumbles(Contiguous):
    def attend(self, layer, q, batch):
        return fail() if len(q) > 3 else super().attend(layer, q, batch)


def test_a_step_that_raises_ends_its_requests_and_no_others():
    with Engine(**SMALL, kv=Stumbles) as engine:
        bad, good = engine.generate(["The sea"], PARAMS) + engine.generate(["A"], PARAMS)
    assert bad.finish_reason == "error" and good.finish_reason == "length"
    assert bad.error.startswith("kv 'Stumbles' of ") and bad.error.endswith("KeyError: 'gone'")


class Unplanned(Contiguous):
    def plan(self, step, host):
        return fail() if step.seq_lens.max() > 9 else super().plan(step, host)


@pytest.mark.parametrize("seats", [1, 2])
def test_a_step_that_raises_while_it_is_staged_ahead_ends_its_requests_and_no_others(seats):
    """As it does where a seat is free, and nothing is staged ahead."""
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    with Engine(**SMALL, kv=Unplanned, overlap=True, max_num_seqs=seats) as engine:
        (bad,) = engine.generate(["The sea"], params)
        (good,) = engine.generate(["A"], PARAMS)
    assert bad.finish_reason == "error" and good.finish_reason == "length"
    assert bad.error.startswith("kv 'Unplanned' of ") and bad.error.endswith("KeyError: 'gone'")
    assert len(bad.prompt_token_ids + bad.token_ids) == 10  # those of the steps that were run


def answering(base, method, answer):
    """A class of this module, one of whose methods has nothing but `answer`."""

    def answers(self, *_, **__):
        return answer

    answers.__signature__ = inspect.signature(getattr(base, method))
    return type(f"Senseless{base.__name__}", (base,), {method: answers, "__module__": __name__})


class Spans(NoFusion):
    """One span, made of what it is given."""

    def __init__(self, run, when=lambda *_: True):
        super().__init__()
        self.span = Span("mine", ("act_mul",), run, when)

    def spans(self, facts, device):
        return [self.span]


class CutsNothing(NoGraphs):
    def cut(self):
        return None


@pytest.mark.parametrize(
    ("seam", "offer", "said"),
    [
        ("kv", answering(Contiguous, "capacity", None), "capacity with nonsense: TypeError"),
        ("kv", answering(Contiguous, "capacity", (1,)), "capacity with nonsense: TypeError"),
        ("kv", answering(Contiguous, "metadata", None), "metadata with nonsense: AttributeE"),
        ("kv", answering(Contiguous, "metadata", {"x": 3}), "metadata with nonsense: TypeError"),
        ("fusion", answering(NoFusion, "spans", None), "spans with nonsense: TypeError"),
        ("fusion", answering(NoFusion, "spans", ["act_mul"]), "spans with nonsense: AttributeE"),
        ("graphs", CutsNothing, "cut with nonsense: TypeError"),
        ("kv", answering(Contiguous, "ever_fits", 7), "ever_fits with nonsense: TypeError"),
        ("kv", answering(Contiguous, "usage", None), "usage with nonsense: TypeError"),
        ("sched", answering(Fifo, "chunk", None), "chunk with nonsense: TypeError"),
        ("sched", answering(Fifo, "chunk", "all"), "chunk with nonsense: TypeError"),
    ],
)
def test_an_answer_of_the_wrong_kind(seam, offer, said):
    wanted = f"^{seam} '{offer.__name__}' of .*test_blame.py answered {said}.*; choose another"
    with pytest.raises(RunError, match=wanted), Engine(**SMALL, **{seam: offer}) as engine:
        engine.generate("The sea", PARAMS)


def test_a_span_that_cannot_be_asked():
    with pytest.raises(RunError, match="fusion 'Spans' of .* answered when with nonsense: TypeE"):
        Engine(**SMALL, fusion=Spans(fail, when=None))


@pytest.mark.parametrize("fusion", ["onednn", "none"])
@pytest.mark.parametrize("answer", [None, [], torch.zeros(3), torch.zeros(7, 4, 32)])
def test_attention_of_another_shape_is_of_the_cache(answer, fusion):
    """Whoever reads it next is not to blame."""
    with Engine(**SMALL, kv=answering(Contiguous, "attend", answer), fusion=fusion) as engine:
        (output,) = engine.generate("The sea", PARAMS)
    assert output.error.startswith("kv 'SenselessContiguous' of ")
    assert " answered attend with nonsense: " in output.error


@pytest.mark.parametrize("run", [None, lambda *_: None, lambda *_: (), lambda *_: torch.zeros(2)])
def test_a_span_that_does_not_run(run):
    """Whatever module what it runs comes from."""
    with Engine(**SMALL, fusion=Spans(run)) as engine:
        (output,) = engine.generate("The sea", PARAMS)
    assert re.match(r"fusion 'Spans' of \S+ failed in (span 'mine'|<lambda>): ", output.error)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_plan_that_never_ends(overlap):
    """The step fails, after as many rounds as it has tokens or a sequence positions."""
    endless, short = answering(Contiguous, "plan", "more"), {"max_num_batched_tokens": 96}
    with Engine(**SMALL, **short, kv=endless, overlap=overlap) as engine:
        (output,) = engine.generate("The sea", PARAMS)
        assert engine.counters.num_extra_plans == 96
    assert output.error.startswith("kv 'SenselessContiguous' of ")
    assert "answered plan with nonsense: ValueError: kv.plan() is True 97 times" in output.error


def test_a_line_that_is_not_the_cores_asks_no_offer():
    kv = {}
    with pytest.raises(TypeError) as found:
        kv.update(3)
    with Engine(**SMALL) as engine:
        assert engine.plan.blame(found.value) is None


class Shapeless(NoGraphs):
    captures = True

    def shapes(self, limits):
        return [BatchShape(*self.nothing)]


@pytest.mark.gpu
def test_shapes_that_raise():
    with pytest.raises(RunError, match="graphs 'Shapeless' of .* failed in shapes"):
        Engine(**{**SMALL, "device": "cuda"}, graphs=Shapeless)


def test_what_is_nobodys_fault_keeps_its_traceback(monkeypatch):
    monkeypatch.setattr("core.compose.load_model", fail)
    with pytest.raises(KeyError):
        Engine(**SMALL)
