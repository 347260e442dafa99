"""The tensors at the peak of memory: all that are alive, none that is not, by who made them."""

import torch

from msprobe_megatron.job.sites.calls.arguments import untraced
from msprobe_megatron.lab.bench.profiles.callers import caller
from msprobe_megatron.lab.bench.profiles.tensor_memory import Held, LiveTensors, beyond, tensors_text

HERE = __name__
MIB = 1 << 20


def ones(mebibytes):
    return torch.ones(mebibytes * MIB // 4)


def test_the_highest_moment_is_the_one_that_counts():
    with LiveTensors() as live:
        kept = ones(1)
        gone = ones(8)
        del gone
        live.begin()
        first = ones(2)
        second = first * 2
        view = second.view(2, -1)
        del first, second
        last = kept + 1
    maker = f"{HERE}.test_the_highest_moment_is_the_one_that_counts → mul"
    assert live.at_peak[maker] == Held(1, 2 * MIB), "held by a view"
    assert live.at_peak[f"{HERE}.ones → ones"] == Held(2, 3 * MIB), "what was there before, and what is new"
    assert not any("add" in name for name in live.at_peak), "made when another was gone"
    assert view.numel() and last.numel()


def test_what_a_backward_makes_is_named_by_its_node():
    x = torch.ones(1000, requires_grad=True)
    with LiveTensors() as live:
        live.begin()
        torch.sigmoid(x).sum().backward()
        x.grad.clone()
    assert any(name.startswith("SigmoidBackward0 → ") for name in live.at_peak), live.at_peak


def test_the_kit_is_named_when_it_works_for_itself_and_its_wrappers_are_not():
    wrapper = {"__name__": "msprobe_megatron.job.sites.calls.api", "caller": caller}
    exec("def passing(call):\n    return call('mm')", wrapper)  # noqa: S102  (a function that is of that module)
    passing = wrapper["passing"]
    assert passing(caller) == (f"{HERE}.{_test_name(3)} → mm", False)
    with untraced():
        assert passing(caller) == ("job.sites.calls.api.passing → mm", True)
    measure = {"__name__": "msprobe_megatron.job.measure.once"}
    exec("def see(call):\n    return call('clone')", measure)  # noqa: S102
    assert measure["see"](caller) == ("job.measure.once.see → clone", True)


def _test_name(number):
    return [name for name in globals() if name.startswith("test_")][number - 1]


def test_differences_in_words():
    kit = {"a": Held(3, 30 * MIB), "b": Held(1, MIB), **{f"c{n}": Held(1, MIB // 2) for n in range(10)}}
    plain = {"a": Held(2, 20 * MIB), "b": Held(2, 2 * MIB)}
    assert beyond(kit, plain)[0] == ("a", Held(1, 10 * MIB))
    text = tensors_text(kit, plain)
    assert text.startswith("tensors alive at the peak are 36.0 MiB, of plain training 22.0 MiB; beyond those of plain")
    assert "`a` 10.0 MiB in 1, `c0` 0.5 MiB in 1" in text and text.endswith("3 others 1.5 MiB") and "`b`" not in text
    assert tensors_text(plain, plain).endswith("of plain training 22.0 MiB")
    assert "; the other 6.0 MiB of the 20.0 MiB measured are no tensor that is alive" in tensors_text(
        kit, plain, 20 * MIB
    )
    assert tensors_text(kit, plain, 10 * MIB) == text
