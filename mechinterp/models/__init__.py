"""Hooked models, and models built by hand."""

from mechinterp.rooms import names_of

__getattr__ = names_of(__name__)
