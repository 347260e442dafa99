"""The command line of the demo: Megatron's own flag names and defaults, plus the kit's ``--msprobe-*`` flags.

First station of the training script; imports neither torch nor Megatron, so that ``--help`` and a bad flag
answer at once. What the values must obey together is in `checks`.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from typing import NoReturn

PROGRAM = "pretrain_gpt.py"
_EXAMPLE = """\
example:
  torchrun --nproc-per-node 4 -m msprobe_megatron.demo.pretrain_gpt --num-layers 4 --hidden-size 64
    --num-attention-heads 4 --seq-length 32 --micro-batch-size 2 --global-batch-size 8 --train-iters 5
    --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --msprobe-config probe.yaml
"""


class UsageError(Exception):
    """The flags cannot be used together or with this Megatron; the message is the one line the user sees."""


class Parser(argparse.ArgumentParser):
    """Speaks on rank 0 only, and never abbreviates: Megatron's flags are prefixes of one another."""

    def error(self, message: str) -> NoReturn:
        """Print one line on rank 0 and leave with code 2 on every rank."""
        refuse(f"{self.prog}: error: {message}")


def refuse(line: str) -> NoReturn:
    """Leave with exit code 2 after saying why, once.

    Under torchrun the first process to die takes the others with it: ranks that have nothing to say wait, so
    that rank 0 is never killed before its line is out.
    """
    if int(os.environ.get("RANK", "0") or 0) == 0:
        print(line, file=sys.stderr, flush=True)
    elif "TORCHELASTIC_RUN_ID" in os.environ:
        time.sleep(5)
    raise SystemExit(2)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Read and check the flags; exits with code 2 on a bad one.

    Example::

        >>> args = parse("--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 8 "
        ...              "--micro-batch-size 1 --train-iters 1".split())
        >>> args.ffn_hidden_size, args.data_parallel_size
        (64, 1)
    """
    from msprobe_megatron.lab.demo.checks import complete

    parser = build_parser()
    args = parser.parse_args(list(argv))
    try:
        return complete(args, int(os.environ.get("WORLD_SIZE", "1") or 1))
    except UsageError as fault:
        parser.error(str(fault))


def build_parser() -> Parser:
    """All flags; the kit's own come last, as they do in Megatron's parser."""
    from msprobe_megatron.config.flags import add_arguments

    parser = Parser(
        prog=PROGRAM,
        description="Pretrain a tiny GPT with megatron.core; weights and data do not depend on the layout.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    for add in (_network, _training, _precision, _parallel, _moe, _recompute, _run, _without_effect):
        add(parser)
    add_arguments(parser)
    return parser


def _network(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("network size and architecture")
    group.add_argument("--num-layers", type=int, required=True)
    group.add_argument("--hidden-size", type=int, required=True)
    group.add_argument("--ffn-hidden-size", type=int, help="default 4*hidden, with --swiglu 4*hidden*2/3 in 64s")
    group.add_argument("--num-attention-heads", type=int, required=True)
    group.add_argument("--kv-channels", type=int, help="default hidden/heads")
    group.add_argument("--group-query-attention", action="store_true", help="implied by --num-query-groups")
    group.add_argument("--num-query-groups", type=int, help="default: one for each attention head")
    group.add_argument("--seq-length", type=int, required=True)
    group.add_argument("--max-position-embeddings", type=int, help="default: --seq-length")
    group.add_argument("--vocab-size", type=int, default=1024)
    group.add_argument("--make-vocab-size-divisible-by", type=int, default=128, help="and by the TP size")
    group.add_argument(
        "--position-embedding-type", default="learned_absolute", choices=["learned_absolute", "rope", "none"]
    )
    group.add_argument("--rotary-base", type=int, default=10000)
    group.add_argument("--rotary-percent", type=float, default=1.0)
    group.add_argument("--normalization", default="LayerNorm", choices=["LayerNorm", "RMSNorm"])
    group.add_argument("--norm-epsilon", type=float, default=1e-5)
    group.add_argument("--swiglu", action="store_true")
    group.add_argument("--squared-relu", action="store_true")
    group.add_argument("--untie-embeddings-and-output-weights", action="store_true")
    group.add_argument("--disable-bias-linear", dest="add_bias_linear", action="store_false")
    group.add_argument("--add-qkv-bias", action="store_true")
    group.add_argument("--qk-layernorm", action="store_true")
    group.add_argument("--attention-dropout", type=float, default=0.1)
    group.add_argument("--hidden-dropout", type=float, default=0.1)
    group.add_argument("--init-method-std", type=float, default=0.02)
    group.add_argument(
        "--transformer-impl",
        choices=["local", "transformer_engine"],
        help="default: transformer_engine on an accelerator that has it, else local",
    )


def _training(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("training")
    group.add_argument("--micro-batch-size", type=int, required=True)
    group.add_argument("--global-batch-size", type=int, help="default: one microbatch a data-parallel rank")
    group.add_argument("--train-iters", type=int, required=True)
    group.add_argument("--lr", type=float, default=1e-3, help="constant; default 1e-3")
    group.add_argument("--weight-decay", type=float, default=0.01)
    group.add_argument("--clip-grad", type=float, default=1.0)
    group.add_argument("--optimizer", default="adam", choices=["adam", "sgd", "muon", "dist_muon"])
    group.add_argument("--adam-beta1", type=float, default=0.9)
    group.add_argument("--adam-beta2", type=float, default=0.999)
    group.add_argument("--adam-eps", type=float, default=1e-8)
    group.add_argument("--sgd-momentum", type=float, default=0.9)
    group.add_argument("--seed", type=int, default=1234)
    group.add_argument(
        "--no-check-for-nan-in-loss-and-grad", dest="check_for_nan_in_loss_and_grad", action="store_false"
    )


def _precision(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("mixed precision")
    group.add_argument("--bf16", action="store_true")
    group.add_argument("--fp16", action="store_true")
    group.add_argument("--accumulate-allreduce-grads-in-fp32", action="store_true", help="always so with --bf16")
    group.add_argument("--attention-softmax-in-fp32", action="store_true")
    group.add_argument("--loss-scale", type=float, help="static; default: dynamic")
    group.add_argument("--initial-loss-scale", type=float, default=2.0**32)
    group.add_argument("--min-loss-scale", type=float, default=1.0)
    group.add_argument("--loss-scale-window", type=float, default=1000)
    group.add_argument("--hysteresis", type=int, default=2)


def _parallel(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("distributed")
    group.add_argument("--tensor-model-parallel-size", type=int, default=1)
    group.add_argument("--pipeline-model-parallel-size", type=int, default=1)
    group.add_argument("--num-layers-per-virtual-pipeline-stage", type=int)
    group.add_argument("--num-virtual-stages-per-pipeline-rank", type=int)
    group.add_argument("--decoder-first-pipeline-num-layers", type=int)
    group.add_argument("--decoder-last-pipeline-num-layers", type=int)
    group.add_argument("--no-overlap-p2p-communication", dest="overlap_p2p_comm", action="store_false")
    group.add_argument("--context-parallel-size", type=int, default=1)
    group.add_argument("--sequence-parallel", action="store_true")
    group.add_argument("--use-distributed-optimizer", action="store_true")
    group.add_argument("--use-precision-aware-optimizer", action="store_true", help="needs TransformerEngine")
    group.add_argument("--main-params-dtype", default="fp32", choices=["fp32", "fp16"])
    for name in ("--exp-avg-dtype", "--exp-avg-sq-dtype"):
        group.add_argument(name, default="fp32", choices=["fp32", "fp16", "bf16", "fp8"])
    group.add_argument("--overlap-grad-reduce", action="store_true")
    group.add_argument("--overlap-param-gather", action="store_true")
    group.add_argument("--ddp-bucket-size", type=int)
    group.add_argument("--ddp-average-in-collective", action="store_true")
    group.add_argument(
        "--distributed-backend",
        default="nccl",
        choices=["nccl", "hccl", "gloo"],
        help="gloo on CPU, whatever is asked; nccl means hccl on an NPU",
    )
    group.add_argument("--distributed-timeout-minutes", type=int, default=10)


def _moe(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("mixture of experts")
    group.add_argument("--num-experts", type=int)
    group.add_argument("--expert-model-parallel-size", type=int, default=1)
    group.add_argument("--expert-tensor-parallel-size", type=int, help="default: the TP size")
    group.add_argument("--moe-ffn-hidden-size", type=int, help="default: --ffn-hidden-size")
    group.add_argument("--moe-router-topk", type=int, default=2)
    group.add_argument("--moe-router-load-balancing-type", default="aux_loss",
                       choices=["aux_loss", "seq_aux_loss", "sinkhorn", "none"])  # fmt: skip
    group.add_argument("--moe-aux-loss-coeff", type=float, default=0.0)
    group.add_argument("--moe-expert-capacity-factor", type=float, help="drop tokens beyond it")
    group.add_argument("--moe-token-dispatcher-type", default="allgather", choices=["allgather", "alltoall"])


def _recompute(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("activation recomputation")
    group.add_argument(
        "--recompute-activations", action="store_true", help="short for --recompute-granularity selective"
    )
    group.add_argument("--recompute-granularity", choices=["full", "selective"])
    group.add_argument("--recompute-method", choices=["uniform", "block"])
    group.add_argument("--recompute-num-layers", type=int)
    modules = ["core_attn", "mlp", "moe", "layernorm", "moe_act", "mla_up_proj", "shared_experts"]
    group.add_argument("--recompute-modules", nargs="+", choices=modules)
    group.add_argument("--distribute-saved-activations", action="store_true")


def _run(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("logging")
    group.add_argument("--log-interval", type=int, default=100)
    group.add_argument(
        "--practise",
        choices=["nan", "spike", "mismatch", "drift", "unstable"],
        help="break the job on purpose, to find the fault with the kit (docs/walkthroughs.md)",
    )
    group.add_argument("--save-losses", metavar="FILE", help="JSON lines: iteration, loss, grad_norm, unrounded")


# Common in command lines written for Megatron's own pretrain_gpt.py; here there is nothing they could change.
_IGNORED_SWITCHES = """
--mock-data --use-mcore-models --use-cpu-initialization --use-flash-attn --log-throughput
--no-persist-layer-norm --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-bias-dropout-fusion
--no-bias-gelu-fusion --no-bias-swiglu-fusion --no-rope-fusion
""".split()  # noqa: SIM905
_IGNORED_VALUES = """
--num-workers --tokenizer-type --split --eval-iters --eval-interval --save-interval --lr-decay-style --min-lr
--lr-warmup-fraction --timing-log-level
""".split()  # noqa: SIM905


def _without_effect(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("accepted, without effect")
    for flag in _IGNORED_SWITCHES:
        group.add_argument(flag, action="store_true")
    for flag in _IGNORED_VALUES:
        group.add_argument(flag, metavar="…")
