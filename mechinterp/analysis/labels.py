"""The labels of models in words: one table for verdicts, for names of learners beside each other, and for the page."""

from dataclasses import dataclass

PAIRS = "the prompt's pairs (x_l, y_l)"
CENTRED = f"{PAIRS}, x minus its mean x̄"
MOMENTS = "S = XᵀX/L, b = Xᵀy/L of the prompt's pairs"
STEP = "ŷ = w·x, w ← w + η (b − S w) from w = 0 in each layer"


@dataclass(frozen=True)
class Label:
    """What a label says of a model."""

    text: str
    """What such a model computes; of several layers with the formula, of one before it."""
    meaning: str
    """A line for the page's list of words."""
    wrong: int
    """Of the models of known kind that got the label under the default limits, those that got it wrongly."""
    named: int
    """Models of known kind that got it."""
    name: str = ""
    """Of the algorithm beside others."""
    numbers: tuple[str, ...] = ()
    """Letters of the fitted numbers, in their order."""
    cases: tuple[str, ...] = ()
    """Simple learners that are no alternative to the label, being cases of it."""


PATTERNS = {
    "debiased_gd": Label(
        f"one step of gradient descent on {CENTRED}",
        "One step of gradient descent with the mean of x removed: (eta/L) Σ y_l ⟨x_l − x̄, x_query⟩.",
        *(1, 452),
        cases=("debiased_gd",),
    ),
    "kernel_regression": Label(
        f"averages of y_l over {PAIRS}",
        "The prediction is mu times a softmax-weighted mean of the y.",
        *(0, 87),
        cases=("kernel_head",),
    ),
    "linear_gd": Label(
        f"one step of preconditioned gradient descent on {PAIRS}",
        "Linear attention: one (preconditioned) step.",
        *(0, 82),
        cases=("vanilla_gd",),
    ),
    "preconditioned_gd": Label(
        f"one step of preconditioned gradient descent on {CENTRED}",
        "One layer: a debiased step with one matrix for all heads in place of omega times the identity.",
        *(0, 59),
    ),
    "superposition": Label(
        f"one step of gradient descent for each response, by heads that several share, on {CENTRED}",
        "Several responses, and heads that serve several of them.",
        *(0, 59),
    ),
    "task_heads": Label(
        f"one step of gradient descent for each response, by heads of its own, on {CENTRED}",
        "Several responses, and heads that serve one each.",
        *(0, 61),
    ),
    "weighted_preconditioned_gd": Label(
        f"one step of gradient descent for each response on {CENTRED}, with the same weights of coordinates for all",
        "Several responses: a debiased step for each, with the same weights of coordinates for all.",
        *(0, 58),
    ),
}
"""Labels of one layer of attention. The counts are those of analyses/results/calibration_models.csv: models drawn after
the rules of labels were settled."""
ALGORITHMS = {
    "gradient_descent": Label(
        f"gradient descent on the prompt's pairs: {STEP}; {MOMENTS}",
        "Several layers, each a step of gradient descent on the pairs of the prompt.",
        *(1, 57),
        name="gradient descent",
        numbers=("η",),
    ),
    "gd_plus_plus": Label(
        f"gradient descent on x that each layer also turns into (1 − γ S) x: {STEP}; {MOMENTS}",
        "Gradient descent on x that each layer also turns into (1 − gamma S) x, S = XᵀX/L.",
        *(0, 7),
        name="gradient descent on x that layers rescale (GD++)",
        numbers=("η", "γ"),
    ),
    "preconditioned_descent": Label(
        "gradient descent with the covariance Σ of x as preconditioner: ŷ = w·x, "
        f"w ← w + η (Σ + c)⁻¹ (b − S w) from w = 0 in each layer; {MOMENTS}",
        "Several layers, each a step of gradient descent with the inverse of Sigma + c as preconditioner.",
        *(0, 8),
        name="preconditioned gradient descent",
        numbers=("η", "c"),
    ),
    "newton": Label(
        f"Newton's iteration for S⁻¹: ŷ = x·M b, M = α S, then M ← 2M − M S M in each layer; {MOMENTS}",
        "Newton's iteration for the inverse of S, a step in each layer.",
        *(0, 4),
        name="Newton's iteration",
        numbers=("α",),
    ),
    "preprocess_then_optimise": Label(
        "gradient descent on x times b, entry by entry: ŷ = w·x, w ← w + η b² (b − S w) from w = 0 in each layer "
        f"but the first; {MOMENTS}",
        "x times Xᵀy, entry by entry, in the first layer; gradient descent on that in the others.",
        *(0, 2),
        name="gradient descent on x times Xᵀy",
        numbers=("η",),
    ),
    "sparse_shrinkage": Label(
        "gradient descent that shrinks small weights to 0 (ISTA): ŷ = w·x, w ← soft(w + η (b − S w), t) from w = 0 "
        f"in each layer; {MOMENTS}",
        "Gradient descent that shrinks small weights to 0 in each layer (ISTA).",
        *(0, 11),
        name="gradient descent with shrinkage (ISTA)",
        numbers=("η", "t"),
    ),
    "ridge_like": Label(
        f"what ridge regression predicts, by whatever steps: ŷ = x·(S + λ/L)⁻¹ b; {MOMENTS}",
        "Several layers that end as ridge regression does, by steps that are not identified.",
        *(1, 12),
        name="ridge regression",
        numbers=("λ",),
    ),
    "posterior_mean": Label(
        "the posterior mean under the pool of tasks, by whatever steps: ŷ = Σ_i p_i β_i·x, "
        "p_i ∝ exp(−Σ_l (y_l − β_i·x_l)²/(2σ²))",
        "Several layers that predict the posterior mean under the task's pool.",
        *(0, 7),
        name="the posterior mean under the pool",
    ),
}
"""Labels of several layers. The counts are those of analyses/algorithms/calibration.py, all parts together."""
NO_LABEL = {
    "undetermined": "none of the known {kind} clearly (undetermined)",
    "unstructured": "nothing that random weights do not compute, too (unstructured)",
}
LEARNERS = {
    "vanilla_gd": "a plain gradient step",
    "debiased_gd": "a gradient step on x minus its mean",
    "kernel_head": "a kernel smoother",
    "least_squares": "least squares",
    "ridge": "ridge regression",
}
"""Simple learners by name."""
