"""Circuits of heads of one layer and of several; read off built models, and TransformerLens'."""

import numpy as np
import pytest
import torch

from mechinterp import circuits
from mechinterp.models.constructions.descent import gradient_descent_model, rotated
from mechinterp.models.constructions.one_layer import diagonal_heads, one_layer
from mechinterp.models.weights import Weights
from tests.conftest import refused
from tests.deep_models import WIDE, random_gpt2, random_model


def weights_with_circuits(QK: np.ndarray, OV: np.ndarray, scale: float = 0.5) -> Weights:
    """Weights whose circuits are given, split in a way that hides them."""
    heads, d_model, _ = QK.shape
    generator = torch.Generator().manual_seed(0)
    mix = torch.randn(heads, d_model, d_model, dtype=torch.float64, generator=generator)
    mix = 3.0 * torch.linalg.qr(mix)[0]  # W_Q A, W_K A^-T
    return one_layer(
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
    block = 0.3**2 + 0.5**2
    for name, expected in {
        "QK": QK,
        "OV": OV,
        "omega": [[0.3, 0.5]],
        "omega_mean": [0.4],
        "mu": [[2.0]],
        "qk_diagonal": [(block / (block + 0.04**2 + 0.05**2)) ** 0.5],
        "qk_off_diagonal": [0.05],
        "qk_y_leak": [0.03],
        "ov_last_entry": [2 / (4 + 0.0001 + 0.0004) ** 0.5],
        "ov_x_leak": [0.02],
        "qk_norm": [np.linalg.norm(QK)],
        "ov_rank": [1],
        "ov_read": [1],
    }.items():
        np.testing.assert_allclose(getattr(found, name)[0], expected, rtol=1e-11, err_msg=name)


def test_a_zero_head_has_zero_circuits_and_no_nan():
    found = circuits(diagonal_heads([0.0], [0.0], d_x=3))
    for name in ("QK", "OV", "qk_diagonal", "ov_last_entry", "ov_read"):
        assert not getattr(found, name).any(), name


def test_two_responses_give_two_mu():
    found = circuits(diagonal_heads([0.2], [1.5], d_x=2, d_y=2))
    np.testing.assert_allclose(found.mu, [[[1.5, 1.5]]])
    columns = ["layer", "head", "omega_mean", "omega_0", "omega_1", "mu_0", "mu_1"]
    assert list(found.to_frame().columns[:7]) == columns


def test_circuits_of_gradient_descent_are_those_it_was_built_of():
    etas = [0.5, 0.25, 0.125]
    built = gradient_descent_model(etas, d_x=4)
    # In another basis of the stream the weights are others; in coordinates of tokens nothing changes.
    for weights in (built, rotated(built, seed=1)):
        found = circuits(weights)
        block = np.zeros((5, 5))
        block[:4, :4] = np.eye(4)
        np.testing.assert_allclose(found.QK, np.broadcast_to(block, (3, 1, 5, 5)), atol=1e-14)
        # Each writes -eta y into the y slot, of which the prediction is minus the end.
        np.testing.assert_allclose(found.mu[:, 0, 0], etas, rtol=1e-12)
        np.testing.assert_allclose(found.omega, 1, rtol=1e-12)
        np.testing.assert_allclose(found.OV[:, 0, :4], 0, atol=1e-14)
        frame = found.to_frame()
        np.testing.assert_allclose(frame["qk_rank"], 4, rtol=1e-12)
        np.testing.assert_allclose(frame["ov_rank"], 1, rtol=1e-12)
        np.testing.assert_allclose(frame["ov_read"], 1, rtol=1e-12)
        assert found.coordinates == ("x0", "x1", "x2", "x3", "y")


def test_circuits_through_a_read_in_and_read_out_are_products_of_the_weights():
    model = random_model(**WIDE)
    found = circuits(model)
    W_in, W_U = model.weights.tensors["W_in"], model.W_U
    scale, W_Q, W_K = model.weights.scale, model.W_Q[1, 2], model.W_K[1, 2]
    expected = scale * (W_in @ W_Q) @ (W_in @ W_K).mT
    np.testing.assert_allclose(found.QK[1, 2], expected.numpy(force=True), rtol=1e-10, atol=1e-12)
    written = W_in @ model.W_V[1, 2] @ model.W_O[1, 2] @ W_U
    np.testing.assert_allclose(found.OV[1, 2], written.numpy(force=True), rtol=1e-10, atol=1e-12)
    assert not found.of_weights_alone


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ({"norm": "before", "d_model": 8, "d_head": 4}, "layer norms"),
        ({"layout": "in_turn", "d_model": 8, "d_head": 4}, "x and y in turn"),
    ],
)
def test_where_tokens_do_not_pass_circuits_are_of_the_weights_alone(kind: dict, reason: str):
    model = random_model(**kind)
    found = circuits(model)
    assert found.of_weights_alone == reason
    expected = model.weights.scale * model.W_Q[2, 1] @ model.W_K[2, 1].mT
    np.testing.assert_allclose(found.QK[2, 1], expected.numpy(force=True), rtol=1e-12)
    np.testing.assert_allclose(
        found.OV[2, 1], (model.W_V @ model.W_O)[2, 1].numpy(force=True), rtol=1e-12
    )
    assert "omega_mean" not in found.to_frame()


@pytest.mark.parametrize("width", [4, 8])
def test_a_stream_as_narrow_as_x_or_narrower_has_circuits(width: int):
    sizes = {"d_x": 8, "d_y": 2}
    model = random_model(2, 2, sizes=sizes, d_model=width, d_head=2, norm="before", d_mlp=8)
    found = circuits(model)
    assert found.QK.shape == found.OV.shape == (2, 2, width, width)
    assert (found.omega.shape, found.mu.shape) == ((2, 2, 8), (2, 2, 2))
    assert np.isnan(found.omega).all()
    assert np.isnan(found.qk_diagonal).all()
    assert np.isfinite(found.qk_norm).all()
    assert len(found.to_frame()) == 4
    found.plot()


def test_colours_of_circuits_in_the_stream_end_where_most_entries_lie():
    found = circuits(random_model(context_only=True, d_head=2, norm="before"))
    assert found.of_weights_alone
    trace = found.plot_qk().frames[0].data[0]
    assert trace.zmax == pytest.approx(np.quantile(np.abs(found.QK[0]), 0.99))


def test_a_figure_has_a_frame_for_each_layer_on_a_scale_of_its_own():
    found = circuits(random_model(**WIDE))
    for figure, values in ((found.plot_qk(), found.QK), (found.plot_ov(), found.OV.swapaxes(2, 3))):
        for layer, frame in enumerate(figure.frames):
            assert {trace.zmax for trace in frame.data} == {np.abs(values[layer]).max()}
            np.testing.assert_allclose(frame.data[3].z, values[layer, 3], atol=1e-6)


def test_what_has_no_weights_is_refused():
    with refused("circuits", "weights by name"):
        circuits(random_gpt2())
