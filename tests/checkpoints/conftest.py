"""Fixtures of the tests that classify what they have read."""

from collections.abc import Iterator

import pytest

from mechinterp.analysis.circuits import null


@pytest.fixture(scope="module")
def small_null() -> Iterator[None]:
    """As few random models as a p-value below 0.01 needs: no label here hangs on more."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(null, "MODELS", (100, 100))
        patch.setattr(null, "N_PROMPTS", 128)
        null.null_of.cache_clear()
        yield
    null.null_of.cache_clear()
