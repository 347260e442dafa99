from pathlib import Path

import duckdb
import pytest

EVERYTHING = """
monitor: {activations: true, gradients: true, clipped: true, microbatch_gradients: true, optimizer: true,
          master_weights: true, update: true, agreement: true, parameters: true, data: true, comm: true,
          metrics: [attention, router, stable_rank]}
"""
SHAPE = (
    "--num-layers 2 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4 --seq-length 16 --vocab-size 64"
    " --micro-batch-size 1 --global-batch-size 8 --train-iters 3 --lr 1e-2 --seed 7 --swiglu --normalization RMSNorm"
)
MOE = " --num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall --disable-bias-linear"
SHARDED = " --use-distributed-optimizer --ddp-bucket-size 3000"
OVERLAPPED = " --overlap-grad-reduce --overlap-param-gather"
JOBS = {
    "tp2": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "pp2": (2, "--pipeline-model-parallel-size 2 --bf16"),
    "dp4": (4, SHARDED + OVERLAPPED + " --bf16"),
    "ep2": (4, MOE + SHARDED + " --expert-model-parallel-size 2"),
}


class Watched:
    """Jobs trained under the monitor, each once, with the truth about them."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._jobs: dict = {}

    def job(self, name: str):
        """The run directory and what every rank really held."""
        from tests.support.forked import run_forked
        from tests.unit.job.features.monitor.ground_truth import train

        if name not in self._jobs:
            world, flags = JOBS[name]
            config, out = self._root / "probe.yaml", self._root / name
            config.write_text(EVERYTHING)
            argv = [*f"{SHAPE} {flags}".split(), "--msprobe-config", str(config), "--msprobe-output", str(out)]
            self._jobs[name] = (out, run_forked(world, train, argv))
        return self._jobs[name]


@pytest.fixture(scope="session")
def watched(tmp_path_factory):
    return Watched(tmp_path_factory.mktemp("watched"))


def rows_of(run: Path, rank: int, step: int | None = None) -> list[dict]:
    """Rows of a rank, in order."""
    files = str(run / f"monitor/rank_{rank:05d}/*.parquet")
    chosen = "" if step is None else f" where step = {step}"
    cursor = duckdb.connect().execute(f"select * from read_parquet('{files}'){chosen} order by step, seq")
    names = [column[0] for column in cursor.description]
    return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]
