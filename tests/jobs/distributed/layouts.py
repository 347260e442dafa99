"""Layouts of one tiny GPT, and jobs that train it with and without the kit in forked ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.support.forked import run_forked

_SHAPE = (
    "--num-layers 4 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4 --seq-length 16"
    " --micro-batch-size 2 --global-batch-size 8 --train-iters 3 --lr 1e-2 --seed 7 --vocab-size 64 --swiglu"
    " --normalization RMSNorm"
)
_MOE = " --num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall --disable-bias-linear"
_PLAIN = " --attention-dropout 0 --hidden-dropout 0"


@dataclass(frozen=True)
class Layout:
    """A number of ranks and the flags that spread the model over them."""

    world: int
    flags: str
    single: str = "single"


LAYOUTS = {
    "single": Layout(1, ""),
    "tp2": Layout(2, "--tensor-model-parallel-size 2"),
    "tp2_sp": Layout(2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "pp2": Layout(2, "--pipeline-model-parallel-size 2"),
    "pp2_vpp2": Layout(2, "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"),
    "pp2_uneven": Layout(2, "--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 1"),
    "tp2_pp2": Layout(4, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"),
    "dp2": Layout(2, ""),
    "dp2_distopt": Layout(
        2, "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 3000"
    ),
    "cp2": Layout(2, "--context-parallel-size 2"),
    "moe": Layout(1, _MOE, "moe"),
    "ep2": Layout(2, _MOE + " --expert-model-parallel-size 2", "moe"),
    "recompute": Layout(1, "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"),
    "pp2_recompute": Layout(
        2,
        "--pipeline-model-parallel-size 2 --recompute-granularity full --recompute-method uniform"
        " --recompute-num-layers 1",
    ),
}


def flags_of(layout: str, *, dropout: bool) -> list[str]:
    """Command line of a layout; with dropout the random generators matter too."""
    text = f"{_SHAPE} {LAYOUTS[layout].flags}"
    return (text if dropout else text + _PLAIN).split()


def train_and_keep(
    argv: list[str],
    each_step: Callable[[], None] | None = None,
    ready: Callable[[list[torch.nn.Module]], None] | None = None,
) -> dict[str, Any]:
    """Train in this rank and return every number that the kit must not change.

    `ready` is called with the chunks before the first step, `each_step` after each.
    """
    from msprobe_megatron.lab.demo.pretrain_gpt import run
    from msprobe_megatron.lab.demo.train import Callbacks

    chunks_seen: list[Any] = []
    gradients: list[torch.Tensor] = []

    def keep(iteration: int) -> None:
        for chunk in chunks_seen:
            gradients.extend(p.main_grad.clone() for p in chunk.parameters())

    states: dict[str, Any] = {}

    def after(step: Any) -> None:
        # After every step, the last one stays: the trackers are gone when the run has ended.
        from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

        states["torch"] = torch.get_rng_state()
        states["tracker"] = {name: state.clone() for name, state in get_cuda_rng_tracker().get_states().items()}
        if each_step is not None:
            each_step()

    def built(chunks: list[torch.nn.Module], optimizer: Any) -> None:
        chunks_seen.extend(chunks)
        if ready is not None:
            ready(chunks)

    callbacks = Callbacks(ready=built, gradients=keep, step=after)
    result = run(argv, callbacks)
    parameters = {f"{i}.{n}": p.detach().clone() for i, c in enumerate(result.chunks) for n, p in c.named_parameters()}
    return {
        "losses": result.losses,
        "grad_norms": result.grad_norms,
        "gradients": gradients,
        "parameters": parameters,
        "optimizer": _tensors(result.optimizer.state_dict()),
        "rng": states,
    }


def _tensors(value: Any) -> list[torch.Tensor]:
    """All tensors of a nested state, in order."""
    if isinstance(value, torch.Tensor):
        return [value.detach().clone()]
    if isinstance(value, dict):
        return [t for key in value for t in _tensors(value[key])]
    if isinstance(value, list | tuple):
        return [t for item in value for t in _tensors(item)]
    return []


class Jobs:
    """Runs each job once and remembers what it gave."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._plain: dict[str, list[dict[str, Any]]] = {}
        self._probed: dict[tuple[str, bool], tuple[Path, list[dict[str, Any]]]] = {}
        self._config = root / "probe.yaml"
        self._config.write_text("steps: [0, 2]\ndump: {level: L0, task: statistics}\n")

    def plain(self, layout: str) -> list[dict[str, Any]]:
        """The ranks' numbers without the kit."""
        if layout not in self._plain:
            argv = flags_of(layout, dropout=True)
            self._plain[layout] = run_forked(LAYOUTS[layout].world, train_and_keep, argv)
        return self._plain[layout]

    def probed(self, layout: str, *, dropout: bool) -> tuple[Path, list[dict[str, Any]]]:
        """The run directory and the ranks' numbers with the kit recording steps 0 and 2 of 0..2."""
        key = (layout, dropout)
        if key not in self._probed:
            out = self._root / f"{layout}_{'dropout' if dropout else 'plain'}"
            argv = flags_of(layout, dropout=dropout)
            argv += ["--msprobe-config", str(self._config), "--msprobe-output", str(out)]
            self._probed[key] = (out, run_forked(LAYOUTS[layout].world, train_and_keep, argv))
        return self._probed[key]
