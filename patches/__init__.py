"""The Megatron monkey patches, installed as ``msprobe_megatron.patches``: one file a target area.

Each file declares `PATCHES` (see `msprobe_megatron.patching`): wrappers that tell the session what the host is
doing and otherwise pass everything through. They know nothing of files, statistics or verdicts.
"""
