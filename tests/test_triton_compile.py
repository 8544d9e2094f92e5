"""Add+norm's Triton kernels compiled for GPUs that are not there: what the machine code shows about speed and about bits."""

import re
from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("triton")

from triton_ahead_of_time import Compiled, compile_launch

from tp_residual.kernels.add_norm_operands import Operands
from tp_residual.kernels.add_norm_triton import add_norm_launch
from tp_residual.kernels.contract import AddNormSpec, NormSpec
from tp_residual.kernels.triton_add_norm_backward import add_norm_backward_launches

FP32, BF16 = torch.float32, torch.bfloat16
RMS, LAYER = NormSpec(1e-6), NormSpec(1e-5, "layer")
PLAIN = AddNormSpec(BF16, BF16, RMS)
SANDWICH = AddNormSpec(FP32, BF16, LAYER, NormSpec(1e-6, weight_offset=1.0), 0.3, 1.7, BF16)


@pytest.fixture(autouse=True, scope="module")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield


def operands_of(spec: AddNormSpec, hidden: int, *, stride: int | None = None) -> Operands:
    def rows(dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(4, stride or hidden, dtype=dtype)[:, :hidden]

    weight = torch.empty(hidden, dtype=BF16)
    inner, layer = spec.update_norm is not None, spec.norm is not None and spec.norm.kind == "layer"
    return Operands(
        rows(spec.stream_dtype),
        rows(BF16),
        weight if inner else None,
        weight if inner else None,
        None,
        weight if spec.norm is not None else None,
        weight if layer else None,
    )


def forward(spec: AddNormSpec, hidden: int, arch: int, *, fast: bool = False, stride: int | None = None) -> Compiled:
    operands = operands_of(spec, hidden, stride=stride)
    return compile_launch(add_norm_launch(spec, operands, operands.residual, operands.update, fast=fast), arch)


def fused_adds(compiled: Compiled) -> list[str]:
    """Fused multiply-adds that round otherwise than the contract.

    sm_80 has no bf16 addition: it is `a * 1 + b`. For bf16 operands one rounding of the sum is the fp32 sum rounded (24 >= 2 * 8 + 2 bits).
    """
    ones = set(re.findall(r"mov\.b32\s+(%r\d+), 1065369472;", compiled.ptx))  # 0x3F803F80, two bf16 ones
    fused = re.findall(r"\bfma\.(\S+)\s+%\w+, %\w+, (%\w+), %\w+;", compiled.ptx)
    assert len(fused) == compiled.ptx_count(r"\bfma\b")
    return [kind for kind, factor in fused if kind != "rn.bf16x2" or factor not in ones]


@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize(("spec", "hidden"), [(PLAIN, 576), (PLAIN, 8192), (SANDWICH, 16384)])
def test_the_contract_order(spec: AddNormSpec, hidden: int, arch: int) -> None:
    compiled = forward(spec, hidden, arch)
    assert compiled.narrow_accesses() == []
    assert compiled.sass_count(r"\bLDG\.E[\w.]*\.128") > 0 and compiled.sass_count(r"\bSTG\.E[\w.]*\.128") > 0
    assert compiled.spilled_bytes == 0 and compiled.sass_count(r"\b(?:LDL|STL)\b") == 0
    # every rounding as written: no fused multiply-add, nothing the assembler may still fuse, no flushed subnormals
    assert fused_adds(compiled) == []
    assert compiled.ptx_count(r"\b(?:add|sub|mul)\.f32") == 0 and compiled.ptx_count(r"\badd\.rn\.f32") > 0
    assert compiled.ptx_count(r"\.ftz") == 0
    # a correctly rounded root and one division for each statistic, nothing approximate
    norms = 1 + (spec.update_norm is not None)
    means = norms + (spec.norm is not None and spec.norm.kind == "layer")
    assert compiled.ptx_count(r"sqrt\.rn\.f32") == norms
    assert compiled.ptx_count(r"div\.rn\.f32") == norms + means
    assert compiled.ptx_count(r"\.approx|div\.full") == 0


def test_the_machine_code_fuses_only_inside_division_and_root() -> None:
    """Those are made of fused steps, whose number does not grow with the row; a fused square or add would."""
    short, long = (forward(PLAIN, hidden, 90).sass_count(r"\bFFMA") for hidden in (8192, 16384))
    assert short == long


@pytest.mark.parametrize("hidden", [1024, 4096, 16384])
def test_the_halving_tree_costs_few_barriers(hidden: int) -> None:
    assert forward(PLAIN, hidden, 90).sass_count(r"BAR\.SYNC") <= 3


@pytest.mark.parametrize("arch", [80, 90])
def test_the_fast_order(arch: int) -> None:
    compiled = forward(PLAIN, 8192, arch, fast=True)
    assert compiled.narrow_accesses() == []
    assert compiled.spilled_bytes == 0
    assert compiled.ptx_count(r"rsqrt\.approx") == 1
    assert compiled.ptx_count(r"sqrt\.rn") == 0 and compiled.ptx_count(r"\bfma\b") > 0


def test_wide_accesses_survive_strides_that_are_multiples_of_eight_only() -> None:
    assert forward(PLAIN, 1000, 90, stride=1016).narrow_accesses() == []
    assert len(forward(PLAIN, 1000, 90, stride=1001).narrow_accesses()) > 0


@pytest.mark.parametrize(("spec", "hidden", "arch"), [(PLAIN, 8192, 80), (PLAIN, 8192, 90), (SANDWICH, 4096, 90)])
def test_the_backward(spec: AddNormSpec, hidden: int, arch: int) -> None:
    operands = operands_of(spec, hidden)
    d_new_residual = torch.empty_like(operands.rows)
    d_normed = torch.empty(operands.rows.shape, dtype=BF16)
    launches = add_norm_backward_launches(spec, d_new_residual, d_normed, operands, operands)
    rows, column_sum = (compile_launch(launch, arch) for launch in launches[:2])
    assert rows.narrow_accesses() == []
    assert rows.spilled_bytes == 0
    for compiled in (rows, column_sum):
        assert compiled.ptx_count(r"\b(?:atom|red)\.") == 0  # the order of a sum may not depend on who comes first
