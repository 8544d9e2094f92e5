"""One executor's bits against `reference`'s, on the same tokens: no oracle, no tolerance."""

import json
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from tp_residual.model.attention_backend import NoCache, TokenBatch
from tp_residual.model.decoder import CausalLM
from tp_residual.residual.boundary import Boundary
from tp_residual.verify.capture import Recorder
from tp_residual.verify.run import check_sequences


@dataclass(frozen=True)
class BitDifference:
    """One value of one rank. elements: of the value; differing: those whose bits differ."""

    module: str
    quantity: str
    rank: int
    elements: int
    differing: int
    max_ulp: float

    def __str__(self) -> str:
        return (
            f"{self.quantity} of {self.module} on rank {self.rank}: {self.differing} of {self.elements} elements differ, "
            f"by at most {self.max_ulp:.3g} ulp"
        )


@dataclass(frozen=True)
class BitReport:
    """passed: every state, normed value and logit is bitwise `reference`'s. first: where the runs part; what follows is its consequence."""

    passed: bool
    summary: str
    executor: str
    values: int  # compared, on each rank
    first: BitDifference | None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@torch.no_grad()
def verify_against_reference(model: CausalLM, sequences: Sequence[Sequence[int]]) -> BitReport:
    """The same forward pass with the model's executor and with `reference`. All ranks call it and get the same report."""
    group = model.group
    check_sequences(sequences, model.config)
    call = f"against-{group.record.number}"
    group.require_agreement(f"tokens ({call})", {"sequences": zlib.crc32(repr(sequences).encode())})
    batch = TokenBatch.prefill([list(ids) for ids in sequences], group.device)
    executor = model.boundary_for(batch.token_ids.shape[0]).executor.name
    ours = _values(model, batch)
    kept = model.boundaries
    model.boundaries = {mode: _reference_of(boundary) for mode, boundary in kept.items()}
    try:
        with group.over_library():  # nor may what moves the rows be the same code on both sides
            theirs = _values(model, batch)
    finally:
        model.boundaries = kept
    found = [
        (index, BitDifference(module, quantity, group.rank, value.numel(), *_bits(value, reference)))
        for index, ((module, quantity, value), (_, _, reference)) in enumerate(zip(ours, theirs, strict=True))
        if not torch.equal(value, reference)
    ]
    own = json.dumps([found[0][0], asdict(found[0][1])] if found else None)
    told = [json.loads(text) for text in group.share(call, own)]
    differing = [each for each in told if each is not None]
    if not differing:
        summary = f"pass: {executor} gives the bits of reference in {len(ours)} values on each of {group.size} ranks"
        return BitReport(True, summary, executor, len(ours), None)
    first = BitDifference(**min(differing, key=lambda each: each[0])[1])
    return BitReport(False, f"{executor} parts from reference at the {first}", executor, len(ours), first)


def _reference_of(boundary: Boundary) -> Boundary:
    return Boundary(
        boundary.group,
        "reference",
        sequence_parallel=boundary.sequence_parallel,
        stream_dtype=boundary.stream_dtype,
        output_dtype=boundary.output_dtype,
        round_reduced=boundary.round_reduced,
        gradients=False,
    )


def _values(model: CausalLM, batch: TokenBatch) -> list[tuple[str, str, Tensor]]:
    recorder = Recorder()
    logits = model(batch, NoCache(), taps=(recorder,)).local_logits
    values = []
    for seen in recorder.seen:
        values += [(seen.site, "stream", seen.residual), (seen.norm, "normed", seen.normed)]
    return [*values, ("lm_head", "logits", logits)]


def _bits(value: Tensor, reference: Tensor) -> tuple[int, float]:
    info = torch.finfo(value.dtype)
    unit = info.eps * torch.exp2(reference.double().abs().clamp_min(info.tiny).log2().floor())
    apart = ((value.double() - reference.double()).abs() / unit).nan_to_num(nan=torch.inf)
    return int((value != reference).sum()), float(apart.max())
