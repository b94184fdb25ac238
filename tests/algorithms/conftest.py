"""What tests of algorithms share."""

import pytest


@pytest.fixture
def wide_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where BLAS uses all of the processor, whichever this one is."""
    monkeypatch.setattr("mucudnn.algorithms.compiled.offers.has_narrow_products", lambda: False)
