"""The rungs of the optimization ladder: fixed sets of options, each measured as one run, and their predictions.

No rung depends on whether an earlier one was faster, with one exception: `on` names rungs of which the fastest one's
options come first. So an option that pays only together with another one is still measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Changes = Mapping[str, Any]
Entry = Mapping[str, Any]  # a rung's result


@dataclass(frozen=True)
class Rung:
    """`changes` are keys of the config; they follow those of the fastest measured rung in `on`, which also decides
    `graph`.

    package: must be installed.
    alone: needs a process of its own, because cuDNN searches its algorithms once per process.
    gigabytes: read and written outside the convolutions by a step at the default batch size (benchmarks/traffic.py).
    """

    name: str
    changes: Changes = field(default_factory=dict)
    graph: bool = False
    on: tuple[str, ...] = ()
    package: str | None = None
    alone: bool = False
    gigabytes: float | None = None

    @property
    def key(self) -> str:
        """The part of the name before the colon."""
        return self.name.split(":")[0]


_FLOAT16 = {"num_data_workers": 8, "enable_amp": True, "precision": "float16"}
_BFLOAT16 = {"data_loader_config": "resident", "enable_amp": True, "precision": "bfloat16"}
_LAST = {**_BFLOAT16, "channels_last": True}
_FUSED = {**_LAST, "fused_pointwise": True}
_A = {**_FUSED, "network.space_to_depth": ["down1", "last"]}
_TAIL = {"fused_tail": True}
_DENSE = ["down1", "last", "up2", "up3", "up4", "down2"]

# On a GPU, in the order of importance. The candidates at one batch size:
BEST = (
    Rung("A: bfloat16, channels last, space-to-depth, fused kernels, volume in GPU memory", _A, gigabytes=15.45),
    Rung("B: A as a CUDA graph", _A, graph=True, gigabytes=15.45),
    Rung("C: A compiled instead of fused kernels", {**_A, "fused_pointwise": False, "enable_jit": True}),
    Rung("tail: the faster of A and B, one kernel after the last convolution", _TAIL, on=("A", "B"), gigabytes=11.61),
)
FASTEST = tuple(rung.key for rung in BEST)
# Larger batches, for which D and E are predicted as for A, and what the candidates are compared with.
FURTHER = (
    Rung("D: the fastest at batch 64, at batch 128", {"local_batch_size": 128}, on=FASTEST, gigabytes=25.73),
    Rung("E: the fastest at batch 64, at batch 256", {"local_batch_size": 256}, on=FASTEST, gigabytes=46.28),
    Rung("F: A without space-to-depth", _FUSED, gigabytes=15.12),
    # DALI would need copies of the volume and is rarely installed: the threaded loader stands in for it.
    Rung("G: the tutorial's best, float16, fused Adam, compiled, 8 loader threads", {**_FLOAT16, "enable_jit": True}),
)
# Single options.
VARIANTS = (
    Rung("base: the faster of A and B", on=("A", "B"), gigabytes=15.45),
    Rung("dense: base, strided gradients as dense convolutions", {"network.space_to_depth": _DENSE}, on=("base",)),
    Rung("EMA: base with averaged weights", {"ema_decay": 0.999}, on=("base",), gigabytes=16.85),
    Rung("limit 0: base, cuDNN times all algorithms", {"cudnn_benchmark_limit": 0}, on=("base",), alone=True),
)
# The tutorial's steps to its best options, and further steps between it and F.
HISTORY = (
    Rung("float16: fused Adam, 8 loader threads", _FLOAT16, gigabytes=20.8),
    Rung("TF32: 2 loader threads"),
    Rung("8 threads: TF32, 8 loader threads", {"num_data_workers": 8}),
)
OTHERS = (
    Rung("dense up2: base, strided gradient of up2 only", {"network.space_to_depth": _DENSE[:3]}, on=("base",)),
    Rung("bfloat16: NCDHW, volume in GPU memory", _BFLOAT16, gigabytes=22.29),
    Rung("channels last: bfloat16, volume in GPU memory", _LAST, gigabytes=22.62),
    Rung("float32: no TF32, 2 loader threads", {"tf32": False}),
    Rung("DALI: float16", {**_FLOAT16, "data_loader_config": "dali-lowmem"}, package="nvidia.dali"),
)
GPU_RUNGS = {rung.key: rung for rung in (*BEST, *FURTHER, *VARIANTS, *HISTORY, *OTHERS)}
TUTORIAL = "G"

CPU_RUNGS = (
    Rung("float32"),
    Rung("bfloat16", {"enable_amp": True}),
    Rung("bfloat16, channels last", {"enable_amp": True, "channels_last": True}),
    Rung("bfloat16, space-to-depth", {"enable_amp": True, "network.space_to_depth": ["down1", "last"]}),
    Rung("bfloat16, torch.compile", {"enable_amp": True, "enable_jit": True}),
    Rung("bfloat16, volume in memory", {"enable_amp": True, "data_loader_config": "inmem"}),
)


def state_of(rung: Rung, entries: Sequence[Entry] = ()) -> dict[str, Any]:
    """The config changes of a rung, and whether it records a CUDA graph; `entries` are the results so far."""
    if not rung.on:
        return {"changes": dict(rung.changes), "graph": rung.graph}
    best = best_of(entries, rung.on)
    start = state_of(GPU_RUNGS[rung.on[0]], entries) if best is None else best["state"]
    return {"changes": {**start["changes"], **rung.changes}, "graph": start["graph"]}


def best_of(entries: Iterable[Entry], keys: Sequence[str]) -> Entry | None:
    """The fastest measured rung among `keys`."""
    measured = [entry for entry in entries if "SYNTHETIC" in entry and key_of(entry) in keys]
    return max(measured, key=score, default=None)


def key_of(entry: Entry) -> str:
    """The key of the rung that was measured."""
    return str(entry["name"]).split(":")[0]


def score(entry: Entry) -> float:
    """Both count: an option may speed up the network while the input limits the speed, or only the input."""
    return math.sqrt(entry["SYNTHETIC"]["median"] * entry["FULL"]["median"])


# --- predictions, written before any measurement ---------------------------------------------------------------------

FLOP_PER_SAMPLE = 80.46e9
MATMUL, COPY = 790e12, 4.3e12  # FLOP/s and bytes/s of an H200
SHARES = (0.50, 0.65, 0.80)  # of the matmul peak, that the convolutions may reach


def predicted(gigabytes: float, batch: int) -> list[float]:
    """SYNTHETIC samples/s of an H200 for each of SHARES: time of the convolutions plus time of all other bytes."""
    moved = gigabytes * 1e9 / COPY
    return [batch / (batch * FLOP_PER_SAMPLE / (share * MATMUL) + moved) for share in SHARES]
