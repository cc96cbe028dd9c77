"""GPU kernels of a program as machine code, without a GPU: what Triton's compiler makes of them.

Reads the kernels out of the lowered program through private modules of JAX, which may move: then tests skip.
"""

import contextlib
import os
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import jax
import pytest

LANES = 32


@dataclass(frozen=True)
class Kernel:
    """One kernel of a lowered program, in Triton's intermediate language."""

    name: str
    ttir: str
    warps: int
    stages: int


@dataclass(frozen=True)
class MachineCode:
    """What a kernel became: registers and stack bytes of a thread, and the instructions of each of its loops."""

    registers: int
    stack_bytes: int
    loops: tuple[int, ...]

    def nested(self, turns: int) -> int:
        """Instructions of one turn of the outer loop, of two, whose inner one has so many turns."""
        inner, outer = sorted(self.loops)
        return outer + (turns - 1) * inner


def lower(function, *args):
    """``function`` of shapes, lowered for CUDA as for an H200."""
    try:
        from jax.sharding import AbstractDevice, AbstractMesh, AxisType, use_abstract_mesh
    except ImportError:
        context = contextlib.nullcontext()
    else:
        device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
        mesh = AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=device)
        context = use_abstract_mesh(mesh)
    with context:
        return jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",))


def kernels(lowered) -> list[Kernel]:
    """Every Triton kernel of a lowered program, in order."""
    try:
        from jax._src.interpreters import mlir
        from jax._src.lib.mlir import ir
        from jax._src.lib.triton import dialect
    except ImportError as error:
        pytest.skip(f"JAX's private modules have moved: {error}")

    def calls(operation):
        for block in (block for region in operation.regions for block in region):
            for op in block:
                if op.operation.name == "stablehlo.custom_call" and "triton" in str(op.attributes["call_target_name"]):
                    yield op.attributes["mhlo.backend_config"]
                yield from calls(op.operation)

    context, found = mlir.make_ir_context(), []
    dialect.register_dialect(context)
    for config in calls(lowered.compiler_ir("stablehlo").operation):
        module = ir.Module.parse(ir.StringAttr(config["ir"]).value_bytes, context=context)
        warps, stages = (ir.IntegerAttr(config[key]).value for key in ("num_warps", "num_stages"))
        found.append(Kernel(ir.StringAttr(config["name"]).value, module.operation.get_asm(), warps, stages))
    return found


def machine_code(kernel: Kernel, capability: int) -> MachineCode:
    """Compile for compute capability 80, 90, ... with Triton's own ptxas."""
    pytest.importorskip("triton")
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, f"{kernel.name}.ttir")
        source.write_text(kernel.ttir)
        return compiled(str(source), capability, kernel.warps, kernel.stages)


def compiled(source, capability: int, warps: int, stages: int) -> MachineCode:
    """What Triton makes of a source: a file of its language, or a kernel with its constants."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget

    # Products and sums may be fused, which is what XLA's own Triton does.
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    options = {"num_warps": warps, "num_stages": stages}
    code = triton.compile(source, GPUTarget("cuda", capability, LANES), options).asm["cubin"]
    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder, "kernel.cubin")
        binary.write_bytes(code)

        def tool(*command):
            return subprocess.run([tools / command[0], *command[1:], binary], capture_output=True, text=True).stdout

        usage, listing = tool("cuobjdump", "-res-usage"), tool("nvdisasm", "-c")
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found, usage
    return MachineCode(int(found[1]), int(found[2]), _loops(listing))


def _loops(listing: str) -> tuple[int, ...]:
    """Instructions between each label and the branch back to it."""
    at, labels, found = 0, {}, []
    for line in listing.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = at
        elif re.match(r"\s+/\*[0-9a-f]{4,}\*/", line):
            back = re.search(r"BRA.*`\((\.L_x_\d+)\)", line)
            # A branch to itself ends the code.
            if back and labels.get(back[1], at) < at:
                found.append(at - labels[back[1]])
            at += 1
    return tuple(found)
