"""The documents of `prune` and `probe`, as the command line prints them."""

from collections.abc import Mapping
from pathlib import Path

from mechinterp.analysis.heads.fine_tuning import FineTuning
from mechinterp.analysis.heads.pruning import Pruning
from mechinterp.analysis.probing.p_probing import DescentCurves
from mechinterp.analysis.probing.probes import LayerProbes
from mechinterp.checkpoints.native import Checkpoint
from mechinterp.report.documents import header, records


def pruning_document(
    checkpoint: Checkpoint,
    found: Pruning,
    tuned: FineTuning | None,
    out: Path | None,
) -> dict:
    """What `prune` says; `checkpoint` is where the pruned model was written, null if it was not.

    `heads` has what is kept, chosen on all prompts, and `chosen`, the share of the choices on halves of them that keep
    a head. Where few prompts carry the risk, what is measured with a new read-out comes first. `fine_tuning` has the risks of the pruned and the full model by step, null if they were not trained further.
    """
    full = ("full_risk", "full_risk_sem", "full_refit_risk", "full_refit_risk_sem")
    as_is = ("risk", "risk_sem", "ratio", "ratio_sem")
    refit = tuple(f"refit_{name}" for name in as_is)
    order = (*refit, *as_is) if found.carried_by_few else (*as_is, *refit)
    return {
        **header(checkpoint),
        **{name: getattr(found, name) for name in (*full, *order, "carried_by_few")},
        "heads_per_layer": found.kept.sum(1),
        "heads": records(found.to_frame()),
        "fine_tuning": None if tuned is None else records(tuned.to_frame()),
        "checkpoint": None if out is None else str(out),
    }


def probes_document(
    checkpoint: Checkpoint,
    response: LayerProbes,
    structures: Mapping[str, LayerProbes],
    descent: DescentCurves,
) -> dict:
    """What `probe` says."""
    return {
        **header(checkpoint),
        "response": records(response.to_frame()),
        "structure": [
            {"target": name} | row
            for name, found in structures.items()
            for row in records(found.to_frame())
        ],
        "descent": records(descent.to_frame()),
        "areas": records(descent.area_frame()),
    }
