"""NVSHMEM's remote path on one host: the plugin of ``ipc_transport.cpp``, and kernels that call NVSHMEM.

A rank that loads the plugin before NVSHMEM starts sees no peer that is mapped, so its kernels' puts go through the
proxy thread, the plugin and an emulated link. Nothing here is installed with Comet.
"""

import ctypes
import importlib
import os
import subprocess
from importlib.metadata import files
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

SONAME = "nvshmem_transport_ucx.so.3"
SOURCE = Path(__file__).with_name("ipc_transport.cpp")
ARCHITECTURE = "sm_90a"
# Declarations of NVSHMEM 3.4's device library, whose own header does not compile under NVRTC in reasonable time.
PROTOTYPES = """
enum threadgroup_t { nvshmemi_threadgroup_thread = 0, nvshmemi_threadgroup_warp = 1, nvshmemi_threadgroup_block = 3 };
enum nvshmemi_amo_t { NVSHMEMI_AMO_SIGNAL_SET = 9, NVSHMEMI_AMO_SIGNAL_ADD = 10 };
template <threadgroup_t SCOPE>
__device__ void nvshmemi_transfer_put_signal(void* target, void* source, unsigned long bytes, void* signal,
                                             unsigned long value, nvshmemi_amo_t operation, int pe, bool nbi);
"""


def build_plugin(folder: Path) -> Path:
    """Compile the plugin with the machine's compiler."""
    library = folder / SONAME
    options = ["-std=c++20", "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", f"-Wl,-soname,{SONAME}"]
    subprocess.run(["g++", *options, "-o", str(library), str(SOURCE), "-ldl"], check=True)
    return library


def preload(library: Path, *, gbs: float = 0, latency_us: float = 0) -> ctypes.CDLL:
    """Load the plugin, so that NVSHMEM takes it when it starts; arguments and result are those of ``start``."""
    os.environ |= {
        "NVSHMEM_REMOTE_TRANSPORT": "ucx",
        "NVSHMEM_DISABLE_P2P": "1",
        "NVSHMEM_DISABLE_CUDA_VMM": "1",  # CUDA IPC needs memory of cudaMalloc
        "NVSHMEM_DISABLE_NVLS": "1",
        # The plugin copies on a stream: streams that share a hardware queue would let a copy wait behind a kernel that
        # waits for a peer.
        "CUDA_DEVICE_MAX_CONNECTIONS": "32",
        "COMET_TEST_LINK_GBS": str(gbs),
        "COMET_TEST_LINK_US": str(latency_us),
    }
    plugin = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    plugin.comet_test_link_bytes.restype = ctypes.c_uint64
    return plugin


def start(library: Path, rank: int, world_size: int, *, gbs: float = 0, latency_us: float = 0) -> ctypes.CDLL:
    """Start NVSHMEM on the current GPU so that all ranks are remote to each other, over a link of this rate.

    Args:
        library: Built by ``build_plugin``.
        gbs: Rate of the link that leaves this rank in 1e9 bytes a second; 0: unlimited.
        latency_us: Time until a signal arrives, in microseconds.

    Returns:
        The plugin, whose ``comet_test_link_bytes()`` counts the bytes sent.
    """
    plugin = preload(library, gbs=gbs, latency_us=latency_us)
    core: Any = importlib.import_module("nvshmem.core")
    device = importlib.import_module("cuda.core").Device(torch.cuda.current_device())
    device.set_current()
    unique = [core.get_unique_id(empty=rank != 0)._data.tobytes()]
    dist.broadcast_object_list(unique)
    own = core.get_unique_id(empty=True)
    own._data.view(np.int8)[:] = np.frombuffer(unique[0], dtype=np.int8)
    core.init(device=device, uid=own, rank=rank, nranks=world_size, initializer_method="uid")
    return plugin


def compile_and_link(source: str, name: str) -> bytes:
    """A cubin of CUDA C++ that calls NVSHMEM's device library."""
    nvrtc, linker = (importlib.import_module(f"cuda.bindings.{module}") for module in ("nvrtc", "nvjitlink"))

    def checked(result: tuple[Any, ...]) -> Any:
        assert int(result[0]) == 0, result
        return result[1] if len(result) > 1 else None

    program = checked(nvrtc.nvrtcCreateProgram((PROTOTYPES + source).encode(), f"{name}.cu".encode(), 0, [], []))
    options = [f"--gpu-architecture={ARCHITECTURE}".encode(), b"--std=c++17", b"-rdc=true"]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    log = b" " * checked(nvrtc.nvrtcGetProgramLogSize(program))
    nvrtc.nvrtcGetProgramLog(program, log)
    assert int(status) == 0, log.decode()
    relocatable = b" " * checked(nvrtc.nvrtcGetCUBINSize(program))
    checked(nvrtc.nvrtcGetCUBIN(program, relocatable))
    handle = linker.create(1, [f"-arch={ARCHITECTURE}"])
    archive = device_library().read_bytes()
    linker.add_data(handle, linker.InputType.CUBIN, relocatable, len(relocatable), name)
    linker.add_data(handle, linker.InputType.LIBRARY, archive, len(archive), "libnvshmem_device.a")
    linker.complete(handle)
    cubin = bytearray(linker.get_linked_cubin_size(handle))
    linker.get_linked_cubin(handle, cubin)
    linker.destroy(handle)
    return bytes(cubin)


def device_library() -> Path:
    """NVSHMEM's device library in the wheel that torch depends on."""
    found = [file for file in files("nvidia-nvshmem-cu13") or () if file.name == "libnvshmem_device.a"]
    assert found, "the wheel nvidia-nvshmem-cu13 has no libnvshmem_device.a"
    return Path(str(found[0].locate()))
