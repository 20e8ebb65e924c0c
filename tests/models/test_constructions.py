"""Models built by hand do what they are named for."""

import pytest
import torch
from torch.nn.functional import pad

from mechinterp.icl.prompts import Prompts
from mechinterp.models.constructions.one_layer import (
    debiased_gradient_step,
    diagonal_heads,
    kernel_head,
    zero_head,
)
from mechinterp.models.heads import head_outputs, predict


def debiased_gd(prompts: Prompts, eta: float) -> torch.Tensor:
    """(eta/L) sum_l y_l <x_l - mean x, x_query>, a He et al. eq. (4.10)."""
    centred = prompts.x - prompts.x.mean(1, keepdim=True)
    weight = (centred * prompts.x_query[:, None]).sum(-1)
    return eta * (prompts.y * weight[..., None]).mean(1)


@pytest.mark.parametrize("d_y", [1, 2])
def test_diagonal_heads_have_the_circuits_asked_for(d_y: int):
    heads = diagonal_heads([0.1, -0.2], [3.0, -4.0], d_x=3, d_y=d_y)
    assert heads.W_Q.dtype == torch.float64
    on_x, on_y = torch.eye(3).double(), torch.eye(d_y).double()
    for h, (omega, mu) in enumerate([(0.1, 3.0), (-0.2, -4.0)]):
        QK, OV = pad(omega * on_x, (0, d_y, 0, d_y)), pad(mu * on_y, (0, 0, 3, 0))
        torch.testing.assert_close(heads.QK[h], QK, rtol=1e-12, atol=0)
        torch.testing.assert_close(heads.OV[h], OV, rtol=1e-12, atol=0)
    assert heads.scale == (3 + d_y) ** -0.5


def test_heads_do_not_share_memory():
    heads = diagonal_heads([0.1, 0.2], [1.0, 1.0], d_x=2)
    for weight in (heads.W_Q, heads.W_K, heads.W_V, heads.W_O):
        weight[0] = 9.0
        assert weight[1].max() < 9


def test_a_pair_of_heads_tends_to_debiased_gradient_descent(prompts: Prompts):
    expected = debiased_gd(prompts, 0.88)

    def error(omega: float) -> float:
        model = debiased_gradient_step(0.88, omega, d_x=5)
        return (predict(model, prompts) - expected).square().mean().sqrt().item()

    assert error(1e-3) < 1e-5
    # The error is of order omega^2: half of omega is a quarter of it.
    assert error(0.02) / error(0.01) == pytest.approx(4, rel=0.02)


def test_a_kernel_head_is_the_kernel_average(prompts: Prompts):
    kernel = torch.exp(0.5 * torch.einsum("bld,bd->bl", prompts.x, prompts.x_query))
    average = (kernel[..., None] * prompts.y).sum(1) / kernel.sum(1, keepdim=True)
    actual = predict(kernel_head(omega=0.5, mu=1.5, d_x=5), prompts)
    torch.testing.assert_close(actual, 1.5 * average, rtol=1e-11, atol=1e-13)


def test_a_zero_head_writes_nothing(prompts: Prompts):
    head = zero_head(d_x=5)
    assert head_outputs(head, prompts).abs().max() == 0
    assert head.QK.abs().max() == 0


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="omega and mu must have one entry per head, got 2 and 1"):
        diagonal_heads([0.1, 0.2], [1.0], d_x=2)
    for omega in (0.0, -0.1):
        with pytest.raises(ValueError, match=rf"omega must be > 0, got {omega}"):
            debiased_gradient_step(0.88, omega, d_x=2)
