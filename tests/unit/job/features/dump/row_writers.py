"""A probe without its compiled parts, as it is where there is no compiler."""


def without_row_writer(probe):
    """Let a `DumpProbe` see everything in Python; before its first step."""
    if probe._row_writer is not None:
        del probe.see
    probe._new_cache = probe._row_writer = None
    probe._page = probe._new_page()
    return probe
