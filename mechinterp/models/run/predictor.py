"""Predictors and learners of what analyses take: checkpoints, hooked models, weights, and functions of prompts."""

import inspect
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from mechinterp.config import TaskConfig
from mechinterp.icl.prompts import Prompts
from mechinterp.models.hooked.runner import HookedPredictor, hooked_predictor
from mechinterp.models.run.ways import Predictor
from mechinterp.models.weights import Weights

if TYPE_CHECKING:
    from mechinterp.models.hooked.config import HookedConfig
    from mechinterp.models.hooked.transformer import ICLTransformer

Source = object
"""Input of an analysis: a checkpoint, a hooked model, weights or a `Predictor`. `predictor_of` refuses anything else."""

Learner = Callable[[Prompts], Tensor]
"""A function from prompts to predictions [batch, d_y], or [layer, batch, d_y] after every layer."""


@dataclass(frozen=True, eq=False, kw_only=True)
class WeightsPredictor(Predictor):
    """Predictor of weights of this package; its hooked model is built on first use."""

    own: Weights | None
    """The weights; None once the hooked model exists, which then has them."""
    task: TaskConfig

    @property
    def weights(self) -> Weights:
        """Current weights: those of the model once it exists, whose parameters they share memory with."""
        model = self._built
        return cast(Weights, self.own) if model is None else model.weights

    @property
    def _built(self) -> "ICLTransformer | None":
        return cast("ICLTransformer", self.hooked.model) if "hooked" in vars(self) else None

    @property
    def n_layers(self) -> int:
        return self.weights.n_layers

    @property
    def n_heads(self) -> int:
        return self.weights.n_heads

    @cached_property
    def hooked(self) -> HookedPredictor:
        from mechinterp.models.hooked.transformer import ICLTransformer

        model = ICLTransformer.sharing(cast(Weights, self.own), task=self.task)
        object.__setattr__(self, "own", None)
        return hooked_predictor(model)

    @property
    def is_hooked(self) -> bool:
        return "hooked" in vars(self) and _has_hooks(self.hooked)


@dataclass(frozen=True, eq=False, kw_only=True)
class ModelPredictor(Predictor):
    """Predictor of a hooked model."""

    own: HookedPredictor
    transformer: "ICLTransformer | None" = None
    """The model if it is of this package, so that its weights decide the predictions while it has no hooks."""

    @property
    def hooked(self) -> HookedPredictor:
        return self.own

    @property
    def weights(self) -> Weights | None:
        return None if self.transformer is None else self.transformer.weights

    @property
    def is_hooked(self) -> bool:
        return self.own.is_hooked if self.transformer is None else _has_hooks(self.own)


def _has_hooks(own: HookedPredictor) -> bool:
    """True if a model of this package has a forward hook on a hook point or on any other of its modules."""
    modules = cast("ICLTransformer", own.model).modules()
    return own.is_hooked or any(e._forward_hooks or e._forward_pre_hooks for e in modules)


def is_learner(source: Source) -> bool:
    """True if a source is a plain function of prompts instead of a model.

    Example:
        >>> is_learner(lambda prompts: prompts.y_query), is_learner(TaskConfig())
        (True, False)
    """
    return inspect.isroutine(source) or isinstance(source, partial)


def learner_of(source: Source | Learner) -> Learner:
    """Function from prompts to final predictions, for a learner or for a model (without gradients).

    Raises:
        ValueError: If the source is neither.
    """
    if not is_learner(source):
        return torch.no_grad()(predictor_of(source).predict)
    learner = cast(Learner, source)
    return lambda prompts: after_layers(learner, prompts)[-1]


def after_layers(learner: Learner, prompts: Prompts) -> Float[Tensor, "layer batch d_y"]:
    """Predictions of a function of prompts after every layer that it gives; one layer if it gives [batch, d_y].

    A function that does not run in float64, such as that of a model in float32, gets prompts in float32.

    Raises:
        ValueError: If it gives anything else than an array of numbers of such a shape.
    Example:
        >>> from mechinterp import TaskConfig, sample_prompts
        >>> prompts = sample_prompts(TaskConfig(d_x=2), 3)
        >>> after_layers(lambda prompts: prompts.y[:, 0].numpy(), prompts).shape
        torch.Size([1, 3, 1])
    """
    predictions: object = output_of(learner, prompts)
    got: object = type(predictions).__name__
    if isinstance(predictions, np.ndarray) and predictions.dtype.kind == "f":
        predictions = torch.from_numpy(predictions)
    if isinstance(predictions, Tensor) and predictions.is_complex():
        got = f"{list(predictions.shape)} of {predictions.dtype}"
    elif isinstance(predictions, Tensor):
        shape = tuple(predictions.shape)
        if predictions.ndim in (2, 3) and shape[-2:] == tuple(prompts.y_query.shape) and shape[0]:
            return predictions if predictions.ndim == 3 else predictions[None]
        got = list(shape)
    n, d_y = prompts.y_query.shape
    raise ValueError(
        f"A function of prompts must give predictions [{n}, {d_y}] or [layer, {n}, {d_y}], got {got}."
    )


def output_of(learner: Learner, prompts: Prompts) -> Any:
    """Output of a function of prompts, before any check; for prompts in float32 if it does not run in float64.

    It gets a copy, since it may write into its prompts."""
    try:
        return learner(prompts.clone())
    except RuntimeError:
        if prompts.x.dtype == torch.float64:
            with suppress(RuntimeError):
                return learner(prompts.to(torch.float32))
        raise


def predictions_after(
    source: "Source | Learner", prompts: Prompts, lengths: Sequence[int]
) -> Float[Tensor, "batch length d_y"]:
    """Predictions after the first pairs of each prompt, with the next x as the query, for every number of pairs.

    One pass gives all of them for a causal model whose tokens come in turn; other models run once per length.

    Raises:
        ValueError: If the source is neither a model nor a function of prompts, or a length is beyond the prompts.
    Example:
        >>> from mechinterp.icl.prompts import draw_prompts
        >>> from mechinterp.icl.predictors import zero_prediction
        >>> tuple(predictions_after(zero_prediction, draw_prompts(TaskConfig(), 8), [1, 5]).shape)
        (8, 2, 1)
    """
    every = None if is_learner(source) else predictor_of(source).predict_at_every(prompts)
    if every is not None:
        return every[:, list(lengths)]
    model = learner_of(source)
    return torch.stack([model(prompts.prefix(length)) for length in lengths], dim=1)


def predictor_of(source: Source) -> Predictor:
    """Predictor of a checkpoint, a hooked model, weights or a predictor.

    Raises:
        ValueError: If the source is none of these.
    See also:
        `hook_module`, `sample_prompts`.
    Example:
        >>> from mechinterp.models.constructions.one_layer import zero_head
        >>> predictor_of(zero_head(d_x=5)).n_heads
        1
    """
    for holder in (source, getattr(source, "predictor", None)):
        if isinstance(holder, Predictor):
            return holder
    if isinstance(source, Weights):
        task = TaskConfig(d_x=source.d_x, d_y=source.d_y)
        return WeightsPredictor(own=source, task=task)
    if isinstance(source, HookedPredictor):
        return ModelPredictor(own=source)
    hooked = hooked_predictor(source)
    model = cast("ICLTransformer", hooked.model)
    return ModelPredictor(own=hooked, transformer=model, task=_assumed_task(model.cfg))


def _assumed_task(cfg: "HookedConfig") -> TaskConfig:
    """Default task (the softmax paper's setting) with the model's sizes; contexts are cut to the model's positions."""
    task, most = TaskConfig(d_x=cfg.d_x, d_y=cfg.d_y), cfg.n_ctx - 2
    if cfg.model.layout == "in_turn":
        most //= 2
    shorter = replace(task, context_length=max(1, min(task.context_length, most)))
    return shorter.assuming(task.assumed)
