"""Rounds of speculation take equally long in these tests: the longest drafts are best, whatever the machine does."""

import itertools

import pytest

from comet.generation.speculation import Speculation


@pytest.fixture(autouse=True)
def rounds_take_equally_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Speculation.__init__, "__defaults__", (itertools.count().__next__,))
