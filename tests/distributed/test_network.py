"""The table of network settings, on synthetic nodes of four clusters."""

import logging
import os
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from utils.distributed import network
from utils.distributed.launch import Launch
from utils.distributed.network import SETTINGS, configure, logged_network, settings

A100, GH200, H100 = "0x20b0", "0x2342", "0x2330"
EVERYWHERE = {
    "NCCL_SOCKET_IFNAME": "hsn",
    "NCCL_CROSS_NIC": "1",
    "FI_CXI_DISABLE_HOST_REGISTER": "1",
    "FI_MR_CACHE_MONITOR": "userfaultfd",
    "FI_CXI_DEFAULT_CQ_SIZE": "131072",
}
TWO_NODES = {"slurm": Launch("slurm", 0, 0, 8, "nid000001"), "mpiexec": Launch("mpiexec", 0, 0, 8, "x3000")}

Builds = Callable[..., dict[str, str]]


@pytest.fixture
def node(tmp_path: Path) -> Builds:
    """node(networks, GPU, NUMA domains) -> variables that name a synthetic node's directories."""

    def build(networks: Sequence[str], gpu: str = A100, domains: Sequence[int] = (3, 2, 1, 0)) -> dict[str, str]:
        system, devices = tmp_path / "sys", tmp_path / "dev"
        for path in (system, devices, *(system / "class" / name for name in networks)):
            path.mkdir(parents=True)
        cards = [("0x10de", gpu, "0x030200", domain) for domain in domains]
        others = [("0x1002", "0x7408", "0x030200", 3), ("0x10de", "0x1af1", "0x068000", 3)]  # another vendor; NVSwitch
        for number, values in enumerate([*cards, *others]):
            device = system / f"bus/pci/devices/0000:{3 + 16 * number:02x}:00.0"
            device.mkdir(parents=True)
            for name, text in zip(("vendor", "device", "class", "numa_node"), values, strict=True):
                (device / name).write_text(f"{text}\n")
        return {"SYSFS": str(system), "DEVFS": str(devices)}

    return build


def set_for(launch: Launch, env: Mapping[str, str]) -> dict[str, str]:
    return settings(launch, env)[1]


def test_perlmutter_gets_what_nersc_publishes(node: Builds) -> None:
    """GPUDirect only with GDRCopy's device, which a container may lack; the GPUs of a task in reversed order."""
    env = node(["net/hsn0", "net/eth0"]) | {"NERSC_HOST": "perlmutter", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}
    expected = EVERYWHERE | {"CUDA_VISIBLE_DEVICES": "3,2,1,0"}
    for name in ("slurm", "environment"):
        assert set_for(Launch(name, 0, 0, 8, "nid000001"), env) == expected
    assert set_for(Launch("torchrun", 0, 0, 8, "nid000001"), env) == EVERYWHERE, "torchrun binds no ranks to cores"
    assert set_for(TWO_NODES["slurm"], env | {"CUDA_VISIBLE_DEVICES": "0,1"}) == EVERYWHERE
    Path(env["DEVFS"], "gdrdrv").touch()
    assert set_for(TWO_NODES["slurm"], env) == expected | {"NCCL_NET_GDR_LEVEL": "PHB"}


def test_a_job_of_mpiexec_on_polaris_gets_the_settings_and_the_order_of_gpus(node: Builds) -> None:
    """A fixed bug: they were set in Slurm steps alone."""
    env = node(["net/hsn0", "net/hsn1"]) | {"PBS_O_HOST": "polaris-login-01.hsn.cm.polaris.alcf.anl.gov"}
    expected = EVERYWHERE | {"NCCL_NET_GDR_LEVEL": "PHB", "CUDA_VISIBLE_DEVICES": "3,2,1,0"}
    assert set_for(TWO_NODES["mpiexec"], env) == expected
    assert "CUDA_VISIBLE_DEVICES" not in set_for(TWO_NODES["mpiexec"], env | {"CUDA_VISIBLE_DEVICES": "2,3"})


def test_grace_hopper_on_slingshot_avoids_the_protocol_that_delivers_stale_values(node: Builds) -> None:
    """At a site that publishes nothing HPE's settings hold; the order of GPUs stays, since the domains ascend."""
    env = node(["net/hsn0"], GH200, [0, 1, 2, 3])
    common = EVERYWHERE | {"NCCL_NET_GDR_LEVEL": "PHB", "NCCL_PROTO": "^LL128"}
    alps = common | {"FI_CXI_DEFAULT_TX_SIZE": "16384", "FI_CXI_RX_MATCH_MODE": "software"}
    assert set_for(TWO_NODES["slurm"], env | {"CLUSTER_NAME": "daint"}) == alps
    hpe = common | {"FI_CXI_DEFAULT_TX_SIZE": "2048", "FI_CXI_RX_MATCH_MODE": "hybrid"}
    assert set_for(TWO_NODES["slurm"], env) == hpe


@pytest.mark.parametrize(("networks", "kind"), [(["infiniband/mlx5_0"], "InfiniBand"), (["net/eth0"], "Ethernet")])
def test_other_networks_need_no_settings(networks: list[str], kind: str, node: Builds) -> None:
    found, chosen = settings(TWO_NODES["slurm"], node(networks, GH200, [0, 1]))
    assert (found.kind, found.several, chosen) == (kind, True, {})


def test_set_variables_stay_and_one_turns_the_table_off(node: Builds) -> None:
    env = node(["net/hsn0"], GH200)
    mine = {name: "" for name, *_ in SETTINGS}
    assert set_for(TWO_NODES["mpiexec"], env | mine | {"CUDA_VISIBLE_DEVICES": ""}) == {}
    assert set_for(TWO_NODES["mpiexec"], env | {"DDP_NETWORK_SETTINGS": "0"}) == {}
    assert "NCCL_NET" not in mine, "a wrong name ends a job"


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[MutableMapping[str, str]]:
    """The variables of this process, which `configure` changes; empty at first."""
    monkeypatch.setattr(network.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(network.tempfile, "mkdtemp", lambda prefix: (tmp_path / prefix).mkdir() or tmp_path / prefix)
    monkeypatch.setattr(network.resource, "setrlimit", lambda *limits: os.environ.update(limits=str(limits[1][0])))
    with mock.patch.dict(os.environ, clear=True):
        yield os.environ


def test_one_line_names_network_and_settings(node: Builds, environment: Any, caplog: Any, tmp_path: Path) -> None:
    """On several nodes core files are off, and Triton's cache is on the node."""
    caplog.set_level(logging.INFO)
    environment.update(node(["net/hsn0"]), NERSC_HOST="perlmutter", NCCL_CROSS_NIC="0")
    configure(Launch("torchrun", 1, 1, 8, "nid000001"))
    assert not caplog.messages
    for name in EVERYWHERE.keys() - {"NCCL_CROSS_NIC"}:
        del environment[name]
    configure(Launch("torchrun", 0, 0, 8, "nid000001"))
    (line,) = caplog.messages
    assert line.startswith("Network: Slingshot at NERSC; set NCCL_SOCKET_IFNAME=hsn, FI_CXI_")
    assert "NCCL_CROSS_NIC" not in line
    assert (environment["limits"], environment["NCCL_CROSS_NIC"]) == ("0", "0")
    assert Path(environment["TRITON_CACHE_DIR"]).parent == tmp_path


@pytest.mark.parametrize(
    ("name", "level", "words"),
    [("Socket", "WARNING", "uses TCP"), ("AWS Libfabric", "INFO", "NCCL's network: AWS Libfabric")],
)
def test_the_network_that_nccl_chose_is_named_and_tcp_on_slingshot_is_a_warning(
    name: str, level: str, words: str, node: Builds, environment: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    found, _ = settings(TWO_NODES["slurm"], node(["net/hsn0"]))
    line = "nid1:7:9 [0] NCCL INFO"
    with logged_network(found, 0):
        file = Path(environment["NCCL_DEBUG_FILE"])
        file.write_text(f"{line} Assigned NET plugin {name} to comm\n{line} Using network {name}\n")
    (record,) = caplog.records
    assert (record.levelname, words in record.message, file.exists()) == (level, True, False)
    environment["NCCL_DEBUG"] = "WARN"
    with logged_network(found, 0):
        pass
    assert len(caplog.records) == 1, "a user who reads NCCL's log has it"
