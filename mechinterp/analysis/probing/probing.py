"""Linear probes of the response and of structures after each layer, and descent on features."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from mechinterp import figures
from mechinterp.analysis.number_format import cell, digits
from mechinterp.analysis.probing.feature_descent import DescentCurves, p_probe
from mechinterp.analysis.probing.linear import STRUCTURES, LayerProbes, probe_layers
from mechinterp.analysis.result import Table, records
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

    @property
    def target(self) -> tuple[str, ...]:
        """What a probe reads: the response; x reweighted, that is times the context's correlations with y
        (Algorithm 1); x preconditioned, that is (S - 1) x with the context's covariance S."""
        return ("response", *self.structures)

    def sentences(self) -> list[str]:
        """What is read of the response and of each structure, and whether the first layer makes descent faster."""
        risks = ", ".join(map(digits, self.response.risk[:, -1]))
        last = len(self.response.risk) - 1
        read = [
            f"{name} with R² {', '.join(map(cell, probes.r2[:, -1]))} (targets of other prompts: at most "
            f"{digits(max(0.0, float(probes.control_r2[:, -1].max())))})"
            for name, probes in self.structures.items()
        ]
        return [
            f"A linear probe of the stream at the query predicts the response with an excess risk of {risks} y² after 0 "
            f"to {last} layers.",
            f"What a first layer may write is read there, too: {'; '.join(read)}.",
            *self.descent.sentences(),
        ]

    def to_frame(self) -> pd.DataFrame:
        """One row per target, layer and position."""
        frames = {"response": self.response.to_frame(), **self.structure_frames()}
        rows = pd.concat([f.assign(target=name) for name, f in frames.items()], ignore_index=True)
        rows.insert(0, "target", rows.pop("target"))
        return rows

    def tables(self) -> dict[str, Table]:
        """Probes by target, then descent on the features."""
        title = "Read from the stream at the query; control r2: fitted to targets of other prompts"
        probes = Table(self.to_frame(), title, per="target", quiet=("pos", "penalty"))
        return {"probes": probes, **self.descent.tables()}

    def figures(self) -> dict[str, go.Figure]:
        """R^2 and risk of the probes, then descent."""
        return {
            "probe_r2": self.plot_r2(),
            "probe_risk": self.plot(),
            "descent": self.descent.plot(),
        }

    def to_document(self) -> dict:
        """What scripts read of the probes."""
        structures = self.structure_frames().items()
        return {
            "response": records(self.response.to_frame()),
            "structure": [{"target": n} | row for n, frame in structures for row in records(frame)],
            "descent": records(self.descent.to_frame()),
            "areas": records(self.descent.area_frame()),
        }

    def structure_frames(self) -> dict[str, pd.DataFrame]:
        """The table of each structure, by its name."""
        return {name: found.to_frame() for name, found in self.structures.items()}

    def plot(self) -> go.Figure:
        """Risk of the probe of the response after each layer."""
        return self.response.plot()

    def plot_r2(self) -> go.Figure:
        """R^2 of each probe after each layer, with its control."""
        probes = {"response": self.response, **self.structures}
        return figures.lines(
            np.arange(len(self.response.risk)),
            {
                f"{name}{of}": (getattr(each, r2)[:, -1], getattr(each, f"{r2}_sem")[:, -1])
                for name, each in probes.items()
                for r2, of in (("r2", ""), ("control_r2", ", control"))
            },
            title="R² of linear probes of the stream at the query",
            x_title="layers run",
            y_title="R²",
            zero_line=True,
        )


def probe(
    source: Source,
    prompts: Prompts | None = None,
    *,
    n_prompts: int | None = None,
    seed: int = 0,
    progress: ProgressCallback = no_progress,
) -> Probing:
    """Linear probes of the response, and of what a first layer may write, after each layer; descent on its features.

    Probes are ridge regressions on the stream at the query, each fitted to four fifths of the prompts and scored on
    the fifth left out, for several penalties of which the best is taken. R² is 1 minus the squared error over the
    mean square of the target without noise; a control is fitted to the targets of other prompts: what a probe finds
    where there is nothing. Features of a token are the stream after one layer with that token run as the query, so
    that they hold no response of its own. Descent is on (1/2L) Σ (y − ⟨u, φ⟩)² from zero, with the step 1/λ_max of
    each prompt for every curve.

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
