"""Starts Megatron-LM's own, unedited pretrain_gpt.py on CPU, from a checkout named by MEGATRON_LM_PATH."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from msprobe_megatron.hosts.rehearsal.finding import STAND_INS
from tests.support.ports import free_port

# What the script needs to run where there is no accelerator; the model is the smallest that has every part.
_FLAGS = shlex.split("""
--mock-data --tokenizer-type NullTokenizer --vocab-size 4400 --make-vocab-size-divisible-by 8 --split 99,1,0
--transformer-impl local --distributed-backend gloo --no-gradient-accumulation-fusion --no-masked-softmax-fusion
--no-persist-layer-norm --use-cpu-initialization --log-interval 1 --num-workers 0 --no-bias-dropout-fusion
--no-bias-gelu-fusion --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16
--max-position-embeddings 16 --micro-batch-size 2 --global-batch-size 8 --lr 1e-3 --lr-decay-iters 8
--msprobe-device cpu
""")
_EVALUATION = ("--eval-iters", "0", "--eval-interval", "1000")
_LINE = re.compile(r"iteration +(\d+)/.*? lm loss: (\S+) .*?grad norm: (\S+) ")
FAULT_LINES = 40


@dataclass
class Finished:
    """What a run printed: the loss and the gradient norm of each iteration, as text."""

    code: int
    output: str
    iterations: dict[int, tuple[str, str]] = field(default_factory=dict)

    @classmethod
    def of(cls, code: int, output: str) -> Finished:
        return cls(code, output, {int(n): (loss, norm) for n, loss, norm in _LINE.findall(output)})

    def tail(self) -> str:
        return "\n".join(self.output.splitlines()[-FAULT_LINES:])


@dataclass(frozen=True)
class Host:
    """A checkout and the Python that runs it."""

    checkout: Path
    python: str = sys.executable

    def version(self) -> str:
        text = (self.checkout / "megatron/core/package_info.py").read_text()
        return ".".join(re.findall(r"^(?:MAJOR|MINOR|PATCH) = (\d+)", text, re.MULTILINE))

    @property
    def old(self) -> bool:
        """Before 0.8, which imports Apex and TransformerEngine unconditionally: stubs stand in for both."""
        return int(self.version().split(".")[1]) < 8

    def _old_flags(self) -> tuple[str, ...]:
        if not self.old:
            return ()
        # The optimizer for fp32 cannot be made in 0.6: a method of it is missing.
        precision = ("--bf16",) if int(self.version().split(".")[1]) < 7 else ()
        return ("--use-mcore-models", "--split", "60,30,10", *precision)

    def plain_checkpoints(self) -> tuple[str, ...]:
        """Flags for a checkpoint of one file a rank; releases before 0.9 write no other."""
        return ("--ckpt-format", "torch") if int(self.version().split(".")[1]) >= 9 else ()

    def train(
        self,
        world: int = 1,
        *flags: str,
        iterations: int = 3,
        script: Path | None = None,
        runner: tuple[str, ...] = ("-m", "msprobe_megatron.run"),
        evaluation: tuple[str, ...] = _EVALUATION,
        environment: dict[str, str] | None = None,
    ) -> Finished:
        """Run to the end and read the log; a run that fails is returned like any other."""
        target = str(script or self.checkout / "pretrain_gpt.py")
        if self.old and evaluation is _EVALUATION:
            evaluation = ("--eval-iters", "1", "--eval-interval", "1000")  # a split without samples is an error there
        own = (*self.flags(), "--train-iters", str(iterations))
        command = [*runner, target, *own, *evaluation, *flags]
        return self.run(world, command, environment)

    def flags(self) -> tuple[str, ...]:
        """The smallest model, as this release is told about it."""
        return (*_FLAGS, *self._old_flags())

    def run(self, world: int, command: list[str], environment: dict[str, str] | None = None) -> Finished:
        launcher = [self.python, "-m", "torch.distributed.run", "--nproc_per_node", str(world)]
        launcher += ["--master_port", str(free_port())]
        stubs = [str(STAND_INS)] if self.old else []
        path = os.pathsep.join([str(self.checkout), *stubs, *filter(None, [os.environ.get("PYTHONPATH")])])
        settings = {"OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        done = subprocess.run(
            [*launcher, *command],
            cwd=self.checkout,
            env={**os.environ, **settings, "PYTHONPATH": path, **(environment or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
            check=False,
        )
        return Finished.of(done.returncode, done.stdout)
