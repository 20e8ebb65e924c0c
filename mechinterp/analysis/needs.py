"""What analyses ask of a model, and which of them its page has unasked: yes or no of a model."""

from collections.abc import Callable

from mechinterp.checkpoints.checkpoint import Checkpoint
from mechinterp.checkpoints.plain_modules import HookedModule
from mechinterp.models.hooked.masks import pattern_name
from mechinterp.models.run.predictor import predictor_of

MOST_EDGES = 1_200
"""Edges between heads up to which the page has them unasked."""
DISTRIBUTIONS = ("softmax", "1+tanh", "(1+Cx)^2")
"""Scores whose attention weights are none below 0 and add up to 1."""
Model = Checkpoint | HookedModule
Needs = Callable[[Model], bool]
"""What an analysis asks of a model."""


def nothing(source: Model) -> bool:
    """Every model."""
    return True


def one_attention(source: Model) -> bool:
    """One layer of attention, which its circuits describe."""
    return predictor_of(source).is_one_attention


def more_than_attention(source: Model) -> bool:
    """Several layers, or one with a norm or an MLP around it."""
    return not one_attention(source)


def several_layers(source: Model) -> bool:
    """Two layers or more."""
    return predictor_of(source).n_layers > 1


def own_weights(source: Model) -> bool:
    """Weights of this package, by name."""
    return predictor_of(source).weights is not None


def weights_of_layers(source: Model) -> bool:
    """Weights of this package, of two layers or more."""
    return own_weights(source) and several_layers(source)


def patterns(source: Model) -> bool:
    """Attention weights that are known."""
    predictor = predictor_of(source)
    return own_weights(source) or pattern_name(0) in predictor.hooked.model.hook_dict


def a_distribution(source: Model) -> bool:
    """Attention weights that are known, none below 0, and add up to 1."""
    weights = predictor_of(source).weights
    return patterns(source) and (weights is None or weights.model.score in DISTRIBUTIONS)


def edges_to_patch(source: Model) -> bool:
    """Weights of several layers whose outputs add up in the stream."""
    weights = predictor_of(source).weights
    return several_layers(source) and weights is not None and weights.model.norm != "after"


def few_edges(source: Model) -> bool:
    """No more edges between heads than are patched in a minute or so."""
    predictor = predictor_of(source)
    pairs = predictor.n_layers * (predictor.n_layers - 1) // 2
    return 3 * predictor.n_heads**2 * pairs <= MOST_EDGES


def a_history(source: Model) -> bool:
    """A history of its training."""
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


def a_pool(source: Model) -> bool:
    """A task with a pool of task vectors."""
    return source.task.n_tasks is not None


def never(source: Model) -> bool:
    """On request only."""
    return False
