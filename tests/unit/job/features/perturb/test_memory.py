"""What an examination holds at most: the changed input, the second result and a bounded piece; counted, not timed."""

import pytest
import torch
from torch import nn

from msprobe_megatron.job.features.perturb.judge.checks import ULP, CheckedCall, as_msprobe
from msprobe_megatron.job.features.perturb.judge.tolerance import class_of
from msprobe_megatron.job.features.perturb.judge.verdict import WIDTH
from msprobe_megatron.job.features.perturb.run import changed_inputs
from msprobe_megatron.job.features.perturb.run.rerun import Guard, Refused, Rerunner
from msprobe_megatron.job.measure import native, pair
from msprobe_megatron.job.measure.native import library

SIZE = 1 << 21
BYTES = 4 * SIZE
# Of temporaries: a few pieces of 32 or 64 bits.
PIECES = 0.25


def most_alive(work):
    """Bytes of tensors that were alive at once during `work`, over those before it."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        work()
    alive = most = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            alive += event.nbytes()
            most = max(most, alive)
    return most


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch):
    native.load()
    monkeypatch.setattr(changed_inputs, "_PIECE", 1 << 16)
    # Without the compiled kernel a piece is held many times over, in 64 bits.
    monkeypatch.setattr(pair, "_PIECE", 1 << 14 if library.kernel() is None else 1 << 16)


def case_of(api, function, x, *more):
    return CheckedCall(
        api, class_of(api), (x, *more), {}, function(x, *more), lambda y: y, lambda a, k: function(*a), 16, 1
    )


CHECKS = {
    **{f"ulp {mode}": ULP[mode] for mode in ("improve_precision", "add_noise", "bit_noise", "no_change")},
    **{f"msprobe {mode}": as_msprobe(mode) for mode in ("add_noise", "bit_noise", "no_change")},
}


@pytest.mark.parametrize("name", CHECKS)
def test_of_a_sum_over_all_gradients_one_copy(name):
    """As large as it gets: the flat buffer of all gradients, of which the job takes the norm."""
    case = case_of("torch.Tensor.norm", torch.Tensor.norm, torch.randn(SIZE))
    line = torch.full((WIDTH,), torch.nan, dtype=torch.float64)
    copies = most_alive(lambda: CHECKS[name](case, line)) / BYTES
    assert copies <= PIECES + ("noise" in name)


@pytest.mark.parametrize("name", CHECKS)
def test_of_an_elementwise_call_its_input_and_its_result(name):
    case = case_of("torch.exp", torch.exp, torch.randn(64, SIZE // 64))
    line = torch.full((WIDTH,), torch.nan, dtype=torch.float64)
    copies = most_alive(lambda: CHECKS[name](case, line)) / BYTES
    assert 0.99 <= copies <= PIECES + 1 + ("noise" in name)


@pytest.mark.parametrize("way", ["ulp", "msprobe"])
def test_tensors_of_another_layout_are_not_copied_whole(way):
    """A turned input becomes its changed copy, a turned result is compared by pieces."""
    check = (ULP if way == "ulp" else CHECKS)["add_noise" if way == "ulp" else "msprobe add_noise"]
    case = case_of("torch.exp", torch.exp, torch.randn(2048, SIZE // 2048).t())
    case.live = case.live.contiguous()
    line = torch.full((WIDTH,), torch.nan, dtype=torch.float64)
    assert most_alive(lambda: check(case, line)) / BYTES <= 2 + PIECES


@pytest.mark.parametrize("mode", ["improve_precision", "to_cpu"])
def test_a_result_of_16_bits_is_widened_by_pieces(mode):
    """Changed input and second result have 32 bits; the live one is not copied besides."""
    x = torch.randn(64, SIZE // 64).bfloat16()
    case = case_of("torch.exp", torch.exp, x)
    line = torch.full((WIDTH,), torch.nan, dtype=torch.float64)
    assert most_alive(lambda: as_msprobe(mode)(case, line)) / BYTES <= 2 + PIECES


def test_what_a_repeated_module_makes_on_the_way_is_given_back():
    """The guard remembers what was made under it, not the memory."""

    class Chain(nn.Module):
        def forward(self, x):
            for _ in range(12):
                x = x * 1.5
            return x

    x = torch.randn(SIZE)
    module = Chain()
    assert most_alive(lambda: Rerunner().run(module.forward, (x,), {}, watch=True)) / BYTES <= 2 + PIECES


def test_the_guard_knows_its_own_memory_from_that_of_others():
    """Memory that was freed under the guard and taken again by somebody else is not its own."""
    live = torch.zeros(1000)
    with Guard():
        for _ in range(50):
            own = live + 1
            own.add_(1)
            del own
        with pytest.raises(Refused, match="mutates"):
            live.add_(1)
    assert torch.equal(live, torch.zeros(1000))
