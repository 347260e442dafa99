"""What a run is going to write is said once, after its first step."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from msprobe_megatron import attach
from msprobe_megatron.config import from_document
from msprobe_megatron.config.selection import RankSelection, parse_steps
from msprobe_megatron.job.features.size_estimate import SizeEstimate, readable, requested_steps
from msprobe_megatron.topology.coordinates import Coordinates


def trained(folder, text, iterations, arguments=None):
    """Some steps of a small net; the ledger of the run, and the bytes of each step's rows."""
    config = from_document({"output": str(folder / "out"), **text}, "probe.yaml")
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attach(model, optimizer, config, arguments=arguments) as session:
        for _ in range(iterations):
            model(torch.ones(3, 4)).sum().backward()
            optimizer.step()
    rows = [path.stat().st_size for path in sorted((folder / "out").glob("step_*/rank_00000/records.parquet"))]
    return session.ledger(), rows


def test_the_first_step_tells_what_all_will_take(tmp_path, capsys):
    ledger, rows = trained(tmp_path, {"steps": "1-3", "dump": {"level": "L0"}}, 5)
    sites = (tmp_path / "out/step_000001/rank_00000/sites.json").stat().st_size
    assert ledger["announced"] == {"bytes_a_step": rows[0], "steps": 3, "bytes": 3 * rows[0] + sites}
    told = [line for line in capsys.readouterr().out.splitlines() if "per recorded step" in line]
    assert told == [
        f"msprobe: dump: ~{readable(rows[0])} per recorded step on this rank,"
        f" ~{readable(3 * rows[0] + sites)} for the 3 requested steps"
    ]


def test_saved_tensors_count(tmp_path):
    ledger, rows = trained(tmp_path, {"steps": "0", "dump": {"level": "L0", "task": "tensor"}}, 1)
    packs = sum(path.stat().st_size for path in (tmp_path / "out").glob("step_000000/*/*.safetensors"))
    assert packs > 0
    assert ledger["announced"]["bytes_a_step"] == rows[0] + packs


def test_without_an_end_there_is_no_sum(tmp_path, capsys):
    ledger, rows = trained(tmp_path, {"dump": {"level": "L0"}}, 2)
    assert ledger["announced"] == {"bytes_a_step": rows[0], "steps": None, "bytes": None}
    told = capsys.readouterr().out
    assert "per recorded step" in told and "requested" not in told


def test_the_length_of_the_job_is_an_end(tmp_path):
    ledger, _ = trained(tmp_path, {"dump": {"level": "L0"}}, 2, SimpleNamespace(train_iters=40))
    assert ledger["announced"]["steps"] == 40


def test_the_monitor_tells_with_its_first_file(tmp_path, capsys):
    ledger, _ = trained(tmp_path, {"monitor": {"every": 2}}, 24, SimpleNamespace(train_iters=40))
    (file,) = (tmp_path / "out").glob("monitor/*/*.parquet")
    each = file.stat().st_size // 12
    assert ledger["monitor"]["announced"] == {"bytes_a_step": each, "steps": 20, "bytes": 20 * each}
    assert "monitor: ~" in capsys.readouterr().out


def test_a_monitor_that_stops_by_itself(tmp_path):
    ledger, _ = trained(tmp_path, {"monitor": {"collect_times": 11}}, 14)
    assert ledger["monitor"]["announced"]["steps"] == 11


def job(disk):
    config = SimpleNamespace(ranks=RankSelection(), limits=SimpleNamespace(disk=disk))
    return SimpleNamespace(where=Coordinates(rank=0, world=1), config=config, arguments=None)


def test_a_limit_that_will_be_reached_is_said(capsys):
    estimate = SizeEstimate(job(disk=10_000), "dump", "recorded")
    estimate.report(1_500, 100)
    assert "limits.disk leaves room for 10.0 kB, ~6 steps" in capsys.readouterr().out
    estimate.report(9, 9)
    assert estimate.ledger["bytes"] == 150_000, "it is said once"


@pytest.mark.parametrize(
    ("steps", "first", "iterations", "count"),
    [
        ("10,20-22", 10, None, 4),
        ("10,20-22", 11, None, 3),
        ("0-1000000000/1000", 0, None, 1_000_001),
        ("all", 5, None, None),
        ("all", 5, 20, 15),
        ("0-99/10", 0, 35, 4),
        ("50-60", 50, 20, 0),
    ],
)
def test_steps_that_are_to_come(steps, first, iterations, count):
    given = SimpleNamespace(arguments=SimpleNamespace(train_iters=iterations))
    assert requested_steps(given, parse_steps(steps), first) == count
    if count is not None and count < 1000:
        chosen = [n for n in range(first, min(iterations or 1000, 1000)) if n in parse_steps(steps)]
        assert len(chosen) == count


@pytest.mark.parametrize(("count", "text"), [(0, "0 B"), (999, "999 B"), (57_397, "57.4 kB"), (36 * 10**8, "3.6 GB")])
def test_readable(count, text):
    assert readable(count) == text


def test_ranks_share_the_limit_and_a_run_without_an_end_reaches_it(capsys):
    shared = job(disk=40_000)
    shared.where = Coordinates(rank=0, world=4)
    for bytes_a_step, steps, room in ((1_500, 6, ""), (1_500, 7, "10.0 kB, ~6 steps"), (1_500, None, "10.0 kB")):
        SizeEstimate(shared, "dump", "recorded").report(bytes_a_step, steps)
        told = capsys.readouterr().out
        assert (f"limits.disk leaves room for {room}" in told) if room else ("limits.disk" not in told)
