"""Provides directories for caches if the home directory is not writable. Every Python of the image imports this module.

Shifter, Apptainer and `docker run --user` run as the caller with a read-only root file system; the home directory may
also be missing or read-only. Triton then fails at its first kernel, matplotlib builds its font cache in every process,
and the CUDA driver compiles kernels again. (Inductor uses its own directory in /tmp.) One path for all users would be
unsafe, because the files in these caches are loaded and executed.
"""

import os
import stat

CACHES = {"TRITON_HOME": "triton", "MPLCONFIGDIR": "matplotlib", "CUDA_CACHE_PATH": "cuda"}


def provide() -> None:
    """Sets the variables that are not set to a directory of this user, the same one for all ranks of a node."""
    if os.access(os.path.expanduser("~"), os.W_OK | os.X_OK):
        return
    folder = os.path.join(os.environ.get("TMPDIR", "/tmp"), f"nbody-unet-{os.getuid()}")
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        status = os.lstat(folder)
        mine = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022
        if not mine:  # another user created it
            return
        for variable, name in CACHES.items():
            if variable not in os.environ:
                os.makedirs(os.path.join(folder, name), exist_ok=True)
                os.environ[variable] = os.path.join(folder, name)
    except OSError:
        return


provide()
