"""Requirements of analyses: functions that return True if an analysis can run on a model."""

from collections.abc import Callable

from mechinterp.checkpoints.checkpoint import Checkpoint
from mechinterp.checkpoints.plain_modules import HookedModule
from mechinterp.models.hooked.masks import pattern_name
from mechinterp.models.run.predictor import predictor_of

MOST_EDGES = 1_200
"""Largest number of edges between heads at which the default page includes them; patching more
takes minutes."""
DISTRIBUTIONS = ("softmax", "1+tanh", "(1+Cx)^2")
"""Scores whose attention weights are >= 0 and sum to 1."""
Model = Checkpoint | HookedModule
Needs = Callable[[Model], bool]
"""Function that returns True if a model satisfies a requirement."""


def nothing(source: Model) -> bool:
    """True for every model."""
    return True


def one_attention(source: Model) -> bool:
    """True for one layer of attention, which has circuits."""
    return predictor_of(source).is_one_attention


def more_than_attention(source: Model) -> bool:
    """True for several layers, or one layer with a norm or an MLP."""
    return not one_attention(source)


def several_layers(source: Model) -> bool:
    """True for two layers or more."""
    return predictor_of(source).n_layers > 1


def own_weights(source: Model) -> bool:
    """True for a model with named weights of this package."""
    return predictor_of(source).weights is not None


def weights_of_layers(source: Model) -> bool:
    """True for weights of this package with two layers or more."""
    return own_weights(source) and several_layers(source)


def patterns(source: Model) -> bool:
    """True if the attention weights can be read."""
    predictor = predictor_of(source)
    return own_weights(source) or pattern_name(0) in predictor.hooked.model.hook_dict


def a_distribution(source: Model) -> bool:
    """True if the attention weights can be read, are >= 0 and sum to 1."""
    weights = predictor_of(source).weights
    return patterns(source) and (weights is None or weights.model.score in DISTRIBUTIONS)


def edges_to_patch(source: Model) -> bool:
    """True for several layers whose outputs add up in the stream."""
    weights = predictor_of(source).weights
    return several_layers(source) and weights is not None and weights.model.norm != "after"


def few_edges(source: Model) -> bool:
    """True if patching all edges between heads takes about a minute at most."""
    predictor = predictor_of(source)
    pairs = predictor.n_layers * (predictor.n_layers - 1) // 2
    return 3 * predictor.n_heads**2 * pairs <= MOST_EDGES


def a_history(source: Model) -> bool:
    """True if the training history is stored."""
    return source.history is not None


def linear_components(source: Model) -> bool:
    """One layer of linear attention that predicts a single response, on a single task."""
    weights, task = predictor_of(source).weights, source.task
    if weights is None or not one_attention(source):
        return False
    return weights.model.score == "linear/L" and task.d_y == 1 and task.supports is None


def jumps_ahead(source: Model) -> bool:
    """A training of linear attention whose jumps follow from its initial weights."""
    if not isinstance(source, Checkpoint) or source.training is None:
        return False
    model = source.config.model
    if model.score != "linear/L" or not model.one_attention:
        return False
    from mechinterp.analysis.training.jumps import jump_forecast

    try:
        jump_forecast(source)
    except ValueError:
        return False
    return True


def every_position(source: Model) -> bool:
    """True for a model of this package that predicts at every x: causal, with tokens in turn."""
    weights = predictor_of(source).weights
    if weights is None:
        return False
    return weights.model.layout == "in_turn" and not weights.model.context_only


def a_pool(source: Model) -> bool:
    """True if the task has a pool of task vectors."""
    return source.task.n_tasks is not None


def never(source: Model) -> bool:
    """False for every model: the analysis runs on request only."""
    return False
