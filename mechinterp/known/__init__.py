"""Models whose heads, edges, algorithm or learning coefficient are known, to score other methods on."""

from mechinterp.rooms import names_of

__getattr__ = names_of(__name__)
