"""Recipes of a precision that these jobs do not use."""

from . import recipe as recipe
