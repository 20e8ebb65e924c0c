"""Further analyses, and classes that some analyses take as arguments."""

from mechinterp.rooms import names_of

HOMES = {
    "Chains": "mechinterp.analysis.training.sampler",
    "Langevin": "mechinterp.analysis.training.sampler",
    "preconditioned": "mechinterp.analysis.probing.targets",
    "reweighted": "mechinterp.analysis.probing.targets",
}

__getattr__ = names_of(__name__, HOMES)
