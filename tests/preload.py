"""Modules that the server of tests/processes.py imports before it forks. Runs no torch operations."""

import contextlib
import importlib

MODULES = """numpy pytest scipy.ndimage sklearn.datasets disturbance torch._dynamo torch.utils.tensorboard
    matplotlib.figure nvidia.dali.plugin.pytorch colossus.cosmology.cosmology train predict evaluate export
    utils.volumes.convert_to_npy simulation.simulate"""

for name in MODULES.split():
    with contextlib.suppress(ImportError):  # optional packages such as DALI
        importlib.import_module(name)
