"""What the flags must obey together, before a process group or a model exists.

Megatron checks the same in `validate_args` and, deeper, in its configs. `complete` also derives what Megatron
derives (data-parallel size, padded vocabulary, virtual stages), so that later files only read. It runs right
after the parser; what it raises becomes the parser's one-line error.
"""

from __future__ import annotations

import math
from argparse import Namespace

from msprobe_megatron.lab.demo.arguments import UsageError

_POSITIVE = """
num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels seq_length
vocab_size max_position_embeddings make_vocab_size_divisible_by rotary_base norm_epsilon micro_batch_size
global_batch_size train_iters lr log_interval tensor_model_parallel_size pipeline_model_parallel_size
context_parallel_size num_layers_per_virtual_pipeline_stage num_virtual_stages_per_pipeline_rank
decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers recompute_num_layers num_experts
expert_model_parallel_size expert_tensor_parallel_size moe_ffn_hidden_size moe_router_topk ddp_bucket_size
moe_expert_capacity_factor loss_scale initial_loss_scale distributed_timeout_minutes
""".split()  # noqa: SIM905
_NOT_NEGATIVE = ("weight_decay", "clip_grad", "moe_aux_loss_coeff", "init_method_std")
_FRACTIONS = ("attention_dropout", "hidden_dropout")


def complete(args: Namespace, world_size: int) -> Namespace:
    """Derive the dependent values and raise UsageError for the first rule that is broken."""
    args.world_size = world_size
    for check in (
        _ranges,
        _derive_sizes,
        _world,
        _network,
        _stages,
        _experts,
        _precision,
        _batch,
        _recompute,
    ):
        check(args)
    return args


def flag(name: str) -> str:
    """Spell an attribute as the user typed it.

    Example::

        >>> flag("num_layers")
        '--num-layers'
    """
    return "--" + name.replace("_", "-")


def _require(holds: bool, line: str) -> None:
    if not holds:
        raise UsageError(line)


def _require_divisible(args: Namespace, whole: str, part: str) -> None:
    large, small = getattr(args, whole), getattr(args, part)
    _require(large % small == 0, f"{flag(whole)} ({large}) is not divisible by {flag(part)} ({small})")


def _require_with(args: Namespace, name: str, holds: bool, needed: str) -> None:
    """Demand `needed` of whoever gave the flag `name`."""
    value = getattr(args, name)
    given = value is not None and value is not False
    shown = flag(name) if value is True else f"{flag(name)} {value}"
    _require(not given or holds, f"{shown} needs {needed}")


def _exclusive(args: Namespace, first: str, second: str) -> None:
    both = getattr(args, first) and getattr(args, second)
    _require(not both, f"{flag(first)} and {flag(second)} exclude each other")


def _ranges(args: Namespace) -> None:
    for name in _POSITIVE:
        value = getattr(args, name)
        _require(value is None or value > 0, f"{flag(name)}: {value} is not positive")
    for name in _NOT_NEGATIVE:
        _require(getattr(args, name) >= 0, f"{flag(name)}: {getattr(args, name)} is negative")
    for name in _FRACTIONS:
        value = getattr(args, name)
        _require(0 <= value < 1, f"{flag(name)}: {value} is not from 0 up to, not including, 1")


def _derive_sizes(args: Namespace) -> None:
    if args.ffn_hidden_size is None:
        # Megatron's rule: two thirds for gated units, in steps of 64, keeps the number of parameters.
        gated = max(64, int(4 * args.hidden_size * 2 / 3 / 64) * 64)
        args.ffn_hidden_size = gated if args.swiglu else 4 * args.hidden_size
    args.num_query_groups = args.num_query_groups or args.num_attention_heads
    args.max_position_embeddings = args.max_position_embeddings or args.seq_length
    # Megatron multiplies by the TP size instead. Padded logits count in the softmax: every TP size would be
    # another model.
    multiple = math.lcm(args.make_vocab_size_divisible_by, args.tensor_model_parallel_size)
    args.padded_vocab_size = -(-args.vocab_size // multiple) * multiple
    # One TP rank has no sequence to share: Megatron switches the flag off, and readers of it must see that.
    args.sequence_parallel = args.sequence_parallel and args.tensor_model_parallel_size > 1


def _world(args: Namespace) -> None:
    axes = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    model = 1
    for axis in axes:
        model *= getattr(args, axis)
    product = " x ".join(f"{flag(axis)} {getattr(args, axis)}" for axis in axes)
    _require(
        args.world_size % model == 0,
        f"world size ({args.world_size}) is not divisible by total model size ({model} = {product})",
    )
    args.data_parallel_size = args.world_size // model


def _network(args: Namespace) -> None:
    tp, cp, length = args.tensor_model_parallel_size, args.context_parallel_size, args.seq_length
    if args.kv_channels is None:
        _require_divisible(args, "hidden_size", "num_attention_heads")
        args.kv_channels = args.hidden_size // args.num_attention_heads
    _require_divisible(args, "num_attention_heads", "tensor_model_parallel_size")
    _require_divisible(args, "num_attention_heads", "num_query_groups")
    _require_divisible(args, "num_query_groups", "tensor_model_parallel_size")
    _require_divisible(args, "ffn_hidden_size", "tensor_model_parallel_size")
    limit = args.max_position_embeddings
    _require(limit >= length, f"--max-position-embeddings ({limit}) is less than --seq-length ({length})")
    _require(
        cp == 1 or length % (2 * cp) == 0,
        f"--seq-length ({length}) is not divisible by 2 x --context-parallel-size ({2 * cp})",
    )
    _require(
        not args.sequence_parallel or length // cp % tp == 0,
        f"--sequence-parallel: --seq-length over --context-parallel-size ({length}/{cp}) is not divisible by "
        f"--tensor-model-parallel-size ({tp})",
    )
    even = args.position_embedding_type != "rope" or args.kv_channels % 2 == 0
    _require(even, f"--position-embedding-type rope: the size of a head ({args.kv_channels}) is odd")
    _exclusive(args, "swiglu", "squared_relu")


def _stages(args: Namespace) -> None:
    pp = args.pipeline_model_parallel_size
    first, last = args.decoder_first_pipeline_num_layers, args.decoder_last_pipeline_num_layers
    for name in ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"):
        _require_with(args, name, pp > 1, "--pipeline-model-parallel-size above 1")
    middle = args.num_layers - (first or 0) - (last or 0)
    stages = pp - (first is not None) - (last is not None)
    fits = middle == 0 if stages == 0 else middle > 0 and middle % stages == 0
    rest = f"--num-layers ({args.num_layers})"
    if first or last:
        rest = f"the {middle} of {rest} left by --decoder-first/last-pipeline-num-layers"
    _require(fits, f"{rest}: not divisible by {stages} of --pipeline-model-parallel-size ({pp}) stages")
    counts = {count for count in (first, last, middle // stages if stages else None) if count}
    _virtual_stages(args, counts)


def _virtual_stages(args: Namespace, counts: set[int]) -> None:
    """Derive the number of virtual stages; without them p2p is not overlapped, as in Megatron."""
    _exclusive(args, "num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank")
    per_stage, pp = args.num_layers_per_virtual_pipeline_stage, args.pipeline_model_parallel_size
    virtual = args.num_virtual_stages_per_pipeline_rank or 1
    if per_stage:
        _require(
            len(counts) == 1,
            "--num-layers-per-virtual-pipeline-stage cannot describe uneven stages; "
            "use --num-virtual-stages-per-pipeline-rank",
        )
        layers = min(counts)
        _require(
            layers % per_stage == 0,
            f"layers of a pipeline stage ({layers}) are not divisible by "
            f"--num-layers-per-virtual-pipeline-stage ({per_stage})",
        )
        virtual = layers // per_stage
    args.virtual_pipeline_model_parallel_size = virtual if virtual > 1 else None
    args.layers_per_chunk = sorted(layers // virtual for layers in counts)
    if virtual == 1:
        args.overlap_p2p_comm = False
        return
    for layers in sorted(counts):
        _require(
            layers % virtual == 0,
            f"layers of a pipeline stage ({layers}) are not divisible by its virtual stages ({virtual})",
        )
    # With two stages the previous and the next rank are one peer, and batched sends would cross.
    least = 2 if args.overlap_p2p_comm else 3
    how = "" if args.overlap_p2p_comm else " with --no-overlap-p2p-communication"
    _require(
        pp >= least,
        f"virtual pipeline stages{how} need --pipeline-model-parallel-size of at least {least}, not {pp}",
    )


def _experts(args: Namespace) -> None:
    tp, ep = args.tensor_model_parallel_size, args.expert_model_parallel_size
    if args.num_experts is None:
        _require(ep == 1, f"--expert-model-parallel-size {ep} needs --num-experts")
        for name in ("expert_tensor_parallel_size", "moe_ffn_hidden_size", "moe_expert_capacity_factor"):
            _require_with(args, name, False, "--num-experts")
        return
    args.moe_ffn_hidden_size = args.moe_ffn_hidden_size or args.ffn_hidden_size
    args.expert_tensor_parallel_size = args.expert_tensor_parallel_size or tp
    _require_divisible(args, "num_experts", "expert_model_parallel_size")
    _require_divisible(args, "moe_ffn_hidden_size", "expert_tensor_parallel_size")
    _require(
        args.moe_router_topk <= args.num_experts,
        f"--moe-router-topk ({args.moe_router_topk}) exceeds --num-experts ({args.num_experts})",
    )
    model = args.expert_tensor_parallel_size * ep * args.pipeline_model_parallel_size
    _require(
        args.world_size % model == 0,
        f"world size ({args.world_size}) is not divisible by {model} = --expert-tensor-parallel-size "
        f"{args.expert_tensor_parallel_size} x --expert-model-parallel-size {ep} x "
        f"--pipeline-model-parallel-size {args.pipeline_model_parallel_size}",
    )
    _require_with(
        args,
        "num_experts",
        tp == 1 or args.sequence_parallel,
        f"--sequence-parallel with --tensor-model-parallel-size {tp}",
    )
    # Megatron adds the bias of experts once a TP rank, and modifies a view in place where there is one rank.
    _require_with(args, "num_experts", not args.add_bias_linear, "--disable-bias-linear")


def _precision(args: Namespace) -> None:
    _exclusive(args, "fp16", "bf16")
    _require_with(args, "loss_scale", args.fp16, "--fp16")
    _require_with(args, "overlap_param_gather", args.use_distributed_optimizer, "--use-distributed-optimizer")
    _require_with(args, "overlap_param_gather", args.overlap_grad_reduce, "--overlap-grad-reduce")
    aware = "use_precision_aware_optimizer"
    _require_with(args, aware, args.use_distributed_optimizer, "--use-distributed-optimizer")
    _require_with(args, aware, args.optimizer == "adam", "--optimizer adam")
    for name in ("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"):
        value = getattr(args, name)
        holds = value == "fp32" or args.use_precision_aware_optimizer
        _require(holds, f"{flag(name)} {value} needs --use-precision-aware-optimizer")
    muon = "muon" not in args.optimizer
    _require(muon or not args.use_distributed_optimizer, "--optimizer muon excludes --use-distributed-optimizer")
    _require(muon or not args.fp16, "--optimizer muon excludes --fp16")
    # Megatron does so for bf16: sums of many small bf16 gradients lose their low bits.
    args.accumulate_allreduce_grads_in_fp32 = args.accumulate_allreduce_grads_in_fp32 or args.bf16


def _batch(args: Namespace) -> None:
    share = args.micro_batch_size * args.data_parallel_size
    args.global_batch_size = args.global_batch_size or share
    _require(
        args.global_batch_size % share == 0,
        f"--global-batch-size ({args.global_batch_size}) is not divisible by --micro-batch-size "
        f"({args.micro_batch_size}) times data parallel size ({args.data_parallel_size})",
    )
    args.num_microbatches = args.global_batch_size // share
    pp = args.pipeline_model_parallel_size
    _require(
        args.virtual_pipeline_model_parallel_size is None or args.num_microbatches % pp == 0,
        f"number of microbatches ({args.num_microbatches}) is not divisible by "
        f"--pipeline-model-parallel-size ({pp}), which virtual pipeline stages need",
    )


def _recompute(args: Namespace) -> None:
    if args.recompute_activations:
        _require(
            args.recompute_granularity != "full",
            "--recompute-activations and --recompute-granularity full exclude each other",
        )
        args.recompute_granularity = "selective"
    full = args.recompute_granularity == "full"
    for name in ("recompute_method", "recompute_num_layers", "distribute_saved_activations"):
        _require_with(args, name, full, "--recompute-granularity full")
    _require_with(
        args,
        "recompute_modules",
        args.recompute_granularity == "selective",
        "--recompute-granularity selective",
    )
    # A bias that leaves a checkpointed module becomes its own ancestor in the graph: Megatron then recurses.
    _require(
        "mlp" not in (args.recompute_modules or ()) or not args.add_bias_linear,
        "--recompute-modules mlp needs --disable-bias-linear",
    )
    if not full:
        return
    _require(
        args.recompute_method is not None,
        "--recompute-granularity full needs --recompute-method; accepted: uniform, block",
    )
    args.recompute_num_layers = args.recompute_num_layers or 1
    _require(
        args.recompute_num_layers <= args.num_layers,
        f"--recompute-num-layers ({args.recompute_num_layers}) exceeds --num-layers ({args.num_layers})",
    )
    for layers in args.layers_per_chunk:
        _require(
            args.recompute_method == "block" or layers % args.recompute_num_layers == 0,
            f"--recompute-method uniform: the {layers} layers of a (virtual) pipeline stage are not "
            f"divisible by --recompute-num-layers ({args.recompute_num_layers})",
        )
    tp = args.tensor_model_parallel_size
    _require_with(args, "distribute_saved_activations", tp > 1, "--tensor-model-parallel-size above 1")
    _exclusive(args, "distribute_saved_activations", "sequence_parallel")
