"""Meanings of the columns of the tables."""

import re
from collections.abc import Iterable

COLUMNS = {
    "algorithm": "What the model computes at the step, in words.",
    "answer": "Whether the two sides of the identity agree; not answered where the model leaves its task.",
    "answered": "Whether the model still does its task there; else nothing is concluded.",
    "at_step": "Step of descent with the least risk.",
    "attention": "Weight the query gives to the token.",
    "candidate": "Algorithm that is fitted to the model.",
    "carried_by_few": "Whether a hundredth of the prompts carries more than half of the mean size.",
    "checkpoint": "Folder or file.",
    "chosen": "Share of the choices on halves of the prompts that keep the head.",
    "component": "Principal component of x, 1 for the one learned first.",
    "context_length": "Pairs before the query.",
    "control_r2": "r2 of a probe fitted to the targets of other prompts: what is found where there is nothing.",
    "distance_dmmse": "Mean squared distance to dMMSE, the pool's posterior mean, over d_x; y².",
    "distance_ridge": "Mean squared distance to ridge, over d_x; y².",
    "dmmse_rise": "Rise of the distance to dMMSE on tasks of the pool when the head is masked; y².",
    "effective_heads": "exp of the entropy of the importance in the layer: 1 if one head counts, all if they count alike.",
    "effective_heads_of_medians": "effective_heads by the medians of the rises in place of their means.",
    "estimate": "Effect of the edge to first order, by the gradient at what reads it; y².",
    "estimate_sem": "Standard error of estimate over pairs of prompts.",
    "entropy": "Entropy of the query's attention, -Σ p log p, mean over prompts; nats.",
    "eta": "Step size of the model, Σ mu·omega times f'(0); 1/x².",
    "eta_sem": "Standard error of eta over models.",
    "eval_loss": "Loss on prompts that training never sees; y².",
    "evidence": "What was measured.",
    "excess_risk_increase": "Excess risk with the head masked minus that of the full model; y².",
    "factor": "Factor of the learner fitted to the model: the step size, or mu of the kernel head.",
    "features": "What gradient descent is run on.",
    "fitted_loss": "Mean squared distance from the target of a read-out fitted to other prompts; y².",
    "fitted_r2": "1 − fitted_loss over the mean square of the target.",
    "head": "Number of the head, from 0.",
    "heads_per_layer": "Heads kept in each layer, from the first on.",
    "held": "What the head adds to the learned part of the component.",
    "how": "How this was computed.",
    "importance": "The head's share of its layer's rises, falls taken as 0.",
    "input": "What the later head makes of it: its query, key or value.",
    "kept": "Heads that are not masked.",
    "kernel_omega": "omega of the fitted kernel head; 1/x².",
    "key": "The position that is read, from 0.",
    "label": "Kind of head: signs of omega and mu, or why it has none.",
    "later_head": "The head that reads, from 0.",
    "later_layer": "The layer that reads, from 0.",
    "layer": "Number of the layer, from 0.",
    "layer_rise": "Excess risk with all heads of the layer masked minus that of the full model; y².",
    "layer_rise_sem": "Standard error of layer_rise, paired over prompts.",
    "layers_run": "Layers that have run in full.",
    "learned": "Part of the component that is learned, 0 before and 1 after.",
    "learner": "Closed-form learner that the model is compared with.",
    "least_risk": "Least excess risk of the descent; y².",
    "log_area": "Mean over steps of log risk minus that of raw x; below 0 is faster.",
    "log_area_sem": "Standard error of log_area, paired over prompts.",
    "loss": "Mean squared error against the noisy response; y².",
    "loss_gap": "The model's loss minus the learner's; y².",
    "loss_gap_sem": "Standard error of loss_gap, paired over prompts.",
    "loss_sem": "Standard error of loss: over prompts, in a table of settings over models.",
    "masked_next": "The head that the order masks next.",
    "mean_effective_heads": "effective_heads under mean ablation.",
    "mean_rise": "rise under mean ablation: z is its mean over prompts; y².",
    "mean_rise_sem": "Standard error of mean_rise, paired over prompts.",
    "median_rise": "Median over prompts of the rise, which a few prompts do not move; y².",
    "memory_excess": "On tasks of the pool, rise of the distance to dMMSE minus that to ridge; y².",
    "method": "How heads are masked: z is zero, its mean over prompts, or (resample) that of another prompt.",
    "model_loss": "The model's own loss; y².",
    "model_loss_sem": "Standard error of model_loss over prompts.",
    "models": "Models of the setting that form this pattern.",
    "mu": "Diagonal of OV on y: what the head adds per unit of y; mean over responses.",
    "mu_abs": "Sum of |mu| over heads; it does not change when a head is split in two.",
    "mu_abs_sem": "Standard error of mu_abs over models.",
    "n_components": "Principal components that are more than half learned.",
    "n_kept": "Number of heads kept.",
    "n_scalars": "Numbers of the algorithm that are fitted.",
    "of": "Models of the setting.",
    "omega": "Diagonal of QK on x: how strongly the score depends on ⟨x, x query⟩; mean over coordinates, 1/x².",
    "omega_abs": "Mean |omega| of heads that are no dummies; 1/x².",
    "omega_abs_sem": "Standard error of omega_abs over models.",
    "omega_form": "Factor of the head's QK on the matrix that all heads share.",
    "omega_mean": "Mean of omega over coordinates; 1/x².",
    "order": "Order in which heads are masked.",
    "ov_last_entry": "Norm of mu over that of OV; 1 if only y is read.",
    "ov_last_entry_p": "Fraction of random heads that reach ov_last_entry.",
    "ov_norm": "Frobenius norm of the head's OV.",
    "ov_norm_factor": "ov_norm at the last logged step over that at the first.",
    "ov_norm_first": "ov_norm at the first logged step.",
    "ov_x_leak": "Largest |entry| of OV that reads x; y/x.",
    "p_value": "Of errors that rise as they fall (Wilcoxon's signed ranks), corrected for the number of heads (Benjamini and Hochberg).",
    "own_loss": "Mean squared distance from the target of the model's own read-out; y².",
    "own_r2": "1 − own_loss over the mean square of the target.",
    "patched": "Effect of the edge when it alone is patched; y².",
    "patched_sem": "Standard error of patched over pairs of prompts.",
    "path_r2": "r2 of the algorithm after the layer, against what is read there; over the mean square of the last prediction.",
    "pattern": "What the heads form together.",
    "penalty": "Penalty of the probe, the best of several; in units of the features' mean square.",
    "pos": "Position of the target in the prompt, from 0; the last is the query's.",
    "prompt": "Number of the prompt.",
    "prompts": "Those of the row: of the model's own length, of half and of twice that, or with a wide spread of x.",
    "qk_diagonal": "Norm of the diagonal of QK's x block over that of the block; 1 if diagonal.",
    "qk_diagonal_p": "Fraction of random heads that reach qk_diagonal.",
    "place": "The stream at the query that is read: the input, that before a layer plus what one head adds, or after a layer.",
    "qk_norm": "Frobenius norm of the head's QK, the scale in it.",
    "qk_norm_factor": "qk_norm at the last logged step over that at the first.",
    "qk_norm_first": "qk_norm at the first logged step.",
    "qk_off_diagonal": "Largest |entry| of QK's x block off the diagonal; 1/x².",
    "qk_y_leak": "Largest |entry| of QK between a query's x and a key's y.",
    "query": "The head's query vector along the component.",
    "r2": "R² of the learner on the model's predictions.",
    "ov_rank": "Participation ratio of OV's squared singular values: how many directions a head moves.",
    "ov_read": "Norm of what of OV is read out directly, over that of all of OV.",
    "qk_rank": "Participation ratio of QK's squared singular values: how many directions a head compares.",
    "score": "Composition score |OV M| / (|OV| |M|), M what the later head's input reads.",
    "random_score": "The same of random initial weights, mean over pairs of heads.",
    "random_score_sd": "Standard deviation of random_score over pairs of heads.",
    "random_entropy": "Entropy of heads with random initial weights of the layer's shape, mean over heads and models; nats.",
    "random_entropy_sd": "Standard deviation of random_entropy over heads and models.",
    "random_weights": "Where 90% of models with random initial weights lie in this number.",
    "ratio": "The model's excess risk over the learner's; of pruned models, theirs over the full model's.",
    "ratio_sem": "Standard error of ratio, paired over prompts; of pruned models over what is chosen, too.",
    "refit_ratio": "refit_risk over the full model's excess risk as it is.",
    "refit_risk": "Excess risk with a new read-out, a cross-validated ridge regression on the stream at the query; y².",
    "relative": "distance_dmmse / (distance_dmmse + distance_ridge): 0 at dMMSE, 1 at ridge.",
    "resample_effective_heads": "effective_heads under resample ablation.",
    "resample_rise": "rise under resample ablation: z is that of another prompt; y².",
    "resample_rise_sem": "Standard error of resample_rise, paired over prompts.",
    "ridge_rise": "Rise of the distance to ridge on new tasks when the head is masked; y².",
    "rise": "Excess risk with heads masked minus that of the full model; y².",
    "rise_sem": "Standard error of rise, paired over prompts.",
    "risk": "Excess risk, mean of (ŷ − x·β)²; y². Of a probe, mean squared error against its target.",
    "risk_dmmse": "Excess risk of dMMSE; y².",
    "risk_ridge": "Excess risk of ridge; y².",
    "rms": "Root mean squared distance of the learner to the model; y.",
    "rule": "Rule that says which heads are kept.",
    "seed": "Seed of the initial weights.",
    "sem": "Standard error of excess_risk_increase, paired over prompts.",
    "setting": "Models that differ in nothing but seeds, by what their names begin with.",
    "shapley": "Fall of the excess risk a head brings, mean over all orders of adding heads; y².",
    "share": "Standard deviation of the head's output over that of all heads' summed.",
    "similarity": "⟨x token, x query⟩; x².",
    "step": "Updates made.",
    "target": "What the probe reads.",
    "task_leak": "Second largest |mu| of a head over the largest; 0 if it serves one response.",
    "tasks": "Whether the prompts have tasks of the pool or new ones.",
    "test": "Identity that some algorithms satisfy.",
    "top_head": "Head of the layer that is missed most.",
    "top_rise": "Rise when that head is masked; y².",
    "top_share": "Largest importance of a head in the layer.",
    "tuned": "Penalty of ridge, or number of steps of descent, that is best on these prompts.",
    "uniform_entropy": "Entropy of uniform attention, the log of the number of keys; nats.",
    "unexplained": "Mean squared distance to that mixture, over that between dMMSE and ridge.",
    "value": "The number.",
    "weight_change": "Change of the weight on dMMSE on tasks of the pool when the head is masked.",
    "weight_dmmse": "a of the nearest mixture a dMMSE + (1 - a) ridge.",
    "y": "Response of the token.",
}
"""A column X_sem that is not among them is the standard error of X."""
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


def unit_of(column: str) -> str:
    """The unit of a column, as its meaning ends with it; none for one without.

    Example:
        >>> unit_of("rise"), unit_of("omega_0"), unit_of("share")
        ('y²', '1/x²', '')
    """
    found = re.search(r"[;,] (1/x²|y/x|y²|x²|y)\.", _meaning(column) or "")
    return found[1] if found else ""


def _meaning(column: str) -> str | None:
    numbered = re.fullmatch(r"([a-z]+)_\d+", column)
    if numbered:
        return NUMBERED.get(numbered[1])
    of = column.removesuffix("_sem")
    if column not in COLUMNS and of != column and of in COLUMNS:
        return f"Standard error of {of}."
    return COLUMNS.get(column)


WORDS = {
    "QK": "How strongly a query looks at a key: W_Q W_K^T times the scale of the scores.",
    "OV": "What a head adds for a token that it looks at: W_V W_O.",
    "omega, mu": "In the published pattern QK is omega times the identity on x, and OV is mu on y.",
    "positive, negative": "An active head whose omega and mu are both above, or both below 0.",
    "mismatched, mixed": "An active head whose omega and mu differ in sign; whose entries do.",
    "dummy": "A head with at most 1% of the heads' output.",
    "eta": "Step size: the sum of mu·omega over heads.",
    "kernel_regression": "The prediction is mu times a softmax-weighted mean of the y.",
    "debiased_gd": "One step of gradient descent with the mean of x removed: (eta/L) Σ y_l ⟨x_l − x̄, x_query⟩.",
    "vanilla_gd": "One step of gradient descent from 0: (eta/L) Σ y_l ⟨x_l, x_query⟩.",
    "preconditioned_gd": "One layer: a debiased step with one matrix for all heads in place of omega times the identity.",
    "preconditioned_descent": "Several layers, each a step of gradient descent with the inverse of Sigma + c as preconditioner.",
    "task_heads, superposition": "Several responses: heads that serve one each; heads that serve several.",
    "linear_gd": "Linear attention: one (preconditioned) step.",
    "gradient_descent": "Several layers, each a step of gradient descent on the pairs of the prompt.",
    "gd_plus_plus": "The same on x that each layer also turns into (1 − gamma S) x, S = XᵀX/L.",
    "newton": "Newton's iteration for the inverse of S, a step in each layer.",
    "preprocess_then_optimise": "x times Xᵀy, entry by entry, in the first layer; gradient descent on that in the others.",
    "sparse_shrinkage": "Gradient descent that shrinks small weights to 0 in each layer (ISTA).",
    "ridge_like": "Several layers that end as ridge regression does, by steps that are not identified.",
    "posterior_mean": "Several layers that predict the posterior mean under the task's pool.",
    "ridge": "Ridge regression with the penalty that is best for the task.",
    "unstructured": "No further from random weights than these are from each other.",
    "undetermined": "Not clearly one thing; the answer names the number that lies in between.",
    "excess risk": "Mean squared error against x·β, the response without its noise.",
    "R²": "1 − (mean squared difference of two predictions) / (mean square of the model's).",
}
PAPERS = {
    "He, Pan, Chen, Yang 2025, softmax attention": "https://arxiv.org/abs/2503.12734",
    "Zhang, Singh, Latham, Saxe 2025, linear attention": "https://arxiv.org/abs/2501.16265",
    "Chen, Zhao, Zou 2024, sparse regression": "https://arxiv.org/abs/2408.04532",
}
