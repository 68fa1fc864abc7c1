"""The table of GPUs: which GPUs run kernels, and the refusals for others."""

from types import SimpleNamespace

import pytest
import torch
from triton.backends.nvidia.compiler import CUDABackend

from comet.comm import kernel_obstacle, make_communicator
from comet.kernels.runtime import arch, nvrtc

GPU = torch.device("cuda", 0)


@pytest.fixture
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The name and capability that torch reports of this process's GPU."""
    found = SimpleNamespace(name="NVIDIA H100 80GB HBM3", capability=(9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: found.capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: found.name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    return found


def test_no_gpu_is_in_it_twice_and_triton_compiles_for_all() -> None:
    archs = arch.ARCHS.values()
    assert len({each.capability for each in archs}) == len({each.name for each in archs}) == len(archs)
    assert all(CUDABackend.supports_target(each.target) for each in archs)
    assert [each.name for each in archs if each.cuda_kernels] == ["hopper"]


@pytest.mark.parametrize("capability", [(9, 0), (10, 0)])
def test_hopper_blackwell_and_a_cpu_have_no_obstacle(capability: tuple[int, int], a_gpu: SimpleNamespace) -> None:
    a_gpu.capability = capability
    assert kernel_obstacle(GPU) == kernel_obstacle(torch.device("cpu")) == ""
    assert make_communicator("auto", None, GPU).memory_obstacle == ""


@pytest.mark.parametrize(
    ("name", "capability", "reason"),
    [
        ("NVIDIA A100-SXM4-80GB", (8, 0), "lacks a fence that kernels of expert caches use"),
        ("NVIDIA L40S", (8, 9), "is not in the table of GPUs, ampere, hopper, blackwell"),
    ],
)
def test_others_take_the_plain_path_and_say_why(
    name: str, capability: tuple[int, int], reason: str, a_gpu: SimpleNamespace
) -> None:
    a_gpu.name, a_gpu.capability = name, capability
    obstacle = make_communicator("auto", None, GPU).memory_obstacle
    assert obstacle.startswith(f"{name} (sm_{capability[0]}{capability[1]}) {reason}")
    assert not nvrtc.is_available.__wrapped__(GPU)
