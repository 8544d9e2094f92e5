"""The compiled add+norm against `contract.add_norm`, bit for bit, and its errors."""

import ctypes
import itertools
import platform
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tp_residual.errors import UserError
from tp_residual.kernels import build, contract, cpu
from tp_residual.kernels.contract import AddNormSpec, NormSpec

SIZES = (1, 2, 3, 8, 31, 64, 65, 100, 576, 896, 2880, 4096, 16384, 20000)
TOKENS = (0, 1, 7, 257)
F32, BF16, F16 = DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BITS = {2: torch.int16, 4: torch.int32}
RMS, LAYER = NormSpec(1e-5), NormSpec(1e-6, "layer")
NORMS = (
    RMS,
    LAYER,
    NormSpec(1e-6, weight_offset=1.0),
    NormSpec(1e-5, weight_after_cast=True),
    NormSpec(1e-5, "layer", weight_offset=0.7, weight_after_cast=True),
)

pytestmark = pytest.mark.skipif(bool(build.unavailable()), reason=f"no compiled kernels: {build.unavailable()}")


def random(*shape: int, seed: int, dtype: torch.dtype = F32) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3 + 0.7).to(dtype)


def special_rows(size: int, dtype: torch.dtype) -> Tensor:
    """Rows of infinities, NaNs, denormals, zeros of both signs, the largest numbers, and ties between two 16-bit neighbours."""
    info, half = torch.finfo(dtype), torch.finfo(BF16)
    special = [float("inf"), float("-inf"), float("nan"), 0.0, -0.0, info.max, -info.max, info.tiny, 0.3 * info.tiny]
    special += [
        -info.smallest_normal / 2,
        1 + half.eps / 2,
        1 + 3 * half.eps / 2,
        65519.0,
        65520.0,
        2.0**-25,
        3 * 2.0**-25,
    ]
    rows = [random(size, seed=size)]
    for i, value in enumerate(special):
        row = random(size, seed=i)
        row[(7 * i) % size] = value
        rows += [row, torch.full((size,), value), torch.full((size,), value).where(torch.arange(size) % 2 == 0, -0.0)]
    return torch.stack(rows).to(dtype)


def assert_same_bits(got: Tensor, expected: Tensor, what: str) -> None:
    """Equal bits, -0.0 included; a NaN is any NaN."""
    assert got.dtype is expected.dtype and got.shape == expected.shape
    nan = expected.isnan()
    assert torch.equal(got.isnan(), nan), what
    bits = BITS[got.element_size()]
    wrong = (got.contiguous().view(bits) != expected.contiguous().view(bits)) & ~nan
    assert not wrong.any(), (
        f"{what}: {int(wrong.sum())} of {wrong.numel()} differ, first at {wrong.nonzero()[0].tolist()}"
    )


class Guarded:
    """An output `[tokens, size]` whose rows lie apart, with a pattern before, between and after them that must stay."""

    def __init__(self, tokens: int, size: int, dtype: torch.dtype, gap: int) -> None:
        self.buffer = torch.full(((tokens + 2) * (size + gap),), float("nan"), dtype=dtype)
        self.buffer.view(BITS[self.buffer.element_size()]).fill_(0x7E5A)
        self.rows = self.buffer.as_strided((tokens, size), (size + gap, 1), size + gap)
        self.inside = torch.zeros_like(self.buffer, dtype=torch.bool)
        self.inside.as_strided((tokens, size), (size + gap, 1), size + gap).fill_(True)

    def assert_untouched_around(self) -> None:
        outside = self.buffer.view(BITS[self.buffer.element_size()])[~self.inside]
        assert (outside == 0x7E5A).all(), "written outside of the output"


def check(
    spec: AddNormSpec,
    residual: Tensor | None,
    update: Tensor | None,
    *,
    gap: int = 3,
    threads: int = 1,
    order: cpu.Order = "contract",
    **parameters: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Runs it into guarded outputs and compares with the contract; returns the outputs."""
    given = residual if residual is not None else update
    assert given is not None
    residual_out = Guarded(*given.shape, spec.stream_dtype, gap)
    normed_out = Guarded(*given.shape, spec.output_dtype, gap) if spec.norm else None
    cpu.add_norm(
        spec,
        residual,
        update,
        residual_out=residual_out.rows,
        normed_out=None if normed_out is None else normed_out.rows,
        threads=threads,
        order=order,
        **parameters,
    )
    residual_out.assert_untouched_around()
    expected, expected_normed = contract.add_norm(spec, residual, update, **parameters)
    what = f"{spec}, {None if residual is None else residual.dtype} + {None if update is None else update.dtype}, {list(given.shape)}"
    if order == "contract":
        assert_same_bits(residual_out.rows, expected, f"residual of {what}")
    if normed_out is None:
        assert expected_normed is None
        return residual_out.rows, None
    normed_out.assert_untouched_around()
    assert expected_normed is not None
    if order == "contract":
        assert_same_bits(normed_out.rows, expected_normed, f"normed of {what}")
    return residual_out.rows, normed_out.rows


def parameters_for(spec: AddNormSpec, size: int, seed: int, dtypes: itertools.cycle) -> dict[str, Tensor]:
    """Norm weights, their biases for LayerNorm, and an update bias, in changing dtypes."""
    names = ["update_bias"]
    for norm, weight, bias in (
        (spec.norm, "weight", "norm_bias"),
        (spec.update_norm, "update_weight", "update_norm_bias"),
    ):
        if norm is not None:
            names += [weight, *([bias] if norm.kind == "layer" else [])]
    return {name: random(size, seed=seed + i, dtype=next(dtypes)) for i, name in enumerate(names)}


@pytest.mark.parametrize("size", SIZES)
def test_every_size_and_token_count_has_the_contracts_bits(size: int) -> None:
    dtypes = itertools.cycle(DTYPES)
    for tokens, norm in itertools.product(TOKENS, (RMS, LAYER)):
        if tokens * size > 4096 * 257 and norm is LAYER:
            continue  # slow in plain torch, and one norm of that size is enough
        dtype = next(dtypes)
        spec = AddNormSpec(dtype, dtype, norm)
        residual, update = random(tokens, size, seed=1, dtype=dtype), random(tokens, size, seed=2, dtype=dtype)
        parameters = parameters_for(spec, size, 3, dtypes)
        if norm is RMS:
            del parameters["update_bias"]
        check(spec, residual, update, threads=2, **parameters)


def test_every_mixture_of_dtypes_has_the_contracts_bits() -> None:
    dtypes, norms = itertools.cycle(DTYPES), itertools.cycle([*NORMS, None])
    optional = (None, *DTYPES)
    size = 100
    for i, (old, new, stream, output) in enumerate(itertools.product(optional, optional, DTYPES, DTYPES)):
        if old is None and new is None:
            continue
        spec = AddNormSpec(stream, output, next(norms))
        residual = None if old is None else random(5, size, seed=i, dtype=old)
        update = None if new is None else random(5, size, seed=i + 1, dtype=new)
        parameters = parameters_for(spec, size, i + 2, dtypes)
        if new is None:
            del parameters["update_bias"]
        check(spec, residual, update, **parameters)


@pytest.mark.parametrize("round_update", [None, *DTYPES])
@pytest.mark.parametrize("norm", NORMS)
def test_scales_roundings_and_an_update_norm_have_the_contracts_bits(
    norm: NormSpec, round_update: torch.dtype | None
) -> None:
    dtypes = itertools.cycle(DTYPES)
    for stream, output, (update_scale, skip_scale), update_norm in itertools.product(
        DTYPES, (F32, BF16), ((0.3, 1.7), (1.0, 1.0), (0.1, 1.0), (1.0, 0.0)), (None, NORMS[2], LAYER)
    ):
        spec = AddNormSpec(stream, output, norm, update_norm, update_scale, skip_scale, round_update)
        residual, update = random(3, 70, seed=1, dtype=stream), random(3, 70, seed=2, dtype=next(dtypes))
        check(spec, residual, update, **parameters_for(spec, 70, 3, dtypes))
        check(
            spec,
            residual,
            None,
            **{k: v for k, v in parameters_for(spec, 70, 4, dtypes).items() if k in ("weight", "norm_bias")},
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 2, 4, 8, 16, 32, 64, 100])
def test_infinities_nans_denormals_and_zeros_have_the_contracts_bits(size: int, dtype: torch.dtype) -> None:
    residual = special_rows(size, dtype)
    update = special_rows(size, F32).roll(5, 0).to(dtype)
    weight, bias = random(size, seed=8), random(size, seed=9)
    weight[0], bias[-1] = -0.0, -0.0
    for norm, stream in itertools.product(NORMS, DTYPES):
        spec = AddNormSpec(stream, stream, norm)
        for new in (update, torch.zeros_like(update), -torch.zeros_like(update), None):
            check(spec, residual, new, weight=weight, norm_bias=bias if norm.kind == "layer" else None)


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_every_sixteen_bit_number_widens_and_narrows_as_in_torch(dtype: torch.dtype) -> None:
    """All bit patterns exactly, and fp32 numbers around every one of them: the ties, and their neighbours on both sides."""
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype).reshape(64, -1)
    check(AddNormSpec(F32, F32), every, None)
    wide = every.float().view(torch.int32)
    tie = 1 << (15 if dtype is BF16 else 12)
    for step in (0, 1, -1, tie, tie - 1, tie + 1, -tie):
        check(AddNormSpec(dtype, dtype), (wide + step).view(F32), None)
    tiny = (
        torch.arange(-(1 << 15), 1 << 15, dtype=torch.float32).reshape(64, -1) * 2.0**-26
    )  # fp16's denormals, halves and quarters
    check(AddNormSpec(dtype, dtype), tiny, None)


def test_strided_rows_and_in_place_results_have_the_contracts_bits() -> None:
    spec, weight = AddNormSpec(BF16, BF16, RMS), random(100, seed=3, dtype=BF16)
    wide = random(7, 260, seed=1, dtype=BF16)
    expanded = random(1, 100, seed=2, dtype=BF16).expand(7, 100)
    for residual, update in (
        (wide[:, :100], wide[:, 101:201]),
        (wide[:, 3:103], expanded),
        (wide[::2, :100], wide[::2, 160:]),
    ):
        check(spec, residual, update, weight=weight)
    residual, update = wide[:, :100].clone(), wide[:, 101:201].clone()
    expected, expected_normed = contract.add_norm(spec, residual, update, weight=weight)
    cpu.add_norm(spec, residual, update, residual_out=residual, normed_out=update, weight=weight)
    assert_same_bits(residual, expected, "residual in place")
    assert_same_bits(update, expected_normed, "normed value in the update's place")
    halves = torch.zeros(7, 200, dtype=BF16)
    cpu.add_norm(
        spec, wide[:, :100], wide[:, 101:201], residual_out=halves[:, :100], normed_out=halves[:, 100:], weight=weight
    )
    assert_same_bits(halves, torch.cat([expected, expected_normed], 1), "two halves of one buffer")


def test_threads_change_no_bit_and_work_from_several_callers_at_once() -> None:
    spec, weight = AddNormSpec(BF16, F32, LAYER), random(576, seed=3, dtype=BF16)
    residual, update = random(700, 576, seed=1, dtype=BF16), random(700, 576, seed=2, dtype=BF16)
    expected, expected_normed = contract.add_norm(spec, residual, update, weight=weight)
    failures = []

    def many() -> None:
        try:
            for threads in (1, 2, 3, 5, 2, 1) * 3:
                new, normed = torch.empty(700, 576, dtype=BF16), torch.empty(700, 576)
                cpu.add_norm(
                    spec, residual, update, residual_out=new, normed_out=normed, weight=weight, threads=threads
                )
                assert_same_bits(new, expected, f"{threads} threads")
                assert_same_bits(normed, expected_normed, f"{threads} threads")
        except AssertionError as error:
            failures.append(error)

    callers = [threading.Thread(target=many) for _ in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not failures, failures[0]


POOL = """
#include "threads.h"
#include <chrono>
std::atomic<int> wrong{0};
void call_often(int calls) {
    for (int call = 0; call < calls; ++call) {
        std::atomic<int64_t> done{0};
        tpr::Pool::run(16, 4, [&](int64_t begin, int64_t end) {
            std::this_thread::sleep_for(std::chrono::milliseconds(begin % 2 ? 3 : 1));  // some end late
            done += end - begin;
        });
        wrong += done != 16;
    }
}
int main() {
    call_often(20);
    std::thread other(call_often, 60), another(call_often, 60);
    call_often(60);
    other.join(), another.join();
    return wrong != 0;
}
"""


def test_a_call_returns_when_all_is_done_whoever_else_calls(tmp_path: Path) -> None:
    (tmp_path / "pool.cpp").write_text(POOL)
    program = str(tmp_path / "pool")
    command = ["c++", "-std=c++17", "-pthread", f"-I{build.SOURCES}", str(tmp_path / "pool.cpp"), "-o", program]
    subprocess.run(command, check=True, timeout=60)
    assert subprocess.run([program], timeout=30).returncode == 0


FORK = """
import os, sys, torch
from tp_residual.kernels import cpu
from tp_residual.kernels.contract import AddNormSpec, NormSpec
torch.set_num_threads(1)  # torch's own pool does not survive a fork
x, w, spec = torch.ones(512, 1024), torch.ones(1024), AddNormSpec(torch.float32, torch.float32, NormSpec(1e-5))
def run():
    out, normed = torch.zeros_like(x), torch.zeros_like(x)
    cpu.add_norm(spec, x, x, residual_out=out, normed_out=normed, weight=w, threads=2)
    return bool((out == 2).all())
assert run()
child = os.fork()
if child == 0:
    right = run()
    os._exit(0 if right and len(os.listdir("/proc/self/task")) == 2 else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) or not run())
"""


def test_a_forked_child_has_threads_of_its_own() -> None:
    assert subprocess.run([sys.executable, "-c", FORK], timeout=60).returncode == 0


def test_fast_order_is_the_same_sum_within_rounding() -> None:
    for size, norm in itertools.product((1, 63, 100, 4096), NORMS):
        spec = AddNormSpec(F32, F32, norm)
        residual, update, weight = random(7, size, seed=1), random(7, size, seed=2), random(size, seed=3)
        new, normed = check(spec, residual, update, weight=weight, order="fast")
        expected, expected_normed = contract.add_norm(spec, residual, update, weight=weight)
        assert torch.equal(new, expected)  # no sum in it
        assert size < 4096 or not torch.equal(normed, expected_normed)  # it is another order
        # 1e-6: two orders of a sum of up to 4096 squares differ by some 2^-23, and y by half of that; centring by a mean adds its error
        torch.testing.assert_close(normed, expected_normed, rtol=1e-6, atol=1e-5 if norm.kind == "layer" else 0)


def test_a_prepared_call_reads_its_tensors_anew_and_keeps_them() -> None:
    spec = AddNormSpec(F32, F32, RMS)
    residual, update, weight = random(2, 100, seed=1), random(2, 100, seed=2), random(100, seed=3)
    new, normed = torch.empty(2, 100), torch.empty(2, 100)
    run = cpu.prepare(spec, residual, update, residual_out=new, normed_out=normed, weight=weight)
    for seed in (5, 6):
        update.copy_(random(2, 100, seed=seed))
        weight.copy_(random(100, seed=seed + 2))
        expected, expected_normed = contract.add_norm(spec, residual, update, weight=weight)
        run()
        assert torch.equal(new, expected) and torch.equal(normed, expected_normed)


def test_a_row_spec_is_looked_up_by_spec_and_addresses() -> None:
    spec, weight, other = AddNormSpec(F32, F32, RMS), random(8, seed=1), random(8, seed=2)
    first = cpu.row_spec(spec, 8, weight=weight)
    assert cpu.row_spec(AddNormSpec(F32, F32, RMS), 8, weight=weight) is first
    assert first.weight == weight.data_ptr() and first.D == 8 and first.round_update == -1
    for changed in (
        cpu.row_spec(spec, 8, weight=other),
        cpu.row_spec(AddNormSpec(BF16, F32, RMS), 8, weight=weight),
        cpu.row_spec(spec, 8, weight=weight, norm_bias=other),
        cpu.row_spec(spec, 4, weight=weight[:4]),
    ):
        assert changed is not first


def test_the_structures_have_the_compilers_layout() -> None:
    library = build.library()
    for function, structure in (
        (library.tpr_sizeof_row_spec, cpu.RowSpec),
        (library.tpr_sizeof_add_norm_call, cpu._Call),
    ):
        function.restype = ctypes.c_int64
        assert function() == ctypes.sizeof(structure)


def refusals() -> dict[str, tuple[dict, str]]:
    """Changes to a call that works, and what the error must say."""
    rows, weight = torch.zeros(4, 8), torch.ones(8)
    shared = torch.zeros(80)
    return {
        "shape": ({"update": torch.zeros(4, 7)}, r"update has shape \[4, 7\], residual_out \[4, 8\]"),
        "rank": ({"residual_out": torch.zeros(8)}, r"not \[tokens, D\]"),
        "hidden 0": ({"residual_out": torch.zeros(4, 0)}, "D at least 1"),
        "integers": ({"update": rows.int()}, "update is torch.int32, which is none of float32, bfloat16, float16"),
        "fp64": ({"residual": rows.double()}, "use kernels.contract"),
        "device": ({"update": torch.zeros(4, 8, device="meta")}, "update is on meta"),
        "columns": ({"update": torch.zeros(8, 4).t()}, "last dimension must be contiguous"),
        "stream dtype": (
            {"residual_out": rows.bfloat16()},
            "residual_out is torch.bfloat16, and the spec says torch.float32",
        ),
        "output dtype": ({"normed_out": rows.bfloat16()}, "normed_out is torch.bfloat16"),
        "no normed_out": ({"normed_out": None}, "a norm and no normed_out"),
        "nothing given": ({"residual": None, "update": None}, "both None"),
        "no weight": ({"weight": None}, "weight is missing"),
        "weight's size": ({"weight": torch.ones(9)}, r"weight has shape \[9\]"),
        "weight's stride": ({"weight": torch.ones(16)[::2]}, r"stride \[2\]"),
        "weight's dtype": ({"weight": weight.double()}, "weight is torch.float64"),
        "expanded output": ({"residual_out": torch.zeros(1, 8).expand(4, 8)}, "rows overlap"),
        "order": ({"order": "exact"}, "order='exact'"),
        "threads": ({"threads": 0}, "threads=0"),
        "eps": ({"spec": AddNormSpec(F32, F32, NormSpec(0.0))}, "eps=0.0 must be above 0"),
        "eps in fp32": ({"spec": AddNormSpec(F32, F32, NormSpec(1e-50))}, "eps=1e-50 must be above 0 and finite in"),
        "a list": ({"update": [[0.0] * 8]}, "update is a list, not a torch.Tensor"),
        "sparse": ({"residual": rows.to_sparse()}, "residual has layout sparse_coo"),
        "an output in numpy": ({"normed_out": rows.numpy()}, "normed_out is a numpy.ndarray"),
        "no outputs": (
            {"residual_out": None, "normed_out": None, "spec": AddNormSpec(F32, F32)},
            "both None, which leaves",
        ),
        "shifted": (
            {"residual": shared[:32].view(4, 8), "residual_out": shared[8:40].view(4, 8)},
            "residual_out overlaps residual without being the same memory",
        ),
        "both outputs": ({"residual_out": rows, "normed_out": rows}, "residual_out overlaps normed_out"),
        "halves that meet": (
            {"residual_out": shared.view(4, 20)[:, :8], "normed_out": shared.view(4, 20)[:, 7:15]},
            "residual_out overlaps normed_out",
        ),
    }


@pytest.mark.parametrize("what", refusals())
def test_operands_that_do_not_fit_are_refused_by_name(what: str) -> None:
    call = {
        "spec": AddNormSpec(F32, F32, RMS),
        "residual": torch.zeros(4, 8),
        "update": torch.zeros(4, 8),
        "residual_out": torch.zeros(4, 8),
        "normed_out": torch.zeros(4, 8),
        "weight": torch.ones(8),
    }
    cpu.add_norm(**call)
    change, message = refusals()[what]
    with pytest.raises(UserError, match=message):
        cpu.add_norm(**call | change)


@pytest.mark.parametrize("what", refusals())
def test_a_call_like_one_that_passed_is_still_refused(what: str) -> None:
    """What is remembered of a call is its operands' presence and dtypes: sizes, places and memory are looked at each time."""
    cpu._known.clear()
    test_operands_that_do_not_fit_are_refused_by_name(what)
    assert cpu._known


def test_a_remembered_call_has_the_contracts_bits() -> None:
    """Also with other sizes, strides, and in place; and what is not wanted is not written."""
    for spec in (AddNormSpec(BF16, BF16, RMS), AddNormSpec(F32, BF16, LAYER, RMS, 0.3, 1.7, BF16)):
        weights = {
            n: random(100, seed=i, dtype=BF16)
            for i, n in enumerate(("weight", "update_weight")[: 1 + bool(spec.update_norm)])
        }
        for seed, tokens in enumerate((3, 3, 1, 40)):
            residual = random(tokens, 100, seed=seed, dtype=spec.stream_dtype)
            update = random(tokens, 100, seed=seed + 9, dtype=BF16)
            check(spec, residual, update, **weights)
            check(spec, residual, update, gap=0, **weights)
            expected, normed = contract.add_norm(spec, residual, update, **weights)
            out = torch.empty_like(normed)
            before = residual.clone(), update.clone()
            cpu.add_norm(spec, residual, update, residual_out=None, normed_out=out, **weights)
            assert_same_bits(out, normed, "only the norm")
            assert torch.equal(residual, before[0]) and torch.equal(update, before[1])
            cpu.add_norm(spec, residual, update, residual_out=residual, normed_out=update, **weights)
            assert_same_bits(residual, expected, "in place")
            assert_same_bits(update, normed, "in place")
    assert cpu._known


def test_a_weight_is_known_by_address_type_and_size() -> None:
    spec = AddNormSpec(F32, F32, RMS)
    residual, update, buffer = random(2, 64, seed=1), random(2, 64, seed=2), torch.empty(64)
    for dtype in (F32, BF16, F32):
        weight = buffer.view(dtype)[:64]
        weight.copy_(random(64, seed=3))
        check(spec, residual, update, gap=0, weight=weight)
        check(spec, residual, update, gap=0, weight=random(64, seed=4, dtype=dtype))  # at another address
    out = torch.empty(2, 64)
    for other in (buffer[:32], buffer.view(1, 64)):
        with pytest.raises(UserError, match="weight has shape"):
            cpu.add_norm(spec, residual, update, residual_out=out, normed_out=torch.empty(2, 64), weight=other)


def test_covers_what_the_kernel_takes() -> None:
    assert cpu.covers(F32, BF16, F16) and not cpu.covers(F32, torch.float64)


# The library's code for other machines. Warnings are errors; GCC's headers for AVX-512 have their own, about undefined registers.
STRICT = ["-Wall", "-Wextra", "-Werror", "-Wno-maybe-uninitialized", "-Wno-uninitialized"]


def compiled(folder: Path, compiler: str, *flags: str) -> Path:
    library = folder / "library.so"
    sources = [str(path) for path in build.SOURCES.glob("add_norm.cpp")]
    done = subprocess.run(
        [compiler, *build.FLAGS, *flags, *sources, "-o", str(library)], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    return library


def test_the_portable_code_has_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = ctypes.CDLL(str(compiled(tmp_path, "c++", "-DTPR_PORTABLE", *STRICT)))
    library.tpr_add_norm.argtypes = (ctypes.c_void_p,)
    calls = []

    def portable(address: int) -> int:
        calls.append(address)
        return int(library.tpr_add_norm(address))

    monkeypatch.setattr(cpu, "_functions", lambda: (portable, portable))
    for size in (1, 3, 64, 100, 896):
        test_every_size_and_token_count_has_the_contracts_bits(size)
    test_every_mixture_of_dtypes_has_the_contracts_bits()
    test_scales_roundings_and_an_update_norm_have_the_contracts_bits(NORMS[-1], BF16)
    for dtype in DTYPES:
        test_infinities_nans_denormals_and_zeros_have_the_contracts_bits(100, dtype)
    for dtype in (BF16, F16):
        test_every_sixteen_bit_number_widens_and_narrows_as_in_torch(dtype)
    test_strided_rows_and_in_place_results_have_the_contracts_bits()
    assert calls


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="x86's own code")
def test_it_compiles_for_avx512_without_fused_multiply_adds(tmp_path: Path) -> None:
    library = compiled(tmp_path, "c++", "-march=x86-64-v4", *STRICT)
    code = subprocess.run(["objdump", "-d", str(library)], capture_output=True, text=True, check=True).stdout
    assert "vfmadd" not in code and "vfnmadd" not in code and "vsqrtss" in code
    assert "vaddps %zmm" in " ".join(code.split())


@pytest.mark.slow
def test_it_compiles_for_aarch64_without_fused_multiply_adds(tmp_path: Path) -> None:
    if platform.machine() == "aarch64":
        pytest.skip("this machine is one: the other tests run the code")
    if shutil.which("aarch64-linux-gnu-g++") is None:
        pytest.skip("no cross compiler: aarch64-linux-gnu-g++ is not in PATH (Debian: g++-aarch64-linux-gnu)")
    library = compiled(tmp_path, "aarch64-linux-gnu-g++", *STRICT)
    code = subprocess.run(
        ["aarch64-linux-gnu-objdump", "-d", str(library)], capture_output=True, text=True, check=True
    ).stdout
    assert "fmla" not in code and "fmadd" not in code and "fsqrt" in code
    assert ".4s" in code  # vectors of four
