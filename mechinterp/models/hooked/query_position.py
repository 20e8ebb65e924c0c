"""Position of the query in the stream of a hooked model, found by experiment where it is not stated."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from mechinterp.icl.prompts import Prompts
from mechinterp.models.hooked.masks import Hooks
from mechinterp.models.hooked.runner import HookedPredictor

SMALL = 1e-5
"""A change below this fraction of the largest change of a prediction counts as zero."""
_PASSED = 1e-3
"""With the stream fixed, a change of the prediction up to this fraction of its change by other inputs counts as zero."""


class NoStreamError(ValueError):
    """The layers' outputs are not the residual stream, or the query's position in it is unknown."""


@torch.no_grad()
def query_positions(hooked: HookedPredictor, prompts: Prompts) -> list[int]:
    """Position of the query in the stream before each layer and after the last; -1 is the last position.

    After the last layer it is `hooked.position` or, if that is None, the position at which the prediction is read. Other
    streams of the same length have the query at the same position; streams as long as the input have it last.

    Raises:
        NoStreamError: If the prediction depends on more than the last layer's output, or if the query's position is unknown
            in a stream that is not as long as the input.
        ValueError: If a given position lies outside the stream.
    """
    names = [hooked.stream_name(layer) for layer in range(hooked.n_layers + 1)]
    if hooked.position == -1:
        return [-1] * len(names)
    inputs = hooked.inputs(prompts[:1])
    _, streams = hooked.activations(prompts[:1], names)
    _require_whole(hooked, inputs, streams[-1])
    lengths, n_inputs = [stream.shape[1] for stream in streams], inputs.shape[1]
    longest = lengths[-1] if lengths[-1] > 1 else max(lengths)
    place = hooked.position
    if place is None and lengths[-1] > 1:
        place = _read_position(hooked, inputs, streams[-1])
    if place is not None and not -longest <= place < longest:
        raise ValueError(f"position must lie in 0 to {longest - 1}, got {place}.")
    known = {n_inputs: -1, 1: -1}  # a stream with one position holds the query only
    if place is not None:
        known[longest] = -1 if place % longest == longest - 1 else place % longest
    for length in lengths:
        if length not in known:
            raise NoStreamError(
                f"position must be given to hook_module: the stream has {length} positions where the input has {n_inputs}, "
                "and the prediction is not read at one of them alone."
                if length == longest
                else f"The stream must have one length in all layers, or that of the input, {n_inputs}, got {length} and {longest}."
            )
    return [known[length] for length in lengths]


def _require_whole(hooked: HookedPredictor, inputs: Tensor, stream: Tensor) -> None:
    """Refuse a module whose prediction does not follow from the output of its last layer.

    Other inputs with the last layer's output fixed must give the same prediction. They do not if something bypasses the
    layers, such as the first stream that the read-out gets, too.

    Raises:
        NoStreamError: If the prediction changes.
    """
    if not decides(hooked, inputs, hooked.n_layers, stream):
        raise NoStreamError(
            "The stream must pass through the layers, but the prediction depends on more than the output of the last one, and no "
            "sum outside the layers decides it; make each layer, with all that bypasses its attention, a module of its own."
        )


@torch.no_grad()
def decides(hooked: HookedPredictor, inputs: Tensor, layer: int, stream: Tensor) -> bool:
    """True if the prediction follows from the stream after this number of layers: with the stream of these inputs, other
    inputs give the same prediction."""
    others = inputs + _noise_like(inputs, inputs.shape)
    fixed: Hooks = [(hooked.stream_name(layer), lambda values, hook: stream)]
    own = hooked.read(hooked.model(inputs))
    kept = hooked.read(hooked.run(others, fixed))
    moved = (hooked.read(hooked.model(others)) - own).abs().max()
    return bool((kept - own).abs().max() <= _PASSED * moved)


def _read_position(
    hooked: HookedPredictor, inputs: Float[Tensor, "1 pos width"], stream: Tensor
) -> int | None:
    """Position after the last layer on which the prediction depends; None if there are none or several."""
    groups = _groups(stream.shape[1]).to(stream.device)
    noise = _noise_like(stream, stream.shape[1:])

    def move(stream: Tensor, hook: object) -> Tensor:
        return stream + groups[..., None] * noise

    name = hooked.stream_name(hooked.n_layers)
    copies = inputs.repeat(len(groups), *[1] * (inputs.ndim - 1))
    moved = hooked.read(hooked.run(copies, [(name, move)]))
    changes = (moved - hooked.read(hooked.model(copies))).abs().amax(1)
    ones, zeros = (changes > SMALL * changes.max()).unflatten(0, (-1, 2)).T.tolist()
    if any(one == zero for one, zero in zip(ones, zeros, strict=True)):
        return None
    return sum(2**digit for digit, one in enumerate(ones) if one)


def _noise_like(values: Tensor, shape: torch.Size) -> Tensor:
    """Gaussian noise with the root mean square of the values, from a fixed seed."""
    size = values.float().square().mean().sqrt().item() or 1.0
    generator = torch.Generator(device="cpu").manual_seed(0)
    return (size * torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")).to(
        values
    )


def _groups(n_pos: int) -> Bool[Tensor, "group pos"]:
    """Groups of positions: for each binary digit, the positions where it is 1, then those where it is 0.

    Each position is in exactly one group of every pair, and any two positions are separated by some pair.
    """
    digits = torch.arange((n_pos - 1).bit_length(), device="cpu")
    ones = (torch.arange(n_pos, device="cpu") >> digits[:, None]) % 2 == 1
    return torch.stack([ones, ~ones], dim=1).flatten(0, 1)
