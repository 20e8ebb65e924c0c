"""A report on a model of many heads and layers, ours or somebody else's: what masking, pruning and probing say."""

from pathlib import Path

import numpy as np
import torch

from mechinterp.analysis.heads import HeadAblation, ablate_heads
from mechinterp.analysis.probes import streams
from mechinterp.analysis.pruning_curves import RulePruning, prune_by_rules
from mechinterp.analysis.rivals import Rivals, rivals
from mechinterp.checkpoints.layered import LayeredCheckpoint
from mechinterp.checkpoints.native import DeepCheckpoint
from mechinterp.icl.prompts import Prompts, generator_for, sample_prompts
from mechinterp.models.adapter import HookedPredictor
from mechinterp.report import deep_sections as sections
from mechinterp.report.page import Report, require_free, write_page
from mechinterp.report.sections import assumed_text, plus_minus
from mechinterp.report.training import deep_training_sections
from mechinterp.tracking import Track, untracked

LEAST_PROMPTS = 8
PER_FEATURE = 2
"""Prompts behind a probe, or a new read-out, for each feature of the stream, at least."""


def write_deep_report(
    checkpoint: DeepCheckpoint | LayeredCheckpoint,
    out: str | Path,
    *,
    n_prompts: int = 4096,
    seed: int = 0,
    overwrite: bool = False,
    track: Track = untracked,
) -> Report:
    """Write `out/index.html` about the heads of a model, and the CSV files behind it.

    Args:
        n_prompts: Prompts behind the excess risk; what needs many runs takes a part of them, and the page says how
            many. A model with norms and MLPs, whose layers cannot be taken apart, is given an eighth.
        track: Told of the progress.
    Raises:
        ValueError: If n_prompts is below 8, `out` is a file, or a folder that holds anything and
            `overwrite` is not set.
    Example:
        >>> import tempfile
        >>> from mechinterp.checkpoints.native import load
        >>> model = load("checkpoints/sparse-h1-noise0.1-s0")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     report = write_deep_report(model, folder, n_prompts=64)
        ...     report.page.name
        'index.html'
    """
    require_free(Path(out), overwrite)
    if n_prompts < LEAST_PROMPTS:
        raise ValueError(
            f"n_prompts must be >= {LEAST_PROMPTS} to choose heads on and to measure on, got {n_prompts}."
        )
    predictor, size = checkpoint.predictor, n_prompts
    if not predictor.adds_up:
        size = max(n_prompts // 8, min(n_prompts, 256))
    prompts, wide = _prompts(checkpoint, predictor, size, seed)
    scored, measured = prompts[: size // 2], prompts[size // 2 :]
    found = rivals(predictor, prompts)
    zero = ablate_heads(predictor, scored, track=track)
    rules = prune_by_rules(predictor, measured, zero.rise, track=track)
    probed = measured[: max(len(measured) // 2, wide)]
    parts = [
        sections.risk_section(found, len(prompts)),
        sections.heads_section(predictor, zero, scored, track),
        sections.pruning_section(predictor, zero, rules, (scored, measured), track),
        sections.probes_section(predictor, probed, track),
        sections.descent_section(predictor, sections.some(measured, 4), track),
        *deep_training_sections(checkpoint, sections.some(measured, 8), track=track),
    ]
    verdict = verdict_sentence(checkpoint.name, found, zero, rules)
    about = _about(checkpoint)
    return write_page(Path(out), checkpoint.name, about, verdict, parts, overwrite=overwrite)


def verdict_sentence(name: str, found: Rivals, zero: HeadAblation, rules: RulePruning) -> str:
    """How good the model is, on how many heads it stands, and what is left of it with fewer."""
    against = dict(zip(found.learners, zip(found.ratio, found.ratio_sem, strict=True), strict=True))
    ratios = [
        f"{plus_minus(*against[rival])} times {what}"
        if np.isfinite(against[rival][0])
        else f"where {rival} at its best makes none"
        for rival, what in (
            ("ridge", "ridge's at its best penalty"),
            ("zero", "that of predicting 0"),
        )
    ]
    counts = ", ".join(f"{count:.3g}" for count in zero.effective_heads)
    layers = "layer" if len(zero.rise) == 1 else "layers, from the first on"
    told = [
        f"{name}: excess risk {plus_minus(found.model_risk, found.model_risk_sem)} y², {' and '.join(ratios)}.",
        f"Effective heads of its {layers}: {counts}, of {zero.rise.shape[1]}.",
    ]
    if len(rules.rules) > 1:
        what = {
            "best-later": "all heads of the first layer and the best of each later one",
            "best-first": "the best head of the first layer alone",
        }[rules.rules[1]]
        told.append(
            f"With {what} it has {plus_minus(rules.ratio[1], rules.ratio_sem[1])} times its risk."
        )
    return " ".join(told)


def _prompts(
    checkpoint: DeepCheckpoint | LayeredCheckpoint, predictor: HookedPredictor, size: int, seed: int
) -> tuple[Prompts, int]:
    """Evaluation prompts of the model's own task, more in the second half where probes need them; how many these are."""
    task, dtype = checkpoint.task, torch.float64
    if isinstance(checkpoint, DeepCheckpoint):
        dtype = checkpoint.weights.W_Q.dtype

    def drawn(n_prompts: int) -> Prompts:
        generator = generator_for(seed, "eval", 0)
        return sample_prompts(task, n_prompts, generator=generator, dtype=dtype)

    wide = PER_FEATURE * streams(predictor, drawn(1)).shape[3]
    return drawn(size // 2 + max(size - size // 2, wide)), wide


def _about(checkpoint: DeepCheckpoint | LayeredCheckpoint) -> str:
    """One line on what the model is."""
    if isinstance(checkpoint, DeepCheckpoint):
        config = checkpoint.config
        n_layers, n_heads = config.model.n_layers, config.model.n_heads
        kind = f"{config.model.score} attention, width {config.d_model}"
        end = f", seed {config.seed}, step {checkpoint.step}, config {config.id}"
    else:
        n_layers, n_heads = checkpoint.n_layers, checkpoint.n_heads
        kind, end = f"format {checkpoint.format}", assumed_text(checkpoint.assumed)
    task = checkpoint.task
    layers, heads = (
        f"{count} {word}{'' if count == 1 else 's'}"
        for count, word in ((n_layers, "layer"), (n_heads, "head"))
    )
    return (
        f"{layers} of {heads}, {kind}, d_x {task.d_x}, context length {task.context_length}, "
        f"noise variance {task.noise_var}{end}"
    )
