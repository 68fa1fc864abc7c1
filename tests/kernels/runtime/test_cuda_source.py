"""Sources of kernels in CUDA C++: what host and device must agree on, and what the compiler says where they do not."""

import ctypes
import re
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

import comet.kernels
from comet.kernels.gemm import wgrad_cuda
from comet.kernels.layer import dispatch_gemm, gemm_combine
from comet.kernels.network import put_cuda
from comet.kernels.runtime import nvrtc, wgmma
from comet.kernels.runtime.cuda_source import (
    INT32,
    POINTER,
    CudaSource,
    DeviceStruct,
    TensorMap,
    fields,
    padded,
    storage_bytes,
)
from comet.kernels.runtime.nvrtc import compile_cubin, is_available, what_is_missing

SOURCES = Path(comet.kernels.__path__[0]) / "cuda"
HEADERS = SOURCES / "include"
MODULES = (dispatch_gemm, gemm_combine, wgrad_cuda, put_cuda)
of_all_modules = pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)


def included_by(path: Path) -> set[Path]:
    """Headers that a file includes, and all that these include."""
    named = {(path.parent / name).resolve() for name in re.findall(r'#include "(.+)"', path.read_text())}
    return named.union(*map(included_by, named))


needs_compiler = pytest.mark.skipif(bool(what_is_missing()), reason=what_is_missing() or "it is there")


def a_source(**constants: int) -> CudaSource:
    """A small kernel, some of its constants replaced."""
    source = wgrad_cuda.source(torch.bfloat16)
    return replace(source, constants={**source.constants, **constants})


def test_worked_example_of_the_memory() -> None:
    assert storage_bytes(4, 49152, 8192, 32, 8) == 1024 + 4 * (49152 + 16) + 8192 + 8 * (32 + 16) == 206272


def test_the_header_of_matrix_instructions_is_what_its_generator_writes() -> None:
    assert wgmma.HEADER.read_text() == wgmma.header(), "run python -m comet.kernels.runtime.wgmma"


def test_every_file_is_used() -> None:
    templates = {case.source.text.split('"')[1] for module in MODULES for case in module.aot_cases()}
    assert {path.name for path in SOURCES.glob("*.cu")} == templates
    assert set(HEADERS.glob("**/*.cuh")) == set().union(*(included_by(SOURCES / name) for name in templates))


@pytest.mark.parametrize("path", [*HEADERS.rglob("*.cuh")], ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_header_is_included_once(path) -> None:
    guard = "_".join(("COMET", *path.relative_to(HEADERS).with_suffix("").parts, "CUH")).upper()
    code = re.sub(r"^//.*\n|^\n", "", path.read_text(), flags=re.MULTILINE)
    assert code.startswith(f"#ifndef {guard}\n#define {guard}\n")
    assert code.endswith("#endif\n")


def test_lines_are_as_short_as_those_of_the_rest() -> None:
    wide = [
        f"{path.name}:{number}"
        for path in SOURCES.rglob("*.cu*")
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if len(line) > 120
    ]
    assert not wide


def unused_constants(source: str) -> list[str]:
    """Return the constants that the host puts into a ``Config`` and no device code reads."""
    template = re.search(r'#include "(.+)"', source)[1]
    files = {SOURCES / template, *included_by(SOURCES / template)}
    code = re.sub(r"//.*", "", "\n".join(path.read_text() for path in files))
    return [name for name in re.findall(r"static constexpr \w+ (\w+)", source) if f"Config::{name}" not in code]


@of_all_modules
def test_a_source_gets_no_constant_that_it_does_not_use(module: ModuleType) -> None:
    for case in module.aot_cases():
        assert not unused_constants(case.source.text), case.name
        assert unused_constants(f"{case.source.text}\nstatic constexpr int SPARE = 1; // Config::SPARE") == ["SPARE"]


@of_all_modules
def test_kernels_that_differ_have_other_names(module: ModuleType) -> None:
    sources = {case.kernel: case.source.text for case in module.aot_cases()}
    assert len(sources) == len({case.source.text for case in module.aot_cases()})


def test_a_structure_takes_addresses_of_tensors() -> None:
    class Two(DeviceStruct):
        _fields_ = (*fields(POINTER, "here nowhere"), *fields(INT32, "count"))

    tensor = torch.zeros(3)
    made = Two.of(here=tensor, nowhere=None, count=3)
    assert (made.here, made.nowhere, made.count) == (tensor.data_ptr(), None, 3)
    with pytest.raises(AssertionError, match="Two has not the fields here"):
        Two.of(here=tensor)


def test_a_structure_with_maps_is_as_long_as_the_device_says() -> None:
    class Maps(DeviceStruct):
        _fields_ = padded(*fields(TensorMap, "first second"), *fields(INT32, "count"))

    assert ctypes.sizeof(Maps) == 320
    assert Maps.of(first=TensorMap(), second=TensorMap(), count=7).count == 7


@needs_compiler
@pytest.mark.parametrize(
    ("names", "rule"), [("b_cols a_cols", r"WgradProblem, a_cols\)"), ("a_cols b_cols spare", "WgradProblem")]
)
def test_a_structure_that_the_host_has_otherwise_does_not_compile(names: str, rule: str) -> None:
    problem = type(
        "WgradProblem",
        (DeviceStruct,),
        {"_fields_": (*fields(POINTER, "starts counts"), *fields(INT32, f"experts {names}"))},
    )
    arguments = type("WgradArgs", (DeviceStruct,), {"_fields_": fields(problem, "problem")})
    with pytest.raises(RuntimeError, match=rule):
        compile_cubin(replace(a_source(), arguments=dict(args=arguments)).text, "wgrad_bf16")


@needs_compiler
@pytest.mark.parametrize(
    ("constants", "rule"),
    [
        (dict(SHARED_BYTES=1), r"wgrad.cu\(\d+\): error.*static assertion"),  # memory that the host counts otherwise
        (dict(NUM_STAGES=3), "LEAD < Config::NUM_STAGES"),  # blocks that would wait for ever
        (dict(NUM_STAGES=14, BLOCK_K=16), r"TILE_SLOTS > Config::NUM_STAGES \+ 2"),
    ],
)
def test_blocks_that_break_a_rule_do_not_compile(constants: dict[str, int], rule: str) -> None:
    with pytest.raises(RuntimeError, match=rule):
        compile_cubin(a_source(**constants).text, "wgrad_bf16")


@needs_compiler
def test_an_error_names_file_and_line() -> None:
    source = a_source()
    lacking = {name: value for name, value in source.constants.items() if name != "STAGED_BOXES"}
    line = next(
        number
        for number, text in enumerate((HEADERS / "gemm" / "wgrad.cuh").read_text().splitlines(), start=1)
        if "STAGED_BOXES" in text
    )
    with pytest.raises(RuntimeError, match=rf"include/gemm/wgrad.cuh\({line}\): error: .*STAGED_BOXES"):
        compile_cubin(replace(source, constants=lacking).text, source.entry)


def test_not_without_a_gpu() -> None:
    assert not is_available(torch.device("cpu"))


@needs_compiler
def test_a_missing_compiler_is_said_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert nvrtc.what_is_missing() == ""
    assert is_available.__wrapped__(torch.device("cuda", 0))
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    assert not is_available.__wrapped__(torch.device("cuda", 0))
    assert len(caplog.records) == 1
    assert re.search(r"no CUDA C\+\+ compiler .*cuda.bindings.*pip install 'comet-moe\[cuda\]'", caplog.text)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    assert not is_available.__wrapped__(torch.device("cuda", 0))
    assert len(caplog.records) == 1


def test_each_version_of_the_compiler_has_cubins_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = pytest.importorskip("cuda.bindings.nvrtc", reason="needs pip install 'comet-moe[cuda]'")
    monkeypatch.setattr("triton.knobs.cache.dir", str(tmp_path))
    compiled: list[bytes] = []

    def compile_one(source: str, name: str, options: tuple[str, ...]) -> bytes:
        compiled.append(f"{source} by call {len(compiled)}".encode())
        return compiled[-1]

    monkeypatch.setattr(nvrtc, "_compile", compile_one)
    seen = []
    for minor in (8, 8, 9, 8):
        monkeypatch.setattr(found, "nvrtcVersion", lambda minor=minor: (0, 12, minor))
        seen.append(compile_cubin("code", "kernel"))
    first, second = compiled
    assert seen == [first, first, second, first]


def test_an_installation_has_all_files() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())
    listed, patterns = (project["tool"]["setuptools"][name] for name in ("packages", "package-data"))
    folders = [name.removeprefix("comet.kernels").replace(".", "/") for name in listed if "comet.kernels." in name]
    kernels = SOURCES.parent
    carried = {path for folder in folders for pattern in patterns["*"] for path in (kernels / folder[1:]).glob(pattern)}
    assert carried == set(SOURCES.rglob("*.cu")) | set(SOURCES.rglob("*.cuh"))
