"""Further analyses, and classes that some analyses take as arguments."""

from mechinterp.rooms import names_of

__getattr__ = names_of(__name__)
