"""Fixtures of all tests: one thread, small volumes, and an environment without launcher variables."""

import os

# Before torch is imported; subprocesses inherit them. Under torchrun OMP_NUM_THREADS=1 alone does not count.
os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"

import logging
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import disturbance  # noqa: F401  acts if DISTURB is set
import pytest
import torch
from volume_files import SIMULATED, write_volume

torch.set_num_threads(1)

VolumeFile = Callable[..., Path]


# The slowest files, slowest first. They run first, so that no worker is left with one when all other workers are done.
LONG_FILES = """distributed/test_heartbeat slurm/test_submit test_pasted_commands run/test_resume
    simulation/test_simulation networks/test_strided training/test_soak distributed/test_signals
    test_tutorial steps/test_kernels data/test_loaders benchmarks/test_step"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {f"tests/{name}.py": place for place, name in enumerate(LONG_FILES.split())}
    items.sort(key=lambda item: places.get(item.nodeid.split("::")[0], len(places)))
    for item in items if not torch.cuda.is_available() else ():
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(scope="session")
def volume_file() -> VolumeFile:
    """`volume_file(path, box=16, seed=0, chunks=None, dtype='f4', channels=(4, 5), compression=None) -> path`."""
    return write_volume


@pytest.fixture(scope="session")
def data_flags(tmp_path_factory: pytest.TempPathFactory, volume_file: VolumeFile) -> list[str]:
    """Flags for config 'test': one volume each for training and validation, 16³ cells, and the CPU."""
    folder = tmp_path_factory.mktemp("volumes")
    train, valid = volume_file(folder / "train.h5", seed=1), volume_file(folder / "valid.h5", seed=2)
    return [f"--set=train_path={train}", f"--set=val_path={valid}", "--set=device=cpu"]


@pytest.fixture(scope="session")
def trained_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run of config 'test', whose data state their transform and their simulation."""
    import train

    folder = tmp_path_factory.mktemp("trained")
    changes = {"device": "cpu", "expdir": folder, "report_baselines": "false", "report_pictures": "false"}
    for seed, (name, stated) in enumerate((("train", {**SIMULATED, "box_size_mpc_h": 8.0}), ("val", {})), 1):
        changes[f"{name}_path"] = write_volume(folder / f"{name}.h5", seed=seed, **stated)
    yaml = Path(train.__file__).parent / "config" / "UNet.yaml"
    train.main([f"--yaml_config={yaml}", "--config=test", *(f"--set={key}={value}" for key, value in changes.items())])
    return folder / "test" / "1ranks" / "00"


LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NVIDIA_TF32_OVERRIDE")
MPI = ("OMPI_", "MV2_", "MPI_", "MPIRUN_", "PMI", "PALS_", "PBS_")


@pytest.fixture(autouse=True, scope="module")
def own_logging() -> Iterator[None]:
    """Restores logging after each test module, because fixtures of a module may train."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture(autouse=True)
def own_process_state(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Removes variables of launchers and of the benchmark; restores logging, signals and the number of threads."""
    for name in list(os.environ):
        if name in LAUNCHER_VARIABLES or name.startswith(("SLURM_", "BENCHY_", "TORCHELASTIC_", *MPI)):
            monkeypatch.delenv(name)
    root = logging.getLogger()
    handlers, level, benchmark = list(root.handlers), root.level, torch.backends.cudnn.benchmark
    signals = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)}
    yield
    for number, handler in signals.items():
        signal.signal(number, handler)
    root.handlers[:] = handlers
    root.setLevel(level)
    for name in [name for name in logging.root.manager.loggerDict if name.startswith("utils")]:
        logging.getLogger(name).handlers.clear()
        logging.getLogger(name).setLevel(logging.NOTSET)
    torch.backends.cudnn.benchmark = benchmark
    torch.set_num_threads(1)
