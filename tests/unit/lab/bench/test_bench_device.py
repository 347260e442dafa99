"""`bench device`: counts are those of an independent count, the floor that of the inventory it is calculated from."""

import json
import sys
from dataclasses import replace

import pytest

from msprobe_megatron.cli import main
from msprobe_megatron.lab.bench.models.floor import CARDS, MODELS, Card, Decoder, Predicted, grouped
from msprobe_megatron.lab.bench.options import Options
from msprobe_megatron.lab.bench.peer.columns import run_worker
from msprobe_megatron.lab.bench.tables import device as table

KEYS = ("launches_per_tensor", "host_us_per_row", "syncs_per_step", "bytes_per_element")
PLAIN = Decoder("plain", 4, 64, 192, grouped(64, 64, 64, core=False), 1024, 32, 1)
"""The model that the bench trains, as the floor describes models."""


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    """What the command prints for two levels, in a few steps."""
    folder = tmp_path_factory.mktemp("bench")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(table, "_STEPS", 2)
        patch.setattr(table, "VARIANTS", {name: table.VARIANTS[name] for name in ("L0", "mix")})
        return {line["name"]: line for line in table.bench(Options(folder))}


@pytest.fixture(scope="module")
def dispatched(tmp_path_factory):
    """The same of L0 counted by what torch dispatches, as on a device without a ledger."""
    folder = tmp_path_factory.mktemp("dispatched") / "L0"
    task = {"tool": "ours", "size": "h64", "steps": 2, "folder": str(folder), "package": table._PACKAGE}
    task |= {"config": table.VARIANTS["L0"], "count_by": "dispatch"}
    return run_worker(sys.executable, task, "device_worker.py")


def test_the_ledger_of_the_device_and_a_count_of_operators_agree(lines, dispatched):
    line, rows = lines["L0"], dispatched["rows"]
    added = {key: dispatched["with"][key] - dispatched["plain"][key] for key in ("launches", "syncs", "bytes")}
    assert line["rows_per_step"] == rows > 200
    assert line["launches_per_step"] == added["launches"] > 100
    assert line["launches_per_tensor"] == pytest.approx(added["launches"] / rows, abs=1e-3)
    assert line["syncs_per_step"] == added["syncs"] == 0
    assert line["bytes_per_element"] == pytest.approx(added["bytes"] / dispatched["elements"], abs=1e-3)


def test_each_line_has_the_figures_that_were_asked_for(lines):
    for name in ("L0", "mix"):
        assert all(isinstance(lines[name][key], int | float) for key in KEYS)
        assert lines[name]["table"] == "counted on the simulated device (no GPU or NPU)"
    assert lines["mix"]["launches_per_step"] > lines["L0"]["launches_per_step"]
    predicted = [line for name, line in lines.items() if name.startswith("predicted:")]
    assert len(predicted) == 2 * len(CARDS) * len(MODELS)
    assert {line["table"] for line in predicted} == {"predicted by calculation, not measured"}
    assert all({line["name"].split(":")[1], line["name"].split(":")[2]} == set(line["notes"]) for line in predicted)


def test_the_inventory_of_the_floor_is_what_the_device_counts(lines):
    """Bytes that L0 reads of the bench's own model, in float32: calculated, and counted by the device."""
    activations, _, launches = PLAIN.reads(4, 4)
    # A gradient that both arms of a residual get is one tensor, which the inventory counts twice.
    assert activations == pytest.approx(lines["L0"]["activation_bytes"], rel=0.03)
    # Biases, which large models have not, are measured too: 16 and their gradients.
    assert launches + 2 * 16 == pytest.approx(lines["L0"]["launches_per_step"], rel=0.05)


def test_the_models_have_the_parameters_that_were_published():
    billions = {
        model.name: [replace(model, tp=1, pp=1, ep=1).weights(active=active).elements / 1e9 for active in (False, True)]
        for model in MODELS
    }
    assert billions["Llama-3 8B"] == [pytest.approx(8.03, abs=0.01)] * 2
    assert billions["Llama-3 70B"] == [pytest.approx(70.6, abs=0.1)] * 2
    assert billions["DeepSeek-V3"] == [pytest.approx(671, abs=0.5), pytest.approx(37, abs=0.7)]


def test_a_prediction_is_bytes_over_bandwidth_and_launches():
    card = Card("card", bytes_s=1e12, flops=1e15, launch_us=5.0)
    model = Decoder("model", 1, 8, 32, grouped(8, 8, 8), 0, 100, 2, pp=2)
    # Half a layer: 6 tensors of 8, three of 8, one of 24, one of 64, one of 32, and the core's output, for 200 tokens,
    # forward and backward in two bytes; weights of 4 and gradients of 2 x 8 + 8 x 24 + 8 x 8 + 3 x 8 x 32 in six.
    activations = (6 * 8 + 3 * 8 + 24 + 8 + 64 + 32) / 2 * 200 * 2 * 2
    weights = (2 * 8 + 8 * 24 + 8 * 8 + 3 * 8 * 32) / 2
    line = Predicted(model, card, "L0").line()
    assert line["bytes_read"] == activations + weights * 6
    assert line["launches"] == 13 / 2 * 2 * 2 + 6 / 2 * 2
    step = (6 * weights * 200 + 6 * 0.5 * 100 * 8 * 200) / (1e15 * 0.45)
    cost = line["bytes_read"] / (1e12 * 0.8) + line["launches"] * 5e-6
    assert line["predicted_overhead"] == pytest.approx(cost / step, rel=1e-4)
    twice = Predicted(model, card, "mix", 2.0, 3.0).line()
    assert twice["bytes_read"] == 2 * activations + weights * 6
    assert twice["launches"] == 3 * line["launches"]


def planted(kind):
    """Counts of the same work by both ways, with one launch, wait or copy more than nothing."""
    import torch

    from msprobe_megatron.hosts.rehearsal import simulated_device
    from msprobe_megatron.lab.bench.peer.device_worker import Dispatched

    x, target = torch.ones(8, device="npu"), torch.empty(8, pin_memory=True)

    def work():
        x.view(2, 4)
        if kind == "launch":
            x.add_(1)
        elif kind == "item":
            x[0].item()
        elif kind == "blocking":
            target.copy_(x)
        elif kind == "queued":
            target.copy_(x, non_blocking=True)
        elif kind == "event":
            event = torch.npu.Event()
            event.record()
            event.synchronize()

    with simulated_device.Trace() as trace:
        work()
    with Dispatched("npu") as mode:
        work()
    return [[int(counts[key]) for key in ("launches", "syncs")] for counts in (trace.counts, mode.counts)]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("", [0, 0]), ("launch", [1, 0]), ("item", [0, 1]), ("blocking", [1, 1]), ("queued", [1, 0]), ("event", [0, 1])],
)
def test_each_kind_of_cost_is_counted_by_both(device, kind, expected):
    assert device.run(planted, kind) == [[expected, expected]]


def composed():
    """The kit's operator, composed of others as where there is no kernel, counted as on a device without a ledger."""
    import torch

    from msprobe_megatron.job.measure import aten, native, operator
    from msprobe_megatron.lab.bench.peer.device_worker import Dispatched

    native.load()
    x, row = torch.ones(64, device="npu"), torch.zeros(16, dtype=torch.int64, device="npu")
    library = torch.library.Library("msprobe", "FRAGMENT")
    library.define("composed(Tensor x, Tensor(a!) row) -> ()")
    library.impl("composed", lambda x, row: aten.measure_into_row(x, 1, row, wide=False), "PrivateUse1")
    torch.ops.msprobe.composed(x, row)  # makes its tables
    operator.measure_into_slot(x, row, False, operator.STATISTICS, -1)
    with Dispatched("npu") as one:
        operator.measure_into_slot(x, row, False, operator.STATISTICS, -1)
    with Dispatched("npu") as several:
        torch.ops.msprobe.composed(x, row)
    return [[float(mode.counts["launches"]), float(mode.counts["bytes"])] for mode in (one, several)]


def test_an_operator_of_the_kit_is_one_launch_or_those_that_it_is_composed_of(device):
    """The lean form is at most six operations; the bytes of its temporaries are not known, and not zero."""
    [[one, several]] = device.run(composed)
    assert one == [1, 64 * 4 + 16 * 8]
    assert 5 <= several[0] <= 6
    assert several[1] != several[1]  # NaN


def test_the_peer_runs_on_the_same_device(peer, tmp_path, monkeypatch):
    """The published msprobe reads four figures back a tensor; what it has not is said, not left out."""
    monkeypatch.setattr(table, "_STEPS", 1)
    monkeypatch.setattr(table, "VARIANTS", {name: table.VARIANTS[name] for name in ("L0", "perturb")})
    monkeypatch.setattr(table, "_line", lambda name, *rest: _only_peers(name, *rest))
    found = {line["name"]: line for line in table.bench(Options(tmp_path, peer_python=str(peer / "python")))}
    assert found["peer:L0"]["launches_per_tensor"] == pytest.approx(4, abs=0.1)
    assert found["peer:L0"]["syncs_per_step"] > 500
    assert found["peer:perturb"]["launches_per_tensor"] is None
    assert "free benchmark" in found["peer:perturb"]["notes"]["peer:perturb"]


def _only_peers(name, *rest, line=table._line):
    return line(name, *rest) if name.startswith("peer:") else table._none(name, "not measured here") | _FIGURES


_FIGURES = {"activation_bytes": 1, "launches_per_step": 1}


def test_the_command_prints_both_tables(lines, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(table, "bench", lambda options: list(lines.values()))
    assert main(["bench", "device", "--out", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert text.index("counted on the simulated device") < text.index("predicted by calculation, not measured")
    assert "H100: 3.35 TB/s" in text
    written = (tmp_path / "device.md").read_text()
    assert "**Predicted by calculation, not measured**" in written and "Llama-3 70B: TP8 PP4" in written
    assert main(["bench", "device", "--json"]) == 0
    results = json.loads(capsys.readouterr().out)["results"]
    assert all(set(KEYS) <= set(line) for line in results if not line["name"].startswith("predicted:"))
    assert main(["bench", "device", "--model", "llama2"]) == 2
    assert "bench device has no --model" in capsys.readouterr().err
