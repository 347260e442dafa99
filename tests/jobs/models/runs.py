"""Runs of the models in their layouts, each trained once."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tests.jobs.models.faults import UNREPAIRED
from tests.jobs.models.zoo import flags_of, train
from tests.support.forked import run_forked

_TP2 = "--tensor-model-parallel-size 2"
_EXPERTS = "--expert-model-parallel-size 2 --expert-tensor-parallel-size 1"
_PP2 = "--pipeline-model-parallel-size 2"
_FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
LAYOUTS = {
    "single": (1, ""),
    "tp2": (2, _TP2),
    "tp2_sp": (2, f"{_TP2} --sequence-parallel"),
    "tp4": (4, "--tensor-model-parallel-size 4"),
    "tp4_sp": (4, "--tensor-model-parallel-size 4 --sequence-parallel"),
    "pp2": (2, _PP2),
    "pp2_vpp2": (2, f"{_PP2} --num-layers-per-virtual-pipeline-stage 1"),
    "cp2": (2, "--context-parallel-size 2"),
    "ep2": (2, "--expert-model-parallel-size 2"),
    "tp2_ep2": (2, f"{_TP2} --sequence-parallel {_EXPERTS}"),
    "tp2_etp2": (2, f"{_TP2} --sequence-parallel --expert-tensor-parallel-size 2"),
    "tp2_pp2": (4, f"{_TP2} --sequence-parallel {_PP2}"),
    "dp2_distopt": (2, "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"),
    "recompute": (1, _FULL),
    "recompute_norms": (1, "--recompute-granularity selective --recompute-modules layernorm"),
    "recompute_attention": (1, "--recompute-granularity selective --recompute-modules core_attn"),
    "recompute_latents": (1, "--recompute-granularity selective --recompute-modules mla_up_proj moe"),
}
_PROBE = """\
steps: [0, 1]
dump: {level: L0, digest: true, sketch: 64}
checks: {every: 1}
"""


class ModelRuns:
    """Run directories of the models, with what their ranks computed."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._done: dict[tuple[str, ...], tuple[Path, list[dict[str, Any]]]] = {}
        (root / "probe.yaml").write_text(_PROBE)

    def recorded(
        self, model: str, layout: str, *, bf16: bool = False, fault: str = "none", repaired: bool = True
    ) -> Path:
        """Both steps of a run with the kit."""
        return self.ranks(model, layout, bf16=bf16, fault=fault, repaired=repaired)[0]

    def ranks(
        self,
        model: str,
        layout: str,
        *,
        bf16: bool = False,
        fault: str = "none",
        repaired: bool = True,
        kit: bool = True,
    ) -> tuple[Path, list[dict[str, Any]]]:
        """The run directory and every number of every rank, with or without the kit."""
        key = (model, layout, "bf16" if bf16 else "fp32", fault, "" if repaired else "own", "" if kit else "plain")
        if key not in self._done:
            out = self._root / "_".join(key)
            world, flags = LAYOUTS[layout]
            argv = flags_of(model, flags + (" --bf16" if bf16 else ""))
            if kit:
                argv += ["--msprobe-config", str(self._root / "probe.yaml"), "--msprobe-output", str(out)]
            os.environ[UNREPAIRED] = "" if repaired else "1"
            try:
                self._done[key] = out, run_forked(world, train, model, argv, fault)
            finally:
                del os.environ[UNREPAIRED]
        return self._done[key]
