"""Where the demo runs: device, process groups, seeds. Called by `pretrain_gpt` before a model exists.

On a machine without an accelerator the CPU emulation is installed first, before anything imports Megatron; on an NPU
torch_npu's transfer_to_npu, because Megatron says cuda; on a GPU Megatron runs as it is.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from argparse import Namespace
from datetime import timedelta
from pathlib import Path

import torch

from msprobe_megatron.job import devices
from msprobe_megatron.job.devices import BackendError
from msprobe_megatron.job.devices.megatron_on_cpu import import_hook
from msprobe_megatron.lab.demo.arguments import UsageError


def prepare_device(args: Namespace, name: str) -> torch.device:
    """Choose the device ("auto", "cpu", "cuda", "npu") and make it this process's own."""
    try:
        backend = devices.select(name)
        if backend.name == "cpu":
            devices.megatron_on_cpu.install()
            return _prepare_cpu(args)
    except BackendError as fault:
        raise UsageError(str(fault)) from fault
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    if backend.name == "npu":
        importlib.import_module("torch_npu.contrib.transfer_to_npu")
        args.distributed_backend = args.distributed_backend.replace("nccl", "hccl")
    torch.get_device_module(backend.name).set_device(int(os.environ.get("LOCAL_RANK", "0")))
    _choose_layers(args)
    return backend.device


def _prepare_cpu(args: Namespace) -> torch.device:
    if args.transformer_impl == "transformer_engine":
        raise UsageError("--transformer-impl transformer_engine needs an accelerator; accepted here: local")
    args.transformer_impl = "local"
    args.distributed_backend = "gloo"
    # Several ranks share the cores of one machine; threads of each would only wait for one another.
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    return torch.device("cpu")


def _choose_layers(args: Namespace) -> None:
    there = importlib.util.find_spec("transformer_engine") is not None
    if args.transformer_impl == "transformer_engine" and not there:
        raise UsageError("--transformer-impl transformer_engine: transformer_engine is not installed")
    args.transformer_impl = args.transformer_impl or ("transformer_engine" if there else "local")
    if import_hook.installed():
        return  # the local layers have been completed
    if args.transformer_impl == "local" and (args.context_parallel_size > 1 or args.sequence_parallel):
        raise UsageError(
            "--context-parallel-size above 1 and --sequence-parallel need, on an accelerator, "
            "--transformer-impl transformer_engine"
        )


def start_groups(args: Namespace) -> None:
    """Join the job and make Megatron's parallel groups."""
    from megatron.core import parallel_state

    from msprobe_megatron.lab.demo.installed import known

    for name, value in (
        ("RANK", "0"),
        ("WORLD_SIZE", "1"),
        ("MASTER_ADDR", "127.0.0.1"),
        ("MASTER_PORT", "0"),
    ):
        os.environ.setdefault(name, value)
    if _one_node() and Path("/sys/class/net/lo").exists():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    timeout = timedelta(minutes=args.distributed_timeout_minutes)
    torch.distributed.init_process_group(args.distributed_backend, timeout=timeout)
    values = {
        "tensor_model_parallel_size": args.tensor_model_parallel_size,
        "pipeline_model_parallel_size": args.pipeline_model_parallel_size,
        "virtual_pipeline_model_parallel_size": args.virtual_pipeline_model_parallel_size,
        "context_parallel_size": args.context_parallel_size,
        "expert_model_parallel_size": args.expert_model_parallel_size,
        "expert_tensor_parallel_size": args.expert_tensor_parallel_size,
        "distributed_timeout_minutes": args.distributed_timeout_minutes,
    }
    build = parallel_state.initialize_model_parallel
    build(**known(build, **values))


def _one_node() -> bool:
    world = os.environ["WORLD_SIZE"]
    return world == os.environ.get("LOCAL_WORLD_SIZE", world if os.environ["MASTER_ADDR"] == "127.0.0.1" else "")


def stop_groups() -> None:
    """Undo `start_groups`, so that the process can train again."""
    from megatron.core import parallel_state

    if torch.distributed.is_initialized():
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()


def seed_everything(seed: int) -> None:
    """Seed as Megatron does: one stream a pipeline stage, and Megatron's own for tensor parallel ranks."""
    import random

    import numpy as np
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    own = seed + 100 * parallel_state.get_pipeline_model_parallel_rank()
    random.seed(own)
    np.random.seed(own)
    torch.manual_seed(own)
    model_parallel_cuda_manual_seed(own)
