import functools
import sys
import types

import pytest

from msprobe_megatron.job.patching.attributes import PatchError
from msprobe_megatron.job.patching.patch_set import Patch, PatchSet


@pytest.fixture
def host(monkeypatch):
    """A module as a training framework has them: functions, a class with a static method, a subclass."""
    module = types.ModuleType("megatron_host")

    def work(x):
        return ["work", x]

    class Base:
        @staticmethod
        def forward(ctx, x):
            return ["forward", x]

        def method(self, x):
            return ["method", x]

    class Child(Base):
        pass

    module.work, module.Base, module.Child = work, Base, Child
    alias = types.ModuleType("megatron_alias")
    alias.work = work
    monkeypatch.setitem(sys.modules, "megatron_host", module)
    monkeypatch.setitem(sys.modules, "megatron_alias", alias)
    return module


def tagging(original, events):
    return lambda *args, **kwargs: [events, *original(*args, **kwargs)]


def patch(target, **kwargs):
    return Patch("p", (target,), tagging, phase="functions", why="a test", **kwargs)


def test_apply_wraps_and_revert_restores_identity(host):
    original = host.work
    patches = PatchSet([patch("megatron_host:work")], "kit")
    patches.apply()
    assert host.work(1) == ["kit", "work", 1]
    assert host.work.__wrapped__ is original
    assert host.work.__name__ == "work"
    patches.revert()
    assert host.work is original


def test_applying_twice_is_applying_once(host):
    patches = PatchSet([patch("megatron_host:work")], "kit")
    patches.apply()
    patches.apply()
    assert host.work(1) == ["kit", "work", 1]


def test_static_methods_stay_static_and_inherited_ones_are_taken_back(host):
    raw = vars(host.Base)["forward"]
    patches = PatchSet([patch("megatron_host:Base.forward"), patch("megatron_host:Child.method")], "kit")
    patches.apply()
    assert host.Base.forward(None, 1) == ["kit", "forward", 1]
    assert host.Child().method(2) == ["kit", "method", 2]
    assert host.Base().method(2) == ["method", 2]
    patches.revert()
    assert vars(host.Base)["forward"] is raw
    assert "method" not in vars(host.Child)


def test_aliases_are_swept_and_restored(host):
    original = host.work
    alias = sys.modules["megatron_alias"]
    patches = PatchSet([patch("megatron_host:work", sweep=True)], "kit")
    patches.apply()
    assert alias.work(1) == ["kit", "work", 1]
    patches.revert()
    assert alias.work is original


def test_absent_target_is_a_line_of_the_ledger(host):
    patches = PatchSet([patch("megatron_host:gone"), patch("megatron_nowhere:work")], "kit")
    patches.apply()
    states = [(line["state"], line["reason"]) for line in patches.ledger()]
    assert states == [
        ("absent", "megatron_host has no gone"),
        ("absent", "megatron_nowhere is not imported by the host"),
    ]


def test_required_target_that_is_missing_is_an_error_and_nothing_stays_patched(host):
    original = host.work
    patches = PatchSet([patch("megatron_host:work"), patch("megatron_host:gone", required=True)], "kit")
    with pytest.raises(PatchError, match=r"megatron_host:gone.*megatron-core"):
        patches.apply()
    assert host.work is original


def test_second_target_is_used_where_the_first_does_not_exist(host):
    both = Patch("p", ("megatron_host:gone", "megatron_host:work"), tagging, phase="functions", why="")
    patches = PatchSet([both], "kit")
    patches.apply()
    assert patches.ledger()[0]["target"] == "megatron_host:work"


def test_verify_binds_again_what_was_replaced(host):
    patches = PatchSet([patch("megatron_host:work")], "kit")
    patches.apply()
    host.work = lambda x: ["replaced", x]
    assert patches.verify() == ["megatron_host:work"]
    assert host.work(1) == ["kit", "replaced", 1]


def test_verify_sees_through_wrappers_of_others(host):
    patches = PatchSet([patch("megatron_host:work")], "kit")
    patches.apply()
    inner = host.work

    @functools.wraps(inner)
    def outer(x):
        return ["other", *inner(x)]

    host.work = outer
    assert patches.verify() == []
    assert host.work(1) == ["other", "kit", "work", 1]


def test_revert_under_a_foreign_wrapper_passes_through(host):
    patches = PatchSet([patch("megatron_host:work")], "kit")
    patches.apply()
    inner = host.work
    host.work = lambda x: ["other", *inner(x)]
    patches.revert()
    assert host.work(1) == ["other", "work", 1]
    assert patches.ledger()[0]["state"] == "left"


def test_fired_counts_calls(host):
    patches = PatchSet([patch("megatron_host:work")], "kit")
    patches.apply()
    for _ in range(3):
        host.work(0)
    assert patches.ledger()[0]["fired"] == 3
