"""Speed of a step: sets of options, a call's parts in time, failures that lose no other result, and the kernels."""

import json
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd import DeviceType

from benchmarks import common, layers, step, step_profile
from benchmarks.step import FASTEST, PEER, SETS, Part
from benchmarks.step_profile import breakdown, classify, floor_milliseconds, kernels_of, work
from networks.unet import UNet
from utils import config as configs
from utils.errors import UserError
from utils.steps import build
from utils.steps.size import training_flops


@pytest.fixture
def cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hides GPUs, and has files made in `tmp_path` and small matrices multiplied."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setitem(layers.MATMUL_SIDES, "cpu", 64)
    monkeypatch.chdir(tmp_path)


def test_sets_are_valid_configs_that_differ() -> None:
    result = {str((kind.graph, configs.load(common.YAML, "base", dict(kind.changes)))) for kind in SETS.values()}
    assert len(result) == len(SETS)


@pytest.mark.parametrize(
    ("number", "reached"),
    [
        (1, ["layers", *(", ".join(names) for names in FASTEST if PEER not in names)]),
        (2, ["test_gpu.py", "test_graph.py"]),
        (3, ["volumes", "loaders", "own, EMA"]),
    ],
)
def test_a_call_ends_in_time_and_needs_a_gpu(cpu: None, capsys: Any, number: int, reached: Any) -> None:
    with pytest.raises(UserError, match="on a CPU run make bench-cpu"):
        step.main([f"--call={number}"])
    for minutes in (2, 8):
        step.main([f"--call={number}", f"--minutes={minutes}", "--dry_run"])
        lines = capsys.readouterr().out.splitlines()[2:]
        ends = {name: end for name, _, end in ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)}
        assert all(not end or float(end) <= 60 * minutes for end in ends.values())
    assert all(ends[name] for name in reached), "at the assumed costs"
    assert "test_documentation.py" not in ends


def test_a_failure_loses_no_other_result(cpu: None, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    """A process is killed after its measurement, one fails, a set is measured, and the last one hangs."""
    entry = {"name": "B", "options": "text", "TFLOP/s": 1.0, "matmul TFLOP/s": 2.0, "FULL / SYNTHETIC": 1.0}
    entry |= {"ms": 4.0, "floor ms": 3.0}
    entry |= {kind: {"median": 3.0, "min": 2.0, "max": 4.0} for kind in ("SYNTHETIC", "FULL")}
    entry |= {f"{name} of the warm-up steps": [1.0] for name in ("loss", "gradient norm")}
    (tmp_path / "entry.json").write_text(json.dumps({layers.COLD: 4.0, "ladder": [entry]}))
    copy = f"import os, shutil; os.makedirs('{tmp_path}/part', exist_ok=True); shutil.copy('{tmp_path}/entry.json', "
    copy += f"'{tmp_path}/part/step.json'); "
    parts = [
        Part("fault", ["-c", f"{copy} os.kill(os.getpid(), 11)"], 0),
        Part("error", ["-c", "raise RuntimeError('an illegal memory access was encountered')"], 0),
        Part("B", ["-c", copy], 0),
        Part("long", ["-c", ""], 1e6),
        Part("hang", ["-c", "import time; time.sleep(3000)"], 0),
    ]
    # The call ends after 20 s, counted from here and not from the collection of the tests.
    settings = {"START": 40.0, "WRITING": 0.0, "GRACE": 0.1, "STARTED": time.perf_counter()}
    for name, value in {**settings, "parts_of": lambda _: parts}.items():
        monkeypatch.setattr(step, name, value)
    step.main([f"--output={tmp_path}", "--minutes=1"])
    result = json.loads((tmp_path / "ladder.json").read_text())
    assert [entry["name"] for entry in result["ladder"]] == ["B", "B"]
    assert result["failed"]["fault"] == "ended by SIGSEGV"
    assert result["failed"]["error"] == "RuntimeError: an illegal memory access was encountered"
    assert result["failed"]["long"].startswith("no time left")
    assert result["failed"]["hang"].startswith("stopped after ")
    row = "| B: text | 3 (2 – 4) | 1.000 | 3 (2 – 4) | 1.000 | 1 | 25.0 | 50.0 | 4.00 | 3.00 | 75 |"
    assert row in capsys.readouterr().out


def test_files_of_tests_run_in_processes_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those with tests for a GPU, also if their marks are imported."""
    options: Any = SimpleNamespace(call=2, minutes=8.0, output=tmp_path)
    assert {"test_gpu.py", "test_graph.py", "test_optimizers.py"} <= {part.name for part in step.parts_of(options)}
    monkeypatch.setattr(step, "STARTED", time.perf_counter())
    call = step.Call(options)
    call.run([Part(f"{n}.py", ["-c", f"print('{n} passed'); exit({n % 2})"], 0) for n in range(6)])
    result = json.loads((tmp_path / "call2.json").read_text())
    assert result["last lines"] == {f"{n}.py": [f"{n} passed"] for n in range(6)}
    assert set(result["failed"]) == {"1.py", "3.py", "5.py"}
    assert {path.name for path in tmp_path.glob("*.log")} == {f"call2-{n}.py.log" for n in (1, 3, 5)}


def test_a_call_measures_sets_in_alternating_trials(cpu: None, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(step, "CPU_SETS", [("float32", "channels last")])
    (part,) = step.parts_of(SimpleNamespace(call=None, size="tiny", peer=None, output=tmp_path))  # type: ignore[arg-type]
    step.main(part.words[2:])
    first, second = json.loads((tmp_path / "part/step.json").read_text())["ladder"]
    for entry in (first, second):
        for kind in ("SYNTHETIC", "FULL"):
            assert 0 < entry[kind]["min"] <= entry[kind]["median"] <= entry[kind]["max"]
    trials = zip(second["SYNTHETIC"]["trials"], first["SYNTHETIC"]["trials"], strict=True)
    assert second["ratio to the first"]["trials"] == [rate / reference for rate, reference in trials]
    # The same samples and weights: rounding alone differs.
    for name in ("loss", "gradient norm"):
        values = [entry[f"{name} of the warm-up steps"] for entry in (first, second)]
        assert values[0] == pytest.approx(values[1], rel=0.05)
    assert "| float32: no TF32, 2 loader threads |" in (tmp_path / "part/step.md").read_text()


def test_each_convolution_is_measured_alone(cpu: None, tmp_path: Path) -> None:
    """All operations of a step are in the table, and it names the passes in which cuDNN is faster."""
    layers.main(["--batch=2", "--crop=8", "--width=4", f"--output={tmp_path}"])
    result = json.loads((tmp_path / "layers.json").read_text())
    counted = [row for row in result["layers"] if (row["layer"], row["pass"]) != ("down1", "input gradient")]
    with torch.device("meta"):
        flops = 2 * training_flops(UNet(width=4, scales=3), torch.empty(1, 4, 8, 8, 8))
    assert sum(row["GFLOP"] for row in counted) == pytest.approx(flops / 1e9)
    assert {row["skipped"] for row in result["layers"]} == {"there is no CUDA device"}
    result["layers"][0] |= {"cuDNN ms": 1.0, "own ms": 1.1, "error": 0.0}
    result["layers"][1] |= {"cuDNN ms": 1.1, "own ms": 1.0, "error": 0.0}
    slower = [line for line in layers.markdown(result).splitlines() if "faster" in line]
    assert slower == ["- cuDNN is faster: down1, forward"]


def test_the_floor_counts_the_products_of_a_step_and_each_value_once() -> None:
    """A layer of 64 and 128 channels: its grids have 2·64·32³ and 2·128·16³ values, its kernel 64·64·128."""
    config = configs.load(common.YAML, "bs64_opt", {"local_batch_size": 2, "num_data_workers": 0}).for_world(1)
    works = {name: (flops, size) for name, flops, size in work(config)}
    assert sum(flops for flops, _ in works.values()) == 2 * build.model_size(config).flops
    values, weights = 2 * 64 * 32**3 + 2 * 128 * 16**3, 64 * 64 * 128
    assert works["down2, forward"][1] == works["down2, input gradient"][1] == 2 * (values + weights)
    assert works["down2, weight gradient"] == (2.0 * weights * 2 * 16**3, 2 * values + 4 * weights)
    slow_products, slow_copies = floor_milliseconds(config, 1e-3, 1e6), floor_milliseconds(config, 1e6, 1e-3)
    assert slow_products == pytest.approx(sum(flops for flops, _ in works.values()) / 1e6, rel=1e-3)
    assert slow_copies == pytest.approx(sum(size for _, size in works.values()) / 1e6, rel=1e-3)


def test_the_tutorial_is_measured_on_the_same_batches(cpu: None, clone: Path, tmp_path: Path) -> None:
    """It starts from the same weights. Other directories are refused."""
    command = ["--sets", "float32", "--size=tiny", f"--output={tmp_path}"]
    for text in (None, "import torch.nothing", "class UNet:", "class UNet:\n    pass\n"):
        if text is not None:
            (tmp_path / "networks").mkdir(exist_ok=True)
            (tmp_path / "networks/UNet.py").write_text(text)
        with pytest.raises(UserError, match="is not a clone of the SC21 tutorial"):
            step.main([*command, f"--peer={tmp_path}"])
    step.main([*command, f"--peer={clone}"])
    ours, theirs = json.loads((tmp_path / "step.json").read_text())["ladder"]
    assert theirs["name"] == PEER
    assert theirs["SYNTHETIC"]["min"] > 0 < theirs["first step s"]
    for name in ("loss", "gradient norm"):
        values = [entry[f"{name} of the warm-up steps"] for entry in (ours, theirs)]
        assert values[0] == pytest.approx(values[1], rel=0.02), "float16 alone differs"
    options: Any = SimpleNamespace(call=1, peer=clone, size="cuda", batch=64, output=tmp_path)
    words = {part.name: part.words for part in step.parts_of(options)}
    assert f"--peer={clone}" in words[f"own, {PEER}"]
    with pytest.raises(UserError, match="needs --peer"):
        step.main(["--sets", PEER])


NAMES = {
    "sm90_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_tilesize128x128x64": "convolutions",
    "void cudnn::ops::scalePackedTensor_kernel<__nv_bfloat16, float>(long, __nv_bfloat16*, float)": "convolutions",
    "void cudnn::ops::nchwToNhwcKernel<__nv_bfloat16, __nv_bfloat16, float, false, true>(...)": "layout and casts",
    "triton_poi_fused__to_copy_clone_12": "layout and casts",
    "void multi_tensor_apply_kernel<TensorListMetadata<2>, CopyFunctor<c10::BFloat16, float>>": "layout and casts",
    "void multi_tensor_apply_kernel<FusedOptimizerTensorListMetadata<4>, FusedAdamMathFunctor<float, 4>>": "optimizer",
    "triton_poi_fused__to_copy_convolution_leaky_relu_0": "pointwise",
    "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "communication",
    "Memcpy HtoD (Pinned -> Device)": "copies",
    "memset8": "copies",
    "void dali::kernels::Unknown<float>(int)": "other",
}


def test_kernels_are_classified_by_name() -> None:
    assert {name: classify(name) for name in NAMES} == NAMES
    known = {"pointwise": ("pointwise.py", "l1.py"), "convolutions": ("hopper/*.py",)}
    assert classify("shuffle_cells") == "layout and casts"
    for category, patterns in known.items():
        sources = [path.read_text() for text in patterns for path in (common.REPOSITORY / "networks/ops").glob(text)]
        names = {name for source in sources for name in re.findall(r"launch\(\s*(\w+),", source)}
        names -= {"kernel", "shuffle_cells"}
        assert names
        # Convolutions are known with a suffix, too: gather_tma was counted as copies.
        names |= {f"{name}_tma" for name in names if category == "convolutions"}
        assert {name: classify(name) for name in names} == dict.fromkeys(names, category)


def test_overlaps_of_kernels_count_once_and_all_adds_up_to_the_step() -> None:
    """Of a simulated profile. Time that overlaps with a convolution is the convolution's; calls are no kernels."""

    def event(name: str, start: int, end: int, device: DeviceType = DeviceType.CUDA, named: bool = False) -> Any:
        span = SimpleNamespace(start=start, end=end)
        return SimpleNamespace(name=name, time_range=span, device_type=device, is_user_annotation=named)

    kernels = kernels_of(
        [
            event("sm90_xmma_fprop_implicit_gemm", 0, 4000),
            event("Memcpy DtoD", 3000, 5000),
            event("Memcpy DtoD", 6000, 7000),
            event("triton_poi_fused_relu_0", 7000, 8000),
            event("mystery", 9000, 9500),
            event("cudaLaunchKernel", 0, 9999, DeviceType.CPU),
            event("Context Sync", 0, 9999),
            event("Optimizer.step#Adam.step", 0, 9999, named=True),
        ]
    )
    result = breakdown(kernels, steps=2, step_ms=5.0)
    milliseconds = {name: value for name, value in result["categories"].items() if value}
    assert milliseconds == {"convolutions": 2.0, "pointwise": 0.5, "copies": 1.0, "other": 0.25, "gaps": 1.25}
    assert [(entry["name"], entry["ms"], entry["runs"]) for entry in result["top"][:2]] == [
        ("sm90_xmma_fprop_implicit_gemm", 2.0, 0.5),
        ("Memcpy DtoD", 1.5, 1.0),
    ]


@pytest.mark.gpu
def test_kernels_of_a_cuda_graph_are_seen() -> None:
    device = torch.device("cuda")
    left = torch.randn(256, 256, device=device)
    left @ left  # cuBLAS allocates its workspace before the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        (left @ left).relu()
    result = step_profile.measure(graph.replay, device, steps=3)
    assert result["kernels"] >= 2
    assert result["categories"]["convolutions"] > 0
    assert result["categories"]["pointwise"] > 0
