"""CUDA ranks that read each other's memory: a wire of our own kernels over torch symmetric memory.

Nothing here waits on the host after `open_symmetric`, so that calls can be captured in a CUDA graph. All calls of one transport go to one
stream, in the same order on all ranks, as those of a process group do.
"""

import torch
import torch.distributed._symmetric_memory as symmetric_memory
import triton
from torch import Tensor

from tp_residual.errors import CollectiveError, UserError
from tp_residual.kernels import symmetric_geometry as geometry
from tp_residual.kernels.contract import AddNormSpec
from tp_residual.kernels.symmetric_triton import REPORT_WORDS, STATE_WORDS, Peers, all_gather, reduce_add_norm
from tp_residual.kernels.triton_rows import DTYPES
from tp_residual.parallel.group import TensorParallelGroup
from tp_residual.parallel.transport import Transport, require_chunks

_FLAT_ROW = 4096  # elements, for inputs without rows of their own
_MEETING_SHARE = (
    0.8  # of the group's limit: the kernel's report, which names the peer, comes before the watchdog ends the process
)


class SymmetricTransport:
    """Sums in rank order, in fp32, rounded once to the input's dtype: fp32, bf16 and fp16. A gather takes any dtype.

    What the kernels do not take (other dtypes, all_to_all, broadcast) goes to `library`. crossover_bytes: inputs above it are summed in
    two steps (see `geometry.crossover_bytes`), the same bits.
    """

    def __init__(self, peers: Peers, library: Transport, *, crossover_bytes: float) -> None:
        self.peers, self.library, self.crossover_bytes = peers, library, crossover_bytes
        self.size, self.rank = peers.space.world, peers.rank

    def all_reduce(self, x: Tensor) -> Tensor:
        if x.dtype not in DTYPES:
            return self.library.all_reduce(x)
        if not x.numel():
            return x.clone()
        total, _ = self.reduce_add_norm(AddNormSpec(x.dtype, x.dtype), _rows(x))
        return total.view(-1)[: x.numel()].view(x.shape)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        if x.dtype not in DTYPES:
            return self.library.reduce_scatter(x)
        require_chunks("reduce_scatter", x, self.size)
        out = x.new_empty((x.shape[0] // self.size, *x.shape[1:]))
        if not x.numel():
            return out
        pieces = [_rows(piece) for piece in x.chunk(self.size)]
        total, _ = self.reduce_add_norm(
            AddNormSpec(x.dtype, x.dtype), torch.cat(pieces), local_tokens=pieces[0].shape[0]
        )
        return total.view(-1)[: out.numel()].view(out.shape)

    def all_gather(self, x: Tensor) -> Tensor:
        self.check()
        shape = (x.shape[0] * self.size, *x.shape[1:])
        if not x.numel():
            return x.new_empty(shape)
        nbytes = x.numel() * x.element_size()
        data = x.reshape(-1).view(torch.uint8)
        if nbytes % 4:
            data = torch.nn.functional.pad(data, (0, -nbytes % 4))
        words = data.view(torch.int32)
        out = words.new_empty((self.size, words.numel()))
        all_gather(self.peers, words, out)
        if nbytes % 4:
            return out.view(torch.uint8)[:, :nbytes].contiguous().view(x.dtype).view(shape)
        return out.view(-1).view(x.dtype).view(shape)

    def all_to_all(self, x: Tensor) -> Tensor:
        return self.library.all_to_all(x)

    def broadcast(self, x: Tensor, root: int) -> Tensor:
        return self.library.broadcast(x, root)

    def reduce_add_norm(
        self,
        spec: AddNormSpec,
        x: Tensor,
        *,
        local_tokens: int | None = None,
        gather: bool = True,
        residual: Tensor | None = None,
        bias: Tensor | None = None,
        weight: Tensor | None = None,
        norm_bias: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """`contract.add_norm(spec, residual, rank-order sum of x, update_bias=bias, ...)` in one launch.

        x: `[tokens, hidden]` on each rank, contiguous. local_tokens: None for a replicated residual `[tokens, hidden]`; otherwise how many
        rows of the residual, in chunks of ceil(tokens / size), this rank has, and the normed value is gathered or not.
        """
        self.check()
        tokens, hidden = x.shape
        if hidden > geometry.MAX_HIDDEN:
            raise UserError(
                f"hidden={hidden} is above the {geometry.MAX_HIDDEN} that fit in registers; use --boundary reference or library"
            )
        sharded = local_tokens is not None
        kept = tokens if local_tokens is None else local_tokens
        itemsize = max(x.element_size(), spec.stream_dtype.itemsize, spec.output_dtype.itemsize)
        two_shot = sharded or x.numel() * x.element_size() > self.crossover_bytes
        shape = geometry.row_geometry(tokens, hidden, itemsize, self.peers.space, two_shot=two_shot)
        stream = x.new_empty((kept, hidden), dtype=spec.stream_dtype)
        normed = None
        if spec.norm is not None:
            normed = x.new_empty((tokens if gather else kept, hidden), dtype=spec.output_dtype)
        reduce_add_norm(
            self.peers, shape, spec, x, stream, normed, sharded=sharded, gather=gather and normed is not None,
            residual=residual, bias=bias, weight=weight, norm_bias=norm_bias,
        )  # fmt: skip
        return stream, normed

    def check(self) -> None:
        """Raises CollectiveError once a meeting of an earlier call has expired: who waited for whom. Does not wait for the device."""
        if (why := self.peers.expired()) is not None:
            raise CollectiveError(f"{why}; every result since is NaN")


def open_symmetric(
    group: TensorParallelGroup, *, crossover_bytes: float | None = None, piece_bytes: int = geometry.PIECE_BYTES
) -> SymmetricTransport | str:
    """A transport over the group's own process group, or the reason why there is none: the same answer on every rank.

    Called by all ranks, once in a group's life. Takes `geometry.Workspace(size, piece_bytes).nbytes` of device memory. Raises UserError
    when the ranks differ in what shapes their launches: program versions, sizes, crossover.
    """
    if crossover_bytes is None:
        crossover_bytes = geometry.crossover_bytes(group.size)
    if reason := _refusal(group.share("symmetric: possible", _local_reason(group))):
        return reason
    space = geometry.Workspace(group.size, piece_bytes)
    reason, memory, handle, addresses, offset = "", None, None, [0] * group.size, 0
    assert group.process_group is not None
    try:
        with torch.cuda.device(group.device):
            memory = symmetric_memory.empty(space.nbytes, dtype=torch.uint8, device=group.device).zero_()
            handle = symmetric_memory.rendezvous(memory, group.process_group)
            torch.cuda.synchronize()  # no peer may set a flag that would then be zeroed
        # the table holds where allocations start, which may be before the tensor
        offset = memory.data_ptr() - handle.buffer_ptrs[group.rank]
        addresses = [address + offset for address in handle.buffer_ptrs]
    except RuntimeError as error:
        reason = f"no peer access: {str(error).strip().splitlines()[0]}"
    if reason := _refusal(group.share("symmetric: mapped", reason)):
        return reason
    group.require_agreement(
        "symmetric memory",
        {
            "triton": triton.__version__,
            "crossover_bytes": crossover_bytes,
            "workspace": space,
            "offset": offset,
            "geometry": [
                geometry.row_geometry(tokens, 4096, 2, space, two_shot=two_shot)
                for tokens in (1, 100, 10_000)
                for two_shot in (False, True)
            ],
        },
    )
    peers = Peers(
        space,
        group.rank,
        torch.tensor(addresses, dtype=torch.int64, device=group.device),
        torch.zeros(STATE_WORDS, dtype=torch.int64, device=group.device),
        torch.zeros(REPORT_WORDS, dtype=torch.int64, pin_memory=True),
        int(_MEETING_SHARE * group.limits.seconds * 1e9),
        (memory, handle),
    )
    assert group.transport is not None
    return SymmetricTransport(peers, group.transport, crossover_bytes=crossover_bytes)


def _local_reason(group: TensorParallelGroup) -> str:
    if group.device.type != "cuda":
        return f"its device is {group.device}, not a CUDA device"
    if group.process_group is None:
        return "it has no process group of its own"
    if group.size > geometry.MAX_WORLD:
        return f"{group.size} ranks are more than {geometry.MAX_WORLD}"
    if len({process.host for process in group.processes}) > 1:
        return "the ranks are not on one host"
    units = torch.cuda.get_device_properties(group.device).multi_processor_count
    if units < geometry.MAX_BLOCKS:
        return f"{units} multiprocessors are fewer than the {geometry.MAX_BLOCKS} programs that wait at the same time"
    return ""


def _refusal(reasons: list[str]) -> str | None:
    return next((f"rank {rank}: {reason}" for rank, reason in enumerate(reasons) if reason), None)


def _rows(x: Tensor) -> Tensor:
    """`x` as rows that fit in registers: its own last dimension, or zero-padded rows of a fixed length."""
    if x.dim() > 1 and 0 < x.shape[-1] <= geometry.MAX_HIDDEN:
        return x.reshape(-1, x.shape[-1])
    flat = x.reshape(-1)
    width = min(_FLAT_ROW, max(1, flat.numel()))
    return torch.nn.functional.pad(flat, (0, -flat.numel() % width)).view(-1, width)
