"""How often a file of the monitor that is not full is written: large ones less often, so that it stays cheap."""

import numpy as np

from msprobe_megatron.job.record import monitor_files
from msprobe_megatron.run_directory.schema import Row


class Directory:
    def write_table(self, path, table):
        return 100


def test_large_files_are_refreshed_less_often(monkeypatch):
    clock, cost = [0.0], [0.0]

    def spent():
        cost[0] += 0.1  # what writing takes
        return cost[0]

    monkeypatch.setattr(monitor_files.time, "thread_time", spent)
    identity = dict.fromkeys(("rank", "tp", "pp", "vpp", "dp", "cp", "ep", "etp"), 0)
    file = monitor_files.MonitorFile(now=lambda: clock[0])
    rows = [Row(0, None, "optimizer", 0, "loss", "x", "value", "", "", -1, "float64", (), (), "", 1, 0)]

    def step(number):
        file.add(monitor_files.StepRows(number, rows, np.zeros((1, 5)), np.zeros((1, 4), np.int64)))

    step(0)
    assert not file.due()
    clock[0] = monitor_files.REFRESH_SECONDS
    assert file.due()
    file.write(Directory(), identity)
    step(1)
    clock[0] += 0.1 / monitor_files.REFRESH_SHARE - 1
    assert not file.due(), "it took a tenth of a second"
    clock[0] += 2
    assert file.due()
