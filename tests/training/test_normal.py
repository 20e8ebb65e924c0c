"""Compiled normal numbers have the bits of torch's, whatever the size, and leave the generator in the same state."""

import numpy as np
import pytest
import torch

from mechinterp.config import override
from mechinterp.presets import preset
from mechinterp.training import normal
from mechinterp.training.normal import GROUP, STATE_WORDS, normal_numbers
from mechinterp.training.one_layer.step import Pack

ON_VECTORS = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
RELEASE = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
pytestmark = pytest.mark.skipif(
    not ON_VECTORS or RELEASE != (2, 13),
    reason="the order of operations is that of torch 2.13 on AVX2; elsewhere torch may draw",
)
FIRST, UNIFORM = 24, 2**24
"""Byte of a state's first word; how many uniform numbers there are."""


def pair_of_generators(seed: int) -> tuple[torch.Generator, torch.Generator]:
    first, second = (torch.Generator().manual_seed(seed) for _ in range(2))
    return first, second


@pytest.mark.parametrize("size", [1, 15, 16, 17, 31, 32, 100, 623, 624, 625, 640, 1249, 10_007])
def test_numbers_and_state_are_those_of_torch(size: int):
    ours, torchs = pair_of_generators(size)
    for _ in range(3):
        expected = torch.empty(size).normal_(generator=torchs)
        assert torch.equal(normal_numbers(size, ours), expected)
        assert torch.equal(ours.get_state(), torchs.get_state())
    assert torch.equal(torch.rand(3, generator=ours), torch.rand(3, generator=torchs))


def test_a_generator_that_has_drawn_goes_on_where_it_was():
    ours, torchs = pair_of_generators(1)
    for generator in (ours, torchs):
        torch.randint(7, (5,), generator=generator)
    assert torch.equal(normal_numbers(99, ours), torch.empty(99).normal_(generator=torchs))


def untempered(words: np.ndarray) -> np.ndarray:
    """States of the Mersenne Twister that give these words: the steps of its tempering, undone in turn."""
    y = words.astype(np.uint32)
    y ^= y >> 18
    y ^= (y << 15) & np.uint32(0xEFC60000)
    found = y.copy()
    for _ in range(5):  # each round finds 7 further bits
        found = y ^ ((found << 7) & np.uint32(0x9D2C5680))
    y = found.copy()
    for _ in range(3):  # 11 further bits
        found = y ^ (found >> 11)
    return found


def set_words(generator: torch.Generator, words: np.ndarray) -> None:
    """Let the generator give these words next, at most WORDS - GROUP of them."""
    state = generator.get_state().numpy().copy()
    at = STATE_WORDS - len(words)
    state[8:12] = np.array([STATE_WORDS + 1 - at], np.uint32).view(np.uint8)
    state[16:24] = np.array([at], np.uint64).view(np.uint8)
    inner = state[FIRST : FIRST + 8 * STATE_WORDS].view(np.uint64)
    inner[at:] = untempered(words)
    generator.set_state(torch.from_numpy(state))


def drawn(radii: np.ndarray, angles: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Normal numbers of chosen uniform numbers (in units of 2^-24), by torch and by us."""
    words = np.stack([radii.reshape(-1, 8), angles.reshape(-1, 8)], 1).ravel()
    ours, torchs = pair_of_generators(0)
    for generator in (ours, torchs):
        set_words(generator, words)
    numbers = normal_numbers(len(words), ours).numpy()
    return torch.empty(len(words)).normal_(generator=torchs).numpy(), numbers


def test_the_compiled_transform_is_used():
    assert normal._has_the_bits_of_torch()


def test_chosen_numbers_are_those_of_the_transform():
    radii, angles = np.arange(8) * 2**20 + 5, np.arange(8) * 2**21
    expected, found = drawn(radii, angles)
    u, theta = radii / UNIFORM, 2 * np.pi * angles / UNIFORM
    exact = np.sqrt(-2 * np.log1p(-u)) * np.stack([np.cos(theta), np.sin(theta)])
    np.testing.assert_allclose(found, exact.ravel(), atol=1e-6)
    np.testing.assert_array_equal(found, expected)


def assert_equal_for(radii: np.ndarray, angles: np.ndarray) -> None:
    size = 8 * ((STATE_WORDS - GROUP) // GROUP)
    for start in range(0, len(radii), size):
        expected, found = drawn(radii[start : start + size], angles[start : start + size])
        np.testing.assert_array_equal(found, expected)


def radius_two() -> int:
    """Uniform number whose radius is exactly 2, so that a product with it has all bits of the sine or cosine."""
    candidates = round(UNIFORM * -np.expm1(-2)) + np.arange(-32, 32)
    _, found = drawn(candidates, np.zeros_like(candidates))
    return int(candidates[found.reshape(-1, 2, 8)[:, 0].ravel() == 2][0])


def assert_swept(part: str, sweep: np.ndarray) -> None:
    """Radii at angle 0, where the cosine is 1; angles at radius 2."""
    if part == "radii":
        assert_equal_for(sweep, np.zeros_like(sweep))
    else:
        assert_equal_for(np.full_like(sweep, radius_two()), sweep)


@pytest.mark.parametrize("part", ["radii", "angles"])
def test_a_sample_of_all_radii_and_angles_has_the_bits_of_torch(part: str):
    assert_swept(part, np.arange(0, UNIFORM, 257)[: 8 * 8000])


@pytest.mark.exhaustive
@pytest.mark.parametrize("part", ["radii", "angles"])
def test_all_radii_and_angles_have_the_bits_of_torch(part: str):
    assert_swept(part, np.arange(UNIFORM))


@pytest.mark.parametrize(
    "settings", [(), ("task.context_length=7",), ("task.n_tasks=8",), ("task.covariance.kind=kms",)]
)
def test_training_has_the_bits_of_torchs_draws(monkeypatch: pytest.MonkeyPatch, settings):
    config = override(preset("softmax-h2"), "train.steps=20", "train.n_eval_prompts=64", *settings)

    def weights() -> torch.Tensor:
        run = Pack({"": config})
        for step in range(20):
            run.update(step)
        return run.flat

    ours = weights()
    monkeypatch.setattr(normal, "_has_the_bits_of_torch", lambda: False)
    assert torch.equal(ours, weights())


def test_torch_draws_where_its_bits_differ(monkeypatch: pytest.MonkeyPatch):
    def others(size: int, generator: torch.Generator) -> torch.Tensor:
        numbers = torch.empty(size).normal_(generator=generator)
        numbers[-1] = torch.nextafter(numbers[-1], torch.tensor(9.0))
        return numbers

    monkeypatch.setattr(normal, "_compiled_numbers", others)
    monkeypatch.setattr(normal, "_has_the_bits_of_torch", normal._has_the_bits_of_torch.__wrapped__)
    ours, torchs = pair_of_generators(2)
    assert torch.equal(normal_numbers(32, ours), torch.empty(32).normal_(generator=torchs))
