"""Jobs with checks across ranks, clean or with a fault that begins at a chosen step."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.jobs.compare.faults import around, named, weight
from tests.jobs.compare.layouts import MORE
from tests.jobs.distributed.layouts import LAYOUTS, flags_of
from tests.support.forked import run_forked

CHECKS = "checks: {every: 1}\n"
STEPS = 6


class Now:
    """Which step is running in this rank; the demo's callbacks move it."""

    step = 0


def _from(step: int, fault: Callable[..., Any], healthy: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: (fault if Now.step >= step else healthy)(*args, **kwargs)


def _rank(axis: str) -> int:
    from msprobe_megatron.topology import coordinates

    return coordinates.current().of(axis)


def _norms_not_reduced(at: int) -> None:
    module = importlib.import_module("megatron.core.distributed.finalize_model_grads")
    healthy = module._allreduce_non_tensor_model_parallel_grads
    module._allreduce_non_tensor_model_parallel_grads = _from(at, lambda *a, **k: None, healthy)


def _embedding_not_synchronised(at: int) -> None:
    module = importlib.import_module("megatron.core.distributed.finalize_model_grads")
    healthy = module._allreduce_word_embedding_grads
    module._allreduce_word_embedding_grads = _from(at, lambda *a, **k: None, healthy)


def _bucket_skipped(at: int) -> None:
    """The last data parallel rank goes on with its own gradients of the first bucket instead of the reduced ones."""
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup as Group

    start = Group.start_grad_sync

    def start_grad_sync(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.own = self.buckets[0].grad_data.clone()
        return start(self, *args, **kwargs)

    finish = Group.finish_grad_sync

    def finish_grad_sync(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = finish(self, *args, **kwargs)
        if Now.step >= at and _rank("dp") == 1:
            self.buckets[0].grad_data.copy_(self.own)
        return result

    Group.start_grad_sync, Group.finish_grad_sync = start_grad_sync, finish_grad_sync


def _flip(axis: str, name: str) -> Callable[[int, Any], None]:
    def ready(at: int, chunks: Any) -> None:
        value, module = weight(chunks, name), named(chunks, name.rpartition(".")[0])

        def forward(original: Any, *args: Any, **kwargs: Any) -> Any:
            if Now.step == at and not done and _rank(axis) == 1:
                done.append(None)
                value.data.view(-1).view(torch.int32)[3] ^= 1
            return original(*args, **kwargs)

        done: list[None] = []
        around(module, forward)

    return ready


def _same_generators(at: int) -> None:
    from megatron.core.tensor_parallel import random

    healthy = random.CudaRNGStatesTracker.add
    random.CudaRNGStatesTracker.add = lambda self, name, seed: healthy(self, name, seed - _rank("tp"))


def _other_rate(at: int, chunks: Any, optimizer: Any) -> None:
    if _rank("dp") == 1:
        for group in optimizer.param_groups:
            group["lr"] = 0.02


def _bad_batch(at: int) -> None:
    """One microbatch of one step holds tokens that the model has never met."""
    from msprobe_megatron.lab.demo.data import Batches

    healthy = Batches.microbatch

    def microbatch(self: Any, iteration: int, number: int) -> Any:
        batch = healthy(self, iteration, number)
        if iteration == at and number == 1 and self.here.dp == self.here.dp_size - 1:
            batch["tokens"], batch["labels"] = batch["tokens"] + 1, batch["labels"] + 1
        return batch

    Batches.microbatch = microbatch


def _starved_expert(at: int, chunks: Any) -> None:
    router = named(chunks, "decoder.layers.1.mlp.router")
    healthy = router.gating

    def gating(*args: Any, **kwargs: Any) -> torch.Tensor:
        logits = healthy(*args, **kwargs)
        return logits.index_fill(-1, torch.tensor([2]), -1e4) if Now.step >= at else logits

    router.gating = gating


def _nan_in_layer(at: int, chunks: Any) -> None:
    module = named(chunks, "decoder.layers.2.mlp")

    def forward(original: Any, *args: Any, **kwargs: Any) -> Any:
        output, bias = original(*args, **kwargs)
        if Now.step == at and _rank("tp") + _rank("dp") == 1:
            output = output.clone()
            output.view(-1)[0] = float("nan")
        return output, bias

    if module is not None:
        around(module, forward)


def _damaged_reduction(at: int) -> None:
    """The second tensor parallel rank gets another result out of one all-reduce of every step."""
    from torch.distributed import ProcessGroup

    healthy, steps = ProcessGroup.allreduce, set()

    def allreduce(group: Any, tensors: Any, *args: Any) -> Any:
        work = healthy(group, tensors, *args)
        if Now.step >= at and Now.step not in steps and _rank("tp") == 1 and tensors[0].is_floating_point():
            work.wait()
            steps.add(Now.step)
            tensors[0].data.view(-1)[0] += 0.5
        return work

    ProcessGroup.allreduce = allreduce


def _damaged_message(at: int) -> None:
    """What the first stage sends is damaged on the way."""
    from torch.distributed import ProcessGroup

    healthy, kept = ProcessGroup.send, []

    def send(group: Any, tensors: Any, *args: Any) -> Any:
        if Now.step >= at and _rank("pp") == 0:
            kept.append([tensor + 0.5 for tensor in tensors])
            tensors = kept[-1]
        return healthy(group, tensors, *args)

    ProcessGroup.send = send


def _nan_weight(at: int, chunks: Any) -> None:
    value, module = weight(chunks, "decoder.layers.2.mlp.linear_fc2.weight"), named(chunks, "decoder.layers.2.mlp")

    def forward(original: Any, *args: Any, **kwargs: Any) -> Any:
        if Now.step == at:
            value.data[0, 0] = float("nan")
        return original(*args, **kwargs)

    around(module, forward)


BEFORE = {
    "damaged_reduction": _damaged_reduction,
    "damaged_message": _damaged_message,
    "bad_batch": _bad_batch,
    "norms_not_reduced": _norms_not_reduced,
    "embedding_not_synchronised": _embedding_not_synchronised,
    "bucket_skipped": _bucket_skipped,
    "same_generators": _same_generators,
}


def _overlapping_shards(at: int, chunks: Any) -> None:
    """As if the optimizer of the second rank updated an element that is the first one's."""
    from msprobe_megatron.job.features.checks import feature

    healthy = feature.owned

    def owned(optimizer: Any) -> Any:
        entries = healthy(optimizer)
        shifted = [entry._replace(part=(max(entry.part[0] - 1, 0), entry.part[1])) for entry in entries]
        return shifted if _rank("dp") == 1 else entries

    feature.owned = owned


READY = {
    "overlapping_shards": _overlapping_shards,
    "nan_weight": _nan_weight,
    "starved_expert": _starved_expert,
    "nan_in_layer": _nan_in_layer,
    "flip_dp": _flip("dp", "decoder.layers.1.mlp.linear_fc1.weight"),
    "flip_tp": _flip("tp", "decoder.layers.2.input_layernorm.weight"),
}


def train(argv: list[str], fault: str, at: int) -> list[float]:
    """Train in this rank with a fault that begins at step `at`."""
    from msprobe_megatron.lab.demo.pretrain_gpt import run
    from msprobe_megatron.lab.demo.train import Callbacks

    Now.step = 0
    if fault in BEFORE:
        BEFORE[fault](at)

    def ready(chunks: Any, optimizer: Any) -> None:
        if fault in READY:
            READY[fault](at, chunks)
        if fault == "other_rate":
            _other_rate(at, chunks, optimizer)

    def after(step: Any) -> None:
        Now.step = step.iteration

    return run(argv, Callbacks(ready=ready, step=after)).losses


def job(
    root: Path,
    layout: str,
    fault: str = "none",
    at: int = 2,
    probe: str = CHECKS,
    more: str = "",
    steps: int = STEPS,
) -> Path:
    """The run directory of a job."""
    out = root / f"{layout}_{fault}"
    config = root / f"{layout}_{fault}.yaml"
    config.write_text(probe)
    known = {**LAYOUTS, **MORE}
    flags = flags_of("single", dropout=True) + known[layout].flags.split() + more.split()
    flags += ["--no-check-for-nan-in-loss-and-grad"] if "nan" in fault else []
    flags += ["--train-iters", str(steps), "--msprobe-config", str(config), "--msprobe-output", str(out)]
    run_forked(known[layout].world, train, flags, fault, at)
    return out
