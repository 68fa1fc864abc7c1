"""A group promises its layers a pool that they fit and the same kernels, both alike on all ranks."""

from __future__ import annotations

import os
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from ranks import in_ranks, logged, run_ranks

import comet.layer.group
from comet.comm import LocalCommunicator
from comet.config import MoEConfig, OverlapConfig, ParallelConfig
from comet.kernels.runtime.activation import Activation
from comet.layer.group import ExpertGroup, check_reserved_sms, make_expert_group
from comet.layer.routed_experts import SymmetricPath
from comet.layer.twin.layer import Twin
from comet.moe import MoE

CONFIG = MoEConfig(hidden_size=32, ffn_size=48, num_experts=12, top_k=2)
CPU = torch.device("cpu")
SHORT_TYPES = [torch.float16, torch.bfloat16]


def make_group(rank: int = 0, world_size: int = 1, **changes) -> ExpertGroup:
    layers = {"moe": CONFIG, "parallel": ParallelConfig(ep=world_size)}
    fields = {"max_tokens": 40, "dtype": torch.float32, "device": "cpu", "timeout_s": 20.0}
    return make_expert_group(**(layers | fields | changes))


@pytest.mark.parametrize("path", ["auto", "twin", "fused"])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 64}, "hidden_size=64 of the layer must be the group's 32"),
        ({"hidden_size": 16}, "hidden_size=16 of the layer must be the group's 32"),
        ({"top_k": 3}, "top_k=3 of the layer must be at most the group's 2"),
    ],
)
@pytest.mark.usefixtures("interpreted")
def test_layers_that_do_not_fit_the_pool_are_refused_when_they_are_made(
    path: str, changes: dict[str, int], message: str
) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        MoE(replace(CONFIG, **changes), make_group(), path=path)


def test_layers_may_differ_in_all_that_the_pool_does_not_hold() -> None:
    group = make_group()
    for changes in ({"top_k": 1}, {"ffn_size": 64, "num_experts": 8}):
        layer = MoE(replace(CONFIG, **changes), group)
        x = torch.randn(5, 32, requires_grad=True)
        layer(x)[0].sum().backward()
        assert x.grad is not None


@in_ranks(3)
def test_ranks_that_ask_for_different_groups_all_say_so(rank: int, world_size: int) -> None:
    parallel = ParallelConfig(ep=3), ParallelConfig(tp=3), ParallelConfig(ep=3)
    for field, values, message in (
        ("max_tokens", (40, 128, 40), "max_tokens=128 of rank 1 must equal the 40 of rank 0"),  # all take 128 rows
        ("max_tokens", (40, 40, 41), "max_tokens=41 of rank 2 must equal the 40 of rank 0"),
        ("dtype", (*SHORT_TYPES, torch.float16), "dtype=torch.bfloat16 of rank 1 must equal the torch.float16 of rank"),
        ("max_tokens", (40, 40, 40), ""),
        ("moe", (CONFIG, replace(CONFIG, ffn_size=96), CONFIG), "ffn_size=96 of rank 1 must equal the 48 of rank 0"),
        ("parallel", parallel, "ep=1 of rank 1 must equal the 3 of rank 0"),
    ):
        with pytest.raises(ValueError, match=f"^{message}") if message else nullcontext():
            make_group(rank, world_size, **{field: values[rank]}).close()


@in_ranks(3)
def test_ranks_of_other_versions_all_say_so(rank: int, world_size: int) -> None:
    """Also where they share no experts, as data-parallel nodes do not."""
    others = {
        "comet_version": patch.object(comet.layer.group, "comet_version", lambda: "1.0"),
        "torch_version": patch.object(torch, "__version__", "1.0"),
    }
    for name, other in others.items():
        refused = pytest.raises(ValueError, match=f"^{name}=1.0 of rank 2 must equal the .* of rank 0$")
        with other if rank == 2 else nullcontext(), refused:
            make_group(rank, world_size, parallel=ParallelConfig())


@in_ranks(3)
def test_ranks_that_make_different_layers_all_say_so(rank: int, world_size: int) -> None:
    group = make_group(rank, world_size)
    for field, values, message in (
        ("overlap", (OverlapConfig(num_panels=2), OverlapConfig()), r"overlap=OverlapConfig\(.*4\) of rank 1 must"),
        ("overlap", (OverlapConfig(), None), r"overlap=None of rank 1 must equal the OverlapConfig\("),
        ("path", ("twin", "plain"), "path=plain of rank 1 must equal the twin of rank 0"),
        ("top_k", (2, 2, 1), "top_k=1 of rank 2 must equal the 2 of rank 0"),
        ("activation", (CONFIG.activation, Activation("reglu")), "activation={'name': 'reglu'"),
        ("seed", (1, 1), ""),
    ):
        given, config = {field: (*values, values[0])[rank]}, CONFIG
        if hasattr(CONFIG, field):
            config, given = replace(CONFIG, **given), {}
        with pytest.raises(ValueError, match=f"^{message}") if message else nullcontext():
            MoE(config, group, **given)
    group.close()


@pytest.mark.parametrize("path", ["auto", "plain", "reference", "twin"])
def test_a_split_that_does_nothing_is_told(path: str, caplog: pytest.LogCaptureFixture) -> None:
    group = make_group(0, 1)
    for _ in range(2):
        MoE(CONFIG, group, path=path, overlap=OverlapConfig())
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    words = f"overlap={OverlapConfig()} changes nothing on path={path!r}: it is for path 'fused'"
    assert told == ([] if path == "auto" else [words])


def lack_compilers(rank: int, world_size: int, lacking: list[str]) -> tuple[list[bool], list[str]]:
    """Return the choice of kernels in CUDA C++ of the group, its layers and their launches, and the log."""
    told = logged("comet.layer.group")
    comet.layer.group.why_no_cuda = lambda device: lacking[rank]
    group = make_group(rank, world_size)
    path = MoE(CONFIG, group).experts
    assert isinstance(path, SymmetricPath)
    group.close()
    return [group.cuda_kernels, path.backend.settings.cuda_kernels], told


def test_kernels_in_cuda_are_for_groups_all_of_whose_ranks_have_them() -> None:
    said = "WARNING rank 1: no CUDA C++ compiler; so layers are slower on all ranks of its group"
    assert run_ranks(lack_compilers, 2, ["", "no CUDA C++ compiler"]) == [([False] * 2, [said]), ([False] * 2, [])]
    assert run_ranks(lack_compilers, 2, ["", ""]) == [([True] * 2, [])] * 2
    assert run_ranks(lack_compilers, 2, ["none"] * 2) == [([False] * 2, [])] * 2, "each says so for itself"
    assert run_ranks(lack_compilers, 1, [""]) == [([True] * 2, [])]


def test_what_a_cpu_lacks() -> None:
    assert comet.layer.group.why_no_cuda(torch.device("cpu")) == "cpu is no GPU"
    assert not make_group().cuda_kernels


def test_reserved_sms_reach_the_launches_of_layer_1() -> None:
    path = MoE(CONFIG, make_group(reserved_sms=7)).experts
    assert isinstance(path, SymmetricPath)
    assert path.backend.settings.reserved_sms == 7
    assert make_group().reserved_sms == 0


def test_layer_1_keeps_half_of_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="reserved_sms=-1 must be at least 0"):
        make_group(reserved_sms=-1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=132))
    check_reserved_sms(66, torch.device("cuda"))
    with pytest.raises(ValueError, match="reserved_sms=67 must be at most 66, half of the GPU's"):
        check_reserved_sms(67, torch.device("cuda"))


@pytest.mark.parametrize("ep", [2, 1])
@in_ranks(2)
def test_closed_groups_leave_no_descriptors_and_threads(rank: int, world_size: int, ep: int) -> None:
    """Count them after each of a few groups; the last group fails in its pool."""
    held = []
    for cycle in range(5):
        group = make_group(rank, ep)
        MoE(CONFIG, group)(torch.randn(3, 32))
        group.close()
        group.close()
        if cycle > 2:
            with pytest.raises(ValueError, match=r"needs \d+ bytes of symmetric memory"):
                make_group(rank, ep, max_tokens=2**34)
        del group
        dist.barrier()
        held.append((len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))))
    # The first starts what stays; what a busy machine closes late only makes fewer.
    assert all(last <= second for last, second in zip(held[-1], held[1], strict=True)), held


@in_ranks(2)
def test_process_groups_are_kept_where_a_rank_did_not_come(rank: int, world_size: int) -> None:
    group = make_group(rank, world_size)
    group.comm._close = lambda in_step: False
    group.close()
    assert group.process_group is not None
    assert dist.get_world_size(group.process_group) == world_size


def test_what_was_opened_is_closed_where_making_the_group_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    made = [LocalCommunicator(CPU), LocalCommunicator(CPU)]
    opened = iter(made)
    monkeypatch.setattr(comet.layer.group, "make_communicator", lambda *_, **__: next(opened))
    with pytest.raises(ValueError, match=r"needs \d+ bytes of symmetric memory"):
        make_group(max_tokens=2**38)
    monkeypatch.setattr(comet.layer.group, "shared_resolver", None)
    with pytest.raises(TypeError):
        make_group()
    assert [comm.closed for comm in made] == [True, True]


@pytest.mark.parametrize("path", ["twin", "fused"])
@pytest.mark.usefixtures("interpreted")
def test_no_layer_runs_after_its_group_was_closed(path: str) -> None:
    group = make_group()
    layer = MoE(CONFIG, group, path=path)
    group.close()
    with pytest.raises(RuntimeError, match=r"LocalCommunicator of rank 0 was used after close\(\)"):
        layer(torch.randn(3, 32))


def test_nor_does_a_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    group = make_group()
    output, _ = MoE(CONFIG, group)(torch.randn(3, 32))
    group.close()
    monkeypatch.setattr(Twin, "barrier", lambda self: None)  # a kernel that waits for no rank
    with pytest.raises(RuntimeError, match=r"was used after close\(\)"):
        output.sum().backward()


@pytest.mark.parametrize("named", ["cuda:1", torch.device("cuda", 1)])
def test_a_gpu_that_is_not_the_current_one_is_refused(monkeypatch: pytest.MonkeyPatch, named) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    with pytest.raises(ValueError, match=r"^device=cuda:1 must be the current GPU, cuda:0; torch\.cuda\.set_device "):
        make_group(device=named)


@pytest.mark.parametrize(
    ("named", "rule"), [("cuda", "'cpu': torch finds no GPU"), ("meta", "'cpu' or 'cuda'"), ("mps", "'cpu' or 'cuda'")]
)
def test_so_is_a_device_that_is_not_there(monkeypatch: pytest.MonkeyPatch, named: str, rule: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=f"^device={named} must be {rule}$"):
        make_group(device=named)


def test_kernels_on_a_cpu_need_the_interpreter() -> None:
    with pytest.raises(ValueError, match=r"^kernels=True must be left out on a CPU: .* a GPU, or TRITON_INTERPRET=1"):
        MoE(CONFIG, make_group(), path="fused")


@pytest.mark.parametrize("named", ["cuda:1", "cuda", "cpu"])
def test_other_devices_are_not(monkeypatch: pytest.MonkeyPatch, named: str) -> None:
    asked: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(
        comet.layer.group, "make_communicator", lambda _backend, _group, device, **_: asked.append(device)
    )
    with pytest.raises((TypeError, AttributeError)):  # there is no communicator to go on with
        make_group(device=named)
    assert asked == [torch.device(named)]
