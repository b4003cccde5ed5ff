"""Tests of docker/ that need no container engine: its packages agree with pyproject.toml, and its scripts work."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

TOP = Path(__file__).parent.parent
DOCKER = TOP / "docker"
sys.path.insert(0, str(DOCKER))

import check_image  # noqa: E402

CACHES = ("TRITON_HOME", "MPLCONFIGDIR", "CUDA_CACHE_PATH")


def listed(file: str) -> dict[str, Requirement]:
    return {canonicalize_name(entry.name): entry for entry in check_image.requirements(DOCKER / file)}


def project_lists(name: str) -> dict[str, Requirement]:
    """A list of requirements in pyproject.toml, read without tomllib, which Python 3.10 does not have."""
    found = re.search(rf"^{name} = \[(.*?)\]\s*$", (TOP / "pyproject.toml").read_text(), re.MULTILINE | re.DOTALL)
    assert found, name
    entries = [Requirement(text) for text in re.findall(r'"([^"]+)"', found[1])]
    return {canonicalize_name(entry.name): entry for entry in entries}


def test_every_dependency_is_pinned_within_its_bounds_or_part_of_the_base_image() -> None:
    pinned, included, bounds = listed("requirements.txt"), listed("from_image.txt"), project_lists("dependencies")
    assert not set(pinned) & set(included)
    for name, entry in pinned.items():
        (pin,) = entry.specifier
        assert pin.operator == "=="
        assert bounds[name].specifier.contains(pin.version), entry
    missing = set(bounds) - set(pinned) - set(included)
    assert not missing, (
        f"add {missing} to docker/requirements.txt, or to docker/from_image.txt if the base image contains it"
    )


def test_packages_of_the_base_image_have_the_bounds_of_the_project() -> None:
    included = listed("from_image.txt")
    for name, entry in project_lists("dependencies").items():
        if name in included and name != "torch":  # pyproject.toml gives the reason why torch has no bound
            assert included[name].specifier == entry.specifier, name
    (dali,) = project_lists("dali").values()
    assert included["nvidia-dali-cuda130"].specifier == dali.specifier
    assert "runs on torch 2.8 and later" in (TOP / "pyproject.toml").read_text()
    assert str(included["torch"].specifier) == ">=2.8.0a0"


def test_all_files_of_the_directory_are_copied() -> None:
    (copied,) = re.findall(r"^COPY (.*)", (DOCKER / "Dockerfile").read_text().replace("\\\n", " "), re.MULTILINE)
    assert {*copied.split()[:-1], "Dockerfile"} == {path.name for path in DOCKER.iterdir() if path.is_file()}


def test_check_of_the_image_reports_each_problem() -> None:
    assert check_image.problem(Requirement("numpy>=1.24")) == ""
    assert "numpy>=99 is not satisfied by" in check_image.problem(Requirement("numpy>=99"))
    assert check_image.problem(Requirement("no-such-thing")) == "no-such-thing is not installed"
    assert "ModuleNotFoundError" in check_image.import_problem("no_such_thing")
    assert check_image.tensorboard_problem() == ""


def caches(home: Path, tmp: Path, **variables: str) -> dict[str, str]:
    """The cache variables of a Python process that imports writable_caches."""
    code = "import os, writable_caches; print(*(f'{k}={v}' for k, v in os.environ.items()), sep='\\n')"
    inherited = {name: value for name, value in os.environ.items() if name not in CACHES}
    environment = {**inherited, "PYTHONPATH": str(DOCKER), "HOME": str(home), "TMPDIR": str(tmp), **variables}
    command = [sys.executable, "-B", "-c", code]
    output = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    return {name: value for name, _, value in (line.partition("=") for line in output.splitlines()) if name in CACHES}


def test_caches_are_in_the_temporary_directory_if_the_home_is_not_writable(tmp_path: Path) -> None:
    assert caches(tmp_path, tmp_path) == {}
    assert list(tmp_path.iterdir()) == []
    folder = tmp_path / f"nbody-unet-{os.getuid()}"
    expected = {"TRITON_HOME": f"{folder}/triton", "MPLCONFIGDIR": "/mine", "CUDA_CACHE_PATH": f"{folder}/cuda"}
    for _ in range(2):  # the ranks of a node share the directory
        assert caches(Path("/nonexistent"), tmp_path, MPLCONFIGDIR="/mine") == expected
    assert folder.stat().st_mode & 0o777 == 0o700


def test_cache_directory_that_others_can_write_is_not_used(tmp_path: Path) -> None:
    folder = tmp_path / f"nbody-unet-{os.getuid()}"
    folder.mkdir()
    folder.chmod(0o777)
    assert caches(Path("/nonexistent"), tmp_path) == {}
    folder.rmdir()
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    folder.symlink_to(tmp_path / "elsewhere")
    assert caches(Path("/nonexistent"), tmp_path) == {}
