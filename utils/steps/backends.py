"""Settings of PyTorch's libraries: TF32, cuDNN's search for algorithms, deterministic algorithms."""

import logging
import os

import torch

from utils.config import Config
from utils.data.task import task_of
from utils.distributed.world import World
from utils.errors import LocalError

log = logging.getLogger(__name__)

# Environment variables on which the order of sums depends, and the values that fix it; the first one is set.
DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": (":4096:8", ":16:8"), "NCCL_ALGO": ("Ring",)}
# Versions of cuDNN whose contiguous 3D convolutions in half precision may return wrong values. PyTorch 2.9 replaces
# them by a slow path. Sources: issues 163539 and 166643 and pull request 163581 of pytorch/pytorch.
FAULTY_CUDNN = range(90800, 91500)


def set_backends(config: Config, device: torch.device) -> None:
    """Applies the config's settings. Called before the first computation on the device.

    cuDNN's search suits shapes that never change; it decides by time, so results may differ from run to run. For TF32
    it uses PyTorch's older switches: its compiler still reads them, and refuses to once the newer ones are written.
    """
    deterministic = config.deterministic and device.type == "cuda"
    torch.backends.cudnn.benchmark = config.cudnn_benchmark and not config.deterministic
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = config.tf32
    torch.use_deterministic_algorithms(deterministic)
    # Filling costs time, and nothing reads memory before it is written.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined] # a property of the module
    for variable, values in DETERMINISTIC.items() if deterministic else ():
        value = os.environ.setdefault(variable, values[0])
        if value not in values:
            raise LocalError(f"deterministic needs {variable} {' or '.join(values)}, not {value}; unset it")


def log_backends(config: Config, world: World) -> None:
    """Logs the settings that count on a GPU; rank 0 logs them for all."""
    if world.device.type != "cuda" or not world.is_root:
        return
    overridden = os.environ.get("NVIDIA_TF32_OVERRIDE") == "0"
    precision = "TF32" if config.tf32 and not overridden else "IEEE"
    why = " (NVIDIA_TF32_OVERRIDE=0)" if overridden else ""
    algorithms = "; deterministic algorithms" if config.deterministic else ""
    version, search = torch.backends.cudnn.version(), "on" if torch.backends.cudnn.benchmark else "off"
    log.info("cuDNN %s, search %s; float32 convolutions: %s%s%s", version, search, precision, why, algorithms)
    if fault := conv3d_fault(config):
        log.warning(fault)
    if world.size > 1 and (2, 28, 3) <= (nccl := torch.cuda.nccl.version()) <= (2, 28, 8):
        log.warning("NCCL %d.%d.%d may hang: NVIDIA's resiliency extension excludes 2.28.3 to 2.28.8; update it", *nccl)


def conv3d_fault(config: Config) -> str:
    """A line about faulty convolutions of cuDNN that a run on a GPU would use; empty if it uses none."""
    version = torch.backends.cudnn.version()
    if not config.enable_amp or config.channels_last or not task_of(config).is_3d or version not in FAULTY_CUDNN:
        return ""
    kind = "may be wrong" if torch.__version__ < "2.9" else "are slow"
    return (
        f"with cuDNN {version}, 3D convolutions in {config.precision} {kind} unless channels_last=true; set it, or use "
        "cuDNN 9.15 or later (PyTorch 2.10 and later have it)"
    )
