"""From the first value that rounding does not explain to the likely kind of fault.

Two sources of evidence, and nothing is guessed beyond them. `audit_weights` compares what a rank holds for the culprit module with the
checkpoint, element by element. Where the weights are right, each known fault predicts what the ranks would have computed from the same
input; a prediction is believed when it leaves almost nothing of the difference. What no prediction explains is "unknown", with the
least-squares factor as the only hint.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tp_residual.model.layout import ModelLayout
from tp_residual.parallel.blocks import ParameterBlock
from tp_residual.verify.metrics import fitted_factor
from tp_residual.verify.oracle import MLP, Oracle
from tp_residual.verify.report import Culprit

KINDS = (
    "missing reduction",
    "double reduction",
    "wrong scale",
    "stale residual",
    "update not added",
    "residual lost",
    "bias times tp",
    "missing bias",
    "wrong KV-head map",
    "swapped gate/up",
    "norm weight not offset",
    "norm weight offset twice",
    "norm weight missing",
    "weights shifted by a row",
    "another rank's share",
    "wrong weights",
    "ranks disagree",
    "unknown",
)

# A prediction explains a difference when it leaves less than this share of it, beyond what rounding leaves anyway.
EXPLAINED = 0.05
_MAX_FIT_ELEMENTS = (
    1 << 25
)  # of the least-squares problem over (query head, KV head) pairs: tokens are sampled above it


@dataclass(frozen=True)
class Evidence:
    """Of the culprit's boundary, on rank 0. By rank: partials (as the rank computed them), biases (or None), and for replicated streams
    the residuals. token_ranges: the rows each rank holds. before: the stream before the update, None at the embedding; previous: the
    update before that.
    """

    partials: list[Tensor]
    biases: list[Tensor | None]
    residuals: list[Tensor]
    token_ranges: tuple[tuple[int, int], ...]
    before: Tensor | None
    previous: Tensor | None
    total: Tensor  # the completed update


@dataclass(frozen=True)
class _Prediction:
    kind: str
    text: str
    value: Tensor


def _explanation(
    actual: Tensor, expected: Tensor, predictions: Sequence[_Prediction], noise: float
) -> tuple[_Prediction, float] | None:
    """The prediction that comes closest to `actual`, if it leaves little of `actual - expected`; ties go to the earlier one."""
    apart = float(torch.linalg.vector_norm(actual - expected))
    best: tuple[_Prediction, float] | None = None
    for prediction in predictions:
        left = float(torch.linalg.vector_norm(actual - prediction.value))
        if left - noise <= EXPLAINED * apart and (best is None or left < 0.5 * best[1] - noise):
            best = prediction, left
    return best


def _factor_kind(factor: float, size: int) -> tuple[str, str]:
    for value, kind, spelled in ((size, "double reduction", f"tp={size}"), (1 / size, "wrong scale", f"1/tp=1/{size}")):
        if size > 1 and abs(factor / value - 1) < 0.01:
            return kind, f"it is {spelled} times what it should be"
    return "wrong scale", f"it is {factor:.6g} times what it should be"


def _scaled(actual: Tensor, expected: Tensor, size: int) -> _Prediction:
    factor, _ = fitted_factor(actual, expected)
    return _Prediction(*_factor_kind(factor, size), factor * expected)


def _merge(found: list[tuple[int, str, str]], size: int) -> tuple[str, str, tuple[int, ...]]:
    """(rank, kind, text) of each wrong rank to one (kind, text, ranks): the kind of the first that has a name."""
    named = [each for each in found if each[1] != "unknown"] or found
    rank, kind, text = named[0]
    ranks = tuple(sorted({each[0] for each in found}))
    return (
        kind,
        text if len(ranks) == 1 or "rank" in text else f"rank {rank}: {text}",
        () if len(ranks) == size else ranks,
    )


# ---- the stream: what was added to it ----


def diagnose_stream(module: str, evidence: Evidence, noise_eps: float) -> Culprit:
    """The completed update is right and the stream after it is wrong: a fault of the boundary. noise_eps: one rounding of the stream."""
    size, total = len(evidence.partials), evidence.total.double()
    before = torch.zeros_like(total) if evidence.before is None else evidence.before.double()
    found = []
    for rank in range(size):
        rows = slice(*evidence.token_ranges[rank])
        after = evidence.residuals[rank].double()
        if after.numel() == 0:
            continue
        actual, update = after - before[rows], total[rows]
        noise = 2 * noise_eps * float(torch.linalg.vector_norm(after) + torch.linalg.vector_norm(before[rows]))
        if float(torch.linalg.vector_norm(actual - update)) <= noise + 1e-6 * float(torch.linalg.vector_norm(update)):
            continue
        bias = torch.zeros_like(total[:1]) if evidence.biases[0] is None else evidence.biases[0].double()[None]
        predictions = [
            _Prediction(
                "missing reduction",
                f"rank {rank} added its own summand, not the sum of {size}",
                evidence.partials[rank].double()[rows] + bias,
            ),
            _Prediction(
                "double reduction",
                f"it is the sum over {size} ranks of what was summed already",
                size * (update - bias) + bias,
            ),
            _Prediction("bias times tp", f"the bias counts {size} times", update + (size - 1) * bias),
            _Prediction("update not added", "the stream is the one before it", torch.zeros_like(update)),
            _Prediction("residual lost", "the stream is the update alone", update - before[rows]),
        ]
        if size == 1:
            predictions = predictions[3:]
        if evidence.previous is not None:
            text = "the update was added to the stream before the previous update"
            predictions.insert(3, _Prediction("stale residual", text, update - evidence.previous.double()[rows]))
        for other in range(size):
            if other != rank:
                value = evidence.partials[other].double()[rows] + bias
                predictions.append(_Prediction("missing reduction", f"rank {rank} added rank {other}'s summand", value))
        predictions.append(_scaled(actual, update, size))
        if bias.any():  # scaled before the bias joined
            kind, text, value = vars(_scaled(actual - bias, update - bias, size)).values()
            predictions.append(_Prediction(kind, f"before its bias, {text}", value + bias))
        explained = _explanation(actual, update, predictions, noise)
        found.append((rank, *_names(explained, actual, update)))
    if not found:
        return Culprit(module, "unknown", "the stream after it is wrong by a little more than rounding")
    return Culprit(module, *_merge(found, size))


def _names(explained: tuple[_Prediction, float] | None, actual: Tensor, expected: Tensor) -> tuple[str, str]:
    if explained is not None:
        apart = float(torch.linalg.vector_norm(actual - expected))
        return explained[0].kind, f"{explained[0].text}; explains {1 - explained[1] / apart:.2%} of the difference"
    factor, _ = fitted_factor(actual, expected)
    return "unknown", f"nothing known explains the difference; least-squares factor {factor:.4g}"


# ---- the update: what the sublayer computed ----


def diagnose_update(
    oracle: Oracle,
    layout: ModelLayout,
    layer: int,
    name: str,
    x: Tensor,
    lengths: Sequence[int],
    evidence: Evidence,
    noise: float,
) -> Culprit:
    """name: ATTENTION or MLP. x: the normed input that the ranks had. noise: relative error that rounding explains."""
    module, size = f"model.layers.{layer}.{name}", layout.tp_size
    weights = oracle.layer_weights(layer)
    x = x.to(oracle.device, oracle.dtype)
    bias = weights.get(f"{name}.bias")
    shares = [_share(oracle, weights, layout, layer, name, x, lengths, rank) for rank in range(size)]
    whole = sum(shares[1:], shares[0])
    found = []
    for rank, (partial, share) in enumerate(zip(evidence.partials, shares, strict=True)):
        actual = partial.to(oracle.device, oracle.dtype)
        room = noise * float(torch.linalg.vector_norm(share))
        if float(torch.linalg.vector_norm(actual - share)) <= room:
            continue
        predictions = []
        if size > 1:
            text = "the summand is the whole update already, and is summed again"
            predictions += [_Prediction("double reduction", text, whole)]
            if bias is not None:
                text = "each summand contains the bias"
                predictions += [
                    _Prediction("bias times tp", text, share + bias),
                    _Prediction("double reduction", "the summand is the whole update, with its bias", whole + bias),
                ]
        if name == MLP:
            features = range(*layout.intermediate.ranges[rank])
            text = "silu is applied to up_proj and not to gate_proj"
            predictions.append(_Prediction("swapped gate/up", text, oracle.mlp(weights, x, features, swapped=True)))
        for other in range(size):
            if other != rank:
                predictions.append(_Prediction("another rank's share", f"it is rank {other}'s", shares[other]))
        predictions.append(_scaled(actual, share, 1))
        explained = _explanation(actual, share, predictions, room)
        names = _names(explained, actual, share)
        if explained is None and name != MLP:
            names = _head_map(oracle, weights, layout, layer, x, lengths, rank, actual, share, room) or names
        found.append((rank, *names))
    if found:
        kind, text, ranks = _merge(found, size)
        return Culprit(module, kind, text, ranks)
    if bias is not None:
        summed = sum((p.to(oracle.device, oracle.dtype) for p in evidence.partials[1:]), evidence.partials[0].to(whole))
        added = evidence.total.to(whole) - summed
        factor, _ = fitted_factor(added, bias.expand_as(added))
        kind = "missing bias" if abs(factor) < 0.01 else "bias times tp" if abs(factor - size) < 0.01 else "unknown"
        return Culprit(module, kind, f"the summands are right; the bias counts {factor:.4g} times")
    return Culprit(module, "unknown", "each rank's summand is right, their sum is not")


def _share(
    oracle: Oracle,
    weights: dict[str, Tensor],
    layout: ModelLayout,
    layer: int,
    name: str,
    x: Tensor,
    lengths: Sequence[int],
    rank: int,
) -> Tensor:
    """What this rank's summand should be."""
    if name == MLP:
        return oracle.mlp(weights, x, range(*layout.intermediate.ranges[rank]))
    heads = layout.heads
    first = heads.key_value.ranges[rank][0]
    queries = range(*heads.query.ranges[rank])
    return oracle.attention(
        weights, layer, x, lengths, [(q, first + i) for q, i in zip(queries, heads.kv_index(rank), strict=True)]
    )


def _head_map(
    oracle: Oracle,
    weights: dict[str, Tensor],
    layout: ModelLayout,
    layer: int,
    x: Tensor,
    lengths: Sequence[int],
    rank: int,
    actual: Tensor,
    share: Tensor,
    room: float,
) -> tuple[str, str] | None:
    """Which KV head each query head has read: the (query, KV) contributions whose combination is `actual`, by least squares."""
    queries, key_values = range(*layout.heads.query.ranges[rank]), range(layout.heads.key_value.total)
    pairs = [(query, key_value) for query in queries for key_value in key_values]
    step = max(1, len(pairs) * share.numel() // _MAX_FIT_ELEMENTS)
    columns = [oracle.head(weights, layer, x, lengths, *pair)[::step].reshape(-1) for pair in pairs]
    matrix, wanted = torch.stack(columns, dim=1).double(), actual[::step].reshape(-1, 1).double()
    weight_of = torch.linalg.lstsq(matrix, wanted, driver="gelsd" if matrix.device.type == "cpu" else None).solution
    chosen = weight_of.view(len(queries), len(key_values)).argmax(dim=1).tolist()
    predicted = oracle.attention(weights, layer, x, lengths, list(zip(queries, chosen, strict=True)))
    first = layout.heads.key_value.ranges[rank][0]
    correct = [first + index for index in layout.heads.kv_index(rank)]
    text = f"query heads {queries.start}-{queries.stop - 1} read KV heads {chosen} instead of {correct}"
    explained = _explanation(actual, share, [_Prediction("wrong KV-head map", text, predicted)], room)
    return None if explained is None else _names(explained, actual, share)


# ---- norms, embedding, head ----


def diagnose_norm(module: str, oracle: Oracle, stream: Tensor, actual: Tensor, noise: float) -> Culprit:
    """stream: what the norm read, actual: what it returned."""
    weight = oracle.tensor(f"{module}.weight")
    x, actual = stream.to(oracle.device, oracle.dtype), actual.to(oracle.device, oracle.dtype)
    expected = oracle.norm(x, weight)
    predictions = [
        _Prediction("norm weight not offset", "it multiplied by weight - 1", oracle.norm(x, weight - 1)),
        _Prediction("norm weight offset twice", "it multiplied by weight + 1", oracle.norm(x, weight + 1)),
        _Prediction("norm weight missing", "it multiplied by 1", oracle.norm(x, torch.ones_like(weight))),
        _scaled(actual, expected, 1),
    ]
    room = noise * float(torch.linalg.vector_norm(expected))
    return Culprit(module, *_names(_explanation(actual, expected, predictions, room), actual, expected))


def diagnose_plain(module: str, actual: Tensor, expected: Tensor, size: int, noise: float) -> Culprit:
    """A linear map of a right input: the embedding, or the head."""
    actual, expected = actual.double(), expected.double()
    room = noise * float(torch.linalg.vector_norm(expected))
    return Culprit(
        module, *_names(_explanation(actual, expected, [_scaled(actual, expected, size)], room), actual, expected)
    )


# ---- weights ----


def audit_weights(
    blocks: Sequence[ParameterBlock], read: Callable[[str], Tensor], module: str, head_dim: int
) -> tuple[str, str] | None:
    """(kind, text) of the first of this rank's blocks that is not the checkpoint's, or None. read: a whole tensor by name."""
    siblings = {"gate_proj": "up_proj", "up_proj": "gate_proj"}
    for block in blocks:
        got = block.of(block.parameter.detach()).cpu()
        full = read(block.name).cpu()
        want = block.of_full(full).to(got.dtype)
        if torch.equal(got, want):
            continue
        short = block.name.removeprefix(f"{module}.")
        for mine, other in siblings.items():
            if f".{mine}." in block.name:
                swapped = block.of_full(read(block.name.replace(mine, other))).to(got.dtype)
                if torch.equal(got, swapped.cpu()):
                    return "swapped gate/up", f"{short} holds the checkpoint's {other}"
        if "norm" in block.name:
            for offset, kind in ((-1, "norm weight not offset"), (1, "norm weight offset twice")):
                if torch.allclose(
                    got.double(), want.double() + offset, rtol=0, atol=1e-2 * float(want.double().abs().max())
                ):
                    return kind, f"{short} is the checkpoint's {'minus' if offset < 0 else 'plus'} 1"
        length = got.shape[block.dim]
        for shift in (1, -1, 2, -2):
            kept = length - abs(shift)
            a, b = (got, want) if shift > 0 else (want, got)
            if kept > 0 and torch.equal(a.narrow(block.dim, 0, kept), b.narrow(block.dim, abs(shift), kept)):
                axis = "row" if block.dim == 0 else "column"
                return "weights shifted by a row", f"{short} is shifted by {shift} {axis} of the checkpoint's"
        if ".k_proj." in block.name or ".v_proj." in block.name:
            theirs = full.to(got.dtype).split(head_dim)
            held = [
                next((i for i, t in enumerate(theirs) if torch.equal(t, part)), None) for part in got.split(head_dim)
            ]
            if None not in held:
                first = block.globe[0] // head_dim
                meant = list(range(first, first + len(held)))
                return "wrong KV-head map", f"{short} holds KV heads {held} instead of {meant}"
        factor, left = fitted_factor(got, want)
        norm = float(torch.linalg.vector_norm(got.double()))
        if left <= 1e-2 * norm:
            return "wrong scale", f"{short} is {factor:.6g} times the checkpoint's"
        wrong = int((got != want).reshape(got.shape[0], -1).any(dim=1).sum())
        return "wrong weights", f"{wrong} of {got.shape[0]} rows of {short} are not the checkpoint's"
    return None
