"""Which algorithm the layers of a model carry out, with the evidence.

Each member of `icl.algorithms` with a label is fitted to the model's predictions on one half of the
prompts and scored on the other half: at half, once and twice the length of the context, for a
covariance with a wide spread, and after every layer. Before that come two questions that no scalar
can change: is the prediction linear in the responses, and does a rotation of x leave it as it is?
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mechinterp import figures
from mechinterp.analysis.estimates import ratio_and_sem
from mechinterp.config import CovarianceConfig, TaskConfig
from mechinterp.display import Result
from mechinterp.icl.algorithm_fits import fit_algorithm
from mechinterp.icl.algorithms import ALGORITHMS, Algorithm, JoinedMoments, PromptMoments
from mechinterp.icl.prompts import Prompts, generator_for, sample_prompts
from mechinterp.models.predictor import Predictor, Source, predictor_of

LABELLED = tuple(algorithm for algorithm in ALGORITHMS if algorithm.label is not None)
CONDITION = 30.0
"""Largest over smallest eigenvalue of the covariance with a wide spread."""
SCALES = (0.5, 2.0)
N_STARTS = 2

USELESS = 0.95
"""A model whose excess risk is above this share of that of predicting 0 has left what it can do."""
HOLDS, FAILS = 0.98, 0.9
"""R^2 between the two sides of an identity: it holds from the first on and fails below the second."""
NEAR = 0.5
"""R^2 to some member below which prompts are not answered."""
EXPLAINED = 0.98
"""Least R^2 of a member that gives the model its label, at the model's own length and, of a member
with a path, after every layer."""
TIE = 0.005
"""Two members tie if their R^2 differ by less than this, or by less than two standard errors."""

SMALLER = "gradient_descent"
LARGER = {"gd_plus_plus", "preconditioned_gd", "sparse_shrinkage"}
"""Members that contain gradient descent."""
ALIKE = {"gd_plus_plus", "newton", "ridge_like"}
"""Members whose tie is called ridge_like."""


@dataclass(frozen=True, eq=False, repr=False)
class AlgorithmEvidence(Result):
    """The label of a model's algorithm, and how well each candidate explains the model."""

    label: str
    """A label of `icl.algorithms`, "undetermined" or "unstructured"."""
    reason: str
    """One sentence: what decided, with its number."""
    candidates: tuple[str, ...]
    """Labels that the evidence leaves, the smaller of nested ones; one, if it decides."""
    members: tuple[str, ...]
    """Labels of the algorithms that were fitted."""
    n_scalars: Int[np.ndarray, " member"]
    """Fitted numbers of each member."""
    scalars: tuple[Float[np.ndarray, " _"], ...]
    """Those fitted to the predictions, in the order of `Algorithm.names`."""
    settings: tuple[str, ...]
    """Prompts of the scores: "half length", "own length", "double length", "wide spread"."""
    context_length: Int[np.ndarray, " setting"]
    """Pairs of each setting."""
    answered: Bool[np.ndarray, " setting"]
    """Whether the model still does its task there; other settings are not evidence."""
    relative_risk: Float[np.ndarray, " setting"]
    """Excess risk of the model over that of predicting 0; NaN where it takes no such prompts."""
    r2: Float[np.ndarray, "member setting"]
    """1 - mean (model - member)^2 / mean model^2, on prompts that nothing was fitted to; NaN where
    the setting is not answered."""
    r2_sem: Float[np.ndarray, "member setting"]
    difference: Float[np.ndarray, "member member setting"]
    """R^2 of the first member minus that of the second."""
    difference_sem: Float[np.ndarray, "member member setting"]
    """Paired: the same prompts for both."""
    path_answered: bool
    """Whether what is read of the stream after each layer comes near to some member's path."""
    path_r2: Float[np.ndarray, "member layer"]
    """As r2, after each layer, over the mean square of the last prediction, with scalars fitted to
    the path; NaN for a member that has none or that a test has ruled out."""
    path_r2_sem: Float[np.ndarray, "member layer"]
    tests: tuple[str, ...]
    """Identities that were tested."""
    test_answer: tuple[str, ...]
    """"yes", "no", "unclear" or "not answered"."""
    test_r2: Float[np.ndarray, " test"]
    """R^2 between the two sides of the identity."""
    test_r2_sem: Float[np.ndarray, " test"]
    n_prompts: int

    def __repr__(self) -> str:
        return f"AlgorithmEvidence({self.label}: {self.reason})"

    def to_frame(self) -> pd.DataFrame:
        """One row per algorithm and setting."""
        member, setting = (index.ravel() for index in np.indices(self.r2.shape))
        return pd.DataFrame(
            {
                "algorithm": np.array(self.members)[member],
                "n_scalars": self.n_scalars[member],
                "setting": np.array(self.settings)[setting],
                "context_length": self.context_length[setting],
                "answered": self.answered[setting],
                "r2": self.r2.ravel(),
                "r2_sem": self.r2_sem.ravel(),
            }
        )

    def test_frame(self) -> pd.DataFrame:
        """One row per identity that was tested."""
        return pd.DataFrame(
            {
                "test": self.tests,
                "answer": self.test_answer,
                "r2": self.test_r2,
                "r2_sem": self.test_r2_sem,
            }
        )

    def path_frame(self) -> pd.DataFrame:
        """One row per algorithm and layer."""
        member, layer = (index.ravel() for index in np.indices(self.path_r2.shape))
        return pd.DataFrame(
            {
                "algorithm": np.array(self.members)[member],
                "layer": layer,
                "path_r2": self.path_r2.ravel(),
                "path_r2_sem": self.path_r2_sem.ravel(),
            }
        )

    def plot(self) -> go.Figure:
        """R^2 of each member after each layer."""
        drawn = [m for m in range(len(self.members)) if np.isfinite(self.path_r2[m]).all()]
        return figures.lines(
            np.arange(1, self.path_r2.shape[1] + 1),
            {self.members[m]: self.path_r2[m] for m in drawn},
            errors={self.members[m]: self.path_r2_sem[m] for m in drawn},
            title="How near the stream after each layer is to what each algorithm predicts there",
            x_title="layers run",
            y_title="R²",
        )


def name_algorithm(
    source: Source,
    prompts: Prompts | None = None,
    *,
    task: TaskConfig | None = None,
    n_prompts: int = 256,
    seed: int = 0,
) -> AlgorithmEvidence:
    """The algorithm that the layers of a model carry out.

    A setting in which the model's excess risk comes near to that of predicting 0, or in which no
    member has an R^2 of .5, is not answered: the model may have left what it was trained for.

    Args:
        prompts: Of the model's own length; None: `n_prompts` of its task. All others are drawn
            from the task, by `seed`.
        task: Law of the prompts; None: the model's own.
    Raises:
        ValueError: If there is no task, there are fewer than 8 prompts, or they do not fit the model.
    Example:
        >>> from mechinterp.models.constructions_algorithms import gradient_descent_model
        >>> name_algorithm(gradient_descent_model([0.5, 0.3], d_x=4), n_prompts=128).label
        'gradient_descent'
    """
    predictor = predictor_of(source)
    task = predictor.task if task is None else task
    if task is None:
        raise ValueError(
            "name_algorithm needs a task for a model that comes without one, got none."
        )
    if prompts is None:
        prompts = sample_prompts(task, n_prompts, seed=seed, dtype=torch.float64)
    if len(prompts) < 8:
        raise ValueError(f"name_algorithm needs >= 8 prompts, got {len(prompts)}.")
    prompts = prompts.to(torch.float64)
    settings = _settings(predictor, prompts, task, seed)
    members = _members(task)
    tests = _tests(predictor, prompts, seed)
    left = _left(members, tests)
    scores = _scores(members, left, settings, task, predictor.n_layers)
    path = _path(members, left, predictor, settings["own length"], task)
    label, candidates, reason = _verdict(members, left, settings, tests, scores, path)
    return AlgorithmEvidence(
        label=label,
        reason=reason,
        candidates=candidates,
        members=tuple(str(member.label) for member in members),
        n_scalars=np.array([len(member.names(predictor.n_layers)) for member in members]),
        scalars=scores.scalars,
        settings=tuple(settings),
        context_length=np.array([s.prompts.x.shape[1] for s in settings.values()]),
        answered=scores.answered,
        relative_risk=np.array([s.relative_risk for s in settings.values()]),
        r2=scores.r2,
        r2_sem=scores.r2_sem,
        difference=scores.difference,
        difference_sem=scores.difference_sem,
        path_answered=path.answered,
        path_r2=path.scores.r2,
        path_r2_sem=path.scores.r2_sem,
        tests=tuple(tests),
        test_answer=tuple(test.answer for test in tests.values()),
        test_r2=np.array([test.r2 for test in tests.values()]),
        test_r2_sem=np.array([test.r2_sem for test in tests.values()]),
        n_prompts=len(prompts),
    )


def _members(task: TaskConfig) -> tuple[Algorithm, ...]:
    """Without preconditioned gradient descent where Sigma is a multiple of I: it is gradient descent."""
    eigenvalues = task.covariance.eigenvalues
    spread = task.covariance.kind == "kms" and task.covariance.rho != 0
    spread = spread or len(set(eigenvalues)) > 1
    return tuple(m for m in LABELLED if spread or m.label != "preconditioned_gd")


@dataclass(frozen=True, eq=False)
class _Setting:
    """Prompts, and what the model predicts for them; None: it takes no such prompts."""

    prompts: Prompts
    predictions: Tensor | None

    @property
    def relative_risk(self) -> float:
        if self.predictions is None:
            return float("nan")
        return _relative_risk(self.predictions, self.prompts.y_query_clean)

    @property
    def useful(self) -> bool:
        return self.relative_risk < USELESS


def _relative_risk(predictions: Tensor, target: Tensor) -> float:
    return ((predictions - target).square().mean() / target.square().mean()).item()


def _predicted(predictor: Predictor, prompts: Prompts) -> Tensor:
    with torch.no_grad():
        return predictor.predict(prompts).detach().cpu().double()


def _settings(
    predictor: Predictor, prompts: Prompts, task: TaskConfig, seed: int
) -> dict[str, _Setting]:
    n, count = prompts.x.shape[1], len(prompts)
    laws = {"half length": (task, max(1, n // 2)), "double length": (task, 2 * n)}
    if task.d_x > 1:
        eigenvalues = np.geomspace(1, CONDITION, task.d_x)
        mean_one = tuple((eigenvalues / eigenvalues.mean()).tolist())
        wide = CovarianceConfig(kind="eigenvalues", eigenvalues=mean_one)
        laws["wide spread"] = (replace(task, covariance=wide), n)
    found = {"own length": _Setting(prompts, _predicted(predictor, prompts))}
    for step, (name, (law, length)) in enumerate(laws.items(), start=1):
        drawn = sample_prompts(
            law,
            count,
            generator=generator_for(seed, "eval", step),
            context_length=length,
            dtype=torch.float64,
        )
        try:
            found[name] = _Setting(drawn, _predicted(predictor, drawn))
        except ValueError:  # The model has no room for them.
            found[name] = _Setting(drawn, None)
    return found


@dataclass(frozen=True)
class _Test:
    answer: str
    r2: float
    r2_sem: float


def _tests(predictor: Predictor, prompts: Prompts, seed: int) -> dict[str, _Test]:
    """Whether the model's predictions satisfy what linear and what equivariant members do."""
    own = _predicted(predictor, prompts)
    noise = prompts.y - prompts.x @ prompts.beta
    beta = prompts.beta.roll(1, 0)
    clean = (prompts.x_query[:, None] @ beta)[:, 0]
    other = replace(prompts, y=prompts.x @ beta + noise.roll(1, 0), y_query_clean=clean, beta=beta)
    # The sum is divided by the root of 2, which leaves the variance of y as it was.
    root = 0.5**0.5
    added = replace(
        prompts,
        y=root * (prompts.y + other.y),
        y_query_clean=root * (prompts.y_query_clean + clean),
    )
    found = {}
    both = root * (own + _predicted(predictor, other))
    found["linear in y: sum"] = _test(predictor, added, both, 1.0)
    for scale in SCALES:
        scaled = replace(prompts, y=scale * prompts.y, y_query_clean=scale * prompts.y_query_clean)
        found[f"linear in y: times {scale:g}"] = _test(predictor, scaled, scale * own, scale)
    d_x = prompts.x.shape[2]
    generator = generator_for(seed, "init", 0)
    R = torch.linalg.qr(
        torch.randn(len(prompts), d_x, d_x, generator=generator, dtype=torch.float64)
    ).Q
    turned = replace(prompts, x=prompts.x @ R, x_query=(prompts.x_query[:, None] @ R)[:, 0])
    found["same when x is rotated"] = _test(predictor, turned, own, 1.0)
    return found


def _test(predictor: Predictor, prompts: Prompts, expected: Tensor, scale: float) -> _Test:
    predictions = _predicted(predictor, prompts)
    if not _relative_risk(predictions, prompts.y_query_clean) < USELESS:
        return _Test("not answered", float("nan"), float("nan"))
    unexplained, sem = ratio_and_sem(
        (predictions - expected).square().mean(1).numpy(), expected.square().mean(1).numpy()
    )
    r2 = 1 - float(unexplained)
    return _Test("yes" if r2 >= HOLDS else "no" if r2 < FAILS else "unclear", r2, float(sem))


@dataclass(frozen=True, eq=False)
class _Scores:
    scalars: tuple[np.ndarray, ...]
    answered: np.ndarray
    r2: np.ndarray
    r2_sem: np.ndarray
    difference: np.ndarray
    difference_sem: np.ndarray


def _scores(
    members: Sequence[Algorithm],
    left: Sequence[int],
    settings: Mapping[str, _Setting],
    task: TaskConfig,
    n_layers: int,
) -> _Scores:
    """Members fitted to the even prompts of every setting that is answered, scored on the odd."""
    own = settings["own length"]
    useful = np.array([own.useful and setting.useful for setting in settings.values()])
    found = _fitted_and_scored(members, left, settings, task, n_layers, useful)
    answered = useful & (np.nan_to_num(found.r2, nan=-np.inf).max(0) >= NEAR)
    if (answered == useful).all():
        return found
    return _fitted_and_scored(members, left, settings, task, n_layers, answered)


def _fitted_and_scored(
    members: Sequence[Algorithm],
    left: Sequence[int],
    settings: Mapping[str, _Setting],
    task: TaskConfig,
    n_layers: int,
    used: np.ndarray,
) -> _Scores:
    each = list(settings.values())
    shape = (len(members), len(each), len(each[0].prompts) // 2)
    error, size = np.full(shape, np.nan), np.full(shape[1:], np.nan)
    scalars = [np.full(len(member.names(n_layers)), np.nan) for member in members]
    if used.any():
        chosen = [setting for setting, use in zip(each, used, strict=True) if use]
        joined = JoinedMoments([PromptMoments(s.prompts[::2], task) for s in chosen])
        target = torch.cat([_known(s)[::2] for s in chosen])
        # Those that a test has ruled out are shown, and not worth a second start.
        starts = [N_STARTS if m in left else 1 for m in range(len(members))]
        scalars = [
            fit_algorithm(member, joined, target, n_layers=n_layers, n_starts=n_starts).scalars
            for member, n_starts in zip(members, starts, strict=True)
        ]
        for s, setting in enumerate(each):
            if not used[s]:
                continue
            moments, model = PromptMoments(setting.prompts[1::2], task), _known(setting)[1::2]
            size[s] = model.square().mean(1).numpy()
            for m, (member, found) in enumerate(zip(members, scalars, strict=True)):
                predicted = member.predictions(moments, found.tolist(), n_layers)[-1]
                error[m, s] = (predicted - model).square().mean(1).numpy()
    return _compared(tuple(scalars), used, error, size)


def _known(setting: _Setting) -> Tensor:
    assert setting.predictions is not None
    return setting.predictions


def _compared(
    scalars: tuple[np.ndarray, ...], answered: np.ndarray, error: np.ndarray, size: np.ndarray
) -> _Scores:
    """R^2 of errors [member, column, prompt] relative to sizes [column, prompt], and differences."""
    n_members, n_columns, _ = error.shape
    r2, r2_sem = np.full((2, n_members, n_columns), np.nan)
    difference, difference_sem = np.full((2, n_members, n_members, n_columns), np.nan)
    for c in range(n_columns):
        if not np.isfinite(size[c]).all():
            continue
        unexplained, r2_sem[:, c] = ratio_and_sem(error[:, c].T, size[c])
        r2[:, c] = 1 - unexplained
        pairs = error[None, :, c] - error[:, None, c]
        difference[..., c], difference_sem[..., c] = ratio_and_sem(
            np.moveaxis(pairs, 2, 0), size[c]
        )
    return _Scores(scalars, answered, r2, r2_sem, difference, difference_sem)


@dataclass(frozen=True, eq=False)
class _Path:
    answered: bool
    scores: _Scores


def _path(
    members: Sequence[Algorithm],
    left: Sequence[int],
    predictor: Predictor,
    own: _Setting,
    task: TaskConfig,
) -> _Path:
    """What a linear read-out finds in the stream at the query after each layer.

    It is fitted to the model's predictions from the last stream of the even prompts, and applied
    after every layer; members are fitted to what it reads there, and scored on the odd prompts.
    """
    n_layers, prompts = predictor.n_layers, own.prompts
    error = np.full((len(members), n_layers, len(prompts) // 2), np.nan)
    size = np.full((n_layers, len(prompts) // 2), np.nan)
    scalars = tuple(np.full(len(member.names(n_layers)), np.nan) for member in members)
    nothing = _Path(False, _compared(scalars, np.zeros(n_layers, bool), error, size))
    if not own.useful:
        return nothing
    predictions = _known(own)
    streams = predictor.streams(prompts)[1:, :, -1].cpu().double()
    read = torch.linalg.lstsq(streams[-1, ::2], predictions[::2], driver="gelsd").solution
    path = streams @ read
    missed = (path[-1, 1::2] - predictions[1::2]).square().mean()
    if not missed <= (1 - HOLDS) * predictions[1::2].square().mean():
        return nothing
    fitted, scored = (PromptMoments(prompts[half::2], task) for half in (0, 1))
    size[:] = predictions[1::2].square().mean(1).numpy()
    found = list(scalars)
    for m in left:
        member = members[m]
        if member.has_path:
            found[m] = fit_algorithm(
                member, fitted, path[:, ::2], n_layers=n_layers, n_starts=N_STARTS
            ).scalars
            predicted = member.predictions(scored, found[m].tolist(), n_layers)
            error[m] = (predicted - path[:, 1::2]).square().mean(2).numpy()
    scores = _compared(tuple(found), np.ones(n_layers, bool), error, size)
    least = np.nan_to_num(scores.r2, nan=-np.inf).min(1)
    return _Path(bool(least.max() >= NEAR), scores)


def _left(members: Sequence[Algorithm], tests: Mapping[str, _Test]) -> list[int]:
    """Members that no test rules out.

    A "yes" rules out none: with small thresholds, ISTA is as good as linear.
    """
    linear, same = _fails(tests, "linear"), _fails(tests, "same")
    return [
        m
        for m, member in enumerate(members)
        if not (member.linear_in_y and linear) and not (member.equivariant and same)
    ]


def _verdict(
    members: Sequence[Algorithm],
    left: Sequence[int],
    settings: Mapping[str, _Setting],
    tests: Mapping[str, _Test],
    scores: _Scores,
    path: _Path,
) -> tuple[str, tuple[str, ...], str]:
    """Label, candidates and reason."""
    labels = [str(member.label) for member in members]
    own = list(settings).index("own length")
    risk = settings["own length"].relative_risk
    if not risk < USELESS:
        return (
            "unstructured",
            (),
            f"the model's excess risk is {risk:.3g} times that of predicting 0",
        )
    known = ", ".join(
        f"{name}: {test.answer}" + ("" if np.isnan(test.r2) else f" ({test.r2:.3f})")
        for name, test in tests.items()
    )
    near = [m for m in range(len(members)) if scores.r2[m, own] >= EXPLAINED]
    near = _undominated(near, scores, scores.answered)
    if any(labels[m] == SMALLER for m in near if m not in left):
        near = _smaller(near, labels)  # Who ties with it is no more than what is ruled out.
    kept = [m for m in near if m in left]
    if not kept:
        return "undetermined", (), f"{known}; {_nearest(labels, scores, own, left)}"
    walked = _undominated(_walked(kept, path), path.scores, np.array(True))
    kept = _smaller(walked or kept, labels)
    candidates = tuple(labels[m] for m in kept)
    best = max(kept, key=lambda m: scores.r2[m, own])
    number = f"R² {scores.r2[best, own]:.4f} ± {scores.r2_sem[best, own]:.1g}"
    tie = " and ".join(candidates)
    if len(candidates) == 1 and (walked or not members[best].has_path):
        return candidates[0], candidates, f"{known}; {tie} at {number}"
    if "ridge_like" in candidates and set(candidates) <= ALIKE:
        return "ridge_like", candidates, f"{known}; {tie} tie at {number}, the path is open"
    if not walked:
        return "undetermined", candidates, f"{known}; {tie} at {number}, but not layer by layer"
    return "undetermined", candidates, f"{known}; {tie} tie at {number}"


def _smaller(left: Sequence[int], labels: Sequence[str]) -> list[int]:
    """Without those that contain another that ties with them."""
    nested = SMALLER in [labels[m] for m in left]
    return [m for m in left if not (nested and labels[m] in LARGER)]


def _walked(left: Sequence[int], path: _Path) -> list[int]:
    """Members that explain what is read after every layer."""
    if not path.answered:
        return []
    least = np.nan_to_num(path.scores.r2, nan=-np.inf).min(1)
    return [m for m in left if least[m] >= EXPLAINED]


def _nearest(labels: Sequence[str], scores: _Scores, own: int, left: Sequence[int]) -> str:
    """Which member comes nearest, of those left and of all."""
    if not np.isfinite(scores.r2[:, own]).all():
        return f"none has an R² of {NEAR}"
    said = []
    for which, members in (("left", left), ("of all", range(len(labels)))):
        if members:
            best = max(members, key=lambda m: scores.r2[m, own])
            r2, sem = scores.r2[best, own], scores.r2_sem[best, own]
            said.append(f"nearest {which}: {labels[best]} (R² {r2:.3f} ± {sem:.1g})")
    return f"none that has these properties explains the model, {', '.join(said)}"


def _fails(tests: Mapping[str, _Test], start: str) -> bool:
    """Whether one of the tests of a property fails."""
    return any(test.answer == "no" for name, test in tests.items() if name.startswith(start))


def _better(scores: _Scores, columns: np.ndarray) -> Bool[np.ndarray, "member member"]:
    """Whether the first member is clearly nearer to the model than the second, in some column."""
    limit = np.maximum(TIE, 2 * scores.difference_sem)
    return ((scores.difference > limit) & columns).any(2)


def _undominated(left: Sequence[int], scores: _Scores, columns: np.ndarray) -> list[int]:
    """Without those that another is nearer than in some column, and further than in none."""
    better = _better(scores, columns)
    return [m for m in left if not any(better[o, m] and not better[m, o] for o in left)]
