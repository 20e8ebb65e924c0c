"""The one way to run any model: predictions under masks of heads, and the streams inside.

Whether a model is run from its weights or by its hooks is chosen in one place, and both give the same. No analysis asks
what kind of model it has.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Protocol, cast, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from mechinterp.config import ModelConfig, TaskConfig
from mechinterp.icl.prompts import Prompts
from mechinterp.models.heads import AttentionWeights
from mechinterp.models.hooked.masks import Head, require_heads, require_method
from mechinterp.models.hooked.query_position import query_positions
from mechinterp.models.hooked.runner import HookedPredictor, hooked_predictor
from mechinterp.models.run.hooks import ByHooks
from mechinterp.models.run.ways import ByWeights
from mechinterp.models.weights import AnyWeights, Weights, as_weights, why_no_circuits
from mechinterp.progress import ProgressCallback, no_progress

if TYPE_CHECKING:
    from mechinterp.models.hooked.config import HookedConfig


@dataclass(frozen=True, eq=False)
class Predictor:
    """A model as the analyses see it: prompts in, predictions out, heads and streams by number."""

    n_layers: int
    n_heads: int
    """Heads of every layer."""
    build: Callable[[], HookedPredictor]
    """The model with hooks, built when it is asked for."""
    own_weights: Callable[[], Weights | None] = lambda: None
    """Those of a model of this package, which may change with it; None of any other."""
    is_hooked: Callable[[], bool] = lambda: False
    """Whether somebody's hooks are on the model, which ways past its modules would miss."""
    task: TaskConfig | None = None
    """Law of its prompts, where it is known; it says which of its fields nobody stated."""
    trained_here: bool = False
    """Whether this package trained the model on this task, so that the task is not in doubt."""

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
    def _architecture(self) -> ModelConfig | None:
        weights = self.own_weights()
        return None if weights is None else weights.model

    @property
    def is_one_attention(self) -> bool:
        """Whether the model is one layer of attention with nothing around it, which has `circuits`."""
        model = self._architecture
        return model is not None and why_no_circuits(model) is None

    @property
    def attention_only(self) -> bool:
        """Whether it is known that nothing but the heads adds to the stream or changes it."""
        model = self._architecture
        return model is not None and model.attention_only

    @property
    def circuits(self) -> AttentionWeights:
        """The heads of a model that is one layer of attention with nothing around it.

        Raises:
            ValueError: If the model is another, saying why.
        """
        weights = self.weights
        if weights is None or (more := why_no_circuits(weights.model)) is not None:
            got = "a model without weights of this package" if weights is None else more
            raise ValueError(f"needs one layer of attention with nothing around it, got {got}.")
        return weights.circuits

    @property
    def _way(self) -> ByHooks:
        """The one place that chooses: from the weights, if they alone decide what the model predicts, or by hooks."""
        weights = None if self.is_hooked() else self.own_weights()
        if weights is None:
            return ByHooks(lambda: self.hooked)
        return ByWeights(lambda: self.hooked, weights)

    def predict(self, prompts: Prompts) -> Float[Tensor, "batch d_y"]:
        """Prediction of y_query, in units of y, on the device of the prompts."""
        return self._way.predict(prompts).to(prompts.x.device)

    @torch.no_grad()
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
        predictions = self._way.run(prompts, masks, method=method, progress=progress)
        return predictions.to(prompts.x.device)

    @torch.no_grad()
    def streams(
        self, prompts: Prompts, *, heads: Sequence[Head] = (), positions: Sequence[int] = (-1,)
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
        return self._way.streams(prompts, heads, positions).to(prompts.x.device)

    @torch.no_grad()
    def stream(self, prompts: Prompts, layer: int) -> Float[Tensor, "batch pos d_model"]:
        """The stream at every position after some layers, without gradients."""
        self.require_layer(layer)
        return self._way.stream(prompts, layer).to(prompts.x.device)

    def query_position(self, prompts: Prompts, layer: int) -> int:
        """Position of the query in the stream after some layers; -1 is the last.

        Raises:
            ValueError: If it is not known.
        """
        self.require_layer(layer)
        return -1 if self._architecture else query_positions(self.hooked, prompts)[layer]

    @torch.no_grad()
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
        streams = self._way.query_streams(prompts, layer, heads, progress)
        return streams.to(prompts.x.device)

    @torch.no_grad()
    def query_patterns(self, prompts: Prompts) -> Float[Tensor, "layer batch head key"]:
        """Attention weights that the query gives to every position, without gradients; 0 for those that it cannot read.

        Raises:
            ValueError: If the model lacks the hook on its patterns, or it is not known where the query is.
        """
        return self._way.query_patterns(prompts).to(prompts.x.device)

    @torch.no_grad()
    def query_writes(self, prompts: Prompts) -> Float[Tensor, "layer batch head d_model"] | None:
        """What each head adds to the stream at the query, without gradients; None where its W_O is not known."""
        written = self._way.query_writes(prompts)
        return None if written is None else written.to(prompts.x.device)

    @torch.no_grad()
    def own_read_out(
        self, stream: Float[Tensor, "batch d_model"], prompts: Prompts
    ) -> Float[Tensor, "batch d_y"]:
        """What the model's own read-out, its last norm included, makes of a stream at the query, without gradients."""
        return self._way.read_out(stream, prompts).to(prompts.x.device)

    def require_layer(self, layer: int) -> None:
        """Refuse a number of layers that the model does not have.

        Raises:
            ValueError: Naming it.
        """
        if not 0 <= layer <= self.n_layers:
            raise ValueError(f"layer must lie in 0 to {self.n_layers}, got {layer}.")


Source = object
"""What an analysis takes: a checkpoint, a hooked model, weights or a `Predictor`; `predictor_of` refuses the rest."""

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
    if not is_learner(source):
        return torch.no_grad()(predictor_of(source).predict)
    learner = cast(Learner, source)

    def last(prompts: Prompts) -> Tensor:
        predictions = learner(prompts)
        return predictions[-1] if predictions.ndim == 3 else predictions

    return last


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
    )


def _assumed_task(cfg: "HookedConfig") -> TaskConfig:
    """The softmax paper's setting for a model's sizes, no longer than its positions."""
    task, most = TaskConfig(d_x=cfg.d_x, d_y=cfg.d_y), cfg.n_ctx - 2
    if cfg.model.layout == "in_turn":
        most //= 2
    shorter = replace(task, context_length=max(1, min(task.context_length, most)))
    return shorter.assuming(task.assumed)
