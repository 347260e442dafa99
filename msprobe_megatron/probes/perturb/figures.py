"""Where the figures of examined calls wait, on the device that computed them, until a few steps are written."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from msprobe_megatron.measure import pair
from msprobe_megatron.probes.perturb import reference

MORE = ("dx_squares", "x_squares", "input_sum", "cpu_abs", "cpu_rel", "cpu_balance")
NAMES = (*pair.NAMES, *reference.NAMES, *MORE)
WIDTH = len(NAMES)
PLACE = {name: index for index, name in enumerate(NAMES)}
REFERENCE = slice(pair.COUNT, pair.COUNT + reference.COUNT)
_ROWS = 256


class Figures:
    """One line of figures for each examined result; NaN where something was not computed.

    Example::

        figures = Figures(backend.device, backend.float_dtype, backend.to_host)
        number, line = figures.take()
        pair.compare(live, again, line)
        figures.seal()()[number, PLACE["different"]]
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, to_host: Callable[[torch.Tensor], Any]) -> None:
        self._device, self._dtype, self._to_host = device, dtype, to_host
        self._blocks: list[torch.Tensor] = []
        self._lines: list[torch.Tensor] = []
        self._next = itertools.count()
        self.changing = threading.RLock()
        """Held while a line is taken, a row that names it is kept, and all of them are handed over."""
        self.turn = 0
        """How often they were handed over: a line that was taken before the last time is nobody's."""

    def take(self) -> tuple[int, torch.Tensor]:
        """A new line and its number."""
        with self.changing:
            number = next(self._next)
            if number >= len(self._lines):
                with torch.inference_mode(False), torch.no_grad():
                    block = torch.full((_ROWS, WIDTH), torch.nan, dtype=self._dtype, device=self._device)
                    self._blocks.append(block)
                    self._lines.extend(block.unbind(0))
            return number, self._lines[number]

    def seal(self) -> Callable[[], npt.NDArray[np.float64]]:
        """Start the copies to the host; what is returned waits for them. The table is empty again."""
        with self.changing:
            taken = next(self._next)
            copies = [self._to_host(block) for block in self._blocks[: -(-taken // _ROWS)]]
            self._blocks, self._lines, self._next = [], [], itertools.count()
            self.turn += 1

        def arrived() -> npt.NDArray[np.float64]:
            if not copies:
                return np.empty((0, WIDTH))
            return np.concatenate([copy.wait().numpy().astype(np.float64) for copy in copies])

        return arrived
