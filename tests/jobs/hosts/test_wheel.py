"""The training loop inside the wheel of megatron-core (0.17 and newer): `megatron.training.pretrain`, unedited."""

import os
import shlex
from dataclasses import dataclass
from pathlib import Path

import pytest

from msprobe_megatron.analysis.compare.compare import compare
from msprobe_megatron.analysis.diagnose.summary import summarise
from msprobe_megatron.analysis.load.run import open_run
from tests.jobs.hosts.megatron_lm import Finished, Host
from tests.support import newer_python

NEWEST = "0.19.2"
SCRIPT = Path(__file__).parent / "pretrain_wheel.py"
PROBE = "steps: all\ndump: {level: L0}\nmonitor: {every: 1}\nreproduce: {weights: by_name}\n"
FLAGS = shlex.split("""
--tokenizer-type NullTokenizer --vocab-size 1000 --make-vocab-size-divisible-by 128 --mock-data --num-workers 0
--transformer-impl local --distributed-backend gloo --no-gradient-accumulation-fusion --no-masked-softmax-fusion
--no-persist-layer-norm --no-bias-dropout-fusion --no-bias-gelu-fusion --use-cpu-initialization --log-interval 1
--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16
--micro-batch-size 2 --global-batch-size 8 --lr 1e-3 --lr-decay-iters 8 --attention-dropout 0 --hidden-dropout 0
--eval-iters 0 --eval-interval 1000 --train-iters 3 --msprobe-device cpu
""")
# With these, 0.18.2 divides the gradient of the balancing loss by the micro batch size once too often; mended in
# 0.19.0 (`valid_token_count` of `_apply_seq_aux_loss` in transformer/moe/router.py).
EXPERTS = shlex.split("""
--num-experts 4 --moe-router-topk 2 --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.1
--calculate-per-token-loss --disable-bias-linear
""")
LAYOUTS = {
    "tp2_sp": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "pp2": (2, "--pipeline-model-parallel-size 2"),
    "dp2": (2, "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"),
}


@dataclass(frozen=True)
class Wheel(Host):
    """A release of megatron-core from the package index."""

    def train_wheel(self, world: int, *flags: str, script: Path = SCRIPT) -> Finished:
        """Run the script to its end."""
        command = ["-m", "msprobe_megatron.run", str(script), *FLAGS, *flags]
        path = os.pathsep.join([str(self.checkout), str(newer_python.ROOT)])
        return self.run(world, command, {"PYTHONPATH": path})

    def recorded(self, folder: Path, world: int, *flags: str, script: Path = SCRIPT) -> tuple[Finished, Path]:
        """The same, recorded into `folder`."""
        probe, out = folder / "probe.yaml", folder / "out"
        folder.mkdir(parents=True, exist_ok=True)
        probe.write_text(PROBE)
        kit = ("--msprobe-config", str(probe), "--msprobe-output", str(out))
        return self.train_wheel(world, *flags, *kit, script=script), out


def wheel(version: str) -> Wheel:
    try:
        return Wheel(newer_python.release(version), str(newer_python.environment()))
    except newer_python.NotAvailable as reason:
        pytest.skip(f"megatron-core {version} is not tested: {reason}")


def agrees(golden: Path, out: Path, finished: Finished) -> None:
    assert finished.code == 0, finished.tail()
    found = compare(open_run(golden), open_run(out))
    assert found.verdict == "agree", found.as_dict()
    assert not found.hints and not summarise(open_run(out)).warnings


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    """The newest release with experts on one rank."""
    finished, out = wheel(NEWEST).recorded(tmp_path_factory.mktemp("experts"), 1, *EXPERTS)
    assert finished.code == 0, finished.tail()
    return finished, out


def test_loss_and_norm_are_those_of_the_job_without_recording(tmp_path, experts):
    """`reproduce` sets the weights of both; recording changes no digit."""
    probe = tmp_path / "probe.yaml"
    probe.write_text("steps: none\ndump: {level: L0}\nreproduce: {weights: by_name}\n")
    kit = ("--msprobe-config", str(probe), "--msprobe-output", str(tmp_path / "out"))
    plain = wheel(NEWEST).train_wheel(1, *EXPERTS, *kit)
    assert sorted(plain.iterations) == [1, 2, 3], plain.tail()
    assert experts[0].iterations == plain.iterations


def test_expert_parallel_agrees_with_one_rank(tmp_path, experts):
    finished, out = wheel(NEWEST).recorded(tmp_path, 2, *EXPERTS, "--expert-model-parallel-size", "2")
    agrees(experts[1], out, finished)


def test_the_router_of_0_18_2_is_told_from_that_of_0_19(tmp_path, experts):
    """A known fault of a public release: the gradient of the router, and nothing before it, differs."""
    finished, out = wheel("0.18.2").recorded(tmp_path, 1, *EXPERTS)
    assert finished.code == 0, finished.tail()
    found = compare(open_run(out), open_run(experts[1]))
    assert found.verdict == "diverged"
    first = found.first_divergence
    assert first.name.endswith("mlp.router") and first.kind == "gradient" and first.step == 0, first


@pytest.mark.slow
@pytest.mark.parametrize("version", ["0.17.0", "0.18.2", NEWEST])
def test_layouts_agree_with_one_rank(tmp_path, version):
    host = wheel(version)
    finished, golden = host.recorded(tmp_path / "single", 1)
    assert finished.code == 0, finished.tail()
    for name, (world, flags) in LAYOUTS.items():
        layout, out = host.recorded(tmp_path / name, world, *flags.split())
        agrees(golden, out, layout)


@pytest.mark.slow
def test_without_the_balancing_loss_both_releases_agree(tmp_path):
    """The clean twin of the router's fault."""
    flags = (*EXPERTS, "--moe-aux-loss-coeff", "0")
    _, golden = wheel("0.18.2").recorded(tmp_path / "0.18.2", 1, *flags)
    finished, out = wheel(NEWEST).recorded(tmp_path / NEWEST, 1, *flags)
    agrees(golden, out, finished)


# Faults of public releases that the kit found: docs/found.md.
MLA = shlex.split("""
--multi-latent-attention --q-lora-rank 16 --kv-lora-rank 16 --qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 8
--position-embedding-type rope --no-rope-fusion --disable-bias-linear --normalization RMSNorm
""")
MTP = shlex.split("--mtp-num-layers 1 --position-embedding-type rope --no-rope-fusion")


@pytest.mark.slow
def test_mla_under_tensor_parallelism_loses_a_gradient_and_agrees_once_repaired(tmp_path):
    host, tp2 = wheel(NEWEST), ("--tensor-model-parallel-size", "2")
    finished, golden = host.recorded(tmp_path / "single", 1, *MLA)
    assert finished.code == 0, finished.tail()
    _, out = host.recorded(tmp_path / "tp2", 2, *MLA, *tp2)
    first = compare(open_run(golden), open_run(out)).first_divergence
    assert first.name.endswith("self_attention.linear_kv_down_proj") and first.kind == "gradient", first
    finished, out = host.recorded(
        tmp_path / "repaired", 2, *MLA, *tp2, script=SCRIPT.with_name("pretrain_mla_fixed.py")
    )
    agrees(golden, out, finished)


@pytest.mark.slow
def test_mtp_under_context_parallelism_has_another_loss(tmp_path):
    host = wheel(NEWEST)
    finished, golden = host.recorded(tmp_path / "single", 1, *MTP)
    assert finished.code == 0, finished.tail()
    _, out = host.recorded(tmp_path / "cp2", 2, *MTP, "--context-parallel-size", "2")
    found = compare(open_run(golden), open_run(out))
    assert "process_mtp_loss" in str(found.first_divergence.site), found.first_divergence
