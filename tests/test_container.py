"""Tests of docker/ that need no container engine: its packages agree with pyproject.toml, and its scripts work."""

import os
import re
import subprocess
import sys
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from processes import TOP

DOCKER = TOP / "docker"
sys.path.insert(0, str(DOCKER))

import check_image  # noqa: E402


def listed(file: str) -> dict[str, Requirement]:
    return {canonicalize_name(entry.name): entry for entry in check_image.requirements(DOCKER / file)}


def project_lists(name: str) -> dict[str, Requirement]:
    """A list of requirements in pyproject.toml, read without tomllib, which Python 3.10 does not have."""
    (text,) = re.findall(rf"^{name} = \[(.*?)\]\s*$", (TOP / "pyproject.toml").read_text(), re.MULTILINE | re.DOTALL)
    return {canonicalize_name((entry := Requirement(quoted)).name): entry for quoted in re.findall(r'"([^"]+)"', text)}


def test_every_dependency_is_pinned_within_its_bounds_or_part_of_the_base_image() -> None:
    pinned, included, bounds = listed("requirements.txt"), listed("from_image.txt"), project_lists("dependencies")
    assert not set(pinned) & set(included)
    for name, entry in pinned.items():
        (pin,) = entry.specifier
        assert pin.operator == "=="
        assert bounds[name].specifier.contains(pin.version), entry
    missing = set(bounds) - set(pinned) - set(included)
    assert missing == set(), "add them to docker/requirements.txt, or to from_image.txt if the base image has them"
    for name in bounds.keys() & included.keys() - {"torch"}:  # pyproject.toml gives the reason why torch has no bound
        assert included[name].specifier == bounds[name].specifier, name
    (dali,) = project_lists("dali").values()
    assert included["nvidia-dali-cuda130"].specifier == dali.specifier
    assert str(included["torch"].specifier) == ">=2.8.0a0"
    # The image contains all files of the directory.
    (copied,) = re.findall(r"^COPY (.*)", (DOCKER / "Dockerfile").read_text().replace("\\\n", " "), re.MULTILINE)
    assert {*copied.split()[:-1], "Dockerfile"} == {path.name for path in DOCKER.iterdir() if path.is_file()}


def test_check_of_the_image_reports_each_problem() -> None:
    assert check_image.problem(Requirement("numpy>=1.24")) == check_image.tensorboard_problem() == ""
    assert "numpy>=99 is not satisfied by" in check_image.problem(Requirement("numpy>=99"))
    assert check_image.problem(Requirement("no-such-thing")) == "no-such-thing is not installed"
    assert "ModuleNotFoundError" in check_image.import_problem("no_such_thing")


def test_caches_are_in_a_private_temporary_directory_if_the_home_is_not_writable(tmp_path: Path) -> None:
    def caches(home: Path) -> list[str]:
        """The cache variables of a Python process that imports writable_caches."""
        names = ("TRITON_HOME", "MPLCONFIGDIR", "CUDA_CACHE_PATH")
        variables = {"PYTHONPATH": str(DOCKER), "HOME": str(home), "TMPDIR": str(tmp_path), "MPLCONFIGDIR": "/mine"}
        inherited = {name: value for name, value in os.environ.items() if name not in names}
        command = f"import os, writable_caches; print(*map(os.environ.get, {names}))"
        run = [sys.executable, "-B", "-c", command]
        return subprocess.check_output(run, env=inherited | variables, text=True).split()

    untouched, folder = ["None", "/mine", "None"], tmp_path / f"nbody-unet-{os.getuid()}"
    missing = tmp_path / "never created"
    assert caches(tmp_path) == untouched
    assert list(tmp_path.iterdir()) == []
    for _ in range(2):  # the ranks of a node share the directory
        assert caches(missing) == [f"{folder}/triton", "/mine", f"{folder}/cuda"]
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)  # others can write to it
    assert caches(missing) == untouched
