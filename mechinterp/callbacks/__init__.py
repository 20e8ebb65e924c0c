"""Callbacks that call a `Monitor` in other libraries' training loops; each needs its library."""

from mechinterp.rooms import homes_of, names_of

__all__ = [*homes_of(__name__)]
__getattr__ = names_of(__name__)
