"""What the statistics of a tensor must be, worked out by NumPy in float64 (long double for the sums)."""

import math

import numpy as np
import torch

from msprobe_megatron.job.measure.stats import Stats


def expected(x: torch.Tensor) -> Stats:
    """Return the statistics of ``x``; a complex tensor counts as twice as many real numbers."""
    x = x.detach()
    if x.is_complex():
        x = torch.view_as_real(x.to(torch.complex128).resolve_conj())
    values = np.asarray(x.to(torch.float64).contiguous()).reshape(-1)
    finite = values[np.isfinite(values)]
    wide = finite.astype(np.longdouble)
    return Stats(
        min=float(finite.min()) if finite.size else math.inf,
        max=float(finite.max()) if finite.size else -math.inf,
        sum=float(wide.sum()),
        sumsq=float((wide * wide).sum()),
        absmax=float(np.abs(finite).max()) if finite.size else -math.inf,
        n_nan=int(np.isnan(values).sum()),
        n_posinf=int(np.isposinf(values).sum()),
        n_neginf=int(np.isneginf(values).sum()),
        n_zero=int((values == 0).sum()),
    )


def sum_of_magnitudes(x: torch.Tensor) -> float:
    """Return sum |x| over the finite elements: the scale that the error of a sum is measured against."""
    x = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
    values = np.abs(np.asarray(x.detach().to(torch.float64).contiguous()).reshape(-1))
    return float(values[np.isfinite(values)].astype(np.longdouble).sum())


def assert_stats(found: Stats, x: torch.Tensor, relative: float = 1e-6) -> None:
    """Extremes and counts to the bit, sums to ``relative`` of the sum of their magnitudes."""
    want = expected(x)
    assert (found.min, found.max, found.absmax) == (want.min, want.max, want.absmax)
    assert found[5:] == want[5:]
    assert abs(found.sum - want.sum) <= relative * sum_of_magnitudes(x)
    assert abs(found.sumsq - want.sumsq) <= relative * want.sumsq
