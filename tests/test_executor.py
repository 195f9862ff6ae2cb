"""Which operations a step runs: spans where their `when` says so, refused before the first step."""

from __future__ import annotations

from collections import defaultdict
from functools import partial

import pytest
import torch

from core import Engine, SamplingParams
from core.errors import UserError
from core.model import rms_norm
from core.seams import Span
from plugins.fusion.options import SpanOptions


def norm(seen, name, sites, batch, residual):
    seen[name].add(batch.shape.num_tokens)
    site = sites[0]
    return (rms_norm(residual, site.weights.mlp_norm, site.facts.rms_norm_eps),)


class Norms:
    """Spans over mlp_norm alone; `given` are (name, priority, when)."""

    api, lossless = 1, True

    class Config(SpanOptions):
        names = ("it", "other")

    def __init__(self, *given, only=None):
        self.config, self.given, self.seen = self.Config(only=only), given, defaultdict(set)

    def spans(self, facts, device):
        return self.config.chosen(
            Span(name, ("mlp_norm",), partial(norm, self.seen, i), when, priority)
            for i, (name, priority, when) in enumerate(self.given)
        )


def engine(fusion):
    return Engine(model="random:tiny", device="cpu", max_model_len=64, fusion=fusion)


def always(num_tokens, facts, sink):
    return True


def test_two_spans_of_one_name_over_one_node_each_run_where_they_say():
    fusion = Norms(("it", 0, lambda n, f, s: n <= 1), ("it", 0, lambda n, f, s: n > 1))
    with engine(fusion) as made:
        made.generate([[5, 6, 7, 8, 9]], SamplingParams(max_tokens=4, ignore_eos=True))
    assert fusion.seen == {0: {1}, 1: {5}}


def test_an_overlap_asked_for_by_name_is_refused_before_there_is_a_step():
    given = ("it", 0, always), ("other", 0, always)
    with pytest.raises(UserError, match="spans 'it' and 'other' both claim node 'mlp_norm'"):
        engine(Norms(*given, only=["it", "other"]))
    with engine(Norms(*given)) as made:
        assert made.generate([[5]], SamplingParams(max_tokens=1))[0].error is None


def test_a_set_that_takes_verify_and_watches_nothing_is_refused():
    fusion = Norms(("it", 0, always))
    fusion.config = fusion.Config(verify=True)
    fusion.spans = lambda facts, device: []
    with pytest.raises(UserError, match="fusion 'Norms' takes fusion.verify and watches no span"):
        engine(fusion)


def test_a_span_over_no_run_of_nodes_is_refused_with_its_name():
    fusion = Norms()
    fusion.spans = lambda facts, device: [Span("it", ("norm",), torch.relu, always)]
    with pytest.raises(UserError, match=r"span 'it' is over \('norm',\): give nodes in their"):
        engine(fusion)
