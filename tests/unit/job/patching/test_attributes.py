"""Functions replaced and restored where they are stored: every kind of method, every kind of owner, in any order."""

import functools
import itertools
import sys
import types

import pytest
import torch

from msprobe_megatron.job.patching.attributes import Attribute, PatchError, add_wrapper, remove_wrapper
from msprobe_megatron.job.patching.patch_set import Patch, PatchSet


class Base:
    @classmethod
    def of_class(cls, x):
        return [cls.__name__, x]

    @staticmethod
    def static(x):
        return ["static", x]

    def method(self, x):
        return [type(self).__name__, x]

    @property
    def size(self):
        return 3


class Child(Base):
    pass


class Grandchild(Child):
    pass


class Host:
    @classmethod
    def apply(cls, x):
        return [cls.__name__, x]


def marking(mark):
    return lambda function: lambda *args, **kwargs: [mark, *function(*args, **kwargs)]


def by_patch_set(owner, name):
    """Patch `owner.name` as a declared patch does; returns the way back."""
    module = types.ModuleType("host_of_test")
    module.owner = owner
    sys.modules["host_of_test"] = module

    def wrap(original, events):
        return lambda *args, **kwargs: ["kit", *original(*args, **kwargs)]

    patches = PatchSet([Patch("p", (f"host_of_test:owner.{name}",), wrap, phase="functions", why="")], None)
    patches.apply()
    assert patches.ledger()[0]["state"] == "bound"
    return patches.revert


def by_wrapper(owner, name):
    wrapper = marking("kit")
    add_wrapper(owner, name, wrapper)
    return lambda: remove_wrapper(owner, name, wrapper)


@pytest.fixture(params=[by_patch_set, by_wrapper])
def patched(request):
    yield request.param
    sys.modules.pop("host_of_test", None)


@pytest.mark.parametrize("owner", [Base, Child])
@pytest.mark.parametrize("name", ["of_class", "static", "method"])
def test_methods_of_every_kind_bind_right_on_class_and_instance(patched, owner, name):
    """`Child` inherits all of them; `Grandchild` inherits the replacement."""
    stored = {cls: dict(vars(cls)) for cls in (Base, Child, Grandchild)}
    revert = patched(owner, name)
    for cls in (owner, Grandchild):
        expected = ["kit", "static" if name == "static" else cls.__name__, 1]
        assert getattr(cls(), name)(1) == expected
        if name != "method":
            assert getattr(cls, name)(1) == expected
        else:
            assert cls.method(cls(), 1) == expected
    if owner is Child:
        assert getattr(Base(), name)(1)[0] != "kit"
    revert()
    assert {cls: dict(vars(cls)) for cls in (Base, Child, Grandchild)} == stored
    assert getattr(owner(), name)(1) == ["static" if name == "static" else owner.__name__, 1]


def test_a_function_of_a_module(patched):
    module = types.ModuleType("some_module")
    original = module.work = lambda x: ["work", x]
    revert = patched(module, "work")
    assert module.work(1) == ["kit", "work", 1]
    revert()
    assert module.work is original


@pytest.mark.parametrize("name", ["of_class", "static", "method"])
def test_an_instance_gets_and_loses_the_replacement_alone(name):
    one, other = Child(), Child()
    undo = by_wrapper(one, name)
    assert getattr(one, name)(1) == ["kit", "static" if name == "static" else "Child", 1]
    assert getattr(other, name)(1)[0] != "kit"
    undo()
    assert vars(one) == {}


def test_an_attribute_of_the_instance_itself_is_put_back():
    one = Child()
    original = one.method = lambda x: ["own", x]
    undo = by_wrapper(one, "method")
    assert one.method(1) == ["kit", "own", 1]
    undo()
    assert vars(one)["method"] is original


def test_an_instance_that_forwards_to_another_one():
    class Proxy:
        def __init__(self, inner):
            object.__setattr__(self, "inner", inner)

        def __getattr__(self, name):
            return getattr(self.inner, name)

        def __setattr__(self, name, value):
            setattr(self.inner, name, value)

    inner = Child()
    proxy = Proxy(inner)
    undo = by_wrapper(proxy, "method")
    assert proxy.method(1) == ["kit", "Child", 1]
    assert vars(inner) == {}
    undo()
    assert "method" not in vars(proxy) and proxy.method(1) == ["Child", 1]


@pytest.mark.parametrize("owner", [Base, Child, Child()], ids=["own", "inherited", "instance"])
def test_a_property_is_refused_with_a_sentence(owner):
    sentence = r"size is a property; accepted: a function, a static method or a class method"
    with pytest.raises(PatchError, match=sentence):
        Attribute(owner, "size")
    with pytest.raises(PatchError, match=sentence):
        add_wrapper(owner, "size", marking("kit"))


def test_a_property_is_a_line_of_the_ledger(monkeypatch):
    module = types.ModuleType("host_of_test")
    module.Child = Child
    monkeypatch.setitem(sys.modules, "host_of_test", module)
    patches = PatchSet([Patch("p", ("host_of_test:Child.size",), marking, phase="functions", why="")], None)
    patches.apply()
    (line,) = patches.ledger()
    assert line["state"] == "absent" and line["reason"].startswith("Child.size is a property; accepted:")
    assert Child().size == 3


@pytest.mark.parametrize(("owner", "words"), [(Child, "Child has no gone"), (Child(), "an instance of Child has no")])
def test_what_is_not_there_is_refused(owner, words):
    with pytest.raises(PatchError, match=words):
        Attribute(owner, "gone")


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_any_order_leaves_the_original_and_no_chain(order):
    original = Host.__dict__["apply"]
    wrappers = [marking(mark) for mark in "abc"]
    for _ in range(3):
        for wrapper in wrappers:
            add_wrapper(Host, "apply", wrapper)
        add_wrapper(Host, "apply", wrappers[1])
        assert Host.apply(1) == ["c", "b", "a", "Host", 1]
        left = [0, 1, 2]
        for index in order:
            remove_wrapper(Host, "apply", wrappers[index])
            left.remove(index)
            assert Host.apply(1) == [*("abc"[i] for i in reversed(left)), "Host", 1]
        remove_wrapper(Host, "apply", wrappers[0])
        assert Host.__dict__["apply"] is original


def test_plain_functions_of_torch():
    original = torch.relu
    wrapper = marking("x")
    add_wrapper(torch, "relu", wrapper)
    assert torch.relu is not original
    remove_wrapper(torch, "relu", wrapper)
    assert torch.relu is original


@pytest.mark.parametrize("named", [True, False], ids=["functools.wraps", "without a trace"])
def test_what_other_code_put_on_top_stays(named):
    one = Child()
    wrapper = marking("kit")
    add_wrapper(one, "method", wrapper)
    inner = one.method

    def foreign(x):
        return ["other", *inner(x)]

    one.method = functools.wraps(inner)(foreign) if named else foreign
    remove_wrapper(one, "method", wrapper)
    assert one.method(1)[0] == "other"
    add_wrapper(one, "method", wrapper)
    # Ours is seen below a wrapper that names it, and not wrapped a second time.
    assert one.method(1)[:2] == (["other", "kit"] if named else ["kit", "other"])
