"""Public names of this folder with their types; __init__.py reads them here and loads them when they are first used."""

from mechinterp.theory.linear import merged_heads as merged_heads
from mechinterp.theory.linear import modes as modes
from mechinterp.theory.linear import population_moments as population_moments
from mechinterp.theory.linear import separate_heads as separate_heads
from mechinterp.theory.linear_jumps import predict_jumps as predict_jumps
from mechinterp.theory.reduced_rank import reduced_rank_coefficient as reduced_rank_coefficient
from mechinterp.theory.softmax import two_head_flow as two_head_flow
