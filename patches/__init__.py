"""The Megatron monkey patches, installed as ``msprobe_megatron.patches``: one file per area of the host.

A file declares `PATCHES` (see `msprobe_megatron.job.patching.patch_set`): wrappers that notify the session of what the
host does and otherwise pass everything through. They know nothing of files, statistics or verdicts.
"""
