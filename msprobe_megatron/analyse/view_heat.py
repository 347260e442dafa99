"""Heat maps: norm, largest magnitude, zeros and non-finite elements by layer and step, and by rank and step."""

from __future__ import annotations

from typing import Any

from msprobe_megatron.analyse.view_series import thinned
from msprobe_megatron.analyse.view_table import View, packed, short
from msprobe_megatron.topology.layers import layer_of

STEPS = 200
RANKS = 128
LAYERS = 256

_FIGURES = """sqrt(sum(sumsq)), max(absmax), sum(n_zero) / nullif(sum(numel), 0),
    coalesce(sum(n_nan + n_posinf + n_neginf), 0)"""
# Token numbers and masks would outshine the activations.
_FLOATING = "(dtype like 'float%' or dtype like 'bfloat%' or dtype like 'complex%')"
_PLACE = r"""case when regexp_matches(name, '(^|\.)layers\.\d+(\.|$)')
    then 'layer ' || regexp_extract(name, '(?:^|\.)layers\.(\d+)', 1) else split_part(name, '.', 1) end"""


def heat_maps(view: View, important: set[int] | None = None) -> dict[str, Any]:
    """Both maps: `steps`, and for `layers` and `ranks` the row names and, by kind, four figures by row and step.

    Example::

        heat_maps(view)["layers"]["kinds"]["activation"]["norm"][0]     # the first place, by step
    """
    steps = thinned(view.run.steps, STEPS, important or set())
    chosen = ", ".join(map(str, steps)) or "-1"
    layers = view.ask(
        f"""select {_PLACE} as place, kind, step, {_FIGURES}, min(seq) from whole
        where kind <> 'loss' and {_FLOATING} and reason = '' and step in ({chosen}) group by place, kind, step"""  # noqa: S608
    )
    ranks = view.ask(
        f"""select rank, kind, step, {_FIGURES} from run_rows
        where kind <> 'loss' and {_FLOATING} and step in ({chosen}) group by rank, kind, step"""  # noqa: S608
    )
    notes = []
    if len(steps) < len(view.run.steps):
        notes.append(f"Heat maps show {len(steps)} of {len(view.run.steps)} recorded steps.")
    places = sorted({row[0] for row in layers}, key=place_order)
    names = sorted({row[0] for row in ranks})
    if len(places) > LAYERS:
        notes.append(f"The heat map by layer shows {LAYERS} of {len(places)} places.")
    if len(names) > RANKS:
        bad = {row[0] for row in ranks if row[6]}
        names = sorted(sorted(names, key=lambda rank: (rank not in bad, rank))[:RANKS])
        notes.append(f"The heat map by rank shows {RANKS} ranks: those with non-finite values first.")
    return {
        "steps": steps,
        "layers": _map(places[:LAYERS], steps, [row[:7] for row in layers]),
        "ranks": _map(names, steps, ranks),
        "notes": notes,
    }


def place_of(name: str) -> str:
    """The row of the map that a name belongs to.

    Example::

        >>> place_of("decoder.layers.3.mlp"), place_of("output_layer")
        ('layer 3', 'output_layer')
    """
    layer = layer_of(name)
    return name.partition(".")[0] if layer is None else f"layer {layer}"


def place_order(place: str) -> tuple[int, int, str]:
    """Order of execution: the data and the embedding, the layers, what follows them."""
    if place.startswith("layer "):
        return 1, int(place[6:]), ""
    return (0 if place.startswith(("model", "embedding", "rotary")) else 2), 0, place


def _map(names: list[Any], steps: list[int], rows: list[tuple[Any, ...]]) -> dict[str, Any]:
    line, column = ({key: i for i, key in enumerate(keys)} for keys in (names, steps))
    kinds: dict[str, dict[str, list[Any]]] = {}
    for name, kind, step, *figures in rows:
        if name not in line:
            continue
        tables = kinds.setdefault(
            kind, {f: [[None] * len(steps) for _ in names] for f in ("norm", "absmax", "zeros", "bad")}
        )
        for figure, value in zip(("norm", "absmax", "zeros", "bad"), figures, strict=True):
            tables[figure][line[name]][column[step]] = int(value) if figure == "bad" else short(value)
    for tables in kinds.values():
        for figure, table in tables.items():
            tables[figure] = [packed(values) for values in table]
    return {"names": names, "kinds": kinds}
