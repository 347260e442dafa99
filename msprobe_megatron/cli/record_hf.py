"""`msprobe-megatron record-hf`: a run of a Hugging Face model on given tokens, to compare Megatron's with."""

from __future__ import annotations

import argparse
import json

from msprobe_megatron.cli.commands import CANNOT, OK

HELP = "run a causal language model of Hugging Face on given tokens and record it as a run"
EXAMPLE = "msprobe-megatron record-hf ./Qwen3-8B --data tokens.json --out golden"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's own arguments."""
    parser.add_argument("model", metavar="MODEL_DIR", help="directory of the model: config.json and safetensors")
    parser.add_argument("--data", required=True, metavar="FILE", help="token ids as JSON: [[1, 2, 3], …]")
    parser.add_argument("--out", default="hf_out", metavar="DIR", help="run directory to write (default: hf_out)")
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16", "float16"))
    parser.add_argument(
        "--device", default="auto", help="cpu, cuda, npu; the default is an accelerator if there is one"
    )
    parser.add_argument("--batch", type=int, default=8, help="most samples of one length in a pass (default: 8)")
    parser.add_argument("--statistics", action="store_true", help="do not save whole tensors, only their statistics")


def run(arguments: argparse.Namespace) -> int:
    """Do it; returns the exit code."""
    from msprobe_megatron.hosts.hugging_face import record

    found = record(
        arguments.model,
        arguments.data,
        arguments.out,
        dtype=arguments.dtype,
        device=arguments.device,
        batch=max(1, arguments.batch),
        tensors=not arguments.statistics,
    )
    print(json.dumps(found) if arguments.json else f"{found['class']}: {len(found['steps'])} passes in {found['run']}")
    return CANNOT if found["faults"] or not found["steps"] else OK
