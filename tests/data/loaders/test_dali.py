"""The DALI loader on DALI's CPU backend: errors, `.npy` files. test_loaders.py compares its batches."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from volume_files import write_volume

from utils.data.convert_to_npy import convert
from utils.data.files.hdf5 import open_volume
from utils.data.files.npy import open_npy_volume
from utils.data.loaders import dali
from utils.errors import UserError

KEYS = ("train_path_npy_data", "train_path_npy_label")
ZEROS = np.zeros((12, 12, 12, 4), np.float32)


def test_without_dali_the_error_names_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ["nvidia.dali", *(name for name in sys.modules if name.startswith("nvidia.dali."))]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError, match=r"NVIDIA DALI cannot be imported .*; install it with pip install"):
        dali.import_dali()


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda path: path.unlink(), "no such file"),
        (lambda path: path.write_bytes(path.read_bytes()[:-100]), "cannot read"),
        (lambda path: np.save(path, ZEROS.astype(">f4")), r"is >f4 .*, expected float32 \(12, 12, 12, 4\) in C order"),
        (lambda path: np.save(path, np.asfortranarray(ZEROS)), "in Fortran order, expected .* in C order"),
        (lambda path: np.save(path, ZEROS), r"does not match .*bad\.h5: other values"),
        (None, r"train_path_npy_data is not set; "),
    ],
)
def test_a_bad_npy_file_is_one_line_that_names_it_and_how_to_create_it(tmp_path: Path, damage: Any, says: str) -> None:
    source = write_volume(tmp_path / "bad.h5", box=12)
    inputs, targets = convert(source)
    if damage:
        damage(inputs)
    paths = (str(inputs) if damage else None, str(targets))
    with pytest.raises(UserError, match=says) as caught:
        open_npy_volume(paths, KEYS, str(source), (4, 5), open_volume(source, (4, 5)))
    assert "\n" not in str(caught.value)
    assert str(inputs) in str(caught.value)
    assert f"python -m utils.data.convert_to_npy -i {source}" in str(caught.value)
