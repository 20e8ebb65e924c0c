"""Figure of README and docs/response.md: what four shipped models do with their prompts; docs/response.svg.

python -m analyses.response.figure    (needs a browser)
"""

from analyses.lib.measured import ROOT, checkpoint
from mechinterp import response

MODELS = {
    "softmax-h2-s0": "two softmax heads",
    "garg-tiny-s0": "a GPT-2",
    "sparse-h4-noise0.1-s0": "trained on sparse tasks",
    "pool-linear-m16-s0": "trained on 16 tasks",
}
WIDTH, HEIGHT = 1000, 860


def main() -> None:
    first, *others = (response(checkpoint(name)) for name in MODELS)
    figure = first.plot(beside=others, names=list(MODELS.values()))
    # A white ground, so that the file reads on a dark page too.
    figure.update_layout(title=None, width=WIDTH, height=HEIGHT, paper_bgcolor="white")
    figure.update_layout(margin={"t": 40, "l": 60, "r": 10, "b": 40}, font_size=14)
    figure.write_image(ROOT / "docs" / "response.svg")


if __name__ == "__main__":
    main()
