"""What the report says of a model of many heads and layers: what masking, pruning and probing show."""

import numpy as np

from mechinterp.analysis.heads.ablation import HeadAblation, ablate_heads
from mechinterp.analysis.heads.pruning_curves import RulePruning, prune_by_rules
from mechinterp.analysis.learners.baselines import Rivals, rivals
from mechinterp.analysis.probing.probes import streams
from mechinterp.checkpoints.native import Checkpoint
from mechinterp.icl.prompts import Prompts, sample_prompts
from mechinterp.models.predictor import Predictor
from mechinterp.report import deep_sections as sections
from mechinterp.report.algorithm_section import algorithm_sections
from mechinterp.report.sections import Contents, plus_minus
from mechinterp.report.training import training_sections
from mechinterp.tracking import Track, untracked

LEAST_PROMPTS = 8
PER_FEATURE = 2
"""Prompts behind a probe, or a new read-out, for each feature of the stream, at least."""


def deep_contents(
    checkpoint: Checkpoint, *, n_prompts: int, seed: int, track: Track = untracked
) -> Contents:
    """The verdict and the sections.

    Args:
        n_prompts: Prompts behind the excess risk; what needs many runs takes a part of them.
    Raises:
        ValueError: If n_prompts is below 8.
    """
    if n_prompts < LEAST_PROMPTS:
        raise ValueError(
            f"n_prompts must be >= {LEAST_PROMPTS} to choose heads on and to measure on, got {n_prompts}."
        )
    predictor, size = checkpoint.predictor, n_prompts
    if not checkpoint.config.model.attention_only:
        size = max(n_prompts // 8, min(n_prompts, 256))
    prompts, wide = _prompts(checkpoint, predictor, size, seed)
    scored, measured = prompts[: size // 2], prompts[size // 2 :]
    found = rivals(predictor, prompts)
    zero = ablate_heads(predictor, scored, track=track)
    rules = prune_by_rules(predictor, prompts, track=track)
    probed = measured[: max(len(measured) // 2, wide)]
    parts = (
        sections.risk_section(found, len(prompts)),
        *algorithm_sections(checkpoint, seed=seed),
        sections.heads_section(predictor, zero, scored, track),
        sections.pruning_section(predictor, zero, rules, (scored, measured), track),
        sections.probes_section(predictor, probed, track),
        sections.descent_section(predictor, sections.some(measured, 4), track),
        *training_sections(checkpoint, sections.some(measured, 8), seed=seed, track=track),
    )
    return Contents(verdict_sentence(checkpoint.name, found, zero, rules), parts)


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
    counts = ", ".join(f"{count:.3g}" for count in zero.typical_effective_heads)
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
        _, ratio, sem, how = rules.ratios_to_read()[0]
        told.append(f"With {what} it has {plus_minus(ratio, sem)} times its risk{how}.")
    return " ".join(told)


def _prompts(
    checkpoint: Checkpoint, predictor: Predictor, size: int, seed: int
) -> tuple[Prompts, int]:
    """Evaluation prompts of the model's own task, more in the second half where probes need them; how many these are."""
    task, dtype = checkpoint.task, checkpoint.weights.dtype

    def drawn(n_prompts: int) -> Prompts:
        return sample_prompts(task, n_prompts, seed=seed, dtype=dtype)

    wide = PER_FEATURE * streams(predictor, drawn(1)).shape[3]
    return drawn(size // 2 + max(size - size // 2, wide)), wide
