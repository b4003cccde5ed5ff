"""export_DDP_vars.sh without Slurm: the variables that it sets for a task."""

import dataclasses
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from distributed.test_launch import SLURM_STEP
from processes import TOP

from utils.distributed.launch import first_host, read_launch
from utils.distributed.network import settings

BASH = str(shutil.which("bash"))
STEP = {**SLURM_STEP, "SLURM_NNODES": "4", "SLURM_STEP_NUM_NODES": "2", "SLURM_JOB_NODELIST": "nid[000001-000004]"}
RANK = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "MASTER_ADDR": "nid000003", "MASTER_PORT": "23039"}


@pytest.fixture
def system(tmp_path: Path) -> dict[str, str]:
    """Variables of a machine without GPUs, Slingshot and scontrol, as in a container."""
    for name in ("bin", "sys", "dev"):
        (tmp_path / name).mkdir()
    for tool in ("cat", "env"):
        (tmp_path / "bin" / tool).symlink_to(str(shutil.which(tool)))
    return {
        "PATH": str(tmp_path / "bin"),
        "PYTHON": sys.executable,
        "SYSFS": str(tmp_path / "sys"),
        "DEVFS": str(tmp_path / "dev"),
    }


def bash(script: str, environment: dict[str, str], **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([BASH, "-c", script], cwd=TOP, env=environment, capture_output=True, text=True, **options)


def source(environment: dict[str, str], times: int = 1) -> dict[str, str]:
    """The variables that the script sets or changes."""
    run = bash("set -euo pipefail\n" + "source ./export_DDP_vars.sh\n" * times + "env -0", environment, check=True)
    assert not run.stderr
    after = dict(entry.split("=", 1) for entry in run.stdout.split("\0") if entry)
    made_by_bash = ("PWD", "SHLVL", "_", "OLDPWD")
    return {name: value for name, value in after.items() if name not in made_by_bash and environment.get(name) != value}


def test_nothing_is_set_outside_a_step(system: dict[str, str]) -> None:
    assert source(system) == {}
    batch_script = {name: value for name, value in STEP.items() if "STEP" not in name}
    assert source({**system, **batch_script, "SLURM_PROCID": "0"}) == {}


def test_a_task_of_a_step_gets_the_rank_that_read_launch_returns(system: dict[str, str]) -> None:
    """An outdated rank is replaced, a given address is kept."""
    for times in (1, 2):
        assert source({**system, **STEP}, times) == {**RANK, "HDF5_USE_FILE_LOCKING": "FALSE"}
    through_shell = read_launch(source({**system, **STEP}))
    assert through_shell == dataclasses.replace(read_launch(STEP), launcher="environment")
    given = {"MASTER_ADDR": "elsewhere", "MASTER_PORT": "1234", "HDF5_USE_FILE_LOCKING": ""}
    changed = source({**system, **STEP, **given, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"})
    assert changed == {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8"}
    older = {name: value for name, value in STEP.items() if not name.startswith("SLURM_STEP_N")}
    changed = source({**system, **older, "MASTER_ADDR": ""})
    assert (changed["WORLD_SIZE"], changed["MASTER_ADDR"]) == ("16", "nid000001"), "the job's counts"


def test_the_port_depends_on_job_and_step_and_equals_that_of_read_launch(system: dict[str, str]) -> None:
    """Two steps of one job may run at the same time on one node."""
    steps = (0, 1, 2, 14, 99, 4_294_967_290)
    pairs = [(str(job), str(step)) for job in (0, 1003, 67_108_863, 4_294_967_294) for step in steps]
    body = 'MASTER_PORT=; source ./export_DDP_vars.sh; echo "$MASTER_PORT"'
    loop = f"while read -r SLURM_JOB_ID SLURM_STEP_ID; do {body}; done"
    run = bash(loop, {**system, **STEP}, input="".join(f"{job} {step}\n" for job, step in pairs))
    expected = [read_launch({**STEP, "SLURM_JOB_ID": job, "SLURM_STEP_ID": step}).master_port for job, step in pairs]
    assert [int(port) for port in run.stdout.split()] == expected
    assert len(set(expected[: len(steps)])) == len(steps)
    assert all(15000 <= port < 30000 for port in expected)
    refused = bash('source ./export_DDP_vars.sh && echo "started"', {**system, **STEP, "SLURM_JOB_ID": "a[$(id)]"})
    assert (refused.returncode, refused.stdout, refused.stderr.count("\n")) == (2, "", 1), "bash executed it"
    assert refused.stderr.startswith("error: SLURM_JOB_ID must be an integer, not ")


def test_the_address_is_the_first_node_of_slurms_list(system: dict[str, str]) -> None:
    lists = {
        "nid[001004-001007,2]": "nid001004",
        "a1,b[2-3]": "a1",
        "rack[1-2]n[3,5]-ib,x[7]": "rack1n3-ib",
        "login-1.example.org,b-2": "login-1.example.org",
    }
    for nodes, host in lists.items():
        step = {**system, **STEP, "SLURM_STEP_NODELIST": nodes}
        assert source(step)["MASTER_ADDR"] == first_host(nodes) == host, nodes
    single = {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NODELIST": "nid000003"}
    assert source({**system, **STEP, **single})["MASTER_ADDR"] == "127.0.0.1", "a single node does not need its name"
    scontrol = Path(system["PATH"], "scontrol")
    show = '[ "$*" = "show hostnames nid[000003-000004]" ] && echo first && echo second'
    for script, address in ((show, "first"), ("echo broken >&2; exit 1", "nid000003")):
        scontrol.write_text(f"#!{BASH}\n{script}\n")
        scontrol.chmod(0o755)
        assert source({**system, **STEP})["MASTER_ADDR"] == address


def test_a_task_gets_the_settings_of_the_program(system: dict[str, str]) -> None:
    Path(system["SYSFS"], "class/net/hsn0").mkdir(parents=True)
    task = {**system, **STEP}
    _, expected = settings(read_launch(STEP), task)
    assert "NCCL_CROSS_NIC" in expected
    ours = {**RANK, "HDF5_USE_FILE_LOCKING": "FALSE"}
    assert source(task) == {**ours, **expected}
    assert source({**task, **dict.fromkeys(expected, "mine")}) == ours
    assert source({**task, "DDP_NETWORK_SETTINGS": "0"}) == ours
    elsewhere = bash(f"cd / && source {TOP}/export_DDP_vars.sh && echo $NCCL_CROSS_NIC", task)
    assert (elsewhere.stdout, elsewhere.stderr) == ("1\n", "")
