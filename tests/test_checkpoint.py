"""Weights on disk: whole or not at all, and read without running code."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn

from utils.checkpoint import BEST, LAST, NoCheckpoint, WeightsFile, read_weights, write_atomically
from utils.config import Config
from utils.errors import UserError


def network(value: float) -> nn.Module:
    """Its weights are all `value`; it has a buffer, too."""
    layers = nn.Sequential(nn.Conv3d(1, 2, 3), nn.BatchNorm3d(2))
    for parameter in layers.parameters():
        nn.init.constant_(parameter, value)
    return layers


def test_round_trip_of_weights_buffers_and_record(tmp_path: Path) -> None:
    config = Config(num_epochs=3).model_dump()
    saved = network(0.25)
    saved[1].running_mean += 1.5
    WeightsFile(tmp_path, config).save(saved, epoch=2, step=17, valid_loss=0.125)
    content = read_weights(tmp_path / LAST)
    assert (content["epoch"], content["step"], content["valid_loss"]) == (2, 17, 0.125)
    assert Config.model_validate(content["config"]) == Config(num_epochs=3)
    assert content["network"].keys() == saved.state_dict().keys()
    for name, value in saved.state_dict().items():
        assert torch.equal(content["network"][name], value), name
    network(0).load_state_dict(content["network"])  # strict


def test_last_is_the_last_epoch_and_best_the_lowest_loss(tmp_path: Path) -> None:
    weights = WeightsFile(tmp_path, {})
    for epoch, loss in enumerate((0.5, 0.2, 0.3), start=1):
        weights.save(network(epoch), epoch=epoch, step=epoch, valid_loss=loss)
    assert read_weights(tmp_path / LAST)["epoch"] == 3
    best = read_weights(tmp_path / BEST)
    assert (best["epoch"], best["valid_loss"]) == (2, 0.2)
    assert torch.equal(best["network"]["0.bias"], torch.full((2,), 2.0))
    assert sorted(os.listdir(tmp_path)) == sorted([BEST, LAST])


def test_disk_that_fills_up_leaves_the_earlier_file_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The write itself fails, half-way: a limit on file sizes stands for the full disk."""
    resource = pytest.importorskip("resource")
    path = tmp_path / LAST
    write_atomically({"epoch": 1}, path)
    before = path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(UserError, match=rf"^cannot write {path}: File too large$"):
            write_atomically({"epoch": 2, "network": torch.zeros(100_000)}, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == [LAST]


@pytest.mark.parametrize("stage", ["fsync", "replace"])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_interrupted_save_leaves_the_earlier_file_and_no_partial_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str, error: BaseException
) -> None:
    path = tmp_path / LAST
    write_atomically({"epoch": 1}, path)

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(os, stage, fail)
    with pytest.raises(UserError if isinstance(error, OSError) else KeyboardInterrupt):
        write_atomically({"epoch": 2}, path)
    assert read_weights(path) == {"epoch": 1}
    assert os.listdir(tmp_path) == [LAST]


def test_earlier_file_is_there_until_the_new_one_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / LAST
    write_atomically({"epoch": 1}, path)
    seen = []
    fsync = os.fsync

    def look(descriptor: int) -> None:
        fsync(descriptor)
        seen.append(read_weights(path)["epoch"])

    monkeypatch.setattr(os, "fsync", look)
    write_atomically({"epoch": 2}, path)
    assert seen[0] == 1, "the new file takes the name only when it is on the disk"
    assert read_weights(path)["epoch"] == 2


class Bomb:
    def __reduce__(self) -> tuple:
        return os.mkdir, ("went-off",)


def test_code_in_a_weights_file_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"network": Bomb()}, "saved.pt")
    Path("pickled.pt").write_bytes(pickle.dumps(Bomb(), protocol=2))
    for name in ("saved.pt", "pickled.pt"):
        with pytest.raises(UserError, match=f"^cannot read {name}: "):
            read_weights(Path(name))
    assert not Path("went-off").exists()


@pytest.mark.parametrize("content", [b"", b"no weights", None])
def test_damaged_file_is_one_line(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / LAST
    write_atomically({"network": torch.zeros(1000)}, path)
    path.write_bytes(path.read_bytes()[:-500] if content is None else content)
    with pytest.raises(UserError) as caught:
        read_weights(path)
    assert str(caught.value).startswith(f"cannot read {path}: ")
    assert "\n" not in str(caught.value)


def test_missing_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"^no such file: {tmp_path / LAST}$"):
        read_weights(tmp_path / LAST)
    with pytest.raises(UserError, match=r"^cannot write .*: No such file or directory$"):
        write_atomically({}, tmp_path / "nowhere" / LAST)


def test_ranks_other_than_the_first_save_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    NoCheckpoint().save(network(1), epoch=1, step=1, valid_loss=1.0)
    assert os.listdir(tmp_path) == []
