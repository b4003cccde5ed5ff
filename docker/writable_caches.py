"""A place for caches where the home directory cannot be written to. Every Python of the image starts with this.

Shifter, Apptainer and `docker run --user` run as the caller, with a root file system that is read only and a home that
may be missing or read only, too. Triton then fails at its first kernel, matplotlib builds its font cache anew in every
process, and the CUDA driver compiles again what it has compiled. (Inductor has a directory of its own in /tmp.) A fixed
path for all users would not do: what lies in these caches is loaded and executed.
"""

import os
import stat

CACHES = {"TRITON_HOME": "triton", "MPLCONFIGDIR": "matplotlib", "CUDA_CACHE_PATH": "cuda"}


def provide() -> None:
    """Points what is not set yet to a directory of the caller's alone, the same for all ranks of a node."""
    if os.access(os.path.expanduser("~"), os.W_OK | os.X_OK):
        return
    folder = os.path.join(os.environ.get("TMPDIR", "/tmp"), f"nbody-unet-{os.getuid()}")
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        status = os.lstat(folder)
        mine = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022
        if not mine:  # someone else was here first
            return
        for variable, name in CACHES.items():
            if variable not in os.environ:
                os.makedirs(os.path.join(folder, name), exist_ok=True)
                os.environ[variable] = os.path.join(folder, name)
    except OSError:
        return


provide()
