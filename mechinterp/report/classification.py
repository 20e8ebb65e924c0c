"""What `classify` says of a checkpoint, as a JSON document and as text."""

from dataclasses import asdict

import numpy as np

from mechinterp.analysis.learners.baseline_comparison import standing_text
from mechinterp.analysis.multi_layer.algorithm_evidence import AlgorithmEvidence
from mechinterp.analysis.multi_layer.classify import LayeredClassification
from mechinterp.analysis.number_format import digits, explained, with_error
from mechinterp.analysis.one_layer.classification import Classification
from mechinterp.checkpoints.checkpoint import Checkpoint
from mechinterp.report.header import header, records
from mechinterp.report.text import ROWS, frame_text, wrapped


def classification_document(
    checkpoint: Checkpoint, found: Classification | LayeredClassification
) -> dict:
    """What `classify` says of a checkpoint."""
    if isinstance(found, LayeredClassification):
        return _layered_document(checkpoint, found)
    scales = found.circuits
    heads = [
        {
            "layer": 0,
            "head": head,
            "label": label,
            "share": found.share[head],
            "omega": scales.omega[head].tolist(),
            "omega_mean": scales.omega_mean[head],
            "omega_form": found.omega_form[head],
            "mu": scales.mu[head].tolist(),
            "qk_diagonal": scales.qk_diagonal[head],
            "qk_diagonal_p": found.head_p_values["qk_diagonal"][head],
            "qk_off_diagonal": scales.qk_off_diagonal[head],
            "qk_y_leak": scales.qk_y_leak[head],
            "ov_last_entry": scales.ov_last_entry[head],
            "ov_last_entry_p": found.head_p_values["ov_last_entry"][head],
            "ov_x_leak": scales.ov_x_leak[head],
            "task_leak": found.task_leak[head],
        }
        for head, label in enumerate(found.labels)
    ]
    return {
        **header(checkpoint),
        "pattern": found.pattern,
        "reason": found.reason,
        "heads": heads,
        "evidence": _evidence(found) | _standing(found),
        "verdict": asdict(found.verdict),
    }


def _evidence(found: Classification) -> dict:
    names = (
        *("omega_spread", "zero_sum", "eta", "eta_optimal", "gamma", "manifold_distance"),
        *("theta", "supports", "support_leak", "theta_spread"),
    )
    evidence: dict[str, object] = {"sign_matching": found.sign_matching}
    evidence |= {name: getattr(found.scales, name) for name in names}
    for kind in ("substitution", "learner"):
        faithfulness = asdict(getattr(found, kind))
        evidence |= {f"{kind}_{name}": value for name, value in faithfulness.items()}
    used = found.components
    for name in ("n_components", "learned", "off_diagonal"):
        evidence[name] = None if used is None else getattr(used, name)
    form = {name: getattr(found.form, name) for name in ("isotropy", "shared", "rotation")}
    return evidence | {"form": found.form.kind, **form, "p_values": found.p_values}


def _standing(found: Classification) -> dict:
    """The loss beside those of ridge regression and of 0, and what simple learners explain, nearest first."""
    near = found.near
    columns = {"r2": near.r2, "r2_sem": near.r2_sem, "lead": near.lead, "lead_sem": near.lead_sem}
    learners = [
        {"learner": name} | {column: float(values[n]) for column, values in columns.items()}
        for n, name in enumerate(near.learners)
    ]
    return {
        "loss": asdict(found.loss),
        **_task(found),
        "learners": learners,
        "n_random": found.n_random,
        "random_ranges": found.random_ranges,
    }


def _task(found: Classification | LayeredClassification) -> dict:
    """The law of the prompts in one line, and the number by which it is doubted where it is assumed."""
    return {
        "task": found.task.in_words(found.assumed),
        "best_factor": found.best_factor,
        "best_factor_sem": found.best_factor_sem,
    }


def _layered_document(checkpoint: Checkpoint, found: LayeredClassification) -> dict:
    """What `classify` says of a layered model, whose heads are described by their ablation."""
    task = found.task
    return {
        **header(checkpoint),
        "pattern": found.pattern,
        "reason": found.reason,
        "heads": records(found.to_frame()),
        "evidence": {
            "excess_risk": found.excess_risk,
            "excess_risk_sem": found.excess_risk_sem,
            "n_prompts": found.n_prompts,
            "context_length": task.context_length,
            "learner_r2": dict(zip(found.learners, found.learner_r2.tolist(), strict=True)),
            "learner_r2_sem": dict(zip(found.learners, found.learner_r2_sem.tolist(), strict=True)),
            **({} if found.algorithm is None else algorithm_evidence(found.algorithm)),
            "loss": asdict(found.loss),
            **_task(found),
        },
        "verdict": asdict(found.verdict),
    }


def algorithm_evidence(found: AlgorithmEvidence) -> dict:
    """What earned the label of several layers: of the best algorithm, of the runner-up, and of all."""
    best, other = found.best, found.runner_up
    evidence: dict[str, object] = {
        "function": found.function,
        "mechanism": found.mechanism,
        "candidates": list(found.candidates),
        "frequency": dict(zip(found.resampled, found.frequency.tolist(), strict=True)),
        "relative_risk": found.relative_risk[0],
        "null_risk": found.null_risk,
    }
    if best is not None:
        evidence |= {"algorithm": found.members[best]}
        evidence |= {"r2": found.r2[best, 0], "r2_sem": found.r2_sem[best, 0]}
        walked = found.has_path[best] and found.path_answered
        evidence["scalars"] = (found.path_scalars if walked else found.scalars)[best]
    if best is not None and other is not None:
        evidence |= {
            "runner_up": found.members[other],
            "runner_up_r2": found.r2[other, 0],
            **dict(zip(("lead", "lead_sem"), found.lead(best, other), strict=True)),
        }
    tables = {"algorithms": found.to_frame(), "path": found.path_frame()}
    tables |= {"controls": found.control_frame(), "tests": found.test_frame()}
    return evidence | {name: records(frame) for name, frame in tables.items()}


def classification_text(
    found: Classification | LayeredClassification, *, wide: bool = False
) -> str:
    """The pattern, the verdict, the loss beside those of ridge regression and of 0, and the table of heads."""
    standing = standing_text(found.loss, found.task, found.assumed)
    lines = [found.pattern, *str(found.verdict).splitlines(), *standing.splitlines()]
    if not wide:
        said = wrapped("\n".join(lines), "  ")
        return "\n".join((said, "", heads_header(found), *_head_lines(found)))
    frame = found.to_frame()
    chance = ""
    if isinstance(found, Classification):
        chance = f"\n\n{wrapped(_ranges(found), '  ')}"
        least = 1 / (len(frame) * found.n_random)
        for name in frame.columns[frame.columns.str.endswith("_p")]:
            frame[name] = [f"< {least:.2g}" if p <= least else f"{p:.2g}" for p in frame[name]]
    said = wrapped("\n".join([*lines, f"Reason: {found.reason}."]), "  ")
    return f"{said}\n\n{frame_text(frame, wide=True)}{chance}"


def _ranges(found: Classification) -> str:
    """Where random weights lie in the numbers of the table and of the evidence."""
    ranges = {
        name: f"{name} {digits(low)} to {digits(high)}"
        for name, (low, high) in found.random_ranges.items()
        if low < high
    }
    return f"Of {found.n_random} models with random weights 90% lie within {', '.join(ranges.values())}."


def brief_text(found: Classification | LayeredClassification) -> str:
    """One of many: pattern, R², loss, and the heads without a header."""
    loss = found.loss
    line = (
        f"  loss {digits(loss.model)} y² (ridge {digits(loss.ridge)}, predicting 0 "
        f"{digits(loss.zero)})"
    )
    if found.pattern in ("undetermined", "unstructured"):
        line += f"; {found.verdict.computes.partition(': ')[2]}"
    elif isinstance(found, Classification):
        line += f", {explained(found.learner.r2, found.learner.r2_sem)}"
    elif found.algorithm is not None and found.algorithm.best is not None:
        best = found.algorithm.best
        line += f", {explained(found.algorithm.r2[best, 0], found.algorithm.r2_sem[best, 0])}"
    if found.task_doubt:
        line += f"; {found.task_doubt}"
    return "\n".join([found.pattern, wrapped(line, "  "), *_head_lines(found)])


ONE_LAYER = f"""Heads: share of the output; omega and mu are what one multiplies x·x and y by
  head  label           share  omega (1/x²)  {"mu":>18}"""
LAYERS = """Heads: what the excess risk rises by when one is masked
  head                    rise (y²)  share of its layer's rises"""


def heads_header(found: Classification | LayeredClassification) -> str:
    """Above the heads of a model, or of many of its kind."""
    return LAYERS if isinstance(found, LayeredClassification) else ONE_LAYER


def _head_lines(found: Classification | LayeredClassification) -> list[str]:
    if isinstance(found, LayeredClassification):
        frame = found.to_frame()
        if len(frame) > ROWS:
            frame = frame.nlargest(ROWS, "excess_risk_increase")
        lines = [
            f"  {row.label:<6}  {with_error(row.excess_risk_increase, row.sem):>25}  {digits(row.importance):>25}"
            for row in frame.itertuples()
        ]
        left = found.increase.size - len(frame)
        return [*lines, f"  ... and {left} more heads, of less: --wide"] if left else lines
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
