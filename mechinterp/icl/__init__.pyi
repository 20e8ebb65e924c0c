"""Public names of this folder with their types; __init__.py reads them here and loads them when they are first used."""

from mechinterp.icl.algorithm import PromptMoments as PromptMoments
from mechinterp.icl.algorithm_fits import fit_algorithm as fit_algorithm
from mechinterp.icl.algorithms import ALGORITHMS as ALGORITHMS
from mechinterp.icl.predictors import adaptive_ridge as adaptive_ridge
from mechinterp.icl.predictors import dmmse as dmmse
from mechinterp.icl.predictors import kalman as kalman
from mechinterp.icl.predictors import ridge as ridge
