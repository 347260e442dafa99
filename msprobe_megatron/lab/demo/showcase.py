"""`msprobe-megatron demo`: a tiny GPT trained on this machine under the probe, then what was recorded."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

SHAPE = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2"
    " --global-batch-size 8 --train-iters 3 --lr 1e-3 --swiglu --normalization RMSNorm"
    " --position-embedding-type rope --attention-dropout 0 --hidden-dropout 0"
)
_PROBE = "steps: [0, 2]\ndump: {level: L0, task: statistics}\n"


def showcase(out: str, config: str | None, flags: Sequence[str], *, as_json: bool) -> int:
    """Train for three steps in one process, record two of them into `out`, print the summary.

    `flags` are added to the training flags and win over them.
    """
    from msprobe_megatron.analysis.diagnose.summary import summarise
    from msprobe_megatron.analysis.load.run import open_run
    from msprobe_megatron.report.terminal.tables import print_summary

    for package in ("torch", "megatron"):
        # Asked here: the job is another process, whose traceback would be all the user sees.
        if importlib.util.find_spec(package) is None:
            raise ModuleNotFoundError(f"no {package}", name=package)
    command = [sys.executable, "-m", "msprobe_megatron.demo.pretrain_gpt", *SHAPE.split(), *flags]
    probe = config
    if probe is None:
        written = Path(f"{out}.yaml")
        written.write_text(_PROBE, encoding="utf-8")
        probe = str(written)
    # The log of the training goes to stderr, so that --json leaves stdout to the machine.
    done = subprocess.run(
        [*command, "--msprobe-config", probe, "--msprobe-output", out], stdout=sys.stderr, check=False
    )
    if done.returncode:
        return done.returncode
    summary = summarise(open_run(out))
    if as_json:
        print(json.dumps(summary.as_dict()))
    else:
        print_summary(summary)
    return 1 if summary.warnings else 0
