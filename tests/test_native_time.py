"""The kernels count the time they take, by what they do."""

import time

import pytest
import torch

from tp_residual.kernels import build
from tp_residual.kernels.linear import Form, PackedWeight, packed_form
from tp_residual.kernels.native_time import WORKS, counted, native_seconds

pytestmark = pytest.mark.skipif(bool(build.unavailable()), reason=f"no compiled kernels: {build.unavailable()}")


@pytest.mark.parametrize("form", ["panels", "onednn"])
def test_a_linear_counts_as_what_it_is_and_as_no_more_than_it_took(form: Form) -> None:
    if form == "panels" and packed_form(torch.device("cpu"), torch.float32)[0] != "panels":
        pytest.skip("no compiled panels for this CPU")
    packed, x = PackedWeight(torch.randn(512, 512), form), torch.randn(64, 512)
    packed.linear(x, None)
    before, began = native_seconds(), time.perf_counter()
    for _ in range(20):
        packed.linear(x, None)
    took, after = time.perf_counter() - began, native_seconds()
    assert before is not None and after is not None and set(after) == set(WORKS)
    spent = {work: after[work] - before[work] for work in WORKS}
    # nearly all of it is the library's; half leaves room for a machine that is busy with something else
    assert 0.5 * took < spent["linear"] <= took
    assert not any(spent[work] for work in WORKS if work != "linear")


def test_what_another_library_takes_is_counted_when_it_fails_too() -> None:
    before = native_seconds()
    with pytest.raises(ValueError, match="no"), counted("attention"):
        time.sleep(0.02)
        raise ValueError("no")
    after = native_seconds()
    assert before is not None and after is not None
    assert 0.02 <= after["attention"] - before["attention"] < 1.0
