"""Is the sharded model the unsharded one? Every pre-norm state, every update and the logits against the oracle, on the same tokens.

Two questions are asked of each value. *How far has the run drifted?* compares it with the oracle's own run, and is judged by the limits of
`metrics`. *What did this module add to the drift?* gives the oracle our input of that module and compares its output alone: rounding
explains that to a few parts in a million whatever happened before, so the first module that fails here is the culprit, and errors that
exceed the limits without one are rounding that has grown.

Rank 0 runs the oracle; the others wait layer by layer and get the same report.
"""

import json
import random
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from os import PathLike
from typing import Any

import torch
from torch import Tensor

from tp_residual.checkpoint.files import CheckpointFiles
from tp_residual.errors import RequestError
from tp_residual.inference.loading import load_model
from tp_residual.model.config import ModelConfig
from tp_residual.model.decoder import CausalLM
from tp_residual.parallel.blocks import parameter_blocks
from tp_residual.parallel.group import TensorParallelGroup
from tp_residual.residual.boundary import Boundary
from tp_residual.verify.capture import ShardedRun, WholeRun, run_sharded, run_single
from tp_residual.verify.diagnose import (
    Evidence,
    audit_weights,
    diagnose_norm,
    diagnose_plain,
    diagnose_stream,
    diagnose_update,
)
from tp_residual.verify.dump import dump_run
from tp_residual.verify.metrics import (
    FEW_ROUNDINGS,
    LOCAL_RATIO,
    MEDIAN_RATIOS,
    MEDIAN_TOKENS,
    beyond_rounding,
    difference,
    limits,
    token_errors,
)
from tp_residual.verify.oracle import (
    EMBEDDING,
    HEAD,
    NORM_OF,
    Oracle,
    WeightSource,
    norm_names,
    read_tensor,
    site_names,
)
from tp_residual.verify.report import Comparison, Culprit, Verdict, VerifyReport

Progress = Callable[[int, int], None]


def verify(
    model_dir: str | PathLike[str],
    group: TensorParallelGroup,
    sequences: Sequence[Sequence[int]],
    *,
    text: bool,
    dtype: torch.dtype | None = None,
    stream_dtype: torch.dtype | None = None,
    sequence_parallel: str = "off",
    boundary: str = "auto",
    round_reduced: bool = False,
    layers: tuple[int, int] | None = None,
    progress: Progress | None = None,
) -> VerifyReport:
    """Load the model and verify it; options as in `load_model` and `verify_model`. All ranks call it alike and get the same report."""
    model, _ = load_model(
        model_dir,
        group,
        dtype=dtype,
        stream_dtype=stream_dtype,
        sequence_parallel=sequence_parallel,
        boundary=boundary,
        round_reduced=round_reduced,
    )
    weights = CheckpointFiles.open(model_dir)
    return verify_model(model, weights, sequences, text=text, layers=layers, progress=progress)


@torch.no_grad()
def verify_model(
    model: CausalLM,
    weights: WeightSource,
    sequences: Sequence[Sequence[int]],
    *,
    text: bool,
    layers: tuple[int, int] | None = None,
    dump: str | PathLike[str] | None = None,
    progress: Progress | None = None,
) -> VerifyReport:
    """weights: the checkpoint, as files or as a full state dict. text: of a language, not random ids (see `metrics.limits`).

    layers: `[first, last)` to judge; the oracle then starts from our own stream before the first. With 16-bit weights or stream,
    sequences are filled up with random ids to 256 tokens, which medians need. dump: a folder to write the run's states to (see `dump`).
    progress(layers done, layers): on rank 0.
    Raises RequestError on every rank for sequences or layers that the model does not have.
    """
    config, group = model.config, model.group
    first, last = check_layers(layers, config)
    sixteen = _sixteen(model)
    batch = [list(ids) for ids in sequences]
    check_sequences(batch, config)
    if sixteen:
        batch = fill_up(batch, config, MEDIAN_TOKENS)
    call = f"verify-{group.record.number}"
    group.require_agreement(f"tokens ({call})", {"sequences": zlib.crc32(repr((batch, layers, text)).encode())})
    run = run_sharded(model, batch)
    share = Shared(group, call)
    settings = _settings(model, run.boundary, batch, text, (first, last))
    if dump is not None:
        write = None if run.whole is None else partial(dump_run, dump, batch, run.whole.streams, model, run.boundary)
        share.step("dump", write)
    judge = None
    if run.whole is not None:
        judge = _Judge(model, run, run.whole, Oracle(config, weights, device=group.device), batch, text)
    if judge is not None:
        share.step("start", judge.start, sixteen, first)
    else:
        share.step("start")
    for layer in range(first, last):
        if judge is not None:
            share.step(f"layer {layer}", judge.layer, layer)
            if progress is not None:
                progress(layer - first + 1, last - first)
        else:
            share.step(f"layer {layer}")
    found = share.step("head", judge.finish, last) if judge is not None else share.step("head")
    culprit = None
    if found is not None:
        evidence = _gather_evidence(model, run, weights, **found)
        culprit = (
            share.step("culprit", judge.diagnose, evidence, **found) if judge is not None else share.step("culprit")
        )
    report = share.step("report", judge.report, culprit, settings) if judge is not None else share.step("report")
    return VerifyReport.from_json(report)


def check_layers(layers: tuple[int, int] | None, config: ModelConfig) -> tuple[int, int]:
    """The range of layers, all of them by default."""
    first, last = layers if layers is not None else (0, config.num_hidden_layers)
    if not 0 <= first < last <= config.num_hidden_layers:
        raise RequestError(
            f"layers {first}:{last} is not a range of the model's {config.num_hidden_layers} layers; "
            f"use 0:{config.num_hidden_layers} or a part of it"
        )
    return first, last


def check_sequences(sequences: Sequence[Sequence[int]], config: ModelConfig) -> None:
    """Raises RequestError for sequences that are none, empty, too long, or hold ids outside the vocabulary."""
    if not sequences or not all(sequences):
        raise RequestError("there is nothing to compare: give at least one sequence, each of at least one token")
    for index, ids in enumerate(sequences):
        if len(ids) > config.max_position_embeddings:
            raise RequestError(
                f"sequence {index} has {len(ids)} tokens, more than max_position_embeddings={config.max_position_embeddings}; shorten it"
            )
        if not 0 <= min(ids) <= max(ids) < config.vocab_size:
            raise RequestError(
                f"sequence {index} has token ids from {min(ids)} to {max(ids)}, outside the vocabulary of {config.vocab_size} ids"
            )


def random_sequences(tokens: int, config: ModelConfig, seed: int = 0) -> list[list[int]]:
    """`tokens` random ids, the same everywhere, in as few sequences as the model's positions allow."""
    generator, longest = random.Random(seed), config.max_position_embeddings
    lengths = [min(longest, tokens - start) for start in range(0, tokens, longest)]
    return [[generator.randrange(config.vocab_size) for _ in range(length)] for length in lengths]


def fill_up(sequences: list[list[int]], config: ModelConfig, tokens: int) -> list[list[int]]:
    missing = tokens - sum(map(len, sequences))
    return sequences if missing <= 0 else sequences + random_sequences(missing, config, seed=1)


def _sixteen(model: CausalLM) -> bool:
    return min(model.dtype.itemsize, next(iter(model.boundaries.values())).stream_dtype.itemsize) < 4


def _settings(
    model: CausalLM, boundary: Boundary, sequences: Sequence[Sequence[int]], text: bool, layers: tuple[int, int]
) -> dict[str, Any]:
    return {
        "tp": model.group.size,
        "device": str(model.group.device),
        "dtype": _spell(model.dtype),
        "stream_dtype": _spell(boundary.stream_dtype),
        "sequence_parallel": boundary.sequence_parallel,
        "boundary": boundary.executor.name,
        "round_reduced": boundary.round_reduced,
        "tokens": sum(map(len, sequences)),
        "sequences": len(sequences),
        "text": text,
        "layers": list(layers),
    }


def _spell(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class Shared:
    """Steps that rank 0 takes while the others wait for it, one time limit each; what it returns, everybody gets."""

    def __init__(self, group: TensorParallelGroup, call: str) -> None:
        self.group, self.call = group, call

    def step(self, name: str, function: Callable[..., Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        """function: on rank 0 only. Its result travels as JSON. An exception of it is raised there and a RuntimeError elsewhere."""
        error: Exception | None = None
        answer = ""
        if function is not None:
            try:
                answer = json.dumps({"result": function(*args, **kwargs)})
            except Exception as raised:
                error, answer = raised, json.dumps({"error": f"{type(raised).__name__}: {raised}"})
        told = json.loads(self.group.share(f"{self.call}/{name}", answer)[0])
        if error is not None:
            raise error
        if "error" in told:
            raise RuntimeError(f"rank 0 could not go on with verify ({name}): {told['error']}")
        return told["result"]


class _Judge:
    """Rank 0's side: the oracle's run beside ours, and what each module made of our own input."""

    def __init__(
        self,
        model: CausalLM,
        run: ShardedRun,
        ours: WholeRun,
        oracle: Oracle,
        sequences: list[list[int]],
        text: bool,
    ) -> None:
        self.model, self.run, self.ours, self.oracle = model, run, ours, oracle
        self.sequences, self.lengths = sequences, [len(ids) for ids in sequences]
        self.dtype, self.stream_dtype = model.dtype, run.boundary.stream_dtype
        self.sites = site_names(model.config.num_hidden_layers)
        self.norms = norm_names(model.config.num_hidden_layers)
        self.limits = limits(torch.promote_types(self.dtype, torch.float32), text=text)
        self.comparisons: list[Comparison] = []
        self.culprits: list[dict[str, Any]] = []
        self.baseline: WholeRun | None = None
        self.ratios: dict[str, float] = {}  # by quantity: the largest of our medians over tp=1's
        self.stream = torch.empty(0)
        self.wide_eps = torch.finfo(torch.promote_types(self.dtype, torch.float32)).eps

    # -- the steps

    def start(self, sixteen: bool, first: int) -> None:
        if sixteen:
            self.baseline = run_single(
                self.oracle,
                self.sequences,
                dtype=self.dtype,
                stream_dtype=self.stream_dtype,
                round_reduced=self.run.boundary.round_reduced,
            )
        self.stream = self.oracle.embed(self.sequences)
        if first == 0:
            # a lookup: exact but for the cast of the weights
            eps = torch.finfo(self.dtype).eps
            self._update(0, self.stream, self.stream, None, local_limit=eps)
            self._after(0, self.oracle.tensor(f"{self.norms[0]}.weight"))
        else:
            self.stream = self._wide(self.ours.streams[2 * first])

    def layer(self, layer: int) -> None:
        weights = self.oracle.layer_weights(layer)
        following = 2 * layer + 2
        for index, (name, norm) in enumerate(NORM_OF.items(), 2 * layer + 1):
            local, theirs = self._sublayer(weights, layer, name, index, self.ours), None
            if self.baseline is not None:
                theirs = self._sublayer(weights, layer, name, index, self.baseline)
            update = self.oracle.sublayer(
                weights, layer, name, self.oracle.norm(self.stream, weights[f"{norm}.weight"]), self.lengths
            )
            self.stream = self.stream + update
            self._update(index, update, local, theirs)
            inside = index < following
            scale = weights[f"{NORM_OF[self._sublayer_name(index + 1)]}.weight"] if inside else None
            self._after(index, self.oracle.tensor(f"{self.norms[index]}.weight") if scale is None else scale)

    def finish(self, last: int) -> dict[str, Any] | None:
        """The logits, and where the first culprit is."""
        if last == self.model.config.num_hidden_layers:
            head = self.oracle.tensor(self.oracle.head_name())
            final = self.oracle.norm(self.stream, self.oracle.tensor(f"{self.norms[-1]}.weight"))
            local = self._wide(self.ours.normed[-1]) @ head.mT
            theirs = None if self.baseline is None else self._wide(self.baseline.normed[-1]) @ head.mT
            logits = final @ head.mT
            limit = self._local_limit(None if self.baseline is None else (self.baseline.logits, theirs))
            self._compare(HEAD, "logits", len(self.sites), self.ours.logits, logits, local, limit)
        return self.culprits[0] if self.culprits else None

    def report(self, culprit: dict[str, Any] | None, settings: dict[str, Any]) -> dict[str, Any]:
        named = None if culprit is None else Culprit(**culprit | {"ranks": tuple(culprit["ranks"])})
        exceeded = [c for c in self.comparisons if not c.within_limit]
        verdict: Verdict = "fault" if named is not None else "rounding" if exceeded else "pass"
        if named is not None:
            summary = f"fault: the first culprit is {named}"
        elif exceeded:
            worst = exceeded[0]
            summary = (
                f"rounding: {len(exceeded)} values exceed their limit, {worst.quantity} of {worst.module} first, but every module computes "
                "from our own input what the unsharded one computes: the errors have grown, no module adds more than rounding; "
                "try --dtype float32, or text instead of random ids"
            )
        else:
            summary = f"pass: {len(self.comparisons)} values agree with the unsharded model"
        figures = {} if self.baseline is None else {"largest_median_ratio": self.ratios}
        return VerifyReport(verdict, summary, tuple(self.comparisons), named, settings, figures).as_json()

    # -- one value

    def _wide(self, x: Tensor) -> Tensor:
        return x.to(self.oracle.device, self.oracle.dtype)

    def _sublayer_name(self, index: int) -> str:
        return self.sites[index].split(".", 3)[3]

    def _sublayer(self, weights: Mapping[str, Tensor], layer: int, name: str, index: int, run: WholeRun) -> Tensor:
        return self.oracle.sublayer(weights, layer, name, self._wide(run.normed[index - 1]), self.lengths)

    def _local_limit(self, baseline: tuple[Tensor, Tensor | None] | None) -> float:
        """What rounding explains of one module. baseline: tp=1's value, and the oracle's from tp=1's input."""
        if baseline is None or baseline[1] is None:
            return self.limits["local"]
        value, reference = baseline[0], baseline[1]
        return max(LOCAL_RATIO * float(token_errors(self._wide(value), reference).max()), FEW_ROUNDINGS * self.wide_eps)

    def _update(
        self, index: int, update: Tensor, local: Tensor, theirs: Tensor | None, local_limit: float | None = None
    ) -> None:
        baseline = None if self.baseline is None else (self.baseline.updates[index], theirs)
        limit = self._local_limit(baseline) if local_limit is None else local_limit
        self._compare(self.sites[index], "update", index, self.ours.updates[index], update, local, limit)

    def _after(self, index: int, weight: Tensor) -> None:
        """The stream after the update, and what the next norm made of it: sums and roundings of known values, checked elementwise."""
        eps, ours = self.wide_eps, self.ours
        update = self._wide(ours.updates[index])
        before = self._wide(ours.streams[index - 1]) if index else torch.zeros_like(update)
        exact = before + update
        allowed = exact.abs() * _rounding(self.stream_dtype, eps)
        if self.run.boundary.round_reduced:
            allowed = allowed + update.abs() * _rounding(self.dtype, eps)
        norms = torch.linalg.vector_norm(before, dim=-1) + torch.linalg.vector_norm(update, dim=-1)
        beyond = beyond_rounding(self._wide(ours.streams[index]), exact, allowed, norms)
        self._compare(
            self.sites[index], "stream", index, ours.streams[index], self.stream, None, FEW_ROUNDINGS * eps, beyond
        )
        normed = self.oracle.norm(self._wide(ours.streams[index]), weight)
        roundings = 2 if self.model.config.weight_after_cast else 1
        allowed = normed.abs() * _rounding(self.dtype, eps) * roundings
        beyond = beyond_rounding(
            self._wide(ours.normed[index]), normed, allowed, torch.linalg.vector_norm(normed, dim=-1)
        )
        self._compare(
            self.norms[index],
            "normed",
            index,
            ours.normed[index],
            self.oracle.norm(self.stream, weight),
            None,
            FEW_ROUNDINGS * eps,
            beyond,
        )

    def _compare(
        self,
        module: str,
        quantity: str,
        index: int,
        value: Tensor,
        reference: Tensor,
        local: Tensor | None,
        local_limit: float,
        beyond: Tensor | None = None,
    ) -> None:
        found = difference(self._wide(value), reference, self.stream_dtype if quantity == "stream" else self.dtype)
        if beyond is None:
            assert local is not None
            beyond = token_errors(self._wide(value), local)
        judged, limit = self._limit(quantity, index, found.median_error, reference)
        comparison = Comparison(
            module,
            quantity,
            found.max_error,
            found.median_error,
            found.max_ulp,
            found.worst_token,
            found.worst_dimension,
            judged,
            limit,
            float(beyond.max()),
            local_limit,
        )
        self.comparisons.append(comparison)
        ranks = self.run.unequal[index].get(quantity, []) if index < len(self.sites) else []
        if not comparison.explained or ranks:
            self.culprits.append({"index": index, "quantity": quantity, "unequal": ranks})

    def _limit(self, quantity: str, index: int, median: float, reference: Tensor) -> tuple[Any, float]:
        if quantity == "normed":
            return "none", 0.0
        if self.baseline is None:
            return "max", self.limits[quantity]
        theirs = {
            "stream": self.baseline.streams,
            "update": self.baseline.updates,
            "logits": [self.baseline.logits] * (index + 1),
        }[quantity][index]
        base = float(token_errors(self._wide(theirs), reference).median())
        if base > 0:
            self.ratios[quantity] = max(self.ratios.get(quantity, 0.0), median / base)
        # a lookup at tp=1 has no error but that of the weights' cast, nor has ours
        return "median", max(MEDIAN_RATIOS[quantity] * base, FEW_ROUNDINGS * self.wide_eps)

    # -- the culprit

    def diagnose(self, evidence: "_Gathered", index: int, quantity: str, unequal: list[int]) -> dict[str, Any]:
        culprit = self._diagnose(evidence, index, quantity, unequal)
        return {
            "module": culprit.module,
            "kind": culprit.kind,
            "evidence": culprit.evidence,
            "ranks": list(culprit.ranks),
        }

    def _diagnose(self, gathered: "_Gathered", index: int, quantity: str, unequal: list[int]) -> Culprit:
        size, oracle, ours = self.model.group.size, self.oracle, self.ours
        module = HEAD if index == len(self.sites) else self.norms[index] if quantity == "normed" else self.sites[index]
        wrong = [(rank, *each) for rank, each in enumerate(gathered.weights) if each is not None]
        if wrong and quantity != "stream":
            ranks = tuple(rank for rank, _, _ in wrong)
            return Culprit(module, wrong[0][1], wrong[0][2], () if len(ranks) == size else ranks)
        noise = self._noise(module, quantity)
        if quantity == "logits":
            local = self._wide(ours.normed[-1]) @ oracle.tensor(oracle.head_name()).mT
            return diagnose_plain(module, self._wide(ours.logits), local, size, noise)
        if quantity == "normed":
            if unequal:
                return Culprit(
                    module, "ranks disagree", "the normed value is not rank 0's, bit for bit", tuple(unequal)
                )
            return diagnose_norm(module, oracle, self._wide(ours.streams[index]), self._wide(ours.normed[index]), noise)
        if quantity == "stream":
            found = diagnose_stream(module, gathered.evidence, _rounding(self.stream_dtype, self.wide_eps))
            if found.kind == "unknown" and unequal:
                return Culprit(module, "ranks disagree", "the stream is not rank 0's, bit for bit", tuple(unequal))
            return found
        if index == 0:
            return diagnose_plain(EMBEDDING, self._wide(ours.updates[0]), oracle.embed(self.sequences), size, noise)
        layer = (index - 1) // 2
        x = self._wide(ours.normed[index - 1])
        name = self._sublayer_name(index)
        return diagnose_update(oracle, self.model.layout, layer, name, x, self.lengths, gathered.evidence, noise)

    def _noise(self, module: str, quantity: str) -> float:
        limit = next(c.local_limit for c in self.comparisons if c.module == module and c.quantity == quantity)
        return min(limit, 0.5)


def _rounding(dtype: torch.dtype, wide_eps: float) -> float:
    """The largest relative error of one rounding to `dtype`, with room for the wide roundings before it."""
    return torch.finfo(dtype).eps / 2 * (1 + 1e-3) + wide_eps


@dataclass(frozen=True)
class _Gathered:
    """weights: by rank, what is wrong with its weights of the culprit module."""

    weights: list[tuple[str, str] | None]
    evidence: Evidence


def _gather_evidence(
    model: CausalLM, run: ShardedRun, source: WeightSource, *, index: int, quantity: str, unequal: list[int]
) -> "_Gathered":
    """Everything the ranks hold for the culprit's boundary. All ranks call it."""
    group, sites = model.group, site_names(model.config.num_hidden_layers)
    oracle = Oracle(model.config, source)

    def read(name: str) -> Tensor:
        return read_tensor(source, oracle.embedding_name() if name == f"{EMBEDDING}.weight" else name)

    if quantity == "logits":
        module = EMBEDDING if model.lm_head.tied else HEAD
    elif quantity == "normed":
        module = norm_names(model.config.num_hidden_layers)[index]
    else:
        module = sites[index] if index == 0 else sites[index].rpartition(".")[0]
    blocks = [block for block in parameter_blocks(model) if block.name.startswith(f"{module}.")]
    wrong = audit_weights(blocks, read, module, model.config.head_dim)
    call = f"verify-weights-{group.record.number}"
    weights = [json.loads(text) for text in group.share(call, json.dumps(wrong))]

    at = min(index, len(sites) - 1)
    seen, sharded = run.observed[at], run.boundary.sequence_parallel
    partials = _from_all(group, seen.partial)
    biases: list[Tensor | None] = [None] * group.size
    if seen.bias is not None:
        biases = list(_from_all(group, seen.bias))
    ranges = run.boundary.token_split(seen.partial.shape[0]).ranges
    whole = run.whole
    if sharded:
        # rank 0's whole stream has each rank's rows
        residuals = [] if whole is None else [whole.streams[at][slice(*rows)] for rows in ranges]
    else:
        residuals = list(_from_all(group, seen.residual))
    if whole is None:
        return _Gathered(weights, Evidence(partials, biases, residuals, ranges, None, None, seen.partial))
    before = whole.streams[at - 1] if at else None
    previous = None
    if at == 1:
        previous = whole.streams[0]
    elif at > 1:
        previous = whole.streams[at - 1].double() - whole.streams[at - 2].double()
    return _Gathered(weights, Evidence(partials, biases, residuals, ranges, before, previous, whole.updates[at]))


def _from_all(group: TensorParallelGroup, x: Tensor) -> list[Tensor]:
    if group.size == 1:
        return [x.cpu()]
    everything = group.run("all_gather", "verify.evidence", x[None], lambda transport, t: transport.all_gather(t))
    return list(everything.cpu())
