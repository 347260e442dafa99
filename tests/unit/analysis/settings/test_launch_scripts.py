"""Launch scripts are read, not run: flags and exported variables of the forms that recipes have."""

import pytest

from msprobe_megatron.analysis.load.run import RunError
from msprobe_megatron.analysis.settings.launch_scripts import read_script

SCRIPT = r"""#!/bin/bash
# a comment with --num-layers 99
export CUDA_DEVICE_MAX_CONNECTIONS=1
export NCCL_ALGO="Ring"  # as asked
TP=8; PP=${PP:-4}
MASTER=$(hostname)
GPT_ARGS="
    --tensor-model-parallel-size ${TP} \
    --pipeline-model-parallel-size $PP
    --swiglu
    --lr 1.25e-6
"
DATA_ARGS=(
    --data-path 0.5 /data/a 0.5 /data/b   # two of them
    --split=949,50,1
)
GPT_ARGS+=" --bf16"
if [ -n "$1" ]; then echo no; fi
touch "$TRAP"
torchrun --nproc_per_node 8 pretrain_gpt.py $GPT_ARGS "${DATA_ARGS[@]}" \
    --distributed-backend nccl --load ${CKPT} | tee log
"""


def test_flags_and_variables(tmp_path, monkeypatch):
    trap = tmp_path / "trap"
    monkeypatch.setenv("TRAP", str(trap))
    path = tmp_path / "pretrain.sh"
    path.write_text(SCRIPT)
    script = read_script(path)
    assert script.environment == {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "NCCL_ALGO": "Ring"}
    arguments = script.arguments
    assert arguments["tensor_model_parallel_size"] == "8"
    assert arguments["pipeline_model_parallel_size"] == "4"
    assert arguments["swiglu"] is True
    assert arguments["bf16"] is True
    assert arguments["lr"] == "1.25e-6"
    assert arguments["data_path"] == ["0.5", "/data/a", "0.5", "/data/b"]
    assert arguments["split"] == "949,50,1"
    assert arguments["distributed_backend"] == "nccl"
    assert arguments["load"] == "${CKPT}"
    assert "num_layers" not in arguments
    assert not trap.exists()


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"--a\n" * 400_000])
def test_what_is_no_script_says_so(tmp_path, content):
    path = tmp_path / "x.sh"
    path.write_bytes(content)
    with pytest.raises(RunError, match=r"x\.sh"):
        read_script(path)


@pytest.mark.parametrize(
    ("text", "arguments"),
    [('A="', {}), ("A=(", {}), ("--x 'unclosed", {"x": "'unclosed"}), ("A=$A\n--y $A", {"y": "$A"}), ("", {})],
)
def test_broken_scripts_end_quietly(tmp_path, text, arguments):
    path = tmp_path / "x.sh"
    path.write_text(text)
    found = read_script(path)
    assert (found.arguments, found.environment) == (arguments, {})
