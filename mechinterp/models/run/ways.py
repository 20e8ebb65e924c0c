"""The one interface that runs any model: predictions under masks of heads, and residual streams.

`Predictor` alone chooses between running from the weights and running by hooks; both give the same results. No analysis
needs to know the kind of its model.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from mechinterp.config import TaskConfig
from mechinterp.icl.prompts import Prompts
from mechinterp.memory import require_memory
from mechinterp.models.hooked.masks import Head, require_heads, require_method
from mechinterp.models.hooked.runner import HookedPredictor
from mechinterp.models.layers import tokens_of
from mechinterp.models.run import general, hooks, linear, one_layer
from mechinterp.models.weights import Weights

PREFIX_CHECK = 1e-5
"""Largest relative difference between a model's output at an x and its prediction for a prompt that ends there."""
_KEPT: ContextVar[dict[tuple, tuple[object, Tensor]] | None] = ContextVar("kept", default=None)


@contextmanager
def predictions_kept() -> Iterator[None]:
    """Context in which a model predicts equal prompts once, for the analyses of one page."""
    token = _KEPT.set({})
    try:
        yield
    finally:
        _KEPT.reset(token)


@dataclass(frozen=True, eq=False)
class Predictor(ABC):
    """A model as the analyses use it: prompts in, predictions out, heads and streams by number."""

    task: TaskConfig | None = None
    """Task that the model was trained on, with the names of its assumed fields; None if unknown."""
    trained_here: bool = False
    """True: this package trained the model on this task, so that the task is certain."""
    law_stated: bool = False
    """True: the task was stated with the model or its file, so that it is the law of given prompts, too. False: it is
    assumed, or sizes alone were stated."""
    doubts: Callable[[], str] = str
    """Computes why the file of the model may have been read wrongly; empty if nothing says so."""
    _checked: dict[str, bool] = field(default_factory=dict, init=False, repr=False)
    """Results of checks that have been made, by name: whether one pass gives the predictions at every x."""

    @property
    def doubt(self) -> str:
        """Why the file of the model may have been read wrongly; empty if nothing says so."""
        return self.doubts()

    @property
    @abstractmethod
    def hooked(self) -> HookedPredictor:
        """The hooked model."""

    @property
    @abstractmethod
    def weights(self) -> Weights | None:
        """Current weights of a model of this package; None for any other model."""

    @property
    @abstractmethod
    def is_hooked(self) -> bool:
        """True if the model has hooks, which a shortcut around its modules would skip."""

    @property
    def n_layers(self) -> int:
        return self.hooked.n_layers

    @property
    def n_heads(self) -> int:
        """Number of heads, the same in every layer."""
        return self.hooked.n_heads

    @property
    def heads(self) -> list[Head]:
        """All heads (layer, head), layer by layer."""
        return [(layer, head) for layer in range(self.n_layers) for head in range(self.n_heads)]

    @property
    def model(self) -> object:
        """The hooked module itself."""
        return self.hooked.model

    @property
    def is_one_attention(self) -> bool:
        """True if the model is a single attention layer and nothing else; it then is `one_layer`."""
        weights = self.weights
        return weights is not None and weights.model.one_attention

    @property
    def attention_only(self) -> bool:
        """True if heads alone write to the stream; False if unknown."""
        weights = self.weights
        return weights is not None and weights.model.attention_only

    def _fast(self, prompts: Prompts) -> tuple[Weights, Prompts] | None:
        """Weights, if they alone decide the predictions, with the prompts on their device; None: run by hooks.

        Raises:
            ValueError: If the prompts have another d_x or d_y, or are too long.
        """
        weights = None if self.is_hooked else self.weights
        if weights is None:
            return None
        tokens_of(prompts[:1], weights.model, d_x=weights.d_x, d_y=weights.d_y)
        return weights, prompts.to(weights.device).to(weights.dtype)

    def predict(self, prompts: Prompts) -> Float[Tensor, "batch d_y"]:
        """Prediction of y_query, in units of y, on the device of the prompts."""
        return self._once(("predict",), prompts, lambda: self._predict(prompts))

    def _predict(self, prompts: Prompts) -> Float[Tensor, "batch d_y"]:
        if (fast := self._fast(prompts)) is None:
            return hooks.predict(self.hooked, prompts)
        return _masked_predictions(*fast, [[]])[0]

    def with_gradients(
        self, prompts: Prompts, layer: int | None = None
    ) -> Float[Tensor, "batch d_y"]:
        """Prediction that autograd can follow back to the prompts.

        Args:
            layer: Number of layers after which the model's own read-out is applied; None: all.
        Raises:
            ValueError: If the model has fewer layers, or the prompts do not fit it.
        Example:
            >>> from dataclasses import replace
            >>> from mechinterp.icl.prompts import draw_prompts
            >>> from mechinterp.models.constructions.one_layer import debiased_gradient_step
            >>> from mechinterp.models.run.predictor import predictor_of
            >>> prompts = draw_prompts(TaskConfig(), 4, dtype=torch.float64)
            >>> y = prompts.y.clone().requires_grad_()
            >>> predictor = predictor_of(debiased_gradient_step(0.88, 0.02, d_x=5))
            >>> predictor.with_gradients(replace(prompts, y=y)).requires_grad
            True
        """
        fast = self._fast(prompts)
        if layer is None:
            own = _masked_predictions(*fast, [[]])[0] if fast else self.hooked.predict(prompts)
            return own.to(prompts.x.device)
        self.require_layer(layer)
        if fast is None:
            stream = hooks.streams(self.hooked, prompts, heads=(), positions=(-1,))[layer, :, 0]
            return hooks.read_out(self.hooked, stream, prompts).to(prompts.x.device)
        stream = general.streams(*fast)[layer]
        return general.read_out(fast[0], stream)[:, 0].to(prompts.x.device)

    def _once(
        self, what: tuple[object, ...], prompts: Prompts, compute: Callable[[], Tensor]
    ) -> Tensor:
        """The result of `compute` on the device of the prompts.

        Inside `predictions_kept` that of an earlier call for the same model and equal prompts.
        """
        kept, weights = _KEPT.get(), self.weights
        if kept is None or self.is_hooked:
            return compute().to(prompts.x.device)
        owner = self.hooked if weights is None else weights
        parts = (prompts.x, prompts.y, prompts.x_query)
        read = (each.contiguous().numpy(force=True).tobytes() for each in parts)
        key = (id(owner), *self._versions, what, prompts.y.dtype, prompts.y.shape, *map(hash, read))
        if key not in kept:
            kept[key] = owner, compute()  # the owner stays, so that no other object gets its id
        return kept[key][1].clone().to(prompts.x.device)

    @property
    def _versions(self) -> Iterator[int]:
        """Versions of the weights and the parameters, which torch counts up at each edit in place."""
        model, weights = self._built, self.weights
        if weights is not None:
            yield from (tensor._version for tensor in weights.tensors.values())
        if isinstance(model, torch.nn.Module):
            yield from (parameter._version for parameter in model.parameters())

    @property
    def _built(self) -> object:
        """The hooked module; None if it has not been built."""
        return self.model

    @torch.no_grad()
    def predict_at_every(self, prompts: Prompts) -> Float[Tensor, "batch n_pairs d_y"] | None:
        """Predictions of y at every x from the 0 to L pairs before it, by one pass; None if one pass does not give them.

        One pass gives them if the output at an x equals the prediction for a prompt that ends there (relative
        difference below PREFIX_CHECK, checked once on a few of the prompts).
        """
        if "every" not in self._checked:
            try:
                self._checked["every"] = self._one_pass_is_enough(prompts[:4])
            except (TypeError, RuntimeError, ValueError, IndexError, AssertionError):
                self._checked["every"] = False  # a module that takes prompts of one length only
        return self._output_at_every(prompts) if self._checked["every"] else None

    def _output_at_every(self, prompts: Prompts) -> Float[Tensor, "batch n_pairs d_y"] | None:
        if (fast := self._fast(prompts)) is None:
            return self.hooked.predict_at_every(prompts)
        return general.predict_at_every(*fast) if fast[0].model.predicts_everywhere else None

    def _one_pass_is_enough(self, prompts: Prompts) -> bool:
        every = self._output_at_every(prompts)
        if every is None:
            return False
        longest = prompts.x.shape[1]
        for length in {1, longest // 2, longest - 1} & set(range(longest)):
            alone = self.predict(prompts.prefix(length))
            # Not <=, so that NaN counts as different.
            if not (every[:, length] - alone).abs().max() <= PREFIX_CHECK * alone.abs().max():
                return False
        return True

    @torch.no_grad()
    def run(
        self,
        prompts: Prompts,
        masks: Sequence[Sequence[Head]] = ((),),
        *,
        mlps: Sequence[Sequence[int]] | None = None,
        at: int | None = None,
        method: str = "zero",
    ) -> Float[Tensor, "mask batch d_y"]:
        """Predictions under each of several masks, without gradients, on the device of the prompts.

        Args:
            masks: Lists of heads that are masked together; an empty list is the full model.
            mlps: Lists of layers, one per mask, whose MLPs are masked, too; None: no MLP.
            at: Position at which heads and MLPs are masked, counted from 0; None: at all.
            method: Replacement for z of a masked head. "zero": 0; "mean": its mean over the prompts, by position;
                "resample": its value in another prompt (prompts 2i and 2i + 1 swap).
        Raises:
            ValueError: If there is no such head or no hook on an MLP, the method is unknown, "resample" gets an odd number
                of prompts, or the prompts do not fit the model.
        Example:
            >>> from mechinterp.icl.prompts import draw_prompts
            >>> from mechinterp.models.constructions.one_layer import debiased_gradient_step
            >>> from mechinterp.models.run.predictor import predictor_of
            >>> predictor = predictor_of(debiased_gradient_step(0.88, 0.02, d_x=5))
            >>> prompts = draw_prompts(TaskConfig(), 4, dtype=torch.float64)
            >>> full, first, second = predictor.run(prompts, [[], [(0, 1)], [(0, 0)]])
            >>> torch.allclose(first + second, full)
            True
        """
        require_heads([head for heads in masks for head in heads], self.n_layers, self.n_heads)
        require_method(method, prompts)
        settings: dict[str, Any] = {"method": method}

        def compute() -> Tensor:
            fast = self._fast(prompts)
            if fast is None or mlps is not None or at is not None:
                run = hooks.masked_predictions
                return run(self.hooked, prompts, masks, mlps=mlps, at=at, **settings)
            return _masked_predictions(*fast, masks, **settings)

        return self._once(("run", repr((masks, method, mlps, at))), prompts, compute)

    @torch.no_grad()
    def streams(
        self, prompts: Prompts, *, heads: Sequence[Head] = (), positions: Sequence[int] = (-1,)
    ) -> Float[Tensor, "layer batch pos d_model"]:
        """Residual stream before each layer and after the last, without gradients.

        Args:
            heads: Masked heads.
            positions: Positions of the stream, counted from its end; -1 is the query's position, wherever that is.
        Raises:
            ValueError: If there is no such head, the model has no hook on the last stream, the query's position is
                unknown, or positions other than the query's are given and the query is not last.
        """
        require_heads(heads, self.n_layers, self.n_heads)

        def compute() -> Tensor:
            fast = self._fast(prompts)
            if fast is not None and fast[0].model.stack == "linear":
                return linear.streams(*fast, heads=heads, positions=positions)
            if fast is not None and tuple(positions) == (-1,):
                return general.streams(*fast, heads=heads)
            return hooks.streams(self.hooked, prompts, heads=heads, positions=positions)

        return self._once(("streams", repr((heads, positions))), prompts, compute)

    @torch.no_grad()
    def stream(self, prompts: Prompts, layer: int) -> Float[Tensor, "batch pos d_model"]:
        """Stream at every position after `layer` layers, without gradients."""
        self.require_layer(layer)
        return hooks.stream(self.hooked, prompts, layer).to(prompts.x.device)

    def one_stream_width(self, prompts: Prompts) -> bool:
        """True if the stream has the same width before each layer and after the last."""
        return self._fast(prompts) is not None or hooks.one_width(self.hooked, prompts)

    @torch.no_grad()
    def predict_from(
        self, prompts: Prompts, layer: int, at_query: Float[Tensor, "batch d_model"]
    ) -> Float[Tensor, "batch d_y"]:
        """Predictions, with the stream at the query after `layer` layers set to the given one, without gradients.

        Raises:
            ValueError: If the model has fewer layers, or the query's position is unknown.
        """
        self.require_layer(layer)
        if (fast := self._fast(prompts)) is None:
            predicted = hooks.predict_from(self.hooked, prompts, layer, at_query)
        else:
            predicted = general.predict_from(*fast, layer, at_query.to(fast[0].device))
        return predicted.to(prompts.x.device)

    @torch.no_grad()
    def query_streams(self, prompts: Prompts, layer: int) -> Float[Tensor, "batch pos d_model"]:
        """Stream after `layer` layers at the query, with each covariate in turn as the query; the prompt's own query is last.

        Raises:
            ValueError: If the model has fewer layers.
        """
        self.require_layer(layer)
        fast = self._fast(prompts)
        if fast is not None and fast[0].model.queries_side_by_side:
            streams = general.query_streams(*fast, layer)
        else:
            streams = hooks.query_streams(self.hooked, prompts, layer)
        return streams.to(prompts.x.device)

    @torch.no_grad()
    def query_patterns(self, prompts: Prompts) -> Float[Tensor, "layer batch head key"]:
        """Attention weights of the query on every position, without gradients; 0 for positions it cannot read.

        Raises:
            ValueError: If the model has no hook on its patterns, or the query's position is unknown.
        """
        fast = self._fast(prompts)
        if fast is not None and not fast[0].model.recurrent:
            patterns = general.query_patterns(*fast)
        else:
            patterns = hooks.query_patterns(self.hooked, prompts)
        return patterns.to(prompts.x.device)

    @torch.no_grad()
    def query_writes(self, prompts: Prompts) -> Float[Tensor, "layer batch head d_model"] | None:
        """Output of each head at the query, without gradients; None if W_O is unknown."""
        written: Tensor | None
        if (fast := self._fast(prompts)) is None:
            written = hooks.query_writes(self.hooked, prompts)
        else:
            linear_stack = fast[0].model.stack == "linear"
            written = (linear if linear_stack else general).query_writes(*fast)
        return None if written is None else written.to(prompts.x.device)

    @torch.no_grad()
    def own_read_out(
        self, stream: Float[Tensor, "batch d_model"], prompts: Prompts
    ) -> Float[Tensor, "batch d_y"]:
        """The model's own read-out of a stream at the query, last norm included, without gradients."""
        if (fast := self._fast(prompts)) is None:
            read = hooks.read_out(self.hooked, stream, prompts)
        else:
            read = general.read_out(fast[0], stream[:, None].to(fast[0].device))[:, 0]
        return read.to(prompts.x.device)

    def require_room(self, n_prompts: int, like: Prompts) -> None:
        """Refuse a run on this many prompts like the given ones, if it does not fit into memory.

        Raises:
            ValueError: With the bytes needed and the bytes available.
        """
        if (fast := self._fast(like)) is None:
            return self.hooked.require_room(n_prompts, like)
        length = like.x.shape[1]
        needed = n_prompts * general.pass_bytes(fast[0], length)
        return require_memory(needed, f"{n_prompts} prompts of {length} pairs at once")

    def require_layer(self, layer: int) -> None:
        """Refuse a number of layers outside 0 to n_layers.

        Raises:
            ValueError: If `layer` is outside that range.
        """
        if not 0 <= layer <= self.n_layers:
            raise ValueError(f"layer must lie in 0 to {self.n_layers}, got {layer}.")


def _masked_predictions(
    weights: Weights, prompts: Prompts, masks: Sequence[Sequence[Head]], method: str = "zero"
) -> Float[Tensor, "mask batch d_y"]:
    """Predictions under each mask from the weights: in closed form, as a map of the tokens, or layer by layer."""
    if weights.model.one_attention:
        return one_layer.masked_predictions(weights, prompts, masks, method=method)
    if weights.model.stack == "linear":
        return linear.masked_predictions(weights, prompts, masks, method=method)
    return general.masked_predictions(weights, prompts, masks, method=method)
