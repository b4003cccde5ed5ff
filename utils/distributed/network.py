"""Settings of a cluster's network and GPUs, which every rank gets before NCCL starts, under each launcher alike.

One table, `SETTINGS`. A variable that is set already stays, and DDP_NETWORK_SETTINGS=0 turns the table off.
`python -m utils.distributed.network` prints the settings of this process, one NAME=value per line, for a shell.
"""

import contextlib
import logging
import os
import re
import resource
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from utils.distributed.launch import Launch, read_launch

log = logging.getLogger(__name__)

SWITCH = "DDP_NETWORK_SETTINGS"
NVIDIA, GPU_CLASSES = "0x10de", ("0x0300", "0x0302")  # PCI: VGA and 3D controllers
GRACE_HOPPER = ("0x2342", "0x2343", "0x2345", "0x2348")  # PCI devices of GH200
# Sites that publish settings of their own, by a variable that their systems set and a pattern of its value.
SITES = (
    ("NERSC", "NERSC_HOST", "perlmutter"),
    ("CSCS", "CLUSTER_NAME", "daint|clariden|santis|bristen"),
    ("ALCF", "PBS_O_HOST", r".*polaris.*|.*\.alcf\.anl\.gov"),
)
LAUNCHERS_THAT_BIND = ("environment", "slurm", "mpiexec")  # ranks to cores, the first rank to the first ones


@dataclass(frozen=True)
class Node:
    """The properties of this node, and of the job, that decide on settings."""

    kind: str  # Slingshot, InfiniBand or Ethernet
    site: str  # of SITES, or empty
    gpus: tuple[tuple[str, str], ...]  # PCI device and NUMA domain of each
    gdrcopy: bool  # GDRCopy's device is there
    several: bool  # the run has several nodes


def _at(*sites: str) -> Callable[[Node], bool]:
    """True on Slingshot at these sites, "" is each that publishes nothing; at all if none is named."""
    return lambda node: node.kind == "Slingshot" and (not sites or node.site in sites)


def _with_gpu_direct(node: Node) -> bool:
    """NERSC's podman-hpc passes GDRCopy's device on request only, and libfabric fails without it."""
    return node.kind == "Slingshot" and (node.site != "NERSC" or node.gdrcopy)


def _on_grace_hopper(node: Node) -> bool:
    return node.kind == "Slingshot" and any(device in GRACE_HOPPER for device, _ in node.gpus)


HPE, CSCS = "HPE's ccl_env.sh, 2026-04", "CSCS's nccl_env_vars, 2025-11"
NERSC = f"NERSC's NCCL module; {HPE}"
ALL = f"{NERSC}; {CSCS}; ALCF's page on NCCL, 2025-01"
STALE = "NCCL from 2.27 on may deliver stale halves of 128-byte lines, without an error"
# A variable, its value, the nodes that get it, the reason, and who publishes it.
SETTINGS: tuple[tuple[str, str, Callable[[Node], bool], str, str], ...] = (
    ("NCCL_SOCKET_IFNAME", "hsn", _at(), "ranks connect over Slingshot, not the first network interface", NERSC),
    ("NCCL_CROSS_NIC", "1", _at(), "a ring may enter and leave a node through different cards", ALL),
    ("NCCL_NET_GDR_LEVEL", "PHB", _with_gpu_direct, "cards read GPUs behind the same host bridge", ALL),
    ("NCCL_PROTO", "^LL128", _on_grace_hopper, STALE, f"{CSCS}; NVIDIA/nccl, issue 2001"),
    ("FI_CXI_DISABLE_HOST_REGISTER", "1", _at(), "may deadlock with CUDA's allocations", ALL),
    ("FI_MR_CACHE_MONITOR", "userfaultfd", _at(), "hooks in malloc may deadlock with CUDA's allocations", ALL),
    ("FI_CXI_DEFAULT_CQ_SIZE", "131072", _at(), "the default is too small for large jobs", ALL),
    ("FI_CXI_DEFAULT_TX_SIZE", "16384", _at("CSCS"), "more sends at a time", CSCS),
    ("FI_CXI_DEFAULT_TX_SIZE", "2048", _at(""), "more sends at a time", HPE),
    ("FI_CXI_RX_MATCH_MODE", "software", _at("CSCS"), "a card's matching entries may run out", CSCS),
    ("FI_CXI_RX_MATCH_MODE", "hybrid", _at(""), "a card's matching entries may run out", HPE),
)


def find_node(env: Mapping[str, str], several: bool) -> Node:
    """This node, from the directories that SYSFS and DEVFS name (/sys and /dev)."""
    system, devices = Path(env.get("SYSFS") or "/sys"), Path(env.get("DEVFS") or "/dev")
    kind = "InfiniBand" if any((system / "class/infiniband").glob("*")) else "Ethernet"
    if any((system / "class/net").glob("hsn*")):
        kind = "Slingshot"
    gpus = []
    for device in sorted((system / "bus/pci/devices").glob("*")):
        vendor, number, group, domain = (_text(device / name) for name in ("vendor", "device", "class", "numa_node"))
        if vendor == NVIDIA and group[:6] in GPU_CLASSES:
            gpus.append((number, domain))
    site = next((site for site, name, value in SITES if re.fullmatch(value, env.get(name, ""))), "")
    return Node(kind, site, tuple(gpus), (devices / "gdrdrv").exists(), several)


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def reversed_gpus(node: Node, launch: Launch, env: Mapping[str, str]) -> str:
    """The visible GPUs in reversed order, if their NUMA domains descend and the rank sees all of them; else empty.

    On Perlmutter and Polaris GPU 0 and its network card belong to the last NUMA domain, whereas the first rank of a
    node is bound to the cores of the first one: local rank i uses the GPU at place i of the list.
    """
    ascending = ",".join(str(number) for number in range(len(node.gpus)))
    domains = [int(domain) for _, domain in node.gpus if domain.lstrip("-").isdigit()]
    descend = len(domains) == len(node.gpus) > 1 and domains == sorted(set(domains), reverse=True)
    # Slurm lists the GPUs of a task; mpiexec lets each rank see all of them.
    visible = env.get("CUDA_VISIBLE_DEVICES", ascending if launch.launcher == "mpiexec" else "")
    sees_all = launch.launcher in LAUNCHERS_THAT_BIND and visible == ascending
    return ascending[::-1] if descend and sees_all and len(domains) <= 10 else ""


def settings(launch: Launch, env: Mapping[str, str] = os.environ) -> tuple[Node, dict[str, str]]:
    """This node, and the variables that the table sets for it."""
    several = launch.world_size > 1 and launch.master_addr not in ("127.0.0.1", "localhost")
    if local := env.get("LOCAL_WORLD_SIZE"):  # set by torchrun
        several = local != str(launch.world_size)
    node = find_node(env, several)
    if env.get(SWITCH) == "0":
        return node, {}
    chosen = {name: value for name, value, applies, *_ in SETTINGS if applies(node) and name not in env}
    if gpus := reversed_gpus(node, launch, env):
        chosen["CUDA_VISIBLE_DEVICES"] = gpus
    return node, chosen


def configure(launch: Launch) -> Node:
    """Sets the variables of the table in this process, and logs on rank 0 which network was found and what was set."""
    node, chosen = settings(launch)
    os.environ.update(chosen)
    switched_off = os.environ.get(SWITCH) == "0"
    if node.several and not switched_off:
        _, hard = resource.getrlimit(resource.RLIMIT_CORE)
        resource.setrlimit(resource.RLIMIT_CORE, (0, hard))  # core files of all ranks would fill the file system
        _use_local_cache()
    if launch.rank == 0 and (node.several or chosen):
        found = f"{node.kind}{f' at {node.site}' if node.site else ''}"
        done = f"set {', '.join(f'{name}={value}' for name, value in chosen.items())}" if chosen else "nothing to set"
        log.info("Network: %s; %s", found, f"{SWITCH}=0, nothing is set" if switched_off else done)
    return node


def _use_local_cache() -> None:
    """Triton's cache in a directory of this user on the node: thousands of ranks would compile into one home."""
    folder = Path(tempfile.gettempdir()) / f"triton_{os.getuid()}"
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.stat().st_uid == os.getuid():  # another user's kernels are not to be loaded
            os.environ.setdefault("TRITON_CACHE_DIR", str(folder))


@contextlib.contextmanager
def logged_network(node: Node, rank: int) -> Iterator[None]:
    """Context in which NCCL connects; rank 0 of several nodes then logs the network, unless NCCL_DEBUG is set."""
    if not node.several or rank > 0 or "NCCL_DEBUG" in os.environ:
        yield
        return
    file = Path(tempfile.mkdtemp(prefix="nccl_")) / "log"
    os.environ.update(NCCL_DEBUG="INFO", NCCL_DEBUG_SUBSYS="INIT,NET", NCCL_DEBUG_FILE=str(file))
    yield
    *_, name = ["", *re.findall(r"NCCL INFO Using network (.*\S)", _text(file))]
    shutil.rmtree(file.parent, ignore_errors=True)  # NCCL holds the file open
    if name == "Socket" and node.kind == "Slingshot":
        log.warning(
            "NCCL found no plug-in for Slingshot and uses TCP, which is much slower; load the site's module of it "
            "or add it to the container (docs/cluster.md)"
        )
    elif name:
        log.info("NCCL's network: %s", name)


if __name__ == "__main__":
    for name, value in settings(read_launch())[1].items():
        print(f"{name}={value}")
