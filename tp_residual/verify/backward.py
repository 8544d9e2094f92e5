"""The backward pass against the unsharded one: every gradient of one fixed random cotangent on the logits.

The loss is `(cotangent * logits).sum()`. Ours runs once, sharded, and is completed by `sync_gradients`. The oracle goes backwards layer by
layer from states that it kept on the way forward, with one layer's weights and gradients in memory, in step with the ranks, which gather
their gradients of that layer by blocks. Compared, in the order in which they arise: the gradient of the stream at every write (down to that
of the embedding's output), every parameter's blocks, and the norm of everything.
"""

import json
import zlib
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from tp_residual.errors import RequestError
from tp_residual.model.attention_backend import NoCache, TokenBatch
from tp_residual.model.decoder import CausalLM
from tp_residual.parallel.blocks import ParameterBlock, grad_norm, parameter_blocks, sync_gradients
from tp_residual.parallel.partial import Partial
from tp_residual.residual.boundary import Site
from tp_residual.verify.metrics import difference, fitted_factor
from tp_residual.verify.oracle import (
    ATTENTION,
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    MLP,
    NORM_OF,
    Oracle,
    WeightSource,
    site_names,
)
from tp_residual.verify.report import Comparison, Culprit, VerifyReport
from tp_residual.verify.run import Progress, Shared, check_sequences

# fp32 against fp64 on the demo model. Largest seen in correct code: see docs/verify.md. A missing or doubled sum is wrong by a factor.
LIMIT_FP32 = {"stream gradient": 2e-4, "gradient": 2e-4, "norm": 2e-5}
# Where a block's own gradient nearly cancels, its error is measured against this share of its tensor's.
_FLOOR = 1e-2


def verify_backward(
    model: CausalLM,
    weights: WeightSource,
    sequences: Sequence[Sequence[int]],
    *,
    seed: int = 0,
    progress: Progress | None = None,
) -> VerifyReport:
    """All ranks call it alike and get the same report. Gradients the model had are dropped.

    Raises RequestError for 16-bit models and for sequence_parallel="auto", which has no gradients.
    """
    config, group = model.config, model.group
    if model.dtype.itemsize < 4:
        raise RequestError(
            f"verify --backward needs float32: gradients in {model.dtype} are rounded too coarsely to judge"
        )
    if model.sequence_parallel == "auto":
        raise RequestError("sequence_parallel='auto' has no gradients; use off or on")
    check_sequences(sequences, config)
    call = f"backward-{group.record.number}"
    group.require_agreement(f"tokens ({call})", {"sequences": zlib.crc32(repr((sequences, seed)).encode())})
    batch = TokenBatch.prefill([list(ids) for ids in sequences], group.device)
    tokens = batch.token_ids.shape[0]
    generator = torch.Generator().manual_seed(seed)
    cotangent = torch.randn(tokens, config.vocab_size, generator=generator, dtype=model.dtype).to(group.device)
    blocks = parameter_blocks(model)
    trained = [parameter.requires_grad for parameter in model.parameters()]
    model.requires_grad_(True)
    model.zero_grad()
    try:
        written = _backward(model, batch, cotangent)
        sync_gradients(blocks, group)
        norm = float(grad_norm(blocks, group))
        return _compare(model, weights, sequences, cotangent, blocks, written, norm, call, progress)
    finally:
        model.zero_grad()
        for parameter, flag in zip(model.parameters(), trained, strict=True):
            parameter.requires_grad_(flag)


def _backward(model: CausalLM, batch: TokenBatch, cotangent: Tensor) -> list[Tensor]:
    """The gradient of every update, complete on every rank: that of the stream where the update joins it."""
    written: list[Tensor] = []

    def tap(site: Site, partial: Partial | None, residual: Tensor, normed: Tensor | None) -> None:
        assert partial is not None
        partial.value.retain_grad()
        written.append(partial.value)

    with torch.enable_grad():
        logits = model(batch, NoCache(), taps=(tap,)).local_logits
        start, stop = model.lm_head.split.ranges[model.group.rank]
        logits.backward(cotangent[:, start:stop])
    return [torch.zeros_like(value) if value.grad is None else value.grad for value in written]


def _compare(
    model: CausalLM,
    weights: WeightSource,
    sequences: Sequence[Sequence[int]],
    cotangent: Tensor,
    blocks: list[ParameterBlock],
    written: list[Tensor],
    norm: float,
    call: str,
    progress: Progress | None,
) -> VerifyReport:
    group, layers = model.group, model.config.num_hidden_layers
    share = Shared(group, call)
    names = sorted({block.name for block in blocks})
    runs = _all_runs(blocks, share, group.size)
    judge = None
    if group.rank == 0:
        judge = _Judge(model, Oracle(model.config, weights, device=group.device), sequences, runs, written)
    share.step("forward", None if judge is None else judge.forward)
    top = [f"{FINAL_NORM}.weight"] + ([] if model.config.tie_word_embeddings else [f"{HEAD}.weight"])
    stages = [("head", top)]
    for layer in reversed(range(layers)):
        stages.append((f"layer {layer}", [name for name in names if name.startswith(f"model.layers.{layer}.")]))
    stages.append(("embedding", [f"{EMBEDDING}.weight"]))
    suspect: str | None = None
    unequal: dict[str, list[int]] = {}
    for number, (stage, tensors) in enumerate(stages):
        full = {name: _whole(model, blocks, name) for name in tensors}
        copies = [name for name in tensors if not _same_copies(blocks, name, full[name], group.rank)]
        for rank, text in enumerate(group.share(f"{call}/copies/{stage}", json.dumps(copies))):
            for name in json.loads(text):
                unequal.setdefault(name, []).append(rank)
        function = None if judge is None else judge.stage
        found = share.step(stage, function, stage, full if judge is not None else {}, cotangent)
        suspect = suspect or found
        if judge is not None and progress is not None:
            progress(number + 1, len(stages))
    # of the first gradient that is wrong: what a sum over its holders would have been
    summands = None
    if suspect is not None:
        summands = _whole(model, blocks, suspect, every_holder=True)
    report = share.step("report", None if judge is None else judge.report, summands, unequal, norm)
    return VerifyReport.from_json(report)


def _all_runs(blocks: list[ParameterBlock], share: Shared, size: int) -> dict[str, tuple[int, list[tuple[int, int]]]]:
    """By tensor: the dimension it is divided along, and the runs that the same ranks hold."""
    own = [[block.name, block.dim, *block.globe] for block in blocks]
    edges: dict[str, tuple[int, set[int]]] = {}
    for text in share.group.share(f"{share.call}/blocks", json.dumps(own)):
        for name, dim, start, stop in json.loads(text):
            edges.setdefault(name, (dim, set()))[1].update((start, stop))
    return {name: (dim, list(pairwise(sorted(found)))) for name, (dim, found) in edges.items()}


def _whole(model: CausalLM, blocks: list[ParameterBlock], name: str, *, every_holder: bool = False) -> Tensor:
    """The gradient of a checkpoint tensor, each block from its owner (every_holder: summed over all of its holders)."""
    group = model.group
    mine = [block for block in blocks if block.name == name]
    full = torch.zeros(mine[0].global_shape, dtype=model.dtype, device=group.device)
    for block in mine:
        grad = block.parameter.grad
        if grad is not None and (every_holder or block.owner == group.rank):
            block.of_full(full).copy_(block.of(grad))
    if group.size == 1:
        return full
    return group.run("all_reduce", "verify.gradient", full, lambda transport, t: transport.all_reduce(t))


def _same_copies(blocks: list[ParameterBlock], name: str, full: Tensor, rank: int) -> bool:
    """This rank's copies of blocks that others own are theirs, but for rounding."""
    for block in blocks:
        if block.name == name and block.owner != rank:
            grad = torch.zeros_like(block.parameter) if block.parameter.grad is None else block.parameter.grad
            theirs = block.of_full(full).double()
            apart = torch.linalg.vector_norm(block.of(grad).double() - theirs)
            if not bool(apart <= 1e-5 * torch.linalg.vector_norm(full.double())):
                return False
    return True


class _Judge:
    """Rank 0's side."""

    def __init__(
        self,
        model: CausalLM,
        oracle: Oracle,
        sequences: Sequence[Sequence[int]],
        runs: dict[str, tuple[int, list[tuple[int, int]]]],
        written: list[Tensor],
    ) -> None:
        self.model, self.oracle, self.sequences, self.runs, self.written = model, oracle, sequences, runs, written
        self.lengths = [len(ids) for ids in sequences]
        scale = torch.finfo(model.dtype).eps / torch.finfo(torch.float32).eps
        self.limits = {name: limit * max(scale, 1e-8) for name, limit in LIMIT_FP32.items()}
        self.sites = site_names(model.config.num_hidden_layers)
        self.comparisons: list[Comparison] = []
        self.kept: list[Tensor] = []  # the stream before each layer, and the last
        self.gradient = torch.empty(0)  # of the stream
        self.of_head: Tensor | None = None  # of a tied weight, through the head
        self.squares = 0.0
        self.evidence: tuple[Tensor, Tensor] | None = None  # (ours, the oracle's) of the first wrong gradient
        self.wrong_run: tuple[str, int, int, int] | None = None  # where in which tensor, if it is a parameter's

    def forward(self) -> None:
        stream = self.oracle.embed(self.sequences)
        self.kept.append(stream)
        with torch.no_grad():
            for layer in range(self.model.config.num_hidden_layers):
                _, stream = self._layer(self.oracle.layer_weights(layer), layer, stream)
                self.kept.append(stream)

    def _layer(self, weights: dict[str, Tensor], layer: int, stream: Tensor) -> tuple[Tensor, Tensor]:
        """The stream after each of the layer's writes."""
        states = []
        for name in (ATTENTION, MLP):
            x = self.oracle.norm(stream, weights[f"{NORM_OF[name]}.weight"])
            stream = stream + self.oracle.sublayer(weights, layer, name, x, self.lengths)
            states.append(stream)
        return states[0], states[1]

    @torch.enable_grad()
    def stage(self, stage: str, ours: dict[str, Tensor], cotangent: Tensor) -> str | None:
        """One step backwards; the tensor whose gradient was the first wrong value so far, if it was a tensor's."""
        if stage == "head":
            self._head(ours, cotangent)
        elif stage == "embedding":
            self._embedding(ours)
        else:
            self._backward_layer(int(stage.removeprefix("layer ")), ours)
        return None if self.wrong_run is None else self.wrong_run[0]

    def _head(self, ours: dict[str, Tensor], cotangent: Tensor) -> None:
        stream = self.kept[-1].requires_grad_()
        norm = self.oracle.tensor(f"{FINAL_NORM}.weight").requires_grad_()
        head = self.oracle.tensor(self.oracle.head_name()).requires_grad_()
        logits = self.oracle.norm(stream, norm) @ head.mT
        self.gradient, of_norm, of_head = torch.autograd.grad(logits, (stream, norm, head), cotangent.to(logits))
        if self.model.config.tie_word_embeddings:
            self.of_head = of_head
        else:
            self._parameter(f"{HEAD}.weight", ours, of_head)
        self._parameter(f"{FINAL_NORM}.weight", ours, of_norm)
        self._stream(len(self.sites) - 1, self.gradient)

    def _backward_layer(self, layer: int, ours: dict[str, Tensor]) -> None:
        weights = {name: tensor.requires_grad_() for name, tensor in self.oracle.layer_weights(layer).items()}
        stream = self.kept.pop(layer).requires_grad_()
        middle, after = self._layer(weights, layer, stream)
        wanted = (stream, middle, *weights.values())
        self.gradient, of_middle, *of_weights = torch.autograd.grad(after, wanted, self.gradient)
        gradients = dict(zip(weights, of_weights, strict=True))

        def parameters(*parts: str) -> None:
            for name, gradient in gradients.items():
                if name.startswith(parts):
                    self._parameter(f"model.layers.{layer}.{name}", ours, gradient)

        parameters(MLP)
        parameters("mlp.gate", "mlp.up", NORM_OF[MLP])
        self._stream(2 * layer + 1, of_middle)
        parameters(ATTENTION)
        parameters("self_attn.q", "self_attn.k", "self_attn.v", NORM_OF[ATTENTION])
        self._stream(2 * layer, self.gradient)

    def _embedding(self, ours: dict[str, Tensor]) -> None:
        ids = torch.tensor([token for sequence in self.sequences for token in sequence], device=self.gradient.device)
        shape = (self.model.config.vocab_size, self.model.config.hidden_size)
        total = (
            torch.zeros(shape, dtype=self.gradient.dtype, device=self.gradient.device)
            if self.of_head is None
            else self.of_head
        )
        self._parameter(f"{EMBEDDING}.weight", ours, total.index_add(0, ids, self.gradient))

    def _stream(self, index: int, gradient: Tensor) -> None:
        """Of the stream after the write of this site."""
        value = self.written[index].to(gradient)
        found = difference(value, gradient, self.model.dtype)
        self._add(self.sites[index], "stream gradient", value, gradient, *vars(found).values())

    def _parameter(self, name: str, ours: dict[str, Tensor], gradient: Tensor) -> None:
        self.squares += float(gradient.square().sum())
        dim, runs = self.runs[name]
        whole = float(torch.linalg.vector_norm(gradient))
        for start, stop in runs:
            value = ours[name].narrow(dim, start, stop - start).to(gradient)
            reference = gradient.narrow(dim, start, stop - start)
            apart = (value - reference).abs()
            size = max(float(torch.linalg.vector_norm(reference)), _FLOOR * whole)
            error = float(torch.linalg.vector_norm(apart)) / size if float(apart.max()) else 0.0
            row, column = (
                divmod(int(apart.argmax()), reference.shape[-1]) if reference.dim() > 1 else (0, int(apart.argmax()))
            )
            ulp = float((apart / (reference.abs().clamp_min(1e-300) * torch.finfo(self.model.dtype).eps)).max())
            row, column = (row + start, column) if dim == 0 and reference.dim() > 1 else (row, column + start)
            label = name if len(runs) == 1 else f"{name}[{start}:{stop}]" if dim == 0 else f"{name}[:, {start}:{stop}]"
            first = self.evidence is None
            self._add(label, "gradient", value, reference, error, error, ulp, row, column)
            if first and self.evidence is not None:
                self.wrong_run = name, dim, start, stop

    def _add(self, module: str, quantity: str, value: Tensor, reference: Tensor, *found: Any) -> None:
        error, median, ulp, row, column = found
        error = error if error == error else float("inf")
        limit = self.limits[quantity]
        self.comparisons.append(Comparison(module, quantity, error, median, ulp, row, column, "max", limit, 0.0, 0.0))
        if error > limit and self.evidence is None:
            self.evidence = value, reference

    def report(self, summands: Tensor | None, unequal: dict[str, list[int]], norm: float) -> dict[str, Any]:
        reference = self.squares**0.5
        error = abs(norm - reference) / reference if reference else abs(norm)
        self._add("global gradient norm", "norm", torch.tensor(norm), torch.tensor(reference), error, error, 0.0, 0, 0)
        culprit = None
        if self.evidence is not None:
            wrong = next(c for c in self.comparisons if not c.within_limit)
            culprit = self._culprit(wrong, *self.evidence, summands)
        elif unequal:
            name = min(unequal, key=lambda each: list(self.runs).index(each))
            text = "its holders' gradients differ after the sync: they would part at the first optimizer step"
            culprit = Culprit(name, "ranks disagree", text, tuple(unequal[name]))
        if culprit is None:
            summary = f"pass: {len(self.comparisons)} gradients agree with the unsharded model; global norm {norm:.6g}"
        else:
            summary = f"fault: the first culprit is {culprit}"
        settings = {
            "tp": self.model.group.size,
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "sequence_parallel": self.model.sequence_parallel == "on",
            "boundary": next(iter(self.model.boundaries.values())).executor.name,
            "tokens": sum(self.lengths),
            "backward": True,
        }
        figures = {"global_norm": norm, "global_norm_reference": reference}
        verdict: Any = "pass" if culprit is None else "fault"
        return VerifyReport(verdict, summary, tuple(self.comparisons), culprit, settings, figures).as_json()

    def _culprit(self, wrong: Comparison, value: Tensor, reference: Tensor, summands: Tensor | None) -> Culprit:
        size = self.model.group.size
        if wrong.quantity == "norm":
            text = f"grad_norm() is {value.item():.8g}, that of the gradients {reference.item():.8g}, though every gradient agrees"
            return Culprit(wrong.module, "unknown", text)
        if summands is not None and self.wrong_run is not None:
            _, dim, start, stop = self.wrong_run
            summed = summands.narrow(dim, start, stop - start).to(reference)
            if float(torch.linalg.vector_norm(summed - reference)) <= 1e-3 * float(torch.linalg.vector_norm(reference)):
                return Culprit(
                    wrong.module, "missing reduction", "its holders have summands that sync_gradients did not sum"
                )
        factor, left = fitted_factor(value, reference)
        if left <= 1e-3 * float(torch.linalg.vector_norm(value.double())):
            for known, kind in ((size, "double reduction"), (1 / size, "wrong scale")):
                if size > 1 and abs(factor / known - 1) < 1e-3:
                    return Culprit(
                        wrong.module, kind, f"the {wrong.quantity} is {factor:.6g} times what it should be, tp={size}"
                    )
            return Culprit(wrong.module, "wrong scale", f"the {wrong.quantity} is {factor:.6g} times what it should be")
        return Culprit(
            wrong.module, "unknown", f"relative error {wrong.max_error:.2e}, least-squares factor {factor:.4g}"
        )
