"""The models of the seed, small and healthy, in every mode and stage: nothing is reported of any of them."""

import pytest

from tests.support.forked import run_forked
from tests.unit.job.features.perturb.faulty import found

_MODES = ("improve_precision", "add_noise", "bit_noise", "change_value", "no_change", "to_cpu")
_VARIANTS = {
    f"{stage}_{mode}": {"perturb": {"mode": mode, "stage": stage, "budget": "all"}}
    for stage in ("forward", "backward")
    for mode in _MODES
}


def _train(name, out):
    from dataclasses import replace

    from msprobe_megatron.lab.bench.clockwork.turns import Workload, measure, silent
    from msprobe_megatron.lab.bench.models.nets import NETS, measure_net
    from msprobe_megatron.lab.bench.models.workloads import workload_of

    if name in NETS:
        return len(measure_net(Workload(name, "", 1, 2), _VARIANTS, out, silent))
    return len(measure(replace(workload_of(name, 1, 2), warm_up=1), _VARIANTS, out))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["llama2", "aquila2", "baichuan2", "bloom", "internlm", "qwen", "gemma", "resnet", "dit"]
)
def test_nothing_is_reported_of_a_healthy_model(tmp_path, name):
    assert run_forked(1, _train, name, tmp_path, timeout=300) == [1 + len(_VARIANTS)]
    for variant in _VARIANTS:
        words, rows = found(tmp_path / f"{name}_{variant}_0")
        assert words == [], variant
        assert rows > 20, variant
