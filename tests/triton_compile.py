"""Triton kernels compiled for GPUs without one, by Triton's compiler and the ptxas that comes with it."""

import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from triton_interpreter import replace_launch

from networks.ops.launch import WARPS

# A100; H100 and H200.
ARCHITECTURES = pytest.mark.parametrize("architecture", [pytest.param(80, marks=pytest.mark.slow), 90])


class Compiled(NamedTuple):
    registers: int  # per thread
    stack: int  # bytes per thread for registers that were spilled
    shared: int  # bytes per program
    ptx: str


def compile_kernel(
    kernel: Any,
    types: Mapping[str, str],
    constants: Mapping[str, Any],
    directory: Path,
    architecture: int = 90,
    unaligned: tuple[str, ...] = (),
    **options: Any,
) -> Compiled:
    """Compiles a kernel from its source; `directory` is for Triton's cache.

    types: of the arguments, as "*bf16", "i32" or "tensordesc<bf16[128, 64]>". Like most arguments of a launch, all
      pointers and integers are multiples of 16, except those that `unaligned` names. Names that the kernel lacks are
      ignored here and in `constants`.
    options: such as num_warps.
    """
    triton = pytest.importorskip("triton")
    compiler, backend = pytest.importorskip("triton.compiler"), pytest.importorskip("triton.backends.compiler")
    names = kernel.arg_names
    constants = {name: value for name, value in constants.items() if name in names}
    arguments = {name: "constexpr" if name in constants else types[name] for name in names}
    aligned = [name for name, kind in arguments.items() if re.match(r"\*|i\d", kind) and name not in unaligned]
    values = {(names.index(name),): value for name, value in constants.items()}
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = compiler.ASTSource(kernel, arguments, values, attributes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(directory))
        result = compiler.compile(source, target=backend.GPUTarget("cuda", architecture, 32), options=options)
    (directory / "cubin").write_bytes(result.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    usage = subprocess.check_output([tool, "-res-usage", directory / "cubin"], text=True)
    registers, stack = (int(number) for number in re.findall(r"\b(?:REG|STACK):(\d+)", usage))
    return Compiled(registers, stack, result.metadata.shared, result.asm["ptx"])


def compile_launches(
    monkeypatch: pytest.MonkeyPatch, directory: Path, architecture: int = 90, products: bool = True
) -> list[tuple[str, int, int, Compiled]]:
    """The kernel, programs, warps and result of each launch from now on, compiled instead.

    Products use Hopper's tensor cores; no registers are spilled; no operations are atomic: their order would vary.
    """
    compiled: list[tuple[str, int, int, Compiled]] = []

    def launch(kernel: Any, programs: int, *arguments: Any, **constants: Any) -> None:
        given = dict(zip(kernel.arg_names, arguments, strict=False)) | constants
        types = {name: _type(value) for name, value in given.items() if name not in constants and value is not None}
        sizes = {name: value for name, value in given.items() if name in kernel.arg_names and name not in types}
        odd = tuple(name for name in types if isinstance(given[name], int) and given[name] % 16)
        options = {name: value for name, value in constants.items() if name not in kernel.arg_names}
        options |= {"unaligned": odd, "enable_fp_fusion": False, "architecture": architecture}
        result = compile_kernel(kernel, types, sizes, directory / str(len(compiled)), **options)
        compiled.append((name := kernel.fn.__name__, programs, constants.get("num_warps", WARPS), result))
        assert result.stack == 0, name
        assert not re.search(r"\b(atom|red)\.(global|relaxed|add)", result.ptx), name
        assert not products or name == "sum_splits" or "wgmma.mma_async" in result.ptx, name

    replace_launch(monkeypatch, launch)
    return compiled


def _type(argument: Any) -> str:
    if isinstance(argument, int | float):
        return "i32" if isinstance(argument, int) else "fp32"
    memory = getattr(argument, "base", argument)
    dtype = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}[memory.dtype]
    return f"*{dtype}" if memory is argument else f"tensordesc<{dtype}{list(argument.block_shape)}>"
