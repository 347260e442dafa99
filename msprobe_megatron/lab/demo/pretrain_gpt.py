"""Entry point of the demo: ``python -m msprobe_megatron.demo.pretrain_gpt``, alone or under torchrun.

Parses the flags, chooses the device, makes and destroys the process groups, and hands over to `model` and
`train`. With ``--msprobe-config`` it attaches the kit as any megatron.core script would; without, it imports
nothing of the kit beyond what the demo itself is built from.
"""

from __future__ import annotations

import sys
import warnings
from argparse import Namespace
from collections.abc import Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from typing import TYPE_CHECKING, Any

from msprobe_megatron.lab.demo.arguments import PROGRAM, UsageError, parse, refuse

if TYPE_CHECKING:
    import torch

    from msprobe_megatron.lab.demo.data import Batches
    from msprobe_megatron.lab.demo.train import Callbacks, Result


def main() -> None:
    """Run with the flags of the command line."""
    # What Megatron lacks on this machine (Apex, TransformerEngine) it says at import, on every rank.
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.")
    run(sys.argv[1:])


def run(argv: Sequence[str], callbacks: Callbacks | None = None) -> Result:
    """Train once in this process and return what it left; process groups are made and destroyed here.

    RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are read from the environment, as torchrun sets them;
    without them the run is a single process.

    Example::

        >>> run("--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 8 "
        ...     "--micro-batch-size 1 --train-iters 2".split()).losses
        [6.944507122039795, 6.9075446128845215]
    """
    args = parse(argv)
    probe = Probe(args)
    from msprobe_megatron.lab.demo import launch, transformer

    try:
        device = launch.prepare_device(args, probe.device)
        config = transformer.build_config(args)
    except UsageError as fault:
        refuse(f"{PROGRAM}: error: {fault}")
    launch.start_groups(args)
    try:
        launch.seed_everything(args.seed)
        return _train(args, config, probe, device, callbacks)
    finally:
        launch.stop_groups()


def _train(args: Namespace, config: Any, probe: Probe, device: torch.device, callbacks: Callbacks | None) -> Result:
    from msprobe_megatron.lab.demo.model import build_chunks
    from msprobe_megatron.lab.demo.optimizer import build_optimizer
    from msprobe_megatron.lab.demo.train import train

    chunks = build_chunks(args, config)
    optimizer = build_optimizer(args, config, chunks)
    batches = _batches(args, chunks, device)
    if callbacks and callbacks.ready:
        callbacks.ready(chunks, optimizer)
    with probe.attached(chunks, optimizer):
        return train(args, chunks, optimizer, batches, callbacks)


def _batches(args: Namespace, chunks: Any, device: torch.device) -> Batches:
    from msprobe_megatron.lab.demo import data, practice
    from msprobe_megatron.topology import coordinates

    where = coordinates.current()
    if not args.practise:
        return data.Batches(args, where, device)
    batches = practice.PractisedBatches(args, where, device)
    practice.prepare(args.practise, chunks, batches)
    return batches


class Probe:
    """The kit as this script uses it: its flags, and `attach` when a probe file is named.

    The probe file is read at once, so that a mistake in it costs no set-up.
    """

    def __init__(self, args: Namespace) -> None:
        from msprobe_megatron.config.document import ConfigError
        from msprobe_megatron.config.flags import from_namespace

        self._args = args
        try:
            flags = from_namespace(args)
            self._config = flags.load_config() if flags.armed else None
        except ConfigError as fault:
            refuse(str(fault))
        self.device = flags.device

    def attached(self, chunks: Any, optimizer: Any) -> AbstractContextManager[Any]:
        """Arm the job if a probe file was named; closing the context ends the session."""
        if self._config is None:
            return nullcontext()
        from msprobe_megatron import attach
        from msprobe_megatron.job.session.faults import REFUSALS

        try:
            return closing(attach(chunks, optimizer, self._config, arguments=self._args))
        except REFUSALS as fault:
            refuse(f"msprobe: {fault}")


if __name__ == "__main__":
    main()
