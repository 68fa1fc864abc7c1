"""Output of the command line for mistakes and dry runs on a machine without a GPU."""

import re

import pytest
import torch
import yaml

from comet.launch.cli import main

PREFIX = "comet: error: "


def run_without_gpu(captured: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    captured.readouterr()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "device_count", lambda: 0)
        status = main(words)
    return status, *captured.readouterr()


def refusal(captured: pytest.CaptureFixture[str], *words: str) -> str:
    """Return the one line of a refused command, without ``PREFIX``; check that the status is 2."""
    status, out, err = run_without_gpu(captured, *words)
    assert status == 2, err
    assert (out, len(err.splitlines())) == ("", 1), err
    assert err.startswith(PREFIX), err
    return err.removeprefix(PREFIX)


def dry_run(captured: pytest.CaptureFixture[str], task: str, *words: str) -> tuple[str, dict[str, float]]:
    """Return the YAML that a dry run prints, and the rows of its table of memory in MiB."""
    status, out, err = run_without_gpu(captured, task, "--dry-run", *words)
    assert (status, err) == (0, "")
    assert yaml.safe_load(out)["nproc"] >= 1
    rows = re.findall(r"^#   (.*?) +([\d,.]+)$", out, re.MULTILINE)
    return out, {name: float(size.replace(",", "")) for name, size in rows}
