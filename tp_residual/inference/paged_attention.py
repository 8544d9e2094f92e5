"""Who computes attention over keys and values that lie in blocks: a library's paged or packed kernel on CUDA, or SDPA sequence by sequence.

The compiled attention of the CPU keeps blocks of its own layout: see `compiled_cache`.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tp_residual.inference.scheduler import blocks_for
from tp_residual.model.attention_backend import HeadGroups, Span, TokenBatch, attend_sequence

logger = logging.getLogger("tp_residual")

_WORKSPACE_BYTES = 128 << 20  # what FlashInfer's documentation asks for
_FLASHINFER_HEAD_DIMS = (64, 128, 256)
# Of the greatest value of the same attention in fp64: 16-bit inputs are exact in both, and a result is rounded once or twice.
TRIAL_LIMIT = 0.02


@dataclass(frozen=True, eq=False)
class PagedPass:
    """Where the sequences of one pass lie. tables: the blocks of each cache row's sequence, in order."""

    tables: Int[Tensor, "rows blocks"]
    batch: TokenBatch
    block_size: int


class PagedAttention(Protocol):
    """Causal, scaled by 1/sqrt(head_dim); a query sees itself and the `window - 1` keys before it, or all of them."""

    name: str

    def begin(self, current: PagedPass) -> None:
        """Once before each pass."""
        ...

    def attend(
        self,
        keys: Float[Tensor, "blocks local_kv_heads block_size head_dim"],
        values: Float[Tensor, "blocks local_kv_heads block_size head_dim"],
        q: Float[Tensor, "tokens local_heads head_dim"],
        groups: HeadGroups,
        window: int | None,
    ) -> Float[Tensor, "tokens local_heads head_dim"]: ...


class SdpaAttention:
    """Each sequence's blocks gathered and attended as contiguous keys are: the same bits."""

    name = "SDPA on gathered blocks"

    def begin(self, current: PagedPass) -> None:
        self._pass = current

    def attend(self, keys: Tensor, values: Tensor, q: Tensor, groups: HeadGroups, window: int | None) -> Tensor:
        size, parts = self._pass.block_size, []
        for start, stop, row, context in self._pass.batch.spans:
            end = context + stop - start
            first = 0 if window is None else max(0, context - window + 1) // size  # older ones nobody sees
            blocks = self._pass.tables[row, first : blocks_for(end, size)]
            length = end - first * size
            k, v = (kept.index_select(0, blocks).transpose(0, 1).flatten(1, 2)[:, :length] for kept in (keys, values))
            parts.append(attend_sequence(q[start:stop], k, v, groups, window))
        return torch.cat(parts) if len(parts) > 1 else parts[0]


class VarlenAttention:
    """torch's variable-length attention: all sequences' keys gathered at once, one call for all.

    Its own paging needs another library registered with torch, which on most machines is not there.
    """

    name = "torch.nn.attention.varlen"

    def __init__(self, varlen_attn: Callable[..., Any]) -> None:
        self._varlen_attn = varlen_attn

    def begin(self, current: PagedPass) -> None:
        spans, device = current.batch.spans, current.tables.device
        queries, lengths = _lengths(spans)
        self._most = max(queries), max(lengths)
        total = sum(lengths)
        rows, counts = torch.tensor([[span.row for span in spans], lengths], device=device)
        self._queries, self._keys = (_starts(each).to(device, torch.int32) for each in (queries, lengths))
        # every place of every sequence, without a step in Python for each
        sequence = torch.repeat_interleave(counts, output_size=total)
        place = torch.arange(total, device=device) - self._keys[sequence]
        self._blocks = current.tables[rows[sequence], place // current.block_size].long()
        self._offsets = place % current.block_size

    def attend(self, keys: Tensor, values: Tensor, q: Tensor, groups: HeadGroups, window: int | None) -> Tensor:
        k, v = (kept[self._blocks, :, self._offsets] for kept in (keys, values))
        out = self._varlen_attn(
            _to_slots(q, groups), k, v, self._queries, self._keys, *self._most,
            window_size=(-1 if window is None else window - 1, 0), enable_gqa=True,
        )  # fmt: skip
        return _from_slots(out, groups)


class FlashInferAttention:
    """FlashInfer's paged attention for prompts, which serves single tokens as well: nothing is gathered."""

    name = "FlashInfer"

    def __init__(self, flashinfer: Any, device: torch.device) -> None:
        self._flashinfer = flashinfer
        self._workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._wrappers: dict[int | None, Any] = {}  # by window
        self._planned: set[int | None] = set()  # for the current pass

    def begin(self, current: PagedPass) -> None:
        spans, size, device = current.batch.spans, current.block_size, current.tables.device
        queries, lengths = _lengths(spans)
        used = [blocks_for(length, size) for length in lengths]
        rows, counts = torch.tensor([[span.row for span in spans], used], device=device)
        starts = _starts(used)
        sequence = torch.repeat_interleave(counts, output_size=sum(used))
        place = torch.arange(sum(used), device=device) - starts.to(device)[sequence]
        blocks = current.tables[rows[sequence], place].int()
        last = torch.tensor([(length - 1) % size + 1 for length in lengths], dtype=torch.int32)
        # it plans on the host: what it needs there starts there
        self._places = _starts(queries).int(), starts.int(), blocks, last
        self._block_size = size
        self._planned.clear()

    def attend(self, keys: Tensor, values: Tensor, q: Tensor, groups: HeadGroups, window: int | None) -> Tensor:
        if window not in self._wrappers:
            wrapper_class = self._flashinfer.BatchPrefillWithPagedKVCacheWrapper
            # one workspace for each: what is planned for one window would overwrite the other's plan
            shared = self._workspace if not self._wrappers else torch.empty_like(self._workspace)
            self._wrappers[window] = wrapper_class(shared, "HND")
        wrapper = self._wrappers[window]
        if window not in self._planned:
            wrapper.plan(
                *self._places, groups.kv_heads * groups.slots, groups.kv_heads, q.shape[-1], self._block_size,
                causal=True, window_left=-1 if window is None else window - 1,
                q_data_type=q.dtype, kv_data_type=keys.dtype,
            )  # fmt: skip
            self._planned.add(window)
        return _from_slots(wrapper.run(_to_slots(q, groups), (keys, values)), groups)


def choose_attention(groups: HeadGroups, head_dim: int, dtype: torch.dtype) -> PagedAttention:
    """The first that is present, takes such heads and passes a trial: FlashInfer, torch's variable-length attention, SDPA.

    Ranks may choose differently: each computes its own heads, and only sums of all are compared or kept.
    """
    device = groups.kv_of_query.device
    if device.type != "cuda":
        return SdpaAttention()
    refusals: list[str] = []
    for make in (_flashinfer, _varlen):
        try:
            attention = make(device, dtype, head_dim)
            error = trial_error(attention, groups, head_dim, dtype)
            if error < TRIAL_LIMIT:
                logger.info("attention: %s%s", attention.name, f" ({'; '.join(refusals)})" if refusals else "")
                return attention
            refusals.append(f"{attention.name} is wrong by {error:.1%} in a trial")
        except Exception as error:  # a library that does not build, load or run here is as good as absent
            refusals.append(str(error).splitlines()[0] if str(error) else type(error).__name__)
    logger.info("attention: %s (%s)", SdpaAttention.name, "; ".join(refusals))
    return SdpaAttention()


def trial_error(attention: PagedAttention, groups: HeadGroups, head_dim: int, dtype: torch.dtype) -> float:
    """Its largest error against SDPA in fp64, over the largest value: a piece of a prompt and a decode step, with a window and without."""
    draw, device, heads = torch.Generator().manual_seed(0), groups.kv_of_query.device, groups.kv_heads
    q, keys, values = (
        torch.randn(*shape, head_dim, generator=draw).to(device, dtype)
        for shape in ((4, len(groups.kv_of_query)), (6, heads, 16), (6, heads, 16))
    )
    tables = torch.tensor([[4, 1], [3, 0]], dtype=torch.int32, device=device)
    current = PagedPass(tables, TokenBatch.of([(1, 15, [0] * 3), (0, 5, [0])], device), 16)
    exact = SdpaAttention()
    attention.begin(current)
    exact.begin(current)
    errors = []
    for window in (None, 4):
        expected = exact.attend(keys.double(), values.double(), q.double(), groups, window)
        error = attention.attend(keys, values, q, groups, window).double() - expected
        errors.append(error.abs().max() / expected.abs().max())
    return float(torch.stack(errors).amax())  # NaN stays, and is below no limit


def _flashinfer(device: torch.device, dtype: torch.dtype, head_dim: int) -> PagedAttention:
    try:
        library = import_module("flashinfer")
    except ImportError:
        raise LookupError("FlashInfer is not installed") from None
    if dtype.itemsize != 2 or head_dim not in _FLASHINFER_HEAD_DIMS:
        raise LookupError(f"FlashInfer does not take {dtype} with head_dim={head_dim}")
    return FlashInferAttention(library, device)


def _varlen(device: torch.device, dtype: torch.dtype, head_dim: int) -> PagedAttention:
    try:
        varlen_attn = import_module("torch.nn.attention.varlen").varlen_attn
    except (ImportError, AttributeError):
        raise LookupError("this torch has no variable-length attention") from None
    if dtype.itemsize != 2:
        raise LookupError(f"torch.nn.attention.varlen does not take {dtype}")
    return VarlenAttention(varlen_attn)


def _lengths(spans: tuple[Span, ...]) -> tuple[list[int], list[int]]:
    """Tokens of this pass, and keys, of each sequence."""
    queries = [span.stop - span.start for span in spans]
    return queries, [span.context + count for span, count in zip(spans, queries, strict=True)]


def _starts(counts: list[int]) -> Int[Tensor, " counts_plus_1"]:
    return torch.tensor([0, *counts]).cumsum(0)


def _to_slots(q: Tensor, groups: HeadGroups) -> Tensor:
    """As many query heads for each KV head: what such kernels take."""
    return q if groups.even else q.index_select(1, groups.query_of_slot)


def _from_slots(out: Tensor, groups: HeadGroups) -> Tensor:
    return out if groups.even else out.index_select(1, groups.slot_of_query)
