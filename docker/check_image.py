"""Checks that the image contains the packages that the code needs.

The build ends with it; to repeat it on a GPU:

python /opt/nbody-unet/check_image.py
"""

import argparse
import importlib
import sys
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

FILES = ("from_image.txt", "requirements.txt")
# Modules with another name than their package. For DALI and apex, submodules that can fail to load although the package
# is installed.
MODULES = {"pyyaml": "yaml", "nvidia-dali-cuda130": "nvidia.dali.fn", "apex": "apex.optimizers"}


def requirements(file: Path) -> list[Requirement]:
    lines = (line.split("#")[0].strip() for line in file.read_text(encoding="utf-8").splitlines())
    return [Requirement(line) for line in lines if line]


def problem(requirement: Requirement) -> str:
    """The problem with this requirement in the image; empty if there is none."""
    try:
        version = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        return f"{requirement} is not installed"
    # NVIDIA builds PyTorch shortly before its release: 2.13.0a0 stands for 2.13.
    if not requirement.specifier.contains(version, prereleases=True):
        return f"{requirement} is not satisfied by {version}"
    print(f"{requirement.name:22}{version}")
    return import_problem(MODULES.get(requirement.name, requirement.name))


def import_problem(module: str) -> str:
    try:
        importlib.import_module(module)
    except Exception as error:
        return f"{module} cannot be imported: {type(error).__name__}: {error}"
    return ""


def tensorboard_problem() -> str:
    """The problem with NVIDIA's TensorBoard, which listens on all interfaces by default; empty if this one does not."""
    from tensorboard.plugins.core.core_plugin import CorePluginLoader

    parser = argparse.ArgumentParser()
    CorePluginLoader().define_flags(parser)
    all_interfaces = parser.get_default("bind_all")
    return "tensorboard listens on all interfaces by default" if all_interfaces else ""


def main() -> int:
    directory = Path(__file__).parent
    problems = [problem(requirement) for name in FILES for requirement in requirements(directory / name)]
    problems.append(import_problem("triton"))  # installed with PyTorch, under changing package names
    if not any(problems):
        problems.append(tensorboard_problem())
        import torch

        print("GPUs:", [torch.cuda.get_device_name(k) for k in range(torch.cuda.device_count())] or "none")
    for text in filter(None, problems):
        print(f"check_image: {text}", file=sys.stderr)
    return 1 if any(problems) else 0


if __name__ == "__main__":
    sys.exit(main())
