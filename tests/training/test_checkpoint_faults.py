"""Checkpoints that were changed, would be full of NaN, do not fit on the disk, or come from somebody else."""

from __future__ import annotations

import json
import os
import pickle
import resource
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from ranks import run_ranks
from training_cases import MODEL, Rank, losses, make_job, make_model, train_on_rank

from comet.training import trainer
from comet.training.checkpoint import load_weights
from comet.training.checkpoint_folder import Reader, checksum, list_checkpoints, read_checkpoint, read_metadata
from comet.training.trainer import train


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """Output folder of a run with the checkpoints step-000003 and step-000006, and its text beside it."""
    folder = tmp_path_factory.mktemp("saved")
    train(make_job(folder, checkpoint_every=3), Rank())
    return folder / "out"


def flip_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "comet.yaml"])
def test_a_flipped_byte_is_named_and_passed_over(saved, tmp_path, capsys, name):
    out = tmp_path / "out"
    shutil.copytree(saved, out)
    flip_a_byte(out / "step-000006" / name)
    checkpoint = read_checkpoint(out / "step-000006")
    message = rf"step-000006 of step 6 is damaged: the bytes of {name}.*; .*step-000003 is intact"
    with pytest.raises(ValueError, match=message):
        load_weights(make_model()[0], checkpoint)
    with pytest.raises(ValueError, match=message):
        train(make_job(tmp_path, resume=str(checkpoint.path)), Rank())
    assert train(make_job(tmp_path, resume="auto"), Rank())["steps"] == 6
    error = capsys.readouterr().err
    assert f"skipped: checkpoint {checkpoint.path} of step 6 is damaged: the bytes of {name}" in error
    assert "from step 3" in error
    assert losses(out) == losses(saved)


def test_ranks_share_the_reading_and_agree_on_damage(saved, tmp_path):
    out = tmp_path / "out"
    run_ranks(train_on_rank, 2, make_job(tmp_path, ep=2, checkpoint_every=3))
    flip_a_byte(out / "step-000006" / "__1_0.distcp")
    first, second = run_ranks(train_on_rank, 2, make_job(tmp_path, ep=2, resume="auto"))
    assert first == second
    flip_a_byte(out / "step-000003" / "__0_0.distcp")
    flip_a_byte(out / "step-000006" / "__0_0.distcp")
    with pytest.raises(AssertionError, match=r"step-000006 of step 6 is damaged.*step-000003 of step 3 is damaged"):
        run_ranks(train_on_rank, 2, make_job(tmp_path, ep=2, resume="auto"))


def test_nan_is_not_saved_over_a_good_checkpoint(tmp_path, monkeypatch):
    class Spoiling(trainer.TrainStep):
        def __call__(self, step, **rest):
            metrics = super().__call__(step, **rest)
            if step == 4:
                next(iter(self.optimizer.state.values()))["exp_avg_sq"].view(-1)[7] = float("inf")
            return metrics

    monkeypatch.setattr(trainer, "TrainStep", Spoiling)
    message = (
        r"training diverged at step 5 \(NaN or Inf in optimizer\.\S+\.exp_avg_sq and 0 other tensors, which are not "
        r"saved\): train\.lr=0\.01 must be lower.*the last checkpoint is .*step-000004"
    )
    with pytest.raises(ValueError, match=message):
        train(make_job(tmp_path, checkpoint_every=1), Rank())
    assert [found.step for found in list_checkpoints(tmp_path / "out")[0]] == [4, 3]


def write_little(rank, world_size, job, most):
    """The job in a process that may only write small files; rank 0 may write large ones."""
    if rank == world_size - 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    with pytest.raises(
        ValueError, match=r"step-000003 cannot be written: File too large: it needs .*is none"
    ) as caught:
        train(job, Rank(rank, world_size))
    return str(caught.value)


def test_a_file_that_cannot_be_written_is_one_line_on_all_ranks(tmp_path):
    first, second = run_ranks(write_little, 2, make_job(tmp_path, ep=2, checkpoint_every=3), 20_000)
    assert first == second
    assert len(first.splitlines()) == 1
    assert not list((tmp_path / "out").glob("step-*"))


class Bomb:
    """What a pickle may hold: a call."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return os.system, (f"touch {self.path}",)


def bomb_metadata(folder: Path, bomb: Bomb) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(bomb))


def bomb_as_bytes(folder: Path, bomb: Bomb) -> None:
    """Weights that are no tensors: torch's own planner unpickles them."""
    names = read_metadata(folder).state_dict_metadata
    state = {name: torch.zeros(kind.size) for name, kind in names.items()}
    state["model.embedding.weight"] = bomb
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)


def bomb_as_tensor(folder: Path, bomb: Bomb) -> None:
    """The bytes of every tensor are those of a pickle."""
    file, metadata = folder / "__0_0.distcp", read_metadata(folder)
    torch.save(bomb, file)
    for place in metadata.storage_data.values():
        place.offset, place.length = 0, file.stat().st_size
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def point_elsewhere(folder: Path, bomb: Bomb) -> None:
    metadata = read_metadata(folder)
    next(iter(metadata.storage_data.values())).relative_path = f"../../{bomb.path.name}"
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize(
    ("attack", "message"),
    [
        (
            bomb_metadata,
            r"refused: \.metadata must describe tensors and plain data only, but it asks for posix.system",
        ),
        (bomb_as_bytes, r"is refused: .* it asks for torch\.distributed\.checkpoint\.metadata\.BytesStorageMetadata"),
        (bomb_as_tensor, r"cannot be read: Weights only load failed"),
        (point_elsewhere, r"is refused: .* it points to '\.\./\.\./ran'"),
    ],
)
def test_a_checkpoint_of_somebody_else_runs_no_code(saved, tmp_path, attack, message):
    folder, ran = tmp_path / "step-000006", tmp_path / "ran"
    shutil.copytree(saved / folder.name, folder)
    attack(folder, Bomb(ran))
    manifest = json.loads((folder / "comet.json").read_text())
    for name, file in manifest["files"].items():  # whoever attacks knows how to add up
        file.update({"bytes": (folder / name).stat().st_size, "blake2b": checksum(folder / name)})
    (folder / "comet.json").write_text(json.dumps(manifest))
    assert read_checkpoint(folder).step == 6
    with pytest.raises(ValueError, match=message) as caught:
        load_weights(make_model(MODEL)[0], read_checkpoint(folder))
    assert len(str(caught.value).splitlines()) == 1
    assert not ran.exists()


def test_what_is_saved_can_be_read_by_the_reader_that_admits_tensors_only(tmp_path):
    kinds = [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.uint8, torch.bool]
    state = {str(kind): torch.ones(3, 2).to(kind) for kind in kinds}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path), no_dist=True)
    found = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    dcp.load(found, storage_reader=Reader(tmp_path), no_dist=True)
    assert all(torch.equal(found[name].float(), tensor.float()) for name, tensor in state.items())
