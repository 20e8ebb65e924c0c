"""Public names of this folder with their types; __init__.py reads them here and loads them when they are first used."""

from mechinterp.analysis.probing.targets import preconditioned as preconditioned
from mechinterp.analysis.probing.targets import reweighted as reweighted
from mechinterp.analysis.training.sampler import Chains as Chains
from mechinterp.analysis.training.sampler import Langevin as Langevin
