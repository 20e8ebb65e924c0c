"""The two ways to run a model: from its weights alone, and by its hooks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from mechinterp.icl.prompts import Prompts
from mechinterp.models.hooked.masks import Head
from mechinterp.models.hooked.query_position import query_positions
from mechinterp.models.hooked.runner import HookedPredictor
from mechinterp.models.run import general, hooks, linear, one_layer
from mechinterp.models.tokens import tokens_of
from mechinterp.models.weights import Weights, why_no_circuits
from mechinterp.progress import ProgressCallback, no_progress


@runtime_checkable
class Way(Protocol):
    """How a model is run; the methods are those of `Predictor`."""

    def predict(self, prompts: Prompts) -> Float[Tensor, "batch d_y"]: ...

    def run(
        self,
        prompts: Prompts,
        masks: Sequence[Sequence[Head]],
        *,
        method: str,
        progress: ProgressCallback,
    ) -> Float[Tensor, "mask batch d_y"]: ...

    def streams(
        self, prompts: Prompts, heads: Sequence[Head], positions: Sequence[int]
    ) -> Float[Tensor, "layer batch pos d_model"]: ...

    def query_streams(
        self, prompts: Prompts, layer: int, heads: Sequence[Head], progress: ProgressCallback
    ) -> Float[Tensor, "batch pos d_model"]: ...

    def query_patterns(self, prompts: Prompts) -> Float[Tensor, "layer batch head key"]: ...

    def read_out(
        self, stream: Float[Tensor, "batch d_model"], prompts: Prompts
    ) -> Float[Tensor, "batch d_y"]: ...


@dataclass(frozen=True, eq=False)
class ByHooks:
    """Any hooked model, by its hooks."""

    build: Callable[[], HookedPredictor]
    attention: Weights | None = None
    """Those of a model of attention alone, whose heads can be taken away again; None: any other model."""

    def predict(self, prompts: Prompts) -> Float[Tensor, "batch d_y"]:
        # In one piece: somebody's hooks may depend on all prompts.
        return self.build().predict(prompts)

    def run(
        self,
        prompts: Prompts,
        masks: Sequence[Sequence[Head]],
        *,
        method: str,
        progress: ProgressCallback,
    ) -> Float[Tensor, "mask batch d_y"]:
        return hooks.masked_predictions(
            self.build(), self.attention, prompts, masks, method=method, progress=progress
        )

    def streams(
        self, prompts: Prompts, heads: Sequence[Head], positions: Sequence[int]
    ) -> Float[Tensor, "layer batch pos d_model"]:
        return hooks.streams(self.build(), prompts, heads=heads, positions=positions)

    def query_streams(
        self, prompts: Prompts, layer: int, heads: Sequence[Head], progress: ProgressCallback
    ) -> Float[Tensor, "batch pos d_model"]:
        hooked = self.build()
        place = query_positions(hooked, prompts)[layer]
        covariates = progress([*prompts.x.unbind(1), prompts.x_query], "every token as the query")
        each = [
            hooks.stream(hooked, replace(prompts, x_query=x), layer, heads=heads)[:, place]
            for x in covariates
        ]
        return torch.stack(each, dim=1)

    def query_patterns(self, prompts: Prompts) -> Float[Tensor, "layer batch head key"]:
        return hooks.query_patterns(self.build(), prompts)

    def read_out(
        self, stream: Float[Tensor, "batch d_model"], prompts: Prompts
    ) -> Float[Tensor, "batch d_y"]:
        return hooks.read_out(self.build(), prompts, stream)


@dataclass(frozen=True, eq=False)
class ByWeights:
    """A model of this package from its weights: in closed form, as a map of the tokens, or layer by layer."""

    weights: Weights
    by_hooks: ByHooks
    """For what takes every token of every layer."""

    def predict(self, prompts: Prompts) -> Float[Tensor, "batch d_y"]:
        return self.run(prompts, [[]])[0]

    def run(
        self,
        prompts: Prompts,
        masks: Sequence[Sequence[Head]],
        *,
        method: str = "zero",
        progress: ProgressCallback = no_progress,
    ) -> Float[Tensor, "mask batch d_y"]:
        weights, fitting = self.weights, self._fitting(prompts)
        if why_no_circuits(weights.model) is None:
            return one_layer.masked_predictions(
                weights.circuits, fitting, masks, method=method, progress=progress
            )
        if method != "zero":
            return self.by_hooks.run(prompts, masks, method=method, progress=progress)
        if self.weights.is_linear_map:
            return linear.masked_predictions(weights, fitting, masks, progress=progress)
        return general.masked_predictions(weights, fitting, masks, progress=progress)

    def streams(
        self, prompts: Prompts, heads: Sequence[Head], positions: Sequence[int]
    ) -> Float[Tensor, "layer batch pos d_model"]:
        fitting = self._fitting(prompts)
        if self.weights.is_linear_map:
            return linear.streams(self.weights, fitting, heads=heads, positions=positions)
        if tuple(positions) == (-1,):
            return general.streams(self.weights, fitting, heads=heads)
        return self.by_hooks.streams(prompts, heads, positions)

    def query_streams(
        self, prompts: Prompts, layer: int, heads: Sequence[Head], progress: ProgressCallback
    ) -> Float[Tensor, "batch pos d_model"]:
        if self.weights.is_linear_map:
            fitting = self._fitting(prompts)
            return linear.query_streams(self.weights, fitting, layer, heads=heads)
        return self.by_hooks.query_streams(prompts, layer, heads, progress)

    def query_patterns(self, prompts: Prompts) -> Float[Tensor, "layer batch head key"]:
        return general.query_patterns(self.weights, self._fitting(prompts))

    def read_out(
        self, stream: Float[Tensor, "batch d_model"], prompts: Prompts
    ) -> Float[Tensor, "batch d_y"]:
        return general.read_out(self.weights, stream[:, None].to(self.weights.device))[:, 0]

    def _fitting(self, prompts: Prompts) -> Prompts:
        """The prompts in the dtype and on the device of the weights.

        Raises:
            ValueError: If they are of another d_x or d_y, or too long.
        """
        weights = self.weights
        tokens_of(prompts[:1], weights.model, d_x=weights.d_x, d_y=weights.d_y)
        return prompts.to(weights.device).to(weights.dtype)
