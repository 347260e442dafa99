"""`msprobe-megatron init`: a probe file for a symptom, with what it is going to cost."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from msprobe_megatron.cli.commands import OK

if TYPE_CHECKING:
    from msprobe_megatron.analysis.settings.prediction import Prediction, Shape

HELP = "a commented probe file for a symptom, with its cost and size predicted for your launch script"
EXAMPLE = "msprobe-megatron init spike --launch pretrain.sh > probe.yaml"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's own arguments."""
    from msprobe_megatron.config.symptoms import SYMPTOMS

    seen = "; ".join(f"{name}: {symptom.seen}" for name, symptom in SYMPTOMS.items())
    parser.add_argument("symptom", choices=list(SYMPTOMS), help=seen)
    parser.add_argument("--launch", metavar="SCRIPT", help="launch script of the job: predicts cost and size")
    parser.add_argument("--output", metavar="DIR", default="./probe_out", help="run directory (default: %(default)s)")


def run(arguments: argparse.Namespace) -> int:
    """Do it; returns the exit code."""
    from msprobe_megatron.analysis.settings.launch_scripts import read_script
    from msprobe_megatron.analysis.settings.prediction import predict, shape_of
    from msprobe_megatron.config import from_document
    from msprobe_megatron.config.document import parse_document_text
    from msprobe_megatron.config.symptoms import SYMPTOMS, probe_text

    symptom, text = SYMPTOMS[arguments.symptom], probe_text(arguments.symptom, arguments.output)
    then = [line.format(run=arguments.output) for line in symptom.then]
    config = from_document(parse_document_text(text, "init"), "init")
    shape = shape_of(read_script(Path(arguments.launch)).arguments if arguments.launch else {})
    predictions = predict(config, shape) if arguments.launch else []
    if arguments.json:
        found = {"symptom": arguments.symptom, "text": text, "predictions": [one.as_dict() for one in predictions]}
        print(json.dumps({**found, "assumed": list(shape.assumed) if arguments.launch else [], "then": then}))
        return OK
    lines = [f"# {arguments.symptom}: {symptom.seen}."]
    lines += [f"# {line}" for line in _cost(predictions, shape)]
    lines += ["# Start: torchrun ... -m msprobe_megatron.run pretrain_gpt.py ... --msprobe-config THIS_FILE"]
    lines += [f"# Then:  {line}" for line in then]
    print("\n".join(lines))
    print(text, end="")
    return OK


def _cost(predictions: list[Prediction], shape: Shape) -> list[str]:
    from msprobe_megatron.report.terminal.tables import size_text

    if not predictions:
        return ["Cost: not predicted; with --launch SCRIPT it is, from the flags of the job."]
    lines = []
    for one in predictions:
        when = "in memory per step" if one.feature == "recorder" else "per recorded step"
        text = f"{one.feature}: ~{one.rows:,} rows, ~{size_text(one.bytes_per_step)} {when} and rank"
        if one.bytes is not None:
            what = "if it is written" if one.feature == "recorder" else f"for {one.steps:,} steps"
            text += f", ~{size_text(one.bytes)} {what} on {one.ranks} ranks"
        lines.append(f"{text}; ~{one.seconds:.2g} s of host time per step")
    shown = f"{shape.layers} layers and {shape.microbatches} microbatches a rank"
    assumed = f"; assumed: {' '.join(shape.assumed)}" if shape.assumed else ""
    return [*lines, f"Predicted for {shown}{assumed}; within a factor of two. The job says what its first step took."]
