"""Fingerprints of what the commands compute, to show that a refactoring changes nothing; no test, about 3 minutes.

python tests/same_program.py FILE             writes them
python tests/same_program.py --compare FILE   computes them again and lists what differs

Fingerprints hold on one machine with one version of PyTorch: tensors of checkpoints, metrics without measured times,
predictions, an evaluation, a simulation, and an import.
"""

import difflib
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch

TOP = Path(__file__).parents[1]
RUNS = {  # ranks and flags; the last one is stopped and resumed
    "adam lowmem": (1, ["--data_loader_config=lowmem"]),
    "soap inmem": (1, ["--data_loader_config=inmem", "--set=optimizer.name=soap", "--set=ema_decay=0.9"]),
    "adam resident": (1, ["--data_loader_config=resident", "--set=evaluation.every_epochs=1", "--set=symmetries=full"]),
    "adam synthetic": (1, ["--data_loader_config=synthetic"]),
    "adam auto, 4 ranks": (4, ["--data_loader_config=auto"]),
    "soap lowmem, 2 ranks": (2, ["--data_loader_config=lowmem", "--set=optimizer.name=soap", "--set=num_epochs=20"]),
}
MEASURED = re.compile(r"sec|data wait|slowest|TFLOP|^config$|^text$")  # names of times, and of texts with paths


def digest(value: Any) -> str:
    """SHA-256 of nested dictionaries, lists, arrays and tensors."""
    sha = hashlib.sha256()
    if isinstance(value, Mapping):
        for key in sorted((key for key in value if not MEASURED.search(str(key))), key=str):
            sha.update(f"{key}{digest(value[key])}".encode())
    elif isinstance(value, list | tuple):
        sha.update("".join(map(digest, value)).encode())
    else:
        array = value.detach().cpu().float().numpy() if isinstance(value, torch.Tensor) else value
        sha.update(array.tobytes() if isinstance(array, np.ndarray) and array.dtype != object else repr(array).encode())
    return sha.hexdigest()[:16]


def start(*words: Any, ranks: int = 1) -> subprocess.Popen[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    command = [sys.executable, *launcher, *map(str, words)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "100"}
    return subprocess.Popen(command, cwd=TOP, env=environment, stdout=-1, stderr=-2, text=True, start_new_session=True)


def run(*words: Any, ranks: int = 1) -> str:
    process = start(*words, ranks=ranks)
    output, _ = process.communicate()
    assert process.returncode == 0, (words, output[-3000:])
    return output


def datasets(path: Path) -> str:
    with h5py.File(path) as file:
        return digest({name: dataset[()] for name, dataset in file.items()})


def training(name: str, folder: Path) -> tuple[Path, dict[str, str]]:
    """A run of config `test`: its directory and fingerprints."""
    ranks, flags = RUNS[name]
    words = ["train.py", "--config=test", f"--set=expdir={folder / 'runs' / name.replace(' ', '_')}", "--run_num=00"]
    words += [f"--set={split}_path={folder / split}.h5" for split in ("train", "val")] + flags
    words += ["--set=box_size=[32,32]", "--set=report_baselines=true"]
    if "2 ranks" in name:
        process = start(*words, ranks=ranks)
        while process.poll() is None and not any(folder.glob("runs/soap_lowmem*/**/weights.pt")):
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGTERM)
        process.communicate()
    run(*words, ranks=ranks)
    (directory,) = {path.parent for path in folder.glob(f"runs/{name.replace(' ', '_')}/**/metrics.jsonl")}
    newest = max(path.parent for path in directory.glob("**/weights.pt") if not path.parent.is_symlink())
    parts = {f"{name}: {path.name}": digest(torch.load(path, weights_only=True)) for path in newest.glob("*.pt")}
    records = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    parts[f"{name}: metrics"] = digest(records)
    parts |= {f"{name}: {path.name}": digest(dict(np.load(path))) for path in directory.glob("evaluation/*.npz")}
    return directory, parts


def fingerprints() -> Iterator[tuple[str, str]]:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for name, seed in (("train", 1), ("val", 2)):
            run("-m", "simulation", "--output", folder / f"{name}.h5", "--grid", 32, "--seed", seed)
            yield f"simulation {name}", datasets(folder / f"{name}.h5")
        run("-m", "simulation", "--output", folder / "nyx.h5", "--grid", 32, "--format", "nyx")
        run("-m", "utils.volumes.import_volume", "--input", folder / "nyx.h5", "--output", folder / "imported.h5")
        yield "import", datasets(folder / "imported.h5")
        for name in RUNS:
            directory, parts = training(name, folder)
            yield from parts.items()
            if name == "soap inmem":
                predicted, out = folder / "predicted.h5", folder / "evaluated"
                given = ["--input", folder / "val.h5"]
                run("predict.py", "--checkpoint", directory, *given, "--output", predicted, ranks=2)
                yield "prediction", datasets(predicted)
                run("evaluate.py", "--prediction", predicted, *given, "--output", out)
                yield "evaluation", digest(dict(np.load(out / "evaluation.npz")))


def main() -> None:
    option, name = sys.argv[1:] if len(sys.argv) > 2 else ("", sys.argv[1])
    now = dict(fingerprints())
    if option != "--compare":
        Path(name).write_text(json.dumps(now, indent=1))
        return
    before = json.loads(Path(name).read_text())
    differing = [key for key in {**before, **now} if before.get(key) != now.get(key)]
    for key in differing:
        old, new = (str(values.get(key)).splitlines() for values in (before, now))
        print(key, *(line for line in difflib.ndiff(old, new) if line[0] in "-+"), sep="\n")
    print(f"{len(differing)} of {len(before)} differ" if differing else f"nothing differs: {len(now)} fingerprints")


if __name__ == "__main__":
    main()
