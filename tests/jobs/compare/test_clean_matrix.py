"""Clean runs of many layouts, levels and precisions agree with one device: no false alarm.

All of it is behind `-m slow`, but for ten that have every probe and precision; docs/compare.md has the figures of the
last run.
"""

from __future__ import annotations

import zlib

import pytest

from msprobe_megatron.analysis.compare.compare import compare
from msprobe_megatron.analysis.load.run import open_run
from tests.jobs.compare.faults import train
from tests.jobs.distributed.layouts import flags_of
from tests.support.forked import run_forked

_RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
_SELECTIVE = "--recompute-granularity selective"
_TP, _SP, _PP, _CP = (
    "--tensor-model-parallel-size 2",
    "--sequence-parallel",
    "--pipeline-model-parallel-size 2",
    "--context-parallel-size 2",
)
_VPP = f"{_PP} --num-layers-per-virtual-pipeline-stage 1"
_DISTOPT = "--use-distributed-optimizer"
_OVERLAP = f"{_DISTOPT} --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 3000"
_MOE = "--num-experts 4 --moe-router-topk 2 --disable-bias-linear --moe-token-dispatcher-type"
_EP = "--expert-model-parallel-size 2"
_ETP1 = "--expert-tensor-parallel-size 1"
# Model -> its flags.
MODELS = {
    "gpt": "",
    "llama": "--position-embedding-type rope --untie-embeddings-and-output-weights --disable-bias-linear"
    " --num-query-groups 2",
    "normed": "--position-embedding-type rope --normalization LayerNorm --qk-layernorm --add-qkv-bias",
    "moe": f"{_MOE} alltoall",
    "gathered": f"{_MOE} allgather --position-embedding-type rope --moe-aux-loss-coeff 0.01",
}
# Model -> name -> (ranks, flags), all compared with the model on one rank.
_DENSE = {
    "tp2": (2, _TP),
    "tp2_sp": (2, f"{_TP} {_SP}"),
    "pp2": (2, _PP),
    "pp2_vpp2": (2, _VPP),
    "cp2": (2, _CP),
    "dp2": (2, ""),
    "dp2_distopt": (2, _DISTOPT),
    "dp2_overlap": (2, _OVERLAP),
    "recompute": (1, _RECOMPUTE),
    "selective": (1, _SELECTIVE),
    "mbs1": (1, "--micro-batch-size 1"),
    "mbs1_dp2": (2, "--micro-batch-size 1"),
    "tp2_recompute": (2, f"{_TP} {_SP} {_RECOMPUTE}"),
    "tp2_selective": (2, f"{_TP} {_SELECTIVE}"),
    "pp2_recompute": (2, f"{_PP} {_RECOMPUTE}"),
    "pp2_mbs1": (2, f"{_PP} --micro-batch-size 1"),
    "tp2_pp2": (4, f"{_TP} {_SP} {_PP}"),
    "tp2_dp2": (4, f"{_TP} {_DISTOPT}"),
    "tp2_cp2": (4, f"{_TP} {_SP} {_CP}"),
    "pp2_dp2": (4, f"{_PP} {_OVERLAP}"),
    "cp2_pp2": (4, f"{_CP} {_PP}"),
    "cp2_dp2": (4, f"{_CP} {_DISTOPT}"),
    "tp2_vpp2": (4, f"{_TP} {_VPP}"),
}
_EXPERTS = {
    "ep2": (2, _EP),
    "dp2": (2, ""),
    "pp2": (2, _PP),
    "recompute": (1, _RECOMPUTE),
    "tp2_ep2": (2, f"{_TP} {_SP} {_EP} {_ETP1}"),
    "tp2_etp2": (2, f"{_TP} {_SP}"),
    "ep2_distopt": (2, f"{_EP} {_DISTOPT}"),
    "ep2_dp2": (4, f"{_EP} {_OVERLAP} --micro-batch-size 1"),
    "ep2_pp2": (4, f"{_EP} {_PP}"),
    "ep2_cp2": (4, f"{_EP} {_CP}"),
    "tp2_etp2_ep2": (4, f"{_TP} {_SP} {_EP}"),
    "tp2_pp2_ep2": (4, f"{_TP} {_SP} {_PP} {_EP} {_ETP1}"),
}
_FEW = ("tp2_sp", "cp2", "pp2_vpp2", "dp2_distopt", "tp2_recompute", "tp2_cp2", "cp2_pp2", "tp2_vpp2", "mbs1_dp2")
LAYOUTS = {
    "gpt": _DENSE,
    "llama": {name: _DENSE[name] for name in _FEW},
    "normed": {name: _DENSE[name] for name in _FEW[:7]},
    "moe": _EXPERTS,
    # Its balancing loss is one of a microbatch: of another size it is another loss.
    "gathered": {name: layout for name, layout in _EXPERTS.items() if "micro-batch-size" not in layout[1]},
}
PROBES = {
    "L0": "steps: [0]\ndump: {level: L0}",
    "L1": "steps: [0]\ndump: {level: L1}",
    "mix": "steps: [0]\ndump: {level: mix}",
    "sketch": "steps: [0]\ndump: {level: L0, digest: true, sketch: 256}",
    "monitor": "monitor: {activations: true, gradients: true, parameters: true}",
}
PRECISIONS = {"fp32": "", "bf16": "--bf16", "fp16": "--fp16 --loss-scale 1024"}
_QUICK = {
    ("moe", "tp2_etp2_ep2", "mix", "bf16"),
    ("llama", "tp2_cp2", "L0", "bf16"),
    ("normed", "tp2_sp", "mix", "fp16"),
    ("gpt", "pp2_vpp2", "L1", "fp16"),
    ("gpt", "dp2_overlap", "sketch", "bf16"),
    ("gpt", "tp2", "monitor", "fp32"),
    ("gpt", "cp2", "mix", "bf16"),
    ("llama", "tp2_recompute", "L1", "bf16"),
    ("moe", "ep2", "monitor", "bf16"),
    ("moe", "ep2", "sketch", "fp32"),
}


def cases():
    """Every combination; in an order in which every beginning has layouts, probes and precisions of all kinds."""
    every = [
        (model, layout, probe, precision)
        for model, layouts in LAYOUTS.items()
        for layout in layouts
        for probe in PROBES
        for precision in PRECISIONS
    ]
    return sorted(every, key=lambda case: zlib.crc32(" ".join(case).encode()))


class Matrix:
    """Jobs of the matrix, each trained once."""

    def __init__(self, root):
        self._root = root
        for name, text in PROBES.items():
            (root / f"{name}.yaml").write_text(text + "\n")

    def run(self, model, layout, probe, precision):
        """The run directory of a job."""
        out = self._root / "-".join((model, layout, probe, precision))
        if not out.exists():
            world, flags = (1, "") if layout == "single" else LAYOUTS[model][layout]
            text = f"{MODELS[model]} {PRECISIONS[precision]} {flags} --global-batch-size 4"
            argv = [
                *flags_of("single", dropout=False),
                *text.split(),
                "--train-iters",
                "2" if probe == "monitor" else "1",
            ]
            argv += ["--msprobe-config", str(self._root / f"{probe}.yaml"), "--msprobe-output", str(out)]
            run_forked(world, train, argv, "none")
        return open_run(out)

    def judged(self, model, layout, probe, precision):
        """The comparison with one rank."""
        return compare(self.run(model, "single", probe, precision), self.run(model, layout, probe, precision))


@pytest.fixture(scope="module")
def matrix(tmp_path_factory):
    return Matrix(tmp_path_factory.mktemp("matrix"))


def test_the_matrix_is_as_large_as_promised():
    assert sum(map(len, LAYOUTS.values())) >= 60
    assert len(cases()) == 15 * sum(map(len, LAYOUTS.values()))
    assert len(_QUICK & set(cases())) >= 10
    assert {case[2] for case in _QUICK} == set(PROBES) and {case[3] for case in _QUICK} == set(PRECISIONS)


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id="-".join(case), marks=() if case in _QUICK else (pytest.mark.slow,)) for case in cases()],
)
def test_clean_runs_agree(matrix, case):
    result = matrix.judged(*case)
    assert (result.verdict, result.reason) == ("agree", ""), result.first_divergence
    assert result.counts["agree"] > 30
