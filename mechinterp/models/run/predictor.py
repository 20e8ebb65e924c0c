"""The one way to run any model: predictions under masks of heads, and the streams inside.

How it is computed is chosen by what the model is: in closed form, as a map of the tokens, from the weights alone, or
with plain hooks; all give what plain hooks give. No analysis asks what kind of model it has.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Protocol, cast, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from mechinterp.config import TaskConfig
from mechinterp.icl.prompts import Prompts
from mechinterp.memory import chunks, together
from mechinterp.models.heads import AttentionWeights, predict
from mechinterp.models.hooked.masks import Head, require_heads, require_method
from mechinterp.models.hooked.query_position import query_positions
from mechinterp.models.hooked.runner import HookedPredictor, hooked_predictor
from mechinterp.models.run import general as weights_alone
from mechinterp.models.run import hooks, one_layer
from mechinterp.models.run import linear as token_map
from mechinterp.models.stacks import LINEAR, deep_bytes, predict_deep
from mechinterp.models.tokens import tokens_of
from mechinterp.models.weights import AnyWeights, Weights, as_weights, why_no_circuits
from mechinterp.progress import ProgressCallback, no_progress

if TYPE_CHECKING:
    from mechinterp.models.hooked.config import HookedConfig


BEYOND_SIZES = tuple(each.name for each in fields(TaskConfig) if each.name not in ("d_x", "d_y"))
"""What weights do not show of a task."""


@dataclass(frozen=True, eq=False)
class Predictor:
    """A model as the analyses see it: prompts in, predictions out, heads and streams by number."""

    n_layers: int
    n_heads: int
    """Heads of every layer."""
    build: Callable[[], HookedPredictor]
    """The model with hooks, built when it is asked for."""
    own_weights: Callable[[], Weights | None] = lambda: None
    """Those of a model of this package; None of any other."""
    is_hooked: Callable[[], bool] = lambda: False
    """Whether somebody's hooks are on the model, which ways past its modules would miss."""
    task: TaskConfig | None = None
    """The law of its prompts, where it is known."""
    assumed: tuple[str, ...] = ()
    """Fields of the task that nobody stated."""

    @cached_property
    def hooked(self) -> HookedPredictor:
        """The model with hooks, as one runs it by hand."""
        return self.build()

    @property
    def heads(self) -> list[Head]:
        """All of them, layer by layer."""
        return [(layer, head) for layer in range(self.n_layers) for head in range(self.n_heads)]

    @property
    def model(self) -> object:
        """The hooked model itself."""
        return self.hooked.model

    @property
    def weights(self) -> Weights | None:
        """The weights of a model of this package; None of any other."""
        return self.own_weights()

    @property
    def _shortcut(self) -> Weights | None:
        """The weights, if they alone decide what the model predicts."""
        return None if self.is_hooked() else self.own_weights()

    @property
    def is_one_attention(self) -> bool:
        """Whether the model is one layer of attention with nothing around it, which has `circuits`."""
        weights = self.weights
        return weights is not None and why_no_circuits(weights.model) is None

    @property
    def attention_only(self) -> bool:
        """Whether it is known that nothing but the heads adds to the stream or changes it."""
        return self.weights is not None and self.weights.model.attention_only

    @property
    def circuits(self) -> AttentionWeights:
        """The heads of a model that is one layer of attention with nothing around it.

        Raises:
            ValueError: If the model is another, saying why.
        """
        weights = self.weights
        found = (
            "a model without weights of this package"
            if weights is None
            else why_no_circuits(weights.model)
        )
        if weights is None or found is not None:
            raise ValueError(f"needs one layer of attention with nothing around it, got {found}.")
        return weights.circuits

    def predict(self, prompts: Prompts) -> Float[Tensor, "batch d_y"]:
        """Prediction of y_query, in units of y, on the device of the prompts."""
        return self._predicted(prompts).to(prompts.x.device)

    def _predicted(self, prompts: Prompts) -> Float[Tensor, "batch d_y"]:
        weights = self._shortcut
        if weights is None:  # somebody's hooks may depend on all prompts
            return self.hooked.predict(prompts)
        prompts = _fitting(weights, prompts)
        if why_no_circuits(weights.model) is None:
            return predict(weights.circuits, prompts)
        if weights.has_stack:
            stack = weights.stack
            per_prompt = deep_bytes(stack, prompts.x.shape[1] + 1)
            what = f"{weights.n_layers} layers on prompts of {prompts.x.shape[1]} pairs"
            parts = chunks(len(prompts), together(per_prompt, what))
            return torch.cat([predict_deep(stack, prompts[rows]) for rows in parts])
        return weights_alone.masked_predictions(weights, prompts, [[]])[0]

    def run(
        self,
        prompts: Prompts,
        masks: Sequence[Sequence[Head]] = ((),),
        *,
        method: str = "zero",
        progress: ProgressCallback = no_progress,
    ) -> Float[Tensor, "mask batch d_y"]:
        """Predictions under each of several masks, without gradients, on the device of the prompts.

        Args:
            masks: The heads that are masked together; an empty mask is the full model.
            method: "zero"; "mean": z of a masked head is its mean over the prompts at that position;
                "resample": it is that of another prompt, prompts 2i and 2i + 1 swap.
            progress: Optional progress callback.
        Raises:
            ValueError: If there is no such head, the method is unknown, prompts that swap are odd in number, or
                they do not fit the model.
        Example:
            >>> from mechinterp.icl.prompts import sample_prompts
            >>> from mechinterp.models.constructions.one_layer import debiased_gradient_step
            >>> predictor = predictor_of(debiased_gradient_step(0.88, 0.02, d_x=5))
            >>> prompts = sample_prompts(TaskConfig(), 4, dtype=torch.float64)
            >>> full, first, second = predictor.run(prompts, [[], [(0, 1)], [(0, 0)]])
            >>> torch.allclose(first + second, full)
            True
        """
        require_heads([head for heads in masks for head in heads], self.n_layers, self.n_heads)
        require_method(method, prompts)
        with torch.no_grad():
            found = self._masked(prompts, masks, method=method, progress=progress)
        return found.to(prompts.x.device)

    def _masked(
        self,
        prompts: Prompts,
        masks: Sequence[Sequence[Head]],
        *,
        method: str,
        progress: ProgressCallback,
    ) -> Float[Tensor, "mask batch d_y"]:
        weights = self._shortcut
        if weights is not None and why_no_circuits(weights.model) is None:
            fitting = _fitting(weights, prompts)
            return one_layer.masked_predictions(
                weights.circuits, fitting, masks, method=method, progress=progress
            )
        if weights is not None and method == "zero" and _is_linear(weights):
            fitting = _fitting(weights, prompts)
            return token_map.masked_predictions(weights.stack, fitting, masks, progress=progress)
        if weights is not None and method == "zero":
            fitting = _fitting(weights, prompts)
            return weights_alone.masked_predictions(weights, fitting, masks, progress=progress)
        apart = weights if weights is not None and weights.model.attention_only else None
        return hooks.masked_predictions(
            self.hooked, apart, prompts, masks, method=method, progress=progress
        )

    def streams(
        self,
        prompts: Prompts,
        *,
        heads: Sequence[Head] = (),
        positions: Sequence[int] = (-1,),
    ) -> Float[Tensor, "layer batch pos d_model"]:
        """The residual stream before each layer and after the last, without gradients.

        Args:
            heads: Heads that are masked.
            positions: Positions of the stream, counted from its end; -1 is the query's, wherever that is.
        Raises:
            ValueError: If there is no such head, the model lacks the hook on the stream after its last layer, it is not
                known where the query is, or another position is meant and the query is not last.
        """
        require_heads(heads, self.n_layers, self.n_heads)
        weights = self._shortcut
        with torch.no_grad():
            if weights is not None and _is_linear(weights):
                found = token_map.streams(
                    weights.stack, _fitting(weights, prompts), heads=heads, positions=positions
                )
            elif weights is not None and tuple(positions) == (-1,):
                found = weights_alone.streams(weights, _fitting(weights, prompts), heads=heads)
            else:
                found = hooks.streams(self.hooked, prompts, heads=heads, positions=positions)
        return found.to(prompts.x.device)

    def stream(self, prompts: Prompts, layer: int) -> Float[Tensor, "batch pos d_model"]:
        """The stream at every position after some layers, without gradients."""
        self.require_layer(layer)
        with torch.no_grad():
            return hooks.stream(self.hooked, prompts, layer).to(prompts.x.device)

    def query_position(self, prompts: Prompts, layer: int) -> int:
        """Position of the query in the stream after some layers; -1 is the last.

        Raises:
            ValueError: If it is not known.
        """
        self.require_layer(layer)
        return -1 if self.weights is not None else query_positions(self.hooked, prompts)[layer]

    def query_streams(
        self,
        prompts: Prompts,
        layer: int,
        *,
        heads: Sequence[Head] = (),
        progress: ProgressCallback = no_progress,
    ) -> Float[Tensor, "batch pos d_model"]:
        """The stream after some layers of every covariate of a prompt run as its query, the query's own last.

        Raises:
            ValueError: If there is no such head, or the model has fewer layers.
        """
        self.require_layer(layer)
        require_heads(heads, self.n_layers, self.n_heads)
        weights = self._shortcut
        with torch.no_grad():
            if weights is not None and _is_linear(weights):
                fitting = _fitting(weights, prompts)
                found = token_map.query_streams(weights.stack, fitting, layer, heads=heads)
                return found.to(prompts.x.device)
            covariates = progress(
                [*prompts.x.unbind(1), prompts.x_query], "every token as the query"
            )
            place = self.query_position(prompts, layer)
            each = [
                hooks.stream(self.hooked, replace(prompts, x_query=x), layer, heads=heads)[:, place]
                for x in covariates
            ]
        return torch.stack(each, dim=1).to(prompts.x.device)

    def query_patterns(self, prompts: Prompts) -> Float[Tensor, "layer batch head key"]:
        """Attention weights that the query gives to every position, without gradients; 0 for those that it cannot read.

        Raises:
            ValueError: If the model lacks the hook on its patterns, or it is not known where the query is.
        """
        weights = self._shortcut
        with torch.no_grad():
            if weights is not None:
                found = weights_alone.query_patterns(weights, _fitting(weights, prompts))
            else:
                found = hooks.query_patterns(self.hooked, prompts)
        return found.to(prompts.x.device)

    def query_writes(self, prompts: Prompts) -> Float[Tensor, "layer batch head d_model"] | None:
        """What each head adds to the stream at the query, without gradients; None where its W_O is not known."""
        with torch.no_grad():
            written = hooks.query_writes(self.hooked, prompts)
        return None if written is None else written.to(prompts.x.device)

    def own_read_out(
        self, stream: Float[Tensor, "batch d_model"], prompts: Prompts
    ) -> Float[Tensor, "batch d_y"]:
        """What the model's own read-out, its last norm included, makes of a stream at the query, without gradients."""
        weights = self._shortcut
        with torch.no_grad():
            if weights is not None:
                found = weights_alone.read_out(weights, stream[:, None].to(weights.device))[:, 0]
            else:
                found = hooks.read_out(self.hooked, prompts, stream)
        return found.to(prompts.x.device)

    def require_layer(self, layer: int) -> None:
        """Refuse a number of layers that the model does not have.

        Raises:
            ValueError: Naming it.
        """
        if not 0 <= layer <= self.n_layers:
            raise ValueError(f"layer must lie in 0 to {self.n_layers}, got {layer}.")


Source = object
"""What an analysis takes: a checkpoint, a hooked model, weights or a `Predictor`; `predictor_of` refuses the rest."""


def task_for(source: Source, task: TaskConfig | None, analysis: str) -> TaskConfig:
    """The task as it is given, or the model's own.

    Args:
        analysis: What needs it, for the message.
    Raises:
        ValueError: If there is none, or what is given is no task.
    Example:
        >>> from mechinterp.models.constructions.one_layer import zero_head
        >>> task_for(zero_head(d_x=3), None, "fit_learners").d_x
        3
    """
    require_task(task, analysis)
    task = predictor_of(source).task if task is None else task
    if task is None:
        raise ValueError(f"{analysis} needs a task for a model that comes without one, got none.")
    return task


def assumed_of(source: Source, task: TaskConfig | None) -> tuple[str, ...]:
    """Fields of the task that nobody stated: of the model's own task; none of one that is given in its place.

    Example:
        >>> from mechinterp.models.constructions.one_layer import zero_head
        >>> "noise_var" in assumed_of(zero_head(d_x=3), None), assumed_of(zero_head(d_x=3), TaskConfig(d_x=3))
        (True, ())
    """
    predictor = predictor_of(source)
    return predictor.assumed if task is None or task is predictor.task else ()


def require_task(task: object, analysis: str) -> None:
    """Refuse prompts, or anything else, in place of a task.

    Args:
        analysis: What needs it, for the message.
    Raises:
        ValueError: If it is neither a task nor None.
    """
    if not (task is None or isinstance(task, TaskConfig)):
        raise ValueError(
            f"task must be a TaskConfig, got {type(task).__name__}; {analysis} draws its own prompts, "
            "as task=, n_prompts= and seed= say."
        )


Learner = Callable[[Prompts], Tensor]
"""A function from prompts to predictions [batch, d_y], or [layer, batch, d_y] after every layer."""


def is_learner(source: Source) -> bool:
    """Whether a source is a function of prompts, and no model.

    Example:
        >>> is_learner(lambda prompts: prompts.y_query), is_learner(TaskConfig())
        (True, False)
    """
    return inspect.isroutine(source) or isinstance(source, partial)


def learner_of(source: Source | Learner) -> Learner:
    """A function from prompts to the last predictions: of a learner, or of a model without gradients.

    Raises:
        ValueError: If it is neither.
    """
    if is_learner(source):
        learner = cast(Learner, source)

        def last(prompts: Prompts) -> Tensor:
            found = learner(prompts)
            return found[-1] if found.ndim == 3 else found

        return last
    predictor = predictor_of(source)

    def predictions(prompts: Prompts) -> Tensor:
        with torch.no_grad():
            return predictor.predict(prompts)

    return predictions


@runtime_checkable
class HasPredictor(Protocol):
    """A checkpoint."""

    @property
    def predictor(self) -> Predictor: ...


def predictor_of(source: Source) -> Predictor:
    """A checkpoint, a hooked model, weights or a predictor, as the analyses see it.

    Raises:
        ValueError: If it is none of these.
    Example:
        >>> from mechinterp.models.constructions.one_layer import zero_head
        >>> predictor_of(zero_head(d_x=5)).n_heads
        1
    """
    if isinstance(source, Predictor):
        return source
    if isinstance(source, AnyWeights):
        return _of_weights(as_weights(source))
    if isinstance(source, HasPredictor):
        return source.predictor
    if isinstance(source, HookedPredictor):
        return Predictor(source.n_layers, source.n_heads, lambda: source)
    return _of_hooked_model(source)


def _of_weights(weights: Weights) -> Predictor:
    def build() -> HookedPredictor:
        from mechinterp.models.hooked.transformer import ICLTransformer

        return hooked_predictor(ICLTransformer.from_weights(weights, task=task))

    task = TaskConfig(d_x=weights.d_x, d_y=weights.d_y)
    return Predictor(
        n_layers=weights.n_layers,
        n_heads=weights.n_heads,
        build=build,
        own_weights=lambda: weights,
        task=task,
        assumed=BEYOND_SIZES,
    )


def _of_hooked_model(model: object) -> Predictor:
    hooked = hooked_predictor(model)  # type: ignore[arg-type]

    return Predictor(
        n_layers=hooked.n_layers,
        n_heads=hooked.n_heads,
        build=lambda: hooked,
        own_weights=lambda: hooked.model.weights,  # type: ignore[arg-type, return-value]
        is_hooked=lambda: hooked.is_hooked,
        task=_assumed_task(hooked.model.cfg),  # type: ignore[arg-type]
        assumed=BEYOND_SIZES,
    )


def _assumed_task(cfg: "HookedConfig") -> TaskConfig:
    """The softmax paper's setting for a model's sizes, no longer than its positions."""
    task, most = TaskConfig(d_x=cfg.d_x, d_y=cfg.d_y), cfg.n_ctx - 2
    if cfg.model.layout == "in_turn":
        most //= 2
    return replace(task, context_length=max(1, min(task.context_length, most)))


def _is_linear(weights: Weights) -> bool:
    return weights.has_stack and weights.model.score in LINEAR


def _fitting(weights: Weights, prompts: Prompts) -> Prompts:
    """The prompts in the dtype and on the device of the weights.

    Raises:
        ValueError: If they are of another d_x or d_y, or too long.
    """
    tokens_of(prompts[:1], weights.model, d_x=weights.d_x, d_y=weights.d_y)
    return prompts.to(weights.device).to(weights.dtype)
