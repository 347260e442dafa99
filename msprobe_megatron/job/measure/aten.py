"""Statistics by plain torch operations, for every device: no host read, no branch on data.

The path of accelerators without a kernel of their own, and what the fast CPU path is tested against. Work
goes in pieces of bounded size, so that temporaries stay small next to the tensors of a large model.
"""

from __future__ import annotations

import torch

from msprobe_megatron.measure.flatten import flat_pieces

PIECE = 1 << 22
"""Elements in work at once: about 32 MiB for each float64 temporary."""

_WIDE = (torch.float32, torch.float64)


def measure_generic(x: torch.Tensor, times: int, floats: torch.Tensor, counts: torch.Tensor) -> None:
    """Write the statistics of real, non-empty ``x``, each element standing for ``times``, into the two slots.

    ``floats.dtype`` is the dtype of accumulation. With float32 (devices without float64) a sum of squares can
    overflow to infinity, which the writer records as null.

    Example::

        floats, counts = torch.empty(5, dtype=torch.float64), torch.empty(4, dtype=torch.int64)
        measure_generic(torch.tensor([1.0, float("nan")]), 1, floats, counts)
        # floats = [1, 1, 1, 1, 1], counts = [1, 0, 0, 0]
    """
    wide = floats.dtype
    parts: list[tuple[torch.Tensor, torch.Tensor]] = []
    for flat in flat_pieces(x):
        for piece in torch.split(flat, PIECE):
            parts.append(_measure_piece(piece, wide))
    if len(parts) == 1:
        part_floats, part_counts = parts[0]
    else:
        all_floats = torch.stack([part[0] for part in parts])
        part_counts = torch.stack([part[1] for part in parts]).sum(0)
        part_floats = torch.cat(
            (
                all_floats[:, :1].amin(0),
                all_floats[:, 1:2].amax(0),
                all_floats[:, 2:4].sum(0),
                all_floats[:, 4:].amax(0),
            )
        )
    floats.copy_(part_floats)
    counts.copy_(part_counts)
    if times != 1:
        floats[2:4].mul_(times)
        counts.mul_(times)


def _measure_piece(piece: torch.Tensor, wide: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    # Half and 8-bit formats have few operations; every value of theirs is exact in float32.
    if piece.dtype not in _WIDE:
        piece = piece.to(torch.float32 if piece.dtype.is_floating_point else wide)
    finite = torch.isfinite(piece)
    low = torch.where(finite, piece, torch.inf).amin().to(wide)
    high = torch.where(finite, piece, -torch.inf).amax().to(wide)
    clean = torch.where(finite, piece, 0).to(wide)
    floats = torch.stack((low, high, clean.sum(), (clean * clean).sum(), torch.maximum(high, -low)))
    counts = torch.stack(
        (
            torch.isnan(piece).sum(),
            (piece == torch.inf).sum(),
            (piece == -torch.inf).sum(),
            (piece == 0).sum(),
        )
    )
    return floats, counts
