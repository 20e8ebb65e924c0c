"""Results as JSON documents, the interface for scripts."""

from pathlib import Path

from mechinterp.analysis.result import Finding, fields_of, records
from mechinterp.analysis.training.jumps import JumpForecast
from mechinterp.checkpoints.checkpoint import Checkpoint
from mechinterp.checkpoints.native.exchange import FORMAT as EXCHANGE
from mechinterp.checkpoints.native.exchange import positions_for
from mechinterp.config import ExperimentConfig
from mechinterp.report.header import SCHEMA_VERSION, header
from mechinterp.training.train import TrainingSummary


def to_json(name: str, checkpoint: Checkpoint, result: Finding) -> dict:
    """Document with the result of an analysis of a checkpoint."""
    return {**header(checkpoint), **fields_of(name, result)}


def conversion_document(checkpoint: Checkpoint, target: str, files: list[Path]) -> dict:
    """Document that `convert` prints. `n_ctx` is null except for transformer-lens; `left_out` is empty for a native folder."""
    native = target == "native"
    parts = {"history": checkpoint.history is not None, "snapshots": bool(checkpoint.snapshots)}
    return {
        **header(checkpoint),
        "to": target,
        "n_ctx": positions_for(checkpoint.config.task) if target == EXCHANGE else None,
        "left_out": [] if native else [name for name, has_it in parts.items() if has_it],
        "files": [str(file) for file in files],
    }


def forecast_document(config: ExperimentConfig, forecast: JumpForecast, out: Path | None) -> dict:
    """Document that `predict-jumps` prints about a config."""
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
    """Document that `train` and `sweep` print; steps_per_second excludes start-up."""
    rate = summary.steps / summary.seconds if summary.seconds else 0.0
    return {
        "checkpoint": checkpoint,
        "steps": summary.steps,
        "seconds": summary.seconds,
        "steps_per_second": rate,
        "loss": summary.loss,
    }
