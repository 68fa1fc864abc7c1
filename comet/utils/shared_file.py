"""Files that several processes write: one at a time, each whole, and tried before what they are to hold is measured."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock


def locked(path: Path) -> FileLock:
    """Return a lock that admits one writer of a file among all processes; it ends with its process."""
    return FileLock(path.with_name(path.name + ".lock"))


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add the file's path to system errors; errors from writing to an open file do not have it."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, error.filename or str(path)) from error


def write_whole(path: Path, text: str) -> None:
    """Replace a file at once: readers see the old or the new file, and a writer that dies leaves the old one.

    There is one writer at a time (``locked``), so that one name serves all; the umask says who may read the file.
    """
    part = path.with_name(path.name + ".tmp")
    try:
        with naming(path), part.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def require_writable(path: Path, setting: str) -> None:
    """Make the file's folder; raise ``ValueError`` naming ``setting``, ``output_dir='x'``, if it is not writable."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(path), tempfile.NamedTemporaryFile(prefix=path.name, suffix=".tmp", dir=path.parent):
            if path.is_dir():
                raise IsADirectoryError(f"{path} is a folder")
    except OSError as error:
        raise ValueError(f"{setting} must be a folder that can be written: {error}") from error
