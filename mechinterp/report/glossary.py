"""What the columns of the tables mean."""

import re
from collections.abc import Iterable

COLUMNS = {
    "algorithm": "What the model computes at the step, in words.",
    "attention": "Weight the query gives to the token.",
    "checkpoint": "Folder or file.",
    "component": "Principal component of x, 1 for the one learned first.",
    "context_length": "Pairs before the query.",
    "eta": "Step size of the model, Σ mu·omega times f'(0); 1/x².",
    "eta_sem": "Standard error of eta over models.",
    "eval_loss": "Loss on prompts that training never sees; y².",
    "evidence": "What was measured.",
    "factor": "Factor of the learner fitted to the model: the step size, or mu of the kernel head.",
    "factor_sem": "Standard error of factor.",
    "head": "Number of the head, from 0.",
    "held": "What the head adds to the learned part of the component.",
    "how": "How this was computed.",
    "importance": "The head's share of its layer's rises, falls taken as 0.",
    "kept": "Heads that are not masked.",
    "kernel_omega": "omega of the fitted kernel head; 1/x².",
    "key": "The token, from 0.",
    "label": "Kind of head: signs of omega and mu, or why it has none.",
    "layer": "Number of the layer, from 0.",
    "learned": "Part of the component that is learned, 0 before and 1 after.",
    "learner": "Closed-form learner that the model is compared with.",
    "loss": "Mean squared error against the noisy response; y².",
    "loss_gap": "The model's loss minus the learner's; y².",
    "loss_gap_sem": "Standard error of loss_gap, paired over prompts.",
    "loss_sem": "Standard error of loss: over prompts, in a table of settings over models.",
    "method": "How heads are masked: zero, or mean over prompts.",
    "model_loss": "The model's own loss; y².",
    "model_loss_sem": "Standard error of model_loss over prompts.",
    "models": "Models of the setting that form this pattern.",
    "mu": "Diagonal of OV on y: what the head adds per unit of y; mean over responses.",
    "mu_abs": "Sum of |mu| over heads; it does not change when a head is split in two.",
    "mu_abs_sem": "Standard error of mu_abs over models.",
    "n_components": "Principal components that are more than half learned.",
    "n_kept": "Number of heads kept.",
    "of": "Models of the setting.",
    "omega": "Diagonal of QK on x: how strongly the score depends on ⟨x, x query⟩; mean over coordinates, 1/x².",
    "omega_abs": "Mean |omega| of heads that are no dummies; 1/x².",
    "omega_abs_sem": "Standard error of omega_abs over models.",
    "omega_form": "Factor of the head's QK on the matrix that all heads share.",
    "omega_mean": "Mean of omega over coordinates; 1/x².",
    "ov_last_entry": "Norm of mu over that of OV; 1 if only y is read.",
    "ov_last_entry_p": "Fraction of random heads that reach ov_last_entry.",
    "ov_x_leak": "Largest |entry| of OV that reads x; y/x.",
    "p_value": "Of no rise or fall, corrected for the number of heads (Benjamini and Hochberg).",
    "pattern": "What the heads form together.",
    "prompt": "Number of the prompt.",
    "qk_diagonal": "Norm of the diagonal of QK's x block over that of the block; 1 if diagonal.",
    "qk_diagonal_p": "Fraction of random heads that reach qk_diagonal.",
    "qk_off_diagonal": "Largest |entry| of QK's x block off the diagonal; 1/x².",
    "qk_y_leak": "Largest |entry| of QK between a query's x and a key's y.",
    "query": "The head's query vector along the component.",
    "r2": "R² of the learner on the model's predictions.",
    "r2_sem": "Standard error of r2.",
    "rise": "Excess risk with heads masked minus that of the full model; y².",
    "rise_sem": "Standard error of rise, paired over prompts.",
    "risk": "Excess risk, mean of (ŷ − x·β)²; y².",
    "risk_sem": "Standard error of risk.",
    "rms": "Root mean squared distance of the learner to the model; y.",
    "rms_sem": "Standard error of rms.",
    "seed": "Seed of the initial weights.",
    "setting": "Models that differ in nothing but seeds, by what their names begin with.",
    "shapley": "Fall of the excess risk a head brings, mean over all orders of adding heads; y².",
    "shapley_sem": "Standard error of shapley.",
    "share": "Standard deviation of the head's output over that of all heads' summed.",
    "similarity": "⟨x token, x query⟩; x².",
    "step": "Updates made.",
    "task_leak": "Second largest |mu| of a head over the largest; 0 if it serves one response.",
    "value": "The number.",
    "y": "Response of the token.",
}
NUMBERED = {
    "mu": "mu of one response.",
    "omega": "omega of one coordinate of x; 1/x².",
    "y": "Response of the token.",
}


def meanings(columns: Iterable[object]) -> dict[str, str]:
    """What the columns of a table mean; those that are not known are left out.

    Example:
        >>> meanings(["mu_0", "nothing"])
        {'mu_0': 'mu of one response.'}
    """
    found = {name: _meaning(name) for name in map(str, columns)}
    return {name: meaning for name, meaning in found.items() if meaning is not None}


def _meaning(column: str) -> str | None:
    numbered = re.fullmatch(r"([a-z]+)_\d+", column)
    return NUMBERED.get(numbered[1]) if numbered else COLUMNS.get(column)
