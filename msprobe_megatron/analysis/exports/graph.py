"""The model's modules as nodes for the graph viewer of msprobe's TensorBoard plug-in, one graph a step and rank.

A node is a module in one microbatch, forward or backward, under the module that holds it; its names follow the viewer's
grammar (`Module.<name>.<class>.forward.<number>`). A recomputed forward is numbered after all microbatches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from msprobe_megatron.analysis.page.table import RunView, sites_of

ROOT = "DefaultModel"
_SOURCE = "NPU"  # the viewer's word for the run that is looked at, whatever its device
_MODULE = "0"
NODE_COLUMNS = {
    "id": "text primary key",
    "graph_id": "text not null",
    "node_order": "integer not null",
    "node_name": "text not null",
    "node_type": "text not null",
    "up_node": "text",
    "sub_nodes": "text",
    "precision_index": "integer",
    "overflow_level": "text",
    "micro_step_id": "integer not null",
    "matched_node_link": "text",
    "stack_id": "text",
    "parallel_merge_info": "text",
    "matched_distributed": "text",
    "modified": "integer not null",
    "input_data": "text",
    "output_data": "text",
    "data_source": "text",
    "dump_data_dir": "text",
    "step": "integer not null",
    "rank": "integer not null",
    "is_distributed": "integer",
}
CONFIG_COLUMNS = {
    "id": "text primary key",
    "graph_type": "text not null",
    "task": "text",
    "tool_tip": "text",
    "micro_steps": "integer",
    "overflow_check": "integer",
    "node_colors": "text not null",
    "rank_list": "text not null",
    "step_list": "text not null",
}
_Nodes = dict[tuple[str, int, str], dict[str, Any]]
_QUERY = """
select microbatch, phase, name, io, path, op, dtype, cast(shape as varchar), min, max,
    sum / nullif(numel - (n_nan + n_posinf + n_neginf), 0), sqrt(sumsq), n_nan, n_posinf, n_neginf
from run_rows where step = ? and rank = ? and kind in ('activation', 'gradient') and microbatch is not null order by seq
"""


@dataclass
class Graph:
    """The viewer's tables: `config`, `nodes()` in order, and `stacks`, which is complete after the nodes were taken."""

    view: RunView
    config: dict[str, Any]
    microbatches: int
    stacks: dict[str, list[str]] = field(default_factory=dict)

    def nodes(self) -> Iterator[dict[str, Any]]:
        """Nodes of every step and rank, each graph beginning with its root."""
        for step, rank, path in self.view.run.files:
            modules = {name: stack for name, _, stack in sites_of(path.parent / "sites.json")}
            yield from self._graph(step, rank, modules)

    def _graph(self, step: int, rank: int, modules: dict[str, list[str]]) -> Iterator[dict[str, Any]]:
        graph = f"{_SOURCE}_{step}_{rank}"
        nodes: _Nodes = {}
        for microbatch, phase, name, io, path, op, *figures in self.view.ask(_QUERY, [step, rank]):
            way = "backward" if phase == "backward" else "forward"
            number = microbatch + (self.microbatches if phase == "recompute" else 0)
            node = nodes.setdefault((way, number, name), _empty(name, op, way, number, microbatch))
            # What arrives on the way back is the gradient of the output.
            side = "input" if (io == "input") == (way == "forward") else "output"
            data = node[f"{side}_data"]
            data[f"{node['node_name']}.{side}.{path or len(data)}"] = _figures(*figures)
            node["bad"][side] = node["bad"].get(side, False) or any(figures[-3:])
        root = _empty("", "", "forward", 0, 0) | {"node_name": ROOT}
        for (way, number, name), node in nodes.items():
            above = _above(nodes, way, number, name) or root
            node["up_node"] = above["node_name"]
            above["sub_nodes"].append(node["node_name"])
        for order, node in enumerate([root, *nodes.values()]):
            stack = modules.get(node["name"], [])
            yield {
                **{name: node.get(name) for name in NODE_COLUMNS},
                "id": f"{graph}_{node['node_name']}",
                "graph_id": graph,
                "node_order": order,
                "node_type": _MODULE,
                "sub_nodes": node["sub_nodes"] or "",
                "overflow_level": _overflow(node["bad"]),
                "matched_node_link": [],
                "matched_distributed": [],
                "parallel_merge_info": "",
                "stack_id": self._stack(graph, stack),
                "modified": 0,
                "data_source": _SOURCE,
                "dump_data_dir": "",
                "step": step,
                "rank": rank,
                "is_distributed": 0,
            }

    def _stack(self, graph: str, stack: list[str]) -> str:
        known = self._known.setdefault((graph, tuple(stack)), f"{graph}_{len(self._known)}")
        self.stacks.setdefault(known, stack)
        return known

    _known: dict[tuple[str, tuple[str, ...]], str] = field(default_factory=dict)


def graph_of(view: RunView) -> Graph:
    """Graphs of all steps and ranks of a run."""
    ((last,),) = view.ask("select coalesce(max(microbatch), 0) from run_rows")
    config = {
        "id": "1",
        "graph_type": "build",
        "task": "summary",
        "tool_tip": "{}",
        "micro_steps": int(last) + 1,
        "overflow_check": 1,
        "node_colors": "{}",
        "rank_list": sorted({rank for _, rank, _ in view.run.files}),
        "step_list": view.run.steps,
    }
    return Graph(view, config, int(last) + 1)


def _empty(name: str, op: str, way: str, number: int, microbatch: int) -> dict[str, Any]:
    return {
        "name": name,
        "node_name": f"Module.{name}.{op}.{way}.{number}",
        "up_node": "",
        "sub_nodes": [],
        "micro_step_id": microbatch,
        "input_data": {},
        "output_data": {},
        "bad": {},
    }


def _above(nodes: _Nodes, way: str, number: int, name: str) -> dict[str, Any] | None:
    """Nearest recorded module around this one; the model itself is around everything."""
    parts = name.split(".")
    for length in range(len(parts) - 1, 0, -1):
        found = nodes.get((way, number, ".".join(parts[:length])))
        if found is not None:
            return found
    return nodes.get((way, number, "model")) if name != "model" else None


def _figures(
    dtype: str, shape: str, low: Any, high: Any, mean: Any, norm: Any, nan: int, pos: int, neg: int
) -> dict[str, str]:
    """Figures as the viewer shows them: texts, non-finite ones included."""
    top = "nan" if nan else "inf" if pos else str(high)
    bottom = "nan" if nan else "-inf" if neg else str(low)
    middle, length = str(mean), str(norm)
    if nan or pos or neg:
        middle = length = "nan" if nan or (pos and neg) else "inf"
    texts = {"dtype": f"torch.{dtype}", "shape": shape, "Max": top, "Min": bottom, "Mean": middle, "Norm": length}
    return {name: "null" if text == "None" else text for name, text in texts.items()}


def _overflow(bad: dict[str, bool]) -> str | None:
    """The viewer's levels: made here, passed on, or swallowed."""
    arrives, leaves = bad.get("input", False), bad.get("output", False)
    if leaves:
        return "high" if arrives else "critical"
    return "medium" if arrives else None
