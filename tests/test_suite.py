"""What a subclass of a conformance suite is held to, and what a failing clause says."""

from __future__ import annotations

import pytest

from core import OfferConfig
from core.errors import UserError
from core.registry import Registry
from core.show import describe
from core.testing.kv import KVManagerSuite
from core.testing.sched import SchedulerSuite
from plugins.kv.contiguous import Contiguous
from plugins.kv.paged_int8 import PagedInt8
from plugins.sched.fifo import Fifo


class Declared(Contiguous):
    held_to = {"tolerance": 0.5, "expected_failures": {"test_random_traces": "why"}}


def suite(base, **attributes):
    return type("TestMine", (base,), attributes)()


def test_what_the_offer_says_holds_in_a_subclass():
    mine = suite(KVManagerSuite, offer=Declared)
    assert mine.tolerance < 1e-3
    mine.hold()
    assert mine.tolerance == 0.5 and mine.expected_failures == {"test_random_traces": "why"}


def test_a_subclass_goes_before_its_offer():
    mine = suite(KVManagerSuite, plugin="paged_int8", tolerance=0.125)
    mine.hold()
    assert mine.tolerance == 0.125
    assert mine.bytes_per_token == PagedInt8.held_to["bytes_per_token"]


def test_what_no_suite_reads_is_refused():
    with pytest.raises(UserError, match="TestMine sets short_passes_lang, which SchedulerSuite"):
        suite(SchedulerSuite, offer=Fifo, short_passes_lang=True)
    with pytest.raises(UserError, match="TestMine sets settings, which KVManagerSuite lacks"):
        suite(KVManagerSuite, offer=Contiguous, settings={"block_size": 3})
    typo = type("Typo", (Contiguous,), {"held_to": {"tolerence": 1.0}})
    with pytest.raises(UserError, match="kv Typo: held_to names 'tolerence', .* mean tolerance"):
        suite(KVManagerSuite, offer=typo).hold()


class Sized:
    def largest(self):
        return max(size for size in self.sizes)


def test_what_a_subclass_reads_itself_is_not_refused():
    """In a comprehension, a fixture, a property, a mixin; nor what the suite behind that reads."""

    class TestMine(Sized, KVManagerSuite):
        plugin = "contiguous"
        sizes = 1, 2
        fresh, few = True, 3

        @pytest.fixture
        def size(self):
            return self.fresh

        @property
        def num(self):
            return self.few

    mine = TestMine()
    assert mine.loaded() is Contiguous and mine.largest() == 2 and mine.num == 3


def test_an_option_without_a_description_is_named():
    class Config(OfferConfig):
        window: int = 3

    with pytest.raises(AssertionError, match="options without a description: window"):
        suite(SchedulerSuite, offer=type("Mute", (Fifo,), {"Config": Config})).test_fits_the_seam()


def test_the_bytes_of_a_token_are_said():
    mine = suite(KVManagerSuite, offer=Contiguous, bytes_per_token=512.0)
    with pytest.raises(AssertionError, match=r"costs 1024\.0 bytes .*declared.*: 512"):
        mine.test_capacity_is_what_the_bytes_buy()


def test_who_came_first_is_said():
    mine = suite(SchedulerSuite, offer=Fifo, short_passes_long=True)
    with pytest.raises(AssertionError, match=r"a short prompt behind a long one has its token at"):
        mine.test_short_behind_long_is_as_declared()


class OldClock(Fifo):
    """Whoever waited ten seconds is first, but for `victim`, which never hears of it."""

    rekey = "step"

    def key(self, seq, clock):
        return (clock - seq.arrival < 10, -seq.order)

    def victim(self, running, for_seq):
        last = max(running, key=lambda seq: seq.num_prompt, default=None)
        return last if last is not None and last.num_prompt > for_seq.num_prompt else None


def test_a_victim_by_another_clock_is_seen():
    with pytest.raises(AssertionError, match="gives way to"):
        suite(SchedulerSuite, offer=OldClock).test_a_victim_is_chosen_at_the_time_of_the_plan()
    suite(SchedulerSuite, offer=Fifo).test_a_victim_is_chosen_at_the_time_of_the_plan()


@pytest.mark.parametrize(
    ("seam", "name", "stated"),
    [("sched", "fifo", {"heeds_priority"}), ("kv", "paged_int4", {"held_to", "quality"})],
)
def test_what_an_offer_states_beside_its_facts_is_shown(seam, name, stated):
    assert stated <= describe(Registry().find(seam, name))["facts"].keys()
