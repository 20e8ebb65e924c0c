"""Glossary of the pages, and links to the papers."""

from mechinterp.analysis.labels import ALGORITHMS, PATTERNS

WORDS = {
    "QK": "How strongly a query looks at a key: W_Q W_K^T times the scale of the scores.",
    "OV": "What a head adds for a token that it looks at: W_V W_O.",
    "omega, mu": "In the published pattern QK is omega times the identity on x, and OV is mu on y.",
    "positive, negative": "An active head whose omega and mu are both above, or both below 0.",
    "mismatched, mixed": "An active head whose omega and mu differ in sign; whose entries do.",
    "dummy": "A head with at most 1% of the heads' output.",
    "eta": "Step size: the sum of mu·omega over heads.",
    "vanilla_gd": "One step of gradient descent from 0: (eta/L) Σ y_l ⟨x_l, x_query⟩.",
    **{name: label.meaning for name, label in (PATTERNS | ALGORITHMS).items()},
    "ridge": "Ridge regression with the penalty that is best for the task.",
    "unstructured": "No better at the task than random weights; of several layers: than predicting 0, times any factor.",
    "undetermined": "Not clearly one thing; the answer names the number that lies in between.",
    "excess risk": "Mean squared error against x·β, the response without its noise.",
    "R²": "1 − (mean squared difference of two predictions) / (mean square of the model's).",
}
PAPERS = {
    "He, Pan, Chen, Yang 2025, softmax attention": "https://arxiv.org/abs/2503.12734",
    "Zhang, Singh, Latham, Saxe 2025, linear attention": "https://arxiv.org/abs/2501.16265",
    "Chen, Zhao, Zou 2024, sparse regression": "https://arxiv.org/abs/2408.04532",
}
