"""All probes on one model, and one diagnosis on all ranks."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict

from tp_residual.doctor import probes
from tp_residual.doctor.expect import Expected
from tp_residual.doctor.observe import WholeWeights, observe
from tp_residual.doctor.report import Diagnosis, Finding
from tp_residual.errors import RequestError
from tp_residual.model.attention_backend import TokenBatch
from tp_residual.model.decoder import CausalLM
from tp_residual.parallel.group import TensorParallelGroup

Progress = Callable[[str], None]


def diagnose(model: CausalLM, sequences: Sequence[Sequence[int]], *, progress: Progress | None = None) -> Diagnosis:
    """Examine `model` on the sequences. Every rank calls it alike and gets the same diagnosis.

    Gradients the model had are dropped; it is left in eval mode, its weights as they were. A 16-bit model is not differentiated: its
    gradients are rounded too coarsely to judge. Raises RequestError for sequences that the model cannot take.
    """
    if not sequences or any(not ids for ids in sequences):
        raise RequestError("there is nothing to look at: give at least one sequence of at least one token")
    group, say = model.group, progress or (lambda _: None)
    given = [list(ids) for ids in sequences]
    trained = [parameter.requires_grad for parameter in model.parameters()]
    gradients = model.dtype.itemsize >= 4 and model.sequence_parallel != "auto"
    model.zero_grad()
    try:
        if gradients:
            model.requires_grad_(True)
        say("one pass")
        observed = observe(model, given, gradients=gradients)
        batch = TokenBatch.prefill(given, group.device)
        weights = WholeWeights(model, group)
        plans = [plan for layer in model.layout.plan for plan in layer]
        limit = max(probes.LIMITS[model.dtype], probes.LIMITS[observed.boundary.stream_dtype])
        case = probes.Case(observed, Expected(model.config, weights), weights, plans, limit, batch)
        findings = []
        for name, probe in _PROBES.items():
            say(name)
            findings.append(probe(case))
        if gradients:
            say("gradients")
            findings += probes.probe_gradients(case)
            findings.append(probes.probe_replicated_gradients(case))
            findings.append(probes.probe_parameter_gradients(case))
        say("zero writers")
        findings.append(probes.probe_zero_writers(case, given))
    finally:
        model.zero_grad()
        for parameter, flag in zip(model.parameters(), trained, strict=True):
            parameter.requires_grad_(flag)
    return Diagnosis(
        model.config.residual.name,
        group.size,
        observed.boundary.sequence_parallel,
        str(model.dtype).removeprefix("torch."),
        sum(map(len, given)),
        tuple(_agreed(group, findings)),
    )


_PROBES = {
    "replicas": probes.probe_replicas,  # first: where they differ, the other probes see what came of it
    "ends": probes.probe_ends,
    "updates": probes.probe_updates,
    "writers": probes.probe_writers,
    "joins": probes.probe_joins,
    "reads": probes.probe_reads,
    "swallow rate": probes.probe_swallowed,
}


def _agreed(group: TensorParallelGroup, findings: list[Finding]) -> list[Finding]:
    """Of each probe the finding of the first rank that has a fault, naming it, else rank 0's."""
    if group.size == 1:
        return findings
    everybody = [
        json.loads(text)
        for text in group.share(f"doctor/{group.record.number}", json.dumps([asdict(f) for f in findings]))
    ]
    agreed = []
    for index in range(len(findings)):
        of_ranks = [Finding(**(theirs[index] | {"series": tuple(theirs[index]["series"])})) for theirs in everybody]
        faulty = [rank for rank, finding in enumerate(of_ranks) if finding.status == "fault"]
        chosen = of_ranks[faulty[0]] if faulty else of_ranks[0]
        if faulty and len(faulty) < group.size:
            chosen = Finding(**(asdict(chosen) | {"what": f"{chosen.what} [on rank {', '.join(map(str, faulty))}]"}))
        agreed.append(chosen)
    return agreed
