"""CUDA C++ kernels: compiled at run time with NVRTC, kept in Triton's cache, launched through cuda-python.

The layer's kernels on Hopper, and weight gradients. ``cuda.bindings`` is imported at the first use; without it, and on
other GPUs, callers take the Triton twin.
"""

import ctypes
import functools
import hashlib
import importlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from triton.runtime import driver as triton_driver
from triton.runtime.cache import get_cache_manager

from .arch import HOPPER, arch_of
from .cuda_source import FOLDER, NUM_THREADS, CudaSource, TensorMap

OPTIONS = (f"--gpu-architecture={HOPPER.assembler}", "-std=c++17", "-default-device", f"--include-path={FOLDER}")
SEGMENT_ROWS = 2**30  # The axis that ends with a segment is longer than any tensor.
MANY_ROWS = 2**31 - 2**16  # length of the axes that end no segment
TENSOR_MAPS = 4096  # to keep: a training step needs a dozen of each layer, and finds none of them if they are too many
LAUNCHES = 256  # configurations to keep: a dozen of each layer's sizes on each stream

logger = logging.getLogger(__name__)


@functools.cache
def is_available(device: torch.device) -> bool:
    """Whether CUDA C++ kernels for sm_90a can be compiled and run on ``device``; says once what is missing."""
    arch = arch_of(device)
    if arch is None or not arch.cuda_kernels:
        return False
    missing = what_is_missing()
    if missing:
        logger.warning("%s: layers are slower (pip install 'comet-moe[cuda]', on every node)", missing)
    return not missing


def what_is_missing() -> str:
    """Return why CUDA C++ cannot be compiled here; empty if it can."""
    try:
        from cuda.bindings import nvrtc

        _checked(nvrtc.nvrtcVersion())
    except (ImportError, RuntimeError, OSError) as error:
        return f"no CUDA C++ compiler ({type(error).__name__}: {error})"
    return ""


def compile_cubin(source: str, name: str, *, relocatable: bool = False) -> bytes:
    """Return machine code of ``source`` for sm_90a, from Triton's cache if this version of NVRTC compiled it before.

    Args:
        relocatable: Whether it has yet to be linked.

    Raises:
        RuntimeError: With the compiler's log, if the source does not compile.
    """
    from cuda.bindings import nvrtc

    options = (*OPTIONS, *(["-rdc=true"] if relocatable else []))
    parts = [source, *(each for each in options if each != OPTIONS[-1]), _headers(), str(nvrtc.nvrtcVersion())]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    cache, file = get_cache_manager(key), f"{name}.cubin"
    path = cache.get_file(file) or cache.put(_compile(source, name, options), file, binary=True)
    return Path(path).read_bytes()


@functools.cache
def _headers() -> str:
    return "\0".join(path.read_text() for path in sorted(FOLDER.rglob("*.cu*")))


def _compile(source: str, name: str, options: Sequence[str]) -> bytes:
    from cuda.bindings import nvrtc

    program = _checked(nvrtc.nvrtcCreateProgram(source.encode(), f"{name}.cu".encode(), 0, [], []))
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        log = b" " * _checked(nvrtc.nvrtcGetProgramLogSize(program))
        nvrtc.nvrtcGetProgramLog(program, log)
        raise RuntimeError(f"{name}.cu does not compile: {log.decode()}")
    cubin = b" " * _checked(nvrtc.nvrtcGetCUBINSize(program))
    _checked(nvrtc.nvrtcGetCUBIN(program, cubin))
    _checked(nvrtc.nvrtcDestroyProgram(program))
    return cubin


@dataclass(frozen=True, slots=True, eq=False)
class CudaKernel:
    """A loaded kernel and the shape of its launches."""

    function: Any  # handle of the driver
    num_threads: int  # per block
    cluster: int  # blocks per cluster
    shared_bytes: int  # dynamic shared memory per block

    def launch(self, num_blocks: int, arguments: Sequence[Any]) -> None:
        """Launch on the current stream; arguments are tensors, structures or ints (32 bits)."""
        from cuda.bindings import driver

        holders = [_holder(argument) for argument in arguments]
        pointers = (ctypes.c_void_p * len(holders))(*[address for _, address in holders])
        shape = (num_blocks, self.num_threads, self.cluster, self.shared_bytes)
        gpu = triton_driver.active  # torch makes an object of the stream, which takes 18 us
        stream = gpu.get_current_stream(gpu.get_current_device())
        config = launch_config(*shape, stream)
        _checked(driver.cuLaunchKernelEx(config, self.function, ctypes.addressof(pointers), 0))


@functools.lru_cache(maxsize=LAUNCHES)
def launch_config(num_blocks: int, num_threads: int, cluster: int, shared_bytes: int, stream: int) -> Any:
    """The driver's object for a launch on a stream; to make one takes longer than to look it up."""
    from cuda.bindings import driver

    config, attribute = driver.CUlaunchConfig(), driver.CUlaunchAttribute()
    config.gridDimX, config.gridDimY, config.gridDimZ = num_blocks, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = num_threads, 1, 1
    config.sharedMemBytes = shared_bytes
    config.hStream = stream
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    attribute.value.clusterDim.x, attribute.value.clusterDim.y, attribute.value.clusterDim.z = cluster, 1, 1
    config.attrs, config.numAttrs = [attribute], 1
    return config


def load_kernel(cubin: bytes, name: str, *, num_threads: int, cluster: int, shared_bytes: int) -> CudaKernel:
    """Load a kernel of a cubin into the current device's context."""
    function = _function(_module(cubin), name, shared_bytes)
    return CudaKernel(function, num_threads, cluster, shared_bytes)


def load_source(source: CudaSource) -> CudaKernel:
    """Compile a kernel, link it if it calls a library, and load it into the current device's context."""
    cubin = compile_cubin(source.text, source.entry, relocatable=bool(source.library))
    module = _module(link_nvshmem(cubin, source.entry) if source.library else cubin)
    if source.library:
        importlib.import_module("nvshmem.bindings").cumodule_init(int(module))
    function = _function(module, source.entry, source.shared_bytes)
    return CudaKernel(function, NUM_THREADS, source.cluster, source.shared_bytes)


def link_nvshmem(relocatable: bytes, name: str) -> bytes:
    """Link a cubin with NVSHMEM's device library, which comes with torch for CUDA.

    Raises:
        RuntimeError: If the library or the linker is missing, or the linker is of another CUDA release than NVRTC.
    """
    found = [file for file in metadata.files("nvidia-nvshmem-cu13") or () if file.name == "libnvshmem_device.a"]
    if not found:
        raise RuntimeError("libnvshmem_device.a is missing: pip install nvidia-nvshmem-cu13")
    archive = Path(str(found[0].locate())).read_bytes()
    try:
        from cuda.bindings import nvjitlink as linker

        handle = linker.create(1, [f"-arch={HOPPER.assembler}"])
        linker.add_data(handle, linker.InputType.CUBIN, relocatable, len(relocatable), name)
        linker.add_data(handle, linker.InputType.LIBRARY, archive, len(archive), found[0].name)
        linker.complete(handle)
    except (ImportError, RuntimeError) as error:
        raise RuntimeError(
            f"{name} cannot be linked with NVSHMEM ({type(error).__name__}: {error}): install nvidia-nvjitlink and "
            f"nvidia-cuda-nvrtc of the same CUDA release (NVRTC is {nvrtc_version()})"
        ) from error
    cubin = bytearray(linker.get_linked_cubin_size(handle))
    linker.get_linked_cubin(handle, cubin)
    linker.destroy(handle)
    return bytes(cubin)


def nvrtc_version() -> str:
    """The CUDA release of NVRTC: 13.0."""
    from cuda.bindings import nvrtc

    _, major, minor = nvrtc.nvrtcVersion()
    return f"{major}.{minor}"


def _module(cubin: bytes) -> Any:
    from cuda.bindings import driver

    # A thread that has not used the GPU yet has no context; set_device makes the device's own current.
    torch.cuda.set_device(torch.cuda.current_device())
    return _checked(driver.cuModuleLoadData(cubin))


def _function(module: Any, name: str, shared_bytes: int) -> Any:
    from cuda.bindings import driver

    function = _checked(driver.cuModuleGetFunction(module, name.encode()))
    limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    _checked(driver.cuFuncSetAttribute(function, limit, shared_bytes))
    return function


def tensor_map(tensor: Tensor, box: tuple[int, ...]) -> TensorMap:
    """Descriptor of a tensor for TMA loads and stores of a ``box`` in rows of 128 bytes, swizzled.

    Args:
        tensor: 16-byte aligned, bfloat16, float16 or float8_e4m3fn; along its last axis elements are neighbours, other
            strides are multiples of 16 bytes.
        box: Elements of one load along each axis; 128 bytes along the last. What lies outside of the tensor is read
            as 0.
    """
    assert tensor.stride(-1) == 1, f"elements of a row are {tensor.stride(-1)} apart, not neighbours"
    assert tensor.data_ptr() % 16 == 0, f"a tensor at address {tensor.data_ptr()} does not start at 16 bytes"
    return _tensor_map(tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype, box)


def segment_map(rows: Tensor, box: tuple[int, int]) -> TensorMap:
    """Descriptor of rows for TMA loads that end where a segment of the rows ends, swizzled as ``tensor_map``'s.

    Rows behind the segment, and columns outside of the tensor, are read as 0. The axis of the rows is 2^30 long, and a
    load addresses it from its end, where the hardware stops. A second axis of rows says where the segment ends, and a
    third one takes the 2^30 rows back: addresses wrap around at 2^64 bytes. Triton's ``create_ragged_descriptor`` is
    the same. Row r of the ``count`` rows from ``start`` on is at ``(2^30, start + count, 2^30 - count + r)``.

    Args:
        rows: ``(Q, C)`` 16-byte aligned, contiguous, bfloat16 or float16; C a multiple of 8.
        box: Rows and columns of one load; 128 bytes of columns.
    """
    stride = rows.stride(0)
    shape = (MANY_ROWS, MANY_ROWS, SEGMENT_ROWS, rows.shape[1])
    strides = (2**64 // SEGMENT_ROWS - stride, stride, stride, 1)
    return _tensor_map(rows.data_ptr(), shape, strides, rows.dtype, (1, 1, *box))


@functools.lru_cache(maxsize=TENSOR_MAPS)
def _tensor_map(
    address: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, box: tuple[int, ...]
) -> TensorMap:
    from cuda.bindings import driver

    kinds = driver.CUtensorMapDataType
    kind = {
        torch.bfloat16: kinds.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        torch.float16: kinds.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        torch.float8_e4m3fn: kinds.CU_TENSOR_MAP_DATA_TYPE_UINT8,
    }[dtype]
    sizes = shape[::-1]
    bytes_apart = [dtype.itemsize * stride for stride in strides[-2::-1]]
    encoded = _checked(
        driver.cuTensorMapEncodeTiled(
            kind,
            len(sizes),
            address,
            [driver.cuuint64_t(size) for size in sizes],
            [driver.cuuint64_t(stride) for stride in bytes_apart],
            [driver.cuuint32_t(size) for size in box[::-1]],
            [driver.cuuint32_t(1)] * len(sizes),
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )
    return TensorMap.from_buffer_copy(ctypes.string_at(encoded.getPtr(), ctypes.sizeof(TensorMap)))


def _holder(argument: Any) -> tuple[Any, int]:
    """Return the object that keeps an argument alive until the launch has copied it, and its address."""
    if isinstance(argument, int):
        argument = ctypes.c_int32(argument)
    elif not isinstance(argument, ctypes.Structure):
        argument = ctypes.c_uint64(argument.data_ptr())
    return argument, ctypes.addressof(argument)


def _checked(result: tuple[Any, ...]) -> Any:
    """Return the value of a call, without its status; raise ``RuntimeError`` if that is not success."""
    status, *values = result
    if int(status) != 0:
        raise RuntimeError(f"{type(status).__name__} {status.name}")
    return values[0] if values else None
