"""Jobs that train a tiny GPT and leave a checkpoint as Megatron does: `mp_rank_*` files, or torch_dist."""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch


def train_and_save(argv: list[str], root: str, form: str) -> None:
    """Train in this rank, then write `root` in the form `legacy` or `torch_dist`."""
    from megatron.core import parallel_state

    from msprobe_megatron.lab.demo import launch
    from msprobe_megatron.lab.demo.pretrain_gpt import run

    end = launch.stop_groups
    found: list[Any] = []

    def save_first() -> None:
        # The groups of the job are still there when it is about to take them down.
        (legacy if form == "legacy" else torch_dist)(found[0], found[1], Path(root), parallel_state)
        end()

    from msprobe_megatron.lab.demo.train import Callbacks

    launch.stop_groups = save_first
    try:
        run(argv, Callbacks(ready=lambda chunks, optimizer: found.extend((chunks, optimizer))))
    finally:
        launch.stop_groups = end


def _unwrapped(chunks: list[Any]) -> list[Any]:
    from msprobe_megatron.topology.names import unwrap

    return [unwrap(chunk) for chunk in chunks]


def legacy(chunks: list[Any], optimizer: Any, root: Path, state: Any) -> None:
    """What Megatron-LM's save_checkpoint puts into model_optim_rng.pt, in its order and under its names."""
    models = _unwrapped(chunks)
    tp, pp, ep = (
        state.get_tensor_model_parallel_rank(),
        state.get_pipeline_model_parallel_rank(),
        state.get_expert_model_parallel_rank(),
    )
    pipeline = state.get_pipeline_model_parallel_world_size() > 1
    experts = state.get_expert_model_parallel_world_size() > 1
    name = f"mp_rank_{tp:02d}" + (f"_{pp:03d}" if pipeline else "") + (f"_{ep:03d}" if experts else "")
    arguments = argparse.Namespace(
        tensor_model_parallel_size=state.get_tensor_model_parallel_world_size(),
        pipeline_model_parallel_size=state.get_pipeline_model_parallel_world_size(),
        expert_model_parallel_size=state.get_expert_model_parallel_world_size(),
        swiglu=bool(models[0].config.gated_linear_unit),
        params_dtype=torch.float32,
        attention_backend=models[0].config.attention_backend,
    )
    content: dict[str, Any] = {"args": arguments, "checkpoint_version": 3.0, "iteration": 1}
    if len(models) == 1:
        content["model"] = models[0].state_dict_for_save_checkpoint()
    else:
        for i, model in enumerate(models):
            content[f"model{i}"] = model.state_dict_for_save_checkpoint()
    content["optimizer"] = optimizer.state_dict()
    content["rng_state"] = [{"random_rng_state": random.getstate(), "np_rng_state": np.random.get_state()}]  # noqa: NPY002
    directory = root / "iter_0000001" / name
    directory.mkdir(parents=True, exist_ok=True)
    if state.get_expert_data_parallel_rank() == 0:
        torch.save(content, directory / "model_optim_rng.pt")
    if hasattr(optimizer, "save_parameter_state") and chunks[0].ddp_config.use_distributed_optimizer:
        optimizer.save_parameter_state(str(directory / "distrib_optim.pt"))
    (root / "latest_checkpointed_iteration.txt").write_text("1")
    torch.distributed.barrier()


def torch_dist(chunks: list[Any], optimizer: Any, root: Path, state: Any) -> None:
    """The sharded state of model and optimizer, by megatron.core's own dist_checkpointing."""
    from megatron.core import dist_checkpointing

    models = _unwrapped(chunks)
    content: dict[str, Any] = {"iteration": 1, "args": argparse.Namespace(swiglu=True)}
    if len(models) == 1:
        content["model"] = models[0].sharded_state_dict()
    else:
        for i, model in enumerate(models):
            content[f"model{i}"] = model.sharded_state_dict()
    models_only = {key: value for key, value in content.items() if key.startswith("model")}
    content["optimizer"] = optimizer.sharded_state_dict(
        models_only, metadata={"distrib_optim_sharding_type": "fully_reshardable"}
    )
    directory = root / "iter_0000001"
    directory.mkdir(parents=True, exist_ok=True)
    torch.distributed.barrier()
    _write_in_this_process()
    dist_checkpointing.save(content, str(directory))
    (root / "latest_checkpointed_iteration.txt").write_text("1")
    torch.distributed.barrier()


def _write_in_this_process() -> None:
    """Megatron's own writer of files, without its pool of processes: a forked rank cannot start those."""
    import queue

    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync as Writer

    def write(transforms: Any, use_msc: bool, rank: int, buckets: list[Any], results: Any) -> None:
        found = {}
        for i, bucket in enumerate(buckets):
            done, count = queue.Queue(), queue.Queue()
            count.put(i)
            Writer.write_preloaded_data(transforms, i, bucket, done, count, use_fsync=False)
            found[i] = done.get()[1]
        results.put(found)

    Writer.write_preloaded_data_multiproc = staticmethod(write)
    kept = queue.Queue()
    filesystem_async._get_write_results_queue = lambda: kept
    filesystem_async._process_memory = lambda: 0  # asks psutil, for a log line
