"""Texts of the labels: one table for verdicts, names of learners and the glossary of the page."""

from dataclasses import dataclass

PAIRS = "the prompt's pairs (x_l, y_l)"
CENTRED = f"{PAIRS}, x minus its mean x̄"
MOMENTS = "S = XᵀX/L, b = Xᵀy/L of the prompt's pairs"
STEP = "ŷ = w·x, w ← w + η (b − S w) from w = 0 in each layer"


@dataclass(frozen=True)
class Label:
    """Texts and calibration counts of a label."""

    text: str
    """Description of a model with this label: without its formula for one layer, with it for several."""
    meaning: str
    """Line in the glossary of the page."""
    wrong: int
    """Number of calibration models that got this label although it is wrong (default limits)."""
    named: int
    """Number of calibration models that got this label."""
    name: str = ""
    """Name of the algorithm in lists of algorithms."""
    numbers: tuple[str, ...] = ()
    """Letters of the fitted numbers, in order."""
    cases: tuple[str, ...] = ()
    """Simple learners that are special cases of the label, so that they are no alternative to it.
    """


PATTERNS = {
    "debiased_gd": Label(
        f"one step of gradient descent on {CENTRED}",
        "One step of gradient descent on x minus its mean: (eta/L) Σ y_l ⟨x_l − x̄, x_query⟩.",
        *(1, 452),
        cases=("debiased_gd",),
    ),
    "kernel_regression": Label(
        f"weighted averages of y_l over {PAIRS}",
        "Kernel smoother: mu times a softmax-weighted mean of the y.",
        *(0, 87),
        cases=("kernel_head",),
    ),
    "linear_gd": Label(
        f"one step of preconditioned gradient descent on {PAIRS}",
        "Linear attention: one step of gradient descent, possibly with a preconditioner.",
        *(0, 82),
        cases=("vanilla_gd",),
    ),
    "preconditioned_gd": Label(
        f"one step of preconditioned gradient descent on {CENTRED}",
        "One layer: a debiased step with one matrix for all heads instead of omega times the identity.",
        *(0, 59),
    ),
    "superposition": Label(
        f"one step of gradient descent for each response, by heads that serve several responses, on {CENTRED}",
        "Several responses; a head serves several of them.",
        *(0, 59),
    ),
    "task_heads": Label(
        f"one step of gradient descent for each response, by separate heads, on {CENTRED}",
        "Several responses; each head serves one of them.",
        *(0, 61),
    ),
    "weighted_preconditioned_gd": Label(
        f"one step of gradient descent for each response on {CENTRED}, all with the same weights of coordinates",
        "Several responses: a debiased step for each, all with the same weights of coordinates.",
        *(0, 58),
    ),
}
"""Labels of one layer of attention, with counts from analyses/results/calibration_models.csv. These
models were drawn after the rules of the labels were fixed."""
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
        f"the prediction of ridge regression, by unidentified steps: ŷ = x·(S + λ/L)⁻¹ b; {MOMENTS}",
        "Several layers whose prediction is that of ridge regression; the steps are not identified.",
        *(1, 12),
        name="ridge regression",
        numbers=("λ",),
    ),
    "posterior_mean": Label(
        "the posterior mean under the pool of tasks, by unidentified steps: ŷ = Σ_i p_i β_i·x, "
        "p_i ∝ exp(−Σ_l (y_l − β_i·x_l)²/(2σ²))",
        "Several layers that predict the posterior mean under the task's pool.",
        *(0, 7),
        name="the posterior mean under the pool",
    ),
}
"""Labels of several layers, with counts of all parts of analyses/algorithms/calibration.py."""
NO_LABEL = {
    "undetermined": "none of the known {kind} fits clearly (undetermined)",
    "unstructured": "nothing beyond what random weights compute (unstructured)",
}
LEARNERS = {
    "vanilla_gd": "a plain gradient step",
    "debiased_gd": "a gradient step on x minus its mean",
    "kernel_head": "a kernel smoother",
    "least_squares": "least squares",
    "ridge": "ridge regression",
}
"""Texts for simple learners, by name."""
