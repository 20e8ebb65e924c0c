"""Results as JSON documents: the contract that scripts rely on."""

from collections.abc import Callable
from pathlib import Path

from mechinterp.analysis.ablation.fine_tuning import FineTuning
from mechinterp.analysis.ablation.methods import Ablations
from mechinterp.analysis.ablation.pruning import Pruning
from mechinterp.analysis.learners.fits import LearnerFits
from mechinterp.analysis.multi_layer.classify import LayeredClassification
from mechinterp.analysis.one_layer.classification import Classification
from mechinterp.analysis.probing.probing import Probing
from mechinterp.analysis.result import Finding
from mechinterp.analysis.training.jump_forecast import JumpForecast
from mechinterp.checkpoints.checkpoint import Checkpoint
from mechinterp.checkpoints.native.exchange import FORMAT as EXCHANGE
from mechinterp.checkpoints.native.exchange import positions_for
from mechinterp.config import ExperimentConfig
from mechinterp.report.classification import classification_document
from mechinterp.report.header import SCHEMA_VERSION, header, records
from mechinterp.training.train import TrainingSummary


def ablation_document(checkpoint: Checkpoint, found: Ablations) -> dict:
    """What `ablate` says of a checkpoint: its heads, its layers and, if there are any, subsets of heads."""
    zero = found.methods[0]
    document = {
        **header(checkpoint),
        "excess_risk": zero.full_risk,
        "excess_risk_sem": zero.full_risk_sem,
        "null_risk": zero.null_risk,
        "breaking": zero.breaking,
        "heads": records(found.to_frame()),
        "layers": records(found.layer_frame()),
    }
    if found.subsets is not None:
        document["shapley"] = records(found.subsets.shapley_frame())
        document["subsets"] = records(found.subsets.to_frame())
    return document


def fits_document(checkpoint: Checkpoint, fits: LearnerFits) -> dict:
    """What `fit` says of a checkpoint."""
    return {
        **header(checkpoint),
        "best": fits.best,
        "verdict": fits.verdict,
        "trained_length": fits.trained_length,
        "n_prompts": fits.n_prompts,
        "lead": fits.lead,
        "lead_sem": fits.lead_sem,
        "fits": records(fits.to_frame()),
    }


def pruning_document(
    checkpoint: Checkpoint,
    found: Pruning,
    tuned: FineTuning | None = None,
    out: Path | None = None,
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


def probing_document(checkpoint: Checkpoint, found: Probing) -> dict:
    """What `probe` says."""
    structures = found.structure_frames().items()
    return {
        **header(checkpoint),
        "response": records(found.response.to_frame()),
        "structure": [
            {"target": name} | row for name, frame in structures for row in records(frame)
        ],
        "descent": records(found.descent.to_frame()),
        "areas": records(found.descent.area_frame()),
    }


BESPOKE: dict[type, Callable[..., dict]] = {
    Classification: classification_document,
    LayeredClassification: classification_document,
    Ablations: ablation_document,
    LearnerFits: fits_document,
    Pruning: pruning_document,
    Probing: probing_document,
}
"""Results whose fields scripts rely on; of any other, `result_document` has the table."""


def result_document(name: str, checkpoint: Checkpoint, found: Finding) -> dict:
    """What an analysis says of a checkpoint."""
    if type(found) in BESPOKE:
        return BESPOKE[type(found)](checkpoint, found)
    rows = records(found.to_frame())
    return {**header(checkpoint), "analysis": name, "result": repr(found), "rows": rows}


def conversion_document(checkpoint: Checkpoint, target: str, files: list[Path]) -> dict:
    """What `convert` says; `n_ctx` is null but for transformer-lens, `left_out` empty for a native folder."""
    native = target == "native"
    there = {"history": checkpoint.history is not None, "snapshots": bool(checkpoint.snapshots)}
    return {
        **header(checkpoint),
        "to": target,
        "n_ctx": positions_for(checkpoint.config.task) if target == EXCHANGE else None,
        "left_out": [] if native else [name for name, found in there.items() if found],
        "files": [str(file) for file in files],
    }


def forecast_document(config: ExperimentConfig, forecast: JumpForecast, out: Path | None) -> dict:
    """What `predict-jumps` says of a config."""
    jumps = records(forecast.to_frame())
    for row, vector in zip(jumps, forecast.vector.tolist(), strict=True):
        row["vector"] = vector
    return {
        "schema_version": SCHEMA_VERSION,
        "id": config.id,
        "steps": config.train.steps,
        "jumps": jumps,
        "levels": forecast.levels,
        "notes": list(forecast.notes),
        "figure": None if out is None else str(out),
    }


def training_document(summary: TrainingSummary, checkpoint: str) -> dict:
    """What `train` and `sweep` say; steps_per_second leaves out start-up."""
    rate = summary.steps / summary.seconds if summary.seconds else 0.0
    return {
        "checkpoint": checkpoint,
        "steps": summary.steps,
        "seconds": summary.seconds,
        "steps_per_second": rate,
        "loss": summary.loss,
    }
