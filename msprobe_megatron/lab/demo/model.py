"""Builds what is trained: the model chunks of this pipeline stage, with layout-free weights, inside DDP.

Comes after the process groups and before the optimizer, which copies the weights that are set here.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import Any

from torch import nn

from msprobe_megatron.lab.demo.installed import known
from msprobe_megatron.lab.demo.weights import Initial, fill


def layer_spec(args: Namespace) -> Any:
    """Choose the layers to build: Megatron's own, or TransformerEngine's where asked for."""
    from megatron.core.models.gpt import gpt_layer_specs

    if args.transformer_impl == "transformer_engine":
        build = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec
    else:
        build = gpt_layer_specs.get_gpt_layer_local_spec
    values = {
        "num_experts": args.num_experts,
        "moe_grouped_gemm": False,
        "qk_layernorm": args.qk_layernorm,
        "normalization": args.normalization,
    }
    return build(**known(build, **values))


def build_chunks(args: Namespace, config: Any) -> list[nn.Module]:
    """Build the model chunks of this pipeline stage, one a virtual stage, wrapped for data parallelism."""
    spec = layer_spec(args)
    stages = args.virtual_pipeline_model_parallel_size
    bare = [_chunk(args, config, spec, stage if stages else None) for stage in range(stages or 1)]
    fill(bare, Initial(args.seed, args.init_method_std, args.num_layers))
    return _wrap(args, config, bare)


def _chunk(args: Namespace, config: Any, spec: Any, stage: int | None) -> nn.Module:
    from megatron.core import parallel_state
    from megatron.core.enums import ModelType
    from megatron.core.models.gpt import GPTModel

    if stage is not None:
        parallel_state.set_virtual_pipeline_model_parallel_rank(stage)
    place = {"ignore_virtual": False, "vp_stage": stage}
    chunk: nn.Module = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=_at(parallel_state.is_pipeline_first_stage, place),
        post_process=_at(parallel_state.is_pipeline_last_stage, place),
        parallel_output=True,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        **known(GPTModel.__init__, vp_stage=stage),
    )
    chunk.model_type = ModelType.encoder_or_decoder
    return chunk


def _at(question: Callable[..., bool], place: dict[str, Any]) -> bool:
    return bool(question(**known(question, **place)))


def _wrap(args: Namespace, config: Any, bare: list[nn.Module]) -> list[nn.Module]:
    """Move to the device, round to half precision where asked, then DDP: Megatron's own order."""
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.transformer.module import Float16Module

    half = args.fp16 or args.bf16
    placed = [chunk.cuda() for chunk in bare]
    rounded = [Float16Module(config, chunk) for chunk in placed] if half else placed
    values = {
        "grad_reduce_in_fp32": args.accumulate_allreduce_grads_in_fp32,
        "overlap_grad_reduce": args.overlap_grad_reduce,
        "overlap_param_gather": args.overlap_param_gather,
        "use_distributed_optimizer": args.use_distributed_optimizer,
        # A step with an overflow is skipped by the loss scaler, not a reason to stop.
        "check_for_nan_in_grad": args.check_for_nan_in_loss_and_grad and not args.fp16,
        "bucket_size": args.ddp_bucket_size,
        "average_in_collective": args.ddp_average_in_collective,
    }
    ddp = DistributedDataParallelConfig(**known(DistributedDataParallelConfig, **values))
    chunks: list[nn.Module] = [
        DistributedDataParallel(config=config, ddp_config=ddp, module=chunk, disable_bucketing=index > 0)
        for index, chunk in enumerate(rounded)
    ]
    if args.overlap_grad_reduce:
        quiet, reduce = [c.no_sync for c in chunks], [c.start_grad_sync for c in chunks]
        config.no_sync_func = quiet if len(quiet) > 1 else quiet[0]
        config.grad_sync_func = reduce if len(reduce) > 1 else reduce[0]
    config.finalize_model_grads_func = finalize_model_grads
    return chunks
