"""Packed linears against fp64, and what `panels` promises: a row's bits depend on that row alone, a column's on that column."""

import pytest
import torch
from torch import Tensor

from tp_residual.errors import UserError
from tp_residual.kernels import build
from tp_residual.kernels.linear import PackedWeight, empty_on_huge_pages, linear, onednn_has_bf16, packed_form

F32, BF16 = torch.float32, torch.bfloat16
CPU = torch.device("cpu")


def random(*shape: int, seed: int, dtype: torch.dtype = F32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def has_panels() -> bool:
    return build.unavailable() is None and packed_form(CPU, F32)[0] == "panels"


needs_panels = pytest.mark.skipif(not has_panels(), reason="no compiled panels for this CPU")

# one feature, less than a panel, a panel, one and a half, odd numbers of panels, more than one chunk of 256 input features
SHAPES = ((1, 1), (31, 7), (32, 256), (48, 257), (64, 300), (96, 1024), (161, 513), (896, 2432))


def relative_error(got: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> float:
    expected = x.double() @ weight.double().T
    if bias is not None:
        expected = expected + bias.double()
    return float((got.double() - expected).norm() / expected.norm())


@needs_panels
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(("out_features", "in_features"), SHAPES)
def test_panels_are_right_and_a_row_does_not_depend_on_its_company(
    dtype: torch.dtype, out_features: int, in_features: int
) -> None:
    weight, bias = random(out_features, in_features, seed=1, dtype=dtype), random(out_features, seed=2, dtype=dtype)
    packed = PackedWeight(weight, "panels")
    x = random(53, in_features, seed=3, dtype=dtype)
    whole = packed.linear(x, bias)
    # one rounding to bf16 (2^-9 at most, a third of that on average); in fp32 chains of 256 and a few chunks
    assert relative_error(whole, x, weight, bias) <= (2e-3 if dtype == BF16 else 3e-7)
    assert relative_error(packed.linear(x, None), x, weight, None) <= (2e-3 if dtype == BF16 else 3e-7)
    for rows in (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 31):  # each kernel, and blocks of unequal sizes
        assert torch.equal(packed.linear(x[:rows], bias), whole[:rows]), rows
    assert torch.equal(packed.linear(x[50:51], bias), whole[50:51])


@needs_panels
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_panels_do_not_depend_on_how_features_are_split(dtype: torch.dtype) -> None:
    weight, x = random(200, 300, seed=1, dtype=dtype), random(5, 300, seed=2, dtype=dtype)
    whole = PackedWeight(weight, "panels").linear(x, None)
    parts = [PackedWeight(part, "panels").linear(x, None) for part in weight.split([67, 1, 132])]
    assert torch.equal(torch.cat(parts, dim=1), whole)


@needs_panels
def test_panels_give_the_same_bits_on_any_number_of_threads() -> None:
    packed, x = PackedWeight(random(1000, 300, seed=1, dtype=BF16), "panels"), random(9, 300, seed=2, dtype=BF16)
    threads = torch.get_num_threads()
    try:
        results = []
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            results.append(packed.linear(x, None))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@needs_panels
def test_panels_take_a_slice_of_a_weight_and_rows_that_lie_apart() -> None:
    weight, x = random(64, 100, seed=1), random(6, 100, seed=2)
    packed = PackedWeight(weight[:, 20:70], "panels")
    apart = x[:, 20:70]
    assert not apart.is_contiguous()
    assert relative_error(packed.linear(apart, None), apart, weight[:, 20:70], None) <= 3e-7
    assert torch.equal(packed.linear(apart.T.contiguous().T, None), packed.linear(apart, None))
    assert torch.equal(packed.linear(x[::2, 20:70], None), packed.linear(apart, None)[::2])


@needs_panels
def test_what_is_not_finite_goes_where_it_belongs() -> None:
    weight, x = random(70, 40, seed=1, dtype=BF16), random(7, 40, seed=2, dtype=BF16)
    weight[33, 4], x[2, 9] = float("nan"), float("inf")
    got = PackedWeight(weight, "panels").linear(x, None)
    assert got[:, 33].isnan().all() and not got[2].isfinite().any()
    rest = got.index_select(1, torch.tensor([n for n in range(70) if n != 33]))
    assert rest[[0, 1, 3, 4, 5, 6]].isfinite().all()


@pytest.mark.parametrize("dtype", [F32, *([BF16] if onednn_has_bf16() else [])])
def test_onednns_form_is_right(dtype: torch.dtype) -> None:
    weight, bias, x = (
        random(70, 300, seed=1, dtype=dtype),
        random(70, seed=2, dtype=dtype),
        random(5, 300, seed=3, dtype=dtype),
    )
    packed = PackedWeight(weight, "onednn")
    for rows in (1, 2, 5):
        got = packed.linear(x[:rows], bias)
        assert relative_error(got, x[:rows], weight, bias) <= (2e-3 if dtype == BF16 else 1e-6)


def test_the_form_is_chosen_from_the_machine_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    assert packed_form(torch.device("cuda"), BF16) == (
        "plain", "weights are packed for the CPU alone, and the device is cuda"
    )  # fmt: skip
    assert packed_form(CPU, torch.float16) == ("plain", "no packed kernel for float16")
    assert packed_form(CPU, torch.float64)[0] == "plain"
    monkeypatch.setattr("tp_residual.kernels.linear.onednn_has_bf16", lambda: True)
    assert packed_form(CPU, BF16)[0] == "onednn"
    monkeypatch.setattr("tp_residual.kernels.linear.onednn_has_bf16", lambda: False)
    monkeypatch.setattr("tp_residual.kernels.build.unavailable", lambda: "no compiler")
    assert packed_form(CPU, BF16) == ("plain", "no compiler")
    assert packed_form(CPU, F32) == ("onednn", "no panels: no compiler")


def test_without_a_packed_copy_it_is_the_plain_linear() -> None:
    weight, x = random(7, 5, seed=1), random(3, 5, seed=2)
    assert torch.equal(linear(x, weight, None), torch.nn.functional.linear(x, weight))


@needs_panels
def test_operands_that_do_not_fit_are_refused() -> None:
    packed = PackedWeight(random(8, 5, seed=1), "panels")
    with pytest.raises(UserError, match=r"5 input features in torch.float32 got x \[2, 4\] in torch.float32"):
        packed.linear(random(2, 4, seed=2), None)
    with pytest.raises(UserError, match=r"in torch\.bfloat16"):
        packed.linear(random(2, 5, seed=2, dtype=BF16), None)
    with pytest.raises(UserError, match=r"a bias in torch\.bfloat16"):
        packed.linear(random(2, 5, seed=2), random(8, seed=3, dtype=BF16))
    with pytest.raises(UserError, match=r"must be \[out_features, in_features\] with contiguous rows"):
        PackedWeight(random(8, 5, seed=1).T, "panels")
    with pytest.raises(UserError, match=r"does not take torch\.float16 here"):
        PackedWeight(random(8, 5, seed=1, dtype=torch.float16), "panels")


def test_memory_on_huge_pages_is_ordinary_memory() -> None:
    for count in (3, 5 << 20):
        memory = empty_on_huge_pages(count, BF16)
        memory.fill_(2.0)
        assert memory.shape == (count,) and memory.dtype is BF16 and float(memory[-1]) == 2.0
