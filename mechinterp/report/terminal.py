"""Results as text for a terminal."""

import re
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from mechinterp.analysis.analyses import Finding
from mechinterp.analysis.circuits.patterns import Classification
from mechinterp.analysis.heads.fine_tuning import FineTuning
from mechinterp.analysis.heads.masking import Ablations
from mechinterp.analysis.heads.pruning import Pruning
from mechinterp.analysis.heads.subsets import MAX_SUBSET_HEADS
from mechinterp.analysis.learners.fits import LearnerFits
from mechinterp.analysis.learners.layered import LayeredClassification
from mechinterp.analysis.probing.probing import Probing
from mechinterp.analysis.verdict import digits, explained, with_error
from mechinterp.config import ModelConfig, TaskConfig, TrainConfig
from mechinterp.report.text import ROWS, frame_text, wrapped

DEFAULT = "as by default"


def fits_text(fits: LearnerFits, *, wide: bool = False) -> str:
    """The verdict, the fits at the trained context length, and R^2 over all lengths."""
    frame = fits.to_frame()
    trained = frame[frame["context_length"] == fits.trained_length]
    columns = ["learner", "factor", "factor_sem", "r2", "r2_sem"]
    columns += ["rms", "rms_sem"] if wide else []
    columns += ["loss", "loss_gap", "loss_gap_sem"]
    over_length = frame.pivot(index="context_length", columns="learner", values="r2")
    return "\n".join(
        (
            wrapped(fits.verdict),
            f"\nFits at L = {fits.trained_length}; loss gap is the model's loss minus the learner's",
            frame_text(trained[columns], wide=wide),
            "\nR² over context length",
            frame_text(
                over_length[trained["learner"]].rename_axis(None, axis=1).reset_index(), wide=wide
            ),
        )
    )


def ablation_text(found: Ablations, *, wide: bool = False) -> str:
    """Excess risk, its rise for every masked head, how a layer spreads it, and subsets of heads if there are any."""
    zero, subsets = found.methods[0], found.subsets
    parts = [f"excess risk {with_error(zero.full_risk, zero.full_risk_sem)} y²"]
    if zero.breaking:
        worse = f"Without {', '.join(zero.breaking)} it is worse than predicting 0"
        parts.append(wrapped(f"{worse} ({digits(zero.null_risk)})."))
    carried: dict[str, list[str]] = {}
    for one in found.methods:
        if one.carried:
            carried.setdefault(", ".join(one.carried), []).append(one.method)
    if carried:
        said = "; ".join(
            f"{heads} ({', '.join(methods)} ablation)" for heads, methods in carried.items()
        )
        said = f"One prompt in a hundred carries most of the mean rise of {said}: read the median."
        parts.append(wrapped(said))
    heads, layers = found.to_frame(), found.layer_frame()
    order = ""
    if not wide:
        heads, layers = heads.drop(columns="carried_by_few"), layers.drop(columns="top_share")
    if len(heads) > ROWS and not wide:
        order = ", largest median first"
        heads = heads.sort_values("median_rise", ascending=False, kind="stable")
    parts += [f"\nRise when one head is masked{order}", frame_text(heads, wide=wide)]
    parts += ["\nHow a layer spreads it over its heads", frame_text(layers, wide=wide)]
    if subsets is None:
        parts.append(
            f"\nSubsets are left out: they are of one layer of attention with at most {MAX_SUBSET_HEADS} heads."
        )
    else:
        parts += [
            "\nShapley values: fall of the excess risk a head brings",
            frame_text(subsets.shapley_frame(), wide=wide),
        ]
        kept = subsets.to_frame()
        if len(kept) > ROWS and not wide:
            kept, order = kept.sort_values("risk", kind="stable"), ", best first"
        parts += [f"\nEvery subset of heads kept{order}", frame_text(kept, wide=wide)]
    return "\n".join(parts)


def pruning_text(found: Pruning, tuned: FineTuning | None = None, *, wide: bool = False) -> str:
    """What is kept, what it costs and what further training wins back."""
    n_layers, n_heads = found.kept.shape
    kept = f"heads kept in layers 0 to {n_layers - 1}: {', '.join(map(str, found.kept.sum(1)))} of {n_heads}"
    as_is = (
        f"  excess risk {found.full_risk:.4g} ± {found.full_risk_sem:.2g} y² with all heads, {found.risk:.4g} ± "
        f"{found.risk_sem:.2g} with these: {found.ratio:.3g} ± {found.ratio_sem:.2g} times"
    )
    refit = f"  with a new read-out {found.refit_ratio:.3g} ± {found.refit_ratio_sem:.2g} times"
    parts = [kept, as_is, refit]
    if found.carried_by_few:
        said = "  One prompt in a hundred carries most of this risk: read the number with a new read-out."
        parts = [kept, refit, as_is, said]
    parts.append(
        "  (heads chosen on random halves of the prompts, risks measured on the other halves, ± over prompts and choices)"
    )
    if tuned is not None:
        few, full = (
            f"{r:.3g} ± {s:.2g}"
            for r, s in zip(tuned.ratio[:, -1], tuned.ratio_sem[:, -1], strict=True)
        )
        parts.append(
            f"  after {tuned.step[-1]} steps of further training {few} times (all heads, trained as long: {full})"
        )
    parts.append("kept: chosen on all prompts; chosen: in which share of the halves")
    said = wrapped("\n".join(parts), "  ")
    return f"{said}\n{frame_text(found.to_frame(), wide=wide)}"


def classification_text(
    found: Classification | LayeredClassification, *, wide: bool = False
) -> str:
    """The pattern, the verdict, the loss beside those of ridge regression and of 0, and the table of heads."""
    lines = [found.pattern, *str(found.verdict).splitlines()]
    lines.append(f"Loss on its task: {found.loss}.")
    if wide:
        lines.append(f"Reason: {found.reason}.")
    said = wrapped("\n".join(lines), "  ")
    if wide:
        frame = found.to_frame()
        for name in frame.columns[frame.columns.str.endswith("_p")]:
            least = 1 / (len(frame) * found.n_random)
            frame[name] = [f"< {least:.2g}" if p <= least else f"{p:.2g}" for p in frame[name]]
        return f"{said}\n\n{frame_text(frame, wide=True)}"
    return "\n".join((said, "", heads_header(found), *_head_lines(found)))


def brief_text(found: Classification | LayeredClassification) -> str:
    """One of many: pattern, R², loss, and the heads without a header."""
    loss = found.loss
    line = (
        f"  loss {digits(loss.model)} y² (ridge regression {digits(loss.ridge)}, predicting 0 "
        f"{digits(loss.zero)})"
    )
    if found.pattern in ("undetermined", "unstructured"):
        line += f"; {found.verdict.computes.partition(': ')[2]}"
    elif isinstance(found, Classification):
        line += f", {explained(found.learner.r2, found.learner.r2_sem)}"
    return "\n".join([found.pattern, wrapped(line, "  "), *_head_lines(found)])


ONE_LAYER = f"  head  label           share  omega (1/x²)  {'mu':>18}"
LAYERS = "  head  excess risk rises by (y²)  share of its layer's rises"


def heads_header(found: Classification | LayeredClassification) -> str:
    """Above the heads of a model, or of many of its kind."""
    return LAYERS if isinstance(found, LayeredClassification) else ONE_LAYER


def _head_lines(found: Classification | LayeredClassification) -> list[str]:
    if isinstance(found, LayeredClassification):
        return [
            f"  {row.label:<4}  {with_error(row.excess_risk_increase, row.sem):>25}  {digits(row.importance):>25}"
            for row in found.to_frame().itertuples()
        ]
    rows = zip(found.labels, found.share, found.omega_form, found.circuits.mu, strict=True)
    return [
        f"  {head:>4}  {label:<12}  {digits(share):>7}  {digits(omega):>12}  {_mu(mu):>18}"
        for head, (label, share, omega, mu) in enumerate(rows)
    ]


def _mu(values: np.ndarray) -> str:
    """One number per response, of more than three their range."""
    if len(values) > 3:
        return f"{digits(values.min())} to {digits(values.max())}"
    return ", ".join(map(digits, values))


def probing_text(found: Probing, *, wide: bool = False) -> str:
    """A table for each target of the probes, and one for descent."""
    structures = found.structure_frames()
    tables = {
        "the response, read from the stream at the query": found.response.to_frame(),
        "\nThe covariates times the context's correlations with y (Algorithm 1)": structures[
            "reweighted x"
        ],
        "\nThe covariates times the context's covariance, less themselves": structures[
            "preconditioned x"
        ],
        "\nGradient descent on the features after layer 0, and on x": found.descent.area_frame(),
    }
    return "\n".join(f"{title}\n{frame_text(frame, wide=wide)}" for title, frame in tables.items())


BESPOKE: dict[type, Callable[..., str]] = {
    Classification: classification_text,
    LayeredClassification: classification_text,
    Ablations: ablation_text,
    LearnerFits: fits_text,
    Pruning: pruning_text,
    Probing: probing_text,
}
"""Results of several tables, or with a sentence of their own."""


def result_text(found: Finding, *, wide: bool = False) -> str:
    """A result as text: what it comes to, and its table."""
    if type(found) in BESPOKE:
        return BESPOKE[type(found)](found, wide=wide)
    return f"{wrapped(repr(found), '  ')}\n{frame_text(found.to_frame(), wide=wide)}"


def info_text(document: dict) -> str:
    """The document of `info` as a card: what is not as by default, and hooks if the document has them."""
    task, model = document["experiment"]["task"], document["experiment"]["model"]
    layers = (
        f"{model['n_layers']} layers of " if model["n_layers"] > 1 or model["context_only"] else ""
    )
    title = (
        f"{document['name']}: {layers}{model['n_heads']} heads, {model['score']} attention, d_x {task['d_x']}, "
        f"context length {task['context_length']}"
    )
    known = "step" not in document["assumed"]
    if known:
        title += f", step {document['step']}, config {document['id']}"
    origin = (f"{name.replace('_', ' ')} {value}" for name, value in document["origin"].items())
    loss, snapshots = document["eval_loss"], document["snapshots"]
    card = {
        "format": document["format"],
        "origin": ", ".join(origin),
        "loss": "" if loss is None else f"{digits(loss)} y² on fixed prompts",
        "task": _settings(task, TaskConfig()) or DEFAULT,
        "model": _settings(model, ModelConfig()) or DEFAULT,
        # How external weights were trained is not known.
        "training": (_settings(document["experiment"]["train"], TrainConfig()) or DEFAULT)
        if known
        else "",
        "seed": str(document["experiment"]["seed"]) if known else "",
        "history": f"{document['history_rows']} rows" if document["history_rows"] else "",
        "snapshots": f"{len(snapshots)}, steps {snapshots[0]} to {snapshots[-1]}"
        if snapshots
        else "",
        "weights": ", ".join(_shapes(document["weights"])),
    }
    lines = [wrapped(title, "  ")]
    lines += [wrapped(f"  {name:<10} {text}", " " * 11) for name, text in card.items() if text]
    hooks = document.get("hooks")
    if hooks is None:
        return "\n".join([*lines, "  (--wide lists the hook points)"])
    lines.append("  hooks (name, shape, what turns it on):")
    for hook in hooks:
        shape = f"[{', '.join(map(str, hook['shape']))}]"
        lines.append(f"    {hook['name']:<31} {shape:<22} {hook['switch']}".rstrip())
    return "\n".join(lines)


def _settings(values: Mapping[str, object], default: object) -> str:
    """Fields that are not as by default."""
    said = []
    for name, value in values.items():
        usual = getattr(default, name)
        if isinstance(value, dict):
            inner = _settings(value, usual)
            said += [f"{name} {inner}"] if inner else []
        elif value != usual:
            said.append(f"{name} {_plain(value)}")
    return ", ".join(said)


def _plain(value: object) -> str:
    if isinstance(value, list | tuple):
        return f"({', '.join(map(_plain, value))})"
    return digits(value) if isinstance(value, float) else str(value)


def _shapes(weights: Mapping[str, Sequence[int]]) -> list[str]:
    """Name and shape of each tensor, those of all layers as one."""
    found: dict[str, list[str]] = {}
    for name, shape in weights.items():
        layer = re.search(r"blocks\.(\d+)", name)
        said = re.sub(r"blocks\.\d+", "blocks.*", name) + f" {'×'.join(map(str, shape))}"
        found.setdefault(said, []).append(layer[1] if layer else "")
    return [
        said if len(layers) > 1 else said.replace("*", layers[0]) for said, layers in found.items()
    ]
