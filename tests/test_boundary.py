"""The boundary: who completes a sum, in which order, with which rounding, and what its gradient is."""

import numpy as np
import pytest
import torch

from tp_residual.errors import LayoutError
from tp_residual.kernels.contract import NormSpec, add, norm
from tp_residual.parallel.collectives import invariant_to_column_input
from tp_residual.parallel.group import TensorParallelGroup
from tp_residual.parallel.partial import Partial
from tp_residual.residual.boundary import Boundary, BoundaryRequest, run_boundary
from tp_residual.residual.norms import RMSNorm
from tp_residual.residual.stream import Stream
from tp_residual.testing import expect_collectives, run_ranks

HIDDEN = 24
SPEC = NormSpec(1e-5)


def summand(tokens: int, rank: int, dtype: torch.dtype, hidden: int = HIDDEN) -> torch.Tensor:
    """What a rank's row-parallel GEMM might give: different for every rank and element, magnitudes spread so that sum order shows."""
    generator = torch.Generator().manual_seed(1000 * rank + tokens)
    values = torch.randn(tokens, hidden, generator=generator, dtype=torch.float64)
    return (values * 10.0 ** torch.randint(-3, 3, (tokens, hidden), generator=generator)).to(dtype)


def rank_order_sum(tokens: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    total = summand(tokens, 0, dtype).float().numpy()
    for rank in range(1, size):
        total = np.add(total, summand(tokens, rank, dtype).float().numpy(), dtype=np.float32)
    return torch.from_numpy(total)


def contract_of(
    tokens: int, size: int, dtype: torch.dtype, stream_dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Two writes to a stream, each read with a norm, computed on one process: (the residual, the last normed value)."""
    update = rank_order_sum(tokens, size, dtype)
    residual = add(None, update, stream_dtype)
    residual = add(residual, update + bias_of(dtype).float(), stream_dtype)
    return residual, norm(residual, weight_of(dtype), None, SPEC, dtype)


def weight_of(dtype: torch.dtype) -> torch.Tensor:
    return summand(1, 90, torch.float32)[0].to(dtype)


def bias_of(dtype: torch.dtype) -> torch.Tensor:
    return summand(1, 91, torch.float32)[0].to(dtype)


def norm_module(
    group: TensorParallelGroup, dtype: torch.dtype, hidden: int = HIDDEN, *, partial: bool = False
) -> RMSNorm:
    module = RMSNorm(hidden, SPEC, group, partial_gradient=partial, dtype=dtype)
    with torch.no_grad():
        module.weight.copy_(summand(1, 90, torch.float32, hidden)[0])
    return module


def bitwise_body(group: TensorParallelGroup) -> None:
    for dtype, stream_dtype in (
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32),
    ):
        module = norm_module(group, dtype)
        for tokens in (
            0,
            1,
            2,
            3,
            4,
            5,
            6,
            7,
            8,
            9,
            33,
            3000,
        ):  # 3000: past the size up to which everything is gathered at once
            expected_residual, expected_y = contract_of(tokens, group.size, dtype, stream_dtype)
            for sequence_parallel in (False, True):
                boundary = Boundary(
                    group,
                    "reference",
                    sequence_parallel=sequence_parallel,
                    stream_dtype=stream_dtype,
                    output_dtype=dtype,
                )
                value = summand(tokens, group.rank, dtype)
                x, stream = Stream.start(Partial(value, group, "embed"), boundary).read(module)
                y, stream = stream.write(Partial(value, group, "mlp", bias_of(dtype))).read(module)
                assert stream.residual is not None and stream.residual.dtype == stream_dtype and y.dtype == dtype
                label = (dtype, stream_dtype, tokens, sequence_parallel)
                assert torch.equal(stream.replicated(), expected_residual), label
                assert torch.equal(y, expected_y), label
                assert y.shape == x.shape == (tokens, HIDDEN)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_reference_is_the_contract_bit_for_bit_in_both_layouts(size: int) -> None:
    run_ranks(size, bitwise_body)


def library_body(group: TensorParallelGroup) -> float:
    """The largest share of elements in which the library's order gives other bits than rank order; its values must still be close."""
    shares = []
    module = norm_module(group, torch.float32)
    for sequence_parallel in (False, True):
        for tokens in (5, 33):
            boundary = Boundary(group, "library", sequence_parallel=sequence_parallel)
            _, stream = Stream.start(
                Partial(summand(tokens, group.rank, torch.float32), group, "embed"), boundary
            ).read(module)
            expected = rank_order_sum(tokens, group.size, torch.float32)
            magnitude = sum(summand(tokens, rank, torch.float32).abs() for rank in range(group.size))
            got = stream.replicated()
            # each of size - 1 additions rounds once: fp32 half an ulp, relative to at most the sum of magnitudes; twice, for two orders
            assert ((got - expected).abs() <= 2 * group.size * 2.0**-24 * magnitude).all()
            shares.append(float((got != expected).float().mean()))
    return max(shares)


@pytest.mark.parametrize("size", [2, 4])
def test_library_is_close_and_a_class_of_its_own(size: int) -> None:
    assert len(set(run_ranks(size, library_body))) == 1


def scale_body(group: TensorParallelGroup, sequence_parallel: bool, choice: str) -> None:
    """Ranks contribute 1, 2, 3, 4: the pre-norm stream must read 10, not 2.5 (averaged) nor 40 (summed again)."""
    boundary = Boundary(group, choice, sequence_parallel=sequence_parallel)
    value = torch.full((8, HIDDEN), float(group.rank + 1))
    _, stream = Stream.start(Partial(value, group, "embed"), boundary).read(norm_module(group, torch.float32))
    assert torch.equal(stream.replicated(), torch.full((8, HIDDEN), 10.0))
    _, stream = stream.write(Partial(value, group, "mlp")).read(norm_module(group, torch.float32))
    assert torch.equal(stream.replicated(), torch.full((8, HIDDEN), 20.0))


@pytest.mark.parametrize("choice", ["reference", "library"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_scale_of_the_pre_norm_stream(sequence_parallel: bool, choice: str) -> None:
    run_ranks(4, scale_body, sequence_parallel, choice)


def precision_body(group: TensorParallelGroup, choice: str) -> None:
    """bf16 partials 256 on rank 0 and 0.75 on seven others: 262 after one rounding; a running bf16 sum would stay at 256."""
    value = torch.full((3, HIDDEN), 256.0 if group.rank == 0 else 0.75, dtype=torch.bfloat16)
    module = norm_module(group, torch.bfloat16)
    for sequence_parallel in (False, True):
        options = {
            "sequence_parallel": sequence_parallel,
            "stream_dtype": torch.bfloat16,
            "output_dtype": torch.bfloat16,
        }
        boundary = Boundary(group, choice, **options)
        _, stream = Stream.start(Partial(value, group, "embed"), boundary).read(module)
        assert torch.equal(stream.replicated(), torch.full((3, HIDDEN), 262.0, dtype=torch.bfloat16))
        outlier = torch.full((3, HIDDEN), 74752.0 if group.rank == 0 else 0.0, dtype=torch.bfloat16)
        _, stream = Stream.start(Partial(outlier, group, "embed"), boundary).read(module)
        _, stream = stream.write(Partial(value, group, "mlp")).read(module)
        assert torch.equal(stream.replicated(), torch.full((3, HIDDEN), 75264.0, dtype=torch.bfloat16))


@pytest.mark.parametrize("choice", ["reference", "library"])
def test_sixteen_bit_partials_are_summed_wide(choice: str) -> None:
    run_ranks(8, precision_body, choice)


def rounding_body(group: TensorParallelGroup) -> None:
    tokens, dtype = 4000, torch.bfloat16
    total = rank_order_sum(tokens, group.size, dtype)
    start = summand(tokens, 50, dtype)
    for round_reduced in (False, True):
        boundary = Boundary(group, "reference", stream_dtype=dtype, output_dtype=dtype, round_reduced=round_reduced)
        seed = Partial(start if group.rank == 0 else torch.zeros_like(start), group, "embed")
        _, stream = Stream.start(seed, boundary).read(norm_module(group, dtype))
        _, stream = stream.write(Partial(summand(tokens, group.rank, dtype), group, "mlp")).read(
            norm_module(group, dtype)
        )
        update = total.to(dtype).float() if round_reduced else total
        assert torch.equal(stream.replicated(), (start.float() + update).to(dtype))


def test_round_reduced_is_explicit_and_does_what_it_says() -> None:
    run_ranks(3, rounding_body)


def tiny_updates_body(group: TensorParallelGroup) -> None:
    """Updates below half a bf16 ulp of the stream: an fp32 stream keeps all sixteen, a bf16 stream keeps none."""
    tiny = Partial(torch.full((5, HIDDEN), 0.25 / group.size, dtype=torch.bfloat16), group, "mlp")
    module = norm_module(group, torch.bfloat16)
    for sequence_parallel in (False, True):
        for stream_dtype, expected in ((torch.float32, 260.0), (torch.bfloat16, 256.0)):
            boundary = Boundary(
                group,
                "reference",
                sequence_parallel=sequence_parallel,
                stream_dtype=stream_dtype,
                output_dtype=torch.bfloat16,
            )
            stream = Stream.start(
                Partial(torch.full((5, HIDDEN), 256.0 / group.size, dtype=torch.bfloat16), group, "embed"), boundary
            )
            y, stream = stream.read(module)
            for _ in range(16):
                assert (
                    stream.residual is not None and stream.residual.dtype == stream_dtype and y.dtype == torch.bfloat16
                )
                y, stream = stream.write(tiny).read(module)
            assert torch.equal(stream.replicated(), torch.full((5, HIDDEN), expected, dtype=stream_dtype))


def test_an_fp32_stream_over_bf16_weights_keeps_small_updates() -> None:
    run_ranks(2, tiny_updates_body)


def gradient_body(group: TensorParallelGroup, choice: str, sequence_parallel: bool) -> None:
    """Two boundaries in lock-step gradcheck and gradgradcheck: replicated leaves in, a value that every rank computes alike out."""
    tokens, hidden = 2, 3
    boundary = Boundary(
        group, choice, sequence_parallel=sequence_parallel, stream_dtype=torch.float64, output_dtype=torch.float64
    )
    generator = torch.Generator().manual_seed(3)
    shapes = ((tokens, hidden), (tokens, hidden), (hidden,), (hidden,), (hidden,))
    leaves = tuple(torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    share = (group.rank + 1.0) / sum(range(1, group.size + 1))
    mixing = torch.randn(group.size, hidden, hidden, generator=generator, dtype=torch.float64)[group.rank]

    def run(first, second, w1, w2, b):  # type: ignore[no-untyped-def]
        # every leaf is invariant; each rank takes its share of the first summand, as a row-parallel linear would
        def enter(t):  # type: ignore[no-untyped-def]
            return invariant_to_column_input(t, group, tag="enter", ordered=True)

        norm_leaf = (
            enter if sequence_parallel else (lambda t: t)
        )  # a norm weight's gradient is partial over token shards
        residual, x = run_boundary(
            boundary,
            tokens,
            None,
            Partial(enter(first) * share, group, "a"),
            norm_leaf(w1),
            None,
            SPEC,
            "gathered",
            "n1",
        )
        update = Partial(torch.tanh(x @ mixing) + enter(second) * share, group, "b", norm_leaf(b))
        residual, _ = run_boundary(boundary, tokens, residual, update, norm_leaf(w2), None, SPEC, "gathered", "n2")
        stream = Stream(boundary, tokens, residual)
        return stream.replicated()

    for index, leaf in enumerate(leaves):
        leaf.requires_grad_(index != 3)  # w2 feeds only the normed output, which this function leaves unused
    assert torch.autograd.gradcheck(run, leaves, atol=1e-6)
    assert torch.autograd.gradgradcheck(
        run, leaves, atol=1e-5, fast_mode=True
    )  # random projections: each entry costs a collective


@pytest.mark.parametrize(
    ("size", "choice"),
    [(1, "reference"), (2, "reference"), (2, "library"), pytest.param(3, "reference", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_first_and_second_derivatives(size: int, sequence_parallel: bool, choice: str) -> None:
    run_ranks(size, gradient_body, choice, sequence_parallel, timeout_s=120)


def counting_body(group: TensorParallelGroup) -> None:
    module = norm_module(group, torch.float32, partial=True)
    for sequence_parallel, forward, backward in (
        (False, {"all_reduce": 1}, {"all_reduce": 1}),
        (True, {"reduce_scatter": 1, "all_gather": 1}, {"reduce_scatter": 1, "all_gather": 1}),
    ):
        for choice in ("reference", "library"):
            boundary = Boundary(group, choice, sequence_parallel=sequence_parallel)
            value = summand(5, group.rank, torch.float32).requires_grad_()
            with expect_collectives(group, **forward):
                y, _ = Stream.start(Partial(value, group, "embed"), boundary).read(module)
            with expect_collectives(group, **backward):
                y.sum().backward()


def test_each_boundary_is_one_all_reduce_or_one_scatter_and_one_gather() -> None:
    run_ranks(3, counting_body)


def no_residual_body(group: TensorParallelGroup) -> None:
    """The first boundary has no residual: memory that an allocator filled with NaN must not find its way in."""
    from tp_residual.testing import nan_filled_memory

    boundary = Boundary(group, "reference", sequence_parallel=True)
    with nan_filled_memory():
        y, stream = Stream.start(Partial(summand(5, group.rank, torch.float32), group, "embed"), boundary).read(
            norm_module(group, torch.float32)
        )
    assert torch.equal(stream.replicated(), rank_order_sum(5, group.size, torch.float32))
    assert y.isfinite().all()


def test_the_first_boundary_adds_nothing() -> None:
    run_ranks(4, no_residual_body)


# -- the request and the choice


def request(**changes: object) -> BoundaryRequest:
    fields = {
        "has_residual": True, "updates": 1, "norm": SPEC, "result": "gathered", "sequence_parallel": False,
        "stream_dtype": torch.float32, "output_dtype": torch.float32,
    }  # fmt: skip
    return BoundaryRequest(**{**fields, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"has_residual": False, "updates": 0}, "needs a residual or an owed sum"),
        ({"updates": 2}, "updates=2"),
        ({"norm": None}, "raw means no norm"),
        ({"result": "raw"}, "raw means no norm"),
        ({"result": "shard"}, "needs a token-sharded stream"),
    ],
)
def test_a_request_without_meaning_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        request(**changes)
