"""Predictions of a model with the stream at the query set to what an algorithm says it holds."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from mechinterp.config import TaskConfig
from mechinterp.icl.algorithm import Algorithm
from mechinterp.icl.prompt_moments import PromptMoments
from mechinterp.icl.prompts import Prompts
from mechinterp.models.hooked.query_position import query_positions
from mechinterp.models.hooked.runner import HookedPredictor

Hook = tuple[str, Callable[..., Tensor]]
REWEIGHTED = "preprocess_then_optimise"
"""The algorithm whose x has a place of its own in the stream, empty before the first layer."""


def held(
    algorithm: Algorithm,
    scalars: Float[np.ndarray, " scalar"],
    prompts: Prompts,
    task: TaskConfig,
    n_layers: int,
) -> list[Float[Tensor, "prompt held"]]:
    """What the algorithm says the query holds before the first layer and after each: its prediction,
    and x where the layers change it."""
    moments = PromptMoments(prompts, task)
    path = algorithm.predictions(moments, scalars.tolist(), n_layers)
    path = torch.cat([torch.zeros_like(path[:1]), path])
    changed = algorithm.changed_covariates(moments, scalars.tolist(), n_layers)
    if changed is None:
        return list(path)
    before = (
        torch.zeros_like(changed[:1])
        if algorithm.label == REWEIGHTED
        else moments.prompts.x_query[None]
    )
    return [torch.cat(both, 1) for both in zip(path, torch.cat([before, changed]), strict=True)]


def step_image(
    held: Sequence[Tensor], streams: Float[Tensor, "layer prompt d_model"], layer: int
) -> Float[Tensor, "half d_model"]:
    """The linear image of the algorithm's step that is nearest to what the layer adds."""
    step, added = held[layer + 1] - held[layer], streams[layer + 1] - streams[layer]
    image = torch.linalg.lstsq(step[::2], added[::2], driver="gelsd").solution
    return step[1::2] @ image


@dataclass(frozen=True, eq=False)
class QueryRun:
    """A hooked model on prompts, with the stream at the query set on the way."""

    hooked: HookedPredictor
    prompts: Prompts
    places: list[int]
    """Where the query is in the stream before each layer and after the last."""

    @classmethod
    def of(cls, hooked: HookedPredictor, prompts: Prompts) -> "QueryRun":
        return cls(hooked, prompts, query_positions(hooked, prompts))

    def predictions(self, hooks: Sequence[Hook]) -> Float[Tensor, "half d_y"]:
        weight = next(self.hooked.model.parameters())
        given = self.prompts.to(weight.device).to(weight.dtype)
        with torch.no_grad():
            output = self.hooked.model.run_with_hooks(
                self.hooked.inputs(given), fwd_hooks=list(hooks)
            )
            return self.hooked.prediction(output, given).cpu().double()

    def replaced(
        self, layers: Sequence[int], steps: Sequence[Float[Tensor, "half d_model"]]
    ) -> Float[Tensor, "half d_y"]:
        """Predictions with the additions of some layers replaced by given steps."""
        before: dict[int, Tensor] = {}

        def recorded(layer: int) -> Callable[..., Tensor]:
            def record(stream: Tensor, hook: object) -> Tensor:
                before[layer] = stream[:, self.places[layer]].clone()
                return stream

            return record

        def put(layer: int) -> Callable[..., Tensor]:
            def replace(stream: Tensor, hook: object) -> Tensor:
                if stream.shape[2] != steps[layer].shape[1]:
                    raise ValueError(
                        "intervene_on_steps needs a stream of one width, got "
                        f"{steps[layer].shape[1]} and {stream.shape[2]}."
                    )
                stream = stream.clone()
                stream[:, self.places[layer + 1]] = before[layer] + steps[layer].to(stream)
                return stream

            return replace

        hooks: list[Hook] = []
        for layer in layers:
            hooks.append((self.hooked.stream_name(layer), recorded(layer)))
            hooks.append((self.hooked.stream_name(layer + 1), put(layer)))
        # The stream after one layer is set before it is recorded for the next.
        hooks.sort(key=lambda hook: hook[1].__name__ == "record")
        return self.predictions(hooks)

    def shifted(self, layer: int, by: Float[Tensor, "half d_model"]) -> list[Hook]:
        """Hooks that add to the stream at the query after some layers."""

        def shift(stream: Tensor, hook: object) -> Tensor:
            stream = stream.clone()
            stream[:, self.places[layer]] += by.to(stream)
            return stream

        return [(self.hooked.stream_name(layer), shift)]
