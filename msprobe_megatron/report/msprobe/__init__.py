"""Files of other tools: msprobe's layout (dump.json, stack.json, construct.json), written from a run and read back.

For those who live with the published msprobe: `compare` and `graph_visualize` of mindstudio-probe read the export. Only
what its format has a place for is written; recomputed forwards, which it cannot tell from calls, are left out.
"""
