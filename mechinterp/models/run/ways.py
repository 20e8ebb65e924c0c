"""Running a model of this package from its weights alone, where they suffice."""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from mechinterp.icl.prompts import Prompts
from mechinterp.models.hooked.masks import Head
from mechinterp.models.run import general, linear, one_layer
from mechinterp.models.run.hooks import ByHooks
from mechinterp.models.tokens import tokens_of
from mechinterp.models.weights import Weights, why_no_circuits
from mechinterp.progress import ProgressCallback, no_progress


@dataclass(frozen=True, eq=False)
class ByWeights(ByHooks):
    """Model run from its weights: in closed form, as a map of the tokens, or layer by layer; by hooks if that is not enough."""

    weights: Weights

    def predict(self, prompts: Prompts) -> Float[Tensor, "batch d_y"]:
        return self.run(prompts, [[]])[0]

    def predict_at_every(self, prompts: Prompts) -> Float[Tensor, "batch n_pairs d_y"] | None:
        if self.weights.model.layout != "in_turn":
            return None
        return general.predict_at_every(self.weights, self._fitting(prompts))

    def run(
        self,
        prompts: Prompts,
        masks: Sequence[Sequence[Head]],
        *,
        method: str = "zero",
        progress: ProgressCallback = no_progress,
        mlps: Sequence[Sequence[int]] | None = None,
        at: int | None = None,
    ) -> Float[Tensor, "mask batch d_y"]:
        weights, fitting = self.weights, self._fitting(prompts)
        if mlps is not None or at is not None:
            return super().run(fitting, masks, method=method, progress=progress, mlps=mlps, at=at)
        if why_no_circuits(weights.model) is None:
            return one_layer.masked_predictions(
                weights.circuits, fitting, masks, method=method, progress=progress
            )
        if method == "zero" and weights.is_linear_map:
            return linear.masked_predictions(weights, fitting, masks, progress=progress)
        return general.masked_predictions(weights, fitting, masks, method=method, progress=progress)

    def streams(
        self, prompts: Prompts, heads: Sequence[Head], positions: Sequence[int]
    ) -> Float[Tensor, "layer batch pos d_model"]:
        fitting = self._fitting(prompts)
        if self.weights.is_linear_map:
            return linear.streams(self.weights, fitting, heads=heads, positions=positions)
        if tuple(positions) == (-1,):
            return general.streams(self.weights, fitting, heads=heads)
        return super().streams(prompts, heads, positions)

    def query_streams(
        self, prompts: Prompts, layer: int, heads: Sequence[Head], progress: ProgressCallback
    ) -> Float[Tensor, "batch pos d_model"]:
        if self.weights.is_linear_map:
            return linear.query_streams(self.weights, self._fitting(prompts), layer, heads=heads)
        if self._queries_side_by_side:
            return general.query_streams(self.weights, self._fitting(prompts), layer, heads=heads)
        return super().query_streams(prompts, layer, heads, progress)

    @property
    def _queries_side_by_side(self) -> bool:
        """True if several queries can share one pass: no token reads a query, or knows its place."""
        model = self.weights.model
        placed = model.rotary_dim is not None or "pos_embed.W_pos" in self.weights.tensors
        alone = model.context_only or model.n_layers == 1
        return alone and not (placed or model.attend_to_self or model.layout == "in_turn")

    def query_patterns(self, prompts: Prompts) -> Float[Tensor, "layer batch head key"]:
        return general.query_patterns(self.weights, self._fitting(prompts))

    def read_out(
        self, stream: Float[Tensor, "batch d_model"], prompts: Prompts
    ) -> Float[Tensor, "batch d_y"]:
        return general.read_out(self.weights, stream[:, None].to(self.weights.device))[:, 0]

    def _fitting(self, prompts: Prompts) -> Prompts:
        """The prompts in the dtype and on the device of the weights.

        Raises:
            ValueError: If the prompts have another d_x or d_y, or are too long.
        """
        weights = self.weights
        tokens_of(prompts[:1], weights.model, d_x=weights.d_x, d_y=weights.d_y)
        return prompts.to(weights.device).to(weights.dtype)
