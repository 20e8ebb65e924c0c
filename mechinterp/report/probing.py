"""Sections on what the layers of a model have computed: linear probes, and descent on features."""

from collections.abc import Mapping

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from jaxtyping import Float

from mechinterp import figures
from mechinterp.analysis.number_format import cell, with_error
from mechinterp.analysis.probing.feature_descent import IDEAL, RAW, p_probe
from mechinterp.analysis.probing.linear import FOLDS, STRUCTURES, LayerProbes, probe_layers
from mechinterp.report.parts import Section
from mechinterp.report.subject import Subject

AFTER = "stream after layer 0"


def probes_section(subject: Subject) -> Section:
    """What a linear probe reads from the stream, layer by layer."""
    predictor, prompts, progress = subject.predictor, subject.prompts, subject.progress
    response = probe_layers(predictor, prompts, progress=progress)
    found = {"response": response}
    for name, target in STRUCTURES.items():
        found[name] = probe_layers(predictor, prompts, target=target, progress=progress)
    table = pd.concat([one.to_frame().assign(target=name) for name, one in found.items()])
    table.insert(0, "target", table.pop("target"))
    r2 = {name: _listed(one.r2[:, -1]) for name, one in found.items()}
    risks = ", ".join(cell(risk) for risk in response.risk[:, -1])
    return Section(
        "Probes",
        f"A linear probe of the stream at the query predicts the response with an excess risk of {risks} y² after "
        f"0 to {len(response.risk) - 1} layers. What a first layer may write: x reweighted by its correlations with "
        f"y, as Algorithm 1 has it, is read with R² {r2['reweighted x']}; (S − 1)x with the context's covariance S, which "
        f"conditions the descent of the layers after, with R² {r2['preconditioned x']}. Controls are fitted to the targets "
        "of other prompts: what a probe finds where there is nothing.",
        f"Ridge regressions on the stream at the query of {len(prompts)} prompts, each fitted to {FOLDS - 1} fifths of them "
        "and scored on the fifth left out, for several penalties of which the best is taken. R² is 1 minus the squared "
        "error over the mean square of the target without noise.",
        {"probe_risk": response.plot(), "probe_r2": _probe_lines(found)},
        {"probes": table},
    )


def descent_section(subject: Subject) -> Section:
    """Whether the first layer has made the context easier to learn from."""
    prompts = subject.prompts
    found = p_probe({AFTER: subject.predictor}, prompts, progress=subject.progress)
    table = found.area_frame().set_index("features")
    told = [
        f"{with_error(table.log_area[name], table.log_area_sem[name])} for {name}"
        for name in (AFTER, IDEAL)
    ]
    least = ", ".join(
        f"{cell(table.least_risk[name])} at step {table.at_step[name]} on {name}"
        for name in (RAW, AFTER, IDEAL)
    )
    return Section(
        "P-probing",
        "If the first layer has preprocessed the context, gradient descent on what it writes goes further in few steps "
        f"than on the covariates themselves. The least excess risk is {least} (y²). The mean over steps of log risk, that of "
        f"raw x taken away, is {' and '.join(told)}: below 0 is faster.",
        f"{len(prompts)} prompts. Features of a token are the stream after one layer with that token run as the "
        "query, so that they hold no response of its own. Descent on (1/2L) Σ (y − ⟨u, φ⟩)² from zero, step 1/λ_max of "
        "each prompt for every curve. Reweighted x is x times the context's correlations with y (Algorithm 1).",
        {"descent": found.plot()},
        {"areas": found.area_frame(), "descent": found.to_frame()},
    )


def _probe_lines(probes: Mapping[str, LayerProbes]) -> go.Figure:
    curves: dict[str, Float[np.ndarray, " layer"]] = {}
    errors: dict[str, Float[np.ndarray, " layer"]] = {}
    for name, found in probes.items():
        for kind, label in (("r2", name), ("control_r2", f"{name}, control")):
            curves[label] = getattr(found, kind)[:, -1]
            errors[label] = getattr(found, f"{kind}_sem")[:, -1]
    return figures.lines(
        np.arange(len(probes["response"].risk)),
        curves,
        errors=errors,
        title="R² of linear probes of the stream at the query",
        x_title="layers run",
        y_title="R²",
        zero_line=True,
    )


def _listed(values: np.ndarray) -> str:
    return ", ".join(cell(value) for value in values)
