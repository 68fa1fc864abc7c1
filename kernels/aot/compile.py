"""Compile every shipped kernel configuration for a kind of GPU without having one, and judge the machine code.

    python -m comet.kernels.aot.compile [--arch NAME] [--filter NAME] [--modules MODULE ...] [--jobs N]

Prints one row per configuration (registers, spilled bytes, shared memory, warp-group matrix instructions, 16-byte and
narrow accesses to global memory) and one JSON line at the end. The exit code is 1 when a configuration does not
compile, spills registers, needs more shared memory than a block has, waits for a warp-group matrix instruction before
it issues the next, or misses a feature its ``KernelCase`` expects. Of GPUs other than Hopper only shared memory counts.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import io
import json
import multiprocessing
import os
import pkgutil
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any

import triton
from triton.compiler import ASTSource, make_backend

from ..runtime.arch import ARCHS, HOPPER, Arch
from ..runtime.case import CudaCase, KernelCase
from ..runtime.nvrtc import compile_cubin
from ..runtime.process import end_with_parent, usable_cores

KERNELS = "comet.kernels"

# Patterns that are counted in the PTX. Narrow accesses (below 4 bytes) show that the compiler lost alignment.
WGMMA = r"wgmma\.mma_async"
WIDE_LOADS = r"cp\.async\.cg\.shared|ld\.global[\w.:]*\.v4\.[bfsu]32|ld\.global[\w.:]*\.v2\.[bfsu]64"
TMA_LOADS = r"cp\.async\.bulk\.(?:tensor\.\dd\.)?shared::\w+\.global"
WIDE_STORES = r"st\.global[\w.:]*\.v4\.[bfsu]32|st\.global[\w.:]*\.v2\.[bfsu]64"
TMA_STORES = r"cp\.async\.bulk\.(?:tensor\.\dd\.)?global\.shared"
NARROW_LOADS = r"ld\.(?:[a-z]+\.)*global(?:\.(?!v[24])[\w:]+)*\.[bsu](?:8|16)\s"
NARROW_STORES = r"st\.(?:[a-z]+\.)*global(?:\.(?!v[24])[\w:]+)*\.[bsu](?:8|16)\s"
HGMMA = r"\b[HQ]GMMA\."  # HGMMA multiplies numbers of 16 bits, QGMMA of 8
# One after the other, how warp-group matrix instructions are issued and waited for.
WARPGROUP_CODE = r"\b(?:[HQ]GMMA\.|WARPGROUP\.(?:ARRIVE|DEPBAR))[^;]*"
# The assembler's note about waits that it adds itself, at one place or in a whole function.
SERIALIZED = r"\(C75\d\d\) (.*(?:instructions are serialized|wait\w* is injected).*)"

# Blocks and warps were measured with one version of Triton, whose code must not spill. Others may spill a little.
MEASURED_TRITON, SPILLS_ELSEWHERE = "3.6.", 96  # version, bytes per thread

HEADER = ("kernel", "configuration", "regs", "spill B", "shared B", "wgmma", "ld16", "st16", "narrow")


@dataclass(frozen=True, kw_only=True, slots=True)
class Quality:
    """Machine code of one configuration in numbers."""

    registers: int  # per thread
    spilled_bytes: int  # register spill stores plus loads, per thread
    shared_bytes: int  # shared memory of a block
    wgmma: int  # warp-group matrix instructions
    wide_loads: int  # 16-byte loads (cp.async, vectors) and TMA loads from global memory
    wide_stores: int  # 16-byte and TMA stores to global memory
    narrow_loads: int  # loads of less than 4 bytes
    narrow_stores: int  # stores of less than 4 bytes
    # kinds of wgmma that are waited for one by one, as the assembler does when registers are few; of a Triton kernel
    # what the assembler says of it
    serialized: tuple[str, ...] = ()

    def complaints(self, case: KernelCase | CudaCase, arch: Arch = HOPPER) -> list[str]:
        """Return how the code breaks the case's expectations, which hold on Hopper; empty when all is well."""
        found = []
        if self.shared_bytes > arch.shared_bytes:
            found.append(f"needs {self.shared_bytes} bytes of shared memory, a block has {arch.shared_bytes}")
        if arch != HOPPER:
            return found
        measured = isinstance(case, CudaCase) or triton.__version__.startswith(MEASURED_TRITON)
        if self.spilled_bytes > case.spilled_bytes + (0 if measured else SPILLS_ELSEWHERE):
            found.append(f"spills {self.spilled_bytes} bytes of registers")
        if isinstance(case, CudaCase) and case.registers not in (None, self.registers):
            found.append(f"has {self.registers} registers, the source counts on {case.registers}")
        if "wgmma" in case.expects and not self.wgmma:
            found.append("missing wgmma")
        if self.serialized:
            found.append(f"waits for a wgmma before the next: {', '.join(self.serialized)}")
        for feature, wide, narrow in (
            ("wide_loads", self.wide_loads, max(0, self.narrow_loads - case.narrow_loads)),
            ("wide_stores", self.wide_stores, self.narrow_stores),
        ):
            if feature in case.expects and not wide:
                found.append(f"missing {feature}: no 16-byte access")
            elif feature in case.expects and narrow:
                found.append(f"missing {feature}: {narrow} accesses of less than 4 bytes")
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Result for one configuration: its quality, or the compiler's error, and the complaints."""

    kernel: str
    name: str
    quality: Quality | None
    complaints: list[str]

    def row(self) -> tuple[str, ...]:
        """The fields under ``HEADER``."""
        if self.quality is None:
            return (self.kernel, self.name, *["-"] * (len(HEADER) - 2))
        q = self.quality
        numbers = (q.registers, q.spilled_bytes, q.shared_bytes, q.wgmma, q.wide_loads, q.wide_stores)
        return (self.kernel, self.name, *map(str, numbers), str(q.narrow_loads + q.narrow_stores))


def compile_case(case: KernelCase | CudaCase, arch: Arch = HOPPER) -> Quality:
    """Compile one configuration (or take it from Triton's cache) and measure its code."""
    if isinstance(case, CudaCase):
        return examine_cubin(compile_cubin(case.source.text, case.kernel), case.source.shared_bytes)
    source = case.source if arch.starts_early else without_early_start(case.source)
    compiled = triton.compile(source, target=arch.target, options=case.options)
    return examine_ptx(compiled.asm["ptx"], compiled.metadata.shared, case.options, arch)


def without_early_start(source: ASTSource) -> ASTSource:
    """The same launch on a GPU whose kernels start one after the other."""
    constants = dict(source.constants)
    for place, name in enumerate(source.fn.arg_names):
        if name == "DEPENDENT":
            constants[place,] = False
        elif name == "STEP":
            constants[place,] = constants[place,]._replace(dependent=False)
    return ASTSource(source.fn, source.signature, constants, source.attrs)


def assembler_log(ptx: str, options: Mapping[str, Any], arch: Arch) -> str:
    """Assemble PTX as Triton does, and return what ptxas reports.

    Triton itself calls ptxas, because the choice of ptxas and its flags depend on the version of Triton.
    """
    backend, log = make_backend(arch.target), io.StringIO()
    with triton.knobs.nvidia.scope(), contextlib.redirect_stdout(log):
        triton.knobs.nvidia.dump_ptxas_log = True
        backend.make_cubin(ptx, {}, backend.parse_options(options), arch.target.arch)
    return log.getvalue()


def examine_ptx(ptx: str, shared_bytes: int, options: Mapping[str, Any], arch: Arch = HOPPER) -> Quality:
    """Count instructions in the PTX and read registers and spills in the assembler's log."""
    log = assembler_log(ptx, options, arch)
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    registers = re.search(r"Used (\d+) registers", log)
    assert spills is not None, log
    assert registers is not None, log
    return Quality(
        registers=int(registers[1]),
        spilled_bytes=int(spills[1]) + int(spills[2]),
        shared_bytes=shared_bytes,
        wgmma=count(WGMMA, ptx),
        wide_loads=count(WIDE_LOADS, ptx) + count(TMA_LOADS, ptx),
        wide_stores=count(WIDE_STORES, ptx) + count(TMA_STORES, ptx),
        narrow_loads=count(NARROW_LOADS, ptx),
        narrow_stores=count(NARROW_STORES, ptx),
        serialized=tuple(re.findall(SERIALIZED, log)),
    )


def examine_cubin(cubin: bytes, shared_bytes: int) -> Quality:
    """Count instructions in the machine code; a stack frame is where registers are spilled to."""
    tools = triton.knobs.nvidia
    usage, code = _ask(tools.cuobjdump, cubin, "-res-usage").stdout, _ask(tools.nvdisasm, cubin, "-c").stdout
    used = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert used is not None, usage
    return Quality(
        registers=int(used[1]),
        spilled_bytes=int(used[2]),
        shared_bytes=shared_bytes,
        wgmma=count(HGMMA, code),
        wide_loads=count(r"\b(?:UTMALDG|LDGSTS\.E\S*\.128|LDG\.E\S*\.128)", code),
        wide_stores=count(r"\b(?:UTMASTG|STG\.E\S*\.128)", code),
        narrow_loads=count(r"\bLDG\.E\S*\.[US](?:8|16)\b", code),
        narrow_stores=count(r"\bSTG\.E\S*\.[US](?:8|16)\b", code),
        serialized=waited_alone(code),
    )


def _ask(tool: Any, text: bytes, *options: str) -> subprocess.CompletedProcess[str]:
    """Run a tool on a file in memory, of which nothing stays behind however this process ends."""
    with open(os.memfd_create("kernel"), "wb") as file:
        file.write(text)
        file.flush()
        command = [tool.path, *options, f"/proc/self/fd/{file.fileno()}"]
        return subprocess.run(command, capture_output=True, text=True, check=True, pass_fds=(file.fileno(),))


def waited_alone(code: str) -> tuple[str, ...]:
    """Kinds of warp-group matrix instructions of which one is a group of its own, and waited for before the next.

    Several instructions of one step are committed together, so only the last has the barrier.

    Example: ``HGMMA.64x32x16.F32 R24, gsb0 ; WARPGROUP.DEPBAR.LE gsb0, 0x0 ;`` gives ``("64x32x16",)``; with another
    HGMMA right before it, or with ``0x1`` behind it, nothing.
    """
    steps = ["", *re.findall(WARPGROUP_CODE, code)]
    alone = (
        product.split(".")[1]
        for before, product, after in zip(steps, steps[1:], steps[2:], strict=False)
        if not re.match(HGMMA, before)
        and re.match(rf"{HGMMA}.*\bgsb0\b", product)
        and re.match(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x0\b", after)
    )
    return tuple(dict.fromkeys(alone))


def count(pattern: str, ptx: str) -> int:
    return len(re.findall(pattern, ptx))


def kernel_modules() -> list[str]:
    package = importlib.import_module(KERNELS)
    names = [module.name for module in pkgutil.walk_packages(package.__path__, f"{KERNELS}.")]
    return [name for name in names if name != __name__ and hasattr(importlib.import_module(name), "aot_cases")]


@functools.cache
def cases_of(module: str) -> list[KernelCase | CudaCase]:
    """The configurations a module declares, each under its first name; a process records them once."""
    found: dict[Any, KernelCase | CudaCase] = {}
    for case in importlib.import_module(module).aot_cases():
        code = case.source.text if isinstance(case, CudaCase) else (case.source.hash(), str(case.options))
        found.setdefault((code, frozenset(case.expects)), case)
    return list(found.values())


def is_for(arch: Arch, case: KernelCase | CudaCase) -> bool:
    if isinstance(case, CudaCase):
        return arch.cuda_kernels
    return arch.converts_e4m3 or "fp8e4nv" not in str(case.source.signature)


def run_case(module: str, index: int, arch: Arch = HOPPER) -> Outcome:
    """Compile the ``index``-th case of a module; runs in a worker process, so a case travels by name."""
    case = cases_of(module)[index]
    try:
        quality = compile_case(case, arch)
    except (triton.TritonError, RuntimeError, ValueError, TypeError, subprocess.CalledProcessError) as error:
        reason = f"does not compile: {type(error).__name__}: {' '.join(str(error).split())}"
        return Outcome(kernel=case.kernel, name=case.name, quality=None, complaints=[reason])
    return Outcome(kernel=case.kernel, name=case.name, quality=quality, complaints=quality.complaints(case, arch))


def run_cases(tasks: Sequence[tuple[str, int]], jobs: int, arch: Arch = HOPPER) -> list[Outcome]:
    """Outcomes in the order of the tasks, compiled by ``jobs`` processes, with a running count on standard error."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, context, initializer=end_with_parent, initargs=(os.getpid(),)) as pool:
        futures: list[Future[Outcome]] = [pool.submit(run_case, *task, arch) for task in tasks]
        for done, future in enumerate(as_completed(futures), start=1):
            outcome = future.result()
            sys.stderr.write(f"[{done}/{len(futures)}] {outcome.kernel} {outcome.name}\n")
    return [future.result() for future in futures]


def format_table(rows: Sequence[Sequence[str]]) -> str:
    """Rows as aligned columns, words to the left and numbers to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADER))]
    lines = []
    for row in rows:
        cells = [cell.ljust(w) if i < 2 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def build_parser() -> argparse.ArgumentParser:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="comet compile",
        description="Compile every shipped kernel configuration without a GPU and check its machine code.",
    )
    parser.add_argument(
        "--filter", default="", metavar="NAME", help="only kernels whose 'kernel configuration' has NAME"
    )
    parser.add_argument(
        "--modules", nargs="+", metavar="MODULE", help="modules with aot_cases(); default: comet.kernels"
    )
    parser.add_argument(
        "--arch", default=HOPPER.name, choices=ARCHS, help="GPUs to compile for; others than Hopper's run only Triton's"
    )
    words = "compiler processes (default: one for each usable core)"
    parser.add_argument("--jobs", type=int, default=usable_cores(), metavar="N", help=words)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile, print the table, the complaints and the JSON line.

    Returns:
        Exit code: 0 when every configuration meets its expectations, else 1; 2 when no configuration matches.
    """
    parser = build_parser()
    options = parser.parse_args(arguments)
    if options.jobs < 1:
        parser.error(f"--jobs={options.jobs} must be at least 1")
    arch = ARCHS[options.arch]
    start = time.monotonic()
    tasks = [
        (module, index)
        for module in options.modules or kernel_modules()
        for index, case in enumerate(cases_of(module))
        if options.filter in f"{case.kernel} {case.name}" and is_for(arch, case)
    ]
    if not tasks:
        known = {case.kernel for module in options.modules or kernel_modules() for case in cases_of(module)}
        known = sorted({re.split("_(?:bf16|fp16|fp8)", kernel)[0] for kernel in known})
        sys.stderr.write(
            f"--filter={options.filter!r} must be in a configuration's name; kernels: {', '.join(known)}\n"
        )
        return 2
    outcomes = run_cases(tasks, min(options.jobs, len(tasks)), arch)
    failed = [outcome for outcome in outcomes if outcome.complaints]
    sys.stdout.write(format_table([HEADER, *(outcome.row() for outcome in outcomes)]) + "\n")
    for outcome in failed:
        sys.stdout.write(f"FAILED {outcome.kernel} ({outcome.name}): {'; '.join(outcome.complaints)}\n")
    summary = {"task": "compile", "kernels": len(outcomes), "failed": len(failed), "target": arch.assembler}
    sys.stdout.write(json.dumps({**summary, "seconds": round(time.monotonic() - start, 1)}) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
