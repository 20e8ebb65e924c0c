"""Writes docs/prompt.svg: a prompt, the circuits of a trained model of two heads, and the formula that they carry out.

python docs/picture.py
"""

from html import escape
from pathlib import Path

import numpy as np

from mechinterp import circuits, classify, load, sample_prompts

FILE = Path(__file__).parent / "prompt.svg"
WIDTH, HEIGHT, CELL = 1040, 285, 22
# Blue and vermilion, which colour-blind readers can tell apart.
POSITIVE, NEGATIVE = (0, 114, 178), (213, 94, 0)
SHOWN = 5
"""Pairs of the prompt that are drawn before the dots."""


def colour(value: float, largest: float) -> str:
    """White at 0, blue above, vermilion below."""
    part = min(abs(value) / largest, 1.0)
    end = POSITIVE if value > 0 else NEGATIVE
    return "rgb({},{},{})".format(*(round(255 + part * (one - 255)) for one in end))


def cells(values: np.ndarray, x: float, y: float, largest: float) -> list[str]:
    """A matrix as coloured squares with its upper left corner at (x, y)."""
    return [
        f'<rect x="{x + CELL * column:g}" y="{y + CELL * row:g}" width="{CELL}" height="{CELL}" '
        f'fill="{colour(value, largest)}" stroke="#bbb"/>'
        for (row, column), value in np.ndenumerate(values)
    ]


def text(words: str, x: float, y: float, style: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" {style}>{escape(words)}</text>'


BOLD, MIDDLE, SMALL = 'font-weight="bold"', 'text-anchor="middle"', 'font-size="12" fill="#555"'


def prompt(x: float, y: float) -> list[str]:
    """The first pairs of a prompt, and its query."""
    drawn = sample_prompts(load("checkpoints/softmax-h2-s0").config.task, 1, seed=0)
    pairs = np.concatenate([drawn.x[0].numpy(), drawn.y[0].numpy()], axis=1)
    query = np.append(drawn.x_query[0].numpy(), 0.0)
    rows = cells(pairs[:SHOWN], x, y, 2.5) + cells(query[None], x, y + CELL * (SHOWN + 1), 2.5)
    length = len(pairs)
    right = 'text-anchor="end" font-size="12"'
    labels = [
        text(f"(x{n}, y{n})", x - 12, y + CELL * (n - 0.3), right) for n in range(1, SHOWN + 1)
    ]
    return [
        text(f"A prompt: {length} pairs and a query", x - 58, y - 38, BOLD),
        text("x", x + CELL * 2.5, y - 8, MIDDLE),
        text("y", x + CELL * 5.5, y - 8, MIDDLE),
        *(*rows, *labels),
        text("⋮", x + CELL * 3, y + CELL * (SHOWN + 0.75), MIDDLE),
        text("query", x - 12, y + CELL * (SHOWN + 1.7), right),
        text("?", x + CELL * 5.5, y + CELL * (SHOWN + 1.75), f"{MIDDLE} {BOLD}"),
    ]


def heads(x: float, y: float) -> list[str]:
    """QK and OV of both heads."""
    found = circuits(load("checkpoints/softmax-h2-s0"))
    lines = [text("The circuits of two heads", x, y - 38, BOLD)]
    for head, left in ((0, x), (1, x + 225)):
        qk, ov = found.QK[0, head], found.OV[0, head]
        omega, mu = np.diag(qk)[:-1].mean(), ov[-1, 0]
        lines += [
            text(f"QK of head {head}", left, y - 8, SMALL),
            text("OV", left + CELL * 7, y - 8, SMALL),
        ]
        lines += cells(qk, left, y, 0.15) + cells(ov, left + CELL * 7, y, 4.0)
        lines.append(text(f"ω = {omega:+.2f}".replace("-", "−"), left, y + CELL * 6.9))
        lines.append(text(f"μ = {mu:+.2f}".replace("-", "−"), left + CELL * 5.6, y + CELL * 6.9))
    below = (
        "QK is ω on its diagonal: a head looks for similar x. Its last row meets the query's y, which is 0.",
        "OV is μ at y: a head adds the y that it finds, times μ.",
    )
    return [
        *lines,
        *(text(line, x, y + CELL * (8 + n * 0.85), SMALL) for n, line in enumerate(below)),
    ]


def formula(x: float, y: float) -> list[str]:
    """What the heads compute together."""
    verdict = classify(load("checkpoints/softmax-h2-s0"), seed=0)
    step = float(verdict.scales.eta[0])
    words = (
        "One step of gradient descent",
        "on the pairs of the prompt, with",
        "the mean of x removed.",
        "",
        f"It explains R² = {verdict.learner.r2:.4f}",
        "of the model's predictions.",
    )
    return [
        text("What the model computes", x, y - 38, BOLD),
        text(f"ŷ = {step:.3f} · (1/L) Σₗ yₗ ⟨xₗ − x̄, x⟩", x, y + 14, 'font-size="16"'),
        *(text(line, x, y + 46 + 18 * n) for n, line in enumerate(words) if line),
    ]


def main() -> None:
    lines = [*prompt(80, 72), *heads(300, 72), *formula(765, 72)]
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="14" role="img">'
        "<title>A prompt, the circuits of a trained model of two heads, and its formula</title>"
        '<rect width="100%" height="100%" fill="white"/>'
    )
    FILE.write_text("\n".join([head, *lines, "</svg>"]) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
