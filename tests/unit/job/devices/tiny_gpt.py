"""A GPT of two layers trained for two steps in any layout, with weights that depend on their names only: the
same model whatever the split. Runs inside a forked rank.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

VOCABULARY, SEQUENCE, HIDDEN, HEADS, LAYERS, SAMPLES = 32, 16, 16, 4, 2, 4


@dataclass(frozen=True)
class Layout:
    """How the model is split, and what it is; `config` holds further fields of TransformerConfig."""

    tp: int = 1
    sp: bool = False
    pp: int = 1
    vpp: int | None = None
    cp: int = 1
    ep: int = 1
    experts: int | None = None
    positions: str = "learned_absolute"
    distributed_optimizer: bool = False
    overlap: bool = False
    dtype: str = "float32"
    layers: int = LAYERS
    config: dict[str, Any] = field(default_factory=dict)


def train(layout: Layout, steps: int = 2) -> dict[str, list[float]]:
    """Train and return loss and gradient norm of each step; the same on every rank."""
    torch.set_num_threads(1)
    ps.initialize_model_parallel(
        layout.tp,
        layout.pp,
        layout.vpp,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
    )
    model_parallel_cuda_manual_seed(1)
    config = _config(layout)
    chunks = [_chunk(layout, config, index) for index in range(layout.vpp or 1)]
    models, optimizer = _wrapped(layout, config, chunks)
    history: dict[str, list[float]] = {"loss": [], "norm": []}
    for _ in range(steps):
        optimizer.zero_grad()  # .grad still is the gradient buffer of the last step
        losses = _forward_backward(layout, models)
        _, norm, _ = optimizer.step()
        history["loss"].append(_mean_loss(losses))
        history["norm"].append(float(norm))
    return history


def _config(layout: Layout) -> TransformerConfig:
    dtype = getattr(torch, layout.dtype)
    moe = {
        "num_moe_experts": layout.experts,
        "moe_router_topk": 2,
        "moe_token_dispatcher_type": "alltoall",
        "add_bias_linear": False,
    }
    fields: dict[str, Any] = {
        "num_layers": layout.layers,
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp,
        "context_parallel_size": layout.cp,
        "expert_model_parallel_size": layout.ep,
        "sequence_parallel": layout.sp,
        # With two stages previous and next are the same peer; batched sends would be taken for one another.
        "overlap_p2p_comm": layout.vpp is not None,
        "batch_p2p_comm": layout.vpp is None,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "autocast_dtype": dtype,
        "bf16": layout.dtype == "bfloat16",
        "fp16": layout.dtype == "float16",
        "gradient_accumulation_fusion": False,
        "apply_rope_fusion": False,
        "persist_layer_norm": False,
        **(moe if layout.experts else {}),
    }
    return TransformerConfig(**{**fields, **layout.config})


def _chunk(layout: Layout, config: TransformerConfig, index: int) -> GPTModel:
    stage = {} if layout.vpp is None else {"ignore_virtual": False, "vp_stage": index}
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(num_experts=layout.experts, moe_grouped_gemm=False),
        VOCABULARY,
        SEQUENCE,
        pre_process=ps.is_pipeline_first_stage(**stage),
        post_process=ps.is_pipeline_last_stage(**stage),
        position_embedding_type=layout.positions,
        vp_stage=None if layout.vpp is None else index,
    )
    model.model_type = ModelType.encoder_or_decoder
    set_weights(model)
    return model


def set_weights(model: torch.nn.Module) -> None:
    """Give every parameter this rank's part of the tensor that belongs to its name in the undivided model."""
    for name, parameter in model.named_parameters():
        dimension = parameter.partition_dim if getattr(parameter, "tensor_model_parallel", False) else None
        shape = list(parameter.shape)
        if dimension is not None:
            shape[dimension] *= ps.get_tensor_model_parallel_world_size()
        whole = whole_weight(_undivided_name(model, name), shape)
        if dimension is not None:
            rank, size = ps.get_tensor_model_parallel_rank(), parameter.shape[dimension]
            whole = whole.narrow(dimension, rank * size, size)
        with torch.no_grad():
            parameter.copy_(whole)


def whole_weight(name: str, shape: list[int]) -> torch.Tensor:
    """The undivided tensor called `name`: noise seeded by the name; gains of norms are about one."""
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
    return 0.1 * noise + (1.0 if name.endswith("norm.weight") else 0.0)


def _undivided_name(model: torch.nn.Module, name: str) -> str:
    parts = name.split(".")
    for at, part in enumerate(parts[:-1]):
        if part == "layers":
            layer: Any = model.get_submodule(".".join(parts[: at + 2]))
            parts[at + 1] = str(layer.layer_number - 1)
        elif part == "local_experts":
            experts: Any = model.get_submodule(".".join(name.split(".")[: at + 1]))
            first = ps.get_expert_model_parallel_rank() * len(experts)
            parts[at + 1] = str(first + int(parts[at + 1]))
    # One tensor under two names: the last stage of a pipeline has its own copy of the embedding.
    return ".".join(parts).replace("output_layer.weight", "embedding.word_embeddings.weight")


def _wrapped(layout: Layout, config: TransformerConfig, chunks: list[GPTModel]) -> tuple[list[Any], Any]:
    half = config.bf16 or config.fp16
    ddp_config = DistributedDataParallelConfig(
        use_distributed_optimizer=layout.distributed_optimizer,
        overlap_grad_reduce=layout.overlap,
        overlap_param_gather=layout.overlap and layout.distributed_optimizer,
        bucket_size=1000 if layout.overlap else None,
    )
    models = [
        DistributedDataParallel(config, ddp_config, Float16Module(config, chunk) if half else chunk) for chunk in chunks
    ]
    options = OptimizerConfig(
        optimizer="adam",
        lr=1e-2,
        weight_decay=0.0,
        bf16=config.bf16,
        fp16=config.fp16,
        params_dtype=config.params_dtype,
        use_distributed_optimizer=layout.distributed_optimizer,
        overlap_param_gather=ddp_config.overlap_param_gather,
        initial_loss_scale=256.0,
    )
    optimizer = get_megatron_optimizer(options, models)
    syncs = [model.no_sync for model in models]
    config.no_sync_func = (syncs if len(syncs) > 1 else syncs[0]) if layout.overlap else None
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    return models, optimizer


def sample(index: int) -> torch.Tensor:
    """Token numbers of one sample and the token that follows it."""
    generator = torch.Generator().manual_seed(100 + index)
    return torch.randint(VOCABULARY, (SEQUENCE + 1,), generator=generator)


def _microbatches(layout: Layout) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """One sample each; tokens, labels and positions of this data and context parallel rank."""
    chunks = torch.arange(SEQUENCE).view(2 * layout.cp, -1)
    own = ps.get_context_parallel_rank()
    here = torch.cat((chunks[own], chunks[2 * layout.cp - 1 - own])) if layout.cp > 1 else chunks.flatten()
    for index in range(ps.get_data_parallel_rank(), SAMPLES, ps.get_data_parallel_world_size()):
        tokens = sample(index)
        yield tokens[here][None], tokens[here + 1][None], here[None]


def _loss(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Mean over the whole sequence, of which this rank has a part; the schedule multiplies by CP."""
    share = losses.float().sum() / SEQUENCE
    whole = share.detach().clone()
    dist.all_reduce(whole, group=ps.get_context_parallel_group())
    return share, {"loss": whole}


def _forward_step(batches: Iterator[Any], model: Any) -> tuple[torch.Tensor, Any]:
    tokens, labels, positions = next(batches)
    return model(tokens, positions, None, labels=labels), partial(_loss)


def _forward_backward(layout: Layout, models: list[Any]) -> list[dict[str, torch.Tensor]]:
    for model in models:
        model.zero_grad_buffer()
    batches = [_microbatches(layout) for _ in models]
    several = layout.vpp is not None
    results: list[dict[str, torch.Tensor]] = get_forward_backward_func()(
        forward_step_func=_forward_step,
        data_iterator=batches if several else batches[0],
        model=models if several else models[0],
        num_microbatches=SAMPLES // ps.get_data_parallel_world_size(),
        seq_length=SEQUENCE,
        micro_batch_size=1,
        forward_only=False,
    )
    return results


def _mean_loss(results: list[dict[str, torch.Tensor]]) -> float:
    """Average over microbatches and ranks; only the last stage has results, but every rank is told."""
    total = torch.tensor([sum(float(result["loss"]) for result in results), float(len(results))], dtype=torch.float64)
    dist.all_reduce(total)
    return float(total[0] / total[1])
