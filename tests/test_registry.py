"""Discovery, owners of names, what is wrong with a plugin, and whether an object fits its seam."""

from __future__ import annotations

import inspect
import os
import sys
import textwrap
from typing import ClassVar
from unittest import mock

import pytest

from core import hookimpl
from core.config import OfferConfig
from core.conform import bind, fact_types
from core.errors import RunError, UserError
from core.registry import BUILTIN, Owner, Registry
from core.seams import PROTOCOLS, SEAMS, Scheduler

BUILTIN_OFFERS = [(seam, name) for seam, names in Registry().offers.items() for name in names]
OFFER = """
    from core import hookimpl

    @hookimpl
    def outweigh_register_sched(register):
        register("{name}", "{module}:Mine")

    class Mine:
        pass
"""


class Sched:
    """A scheduler that fits; the classes below each break one thing of it."""

    api = 1
    rekey = "never"

    class Config(OfferConfig):
        pass

    def __init__(self, config=None):
        self.config = config

    def key(self, seq, clock):
        return 0

    def chunk(self, seq, budget):
        return budget

    def victim(self, running, for_seq):
        return None


def registry(*plugins, env=None, builtin=()):
    with mock.patch.dict(os.environ, env or {}):
        return Registry(plugins, builtin)


def register_sched(target, name="mine"):
    """The loaded offer of a plugin object that registers `target`."""

    class Plugin:
        @hookimpl
        def outweigh_register_sched(self, register):
            register(name, target)

    made = registry()
    made._add(Owner("p", "p", "0", "here"), Plugin)
    return made.find("sched", name)


# Built-ins


def test_every_seam_has_a_built_in_offer():
    assert {seam for seam, _ in BUILTIN_OFFERS} == set(SEAMS)


@pytest.mark.parametrize(("seam", "name"), BUILTIN_OFFERS)
def test_built_in_offers_load_and_fit_their_seam(seam, name):
    offer = registry(builtin=BUILTIN).find(seam, name).load()
    made = offer(offer.Config())
    assert bind(seam, made) is made


def test_registries_share_no_state():
    one, other = registry(builtin=BUILTIN), registry()
    assert one.offers["kv"]
    assert not other.offers["kv"]
    assert other.hooks.check_combination(None) == []


# Third parties


def test_an_entry_point_is_loaded_and_knows_its_owner(make_dist):
    site = make_dist("outweigh-one", "one", OFFER.format(name="mine", module="outweigh_one"))
    owner = registry().find("sched", "mine").owner
    assert (owner.name, owner.distribution, owner.version) == ("one", "outweigh-one", "0.1")
    assert owner.origin == str(site / "outweigh_one.py")
    assert str(owner) == "outweigh-one 0.1"


def test_a_lazy_offer_is_imported_when_it_is_asked_for(make_dist, tmp_path):
    make_dist("outweigh-one", "one", OFFER.format(name="mine", module="outweigh_lazy_target"))
    target = tmp_path / "site" / "outweigh_lazy_target.py"
    target.write_text("raise ImportError('no GPU here')")
    offer = registry().find("sched", "mine")
    assert "outweigh_lazy_target" not in sys.modules
    with pytest.raises(
        UserError, match="sched 'mine' of outweigh-one 0.1 cannot be loaded.*no GPU here"
    ):
        offer.load()


def test_two_entry_points_of_one_name_are_an_error_that_names_both(make_dist):
    for dist in ("outweigh-one", "outweigh-two"):
        make_dist(dist, "int8", OFFER.format(name=dist, module=dist.replace("-", "_")))
    with pytest.raises(UserError, match="'int8': outweigh-one 0.1 and outweigh-two 0.1"):
        registry()
    assert {owner.distribution: why for owner, why in registry("no:int8").aside.items()} == {
        "outweigh-one": "blocked",
        "outweigh-two": "blocked",
    }
    assert registry(env={"OUTWEIGH_PLUGINS": ""}).owners == {}


def test_two_owners_of_one_offer_are_an_error_that_names_both(make_dist):
    make_dist("outweigh-one", "one", OFFER.format(name="mine", module="outweigh_one"))
    make_dist("outweigh-two", "two", OFFER.format(name="mine", module="outweigh_two"))
    with pytest.raises(
        UserError,
        match="two plugins offer sched 'mine': one of outweigh-one 0.1 and two of outweigh-two",
    ):
        registry()
    assert registry("no:two").find("sched", "mine").owner.name == "one"


def test_a_third_party_cannot_take_the_name_of_a_built_in(make_dist):
    make_dist("outweigh-one", "one", OFFER.format(name="fifo", module="outweigh_one"))
    with pytest.raises(
        UserError, match=r"sched 'fifo': builtin of outweigh 0\.\S+ and one of outweigh-one"
    ):
        registry(builtin=BUILTIN)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (None, "ModuleNotFoundError: No module named 'outweigh_bad'"),
        ("import nothing_of_that_name", "No module named 'nothing_of_that_name'"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("x = 1", "it has no hook"),
        (
            "def outweigh_regster_kv(register): pass",
            "there is no hook outweigh_regster_kv; did you mean outweigh_register_kv",
        ),
        ("def outweigh_register_kv(register, extra): pass", "extra"),
        (
            """
            from core import hookimpl
            @hookimpl(wrapper=True)
            def outweigh_register_kv(register):
                yield
            """,
            "is a wrapper",
        ),
        ("def outweigh_register_kv(register): register('x', 3)", "neither a class nor"),
        ("def outweigh_register_kv(register): register('x', 'no_colon')", "neither a class nor"),
        ("def outweigh_register_kv(register): register('auto', dict)", "reserved"),
        (
            """
            def outweigh_register_kv(register):
                register('first', dict)
                raise ValueError('second thoughts')
            """,
            "ValueError: second thoughts",
        ),
    ],
)
def test_a_broken_plugin_is_kept_aside_with_its_reason(make_dist, source, reason):
    make_dist("outweigh-bad", "bad", source)
    make_dist("outweigh-good", "good", OFFER.format(name="mine", module="outweigh_good"))
    made = registry()
    assert made.find("sched", "mine").owner.name == "good"
    assert list(made.owners) == ["good"]
    assert made.offers["kv"] == {}
    assert [owner.distribution for owner in made.aside] == ["outweigh-bad"]
    assert reason in next(iter(made.aside.values()))
    with pytest.raises(
        UserError, match=r"plugins kept aside: bad of outweigh-bad 0.1 \(broken: "
    ) as caught:
        made.find("kv", "first")
    assert reason in str(caught.value)


def test_a_function_with_the_prefix_is_a_hook_without_its_decorator(make_dist):
    make_dist("outweigh-one", "one", "def outweigh_register_kv(register): register('x', 'a:B')")
    assert registry().find("kv", "x").target == "a:B"


def test_the_environment_names_the_entry_points_to_load(make_dist):
    for dist in ("outweigh-one", "outweigh-two"):
        make_dist(dist, dist[9:], OFFER.format(name=dist, module=dist.replace("-", "_")))
    assert list(registry().owners) == ["one", "two"]
    assert list(registry(env={"OUTWEIGH_PLUGINS": " two "}).owners) == ["two"]
    assert list(registry(env={"OUTWEIGH_PLUGINS": ""}).owners) == []
    with pytest.raises(UserError, match="names 'tow', which nobody.*did you mean two"):
        registry(env={"OUTWEIGH_PLUGINS": "one,tow"})
    with pytest.raises(UserError, match="names 'x', .*; entry points installed: one, two$"):
        registry(env={"OUTWEIGH_PLUGINS": "x"})


def test_blocking(make_dist):
    make_dist("outweigh-one", "one", OFFER.format(name="mine", module="outweigh_one"))
    made = registry("no:one")
    assert made.offers["sched"] == {}
    with pytest.raises(UserError, match=r"kept aside: one of outweigh-one 0.1 \(blocked\)"):
        made.find("sched", "mine")
    with pytest.raises(UserError, match="-p no:oen blocks nothing.*did you mean one"):
        registry("no:oen")
    with pytest.raises(UserError, match="-p no:x blocks nothing.*; plugins: one$"):
        registry("no:x")


def test_an_unknown_name_comes_with_near_misses_and_the_known_ones():
    with pytest.raises(UserError, match="^there is no kv called 'page'; did you mean paged"):
        registry(builtin=BUILTIN).find("kv", "page")
    with pytest.raises(UserError, match="^there is no kv called 'x'; known: contiguous, paged"):
        registry(builtin=BUILTIN).find("kv", "x")


# -p


def write(path, source):
    path.write_text(textwrap.dedent(source))
    return str(path)


def test_a_plugin_file_offers_classes_and_lazy_strings(tmp_path):
    file = write(
        tmp_path / "my_sched.py",
        """
        from dataclasses import dataclass
        from core import hookimpl

        @hookimpl
        def outweigh_register_sched(register):
            register("eager", Mine)
            register("lazy", f"{__name__}:Mine")

        @dataclass
        class Mine:
            api = "0"
        """,
    )
    made = registry(file, file)
    offer = made.find("sched", "eager")
    assert (offer.owner.name, offer.owner.distribution) == ("my_sched", "")
    assert str(offer.owner) == file
    with pytest.raises(UserError, match="its fact api='0' is wrong"):
        offer.load()
    with pytest.raises(UserError, match="its fact api='0' is wrong"):
        made.find("sched", "lazy").load()


def test_a_plugin_module_that_an_entry_point_loaded_already_is_not_loaded_twice(make_dist):
    make_dist("outweigh-one", "one", OFFER.format(name="mine", module="outweigh_one"))
    made = registry("outweigh_one")
    assert list(made.owners) == ["one"]
    assert list(registry("outweigh_one", env={"OUTWEIGH_PLUGINS": ""}).owners) == ["outweigh_one"]


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import nothing_of_that_name", "cannot be used: ModuleNotFoundError: No module named"),
        ("def broken(:", "cannot be used: SyntaxError"),
        ("raise SystemExit('stop')", "cannot be used: SystemExit: stop"),
        ("open('no-such-table')", "cannot be used: FileNotFoundError"),
        ("x = 1", "cannot be used: TypeError: it has no hook"),
        ("def outweigh_regster_kv(register): pass", "did you mean outweigh_register_kv"),
    ],
)
def test_a_plugin_asked_for_by_p_must_load(tmp_path, source, reason):
    with pytest.raises(UserError) as caught:
        registry(write(tmp_path / "mine.py", source))
    assert reason in str(caught.value)
    assert str(caught.value).endswith("; mend it")


@pytest.mark.parametrize(
    ("plugin", "reason"),
    [
        ("nowhere/mine.py", "plugin 'nowhere/mine.py' cannot be used: FileNotFoundError"),
        ("no_such_module", "'no_such_module' cannot be used: ModuleNotFoundError: No module"),
        ("no_such.module", "-p takes a module that can be imported, or the path of a .py file"),
        ("json", "it has no hook"),
    ],
)
def test_a_plugin_that_is_not_there(plugin, reason):
    with pytest.raises(UserError) as caught:
        registry(plugin)
    assert reason in str(caught.value)


def test_a_plugin_file_may_not_have_the_name_of_another_plugin(tmp_path, make_dist):
    make_dist("outweigh-one", "one", OFFER.format(name="mine", module="outweigh_one"))
    file = write(tmp_path / "one.py", "def outweigh_register_kv(register): pass")
    with pytest.raises(UserError, match="two plugins are called 'one': outweigh-one 0.1 and"):
        registry(file)
    assert set(registry(file, "no:one").aside.values()) == {"blocked"}


# Facts


def test_an_offer_of_another_api_is_refused():
    class Old(Sched):
        api = 0

    offer = register_sched(Old)
    with pytest.raises(UserError, match="'mine' of .*: it was written for sched API 0, this is"):
        offer.load()
    with pytest.raises(UserError, match="Old does not fit Scheduler: it was written for"):
        bind("sched", Old())


@pytest.mark.parametrize(
    ("attribute", "value", "reason"),
    [
        ("rekey", "steps", "its fact rekey='steps' is wrong: input should be 'never' or 'step'"),
        ("Config", dict, "its fact Config=<class 'dict'> is wrong"),
        ("Config", None, "its fact Config=None is wrong"),
    ],
)
def test_facts_have_their_types(attribute, value, reason):
    wrong = type("Wrong", (Sched,), {attribute: value})
    with pytest.raises(UserError) as caught:
        register_sched(wrong).load()
    assert reason in str(caught.value)


def test_facts_must_be_stated_even_by_a_subclass_of_the_protocol():
    class Silent(Scheduler):
        pass

    with pytest.raises(
        UserError, match="lacks the fact api; it lacks the fact rekey; it lacks the fact Config"
    ):
        register_sched(Silent).load()


# Fitting a seam


def test_bind_returns_the_object_itself_with_plain_methods():
    made = Sched()
    assert bind("sched", made) is made
    assert inspect.ismethod(made.key)
    assert made.chunk(None, 7) == 7


def test_an_optional_method_may_be_missing_but_not_wrong():
    class Wrong(Sched):
        def may_start(self, seq):
            return True

    with pytest.raises(UserError, match=r"may_start does not take \(seq, usage\)"):
        bind("sched", Wrong())


def test_missing_methods_are_named_together():
    class Lacking:
        api, rekey, Config = 1, "never", Sched.Config

        def key(self, seq, clock):
            return 0

    with pytest.raises(UserError, match="lacks the method chunk; it lacks the method victim"):
        bind("sched", Lacking())


def test_a_property_that_raises_is_no_method():
    class Hidden(Sched):
        may_start = property()

    made = Hidden()
    assert bind("sched", made) is made


def test_inherited_stubs_of_the_protocol_do_not_count():
    class Lazy(Scheduler):
        api: ClassVar[int] = 1
        rekey = "never"
        Config = Sched.Config

        def key(self, seq, clock):
            return 0

        def chunk(self, seq, budget):
            return budget

    with pytest.raises(UserError, match="does not fit Scheduler: it lacks the method victim$"):
        bind("sched", Lazy())


@pytest.mark.parametrize(
    ("method", "reason"),
    [
        (lambda self, seq, n: n, "'n'"),
        (lambda self, seq: 1, "chunk does not take (seq, budget)"),
        (lambda self, budget, seq: 1, "chunk does not take (seq, budget)"),
        (lambda self, seq, budget, *, how: 1, "chunk does not take (seq, budget)"),
        (lambda self, *args: args[1], "chunk does not take (seq, budget)"),
        (3, "lacks the method chunk"),
    ],
)
def test_methods_take_the_arguments_of_the_seam(method, reason):
    wrong = type("Wrong", (Sched,), {"chunk": method})
    with pytest.raises(UserError, match="sched Wrong does not fit Scheduler") as caught:
        bind("sched", wrong())
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    "method",
    [
        lambda self, seq, budget, extra=3: budget,
        lambda self, seq, budget, *rest, **more: budget,
        staticmethod(lambda seq, budget: budget),
    ],
)
def test_methods_may_take_more_than_the_seam_gives(method):
    made = type("More", (Sched,), {"chunk": method})()
    assert bind("sched", made).chunk("seq", 5) == 5


def test_every_seam_states_its_facts():
    assert set(fact_types("kv")) == {"api", "lossless", "prefix_sharing", "graph_safe", "Config"}
    for seam in SEAMS:
        assert {"api", "Config"} <= set(fact_types(seam))
    assert set(PROTOCOLS) == set(SEAMS)


# Hooks


@pytest.fixture
def hooks_of(make_dist):
    def load(source):
        make_dist("outweigh-one", "one", source)
        return registry().hooks

    return load


def test_refusals_of_third_parties_name_their_owner(hooks_of):
    hooks = hooks_of("def outweigh_check_combination(plan): return ['not on ' + plan]")
    assert hooks.check_combination("mondays") == ["not on mondays (outweigh-one 0.1)"]


def test_a_hook_may_leave_out_its_argument_and_its_answer(hooks_of):
    assert hooks_of("def outweigh_check_combination(): pass").check_combination("plan") == []


def test_a_hook_that_raises_is_named(hooks_of):
    hooks = hooks_of("def outweigh_run_finished(report): report['missing']")
    with pytest.raises(
        RunError,
        match="plugin outweigh-one 0.1 failed in outweigh_run_finished: KeyError: 'missing'",
    ):
        hooks.call("outweigh_run_finished", {})


def test_one_string_is_one_refusal(hooks_of):
    hooks = hooks_of("def outweigh_check_combination(plan): return 'no'")
    assert hooks.check_combination(None) == ["no (outweigh-one 0.1)"]


def test_observers_are_called(hooks_of):
    hooks = hooks_of(
        """
        def outweigh_engine_built(engine): engine.append("built")
        def outweigh_run_finished(report): report["seen"] = True
        """
    )
    engine, report = [], {}
    hooks.call("outweigh_engine_built", engine)
    hooks.call("outweigh_run_finished", report)
    assert (engine, report) == (["built"], {"seen": True})
