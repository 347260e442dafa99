"""`msprobe-megatron init`: every symptom's file is valid, and what is predicted is near what a job really writes."""

import json
import subprocess
import sys

import pytest

from msprobe_megatron.analysis.settings.prediction import predict, shape_of
from msprobe_megatron.cli import main
from msprobe_megatron.cli.commands import COMMANDS
from msprobe_megatron.config import from_document, load
from msprobe_megatron.config.document import parse_document_text
from msprobe_megatron.config.symptoms import SYMPTOMS

LAUNCH = """#!/bin/bash
MODEL="--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32"
torchrun --nproc_per_node 1 --nnodes 1 pretrain_gpt.py $MODEL \\
    --micro-batch-size 2 --global-batch-size 8 --train-iters 3
"""


@pytest.mark.parametrize("symptom", SYMPTOMS)
def test_the_file_of_every_symptom_is_valid_and_says_what_comes_next(capsys, tmp_path, symptom):
    (tmp_path / "launch.sh").write_text(LAUNCH)
    assert main(["init", symptom, "--launch", str(tmp_path / "launch.sh"), "--output", "here"]) == 0
    text = capsys.readouterr().out
    (tmp_path / "probe.yaml").write_text(text)
    config = load(tmp_path / "probe.yaml")
    assert str(config.output) == "here"
    assert f"# {symptom}: {SYMPTOMS[symptom].seen}." in text
    assert " rows, ~" in text and "2 layers and 4 microbatches a rank" in text and "assumed" not in text
    commands = [line.split()[3] for line in text.splitlines() if line.startswith("# Then:")]
    assert commands and set(commands) <= set(COMMANDS)


def test_without_a_launch_script_nothing_is_predicted_and_in_json_neither(capsys):
    assert main(["init", "nan"]) == 0
    assert "Cost: not predicted" in capsys.readouterr().out
    assert main(["init", "nan", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["predictions"], found["symptom"]) == ([], "nan")
    with pytest.raises(SystemExit, match="2"):
        main(["init", "spikes"])
    assert "(did you mean spike?)" in capsys.readouterr().err


def test_what_a_script_leaves_open_is_named_and_layouts_divide():
    flags = {"pipeline_model_parallel_size": "4", "tensor_model_parallel_size": "2", "num_layers": "48"}
    flags |= {
        "global_batch_size": "64",
        "micro_batch_size": "1",
        "num_experts": "16",
        "expert_model_parallel_size": "4",
    }
    shape = shape_of(flags)
    # 8 processes over TP2 x PP4: one data-parallel rank, which sees the whole batch.
    assert (shape.layers, shape.microbatches, shape.experts, shape.world) == (12, 64, 4, 8)
    assert shape.assumed == ("--nproc-per-node 8", "--nnodes 1")
    assert shape_of({**flags, "moe_grouped_gemm": True}).experts == 0


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Rows and bytes of each step and feature of a real job: (dump, monitor)."""
    import pyarrow.parquet as pq

    folder = tmp_path_factory.mktemp("predicted")
    probe = "steps: [0, 2]\ndump: {level: L0}\nmonitor: {every: 1}\n"
    (folder / "probe.yaml").write_text(probe)
    words = [sys.executable, "-m", "msprobe_megatron", "demo", "--config", "probe.yaml", "--out", "run"]
    subprocess.run([*words, "--num-layers", "2"], cwd=folder, check=True, capture_output=True, timeout=300)
    dumped = [pq.read_metadata(file).num_rows for file in (folder / "run").glob("step_*/rank_*/records.parquet")]
    sizes = [file.stat().st_size for file in (folder / "run").glob("step_*/rank_*/records.parquet")]
    (monitor,) = (folder / "run").glob("monitor/rank_*/*.parquet")
    watched = pq.read_metadata(monitor).num_rows
    return from_document(parse_document_text(probe, "p"), "p"), dumped[0], sizes[0], watched / 3


def test_the_prediction_is_within_a_factor_of_two_of_a_real_job(written, tmp_path):
    from msprobe_megatron.analysis.settings.launch_scripts import read_script

    config, rows, size, watched = written
    (tmp_path / "launch.sh").write_text(LAUNCH)
    dump, monitor = predict(config, shape_of(read_script(tmp_path / "launch.sh").arguments))
    assert (dump.steps, monitor.steps, dump.ranks) == (2, 3, 1)
    assert rows / 2 < dump.rows < rows * 2 and size / 2 < dump.bytes_per_step < size * 2
    assert watched / 2 < monitor.rows < watched * 2
