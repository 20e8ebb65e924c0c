"""Public names of this folder with their types; __init__.py reads them here and loads them when they are first used."""

from mechinterp.models.constructions.descent import gd_plus_plus_model as gd_plus_plus_model
from mechinterp.models.constructions.descent import rotated as rotated
from mechinterp.models.constructions.descent import with_noise as with_noise
from mechinterp.models.constructions.sparse import (
    preprocess_then_optimise_model as preprocess_then_optimise_model,
)
from mechinterp.models.hooked.runner import HookedPredictor as HookedPredictor
from mechinterp.models.layers import interleaved as interleaved
from mechinterp.models.run.general import predict_deep as predict_deep
