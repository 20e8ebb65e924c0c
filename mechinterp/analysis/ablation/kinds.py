"""Questions about masks, by name: how the rows, the sentence and the figure of each are named."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Question:
    """A question about masks: how its rows and its figure are named."""

    axes: tuple[str, ...]
    """Columns that name a row."""
    label: str
    """Name of a row in a sentence, from these columns."""
    title: str
    """Title of the table and of the figure; {metric} stands for the metric."""
    is_grid: bool = True
    """True if every entry of one column meets every entry of the others."""


QUESTIONS = {
    "heads": Question(
        ("layer", "head"), "L{layer}H{head}", "rise of the {metric} when a head is masked"
    ),
    "blocks": Question(
        ("block", "head"),
        "head {head} of block {block}",
        "rise of the {metric} when a head is masked in all runs of its block",
    ),
    "pairs": Question(
        ("head", "other"),
        "{head} with {other}",
        "interaction: rise of the {metric} with two heads masked minus the sum of their rises",
        is_grid=False,
    ),
    "layers": Question(
        ("layer",),
        "all heads of layer {layer}",
        "rise of the {metric} when all heads of a layer are masked",
    ),
    "mlps": Question(
        ("layer",), "MLP of layer {layer}", "rise of the {metric} when an MLP is masked"
    ),
    "subsets": Question(
        ("kept", "n_kept"),
        "heads kept: {kept}",
        "{metric} for every subset of the heads",
        is_grid=False,
    ),
    "shapley": Question(
        ("layer", "head"), "L{layer}H{head}", "Shapley values: fall of the {metric} due to a head"
    ),
    "greedy": Question(
        ("n_kept", "masked_next"),
        "{n_kept} heads kept",
        "{metric} against the number of kept heads",
        is_grid=False,
    ),
    "positions": Question(
        ("layer", "head", "pos"),
        "L{layer}H{head} at {pos}",
        "rise of the {metric} when a head is masked at one position",
    ),
}
"""Questions, by the value of `what`."""
