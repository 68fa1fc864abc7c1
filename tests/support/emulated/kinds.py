"""Which of the two implementations a launch takes: in CUDA C++, where it can run, or in Triton."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from types import ModuleType
from typing import Literal
from unittest.mock import patch

from comet.kernels.layer import dispatch_gemm, gemm_combine
from comet.layer import fused

Kind = Literal["cuda", "triton"]


class Counted:
    """A function, and how often it was called."""

    def __init__(self, function: Callable[..., None]) -> None:
        self.function, self.call_count = function, 0

    def __call__(self, *arguments: object, **options: object) -> None:
        self.call_count += 1
        self.function(*arguments, **options)


@contextmanager
def launched_in(kind: Kind, module: ModuleType, function: str) -> Iterator[Counted]:
    """Launches in CUDA C++, where ``module.function`` can run, or in Triton; yields what counts the former."""
    spy = Counted(getattr(module, function))
    refusal = {"can_run": lambda *_, **__: False} if kind == "triton" else {}
    with patch.multiple(module, **{function: spy}, **refusal):
        yield spy


# Layer 0 and layer 1 also with weights in block FP8; layer 1's launch is that of the gradients of tokens, too.
layer0_in = partial(launched_in, module=dispatch_gemm, function="dispatch_gemm_cuda")
layer1_in = partial(launched_in, module=gemm_combine, function="gemm_combine_cuda")
grad_hidden_in = partial(launched_in, module=dispatch_gemm, function="fc2_dgrad_cuda")


def weights_in(kind: Kind) -> AbstractContextManager[object]:
    """Weight gradients in CUDA C++, where it can run, or in Triton."""
    return patch.object(fused, "runs_cuda", fused.runs_cuda if kind == "cuda" else lambda *_: False)
