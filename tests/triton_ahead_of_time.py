"""Compiles a launch for a GPU that is not there, and reads what came out: PTX, machine code, registers."""

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tp_residual.kernels.add_norm_triton import Launch

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
POINTERS = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


@dataclass(frozen=True)
class Compiled:
    ptx: str
    sass: str
    spilled_bytes: int

    def ptx_count(self, pattern: str) -> int:
        return len(re.findall(pattern, self.ptx))

    def sass_count(self, pattern: str) -> int:
        return len(re.findall(pattern, self.sass))

    def narrow_accesses(self) -> list[str]:
        """Loads from and stores to global memory of less than 128 bits a thread."""
        return [a for a in re.findall(r"\b(?:LDG|STG)\.E[\w.]*", self.sass) if ".128" not in a]


def compile_launch(launch: Launch, arch: int) -> Compiled:
    """As Triton would on its first call: 16-byte aligned tensors, what is None left out."""
    signature, constants, attributes = {}, {}, {}
    for position, parameter in enumerate(launch.kernel.params):
        value = launch.arguments[parameter.name]
        if value is None or parameter.is_constexpr:
            signature[parameter.name] = "constexpr"
            constants[(position,)] = value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = POINTERS[value.dtype]
            attributes[(position,)] = [["tt.divisibility", 16]]
        else:
            signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
    source = ASTSource(fn=launch.kernel, signature=signature, constexprs=constants, attrs=attributes)
    kernel = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=launch.options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        sass = subprocess.run([TOOLS / "nvdisasm", "-c", file.name], capture_output=True, text=True, check=True).stdout
        usage = subprocess.run(
            [TOOLS / "cuobjdump", "-res-usage", file.name], capture_output=True, text=True, check=True
        )
    stack = re.search(r"STACK:(\d+)", usage.stdout + usage.stderr)
    assert stack is not None, usage.stdout + usage.stderr
    return Compiled(kernel.asm["ptx"], sass, int(stack[1]))
