"""Requirements of analyses: functions of a model that return True if an analysis runs on it, or if a page shows it."""

from collections.abc import Callable

from mechinterp.checkpoints.checkpoint import Checkpoint
from mechinterp.checkpoints.modules.hooked import HookedModule
from mechinterp.checkpoints.modules.weights import by_weights
from mechinterp.models.hooked.masks import pattern_name
from mechinterp.models.run.evaluation import sample_prompts
from mechinterp.models.run.predictor import predictor_of

MOST_EDGES = 1_200
"""Largest number of edges between heads at which the default page includes them; patching more
takes minutes."""
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


def several_heads(source: Model) -> bool:
    """True for two layers or more of two heads or more, some of which can be pruned."""
    return several_layers(source) and predictor_of(source).n_heads > 1


def own_weights(source: Model) -> bool:
    """True for a model with named weights of this package."""
    return predictor_of(source).weights is not None


def weights_by_name(source: Model) -> bool:
    """True for a model with named weights, or a module whose state dict is read as such and predicts the same."""
    return predictor_of(by_weights(source)).weights is not None


def readable_patterns(source: Model) -> bool:
    """True if the attention weights can be read: from a hook, or as the layers are linear in their values."""
    predictor = predictor_of(source)
    if own_weights(source) or pattern_name(0) in predictor.hooked.model.hook_dict:
        return True
    if predictor.task is None:
        return False
    try:
        predictor.query_patterns(sample_prompts(predictor, 2))
    except ValueError:
        return False
    return True


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


def one_linear_layer(source: Model) -> bool:
    """True for one layer of linear attention that predicts a single response, on a single task."""
    weights, task = predictor_of(source).weights, source.task
    if weights is None or not one_attention(source):
        return False
    one_task = task.supports is None and task.drift == 1
    return weights.model.score == "linear/L" and task.d_y == 1 and one_task


def jumps_ahead(source: Model) -> bool:
    """True for a training of linear attention whose jumps follow from its initial weights."""
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
    """True for a model of this package that predicts at every x in one pass."""
    weights = predictor_of(source).weights
    return weights is not None and weights.model.predicts_everywhere


def quick_curve(source: Model) -> bool:
    """True for a model whose losses at all lengths take seconds: one layer of attention, or one pass."""
    return one_attention(source) or every_position(source)


def a_pool(source: Model) -> bool:
    """True if the task has a pool of task vectors."""
    return source.task.n_tasks is not None


def never(source: Model) -> bool:
    """False for every model: the analysis runs on request only."""
    return False
