"""What the report says of one layer of attention: its circuits, its heads, the learner it comes closest to."""

import torch

from mechinterp.analysis.circuits.patterns import Classification, classify_attention
from mechinterp.analysis.heads.ablation import ablate_heads
from mechinterp.analysis.heads.subsets import MAX_SUBSET_HEADS, SubsetAblation, ablate_subsets
from mechinterp.analysis.learners.fits import LearnerFits, fit_learners
from mechinterp.checkpoints.native import Checkpoint
from mechinterp.icl.prompts import Prompts, sample_prompts
from mechinterp.report import sections
from mechinterp.report.sections import Contents
from mechinterp.report.training import training_sections
from mechinterp.tracking import Track, untracked

METHODS = ("zero", "mean")


def attention_contents(
    checkpoint: Checkpoint, *, n_prompts: int, seed: int, track: Track = untracked
) -> Contents:
    """The verdict and the sections.

    Args:
        n_prompts: Prompts behind the ablations; the fits take five times as many per context length.
    """
    found = classify_attention(checkpoint, n_prompts=n_prompts, seed=seed)
    fits = fit_learners(checkpoint, n_prompts=5 * n_prompts, seed=seed, track=track)
    task, score = checkpoint.task, checkpoint.config.model.score
    prompts = sample_prompts(task, n_prompts, seed=seed, dtype=checkpoint.weights.dtype)
    single = [ablate_heads(checkpoint, prompts, method=method, track=track) for method in METHODS]
    subsets = subsets_of(checkpoint, prompts)
    with torch.no_grad():
        error = checkpoint.predictor.predict(prompts) - prompts.y_query_clean
    parts = (
        sections.heads_section(found, score, single, subsets),
        sections.circuits_section(checkpoint),
        sections.attention_section(checkpoint, prompts, error.square().mean(1).numpy()),
        sections.ablation_section(found, score, single, subsets, n_prompts),
        sections.fits_section(fits, found),
        *training_sections(checkpoint, prompts, seed=seed, track=track),
    )
    return Contents(verdict_sentence(checkpoint.name, found, fits), parts)


def subsets_of(checkpoint: Checkpoint, prompts: Prompts) -> SubsetAblation | None:
    """Every subset of the heads of one layer of attention; None of more layers, or of too many heads."""
    model = checkpoint.config.model
    if not model.one_attention or model.n_heads > MAX_SUBSET_HEADS:
        return None
    return ablate_subsets(checkpoint, prompts)


def verdict_sentence(name: str, classification: Classification, fits: LearnerFits) -> str:
    """What the model is, with the numbers that earned it."""
    meaning = {
        "debiased_gd": "implements one step of debiased gradient descent",
        "preconditioned_gd": "is one step of preconditioned debiased gradient descent",
        "weighted_preconditioned_gd": "is one weighted debiased step that all responses share",
        "task_heads": "is one debiased gradient step per response, each with heads of its own",
        "superposition": "is one debiased gradient step per response, made by shared heads",
        "linear_gd": "is one preconditioned gradient step by linear attention",
        "kernel_regression": "is a kernel smoother",
        "unstructured": "is no more structured than random weights",
        "undetermined": "shows none of the known patterns clearly",
    }
    return f"{name} {meaning[classification.pattern]} ({classification.reason}). {fits.verdict}"
