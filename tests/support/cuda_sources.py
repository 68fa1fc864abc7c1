"""What tests read in the sources of the kernels in CUDA C++, and in the words about their launchers."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import comet.kernels
from comet.kernels.gemm import wgrad_cuda
from comet.kernels.layer import dispatch_gemm, gemm_combine

SOURCES = Path(comet.kernels.__path__[0]) / "cuda"
HEADERS = SOURCES / "include"


def cuda_modules() -> list[ModuleType]:
    return [dispatch_gemm, gemm_combine, wgrad_cuda]


def included_by(path: Path) -> set[Path]:
    """Headers that a file includes, and all that these include."""
    named = {(path.parent / name).resolve() for name in re.findall(r'#include "(.+)"', path.read_text())}
    return named.union(*map(included_by, named))
