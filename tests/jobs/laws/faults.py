"""All faults that are planted for the laws, and training with one of them inside.

Those of tests/jobs/compare/faults.py that leave a trace in one run are used here too.
"""

from __future__ import annotations

from tests.jobs.compare import faults as compared
from tests.jobs.laws import faults_model, faults_training
from tests.jobs.laws.planting import Fault
from tests.jobs.laws.unlisted import UNLISTED


def train(argv: list[str], fault: str) -> list[float]:
    """Train in this rank with a fault inside."""
    from msprobe_megatron.lab.demo.pretrain_gpt import run
    from msprobe_megatron.lab.demo.train import Callbacks

    chosen = FAULTS[fault]
    chosen.before()
    return run(argv, Callbacks(ready=chosen.ready)).losses


def _compared(name: str) -> Fault:
    fault = compared.FAULTS[name]
    return Fault(fault.before, lambda chunks, optimizer: fault.ready(chunks))


FAULTS = {
    "none": Fault(),
    **faults_model.FAULTS,
    **faults_training.FAULTS,
    **{name: fault for name, (_, _, fault) in UNLISTED.items()},
    "softmax_scale_of_a_rank": _compared("attention_scale"),
    "rotary_without_offset": _compared("rotary_without_offset"),
    "no_reduction": _compared("no_reduction"),
    "norms_not_reduced": _compared("norms_not_reduced"),
    "stale_weight": _compared("stale_weight"),
    "layer_offset": _compared("layer_offset"),
    "expert_not_loaded": _compared("expert_not_loaded"),
    "gate_and_up": _compared("gate_and_up"),
    "no_max_over_ranks": _compared("no_max_over_ranks"),
    "dropped_microbatch": _compared("dropped_microbatch"),
    "rows_swapped": _compared("rows_swapped"),
    "expert_rows_swapped": _compared("expert_rows_swapped"),
}
