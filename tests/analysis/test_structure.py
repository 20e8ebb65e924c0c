"""Equal heads, common matrices, metrics and rotations on cases with a known answer."""

import numpy as np
import pytest
import torch

from mechinterp.analysis.one_layer.label_rules import (
    Form,
    common_matrix,
    equal_heads,
    is_definite,
    rotation_angle,
    spread_over_heads,
)


def random_blocks(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(*shape, 4, 4, dtype=torch.float64, generator=generator)


def common(blocks: torch.Tensor, weight: torch.Tensor) -> Form:
    return Form("common", common_matrix(blocks, weight))


def test_a_common_matrix_is_found_with_its_factors():
    matrix = random_blocks(1)[0]
    matrix *= 2 / matrix.norm() * matrix.trace().sign()  # norm sqrt(4), trace >= 0
    scales = torch.tensor([0.3, -2.0, 0.01], dtype=torch.float64)
    blocks = scales[:, None, None] * matrix
    found = common(blocks, torch.ones(3).double())
    torch.testing.assert_close(found.matrix, matrix)
    torch.testing.assert_close(found.omega(blocks), scales[:, None].expand(3, 4))
    np.testing.assert_allclose(found.alignment(blocks), 1)


def test_the_common_matrix_explains_most_that_one_matrix_can():
    blocks, weight = random_blocks(5), torch.tensor([1.0, 2.0, 0.5, 1.0, 0.1]).double()
    found = common(blocks, weight)
    flat = blocks.flatten(1)
    rows = weight[:, None] * flat / flat.norm(dim=1, keepdim=True)
    largest = torch.linalg.svdvals(rows)[0]
    explained = np.linalg.norm(weight.numpy() * found.alignment(blocks))
    assert explained == pytest.approx(largest.item())


def test_many_models_are_read_as_one_by_one():
    blocks, weight = random_blocks(6, 3), torch.ones(6, 3).double()
    together = common_matrix(blocks, weight)
    for i in range(6):
        torch.testing.assert_close(together[i], common_matrix(blocks[i], weight[i]))


def test_zero_blocks_have_no_direction():
    zeros = torch.zeros(2, 3, 3).double()
    found = common(zeros, torch.ones(2).double())
    assert found.alignment(zeros).tolist() == [0, 0]
    assert not found.omega(zeros).any()
    blocks = torch.stack([torch.eye(3), torch.zeros(3, 3)]).double()
    mixed = common(blocks, torch.ones(2).double())
    assert mixed.alignment(blocks).tolist() == pytest.approx([1, 0])


def test_equal_heads_within_the_tolerance_and_through_others():
    base = random_blocks(1)[0]
    near, nearer, far = base * 1.04, base * 1.08, base * 1.3
    stack = torch.stack([base, far, nearer, near, -base])
    # base and nearer differ by more than 5%, but near is within 5% of both.
    assert equal_heads(stack, tolerance=0.05).tolist() == [0, 1, 0, 0, 2]
    assert equal_heads(stack, tolerance=0.001).tolist() == [0, 1, 2, 3, 4]
    zeros = torch.zeros(2, 2, 3)
    assert equal_heads(zeros, tolerance=0.05).tolist() == [0, 0]


@pytest.mark.parametrize(
    ("matrix", "expected"),
    [
        ([[2.0, 1.0], [1.0, 2.0]], True),
        ([[-2.0, 1.0], [1.0, -2.0]], True),
        ([[1.0, 2.0], [2.0, 1.0]], False),
        ([[1.0, 1.0], [-1.0, 1.0]], False),
        ([[1.0, 0.2], [-0.2, 1.0]], True),
        ([[0.0, 0.0], [0.0, 0.0]], False),
    ],
)
def test_a_metric_is_symmetric_and_definite(matrix: list[list[float]], expected: bool):
    assert is_definite(torch.tensor(matrix)) is expected


@pytest.mark.parametrize("degrees", [0.0, 30.0, 120.0])
def test_the_angle_of_a_rotation_of_any_size(degrees: float):
    c, s = np.cos(np.radians(degrees)), np.sin(np.radians(degrees))
    matrix = 0.7 * np.array([[c, -s, 0], [s, c, 0], [0, 0, 1]])
    assert rotation_angle(matrix) == pytest.approx(degrees, abs=1e-6)
    assert np.isnan(rotation_angle(matrix @ np.diag([1, 1, 2])))


def test_equal_heads_differ_little_relative_to_the_larger():
    blocks = torch.stack([torch.eye(3), 1.051 * torch.eye(3)])  # 0.051 / 1.051 is below 5%
    assert equal_heads(blocks, tolerance=0.05).tolist() == [0, 0]
    assert equal_heads(blocks, tolerance=0.048).tolist() == [0, 1]


@pytest.mark.parametrize("diagonal", [[1.0, 1.0, 0.5], [1.0, 1.0, -1.0], [-1.0, -1.0, -1.0]])
def test_what_squeezes_or_reflects_is_no_rotation(diagonal: list[float]):
    assert np.isnan(rotation_angle(np.diag(diagonal)))


def test_the_angle_of_a_double_rotation_is_the_larger_one():
    matrix = np.zeros((4, 4))
    for start, degrees in ((0, 30), (2, 90)):
        c, s = np.cos(np.radians(degrees)), np.sin(np.radians(degrees))
        matrix[start : start + 2, start : start + 2] = [[c, -s], [s, c]]
    assert rotation_angle(matrix) == pytest.approx(90)


def test_heads_of_other_responses_do_not_count_in_the_spread():
    sizes = torch.tensor([1.0, 1.2, 5.0, 6.5], dtype=torch.float64)
    mu = torch.tensor([[4.0, 0.9], [-4.0, 0.0], [0.5, 2.0], [0.0, -2.0]], dtype=torch.float64)
    assert spread_over_heads(sizes, mu, serving=0.25).item() == pytest.approx(0.3)
    # With leaks of 0.225 and 0.25 the first and third head serve both responses.
    assert spread_over_heads(sizes, mu, serving=0.2).item() == pytest.approx(5.5)
    both = spread_over_heads(sizes.expand(2, -1), torch.stack([mu, mu.flip(1)]), serving=0.25)
    assert both.tolist() == pytest.approx([0.3, 0.3])
