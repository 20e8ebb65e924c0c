"""Words of the pages, and the papers they lead to."""

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
    "preconditioned_gd": "One layer: a debiased step with one matrix for all heads in place of omega times the identity; several: gradient descent with the inverse of Sigma + c in every step.",
    "task_heads, superposition": "Several responses: heads that serve one each; heads that serve several.",
    "linear_gd": "Linear attention: one (preconditioned) step.",
    "gradient_descent": "Several layers, each a step of gradient descent on the pairs of the prompt.",
    "gd_plus_plus": "The same on x that each layer also turns into (1 − gamma S) x, S = XᵀX/L.",
    "newton": "Newton's iteration for the inverse of S, a step in each layer.",
    "preprocess_then_optimise": "x times Xᵀy, entry by entry, in the first layer; gradient descent on that in the others.",
    "sparse_shrinkage": "Gradient descent that shrinks small weights to 0 in each layer (ISTA).",
    "ridge_like": "Several layers that end as ridge regression does, by steps that are not identified.",
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
