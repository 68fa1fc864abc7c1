"""The words that some settings choose from, without torch: the command line checks settings before it is imported."""

from __future__ import annotations

from typing import Literal

CommBackend = Literal["auto", "nvshmem", "symm_mem", "cpu_shm"]
GraphMode = Literal["auto", "on", "off"]
MXType = Literal["mxfp8", "mxfp4"]
StoredType = Literal["mxfp8", "mxfp4", "fp8"]
