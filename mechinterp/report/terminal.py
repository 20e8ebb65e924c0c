"""Results as text for a terminal."""

from collections.abc import Callable

from mechinterp.analysis.ablation.fine_tuning import FineTuning
from mechinterp.analysis.ablation.methods import Ablations
from mechinterp.analysis.ablation.pruning import Pruning
from mechinterp.analysis.ablation.subsets import MAX_SUBSET_HEADS
from mechinterp.analysis.learners.fits import LearnerFits
from mechinterp.analysis.multi_layer.classify import LayeredClassification
from mechinterp.analysis.number_format import digits, with_error
from mechinterp.analysis.one_layer.classification import Classification
from mechinterp.analysis.probing.probing import Probing
from mechinterp.analysis.result import Finding
from mechinterp.report.classification import classification_text
from mechinterp.report.text import ROWS, frame_text, wrapped


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
