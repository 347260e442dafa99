"""Order of cause: where in the dataflow of a step a tensor stands, whatever the layout.

Sequence numbers count on one rank only, and a pipeline interleaves microbatches. What is common to all layouts is the
order in which one microbatch passes through the model: stage by stage (chunk = vpp * pp + pp rank), and inside a
stage by the rank's own sequence. The backward goes the same way back, weights come before everything that
uses them, reduced gradients after everything.
"""

from __future__ import annotations

import duckdb
import numpy as np
import numpy.typing as npt

from msprobe_megatron.analyse.load import Run
from msprobe_megatron.analyse.match import Pairs

_STAGE = 1 << 40
_UNKNOWN = float(1 << 60)
_PHASES = {"forward": 0, "recompute": 1, "backward": 2, "optimizer": 3}

_FORWARD = """
with first as (select min(step) as step, min(microbatch) as microbatch from steps_view
               where phase = 'forward' and kind = 'activation')
select name, io, path, min((coalesce(vpp, 0) * {stages} + pp) * {stage} + seq) as place
from steps_view join first using (step, microbatch)
where phase = 'forward' and kind = 'activation' group by name, io, path
"""


def forward_places(run: Run) -> dict[tuple[str, str, str], float]:
    """Place in the forward of one microbatch of every (name, io, path).

    Example::

        forward_places(run)["embedding", "output", ""] < forward_places(run)["decoder.layers.0", "output", "0"]
    """
    connection = duckdb.connect()
    connection.register("steps_view", run.rows(connection, run.steps[0]))
    query = _FORWARD.replace("{stages}", str(run.sizes.get("pp", 1))).replace("{stage}", str(_STAGE))
    return {(name, io, path): float(place) for name, io, path, place in connection.query(query).fetchall()}


def causal_order(pairs: Pairs, places: dict[tuple[str, str, str], float]) -> npt.NDArray[np.int64]:
    """Indices of all pairs, causes before what they can cause."""
    modules: dict[str, float] = {}
    for (name, io, _), place in places.items():
        if io == "output":
            modules[name] = max(place, modules.get(name, 0.0))
    kinds, names = pairs["kind"], pairs["name"]
    keys = zip(names, pairs["io"], pairs["path"], strict=True)
    forward = np.array([places.get(key, modules.get(key[0].rpartition(".")[0], _UNKNOWN)) for key in keys])
    # Without forward rows (data_mode: backward) the order of one rank is all there is.
    seq = np.nan_to_num(pairs["seq_l"].astype(np.float64), nan=_UNKNOWN)
    backward = np.isin(kinds, ("gradient", "grad_reduced", "grad_clipped", "optimizer_state", "update"))
    along = np.where(backward, -forward, forward)
    stage = np.where(kinds == "parameter", 0, np.where(np.isnan(pairs["microbatch"].astype(np.float64)), 2, 1))
    phase = np.array([_PHASES.get(text, 3) for text in pairs["phase"]])
    phase = np.where(kinds == "loss", 0, phase)
    rank_of_kind = np.array([_KINDS.index(kind) if kind in _KINDS else len(_KINDS) for kind in kinds])
    return np.lexsort((seq, along, rank_of_kind, phase, last_sample(pairs), stage, pairs["step"]))


def last_sample(pairs: Pairs) -> npt.NDArray[np.int64]:
    """Last sample that each tensor was computed from: all its causes have come when that one has.

    Tokens of several data-parallel ranks meet at an expert: samples that are there together count as one, so that an
    expert's tensors stand between what goes in and what comes out, of whichever of these samples.
    """
    whole_step = np.isnan(pairs["microbatch"].astype(np.float64))
    experts = pairs["tokens"] == "experts"
    group = int(pairs["unit"][experts].max()) if experts.any() else 1
    last = (pairs["block"] + 1) * pairs["unit"] - 1
    last = (last // group + 1) * group - 1
    together: npt.NDArray[np.int64] = np.where(whole_step, 0, last).astype(np.int64)
    return together


_KINDS = ("loss", "activation", "gradient", "parameter", "grad_reduced", "grad_clipped", "optimizer_state", "update")
