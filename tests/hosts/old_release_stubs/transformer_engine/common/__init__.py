"""Recipes of a precision that these jobs do not use."""

from transformer_engine.common import recipe as recipe
