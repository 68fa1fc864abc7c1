"""Weight gradients in CUDA C++, as far as it goes without a GPU: what host and source must agree on, when it runs."""

import random
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from comet.kernels.gemm import wgrad_cuda as module
from comet.kernels.gemm.wgrad_cuda import num_tiles
from comet.kernels.runtime import nvrtc
from comet.kernels.runtime.arch import HOPPER
from comet.kernels.runtime.nvrtc import SEGMENT_ROWS, segment_map
from comet.layer import fused
from comet.layer.plan import Launch


def test_worked_examples() -> None:
    assert module.shared_bytes() == 1024 + 8 * (24576 + 24) + 8 * 2 * 2048 + 16 * (32 + 16) == 231360
    assert module.shared_bytes() <= HOPPER.shared_bytes
    assert num_tiles(2, 1024, 2048) == 2 * 8 * 8 == 128
    assert num_tiles(3, 130, 256) == 3 * 2 * 1
    assert num_tiles(3, 16, 272) == 3 * 1 * 2


def bytes_of_copy(segment: tuple[int, int], row: int, col: int, map_of_rows: tuple) -> int | None:
    """Return the address of an element that the hardware copies of a segment, or ``None`` if it fills in a 0."""
    address, shape, strides, dtype, _ = map_of_rows
    start, count = segment
    place = (SEGMENT_ROWS, start + count, SEGMENT_ROWS - count + row, col)
    assert all(0 <= index < 2**31 for index in place)
    if any(index >= size for index, size in zip(place, shape, strict=True)):
        return None
    return (address + dtype.itemsize * sum(i * stride for i, stride in zip(place, strides, strict=True))) % 2**64


@pytest.mark.parametrize("cols", [16, 272, 7168])
def test_a_copy_ends_with_its_segment(cols: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "_tensor_map", lambda *arguments: arguments)
    rows = torch.empty(1_500_000_000 // cols, cols, dtype=torch.bfloat16, device="meta")
    found = segment_map(rows, (32, 64))
    assert found[-1] == (1, 1, 32, 64)
    assert all(0 < stride * 2 < 2**40 and stride * 2 % 16 == 0 for stride in found[2][:-1]), "the driver's limits"
    assert all(size <= 2**32 for size in found[1])
    draw = random.Random(cols)
    for _ in range(300):
        count = draw.choice([0, 1, 15, 64, 1000, len(rows)])
        start = draw.randint(0, len(rows) - count)
        for row in {0, 31, count - 1, count, count + 31, draw.randrange(count + 64)} - {-1}:
            for col in (0, cols - 1, cols, cols + 63):
                inside = row < count and col < cols
                wanted = rows.data_ptr() + 2 * ((start + row) * cols + col) if inside else None
                assert bytes_of_copy((start, count), row, col, found) == wanted, (start, count, row, col)


def operands(**changes: Tensor) -> dict[str, Tensor]:
    empty = {"a": (256, 1536), "b": (256, 2048), "out": (32, 1536, 2048)}
    made = {name: torch.empty(shape, dtype=torch.bfloat16, device="meta") for name, shape in empty.items()}
    return made | changes


def test_when_it_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "is_available", lambda device: True)
    call = operands()
    assert module.runs_cuda(**call)
    assert module.runs_cuda(**operands(out=call["out"][:1])), "few tiles"
    assert not module.runs_cuda(**{name: tensor.float() for name, tensor in call.items()})
    assert not module.runs_cuda(**operands(b=call["b"].half())), "Triton says what is wrong"
    assert not module.runs_cuda(**operands(a=call["a"].T.contiguous().T)), "rows are no neighbours"
    assert not module.runs_cuda(**operands(b=call["b"][:, :1024])), "of other columns"
    narrow = {name: tensor[..., :-8].contiguous() for name, tensor in call.items() if name != "a"}
    assert not module.runs_cuda(**operands(**narrow)), "columns in eights"
    memory = torch.empty(256 * 1536 + 1, device="meta", dtype=torch.bfloat16)
    assert not module.runs_cuda(**operands(a=memory[1:].view(256, 1536))), "does not start at 16 bytes"
    monkeypatch.setattr(module, "is_available", lambda device: False)
    assert not module.runs_cuda(**call)


@pytest.mark.parametrize("cuda", [True, False])
def test_the_layer_takes_what_is_chosen(cuda: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[object] = []
    monkeypatch.setattr(fused, "runs_cuda", lambda a, b, out: cuda)
    monkeypatch.setattr(fused, "group_gemm_wgrad_cuda", lambda *_: launched.append(_[-1]))
    monkeypatch.setattr(fused, "group_gemm_wgrad", lambda *_, config: launched.append("triton"))
    segments = torch.zeros(1, dtype=torch.int32)
    plan = SimpleNamespace(
        layout=SimpleNamespace(experts_local=3),
        segment_starts=segments,
        segment_counts=segments,
        counters_of=lambda launch: [launch, 1, 2, 3],
    )  # fmt: skip
    out = fused.wgrad(torch.empty(8, 16), torch.empty(8, 32), plan, Launch.DISPATCH_DGRAD)  # type: ignore[arg-type]
    assert out.shape == (3, 16, 32)
    assert launched == [[2, 3] if cuda else "triton"], "the tickets behind those of communication and of items"
