"""Layouts for comparisons beyond those of tests/distributed, and their runs, each trained once."""

from __future__ import annotations

from pathlib import Path

from tests.jobs.compare.faults import train
from tests.jobs.distributed.layouts import LAYOUTS, Jobs, Layout, flags_of
from tests.support.forked import run_forked

_MOE = LAYOUTS["moe"].flags
_CAPACITY = f"{_MOE} --moe-expert-capacity-factor 0.75"
_ROPE = "--position-embedding-type rope"
# The norm of keys has a bias whose gradient is zero but for rounding; without learned positions the embedding scatters.
_NORMS = f"--untie-embeddings-and-output-weights --normalization LayerNorm --qk-layernorm --num-query-groups 2 {_ROPE}"
MORE = {
    "tp2_ep2": Layout(
        2,
        f"{_MOE} --expert-model-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel"
        " --expert-tensor-parallel-size 1",
        "moe",
    ),
    "bf16": Layout(1, "--bf16", "bf16"),
    "bf16_tp2": Layout(2, "--bf16 --tensor-model-parallel-size 2", "bf16"),
    "bf16_pp2": Layout(2, "--bf16 --pipeline-model-parallel-size 2", "bf16"),
    "mbs1": Layout(1, "--micro-batch-size 1"),
    "mbs1_dp2": Layout(2, "--micro-batch-size 1"),
    "rope": Layout(1, _ROPE, "rope"),
    "rope_cp2": Layout(2, f"{_ROPE} --context-parallel-size 2", "rope"),
    "moe_tp2": Layout(2, f"{_MOE} --tensor-model-parallel-size 2 --sequence-parallel", "moe"),
    "moe_tp2_etp1": Layout(
        2, f"{_MOE} --tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1", "moe"
    ),
    "fp16": Layout(1, "--fp16 --loss-scale 1024", "fp16"),
    "fp16_tp2": Layout(2, "--fp16 --loss-scale 1024 --tensor-model-parallel-size 2", "fp16"),
    "qk_norm": Layout(1, _NORMS, "qk_norm"),
    "qk_norm_tp2_sp": Layout(2, f"{_NORMS} --tensor-model-parallel-size 2 --sequence-parallel", "qk_norm"),
    "capacity": Layout(1, _CAPACITY, "capacity"),
    "capacity_ep2": Layout(2, f"{_CAPACITY} --expert-model-parallel-size 2", "capacity"),
    "capacity_tp2": Layout(2, f"{_CAPACITY} --tensor-model-parallel-size 2 --sequence-parallel", "capacity"),
    "wider": Layout(1, "--ffn-hidden-size 128"),
}


class Runs:
    """Run directories of clean and faulty jobs."""

    def __init__(self, jobs: Jobs, root: Path) -> None:
        self._jobs, self._root = jobs, root
        more = {"both.yaml": ("[0, 2]", ""), "first.yaml": ("[0]", "")}
        more["sketches.yaml"] = ("[0]", ", digest: true, sketch: 256")
        more["tensors.yaml"] = ("[0]", ", task: tensor")
        more["later_tensors.yaml"] = ("[0, 2]", ", task: tensor")
        more["second.yaml"] = ("[0]", ", microbatches: [1]")
        more["rank0.yaml"] = ("[0]\nranks: [0]", "")
        for name, (steps, measures) in more.items():
            (root / name).write_text(f"steps: {steps}\ndump: {{level: L0{measures}}}\n")
        (root / "calls.yaml").write_text("steps: [0]\ndump: {level: mix}\n")

    def clean(self, layout: str) -> Path:
        """Steps 0 and 2 of a run without a fault."""
        if layout in LAYOUTS:
            return self._jobs.probed(layout, dropout=False)[0]
        return self._trained(layout, "none", "both.yaml", 3)

    def faulty(self, layout: str, fault: str, *, steps: int = 1) -> Path:
        """A run with a fault inside: step 0, and also step 2 if three steps are asked for."""
        return self._trained(layout, fault, "first.yaml" if steps == 1 else "both.yaml", steps)

    def sketched(self, layout: str, fault: str = "none") -> Path:
        """Step 0 with digests and sketches."""
        return self._trained(layout, fault, "sketches.yaml", 1)

    def saved(self, layout: str, fault: str = "none", *, steps: int = 1) -> Path:
        """Step 0 with whole tensors, and also step 2 if three steps are asked for."""
        return self._trained(layout, fault, "tensors.yaml" if steps == 1 else "later_tensors.yaml", steps)

    def called(self, layout: str, fault: str = "none") -> Path:
        """Step 0 of two microbatches, with modules and API calls."""
        return self._trained(layout, fault, "calls.yaml", 1, "--global-batch-size", "4")

    def partly(self, layout: str, probe: str) -> Path:
        """Step 0 of only the `second` microbatch, or of `rank0` only."""
        return self._trained(layout, "none", f"{probe}.yaml", 1)

    def _trained(self, layout: str, fault: str, probe: str, steps: int, *more: str) -> Path:
        out = self._root / f"{layout}_{fault}_{probe.removesuffix('.yaml')}"
        if not out.exists():
            known = {**LAYOUTS, **MORE}
            flags = flags_of("single", dropout=False) + known[layout].flags.split()
            flags += ["--train-iters", str(steps), "--no-check-for-nan-in-loss-and-grad", *more]
            flags += ["--msprobe-config", str(self._root / probe), "--msprobe-output", str(out)]
            run_forked(known[layout].world, train, flags, fault)
        return out
