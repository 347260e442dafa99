"""How API calls are cut, derived from shapes and from which ranks hold equal values."""

from pathlib import Path

from msprobe_megatron.analysis.compare.call_layouts import Derivation, is_sum
from msprobe_megatron.analysis.compare.call_tensors import CallTensor, Side, function_of
from msprobe_megatron.analysis.load.run import Run

_KEY = ("activation", "decoder.layers.0.mlp/torch.add.0", "output", "")
_INPUT = ("activation", "decoder.layers.0.mlp/torch.add.0", "input", "0")
_NEXT = ("activation", "decoder.layers.1.mlp/torch.add.0", "output", "")


def _tensor(shape, *, op="torch.add", unequal=(), equal=(), total=8.0, dtype="float32", varies=True):
    numel = float(max(1, len(shape)) * 64)
    return CallTensor(
        op, dtype, tuple(shape), 1, True, False, varies, total, 64.0, numel, unequal=set(unequal), equal=set(equal)
    )


def _side(tensors, *, calls=1, **sizes):
    counts = {function_of(name): (calls, calls) for _, name, _, _ in tensors}
    return Side(Run(Path("run"), {"sizes": sizes}), tensors, counts)


def _specs(left, right, **sizes):
    single, other = Derivation(_side(left), _side(right, **sizes)).specs()
    return {key: (single[key], other[key]) for key in single}


def test_a_part_of_the_other_runs_elements_is_a_cut():
    specs = _specs({_KEY: _tensor((16, 2, 32))}, {_KEY: _tensor((16, 2, 16), unequal=("tp",))}, tp=2)
    assert specs[_KEY] == ("b[dp:samples]", "b[dp:samples] cut[tp]")


def test_of_two_axes_of_one_size_the_one_with_equal_ranks_is_not_cut():
    other = _tensor((8, 2, 32), unequal=("cp",), equal=("tp",))
    specs = _specs({_KEY: _tensor((16, 2, 32))}, {_KEY: other}, tp=2, cp=2)
    assert specs[_KEY][1] == "b[dp:samples] cut[cp]"


def test_values_that_do_not_tell_two_axes_apart_leave_it_open():
    other = _tensor((8, 2, 32), unequal=("cp", "tp"))
    specs = _specs({_KEY: _tensor((16, 2, 32))}, {_KEY: other}, tp=2, cp=2)
    assert specs[_KEY][1] == "?API call: the axis that it is cut over cannot be told from shapes"


def test_equal_ranks_are_replicas_and_equal_microbatches_hold_no_samples():
    weight = _tensor((32,), equal=("tp",), varies=False)
    specs = _specs({_KEY: _tensor((32,), varies=False)}, {_KEY: weight}, tp=2)
    assert specs[_KEY] == ("d", "d")


def test_summands_must_add_up():
    golden = {_KEY: _tensor((16, 2, 32), op="torch.matmul", total=8.0)}
    for total, shard in ((8.0, "b[dp:samples] summands[tp]"), (8.2, "?API call: its ranks hold different values")):
        run = {_KEY: _tensor((16, 2, 32), op="torch.matmul", total=total, unequal=("tp",))}
        assert _specs(golden, run, tp=2)[_KEY][1] == shard
        assert is_sum(shard) == (total == 8.0)


def test_an_operator_that_sums_nothing_has_no_summands():
    run = {_KEY: _tensor((16, 2, 32), unequal=("tp",))}
    specs = _specs({_KEY: _tensor((16, 2, 32))}, run, tp=2)
    assert specs[_KEY][1] == "?API call: its ranks hold different values"


def test_ranks_that_differ_must_be_equal_if_the_inputs_are():
    golden = {_KEY: _tensor((16, 2, 32)), _INPUT: _tensor((16, 2, 32))}
    run = {_KEY: _tensor((16, 2, 32), unequal=("tp",)), _INPUT: _tensor((16, 2, 32), equal=("tp",))}
    assert _specs(golden, run, tp=2)[_KEY][1] == "b[dp:samples]"


def test_ranks_that_differ_must_be_equal_if_those_of_another_layer_are():
    golden = {_KEY: _tensor((16, 2, 32)), _NEXT: _tensor((16, 2, 32))}
    run = {_KEY: _tensor((16, 2, 32), equal=("tp",)), _NEXT: _tensor((16, 2, 32), unequal=("tp",))}
    assert _specs(golden, run, tp=2)[_NEXT][1] == "b[dp:samples]"


def test_another_number_of_calls_is_not_the_same_call():
    left, right = _side({_KEY: _tensor((4,))}), _side({_KEY: _tensor((4,))}, calls=2, tp=2)
    reason = "?API call: the function is called more often in one run than in the other"
    assert Derivation(left, right).specs() == ({_KEY: reason}, {_KEY: reason})
