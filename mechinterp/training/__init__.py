"""Training, exact training of linear attention, and the weights that training starts from."""

from mechinterp.rooms import names_of

__getattr__ = names_of(__name__)
