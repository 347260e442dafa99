"""Runs that laws are checked on: clean ones of many layouts, and one for every fault; each is trained once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.jobs.compare.layouts import MORE
from tests.jobs.distributed.layouts import LAYOUTS, flags_of
from tests.jobs.laws.faults import train
from tests.support.forked import run_forked

_FULL = (
    "steps: [0, 1, 2]\ndump: {level: L0}\nchecks: {}\n"
    "monitor: {every: 1, update: true, parameters: true, master_weights: true, clipped: true}\n"
)
PROBES = {
    "L0": "steps: [0, 1, 2]\ndump: {level: L0}\nchecks: {}\n",
    "full": _FULL,
    "mix": "steps: [0, 1]\ndump: {level: mix}\nchecks: {}\n",
    "monitor": "checks: {every: 1}\nmonitor: {every: 1, update: true, parameters: true, clipped: true, comm: true}\n",
}
_UNTIED = "--untie-embeddings-and-output-weights"
_SELECTIVE = "--recompute-granularity selective"
# name -> (layout, further flags, probe); "dropout" leaves the demo's own rates.
CLEAN = {
    "single": ("single", "", "full"),
    "tp2_bf16": ("tp2", "--bf16", "full"),
    "tp2_sp_dropout": ("tp2_sp", "dropout", "full"),
    "pp2_fp16": ("pp2", "--fp16 --loss-scale 1024", "full"),
    "pp2_vpp2": ("pp2_vpp2", "", "full"),
    "rope_cp2": ("rope_cp2", "", "full"),
    "ep2_bf16": ("ep2", "--bf16", "full"),
    "moe_tp2": ("moe_tp2", "", "full"),
    "dp2_distopt_bf16": ("dp2_distopt", f"--bf16 {_UNTIED}", "full"),
    "dp2_no_clipping": ("dp2", "--clip-grad 0", "full"),
    "recompute_dropout": ("recompute", "dropout", "full"),
    "selective_bf16": ("tp2_sp", f"--bf16 dropout {_SELECTIVE}", "full"),
    "tp2_pp2_mix": ("tp2_pp2", "", "mix"),
    "ep2_mix": ("ep2", "", "mix"),
    "cp2_monitor": ("cp2", "", "monitor"),
    "masked": ("single", "", "L0"),
}
_PRECISIONS = {"fp32": "", "bf16": "--bf16", "fp16": "--fp16 --loss-scale 1024"}
_MANY = (
    *("single", "tp2", "tp2_sp", "pp2", "pp2_vpp2", "pp2_uneven", "cp2", "rope_cp2", "dp2", "dp2_distopt"),
    *("recompute", "pp2_recompute", "moe", "ep2", "moe_tp2", "tp2_ep2", "qk_norm_tp2_sp"),
)
SWEEP: dict[str, tuple[str, str, str]] = {
    **{f"{layout}_{name}": (layout, flags, "full") for layout in _MANY for name, flags in _PRECISIONS.items()},
    **{f"{layout}_dropout_fp32": (layout, "dropout", "full") for layout in _MANY},
    **{f"{layout}_dropout_bf16": (layout, "dropout --bf16", "full") for layout in _MANY},
    **{f"{layout}_mix": (layout, "", "mix") for layout in _MANY},
    "sgd": ("dp2", "--optimizer sgd --clip-grad 0", "full"),
    "layernorm": ("tp2", f"--normalization LayerNorm {_UNTIED}", "full"),
    "dynamic_scale": ("dp2_distopt", "--fp16 --initial-loss-scale 65536", "full"),
    "one_microbatch": ("dp2", "--micro-batch-size 4", "full"),
    "selective": ("single", f"dropout {_SELECTIVE}", "full"),
}


class LawRuns:
    """Run directories of clean and faulty jobs."""

    def __init__(self, root: Path) -> None:
        self._root = root
        for name, text in PROBES.items():
            (root / f"{name}.yaml").write_text(text)

    def clean(self, name: str) -> Path:
        """Three steps without a fault."""
        layout, flags, probe = {**SWEEP, **CLEAN}[name]
        return self._trained(layout, flags, probe, "masked" if name == "masked" else "none", f"clean_{name}")

    def faulty(self, fault: str, layout: str, flags: str = "", probe: str = "L0") -> Path:
        """Three steps with a fault inside."""
        return self._trained(layout, flags, probe, fault, f"{fault}_{layout}_{probe}")

    def _trained(self, layout: str, more: str, probe: str, fault: str, name: str) -> Path:
        out = self._root / name
        if not out.exists():
            known: Any = {**LAYOUTS, **MORE}
            words = more.split()
            flags = flags_of("single", dropout="dropout" in words) + known[layout].flags.split()
            flags += [word for word in words if word != "dropout"]
            flags += ["--no-check-for-nan-in-loss-and-grad", "--msprobe-config", str(self._root / f"{probe}.yaml")]
            run_forked(known[layout].world, train, [*flags, "--msprobe-output", str(out)], fault)
        return out
