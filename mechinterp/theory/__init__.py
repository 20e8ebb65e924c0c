"""Closed forms from the papers."""

from mechinterp.rooms import names_of

__getattr__ = names_of(__name__)
