"""The ``checks`` section: comparisons between ranks."""

from dataclasses import dataclass

from msprobe_megatron.config.document import Node
from msprobe_megatron.config.keys import BOOLEAN, integer, key, other_settings, refuse_all_off, section, switches


@dataclass(frozen=True)
class ChecksConfig:
    """The ``checks`` section: comparisons between ranks, the only feature of the kit that communicates.

    ``replicas``: weights and gradients that several ranks hold; ``optimizer``: shards tile the weights, learning rate
    and step agree; ``rng``: random generators agree or differ as they should; ``collectives``: results of
    communication; ``update``: a few elements of every weight around the optimizer step, from which ``diagnose`` tells
    whether the step follows its formula; ``products``: a few elements of every weight gradient, computed a second
    time from inputs and output gradients of its module.
    """

    replicas: bool = key(True, BOOLEAN, "weights and gradients that several ranks hold are equal", "true")
    optimizer: bool = key(True, BOOLEAN, "shards tile the weights; learning rate and step agree", "false")
    rng: bool = key(True, BOOLEAN, "random generators agree or differ as they should", "false")
    collectives: bool = key(False, BOOLEAN, "results of collectives match their inputs", "true")
    update: bool = key(True, BOOLEAN, "samples every weight around the optimizer step, for the law of updates", "false")
    products: bool = key(
        True, BOOLEAN, "sampled gradients are held against their inputs, for the law of weight gradients", "false"
    )
    every: int = key(100, integer(1), "interval between two checked steps; steps that are dumped are checked too", "1")

    def describe(self) -> str:
        """One line for `msprobe-megatron validate`."""
        kinds = [name for name in switches(ChecksConfig) if getattr(self, name)]
        when = "every step" if self.every == 1 else f"every {self.every} steps"
        return ", ".join([*kinds, when, *other_settings(self, *switches(ChecksConfig), "every")])


def _check(config: ChecksConfig, node: Node) -> None:
    refuse_all_off(config, switches(ChecksConfig), node)


CHECKS = section(ChecksConfig, _check)
