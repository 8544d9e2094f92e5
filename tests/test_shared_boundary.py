"""The boundary over a shared segment: the bits of `reference`, whatever the form, and the same record."""

import os
import random
import signal
import threading
import time
from contextlib import contextmanager
from itertools import product

import pytest
import torch
from shared_segment import over_segment, plain

from tp_residual.errors import CollectiveError, LayoutError, UserError
from tp_residual.kernels.contract import NormSpec
from tp_residual.parallel.group import TensorParallelGroup
from tp_residual.parallel.partial import Partial
from tp_residual.parallel.shared import SCATTER
from tp_residual.residual import boundary as boundary_module
from tp_residual.residual.boundary import Boundary
from tp_residual.residual.norms import RMSNorm
from tp_residual.residual.plain import PlainExecutor
from tp_residual.residual.shared import SharedExecutor
from tp_residual.residual.stream import Stream
from tp_residual.testing import RanksFailed, expect_collectives, hostile_layouts

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
RMS, LAYER = NormSpec(1e-5), NormSpec(1e-6, "layer", weight_offset=1.0)
LLAMA = NormSpec(1e-5, weight_after_cast=True)
HIDDEN_SIZES = (1, 8, 64, 100, 576, 896, 2880, 4096, 16384)
TOKENS = (0, 1, 7, 257)
REFERENCE = PlainExecutor("reference", ordered=True)
SHARED = SharedExecutor(REFERENCE)


def values(*shape, rank, seed=0, dtype=F32):
    """Different for every rank and element, spread over magnitudes, so that the order of a sum shows."""
    generator = torch.Generator().manual_seed(1009 * rank + seed)
    x = torch.randn(shape, generator=generator)
    return (x * 10.0 ** torch.randint(-3, 3, shape, generator=generator)).to(dtype)


def boundary(group, *, sequence_parallel=False, stream=BF16, output=BF16, round_reduced=False):
    return Boundary(
        group,
        "reference",
        sequence_parallel=sequence_parallel,
        stream_dtype=stream,
        output_dtype=output,
        round_reduced=round_reduced,
    )


def operands(group, split, hidden, *, residual=BF16, partial=BF16, weight=BF16, bias=None, norm_bias=None):
    start, stop = split.ranges[group.rank]
    return {
        "residual": residual and values(split.total, hidden, rank=90, seed=split.total, dtype=residual)[start:stop],
        "partial": partial and values(split.total, hidden, rank=group.rank, seed=split.total, dtype=partial),
        "bias": bias and values(hidden, rank=91, dtype=bias),
        "weight": weight and values(hidden, rank=92, dtype=weight),
        "norm_bias": norm_bias and values(hidden, rank=93, dtype=norm_bias),
    }


def run(executor, request, group, split, given, tag="boundary"):
    return executor.run(request, group, tag, split, *given.values())


@contextmanager
def compared(group, **options):
    """A function that runs a request through `reference` over gloo and, in each form, through `shared`; the bits must be equal."""
    with over_segment(group, **options) as transport:
        gloo = plain(group)

        def same(request, split, given, label=""):
            kept = {name: None if x is None else x.clone() for name, x in given.items()}
            group.transport = gloo
            expected = run(REFERENCE, request, group, split, given)
            group.transport = transport
            for transport.one_shot_bytes in (0,) if request.sequence_parallel else (0, 1 << 40):
                transport.plans.clear()
                for _ in range(2):  # the second call finds what the first prepared
                    got = run(SHARED, request, group, split, given)
                    for x, y in zip(got, expected, strict=True):
                        assert x.dtype == y.dtype and x.shape == y.shape, (label, request, split)
                        assert torch.equal(x, y), (label, request, split, transport.one_shot_bytes)
            assert all(x is None or torch.equal(x, kept[name]) for name, x in given.items()), "an input was written to"

        yield same


def check_sizes(group, hidden_sizes, tokens):
    with compared(group) as same:
        for sequence_parallel in (False, True):
            owner = boundary(group, sequence_parallel=sequence_parallel)
            request = owner.request(True, 1, RMS, "gathered")
            for hidden, total in product(hidden_sizes, tokens):
                split = owner.token_split(total)
                same(request, split, operands(group, split, hidden), label=hidden)


@pytest.mark.parametrize("tp_size", [2, pytest.param(3, marks=pytest.mark.slow), 4])
def test_every_hidden_size_and_token_count_gives_the_bits_of_reference(ranks, tp_size):
    ranks(tp_size, check_sizes, HIDDEN_SIZES, TOKENS, checked=False)


def test_eight_ranks_give_the_bits_of_reference(ranks):
    ranks(8, check_sizes, (1, 100, 896, 16384), (0, 1, 7, 33), checked=False)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_eight_ranks_give_the_bits_of_reference_at_every_size(ranks):
    ranks(8, check_sizes, HIDDEN_SIZES, TOKENS, checked=False, timeout_s=840)


def check_requests(group):
    """All that a request may ask, in every dtype."""
    with compared(group, slot_bytes=8192) as same:  # in several pieces
        for sequence_parallel, (stream, output, partial) in product(
            (False, True),
            (
                (BF16, BF16, BF16),
                (F32, BF16, BF16),
                (F32, BF16, F32),
                (BF16, BF16, F32),
                (F16, F16, F16),
                (F32, F32, F32),
            ),
        ):
            for round_reduced, norm, has_residual, bias in product(
                (False, True), (RMS, LAYER, LLAMA, None), (False, True), (None, output)
            ):
                owner = boundary(
                    group,
                    sequence_parallel=sequence_parallel,
                    stream=stream,
                    output=output,
                    round_reduced=round_reduced,
                )
                for result in (
                    ("raw",) if norm is None else ("gathered", "shard") if sequence_parallel else ("gathered",)
                ):
                    split = owner.token_split(11)
                    given = operands(
                        group,
                        split,
                        72,
                        residual=stream if has_residual else None,
                        partial=partial,
                        weight=output if norm else None,
                        bias=bias,
                        norm_bias=output if norm is LAYER else None,
                    )
                    same(owner.request(has_residual, 1, norm, result), split, given)


@pytest.mark.parametrize("tp_size", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_everything_that_a_request_may_ask(ranks, tp_size):
    ranks(tp_size, check_requests, checked=False)


def check_layouts(group):
    with compared(group) as same:
        for sequence_parallel in (False, True):
            owner = boundary(group, sequence_parallel=sequence_parallel)
            request, split = owner.request(True, 1, RMS, "gathered"), owner.token_split(7)
            given = operands(group, split, 40, bias=BF16)
            for name in given:
                if given[name] is not None and given[name].numel():
                    for layout, x in hostile_layouts(given[name]).items():
                        same(request, split, given | {name: x}, (name, layout))
            # what needs no exchange, and what the kernel does not compute
            same(owner.request(True, 0, RMS, "gathered"), split, given | {"partial": None, "bias": None})
            same(request, split, given | {"partial": values(7, 40, rank=group.rank, dtype=torch.float64)})
        owner = boundary(group)
        given = operands(group, owner.token_split(3), 70_000)  # a row for each rank is more than a slot
        same(owner.request(True, 1, RMS, "gathered"), owner.token_split(3), given)


def test_memory_layouts_and_what_falls_to_reference(ranks):
    ranks(3, check_layouts, checked=False)


def check_precision(group):
    with over_segment(group) as transport:
        for sequence_parallel, form in ((False, 0), (False, 1 << 40), (True, 0)):
            transport.one_shot_bytes = form
            owner = boundary(group, sequence_parallel=sequence_parallel)
            split = owner.token_split(9)
            given = operands(group, split, 24, residual=None) | {
                "partial": torch.full((9, 24), 256.0 if group.rank == 0 else 0.75, dtype=BF16)
            }
            stream, _ = run(SHARED, owner.request(False, 1, RMS, "gathered"), group, split, given)
            assert torch.equal(stream, torch.full_like(stream, 262.0))
            given["residual"] = torch.full_like(stream, 74752.0)
            stream, _ = run(SHARED, owner.request(True, 1, RMS, "gathered"), group, split, given)
            assert torch.equal(stream, torch.full_like(stream, 75264.0))


def test_sixteen_bit_partials_are_summed_wide(ranks):
    """bf16 256 on rank 0 and 0.75 on seven others: 262 after one rounding; a running bf16 sum would stay at 256."""
    ranks(8, check_precision, checked=False)


def random_boundaries(group, calls):
    """Each rank sleeps and dawdles as it likes; expected values are computed here, from every rank's summand."""
    plan, own_pace = random.Random(3), random.Random(100 + group.rank)
    alone = TensorParallelGroup.single()
    owners = {sp: boundary(group, sequence_parallel=sp) for sp in (False, True)}
    with over_segment(group, slot_bytes=4096) as transport:
        requests = {sp: owner.request(True, 1, RMS, "gathered") for sp, owner in owners.items()}
        for call in range(calls):
            sequence_parallel, total, hidden = (
                plan.random() < 0.5,
                plan.choice((1, 1, 2, 3, 5, 40)),
                plan.choice((8, 24)),
            )
            transport.one_shot_bytes = plan.choice((0, 1 << 40))
            pace = own_pace.random()
            if pace < 0.1:
                time.sleep(own_pace.random() * 2e-3)
            elif pace < 0.5:
                end = time.perf_counter() + own_pace.random() * 2e-4
                while time.perf_counter() < end:
                    pass
            split = owners[sequence_parallel].token_split(total)
            start, stop = split.ranges[group.rank]
            base = (torch.arange(total * hidden) % 61 + call % 199).view(total, hidden)
            summands = [(base + 7 * rank).bfloat16() for rank in range(group.size)]
            residual, weight = (base * 0.25).bfloat16(), torch.linspace(0.5, 2.0, hidden).bfloat16()
            update = summands[0].float()
            for summand in summands[1:]:
                update = update + summand.float()
            whole = owners[False].token_split(total)
            expected, normed = REFERENCE.run(
                requests[False], alone, "alone", whole, residual, update, None, weight, None
            )
            got = SHARED.run(
                requests[sequence_parallel],
                group,
                "random",
                split,
                residual[start:stop],
                summands[group.rank],
                None,
                weight,
                None,
            )
            assert torch.equal(got[0], expected[start:stop]) and torch.equal(got[1], normed), f"call {call}"


@pytest.mark.parametrize("tp_size", [2, 3])
def test_random_boundaries_with_random_sleeps(ranks, tp_size):
    ranks(tp_size, random_boundaries, 600, checked=False)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("tp_size", [2, 3, 4, 8])
def test_ten_thousand_random_boundaries_with_random_sleeps(ranks, tp_size):
    ranks(tp_size, random_boundaries, 10_000, checked=False, timeout_s=840)


def change_sizes(group):
    """One request for rows of other lengths, as many elements each time, without a weight that would tell."""
    with over_segment(group):
        for sequence_parallel in (False, True):
            owner = boundary(group, sequence_parallel=sequence_parallel)
            request = owner.request(True, 1, None, "raw")
            for total, hidden in ((2, 24), (4, 12), (4, 12), (1, 48), (48, 1)):
                split = owner.token_split(total)
                given = operands(group, split, hidden, weight=None)
                total_sum = sum(
                    values(total, hidden, rank=r, seed=total, dtype=BF16).float() for r in range(1, group.size)
                )
                total_sum = values(total, hidden, rank=0, seed=total, dtype=BF16).float() + total_sum
                start, stop = split.ranges[group.rank]
                stream, normed = run(SHARED, request, group, split, given)
                assert torch.equal(stream, (given["residual"].float() + total_sum[start:stop]).bfloat16())
                assert normed.shape == (0,)


def test_a_plan_is_not_used_for_other_sizes(ranks):
    ranks(2, change_sizes)


# -- in the stream


def gradients(group, executor, sequence_parallel):
    """Two boundaries forward and backward: everything that comes out, and what was communicated for it."""
    owner = boundary(group, sequence_parallel=sequence_parallel)
    owner.executor = executor
    module = RMSNorm(24, RMS, group, partial_gradient=sequence_parallel, dtype=BF16)
    with torch.no_grad():
        module.weight.copy_(values(24, rank=92))
    first, second = (values(5, 24, rank=group.rank, seed=seed, dtype=BF16).requires_grad_() for seed in (1, 2))
    before = group.counters.calls.copy(), group.counters.bytes.copy()
    x, stream = Stream.start(Partial(first, group, "embed"), owner).read(module)
    y, stream = stream.write(Partial(second + x * 0.5, group, "mlp", values(24, rank=93, dtype=BF16))).read(module)
    (y.float() * values(5, 24, rank=94)).sum().backward()
    counted = group.counters.calls - before[0], group.counters.bytes - before[1]
    return [x, y, stream.residual, first.grad, second.grad, module.weight.grad], counted


def check_stream(group):
    for sequence_parallel in (False, True):
        group.transport = plain(group)
        expected, counted = gradients(group, REFERENCE, sequence_parallel)
        with over_segment(group) as transport:
            got, counted_over = gradients(group, SHARED, sequence_parallel)
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
        assert counted_over == counted and counted
        assert transport._dead == "it is closed"


@pytest.mark.parametrize("tp_size", [2, 3])
def test_streams_are_equal_forward_and_backward_and_counted_alike(ranks, tp_size):
    ranks(tp_size, check_stream)


def check_counting(group):
    with over_segment(group):
        for sequence_parallel, kinds in ((False, {"all_reduce": 1}), (True, {"reduce_scatter": 1, "all_gather": 1})):
            owner = boundary(group, sequence_parallel=sequence_parallel)
            for total in (0, 1, 5):
                split = owner.token_split(total)
                request = owner.request(True, 1, RMS, "gathered")
                with expect_collectives(group, **kinds):
                    run(SHARED, request, group, split, operands(group, split, 16))
                last = group.record.last
                shape = [total, 16] if not sequence_parallel else [1, max(split.sizes), 16]
                assert list(last.shape) == shape and last.tag == "boundary" and last.dtype == BF16
                if sequence_parallel:
                    with expect_collectives(group, reduce_scatter=1):
                        run(SHARED, owner.request(True, 1, RMS, "shard"), group, split, operands(group, split, 16))


def test_a_boundary_is_one_all_reduce_or_one_scatter_and_one_gather(ranks):
    ranks(3, check_counting)


# -- failures


def stop_before_the_gather(group):
    """Rank 1 takes part in the scatter and then no more; late, so that the others sleep in their first wait."""
    with over_segment(group) as transport:
        owner = boundary(group, sequence_parallel=True)
        request, split = owner.request(True, 1, RMS, "gathered"), owner.token_split(5)
        given = operands(group, split, 16)
        run(SHARED, request, group, split, given)
        if group.rank == 1:
            time.sleep(0.2)
            plan = transport.plans[id(request)]
            plan.exchange.form, plan.gathers = SCATTER, False
            plan.new_residual_like, plan.normed_like = torch.empty(5, 16, dtype=BF16), torch.empty(5, 16, dtype=BF16)
            run(SHARED, request, group, split, given)
            time.sleep(1.5)
            return ""
        with pytest.raises(CollectiveError) as failure:
            run(SHARED, request, group, split, given, tag="layers.3.input_layernorm")
        with pytest.raises(RuntimeError, match=r"is dead: waited 0\.5 s for rank 1"):
            transport.all_gather(torch.ones(1))
        return str(failure.value)


def test_a_wait_names_the_collective_that_it_is_in(ranks):
    message = ranks(2, stop_before_the_gather, checked=False, collective_timeout_s=0.5)[0]
    assert "waiting in #4 all_gather tag='layers.3.input_layernorm' shape=[1, 3, 16]" in message
    assert "gave up: waited 0.5 s for rank 1" in message


def kill_in_the_middle(group):
    with over_segment(group):
        owner = boundary(group)
        request, split = owner.request(True, 1, RMS, "gathered"), owner.token_split(3)
        given = operands(group, split, 64)
        for call in range(1000):
            if group.rank == 1 and call == 700:
                os.kill(os.getpid(), signal.SIGKILL)
            start = time.monotonic()
            try:
                run(SHARED, request, group, split, given)
            except CollectiveError as error:
                raise CollectiveError(f"after {time.monotonic() - start:.2f} s: {error}") from None


def test_a_peer_killed_in_the_middle_is_named(ranks):
    with pytest.raises(RanksFailed) as failure:
        ranks(3, kill_in_the_middle, checked=False)
    for rank in (0, 2):
        message = str(failure.value.exceptions[rank])
        assert "waiting in #701 all_reduce tag='boundary'" in message and "the process of rank 1 has ended" in message
        assert float(message.split()[1]) < 4, message  # two of them to look for the peers' reports


def two_threads(group):
    """The second thread is refused, and the first, which waits for a late peer meanwhile, still gets its own result."""
    with over_segment(group) as transport:
        owner = boundary(group)
        request, split = owner.request(True, 1, RMS, "gathered"), owner.token_split(3)
        given = operands(group, split, 64)
        expected = run(SHARED, request, group, split, given)
        refused = []

        def enter():
            time.sleep(0.2)
            with pytest.raises(
                CollectiveError, match=r"entered the boundary tag='second' while another thread is waiting in #2"
            ):
                run(SHARED, request, group, split, given | {"residual": None}, tag="second")
            refused.append(True)

        if group.rank == 1:
            time.sleep(0.5)
        else:
            thread = threading.Thread(target=enter)
            thread.start()
        assert all(torch.equal(x, y) for x, y in zip(run(SHARED, request, group, split, given), expected, strict=True))
        if group.rank == 0:
            thread.join()
            assert refused
        assert transport.turn == [True]


def test_a_second_thread_is_refused_and_spoils_nothing(ranks):
    ranks(2, two_threads, checked=False)


def refuse(group):
    with over_segment(group):
        owner = boundary(group)
        request, split = owner.request(True, 1, RMS, "gathered"), owner.token_split(5)
        good = operands(group, split, 16, bias=BF16)
        with expect_collectives(group):  # none: refused before anybody waits
            for name, wrong in (
                ("partial", values(4, 16, rank=0, dtype=BF16)),
                ("residual", values(5, 8, rank=0, dtype=BF16)),
                ("residual", values(4, 16, rank=0, dtype=BF16)),
                ("bias", values(17, rank=0, dtype=BF16)),
                ("weight", values(15, rank=0, dtype=BF16)),
            ):
                for _ in range(2):
                    with pytest.raises(LayoutError, match=rf"takes a {name} of shape .*, and got \[{wrong.shape[0]}"):
                        run(SHARED, request, group, split, good | {name: wrong})


def test_shapes_that_do_not_belong_together_are_named_before_the_exchange(ranks):
    ranks(2, refuse)


def ask(group):
    owner = boundary(group)
    reason = SHARED.supports(owner.request(True, 1, RMS, "gathered"), group)
    with over_segment(group):
        wide = boundary(group, stream=torch.float64)
        mixed = boundary(group, stream=F32, output=torch.float64)
        return [
            reason,
            SHARED.supports(owner.request(True, 1, RMS, "gathered"), group),
            SHARED.supports(wide.request(True, 1, RMS, "gathered"), group),
            SHARED.supports(mixed.request(True, 1, RMS, "gathered"), group),
        ]


def test_what_it_supports(ranks):
    for reasons in ranks(2, ask):
        assert reasons == [
            "its ranks share no memory segment",
            None,
            "it computes in float32, and the stream is float64",
            "it computes in float32, and the output is float64",
        ]


def forced(group):
    boundary_module.EXECUTORS["shared"] = SHARED
    boundary_module.BOUNDARY_CHOICES = ("auto", "reference", "library", "shared")
    with pytest.raises(UserError, match="boundary='shared' cannot run here: its ranks share no memory segment"):
        Boundary(group, "shared")
    with over_segment(group):
        assert Boundary(group, "shared").executor is SHARED


def test_a_forced_choice_that_cannot_run_is_an_error(ranks):
    ranks(2, forced)
