"""add_norm and fused_add_rmsnorm: the contract's bits, gradients, in-place effects, errors, compilers; on a GPU too, and CUDA graphs."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tp_residual.errors import UserError
from tp_residual.kernels import contract, cpu
from tp_residual.kernels.add_norm import add_norm, fused_add_rmsnorm
from tp_residual.kernels.add_norm_operands import Operands, overlap
from tp_residual.kernels.contract import AddNormSpec, NormSpec

FP32, BF16, FP16, FP64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
RMS = NormSpec(1e-6)
SPECS = {
    "rms": AddNormSpec(BF16, BF16, RMS),
    "add": AddNormSpec(FP16, FP16),
    "layer": AddNormSpec(FP32, FP32, NormSpec(1e-5, "layer")),
    "after_cast": AddNormSpec(BF16, BF16, NormSpec(1e-5, weight_after_cast=True)),
    "sandwich": AddNormSpec(FP32, BF16, NormSpec(1e-6, weight_offset=1.0), NormSpec(1e-5), 0.3, 1.7, BF16),
    "fp64": AddNormSpec(FP64, FP64, RMS),
}


def random(*shape: int, seed: int, dtype: torch.dtype = FP32) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=FP64) * 3 + 0.7).to(dtype)


def operands_of(spec: AddNormSpec, tokens: int, hidden: int) -> Operands:
    dtype = spec.output_dtype
    inner = random(hidden, seed=4, dtype=dtype) if spec.update_norm else None
    outer = random(hidden, seed=5, dtype=dtype) if spec.norm else None
    norm_bias = random(hidden, seed=6, dtype=dtype) if spec.norm and spec.norm.kind == "layer" else None
    update_bias = random(hidden, seed=3, dtype=dtype)
    residual, update = (
        random(tokens, hidden, seed=1, dtype=spec.stream_dtype),
        random(tokens, hidden, seed=2, dtype=dtype),
    )
    return Operands(residual, update, update_bias, inner, None, outer, norm_bias)


def call(function: Callable[..., Any], spec: AddNormSpec, operands: Operands, **options: Any) -> Any:
    return function(spec, operands.residual, operands.update, **operands.parameters(), **options)


def assert_equal(got: tuple[Tensor | None, ...], expected: tuple[Tensor | None, ...]) -> None:
    for ours, theirs in zip(got, expected, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None and theirs is not None:
            assert ours.dtype == theirs.dtype and torch.equal(ours.cpu(), theirs.cpu())


# -- values


@pytest.mark.parametrize("order", ["contract", "fast"])
@pytest.mark.parametrize("name", SPECS)
def test_it_is_the_contract(name: str, order: str) -> None:
    for tokens, hidden in ((5, 100), (3, 1), (0, 8)):
        operands = operands_of(SPECS[name], tokens, hidden)
        got, expected = (
            call(add_norm, SPECS[name], operands, order=order),
            call(contract.add_norm, SPECS[name], operands),
        )
        if order == "contract" or tokens == 0:
            assert_equal(got, expected)
        elif got[1] is not None:
            # a free order of the row's sum: its last bit, which a rounding to bf16 can carry to a whole unit (2^-8 of the value)
            torch.testing.assert_close(got[1], expected[1], rtol=2**-7 if got[1].dtype is BF16 else 1e-5, atol=1e-5)


def test_subsets() -> None:
    residual, update, weight = random(4, 8, seed=1, dtype=BF16), random(4, 8, seed=2), random(8, seed=3, dtype=BF16)
    for spec in (SPECS["rms"], replace(SPECS["rms"], skip_scale=0.5), AddNormSpec(FP32, BF16, RMS)):
        for operands in (Operands(residual, None, weight=weight), Operands(None, update, weight=weight)):
            assert_equal(call(add_norm, spec, operands), call(contract.add_norm, spec, operands))
    assert add_norm(SPECS["rms"], residual, None, weight=weight)[0] is residual  # nothing changes it, nothing copies it


def test_rows_of_any_layout() -> None:
    spec, hidden = SPECS["rms"], 12
    weight = random(2 * hidden, seed=3, dtype=BF16)[::2]
    wide = random(5, 31, seed=1, dtype=BF16)
    layouts = [
        wide[:, 1:13],
        wide[:, 13:25],
        random(hidden, 5, seed=2, dtype=BF16).t(),
        wide[:1, 5:17].expand(5, hidden),
    ]
    for residual in layouts:
        for update in layouts:
            expected = contract.add_norm(spec, residual.clone(), update.clone(), weight=weight.clone())
            assert_equal(add_norm(spec, residual, update, weight=weight), expected)


def test_given_outputs_are_written() -> None:
    for name, spec in SPECS.items():
        operands = operands_of(spec, 4, 10)
        expected = call(contract.add_norm, spec, operands)
        new_residual = torch.full((4, 10), float("nan"), dtype=spec.stream_dtype)
        wide = torch.full((4, 25), float("nan"), dtype=spec.output_dtype)
        normed = wide[:, 3:13] if spec.norm else None
        got = call(add_norm, spec, operands, residual_out=new_residual, normed_out=normed)
        assert got[0] is new_residual and got[1] is normed, name
        assert_equal(got, expected)
        if spec.norm:
            assert wide[:, :3].isnan().all() and wide[:, 13:].isnan().all()
            given_one = call(add_norm, spec, operands, normed_out=torch.empty(4, 10, dtype=spec.output_dtype))
            assert_equal(given_one, expected)


def test_outputs_may_be_the_inputs() -> None:
    spec = AddNormSpec(BF16, BF16, RMS)
    for swap in (False, True):
        operands = operands_of(spec, 6, 20)
        expected = call(contract.add_norm, spec, operands)
        outs = (operands.update, operands.residual) if swap else (operands.residual, operands.update)
        assert_equal(call(add_norm, spec, operands, residual_out=outs[0], normed_out=outs[1]), expected)
    x, weight = random(6, 20, seed=1, dtype=BF16), random(20, seed=2, dtype=BF16)
    expected_norm = contract.norm(x, weight, None, RMS, BF16)
    add_norm(spec, x, None, weight=weight, normed_out=x)
    assert torch.equal(x, expected_norm)


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize(("stream", "dtype"), [(BF16, BF16), (FP16, FP16), (FP32, BF16), (FP32, FP32), (FP64, FP64)])
def test_fused_add_rmsnorm(stream: torch.dtype, dtype: torch.dtype, offset: float) -> None:
    input, residual, weight = (
        random(5, 100, seed=1, dtype=dtype),
        random(5, 100, seed=2, dtype=stream),
        random(100, seed=3, dtype=dtype),
    )
    spec = AddNormSpec(stream, dtype, NormSpec(1e-5, weight_offset=offset))
    expected = contract.add_norm(spec, residual, input, weight=weight)
    assert fused_add_rmsnorm(input, residual, weight, 1e-5, weight_offset=offset) is None
    assert_equal((residual, input), expected)


def test_fused_add_rmsnorm_of_column_slices() -> None:
    """Both halves of one buffer interleave in memory and share nothing."""
    buffer, weight = random(5, 40, seed=1, dtype=BF16), random(16, seed=3, dtype=BF16)
    before = buffer.clone()
    input, residual = buffer[:, 2:18], buffer[:, 20:36]
    expected = contract.add_norm(SPECS["rms"], residual.clone(), input.clone(), weight=weight)
    fused_add_rmsnorm(input, residual, weight)
    assert_equal((residual, input), expected)
    between = [0, 1, 18, 19, 36, 37, 38, 39]
    assert torch.equal(buffer[:, between], before[:, between])


def test_no_tokens_is_nothing_to_do() -> None:
    input, residual = torch.empty(0, 8), torch.empty(0, 8)
    fused_add_rmsnorm(input, residual, torch.ones(8))
    assert input.shape == residual.shape == (0, 8)


# -- gradients


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_gradients_of_first_and_second_order(kind: Any) -> None:
    # a large eps keeps the finite differences of short rows well conditioned
    spec = AddNormSpec(FP64, FP64, NormSpec(1e-2, kind, 1.0), NormSpec(1e-2, kind), 0.3, 1.7)
    leaves = [random(3, 6, seed=i, dtype=FP64).requires_grad_() for i in (1, 2)]
    leaves += [random(6, seed=i, dtype=FP64).requires_grad_() for i in range(3, 8)]

    def run(*values: Tensor) -> Any:
        return call(add_norm, spec, Operands(*values))

    assert torch.autograd.gradcheck(run, leaves)
    assert torch.autograd.gradgradcheck(run, leaves)


def test_gradients_of_subsets() -> None:
    residual, update = (random(3, 6, seed=i, dtype=FP64).requires_grad_() for i in (1, 2))
    weight = random(6, seed=3, dtype=FP64).requires_grad_()
    normed, added = AddNormSpec(FP64, FP64, NormSpec(1e-2)), AddNormSpec(FP64, FP64)
    for run, leaves in (
        (lambda r, w: add_norm(normed, r, None, weight=w), (residual, weight)),
        (lambda u, w: add_norm(normed, None, u, weight=w), (update, weight)),
        (lambda r, u: add_norm(added, r, u)[0], (residual, update)),
        (lambda r, u: add_norm(replace(added, skip_scale=1.7, update_scale=0.3), r, u)[0], (residual, update)),
        (lambda r, u: add_norm(replace(added, skip_scale=0.3, update_scale=0.3), r, u)[0], (residual, update)),
        (lambda r, u, w: add_norm(normed, r, u, weight=w)[1], (residual, update, weight)),  # one result is not used
        (lambda r, u, w: add_norm(normed, r, u, weight=w)[0], (residual, update)),
    ):
        function = run if len(leaves) == run.__code__.co_argcount else lambda r, u, run=run: run(r, u, weight.detach())
        assert torch.autograd.gradcheck(function, leaves)
        assert torch.autograd.gradgradcheck(function, leaves)


def test_gradients_have_their_operands_dtypes() -> None:
    spec = AddNormSpec(FP32, BF16, RMS)
    operands = operands_of(spec, 4, 10)
    leaves = Operands(*(None if t is None else t.requires_grad_() for t in operands))
    new_residual, normed = call(add_norm, spec, leaves)
    torch.autograd.backward((new_residual, normed), (random(4, 10, seed=8), random(4, 10, seed=9, dtype=BF16)))
    wide = Operands(*(None if t is None else t.detach().double().requires_grad_() for t in operands))
    torch.autograd.backward(
        call(contract.add_norm, replace(spec, stream_dtype=FP64, output_dtype=FP64), wide),
        (random(4, 10, seed=8).double(), random(4, 10, seed=9, dtype=BF16).double()),
    )
    for ours, theirs in zip(leaves, wide, strict=True):
        if ours is not None and theirs is not None:
            assert ours.grad is not None and theirs.grad is not None and ours.grad.dtype == ours.dtype
            # one rounding of each gradient to bf16 (2^-9 of it); the stream and the sums are fp32
            assert (ours.grad.double() - theirs.grad).norm() < 2**-8 * theirs.grad.norm()


def test_frozen_operands_get_no_gradient() -> None:
    spec = SPECS["layer"]
    operands = operands_of(spec, 4, 10)
    assert operands.residual is not None and operands.weight is not None
    operands.residual.requires_grad_()
    new_residual, normed = call(add_norm, spec, operands)
    (new_residual.sum() + (normed * random(4, 10, seed=9)).sum()).backward()
    assert operands.residual.grad is not None and operands.weight.grad is None and operands.update.grad is None


@pytest.mark.parametrize("hidden", [1, 7, 64])
def test_a_weights_gradient_does_not_depend_on_the_number_of_threads(hidden: int) -> None:
    spec, tokens = AddNormSpec(FP32, FP32, NormSpec(1e-2)), 40000 // hidden
    residual, update, weight = random(tokens, hidden, seed=1), random(tokens, hidden, seed=2), random(hidden, seed=3)
    gradients = []
    threads = torch.get_num_threads()
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        leaf = weight.clone().requires_grad_()
        normed = add_norm(spec, residual, update, weight=leaf)[1]
        assert normed is not None
        normed.backward(random(tokens, hidden, seed=4))
        gradients.append(leaf.grad)
    torch.set_num_threads(threads)
    assert torch.equal(gradients[0], gradients[1]) and torch.equal(gradients[0], gradients[2])


# -- errors


def x(*shape: int, dtype: torch.dtype = FP32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


SPEC = AddNormSpec(FP32, FP32, RMS)


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (lambda: add_norm(SPEC, None, None, weight=x(8)), "residual=None and update=None"),
        (lambda: add_norm(SPEC, x(2, 8), x(2, 7), weight=x(8)), r"update has shape \[2, 7\], residual has \[2, 8\]"),
        (lambda: add_norm(SPEC, x(2, 8), x(3, 8), weight=x(8)), r"update has shape \[3, 8\], residual has \[2, 8\]"),
        (lambda: add_norm(SPEC, x(2, 3, 8), x(2, 3, 8), weight=x(8)), r"flatten\(0, -2\)"),
        (lambda: add_norm(SPEC, x(2, 0), x(2, 0), weight=x(0)), "hidden size 0"),
        (lambda: add_norm(SPEC, x(2, 8), x(2, 8, dtype=torch.int32), weight=x(8)), "update has dtype int32"),
        (lambda: add_norm(SPEC, x(2, 8), x(2, 8), weight=x(8, dtype=torch.int64)), "weight has dtype int64"),
        (lambda: add_norm(SPEC, x(2, 8), x(2, 8, dtype=torch.float8_e4m3fn), weight=x(8)), "update has dtype float8"),
        (lambda: add_norm(SPEC, x(2, 8), x(2, 8).to("meta"), weight=x(8)), "update is on meta, residual on cpu"),
        (lambda: add_norm(SPEC, x(2, 8), x(2, 8), weight=x(9)), r"weight must be \[8\]"),
        (lambda: add_norm(SPEC, x(2, 8), x(2, 8), weight=x(8), norm_bias=x(2, 8)), r"norm_bias must be \[8\]"),
        (lambda: add_norm(SPEC, x(2, 8), x(2, 8), weight=x(8), update_bias=x(1)), r"update_bias must be \[8\]"),
        (lambda: add_norm(SPEC, x(2, 8), x(2, 8)), "weight=None with spec.norm"),
        (lambda: add_norm(replace(SPEC, norm=None), x(2, 8), x(2, 8), weight=x(8)), "weight is given and spec.norm=None"),
        (lambda: add_norm(SPEC, x(2, 8), x(2, 8), weight=x(8), update_weight=x(8)), "spec.update_norm=None"),
        (lambda: add_norm(replace(SPEC, update_norm=RMS), x(2, 8), x(2, 8), weight=x(8)), "update_weight=None"),
        (lambda: add_norm(SPEC, x(2, 8), None, weight=x(8), update_bias=x(8)), "give an update"),
        (lambda: add_norm(replace(SPEC, norm=NormSpec(0.0)), x(2, 8), None, weight=x(8)), "eps=0.0, which is not above 0"),
        (lambda: add_norm(replace(SPEC, norm=NormSpec(float("nan"))), x(2, 8), None, weight=x(8)), "eps=nan"),
        (lambda: add_norm(replace(SPEC, norm=NormSpec(1e-6, "l2")), x(2, 8), None, weight=x(8)), "kind='l2'"),  # type: ignore[arg-type]
        (lambda: add_norm(replace(SPEC, stream_dtype=torch.int32), x(2, 8), None, weight=x(8)), "stream_dtype=int32"),
        (lambda: add_norm(SPEC, x(2, 8), None, weight=x(8), order="quick"), "order='quick'"),  # type: ignore[arg-type]
        (lambda: add_norm(SPEC, x(2, 8), x(2, 8), weight=x(8), residual_out=x(2, 9)), "residual_out has shape"),
        (lambda: add_norm(SPEC, x(2, 8), x(2, 8), weight=x(8), normed_out=x(2, 8, dtype=BF16)), "normed_out has dtype bfloat16"),
        (lambda: add_norm(SPEC, x(2, 8), x(2, 8), weight=x(8), normed_out=x(1, 8).expand(2, 8)), "strides"),
        (lambda: add_norm(SPEC, x(2, 8), x(2, 8), weight=x(8), normed_out=x(8, 2).t()), "strides"),
        (lambda: add_norm(replace(SPEC, norm=None), x(2, 8), x(2, 8), normed_out=x(2, 8)), "spec.norm=None makes no normed value"),
        (lambda: add_norm(SPEC, x(2, 8).requires_grad_(), x(2, 8), weight=x(8), normed_out=x(2, 8)), "requires_grad"),
        (lambda: fused_add_rmsnorm(x(2, 8), x(2, 8), x(8).requires_grad_()), "requires_grad"),
        (lambda: fused_add_rmsnorm(x(2, 8), x(3, 8), x(8)), r"input has shape \[2, 8\], residual has \[3, 8\]"),
        (lambda: fused_add_rmsnorm(x(2, 8), x(2, 8), x(8), 0.0), "eps=0.0"),
        (lambda: fused_add_rmsnorm(x(2, 8), x(2, 8), x(8), -1e-6), "eps=-1e-06"),
        (lambda: fused_add_rmsnorm(x(2, 8, dtype=torch.int8), x(2, 8), x(8)), "input has dtype int8"),
        (lambda: fused_add_rmsnorm(x(2, 0), x(2, 0), x(0)), "hidden size 0"),
        (lambda: fused_add_rmsnorm(x(2, 8), x(2, 8), x(8), 1e-50), "eps=1e-50, which is not above 0 and finite in float32"),
        (lambda: fused_add_rmsnorm(x(2, 8), x(2, 8), x(8), float("inf")), "eps=inf, which is not above 0 and finite"),
        (lambda: add_norm(replace(SPEC, norm=NormSpec(1e39)), x(2, 8), None, weight=x(8)), "eps=1e\\+39, which is not above 0 and finite"),
        (lambda: fused_add_rmsnorm(x(2, 8), x(2, 8), x(8), weight_offset=float("nan")), "weight_offset=nan is not finite in float32"),
        (lambda: NormSpec(1e-6, weight_offset=1e39), "weight_offset=1e\\+39 is not finite in float32"),
        (lambda: NormSpec(1e-6, "batch"), "kind='batch' is not a norm that is known; use 'rms' or 'layer'"),  # type: ignore[arg-type]
        (lambda: NormSpec("1e-6"), "eps='1e-6' is a str, not a number"),  # type: ignore[arg-type]
        (lambda: NormSpec(x(1)), "eps=tensor.* is a Tensor, not a number"),  # type: ignore[arg-type]
        (lambda: fused_add_rmsnorm(x(2, 8), x(2, 8), x(8), "1e-6"), "eps='1e-6' is a str, not a number"),  # type: ignore[arg-type]
        (lambda: fused_add_rmsnorm(x(2, 8), x(2, 8), x(8), weight_offset=None), "weight_offset=None is a NoneType"),  # type: ignore[arg-type]
        (lambda: fused_add_rmsnorm(x(2, 8).numpy(), x(2, 8), x(8)), "input is a numpy.ndarray, not a torch.Tensor"),  # type: ignore[arg-type]
        (lambda: fused_add_rmsnorm(x(2, 8), [[0.0] * 8], x(8)), "residual is a list, not a torch.Tensor; convert it"),  # type: ignore[arg-type]
        (lambda: fused_add_rmsnorm(x(2, 8), x(2, 8), None), "weight=None with spec.norm"),  # type: ignore[arg-type]
        (lambda: fused_add_rmsnorm(x(2, 8), x(2, 8).to_sparse(), x(8)), "residual has layout sparse_coo.*to_dense"),
        (lambda: add_norm(SPEC, x(2, 8), x(2, 8), weight=x(8).numpy()), "weight is a numpy.ndarray"),  # type: ignore[arg-type]
        (lambda: add_norm(SPEC, x(2, 8), x(2, 8).to_sparse(), weight=x(8)), "update has layout sparse_coo"),
        (lambda: add_norm(SPEC, x(2, 8), x(2, 8), weight=x(8), normed_out=3.0), "normed_out is a float"),  # type: ignore[arg-type]
    ],
)  # fmt: skip
def test_errors_name_value_relation_and_way_out(run: Callable[[], Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        run()


def test_overlapping_memory_is_refused_and_left_alone() -> None:
    buffer, weight = random(6, 8, seed=1), random(8, seed=2)
    before = buffer.clone()
    for input, residual in ((buffer[:4], buffer[1:5]), (buffer, buffer), (buffer[:, :5], buffer[:, 3:])):
        with pytest.raises(UserError, match="residual overlaps input"):
            fused_add_rmsnorm(input, residual, weight[: input.shape[1]])
    with pytest.raises(UserError, match="residual_out overlaps normed_out"):
        add_norm(
            SPEC,
            random(2, 8, seed=1),
            random(2, 8, seed=2),
            weight=weight,
            residual_out=buffer[:2],
            normed_out=buffer[:2],
        )
    with pytest.raises(UserError, match="overlaps weight"):
        add_norm(SPEC, random(2, 8, seed=1), random(2, 8, seed=2), weight=buffer[1], residual_out=buffer[:2])
    assert torch.equal(buffer, before)


def test_operands_like_those_that_passed_are_still_looked_at() -> None:
    """The short checks of a repeated call: nothing that the long ones refuse gets by, and nothing is written."""
    for _ in range(2):
        test_overlapping_memory_is_refused_and_left_alone()
        fused_add_rmsnorm(x(4, 8), x(4, 8), x(8))
        fused_add_rmsnorm(x(6, 8), x(6, 8), x(8))
        fused_add_rmsnorm(x(4, 5), x(4, 5), x(5))
        buffer = random(4, 8, seed=1)
        with pytest.raises(UserError, match=r"weight must be \[8\]"):
            fused_add_rmsnorm(x(4, 8), buffer, x(5))
        with pytest.raises(UserError, match="residual overlaps weight"):
            fused_add_rmsnorm(x(4, 8), buffer, buffer[1])
        with pytest.raises(UserError, match="requires_grad"):
            fused_add_rmsnorm(x(4, 8), buffer, x(8).requires_grad_())
        assert torch.equal(buffer, random(4, 8, seed=1))


def test_what_the_kernel_below_lets_pass_is_refused_here() -> None:
    """It ignores what belongs to an update that is not given; here that is an error, also after such a call has passed there."""
    rows, weight, bias, outs = x(2, 8), x(8), x(8), (x(2, 8), x(2, 8))
    if cpu.unavailable() is None:
        for _ in range(2):
            cpu.add_norm(SPEC, rows, None, residual_out=outs[0], normed_out=outs[1], weight=weight, update_bias=bias)
    with pytest.raises(UserError, match="give an update"):
        add_norm(SPEC, rows, None, weight=weight, update_bias=bias, residual_out=outs[0], normed_out=outs[1])


@pytest.mark.parametrize("width", [8, 11])
def test_overlap_is_exact_for_column_slices(width: int) -> None:
    buffer = torch.arange(5 * width)
    for start_a in range(0, 14):
        for start_b in range(0, 14):
            for columns_a, columns_b in ((3, 3), (2, 5), (8, 1)):
                a = buffer.as_strided((3, columns_a), (width, 1), start_a)
                b = buffer.as_strided((2, columns_b), (width, 1), start_b)
                shared = bool(set(a.flatten().tolist()) & set(b.flatten().tolist()))
                assert overlap(a, b) == shared, (start_a, start_b, columns_a, columns_b)


# -- compilers


def compiled_case(spec: AddNormSpec, weight: Tensor) -> Callable[..., Any]:
    def run(residual: Tensor, update: Tensor) -> tuple[Tensor, Tensor]:
        residual, y = add_norm(spec, residual, update, weight=weight)
        residual, y = add_norm(spec, residual, y, weight=weight)  # type: ignore[arg-type]
        y = y.clone()
        fused_add_rmsnorm(y, residual, weight)
        out = torch.empty_like(y)
        add_norm(spec, residual, y, weight=weight, residual_out=residual, normed_out=out)
        return residual, out

    return run


@pytest.mark.filterwarnings("ignore")  # torch's compiler warns about its own internals
@pytest.mark.parametrize("backend", [pytest.param("inductor", marks=pytest.mark.slow), "aot_eager"])
def test_a_compiler_keeps_the_bits_and_does_not_recompile(backend: str) -> None:
    spec, weight = SPECS["rms"], random(24, seed=3, dtype=BF16)
    run = compiled_case(spec, weight)
    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, backend=backend)
    counts = [5, 2, 3, 7, 11, 16, 17, 33, 64, 129]
    with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
        for i, tokens in enumerate(counts):
            values = [random(tokens, 24, seed=2 * i + j, dtype=BF16) for j in (0, 1)]
            before = [value.clone() for value in values]
            for value in values:
                torch._dynamo.mark_dynamic(value, 0)
            got = compiled(*values)
            assert_equal(tuple(values), tuple(before))
            assert_equal(got, run(*values))


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_backward_has_the_same_bits() -> None:
    spec = SPECS["sandwich"]
    torch._dynamo.reset()

    def run(*values: Tensor) -> Any:
        operands = Operands(*values[:4], None, values[4])
        return call(add_norm, spec, operands)

    gradients = []
    for function in (run, torch.compile(run, fullgraph=True, backend="aot_eager")):
        leaves = [t.detach().requires_grad_() for t in operands_of(spec, 5, 24) if t is not None]
        torch.autograd.backward(function(*leaves), (random(5, 24, seed=8), random(5, 24, seed=9, dtype=BF16)))
        gradients.append(tuple(leaf.grad for leaf in leaves))
    assert_equal(*gradients)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_torch_func_batches_it() -> None:
    residual, update, weight = random(3, 4, 8, seed=1), random(3, 4, 8, seed=2), random(8, seed=3)
    run = torch.func.vmap(lambda r, u: add_norm(SPEC, r, u, weight=weight))
    expected = [contract.add_norm(SPEC, r, u, weight=weight) for r, u in zip(residual, update, strict=True)]
    assert_equal(run(residual, update), tuple(map(torch.stack, zip(*expected, strict=True))))


def test_the_operators_keep_what_their_schemas_say() -> None:
    from tp_residual.kernels.add_norm import _number, _scalars

    spec = AddNormSpec(FP32, FP32, NormSpec(1e-2), NormSpec(1e-2, "layer"), 0.3, 1.7)
    operands = [None if t is None else t.requires_grad_() for t in operands_of(spec, 4, 6)]
    ops = torch.ops.tp_residual
    torch.library.opcheck(ops.add_norm.default, (*operands, *_scalars(spec), False))
    plain = [None if t is None else t.detach() for t in operands]
    torch.library.opcheck(
        ops.add_norm_out.default, (*plain, *_scalars(spec), False, torch.empty(4, 6), torch.empty(4, 6))
    )
    torch.library.opcheck(
        ops.add_norm_call.default, (*plain, _number(spec), False, torch.empty(4, 6), torch.empty(4, 6))
    )
    torch.library.opcheck(ops.fused_add_rmsnorm.default, (plain[0].clone(), plain[1].clone(), plain[5], 1e-6, 0.0))
    wanted = [True] * 4 + [False, True, False]
    arguments = (*plain, *_scalars(spec), random(4, 6, seed=7), random(4, 6, seed=8), FP32, FP32, wanted)
    torch.library.opcheck(ops.add_norm_backward.default, arguments)


# -- on a GPU

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("hidden", [1, 8, 64, 100, 576, 2880, 3584, 4096, 16384, 16400])
@pytest.mark.parametrize("name", SPECS)
def test_a_gpu_has_the_contracts_bits(name: str, hidden: int) -> None:
    spec = SPECS[name]
    for tokens in (1, 7, 1000):
        operands = operands_of(spec, tokens, hidden)
        on_gpu = Operands(*(None if t is None else t.cuda() for t in operands))
        expected = call(contract.add_norm, spec, operands)
        assert_equal(call(add_norm, spec, on_gpu), expected)
        outs = (
            torch.empty_like(on_gpu.rows, dtype=spec.stream_dtype),
            torch.empty_like(on_gpu.rows, dtype=spec.output_dtype),
        )
        assert_equal(
            call(add_norm, spec, on_gpu, residual_out=outs[0], normed_out=outs[1] if spec.norm else None), expected
        )
        fast = call(add_norm, spec, on_gpu, order="fast")[1]
        if fast is not None:
            torch.testing.assert_close(fast.cpu(), expected[1], rtol=2**-7 if fast.dtype is BF16 else 1e-5, atol=1e-4)
    if spec.norm and spec.stream_dtype is spec.output_dtype:
        rows, residual, weight = (
            random(*s, seed=i, dtype=spec.output_dtype) for i, s in enumerate([(9, hidden), (9, hidden), (hidden,)])
        )
        wide = torch.zeros(9, hidden + 3, dtype=rows.dtype, device="cuda")
        strided = wide[:, 1 : hidden + 1].copy_(rows)
        on_gpu_residual = residual.cuda()
        fused_add_rmsnorm(strided, on_gpu_residual, weight.cuda())
        fused_add_rmsnorm(rows, residual, weight)
        assert_equal((strided, on_gpu_residual), (rows, residual))
        assert not wide[:, 0].any() and not wide[:, hidden + 1 :].any()


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("hidden", [100, 576, 4096, 16384])
def test_a_gpus_gradients(hidden: int) -> None:
    spec = AddNormSpec(FP32, FP32, NormSpec(1e-2, "layer"), NormSpec(1e-2), 0.3, 1.7)
    operands = operands_of(spec, 600, hidden)
    weights = (random(600, hidden, seed=8), random(600, hidden, seed=9))
    wide = Operands(*(None if t is None else t.double().requires_grad_() for t in operands))
    fp64 = replace(spec, stream_dtype=FP64, output_dtype=FP64)
    torch.autograd.backward(call(contract.add_norm, fp64, wide), [w.double() for w in weights])
    runs = []
    for _ in range(2):
        leaves = Operands(*(None if t is None else t.cuda().requires_grad_() for t in operands))
        torch.autograd.backward(call(add_norm, spec, leaves), [w.cuda() for w in weights])
        runs.append(tuple(None if t is None else t.grad for t in leaves))
    assert_equal(*runs)
    for ours, theirs in zip(runs[0], wide, strict=True):
        if ours is not None and theirs is not None and theirs.grad is not None:
            # fp32: roundings of 6e-8, some hundred of them in a row of the sums over rows and hidden
            assert (ours.cpu().double() - theirs.grad).norm() < 1e-5 * theirs.grad.norm()


@pytest.mark.gpu
@needs_cuda
def test_a_cuda_graph_replays_it() -> None:
    spec, weight = SPECS["rms"], random(4096, seed=3, dtype=BF16).cuda()
    residual, update = (torch.empty(16, 4096, dtype=BF16, device="cuda") for _ in range(2))

    def run() -> tuple[Tensor, Tensor | None]:
        new_residual, normed = add_norm(spec, residual, update, weight=weight)
        assert normed is not None
        fused_add_rmsnorm(normed, new_residual, weight)
        return new_residual, normed

    run()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for seed in range(3):
        residual.copy_(random(16, 4096, seed=10 + seed, dtype=BF16))
        update.copy_(random(16, 4096, seed=20 + seed, dtype=BF16))
        graph.replay()
        assert_equal(captured, run())


@pytest.mark.gpu
@needs_cuda
@pytest.mark.filterwarnings("ignore")
def test_a_compiler_keeps_a_gpus_bits() -> None:
    spec, weight = SPECS["rms"], random(576, seed=3, dtype=BF16).cuda()
    run = compiled_case(spec, weight)
    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True)
    with torch.no_grad():
        values = [random(9, 576, seed=j, dtype=BF16).cuda() for j in (0, 1)]
        assert_equal(compiled(*values), run(*values))
