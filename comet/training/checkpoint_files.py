"""Files of ``torch.distributed.checkpoint``: read without running code of theirs, written with errors that say why."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from comet.config import require
from comet.training.checkpoint_folder import METADATA, checksum

# All that the metadata of tensors is made of. Not functions and other classes, which a pickle would call; and not bytes
# (BytesStorageMetadata), which torch's planner would unpickle.
ADMITTED: Mapping[tuple[str, str], Any] = {
    **{(kind.__module__, kind.__name__): kind for kind in (
        metadata.Metadata, metadata.MetadataIndex, metadata.StorageMeta, metadata.TensorProperties,
        metadata.TensorStorageMetadata, metadata.ChunkStorageMetadata, metadata._MEM_FORMAT_ENCODING,
        filesystem._StorageInfo, torch.Size,
    )},
    **{("torch", str(dtype).removeprefix("torch.")): dtype for dtype in vars(torch).values()
       if isinstance(dtype, torch.dtype)},
    ("torch.serialization", "_get_layout"): lambda name: torch.strided,  # the only layout that is saved
    **{(module, "PosixPath"): PurePosixPath for module in ("pathlib", "pathlib._local")},
}  # fmt: skip


class PlainUnpickler(pickle.Unpickler):
    """Makes tensors' metadata of a pickle, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ADMITTED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return ADMITTED[module, name]


class Reader(dcp.FileSystemReader):
    """Reads tensors only: its metadata is unpickled by ``PlainUnpickler``, tensors with ``weights_only``."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the metadata of the folder; raise ``ValueError`` if it describes more than tensors."""
        try:
            with Path(self.path, METADATA).open("rb") as stream:
                found = PlainUnpickler(stream).load()
            require(isinstance(found, Metadata), f"it holds a {type(found).__name__}")
            for name, kind in found.state_dict_metadata.items():
                require(isinstance(kind, metadata.TensorStorageMetadata), f"{name} is a {type(kind).__name__}")
            for place in found.storage_data.values():
                require(Path(place.relative_path).name == place.relative_path, f"it points to {place.relative_path!r}")
                require(not place.transform_descriptors, f"{place.relative_path} is encoded")
        except (
            pickle.UnpicklingError,
            AttributeError,
            EOFError,
            ImportError,
            LookupError,
            TypeError,
            ValueError,
        ) as error:
            rule = f"{METADATA} must describe tensors and plain data only, but {error}"
            raise ValueError(f"checkpoint {self.path} is refused: {rule}") from error
        found.storage_meta = metadata.StorageMeta()
        return found


@dataclass(frozen=True)
class Written(WriteResult):
    """A tensor in a file, and the checksum of the whole file."""

    checksum: str


class Writer(dcp.FileSystemWriter):
    """Writes tensors; an error of the system about a file is raised as it is.

    Args:
        path: Folder of the files.
        complete: Called on rank 0 once the files of all ranks are there, with the checksum of each.
    """

    def __init__(self, path: Path, complete: Callable[[Mapping[str, str]], object]) -> None:
        super().__init__(path)
        self._complete = complete

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's share; raise ``OSError`` where torch would only say that a position is unexpected."""
        try:
            results = super().write_data(plan, planner).value()
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):
                raise error.__context__ from error
            raise
        names = {result.storage_data.relative_path for result in results}
        checksums = {name: checksum(Path(self.path, name)) for name in names}
        written: Future[list[WriteResult]] = Future()
        written.set_result(
            [Written(**vars(result), checksum=checksums[result.storage_data.relative_path]) for result in results]
        )
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, results)
        written: Any = chain.from_iterable(results)
        self._complete({result.storage_data.relative_path: result.checksum for result in written})
