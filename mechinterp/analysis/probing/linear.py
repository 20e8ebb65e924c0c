"""Ridge regression with held-out predictions: the probe behind every linear read-out."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from mechinterp.analysis.stats import FOLDS, loss_and_r2, require_finite

PROBE_PENALTIES = (1e-8, 1e-6, 1e-4, 1e-2, 1e-1, 1.0)
"""Penalties that are tried, in units of the features' mean square."""


@dataclass(frozen=True, eq=False)
class HeldOut:
    """Ridge predictions for held-out prompts."""

    prediction: Float[np.ndarray, "prompt target"]
    target: Float[np.ndarray, "prompt target"]
    """Target that the regression was fitted to."""
    penalty: float
    """Penalty with the smallest held-out error, in units of the features' mean square."""
    root: Float[np.ndarray, "prompt feature"]
    """Root U of the hat matrix U U^T of a fit to all prompts."""
    freedom: float
    """Degrees of freedom of that fit: sum of the squared entries of its hat matrix."""

    def scores(
        self, clean: Float[np.ndarray, "prompt target"]
    ) -> tuple[float, float, float, float]:
        """Mean squared error and R² against a target without noise, each with its standard error.

        Both errors are over prompts and over the fit.
        """
        loss, loss_sem, r2, r2_sem = loss_and_r2(self.prediction, clean)
        fit, size = self.fit_sem(clean), np.square(clean).mean()
        relative = fit / size if size else np.nan  # a target of zeros has no R²
        return loss, float(np.hypot(loss_sem, fit)), r2, float(np.hypot(r2_sem, relative))

    def fit_sem(self, clean: Float[np.ndarray, "prompt target"]) -> float:
        """Standard deviation of the mean squared error over samples that is due to the fit."""
        # Let e = target - clean be noise, and d the part of the clean target that no linear map explains. With the hat
        # matrix h, a fit to the other prompts moves prediction i by sum_j h_ij (d_j + e_j). That adds to the sum of the
        # squared errors (d_i - move_i)^2, because h is a projection,
        #     sum_ij h_ij [(d_i + e_i)(d_j + e_j) - 2 d_i (d_j + e_j)] = sum_ij h_ij (e_i e_j - d_i d_j).
        # Different pairs i < j are uncorrelated, and so are pairs and the d_i^2, whose spread over prompts is counted
        # separately. The sum over pairs has the variance 2 sum_ij h_ij^2 (e_i^2 e_j^2 + d_i^2 d_j^2), and with
        # h = U U^T sum_ij h_ij^2 d_i^2 d_j^2 is the squared norm of U^T diag(d^2) U. One n of 1 / n^2 becomes n - p, the
        # degrees of freedom p, so that least squares is exact if d is the same for all prompts:
        # RSS n / (n - p)^2 has the relative variance 2 / (n - p) = 2 / n + 2 p / (n (n - p)).
        n_prompts, n_targets = clean.shape
        left = max(n_prompts - self.freedom, 1.0)
        pairs = self._pairs(self.target - clean) + self._pairs(self.prediction - clean)
        return float(np.sqrt(2 * pairs / (n_prompts * left)) / n_targets)

    def _pairs(self, values: Float[np.ndarray, "prompt target"]) -> float:
        """sum_ij h_ij^2 (v_i v_j)^2, v_i v_j being an inner product over targets."""
        sizes = np.square(values).sum(1)
        if not sizes.any():
            return 0.0
        # Inner products are taken as spread over the angles between targets as the covariance of all prompts says.
        spread = np.square(values.T @ values).sum() / sizes.sum() ** 2
        return float(spread * np.square(self.root.T @ (self.root * sizes[:, None])).sum())


def cross_validated_probe(
    features: Float[np.ndarray, "prompt feature"], *targets: Float[np.ndarray, "prompt _"]
) -> list[HeldOut]:
    """Ridge predictions of each target: each fifth of the prompts is predicted from the other four.

    With fewer prompts than features, a large penalty wins.

    Raises:
        ValueError: If a feature is not finite.
    """
    require_finite(features)
    fold_of, together = np.arange(len(features)) % FOLDS, np.hstack(targets)
    predictions = np.zeros((len(PROBE_PENALTIES), *together.shape))
    for fold in range(FOLDS):
        seen, unseen = fold_of != fold, fold_of == fold
        for row, weights in enumerate(fit_ridge(features[seen], together[seen])):
            predictions[row, unseen] = features[unseen] @ weights[:-1] + weights[-1]
    centred = features - features.mean(0)
    values, vectors, size = _decomposed(centred)
    ends, held_out = np.cumsum([target.shape[1] for target in targets]), []
    for target, predicted in zip(targets, np.split(predictions, ends[:-1], axis=2), strict=True):
        best = int(np.square(predicted - target).mean((1, 2)).argmin())
        sizes = values + PROBE_PENALTIES[best] * size
        freedom = float(np.square(values / sizes).sum())
        root = centred @ vectors / np.sqrt(sizes)
        held_out.append(HeldOut(predicted[best], target, PROBE_PENALTIES[best], root, freedom))
    return held_out


def fit_ridge(
    features: Float[np.ndarray, "row feature"], targets: Float[np.ndarray, "row target"]
) -> list[Float[np.ndarray, "feature_and_one target"]]:
    """Weights for each of `PROBE_PENALTIES`, with the constant in the last row; penalties are in units of
    the features' mean square.

    Example:
        >>> x = np.array([[0.0], [1.0], [2.0]])
        >>> fit_ridge(x, 3 * x + 1)[0].round(6).tolist()
        [[3.0], [1.0]]
    """
    centre, level = features.mean(0), targets.mean(0)
    # One decomposition serves all penalties.
    values, vectors, size = _decomposed(features - centre)
    moments = vectors.T @ ((features - centre).T @ (targets - level))
    fits = []
    for penalty in PROBE_PENALTIES:
        weights = vectors @ (moments / (values + penalty * size)[:, None])
        fits.append(np.vstack([weights, level - centre @ weights]))
    return fits


def _decomposed(
    centred: Float[np.ndarray, "row feature"],
) -> tuple[Float[np.ndarray, " feature"], Float[np.ndarray, "feature feature"], float]:
    """Eigenvalues and eigenvectors of the Gram matrix of centred features, and the mean eigenvalue,
    the unit of penalties."""
    values, vectors = np.linalg.eigh(centred.T @ centred)
    return values.clip(min=0), vectors, max(float(values.mean()), np.finfo(float).tiny)
