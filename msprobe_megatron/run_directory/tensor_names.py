"""Names of the packed tensor files, shared by writer and readers; needs no torch."""

from __future__ import annotations


def file_name(pack: int) -> str:
    """Name of a pack's file; the first one has the plain name.

    Example::

        >>> file_name(0), file_name(2)
        ('tensors.safetensors', 'tensors_002.safetensors')
    """
    return "tensors.safetensors" if pack == 0 else f"tensors_{pack:03d}.safetensors"
