"""How much faster than plain counterparts the package is, as docs/ tells it, from the page that `make bench` writes."""

from pathlib import Path

from analyses.lib.numbers import ratios
from analyses.lib.result_tables import markdown

TRAINED = "100 steps, "
MASKING = "every head of 4 layers of 8, {} scores, 4,096 prompts (plain: 512)"


def packs(results: Path) -> str:
    """The table of docs/how/train.md: models of one layer, alone and many at once."""
    found = {
        what.removeprefix(TRAINED): f"{ratio:.1f} times"
        for what, ratio in ratios().items()
        if what.startswith(TRAINED) and "layers" not in what
    }
    return markdown(("in one run", "against the plain loop"), list(found.items()))


def masking(results: Path) -> str:
    """The table of docs/heads.md."""
    found = ratios()
    (subsets,) = (value for name, value in found.items() if "by run_with_hooks" in name)
    heads = {score: found[MASKING.format(score)] for score in ("linear", "softmax")}
    rows = [
        (
            "every head of 4 layers of 8 masked alone, width 64, linear scores",
            f"{heads['linear']:.0f} times",
        ),
        ("the same with softmax scores", f"{heads['softmax']:.1f} times"),
        ("all 256 subsets of a layer of 8 heads", f"{subsets:,.0f} times"),
    ]
    return markdown(("4,096 prompts", "as fast as the plain loop"), rows)
