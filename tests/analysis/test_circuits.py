"""Circuits of hand-built heads are read off exactly."""

import numpy as np
import plotly.graph_objects as go
import pytest
import torch

from mechinterp.analysis.one_layer.circuits import circuits
from mechinterp.models.constructions.one_layer import diagonal_heads
from mechinterp.models.heads import AttentionWeights


def weights_with_circuits(QK: np.ndarray, OV: np.ndarray, scale: float = 0.5) -> AttentionWeights:
    """Weights whose circuits are given, split in a way that hides them."""
    heads, d_model, _ = QK.shape
    generator = torch.Generator().manual_seed(0)
    mix = torch.randn(heads, d_model, d_model, dtype=torch.float64, generator=generator)
    mix = 3.0 * torch.linalg.qr(mix)[0]  # W_Q A, W_K A^-T
    return AttentionWeights(
        W_Q=torch.from_numpy(QK) @ mix / scale,
        W_K=torch.linalg.inv(mix).mT.contiguous(),
        W_V=mix,
        W_O=torch.linalg.inv(mix) @ torch.from_numpy(OV),
        scale=scale,
    )


def test_every_scalar_of_a_written_down_circuit():
    #            key x0   x1    y
    QK = np.array([[[0.3, 0.04, 0.02], [-0.05, 0.5, -0.03], [9.0, 9.0, 9.0]]])
    OV = np.array([[[0.01], [-0.02], [2.0]]])
    found = circuits(weights_with_circuits(QK, OV))
    np.testing.assert_allclose(found.QK, QK, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(found.OV, OV, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(found.omega, [[0.3, 0.5]], rtol=1e-12)
    np.testing.assert_allclose(found.omega_mean, [0.4], rtol=1e-12)
    np.testing.assert_allclose(found.mu, [[2.0]], rtol=1e-12)
    block = 0.3**2 + 0.5**2
    np.testing.assert_allclose(
        found.qk_diagonal, [(block / (block + 0.04**2 + 0.05**2)) ** 0.5], rtol=1e-12
    )
    np.testing.assert_allclose(found.qk_off_diagonal, [0.05], rtol=1e-11)
    np.testing.assert_allclose(found.qk_y_leak, [0.03], rtol=1e-11)
    np.testing.assert_allclose(found.ov_last_entry, [2 / (4 + 0.0001 + 0.0004) ** 0.5], rtol=1e-12)
    np.testing.assert_allclose(found.ov_x_leak, [0.02], rtol=1e-11)


def test_a_zero_head_has_zero_circuits_and_no_nan():
    found = circuits(diagonal_heads([0.0], [0.0], d_x=3))
    assert not found.QK.any()
    assert not found.OV.any()
    assert found.qk_diagonal[0] == found.ov_last_entry[0] == 0


def test_two_responses_give_two_mu():
    found = circuits(diagonal_heads([0.2], [1.5], d_x=2, d_y=2))
    np.testing.assert_allclose(found.mu, [[1.5, 1.5]])
    columns = ["head", "omega_mean", "omega_0", "omega_1", "mu_0", "mu_1"]
    assert list(found.to_frame().columns[:6]) == columns


@pytest.mark.slow
@pytest.mark.parametrize("n_heads", [1, 3, 8])
def test_frame_has_a_row_per_head_and_figures_a_heatmap_per_head(n_heads):
    found = circuits(diagonal_heads([0.1] * n_heads, [1.0] * n_heads, d_x=5))
    assert len(found.to_frame()) == n_heads
    for figure, kinds in ((found.plot(), 2), (found.plot_qk(), 1), (found.plot_ov(), 1)):
        assert isinstance(figure, go.Figure)
        assert sum(trace.type == "heatmap" for trace in figure.data) == kinds * n_heads
    assert np.asarray(found.plot().data[n_heads].z).shape == (1, 6)
    # The query's y slot is 0, so its row of QK is not drawn.
    assert np.asarray(found.plot().data[0].z).shape == (5, 6)
    assert np.asarray(found.plot_ov().data[0].z).shape == (1, 6)
    assert found.plot_ov().layout.height < 0.75 * found.plot().layout.height
