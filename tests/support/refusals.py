"""What the command line says of a mistake."""

from __future__ import annotations

import pytest
import torch

from comet.launch.cli import main

PREFIX = "comet: error: "


def refusal(captured: pytest.CaptureFixture[str], *words: str) -> str:
    """Why a command is refused on a machine without a GPU: all that it says, behind ``PREFIX``; its status is 2."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "device_count", lambda: 0)
        assert main(words) == 2
    out, err = captured.readouterr()
    assert (out, len(err.splitlines())) == ("", 1), err
    assert err.startswith(PREFIX), err
    return err.removeprefix(PREFIX)
