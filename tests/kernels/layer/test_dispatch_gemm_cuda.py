"""Layer 0 in CUDA C++, as far as it goes without a GPU: what host and source must agree on, and when it is chosen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from launch_arguments import in_16_bits, in_fp8, make_table

from comet.kernels.layer import dispatch_gemm as module
from comet.kernels.layer.dispatch_gemm import Variant
from comet.layer.plan import num_counters


def test_worked_examples() -> None:
    assert num_counters(4, 2048) == 128 + 4 * 16 == 192
    variant = Variant(weights=torch.bfloat16, output=torch.bfloat16, world_size=4)
    assert variant.shared_bytes(32) == 1024 + 4 * 53248 + 2 * 2048 + 64 + 512 + 4 * 97 == 219076


@pytest.mark.parametrize(("dtype", "cols"), [(torch.bfloat16, 128), (torch.float8_e4m3fn, 256)])
def test_copies_of_w1_have_eights_of_gate_and_of_up_in_turn(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, cols: int
) -> None:
    monkeypatch.setattr(module, "tensor_map", lambda tensor, box: (tensor, box))
    ffn = 2 * cols
    w1 = torch.zeros(3, 2 * ffn, 256, dtype=dtype)
    view, box = module.gate_up_map(w1, cols)
    assert view.data_ptr() == w1.data_ptr()
    assert box[-1] * w1.itemsize == 128, "a line of shared memory"
    row_ids = torch.arange(w1.shape[0] * w1.shape[1])[:, None].expand(-1, 256)  # what a copy of each row would bring
    seen = row_ids.as_strided(view.shape, [stride // 256 for stride in view.stride()[:-1]] + [0])
    copy = seen[1:2, box[1] : 2 * box[1], : box[2], : box[3], 0].flatten()  # the second block of columns of expert 1
    gate = torch.arange(cols // 2, cols).view(-1, 1, 8) + 2 * ffn
    assert torch.equal(copy, torch.cat([gate, gate + ffn], dim=1).flatten())


@pytest.mark.parametrize(("make", "is_dgrad"), [(in_16_bits, False), (in_16_bits, True), (in_fp8, False)])
def test_when_it_is_chosen(monkeypatch: pytest.MonkeyPatch, make: Callable[..., Any], is_dgrad: bool) -> None:
    monkeypatch.setattr(module, "is_available", lambda device: True)
    can_run, weights, table = partial(module.can_run, is_dgrad=is_dgrad), make(32, 1536, 2048), make_table()
    assert can_run(weights, table)
    assert not can_run(weights, replace(table, block_rows=64))
    assert not can_run(weights, replace(table, segments=None))
    assert not can_run(make(20_000, 256, 128), table)  # their table is too large
    assert not can_run(torch.empty(32, 1536, 2048, device="meta"), table)  # float32
    for shape in ((32, 2048, 764), (32, 2044, 768)):  # rows that do not start at 16 bytes
        assert not is_dgrad or not can_run(make(*shape), table)
    monkeypatch.setattr(module, "is_available", lambda device: False)
    assert not can_run(weights, table)
