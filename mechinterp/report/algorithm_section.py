"""The part of a page on which algorithm the layers of a model carry out."""

import numpy as np

from mechinterp.analysis.multi_layer.algorithm_evidence import AlgorithmEvidence
from mechinterp.analysis.number_format import cell, with_error
from mechinterp.report.parts import Section


def algorithm_section(found: AlgorithmEvidence) -> Section:
    """The label, how near each algorithm comes, and the model's path between them layer by layer."""
    path = found.path_frame()
    walked = {"algorithm_path": found.plot()} if len(path) else {}
    tables = {
        "algorithms": found.to_frame(),
        "algorithm_controls": found.control_frame(),
        "identities": found.test_frame(),
        "label_frequencies": found.frequency_frame(),
    }
    return Section(
        "Algorithm",
        " ".join([f"The label is {found.label}: {found.reason}.", *_lead(found), *_path(found)]),
        f"Each algorithm is fitted to the model's predictions on half of {found.n_prompts} prompts of its own length, and "
        "scored on the other half, on other lengths and on a wide covariance; and so to what is read of the stream after "
        "each layer. Controls, and mixtures of two algorithms, keep a label away that they explain better. The label is "
        "found anew on resampled prompts. A setting in which the model has left its task, and an identity whose prompts "
        "its task would not give, are not answered. Weights of the same singular values in random directions are a "
        "control: a model that is no better than those is unstructured.",
        walked,
        tables | ({"path": path} if len(path) else {}),
    )


def _lead(found: AlgorithmEvidence) -> list[str]:
    """How far the nearest algorithm is before the next one."""
    best, other = found.best, found.runner_up
    if best is None or other is None:
        return []
    lead = with_error(*found.lead(best, other))
    return [f"R² of {found.members[best]} minus that of {found.members[other]} is {lead}."]


def _path(found: AlgorithmEvidence) -> list[str]:
    """Which algorithm is nearest after each layer."""
    if not found.path_answered:
        return [f"What is predicted after each layer is not known: {found.measured.path_how}."]
    paths = np.nan_to_num(found.path_r2, nan=-np.inf)
    nearest = [
        f"{found.members[int(column.argmax())]} (R² {cell(column.max())})" for column in paths.T
    ]
    return [f"Layer by layer the nearest path is that of {', '.join(nearest)}."]
