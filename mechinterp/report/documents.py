"""Results as JSON documents: the contract that scripts rely on."""

import json
import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pandas as pd

from mechinterp.analysis.analyses import Finding
from mechinterp.analysis.circuits.patterns import Classification
from mechinterp.analysis.dynamics.jumps import JumpForecast
from mechinterp.analysis.heads.fine_tuning import FineTuning
from mechinterp.analysis.heads.masking import Ablations
from mechinterp.analysis.heads.pruning import Pruning
from mechinterp.analysis.learners.algorithm_evidence import AlgorithmEvidence
from mechinterp.analysis.learners.fits import LearnerFits
from mechinterp.analysis.learners.layered import LayeredClassification
from mechinterp.analysis.probing.probing import Probing
from mechinterp.checkpoints.exchange import FORMAT as EXCHANGE
from mechinterp.checkpoints.exchange import positions_for
from mechinterp.checkpoints.native import Checkpoint, checkpoint_of
from mechinterp.config import ExperimentConfig
from mechinterp.training.sweep import TrainingSummary

SCHEMA_VERSION = 1


def dumps(document: object) -> str:
    """The document as JSON text; NaN and infinities, which JSON lacks, become null."""
    return json.dumps(_plain(document), indent=2, allow_nan=False)


def info_document(checkpoint: Checkpoint) -> dict:
    """What `info` says of a checkpoint; the one document that needs the hooked model, for its hooks."""
    checkpoint = checkpoint_of(checkpoint, "info")
    from mechinterp.models.hook_map import hook_map

    history = checkpoint.history
    return {
        **header(checkpoint),
        "name": checkpoint.name,
        "id": checkpoint.config.id,
        "step": checkpoint.step,
        "experiment": asdict(checkpoint.config),
        "origin": dict(checkpoint.origin),
        "history_rows": 0 if history is None else len(history),
        "snapshots": list(checkpoint.snapshots),
        "eval_loss": None if history is None else float(history["eval_loss"].iloc[-1]),
        "weights": _weight_shapes(checkpoint),
        "hooks": records(hook_map(checkpoint.model)),
    }


def _weight_shapes(checkpoint: Checkpoint) -> dict[str, list[int]]:
    return {name: list(t.shape) for name, t in checkpoint.weights.tensors.items()}


def classification_document(
    checkpoint: Checkpoint, found: Classification | LayeredClassification
) -> dict:
    """What `classify` says of a checkpoint."""
    if isinstance(found, LayeredClassification):
        return _layered_document(checkpoint, found)
    scales = found.circuits
    heads = [
        {
            "layer": 0,
            "head": head,
            "label": label,
            "share": found.share[head],
            "omega": scales.omega[head].tolist(),
            "omega_mean": scales.omega_mean[head],
            "omega_form": found.omega_form[head],
            "mu": scales.mu[head].tolist(),
            "qk_diagonal": scales.qk_diagonal[head],
            "qk_diagonal_p": found.head_p_values["qk_diagonal"][head],
            "qk_off_diagonal": scales.qk_off_diagonal[head],
            "qk_y_leak": scales.qk_y_leak[head],
            "ov_last_entry": scales.ov_last_entry[head],
            "ov_last_entry_p": found.head_p_values["ov_last_entry"][head],
            "ov_x_leak": scales.ov_x_leak[head],
            "task_leak": found.task_leak[head],
        }
        for head, label in enumerate(found.labels)
    ]
    return {
        **header(checkpoint),
        "pattern": found.pattern,
        "reason": found.reason,
        "heads": heads,
        "evidence": _evidence(found),
    }


def _evidence(found: Classification) -> dict:
    names = (
        *("omega_spread", "zero_sum", "eta", "eta_optimal", "gamma", "manifold_distance"),
        *("theta", "supports", "support_leak", "theta_spread"),
    )
    evidence: dict[str, object] = {"sign_matching": found.sign_matching}
    evidence |= {name: getattr(found.scales, name) for name in names}
    for kind in ("substitution", "learner"):
        survival = asdict(getattr(found, kind))
        evidence |= {f"{kind}_{name}": value for name, value in survival.items()}
    used = found.components
    for name in ("n_components", "learned", "off_diagonal"):
        evidence[name] = None if used is None else getattr(used, name)
    form = {name: getattr(found.form, name) for name in ("isotropy", "shared", "rotation")}
    return evidence | {"form": found.form.kind, **form, "p_values": found.p_values}


def _layered_document(checkpoint: Checkpoint, found: LayeredClassification) -> dict:
    """What `classify` says of a layered model, whose heads are described by their ablation."""
    task = found.task
    return {
        **header(checkpoint),
        "pattern": found.pattern,
        "reason": found.reason,
        "heads": records(found.to_frame()),
        "evidence": {
            "excess_risk": found.excess_risk,
            "excess_risk_sem": found.excess_risk_sem,
            "n_prompts": found.n_prompts,
            "context_length": task.context_length,
            "learner_r2": dict(zip(found.learners, found.learner_r2.tolist(), strict=True)),
            "learner_r2_sem": dict(zip(found.learners, found.learner_r2_sem.tolist(), strict=True)),
            **({} if found.algorithm is None else algorithm_evidence(found.algorithm)),
        },
    }


def algorithm_evidence(found: AlgorithmEvidence) -> dict:
    """What earned the label of several layers: of the best algorithm, of the runner-up, and of all."""
    best, other = found.best, found.runner_up
    evidence: dict[str, object] = {
        "candidates": list(found.candidates),
        "relative_risk": found.relative_risk[0],
        "null_risk": found.null_risk,
    }
    if best is not None:
        evidence |= {"algorithm": found.members[best]}
        evidence |= {"r2": found.r2[best, 0], "r2_sem": found.r2_sem[best, 0]}
        walked = found.has_path[best] and found.path_answered
        evidence["scalars"] = (found.path_scalars if walked else found.scalars)[best]
    if best is not None and other is not None:
        evidence |= {
            "runner_up": found.members[other],
            "runner_up_r2": found.r2[other, 0],
            "lead": found.difference[best, other, 0],
            "lead_sem": found.difference_sem[best, other, 0],
        }
    tables = {"algorithms": found.to_frame(), "path": found.path_frame()}
    tables["tests"] = found.test_frame()
    return evidence | {name: records(frame) for name, frame in tables.items()}


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


def header(checkpoint: Checkpoint) -> dict:
    """The fields every document about a checkpoint starts with."""
    shape, task = checkpoint.config.model, checkpoint.task
    return {
        "schema_version": SCHEMA_VERSION,
        "path": str(checkpoint.path),
        "format": checkpoint.format,
        "assumed": dict(checkpoint.assumed),
        "n_layers": shape.n_layers,
        "n_heads": shape.n_heads,
        "d_x": task.d_x,
        "d_y": task.d_y,
    }


def records(frame: pd.DataFrame) -> list[dict]:
    """The rows of a table, one dict each."""
    return frame.to_dict(orient="records")


def _plain(value: object) -> object:
    if isinstance(value, dict):
        return {str(name): _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if hasattr(value, "tolist"):  # an array or a numpy scalar
        return _plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
