"""Replacing and restoring functions of the host: declarations, the import hook, the dry run."""
