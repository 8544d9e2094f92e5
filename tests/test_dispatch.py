"""Who answers a boundary: forced, by formula, by a measured table, and what is refused."""

import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tp_residual.errors import RequestError, UserError
from tp_residual.kernels.contract import NormSpec
from tp_residual.parallel.group import TensorParallelGroup
from tp_residual.residual import boundary as boundary_module
from tp_residual.residual.boundary import Boundary
from tp_residual.residual.dispatch import symmetric_limit_bytes
from tp_residual.residual.plain import PlainExecutor
from tp_residual.residual.request import BoundaryRequest
from tp_residual.residual.table import TABLE_FORMAT, BoundaryTable

SPEC = NormSpec(1e-5)


class Fussy(PlainExecutor):
    """Refuses one kind of norm."""

    def supports(self, request: BoundaryRequest, group: TensorParallelGroup) -> str | None:
        return "it has no norm of eps 0.5" if request.norm == NormSpec(0.5) else None


class Noting(PlainExecutor):
    """Answers as `local` does, and notes that it was asked."""

    def __init__(self, name: str, asked: list[str]) -> None:
        super().__init__(name, ordered=name != "library")
        self.asked = asked

    def run(self, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        self.asked.append(self.name)
        return super().run(*arguments)


def pretend(device: str, size: int = 2) -> TensorParallelGroup:
    """A group that answers as one of `size` ranks on `device` would, without peers."""
    group = TensorParallelGroup.single()
    group.size, group.device = size, torch.device(device)
    return group


def test_a_forced_choice_fails_and_an_automatic_one_falls_back(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    group = pretend("cuda")
    for name in ("symmetric", "library"):
        monkeypatch.setitem(boundary_module.EXECUTORS, name, Fussy(name, ordered=name != "library"))
    with pytest.raises(
        UserError, match=r"boundary='library' cannot run here: it has no norm of eps 0.5; use --boundary auto"
    ):
        Boundary(group, "library", norms=(NormSpec(0.5),))
    assert Boundary(group, "library", norms=(SPEC,)).executor.name == "library"
    with caplog.at_level(logging.INFO, logger="tp_residual"):
        assert Boundary(group, "auto", norms=(NormSpec(0.5),)).executor.name == "reference"
    said = [record.getMessage() for record in caplog.records]
    assert said[-1] == "boundary: reference (tensor parallel, stream float32; default)"
    assert said[-2] == "boundary: library cannot run here: it has no norm of eps 0.5"
    with pytest.raises(UserError, match="boundary='fast' is not one of auto, reference, library, shared, symmetric"):
        Boundary(group, "fast")


def test_a_group_of_one_adds_and_normalises_in_one_pass_with_the_bits_of_reference() -> None:
    group = TensorParallelGroup.single()
    chosen = Boundary(group, "auto", stream_dtype=torch.bfloat16, output_dtype=torch.bfloat16, norms=(SPEC,))
    assert chosen.executor.name == "local" and chosen.executor.ordered
    reference = boundary_module.EXECUTORS["reference"]
    request = chosen.request(True, 1, SPEC, "gathered")
    assert chosen.request(True, 1, SPEC, "gathered") is request
    x, residual, weight = (torch.randn(shape).bfloat16() for shape in ((5, 576), (5, 576), (576,)))
    split = chosen.token_split(5)
    ours, theirs = (
        executor.run(request, group, "t", split, residual, x, None, weight, None)
        for executor in (chosen.executor, reference)
    )
    assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])
    assert "2 ranks" in str(boundary_module.EXECUTORS["local"].supports(request, pretend("cpu")))


def test_the_formula_is_the_crossing_of_two_lines() -> None:
    """a + S / rate of each side: equal at the limit, the kernel ahead below it and behind above."""
    limit = symmetric_limit_bytes()
    kernel, library = (lambda s: 9.7e-6 + s / 150e9), (lambda s: 30.8e-6 + s / 210e9 + 4 * s / 3.0e12)
    assert kernel(limit) == pytest.approx(library(limit), rel=1e-9)
    assert kernel(limit / 2) < library(limit / 2) and kernel(limit * 2) > library(limit * 2)
    assert 20e6 < limit < 60e6


def table(tmp_path: Path, **changes: Any) -> Path:
    entry = {
        "device": "cuda", "transport": "none", "world": 2, "dtype": "float32", "mode": "tp", "order": "any",
        "ranges": [{"up_to_bytes": 800, "executor": "symmetric"}, {"up_to_bytes": None, "executor": "library"}],
    }  # fmt: skip
    path = tmp_path / "table.json"
    path.write_text(json.dumps({"format": TABLE_FORMAT, "table": [entry | changes]}))
    return path


def test_a_measured_table_overrides_the_formula_by_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    for name in ("symmetric", "library"):
        monkeypatch.setitem(boundary_module.EXECUTORS, name, Noting(name, asked))
    group = pretend("cuda")
    chosen = Boundary(group, norms=(SPEC,), table=BoundaryTable.from_file(table(tmp_path)))
    assert chosen.executor.name == "symmetric up to 800 bytes, library" and not chosen.executor.ordered
    request = chosen.request(True, 1, SPEC, "gathered")
    group.size = 1  # so that the two answer without peers
    for tokens in (1, 2, 3, 5):  # of 100 floats: 400 bytes each
        x = torch.randn(tokens, 100)
        chosen.executor.run(request, group, "t", chosen.token_split(tokens), x, x, None, torch.ones(100), None)
    assert asked == ["symmetric", "symmetric", "library", "library"]
    group.size = 2
    other = Boundary(group, norms=(SPEC,), table=BoundaryTable.from_file(table(tmp_path, world=4)))
    assert math.isclose(
        float(other.executor.name.split()[3]), symmetric_limit_bytes(), rel_tol=0.01
    )  # not measured here


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot be read as JSON"),
        ("[]", "is not in the format"),
        (json.dumps({"format": "other"}), "is not in the format"),
        (json.dumps({"format": TABLE_FORMAT}), "has no list `table`"),
        (json.dumps({"format": TABLE_FORMAT, "table": [3]}), "entry 1: 3 is not an object"),
        (
            json.dumps({"format": TABLE_FORMAT, "table": [{"device": "cpu"}]}),
            "transport, world, dtype, mode, order, ranges is missing",
        ),
        (None, "cannot be read as JSON"),
    ],
)
def test_a_file_that_is_no_table_is_refused(tmp_path: Path, content: str | None, message: str) -> None:
    path = tmp_path / "table.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(RequestError, match=message):
        BoundaryTable.from_file(path)


@pytest.mark.parametrize(
    ("ranges", "message"),
    [
        ([], "is not a list of ranges"),
        ([3], "is not a list of ranges"),
        ([{"up_to_bytes": None}], "executor=None is not one of reference, library, shared, symmetric"),
        ([{"up_to_bytes": None, "executor": ["shared"]}], "is not one of reference"),
        ([{"up_to_bytes": None, "executor": "quick"}], "executor='quick' is not one of"),
        ([{"executor": "shared"}], "are not positive numbers that rise, then null"),
        ([{"up_to_bytes": 3, "executor": "shared"}], "are not positive"),
    ]
    + [
        (
            [{"up_to_bytes": limit, "executor": "shared"}, {"up_to_bytes": None, "executor": "library"}],
            "are not positive",
        )
        for limit in (-5, 0, "5", True, math.nan, math.inf)
    ],
)
def test_an_entry_without_meaning_is_refused(tmp_path: Path, ranges: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        BoundaryTable.from_file(table(tmp_path, ranges=ranges))
