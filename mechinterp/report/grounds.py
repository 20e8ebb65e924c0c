"""Settings of an external file in words, by their ground: assumed, stated, proven or known."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mechinterp.checkpoints.checkpoint import Checkpoint

ALIKE_IN_MOST = ("passes", "rms_norm", "activation", "norm_eps", "score_slope", "packing")
"""Settings that most models have alike, by their last word; they are listed only in full."""
SETTINGS = ("model.", "task.", "scale", "predictions")
"""How the names of settings begin that are shown; others, such as train.steps, say nothing about a file."""


def rows_by_ground(checkpoint: "Checkpoint", *, full: bool = False) -> dict[str, str]:
    """Rows of the table on how a file was read: its settings by ground, then what is in doubt.

    Args:
        full: True: also settings that are known or rarely matter, and the readings that were tried.
    Example:
        >>> from mechinterp import load
        >>> rows_by_ground(load("softmax-h2-s0"))
        {}
    """
    assumed, grounds = checkpoint.assumed, checkpoint.grounds
    if not assumed:
        return {}
    words = {f"task.{name}": text for name, text in checkpoint.task.fields_in_words.items()}
    first = {name: words[name] for name in map("task.{}".format, checkpoint.task.assumed) if name in words}  # fmt: skip
    rest = {name: value for name, value in assumed.items() if not name.startswith("task.")}
    rows = {"assumed": in_words(first | rest, full=full)}
    for ground in ("stated", "proven", "known") if full else ("stated", "proven"):
        settings = dict(grounds[ground])
        shown = {n: words[n] for n in words if _states(settings, n)}
        rest = {n: value for n, value in settings.items() if not n.startswith("task.")}
        rows[ground] = in_words(shown | rest, full=full)
    if full and checkpoint.readings:
        rows["readings"] = f"loss over that of predicting 0: {'; '.join(map(repr, checkpoint.readings))}"  # fmt: skip
    return {name: text for name, text in (rows | doubts_in_words(assumed, checkpoint.doubt)).items() if text}  # fmt: skip


def doubts_in_words(assumed: Mapping[str, object], doubt: str) -> dict[str, str]:
    """Rows on the weights that were read, unused tensors, open settings and the doubt."""
    unused = assumed.get("unused")
    return {
        "weights": str(assumed.get("weights", "")),
        "unused": f"tensors {', '.join(map(str, unused))}" if isinstance(unused, list) else "",
        "open": str(assumed.get("undetermined", "")),
        "doubt": doubt,
    }


def in_words(settings: Mapping[str, object], *, full: bool) -> str:
    """Settings by dotted name in one line.

    Args:
        full: True: also those that rarely matter.
    Example:
        >>> in_words({"model.sign": "plus", "attn_scale": 2.0, "step": 0}, full=False)
        'model.sign = plus, scale = 0.5'
    """
    named = dict(settings)
    divisor = named.pop("attn_scale", None)
    if isinstance(divisor, float):  # TransformerLens divides by it; --scale is the factor
        named["scale"] = 1 / divisor
    return ", ".join(
        f"{name} = {value:.4g}" if isinstance(value, float) else f"{name} = {value}"
        for name, value in named.items()
        if name.startswith(SETTINGS) and value not in (None, (), [])
        if full or not _rarely_matters(name, value)
    )


def _states(settings: Mapping[str, object], name: str) -> bool:
    """True if settings have this name, or a part of it, such as task.covariance.kind."""
    return any(each == name or each.startswith(f"{name}.") for each in settings)


def _rarely_matters(name: str, value: object) -> bool:
    """True for a setting that most models have alike, or that leaves no trace in a file."""
    return name.removeprefix("model.") in ALIKE_IN_MOST or str(value).startswith("none (")
