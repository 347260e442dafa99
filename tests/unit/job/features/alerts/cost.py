"""What the rules cost the writer thread: `python -m tests.unit.job.features.alerts.cost`.

Not a test: times depend on the machine.
"""

import time

import numpy as np

from msprobe_megatron.config import Alert
from msprobe_megatron.job.features.alerts.feature import AlertRules
from msprobe_megatron.job.record.monitor_files import StepRows
from tests.unit.job.features.alerts.steps import row

ROWS, WARM, STEPS = 1000, 40, 40
RULES = ("nonfinite", "spike", "vanish", "dead_expert")


def milliseconds(*rules: str) -> float:
    """CPU time of one step of calm figures, once the windows are full."""
    rows = [row(f"decoder.layers.{i // 25}.module{i % 25}", slot=i) for i in range(ROWS)]
    random = np.random.default_rng(0)
    steps = [
        StepRows(n, rows, 1 + 0.05 * random.random((ROWS, 5)), np.zeros((ROWS, 4), np.int64))
        for n in range(WARM + STEPS)
    ]
    alerts = AlertRules([Alert(rule) for rule in rules], lambda alert, event: None, print)
    for one in steps[:WARM]:
        alerts.saw(one)
    began = time.thread_time()
    for one in steps[WARM:]:
        alerts.saw(one)
    return (time.thread_time() - began) / STEPS * 1e3


if __name__ == "__main__":
    for rules in (*((rule,) for rule in RULES), RULES):
        print(f"{', '.join(rules)}: {milliseconds(*rules):.2f} ms a step of {ROWS} rows")
