"""Tests of docker/ that need no container engine: its packages agree with pyproject.toml."""

import re

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from processes import TOP

DOCKER = TOP / "docker"


def listed(file: str) -> dict[str, Requirement]:
    lines = (line.split("#")[0].strip() for line in (DOCKER / file).read_text().splitlines())
    return {canonicalize_name((entry := Requirement(line)).name): entry for line in lines if line}


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
