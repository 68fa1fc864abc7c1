"""Comet inside the newest Megatron-core that was tested, in the place of the installed one; skipped without it."""

import subprocess
import sys

import pytest
from launch_jobs import environment
from pages import ROOT

NEWER = ROOT / "build" / "megatron"  # ``make megatron`` installs Megatron-core 0.19 there
OF_BOTH = [
    "test_megatron.py::test_layer[2-1-1-1]",
    "test_megatron.py::test_checkpoints",
    "test_megatron.py::test_specs",
    "test_megatron.py::test_refusals_name_field_value_and_rule",
    "test_megatron.py::test_training",
    "test_megatron_grouped.py",
    "test_megatron_trainer.py::test_losses_and_checkpoints[2-1-True]",
    "test_megatron_trainer.py::test_losses_and_checkpoints[4-2-False]",
]


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.skipif(not (NEWER / "ready").exists(), reason="needs Megatron-core 0.19 in build/megatron: make megatron")
def test_the_newer_version_passes_these_tests_as_well() -> None:
    """The package asks for Python 3.12; its files run on 3.11 as well."""
    tests = [f"tests/integrations/megatron/{name}" for name in OF_BOTH]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:xdist", "-p", "no:cacheprovider", *tests]
    ended = subprocess.run(
        command, cwd=ROOT, env={**environment(), "PYTHONPATH": str(NEWER)}, capture_output=True, text=True, timeout=2400
    )
    assert ended.returncode == 0, ended.stdout[-6000:]
    assert "skipped" not in ended.stdout
