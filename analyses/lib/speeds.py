"""How much faster than plain counterparts the package is, as docs/ tells it, from the page that `make bench` writes."""

import re
from pathlib import Path

from analyses.lib.result_tables import markdown

TRAINED = "100 steps, "
SCORES = ("linear/L", "relu/L", "softmax")
MASKING = "every head of 4 layers of 8, {} scores, 4,096 prompts (plain: 512)"


def page(results: Path) -> Path:
    """The page that `make bench` writes."""
    return results.parents[1] / "tests" / "benchmarks" / "README.md"


def ratios(results: Path) -> dict[str, float]:
    """The last column of the page's table, by its first."""
    rows = re.findall(r"^\| (.+?) \|.*\| ([0-9.]+) \|$", page(results).read_text(), re.MULTILINE)
    return {what: float(ratio) for what, ratio in rows}


def packs(results: Path) -> str:
    """The table of docs/how/train.md: models of one layer, alone and many at once."""
    found = {
        what.removeprefix(TRAINED): f"{ratio:.1f} times"
        for what, ratio in ratios(results).items()
        if what.startswith(TRAINED) and "layers" not in what
    }
    return markdown(("in one run", "against the plain loop"), list(found.items()))


def masking(results: Path) -> str:
    """The table of docs/heads.md."""
    found = ratios(results)
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


def training(results: Path) -> list[str]:
    """What docs/how/train.md says beside that."""
    found = ratios(results)
    one, many = (
        found[f"the same without the compiled step, {name}"]
        for name in ("1 model of 2 heads", "64 models of 2 heads")
    )
    linear, relu, softmax = (
        found[f"{TRAINED}4 layers of 8 heads, {score} scores"] for score in SCORES
    )
    blocks = [value for name, value in found.items() if name.endswith("norm and MLP")]
    masked, soft = (found[MASKING.format(score)] for score in ("linear", "softmax"))
    (subsets,) = (value for name, value in found.items() if "by run_with_hooks" in name)
    drawn = found["drawing prompts alone, against 100 steps of 2 heads"]
    return [
        f"{one:.1f} times for one model of two heads and {many:.1f} times for 64",
        f"that alone is {drawn:.0f} times as fast",
        f"{linear:.1f} times as fast as the plain loop with linear scores, {relu:.1f} times with "
        f"relu/L and {softmax:.1f} times with softmax",
        f"it is {min(blocks):.1f} to {max(blocks):.1f} times as fast",
        f"is {masked:.0f} times (linear scores) and {soft:.1f} times (softmax) as fast",
        f"{subsets:,.0f} times, with the same answers",
    ]


def flow(results: Path) -> list[str]:
    """What docs/linear_attention.md says."""
    ((what, ratio),) = (pair for pair in ratios(results).items() if pair[0].startswith("exact"))
    steps, timed = re.findall(r"\d+", what)
    return [
        f"{ratio:,.0f} times faster in one run",
        f"timed for {timed} steps and extrapolated to {int(steps):,}",
    ]
