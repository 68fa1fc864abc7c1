"""The compile-ahead tool: good code passes, spills and missing features fail by name, counts are what they say."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
from triton.runtime.jit import JITFunction

from comet.kernels.aot.compile import (
    NARROW_LOADS,
    NARROW_STORES,
    TMA_LOADS,
    TMA_STORES,
    WGMMA,
    WIDE_LOADS,
    WIDE_STORES,
    Quality,
    cases_of,
    count,
    examine_ptx,
    format_table,
    kernel_modules,
    main,
)
from comet.kernels.aot.decode import Setting
from comet.kernels.aot.gemm import aot_cases as gemm_cases
from comet.kernels.decode.blocks import BlockShape
from comet.kernels.decode.warp_decode import decode
from comet.kernels.gemm.group_gemm import GemmConfig, group_gemm
from comet.kernels.gemm.wgrad_cuda import source
from comet.kernels.runtime.case import CudaCase, KernelCase, meta, meta_tiles, recorded

KERNELS = """
import torch
import triton
import triton.language as tl

from comet.kernels.runtime.case import meta, recorded


@triton.jit
def copy_kernel(source, target, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + offsets, tl.load(source + offsets, mask=offsets < n), mask=offsets < n)


@triton.jit
def spilling_kernel(source, target, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    left = tl.load(source + offsets)
    right = tl.load(source + BLOCK + offsets)
    total = tl.sum(left) + tl.sum(right)
    tl.store(target + offsets, left * total)
    tl.store(target + BLOCK + offsets, right * total)


@triton.jit
def broken_kernel(source):
    tl.store(source, tl.arange(0, 3))


def copy(name, expects, first=0, n=4096):
    source, target = meta(8192, dtype=torch.bfloat16)[first:], meta(8192, dtype=torch.bfloat16)
    return recorded(name, expects, copy_kernel[4,], source, target, n, BLOCK=1024)


def aot_cases():
    numbers = meta(32768, dtype=torch.float32)
    return [
        *copy("aligned", {"wide_loads", "wide_stores"}),
        *copy("no matrix product", {"wgmma"}),
        *copy("unaligned source", {"wide_loads", "wide_stores"}, first=1),
        *copy("unaligned length", {"wide_loads", "wide_stores"}, n=4095),
        *recorded("big", {"wgmma"}, spilling_kernel[1,], numbers, numbers, BLOCK=16384),
        *recorded("odd range", (), broken_kernel[1,], meta(4)),
    ]
"""


@pytest.fixture
def compile_kernels(tmp_path):
    """Run the tool on the kernels above in a process of its own, with an empty cache."""
    (tmp_path / "some_kernels.py").write_text(KERNELS)

    def run() -> tuple[int, str, dict, str]:
        command = [sys.executable, "-m", "comet.kernels.aot.compile", "--modules", "some_kernels"]
        environment = {**os.environ, "PYTHONPATH": str(tmp_path), "TRITON_CACHE_DIR": str(tmp_path / "cache")}
        environment.pop("TRITON_INTERPRET", None)
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
        lines = done.stdout.splitlines()
        summary = json.loads(lines[-1]) if done.returncode in (0, 1) and lines else {}
        return done.returncode, done.stdout, summary, done.stderr

    return run


def test_bad_code_fails_and_is_named_and_good_code_is_measured(compile_kernels):
    code, output, summary, progress = compile_kernels()
    assert code == 1, progress
    assert (summary["task"], summary["kernels"], summary["failed"]) == ("compile", 6, 5)
    complaints = [line for line in output.splitlines() if line.startswith("FAILED")]
    assert complaints[0] == "FAILED copy_kernel (no matrix product): missing wgmma"
    assert complaints[1].startswith("FAILED copy_kernel (unaligned source): missing wide_loads: no 16-byte access")
    assert "FAILED copy_kernel (unaligned length): missing wide_loads" in complaints[2]
    assert complaints[3].startswith("FAILED spilling_kernel (big): spills ")
    assert complaints[3].endswith("; missing wgmma")
    assert complaints[4].startswith("FAILED broken_kernel (odd range): does not compile: ")
    assert "arange's range must be a power of 2" in complaints[4]
    assert len(complaints) == 5
    assert (summary["target"], "[6/6]" in progress) == ("sm_90a", True)
    header, good = output.splitlines()[:2]
    assert (header.split()[:2], good.split()[:2]) == (["kernel", "configuration"], ["copy_kernel", "aligned"])
    registers, *numbers = map(int, good.split()[2:])
    assert 0 < registers < 256
    assert numbers == [0, 0, 0, 1, 1, 0], "no spills, shared memory or wgmma; a wide load and a wide store, none narrow"


def test_triton_itself_calls_ptxas(monkeypatch, tmp_path):
    """Triton 3.9 assembles for Hopper by ``ptxas-blackwell``, and 3.7 added a flag: only Triton knows."""
    from triton.backends.nvidia import compiler

    fake = tmp_path / "ptxas"
    fake.write_text(
        "#!/bin/sh\n"
        "for last; do :; done\n"
        ': > "$last"\n'  # the cubin
        "echo 'ptxas info : 24 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads' >&2\n"
        "echo 'ptxas info : Used 77 registers' >&2\n"
    )
    fake.chmod(0o755)
    monkeypatch.setattr(compiler, "get_ptxas", lambda arch: compiler.knobs.NvidiaTool(str(fake), "13.4"))
    quality = examine_ptx("", 0, {"num_warps": 4})
    assert (quality.registers, quality.spilled_bytes) == (77, 12)


@pytest.mark.parametrize(
    ("version", "spilled", "complains"), [("3.6.0", 8, True), ("3.9.0", 96, False), ("3.9.0", 97, True)]
)
def test_only_the_measured_triton_must_not_spill_at_all(monkeypatch, version, spilled, complains):
    monkeypatch.setattr(triton, "__version__", version)
    numbers = dict.fromkeys("shared_bytes wgmma wide_loads wide_stores narrow_loads narrow_stores".split(), 0)
    quality = Quality(registers=64, spilled_bytes=spilled, **numbers)
    case = replace(gemm_cases()[0], expects=frozenset())
    assert quality.complaints(case) == [f"spills {spilled} bytes of registers"] * complains


def test_nothing_to_compile_is_an_error(capsys):
    assert main(["--filter", "no such kernel"]) == 2
    assert "--filter='no such kernel' must be in a configuration's name; kernels: " in capsys.readouterr().err


def test_no_compiler_is_an_error(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["--jobs", "0"])
    assert capsys.readouterr().err.endswith("error: --jobs=0 must be at least 1\n")


def test_shipped_cases_are_found_and_have_unique_names():
    modules = kernel_modules()
    assert {"comet.kernels.aot.gemm", "comet.kernels.aot.router", "comet.kernels.gemm.wgrad_cuda"} <= set(modules)
    assert "comet.kernels.aot.compile" not in modules
    names = [(case.kernel, case.name) for module in modules for case in cases_of(module)]
    assert len(names) == len(set(names))


PTX = """
    wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {...};
    cp.async.cg.shared.global [ %r1 ], [ %rd1 ], 0x10, %r2;
    cp.async.ca.shared.global [ %r1 ], [ %rd1 ], 0x4, %r2;
    cp.async.bulk.tensor.3d.shared::cta.global.mbarrier::complete_tx::bytes [%r1], [%rd1, {%r2, %r3, %r4}], [%r5];
    cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd1, {%r2, %r3}], [%r5];
    cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%rd1, {%r2, %r3}], [%r1];
    cp.async.bulk.commit_group;
    ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];
    ld.global.L1::evict_last.v2.b64 { %rd1, %rd2 }, [ %rd3 ];
    ld.global.b32 { %r1 }, [ %rd1 ];
    ld.global.b16 { %rs1 }, [ %rd1 ];
    ld.global.L1::no_allocate.u16 %rs1, [ %rd1 ];
    ld.volatile.global.b8 %rs1, [ %rd1 ];
    @%p1 st.global.v4.b32 [ %rd1 ], { %r1, %r2, %r3, %r4 };
    @%p1 st.global.v2.b16 [ %rd1 ], { %rs1, %rs2 };
    @%p1 st.global.b16 [ %rd1 ], { %rs1 };
"""


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        (WGMMA, 1),
        (WIDE_LOADS, 3),
        (TMA_LOADS, 2),
        (WIDE_STORES, 1),
        (TMA_STORES, 1),
        (NARROW_LOADS, 3),
        (NARROW_STORES, 1),
    ],
)
def test_counts(pattern, expected):
    assert count(pattern, PTX) == expected


GEMM = gemm_cases()[0]
COUNTED = CudaCase(source(torch.bfloat16), "c")


@pytest.mark.parametrize(
    ("case", "changes", "complaints"),
    [
        (GEMM, {}, []),
        (GEMM, {"spilled_bytes": 12}, ["spills 12 bytes of registers"]),
        (GEMM, {"shared_bytes": 232449}, ["needs 232449 bytes of shared memory, a block has 232448"]),
        (GEMM, {"shared_bytes": 232448}, []),
        (GEMM, {"wgmma": 0}, ["missing wgmma"]),
        (GEMM, {"serialized": ("64x32x16", "64x48x16")}, ["waits for a wgmma before the next: 64x32x16, 64x48x16"]),
        (GEMM, {"wide_loads": 0, "narrow_loads": 5}, ["missing wide_loads: no 16-byte access"]),
        (GEMM, {"narrow_loads": 5}, ["missing wide_loads: 5 accesses of less than 4 bytes"]),
        (GEMM, {"narrow_stores": 1}, ["missing wide_stores: 1 accesses of less than 4 bytes"]),
        (replace(GEMM, narrow_loads=4), {"narrow_loads": 4}, []),
        (replace(GEMM, narrow_loads=4), {"narrow_loads": 6}, ["missing wide_loads: 2 accesses of less than 4 bytes"]),
        (COUNTED, {}, ["has 200 registers, the source counts on 168"]),
        (COUNTED, {"registers": 168}, []),
    ],
)
def test_complaints(case: KernelCase | CudaCase, changes: dict[str, Any], complaints: list[str]) -> None:
    numbers = {
        "registers": 200, "spilled_bytes": 0, "shared_bytes": 1000, "wgmma": 4,
        "wide_loads": 8, "wide_stores": 8, "narrow_loads": 0, "narrow_stores": 0,
    }  # fmt: skip
    assert Quality(**{**numbers, **changes}).complaints(case) == complaints


def test_a_case_names_an_unknown_feature():
    with pytest.raises(ValueError, match=r"group_gemm_kernel .*: expects=\['wgma'\] must be among"):
        replace(GEMM, expects=frozenset({"wgma"}))


def test_alignment_is_that_of_the_launch():
    names = GEMM.source.fn.arg_names
    aligned = {names[place] for (place, *_), divisors in GEMM.source.attrs.items() if divisors}
    assert aligned == {"a", "out_ptr", "tiles_ptr", "row_ids_ptr", "N", "K"}, "not the descriptor, not num_tiles_ptr"


def test_a_recording_ends_with_its_launch():
    run, a, b, out = JITFunction.run, meta(8, 15), meta(1, 16, 15), meta(8, 16)
    with pytest.raises(ValueError, match="K=15 must be a positive multiple of 16"):
        recorded("", (), group_gemm, a, b, out, meta_tiles(128), gather=True, layout="nk", config=GemmConfig())
    assert JITFunction.run is run


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_that_add_up_have_all_registers(ranks):
    setting, block = Setting(shape="qwen3", num_tokens=8, ranks=ranks), BlockShape(rows=64, depth=128)
    config = replace(setting.config, gate_up=block, down=replace(block, max_registers=80))
    gate_up, down = recorded("", (), decode, setting.step, config, setting.buffer)
    assert "maxnreg" not in gate_up.options
    assert down.options.get("maxnreg") == (80 if ranks == 1 else None)


def test_table_is_aligned():
    row = ("k", "some words", *map(str, range(7)))
    lines = format_table([("kernel", "configuration", *"abcdefg"), row]).splitlines()
    assert lines == ["kernel  configuration  a  b  c  d  e  f  g", "k       some words     0  1  2  3  4  5  6"]
