"""Files of ``torch.distributed.checkpoint``: read without running code of theirs, written with errors that say why."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
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
from comet.training.checkpoint_folder import checksum

METADATA = ".metadata"
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
        """One of the classes of metadata; raises ``UnpicklingError`` for any other name."""
        if (module, name) not in ADMITTED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return ADMITTED[module, name]


def read_metadata(path: Path) -> Metadata:
    """Metadata of a checkpoint folder."""
    file = path / METADATA
    try:
        with file.open("rb") as stream:
            found = PlainUnpickler(stream).load()
        require(isinstance(found, Metadata), f"it holds a {type(found).__name__}")
        for name, kind in found.state_dict_metadata.items():
            require(isinstance(kind, metadata.TensorStorageMetadata), f"{name} is a {type(kind).__name__}")
        for place in found.storage_data.values():
            require(Path(place.relative_path).name == place.relative_path, f"it points to {place.relative_path!r}")
            require(not place.transform_descriptors, f"{place.relative_path} is encoded")
    except (pickle.UnpicklingError, AttributeError, EOFError, ImportError, LookupError, TypeError, ValueError) as error:
        raise ValueError(
            f"checkpoint {path} is refused: {METADATA} must describe tensors and plain data only, but {error}"
        ) from error
    found.storage_meta = metadata.StorageMeta()
    return found


class Reader(dcp.FileSystemReader):
    """Reads tensors only: its metadata is unpickled by ``PlainUnpickler``, tensors with ``weights_only``."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Metadata of the folder; raises ``ValueError`` where something else is in it."""
        return read_metadata(Path(self.path))


class Writer(dcp.FileSystemWriter):
    """Writes tensors; what the system says about a file it could not write is raised as it is."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, sync_files=True)
        self.folder = path
        self.checksums: dict[str, str] = {}  # of the files this rank has written, by name

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's share; raises ``OSError`` where torch would only say that a position is unexpected."""
        try:
            results = super().write_data(plan, planner)
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):
                raise error.__context__ from error
            raise
        names = {result.storage_data.relative_path for result in results.value()}
        self.checksums.update({name: checksum(self.folder / name) for name in names})
        return results

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the metadata, on one rank."""
        super().finish(metadata, results)
        self.checksums[METADATA] = checksum(self.folder / METADATA)
