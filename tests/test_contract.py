"""The numerical contract against an independent implementation in numpy, operation by operation, bit for bit."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tp_residual.kernels.contract import AddNormSpec, NormSpec, add, add_norm, norm, norm_backward, tree_sum

SIZES = (1, 2, 3, 8, 64, 100, 576, 2880)


def numpy_tree(row: np.ndarray) -> np.ndarray:
    """Halving by explicit loops over one row."""
    width = 1
    while width < len(row):
        width *= 2
    v = np.zeros(width, dtype=row.dtype)
    v[: len(row)] = row
    while width > 1:
        width //= 2
        v = np.array([v[i] + v[i + width] for i in range(width)], dtype=row.dtype)
    return v[0]


def numpy_norm(x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None, spec: NormSpec) -> np.ndarray:
    one, size, eps = x.dtype.type(1), x.dtype.type(x.shape[-1]), x.dtype.type(spec.eps)
    rows = []
    for row in x:
        if spec.kind == "layer":
            row = row - numpy_tree(row) / size
        r = one / np.sqrt(numpy_tree(row * row) / size + eps)
        y = (row * r) * (weight + x.dtype.type(spec.weight_offset) if spec.weight_offset else weight)
        rows.append(y if bias is None else y + bias)
    return np.stack(rows)


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 3 + 0.7).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", SIZES)
def test_tree_sum_is_the_halving_tree(size: int, dtype: torch.dtype) -> None:
    x = random(5, size, seed=size, dtype=dtype)
    expected = np.array([numpy_tree(row) for row in x.numpy()])
    assert torch.equal(tree_sum(x)[:, 0], torch.from_numpy(expected))


@pytest.mark.parametrize("spec", [NormSpec(1e-5), NormSpec(1e-6, weight_offset=1.0), NormSpec(1e-5, "layer")])
@pytest.mark.parametrize("size", SIZES)
def test_norm_is_the_contract_bit_for_bit(size: int, spec: NormSpec) -> None:
    x, weight = random(7, size, seed=size), random(size, seed=size + 1)
    bias = random(size, seed=size + 2) if spec.kind == "layer" else None
    expected = numpy_norm(x.numpy(), weight.numpy(), None if bias is None else bias.numpy(), spec)
    assert torch.equal(norm(x, weight, bias, spec, torch.float32), torch.from_numpy(expected))


def test_many_rows_are_the_contract_too() -> None:
    """Enough rows for the library's square root, which is not correctly rounded; and a row has the same bits alone."""
    x, weight = random(2000, 8, seed=11), random(8, seed=12)
    expected = numpy_norm(x.numpy(), weight.numpy(), None, NormSpec(1e-5))
    together = norm(x, weight, None, NormSpec(1e-5), torch.float32)
    assert torch.equal(together, torch.from_numpy(expected))
    alone = [norm(row, weight, None, NormSpec(1e-5), torch.float32) for row in x.split(1)]
    assert torch.equal(together, torch.cat(alone))


def test_sixteen_bit_norms_widen_first_and_round_once() -> None:
    x, weight = random(9, 100, seed=1, dtype=torch.bfloat16), random(100, seed=2, dtype=torch.bfloat16)
    wide = torch.from_numpy(numpy_norm(x.float().numpy(), weight.float().numpy(), None, NormSpec(1e-5)))
    assert torch.equal(norm(x, weight, None, NormSpec(1e-5), torch.bfloat16), wide.bfloat16())


def test_weight_after_cast_rounds_before_the_weight() -> None:
    x, weight = random(9, 100, seed=1, dtype=torch.bfloat16), random(100, seed=2, dtype=torch.bfloat16)
    ones = np.ones(100, dtype=np.float32)
    expected = torch.from_numpy(numpy_norm(x.float().numpy(), ones, None, NormSpec(1e-5))).bfloat16() * weight
    got = norm(x, weight, None, NormSpec(1e-5, weight_after_cast=True), torch.bfloat16)
    assert torch.equal(got, expected)
    assert not torch.equal(
        got, norm(x, weight, None, NormSpec(1e-5), torch.bfloat16)
    )  # the orders are not the same thing


def test_norms_agree_with_torch_in_fp64() -> None:
    x, w, b = (random(*shape, seed=3 + i, dtype=torch.float64) for i, shape in enumerate([(6, 100), (100,), (100,)]))
    # 1e-13: fp64 epsilon 2e-16 times the 100 terms of a row sum in another order
    torch.testing.assert_close(
        norm(x, w, None, NormSpec(1e-5), x.dtype), F.rms_norm(x, (100,), w, 1e-5), rtol=1e-13, atol=1e-13
    )
    torch.testing.assert_close(
        norm(x, w, b, NormSpec(1e-5, "layer"), x.dtype), F.layer_norm(x, (100,), w, b, 1e-5), rtol=1e-13, atol=1e-13
    )


@pytest.mark.parametrize("spec", [NormSpec(1e-3), NormSpec(1e-3, weight_offset=1.0), NormSpec(1e-3, "layer")])
def test_norm_backward_is_the_derivative(spec: NormSpec) -> None:
    x, w, grad = (random(*shape, seed=5 + i, dtype=torch.float64) for i, shape in enumerate([(4, 10), (10,), (4, 10)]))
    b = random(10, seed=9, dtype=torch.float64) if spec.kind == "layer" else None
    leaves = [t.requires_grad_() for t in (x, w, b) if t is not None]
    expected = torch.autograd.grad(norm(x, w, b, spec, x.dtype), leaves, grad)
    got = [t for t in norm_backward(grad, x, w, b, spec) if t is not None]
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(
            ours, theirs, rtol=1e-11, atol=1e-11
        )  # two formulas, cancelling terms of size ~10 in fp64
    assert torch.autograd.gradcheck(
        lambda *a: norm_backward(a[0], a[1], a[2], b, spec)[:2], (grad.requires_grad_(), x, w)
    )


def test_the_add_is_wide_and_rounds_once() -> None:
    residual, update = random(1000, 8, seed=1, dtype=torch.bfloat16), random(1000, 8, seed=2)
    assert torch.equal(add(residual, update, torch.bfloat16), (residual.float() + update).bfloat16())
    rounded = add(residual, update, torch.bfloat16, round_update=torch.bfloat16)
    assert torch.equal(rounded, (residual.float() + update.bfloat16().float()).bfloat16())
    # the two rules are different numbers in a good share of elements; a mode that ignored the option would pass the line above by luck
    assert 0.02 < (rounded != add(residual, update, torch.bfloat16)).float().mean() < 0.6


def test_a_wide_stream_does_not_overflow() -> None:
    residual, update = torch.full((1, 4), 60000.0), torch.full((1, 4), 10000.0, dtype=torch.float16)
    stream = add(residual, update, torch.float32)
    assert torch.equal(stream, torch.full((1, 4), 70000.0))
    normed = norm(stream, torch.ones(4, dtype=torch.float16), None, NormSpec(1e-5), torch.float16)
    assert torch.equal(normed, torch.ones(1, 4, dtype=torch.float16))


@pytest.mark.parametrize("rounding", [None, torch.bfloat16])
def test_add_norm_with_scales_and_an_update_norm_is_the_contract(rounding: torch.dtype | None) -> None:
    """Against numpy, in the order: bias, rounding, update norm, rounding, update scale, skip scale, add, rounding, norm."""

    def round_(x: np.ndarray, dtype: torch.dtype | None) -> np.ndarray:
        return x if dtype is None else torch.from_numpy(x).to(dtype).float().numpy()

    rows, size = 5, 100
    inner, outer = NormSpec(1e-5, weight_offset=1.0), NormSpec(1e-6)
    spec = AddNormSpec(torch.bfloat16, torch.float32, outer, inner, 0.3, 1.7, rounding)
    update, bias = random(rows, size, seed=1, dtype=torch.bfloat16), random(size, seed=2)
    residual = random(rows, size, seed=3, dtype=torch.bfloat16)
    update_weight, weight = random(size, seed=4), random(size, seed=5)
    u = round_(update.float().numpy() + bias.numpy(), rounding)
    u = round_(numpy_norm(u, update_weight.numpy(), None, inner), rounding) * np.float32(0.3)
    stream = round_(residual.float().numpy() * np.float32(1.7) + u, torch.bfloat16)
    new_residual, normed = add_norm(
        spec, residual, update, update_bias=bias, update_weight=update_weight, weight=weight
    )
    assert new_residual.dtype is torch.bfloat16 and normed is not None
    assert torch.equal(new_residual.float(), torch.from_numpy(stream))
    assert torch.equal(normed, torch.from_numpy(numpy_norm(stream, weight.numpy(), None, outer)))
