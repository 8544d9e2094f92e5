"""Compile a Triton kernel as its launch would, without a GPU, and read what came out."""

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int64: "i64", torch.int32: "i32"}
TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"


class Compiled:
    """PTX, SASS and resources of one kernel."""

    def __init__(self, kernel: Any, arguments: dict[str, Any], arch: int, **options: Any) -> None:
        signature, constants, attributes = {}, {}, {}
        for index, parameter in enumerate(kernel.params):
            value = arguments[parameter.name]
            if parameter.is_constexpr or value is None:
                signature[parameter.name] = "constexpr"
                constants[parameter.name] = value
                continue
            if isinstance(value, torch.Tensor):
                signature[parameter.name] = f"*{TYPES[value.dtype]}"
            else:
                wide = isinstance(value, int) and value >= 2**31
                signature[parameter.name] = "fp32" if isinstance(value, float) else "i64" if wide else "i32"
            divisible = isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0)
            if divisible and not parameter.do_not_specialize:
                attributes[(index,)] = [["tt.divisibility", 16]]
        source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
        compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
        self.ptx: str = compiled.asm["ptx"]
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(compiled.asm["cubin"])
            file.flush()
            self.sass = _output(TOOLS / "nvdisasm", "-c", file.name)
            usage = _output(TOOLS / "cuobjdump", "-res-usage", file.name)
        found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
        assert found, usage
        self.registers, self.stack = map(int, found.groups())

    def count_sass(self, pattern: str) -> int:
        return len(re.findall(pattern, self.sass))

    def count_ptx(self, pattern: str) -> int:
        return len(re.findall(pattern, self.ptx))


def _output(*command: str | Path) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout + done.stderr
