"""The folder of a run: one job at a time writes there, and only the user gives up what another run left."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Self

from filelock import FileLock, Timeout

from comet.config import require
from comet.jobs.config import TrainJob
from comet.training.checkpoint_folder import (
    MANIFEST,
    Checkpoint,
    find_checkpoints,
    list_checkpoints,
    names_checkpoint,
    remove_checkpoint,
)
from comet.training.ranks import gather
from comet.training.report import EVENT_FILES, HISTORY_FILE, PROFILE, RESULT_FILE
from comet.training.saved_settings import SETTINGS_FILE
from comet.utils.shared_file import write_whole

LOCK, OWNER, JOB = ".comet.lock", ".comet.owner", ".comet.job"
RUN_FILES = (HISTORY_FILE, SETTINGS_FILE, RESULT_FILE, "loss.png", "expert_load.png", "sample.txt")
RUN_PATTERNS = (EVENT_FILES, f"{PROFILE}/rank*.pt.trace.json.gz")
RESTART_S = 30.0  # for the end of the rank that held the lock, if the ranks were restarted


class FolderLock:
    """A job's claim to write into a folder; the system gives it up for a process that is killed."""

    def __init__(self, folder: Path, setting: str, *, patience_s: float = 0.0) -> None:
        self.folder = folder
        self.setting = setting  # the folder as the user wrote it: output_dir='runs/1'
        self.patience_s = patience_s
        self._lock = FileLock(folder / LOCK)

    def acquire(self) -> None:
        """Claim the folder, which is made if missing, unless this job has it already."""
        if self._lock.is_locked:
            return
        owner = self.folder / OWNER
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock.acquire(timeout=self.patience_s)
            owner.write_text(f"pid {os.getpid()} on {socket.gethostname()}")
        except Timeout as error:
            text = owner.read_text() if owner.is_file() else "which has not said its name yet"
            raise ValueError(
                f"{self.setting} is in use by another job ({' '.join(text.split())}): wait for its end, or choose "
                "another folder"
            ) from error
        except OSError as error:
            raise ValueError(f"{self.setting} must be a folder that can be written: {error}") from error

    def release(self) -> None:
        if self._lock.is_locked:
            (self.folder / OWNER).unlink(missing_ok=True)
            self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class RunFolder(FolderLock):
    """The output folder of a training run on rank 0; another attempt of its ranks goes on there by itself.

    Args:
        attempt: How often the ranks were restarted; until the folder is the job's, an older run there is refused.
        job: ``RankContext.job``; a later attempt without it takes the folder for the job's, so that nothing is lost.
    """

    def __init__(self, config: TrainJob, attempt: int, job: str = "") -> None:
        patience = RESTART_S if attempt else 0.0
        super().__init__(Path(config.output_dir), f"output_dir={config.output_dir!r}", patience_s=patience)
        self.resume, self.overwrite = config.resume, config.overwrite
        self.attempt, self.job = attempt, job

    def has_begun(self) -> bool:
        mark = self.folder / JOB
        return self.attempt > 0 and (not self.job or (mark.is_file() and mark.read_text() == self.job))

    def find_checkpoints(self) -> tuple[list[Checkpoint], list[str]]:
        """``checkpoint_folder.find_checkpoints``, unless a run in the folder would be lost; for rank 0."""
        resume = self.resume
        if self.folder.is_dir():
            self.acquire()
            own = [found.path for found in list_checkpoints(self.folder)[0]]
            if not self.has_begun():
                self.require_own(own)
            elif own or resume is None:
                resume = "auto"
        return find_checkpoints(resume, str(self.folder))

    def begin(self, settings: str) -> None:
        """Make the folder this run's, with its settings, YAML text, in it; for rank 0."""
        self.acquire()
        if self.overwrite and not self.has_begun():
            for pattern in (*RUN_FILES, *RUN_PATTERNS):
                for file in self.folder.glob(pattern):
                    file.unlink()
            for path in self.folder.glob("step-*"):
                remove_checkpoint(path)
        write_whole(self.folder / JOB, self.job)  # nothing of an older run is left
        write_whole(self.folder / SETTINGS_FILE, settings)

    def require_shared(self) -> None:
        """Raise ``ValueError`` unless all ranks find this job's folder, in which each writes its part (collective)."""
        owner = self.folder / OWNER
        found = gather(owner.read_text() if owner.is_file() else "")
        others = [rank for rank, name in enumerate(found) if name != found[0]]
        rule = "must be one folder of all ranks"
        ways = "give the whole path of one on a file system that all nodes share"
        require(not others, f"{self.setting} {rule}, but ranks {others} find another: {ways}")

    def require_own(self, checkpoints: list[Path]) -> None:
        """Raise ``ValueError`` if the job would lose what the folder holds, of which these are whole, newest first."""
        source = named = None if self.resume in (None, "auto") else Path(str(self.resume))
        if source is not None:
            source = source.parent if names_checkpoint(source) else source
        goes_on = self.resume == "auto" or (source is not None and source.resolve() == self.folder.resolve())
        both = f"overwrite=true removes what resume={self.resume} is to continue: leave one of them out"
        require(not (goes_on and self.overwrite), both)
        marks = [self.folder / SETTINGS_FILE, self.folder / JOB, *self.folder.glob(f"step-*/{MANIFEST}")]
        is_ours = any(mark.is_file() for mark in marks)  # others, too, name files metrics.jsonl and loss.png
        history = self.folder / HISTORY_FILE
        is_run = bool(checkpoints) or (is_ours and history.is_file() and history.stat().st_size > 0)
        ways = f"resume={self.folder} continues it" if checkpoints else "no step of it was saved"
        require(
            goes_on or self.overwrite or not is_run,
            f"{self.setting} holds a run: {ways}, overwrite=true removes it, or choose another output_dir",
        )
        foreign = [name for name in RUN_FILES if not is_ours and (self.folder / name).exists()]
        rule = f"must not hold {', '.join(foreign)}, which no run wrote and this one would replace"
        require(not foreign, f"{self.setting} {rule}: choose another output_dir, or move them away")
        if goes_on and named is not None and named != source and checkpoints:
            is_newest = named.resolve() == checkpoints[0].resolve()
            rule = f"must be the newest checkpoint of {self.setting}, {checkpoints[0]}, which it would replace"
            require(is_newest, f"resume={self.resume} {rule}: choose another output_dir")
