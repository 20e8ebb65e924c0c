"""Linear probes of the response and of structures after each layer, and descent on features."""

from collections.abc import Mapping
from dataclasses import dataclass

import pandas as pd
import plotly.graph_objects as go

from mechinterp.analysis.probing.feature_descent import DescentCurves, p_probe
from mechinterp.analysis.probing.linear import STRUCTURES, LayerProbes, probe_layers
from mechinterp.display import Result
from mechinterp.icl.prompts import Prompts
from mechinterp.models.run.evaluation import evaluation_prompts
from mechinterp.models.run.predictor import Source
from mechinterp.progress import ProgressCallback, no_progress

AFTER = "after layer 0"


@dataclass(frozen=True, eq=False, repr=False)
class Probing(Result):
    """Probes of the stream after each layer, and gradient descent on what the first layer writes."""

    response: LayerProbes
    structures: Mapping[str, LayerProbes]
    """Probes of what a first layer may write, by its name."""
    descent: DescentCurves

    def __repr__(self) -> str:
        return f"Probing({self.response!r}, {self.descent!r})"

    def to_frame(self) -> pd.DataFrame:
        """One row per target, layer and position."""
        frames = {"response": self.response.to_frame(), **self.structure_frames()}
        rows = [frame.assign(target=name) for name, frame in frames.items()]
        return pd.concat(rows, ignore_index=True)

    def structure_frames(self) -> dict[str, pd.DataFrame]:
        """The table of each structure, by its name."""
        return {name: found.to_frame() for name, found in self.structures.items()}

    def plot(self) -> go.Figure:
        """Risk of the probe of the response after each layer."""
        return self.response.plot()


def probe(
    source: Source,
    prompts: Prompts | None = None,
    *,
    n_prompts: int | None = None,
    seed: int = 0,
    progress: ProgressCallback = no_progress,
) -> Probing:
    """Linear probes of the response and of `STRUCTURES` after each layer, and descent on the first layer's features.

    Args:
        prompts: None: `n_prompts` of the model's own task are drawn, by `seed`.
        n_prompts: None: 4096, of models with norms or MLPs 512, or as many as probes of a wide stream take.
        progress: Optional progress callback.
    Raises:
        ValueError: If there are too few prompts for the features.
    Example:
        >>> from mechinterp import load
        >>> list(probe(load("checkpoints/softmax-h2-s0"), n_prompts=64).structures)
        ['reweighted x', 'preconditioned x']
    """
    prompts = evaluation_prompts(source, prompts, n_prompts=n_prompts, seed=seed)
    response = probe_layers(source, prompts, progress=progress)
    structures = {
        name: probe_layers(source, prompts, target=target, progress=progress)
        for name, target in STRUCTURES.items()
    }
    return Probing(response, structures, p_probe({AFTER: source}, prompts, progress=progress))
