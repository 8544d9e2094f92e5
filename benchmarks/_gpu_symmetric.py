"""The symmetric-memory kernels, with several ranks simulated in one launch, bit for bit against the contract."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from _gpu_operands import BF16, FP16, FP32, Setting, meaning, random, same_bits
from _gpu_record import Recorder
from torch import Tensor

from tp_residual.kernels.add_norm_operands import Operands
from tp_residual.kernels.contract import AddNormSpec, NormSpec
from tp_residual.kernels.symmetric_geometry import MAX_BLOCKS, Workspace
from tp_residual.kernels.symmetric_triton import REPORT_WORDS, STATE_WORDS, Peers, all_gather, simulate, simulated_peers

# TP: every rank has the whole residual. SP: a shard of it, and the normed value gathered or not.
FORMS = {
    "TP one-shot": dict(two_shot=False, sharded=False, gather=True),
    "TP two-shot": dict(two_shot=True, sharded=False, gather=True),
    "SP gathered": dict(two_shot=True, sharded=True, gather=True),
    "SP shard": dict(two_shot=True, sharded=True, gather=False),
}
PIECE_BYTES = 1 << 20  # so that a few hundred rows already take several launches
LIMIT_S = 2.0  # a meeting on one device takes microseconds


@dataclass(frozen=True)
class Request:
    """partial: dtype of the ranks' summands."""

    spec: AddNormSpec
    partial: torch.dtype
    hidden: int
    residual: bool = True
    bias: bool = False


REQUESTS = {
    "bf16": Request(AddNormSpec(BF16, BF16, NormSpec(1e-6)), BF16, 4096),
    "fp32 stream, bias": Request(AddNormSpec(FP32, BF16, NormSpec(1e-6, weight_offset=1.0)), BF16, 576, bias=True),
    "layer, no residual": Request(AddNormSpec(FP32, FP32, NormSpec(1e-5, "layer")), FP32, 100, residual=False),
    "rounded sum, weight after cast": Request(
        AddNormSpec(BF16, BF16, NormSpec(1e-5, weight_after_cast=True), round_update=BF16), BF16, 1, bias=True
    ),
    "fp16, no norm": Request(AddNormSpec(FP16, FP16), FP16, 2880),
}
SMALL_REQUEST = Request(AddNormSpec(BF16, BF16, NormSpec(1e-6)), BF16, 24, bias=True)


@dataclass(frozen=True)
class Call:
    """One call of all ranks, on the device: what goes in, and what the contract makes of it on the CPU and on the device.

    xs: `[world, tokens, hidden]`.
    """

    request: Request
    xs: Tensor
    operands: Operands  # the update is the rank-order sum
    expected: tuple[Tensor, Tensor | None]
    expected_on_cpu: tuple[Tensor, Tensor | None]

    @classmethod
    @lru_cache(maxsize=8)  # all forms are asked the same, and normal numbers on CPU take longer than the kernels
    def make(cls, request: Request, world: int, tokens: int, device: torch.device, seed: int) -> "Call":
        spec, hidden = request.spec, request.hidden
        # magnitudes far apart, so that the order of the sum shows
        scales = 10.0 ** torch.randint(-2, 3, (world, tokens, 1), generator=torch.Generator().manual_seed(seed))
        xs = (random(world, tokens, hidden, seed=10 * seed) * scales).to(request.partial)
        norm = spec.norm
        operands = Operands(
            random(tokens, hidden, seed=10 * seed + 1, dtype=spec.stream_dtype) if request.residual else None,
            rank_order_sum(xs),
            update_bias=random(hidden, seed=10 * seed + 2, dtype=request.partial) if request.bias else None,
            weight=None if norm is None else random(hidden, seed=10 * seed + 3, dtype=spec.output_dtype),
            norm_bias=random(hidden, seed=10 * seed + 4, dtype=spec.output_dtype)
            if norm and norm.kind == "layer"
            else None,
        )
        there = Operands(*(None if t is None else t.to(device) for t in operands))
        there = there._replace(update=rank_order_sum(xs.to(device)))
        return cls(request, xs.to(device), there, meaning(spec, there), meaning(spec, operands))

    def copy(self) -> "Call":
        """One whose operands may be written over."""
        operands = Operands(*(None if t is None else t.clone() for t in self.operands))
        return replace(self, xs=self.xs.clone(), operands=operands)

    def run(self, peers: Peers, form: str, max_blocks: int) -> tuple[Tensor, Tensor | None]:
        world, residual, options = peers.space.world, self.operands.residual, dict(FORMS[form])
        sharded = options["sharded"]
        if sharded and self.request.spec.norm is None:
            options["gather"] = False  # nothing travels back
        if residual is not None:
            residual = _shards(residual, world) if sharded else residual.expand(world, *residual.shape).contiguous()
        return simulate(
            peers, self.request.spec, self.xs, residual=residual, bias=self.operands.update_bias, weight=self.operands.weight,
            norm_bias=self.operands.norm_bias, max_blocks=max_blocks, **options,
        )  # fmt: skip

    def wrong(self, form: str, found: tuple[Tensor, Tensor | None]) -> str | None:
        for where, expected in (("the device", self.expected), ("CPU", self.expected_on_cpu)):
            pairs = zip(("stream", "normed"), found, expected, (True, form == "SP shard"), strict=True)
            for name, ours, theirs, sharded in pairs:
                if (ours is None) != (theirs is None):
                    return f"{name} is {'missing' if ours is None else 'too much'}"
                if ours is None or theirs is None:
                    continue
                world = ours.shape[0]
                theirs = theirs.to(ours.device)
                if sharded and FORMS[form]["sharded"]:
                    right = _shards(theirs, world)  # the last ranks' unused rows stay NaN
                else:
                    right = theirs.expand(world, *theirs.shape)
                if not same_bits(ours, right):
                    ranks = [rank for rank in range(world) if not same_bits(ours[rank], right[rank])]
                    return f"{name} differs from the contract on {where} on ranks {ranks}"
        return None

    def judge(self, peers: Peers, form: str, found: tuple[Tensor, Tensor | None], what: str) -> str | None:
        wrong = self.wrong(form, found)  # waits for the device
        if (expired := peers.expired()) is not None:
            wrong = f"{expired}; {wrong or 'the bits are right'}"
        shape = "{} ranks x {} x {}".format(*self.xs.shape)
        return None if wrong is None else f"{form}, {shape}, {what}: {wrong}"


def rank_order_sum(xs: Tensor) -> Tensor:
    total = xs[0].float()
    for x in xs[1:]:
        total = total + x.float()
    return total


def _shards(rows: Tensor, world: int) -> Tensor:
    """`[world, ceil(tokens / world), hidden]`, NaN beyond the last row."""
    chunk = -(-rows.shape[0] // world)
    padded = rows.new_full((world * chunk, rows.shape[1]), float("nan"))
    padded[: rows.shape[0]] = rows
    return padded.view(world, chunk, rows.shape[1])


def peers_of(world: int, setting: Setting) -> Peers:
    if setting.device.type == "cuda":
        return simulated_peers(world, setting.device, piece_bytes=PIECE_BYTES, limit_s=LIMIT_S)
    # simulated_peers pins host memory, which needs a GPU
    space = Workspace(world, PIECE_BYTES)
    memory = torch.zeros(world, space.nbytes, dtype=torch.uint8)
    table = memory.data_ptr() + torch.arange(world) * space.nbytes
    state, report = (torch.zeros(world, words, dtype=torch.int64) for words in (STATE_WORDS, REPORT_WORDS))
    return Peers(space, 0, table, state, report, int(LIMIT_S * 1e9), memory, world)


def most_blocks(world: int, setting: Setting) -> int:
    """Programs of each rank, such that those of all ranks run at the same time."""
    if setting.device.type != "cuda":
        return 2
    return min(MAX_BLOCKS, torch.cuda.get_device_properties(setting.device).multi_processor_count // world)


def check_symmetric(record: Recorder, setting: Setting) -> None:
    # the interpreter runs programs one after another, so a rank there can meet nobody but itself
    worlds = (1,) if setting.small else (2, 4, 8)
    with torch.no_grad():
        for world in worlds:
            for form in FORMS:
                record.check(f"{form}, {world} ranks", ragged(form, world, "bf16", setting))
        if not setting.small:
            record.check("TP one-shot, 3 ranks", ragged("TP one-shot", 3, "bf16", setting))
            record.check("SP gathered, 3 ranks", ragged("SP gathered", 3, "bf16", setting))
        for world in worlds:
            record.check(f"other requests, {world} ranks", other_requests(world, setting))
        for world in worlds:
            record.check(f"many epochs, {world} ranks", epochs(world, setting))
            record.check(f"all-gather, {world} ranks", gathers(world, setting))


def ragged(form: str, world: int, name: str, setting: Setting) -> Iterator[str | None]:
    """Fewer tokens than ranks, as many, uneven chunks, several launches."""
    request = SMALL_REQUEST if setting.small else REQUESTS[name]
    peers = peers_of(world, setting)
    for tokens in (1, 3) if setting.small else (1, world, world + 1, 33, 517):
        call = Call.make(request, world, tokens, setting.device, tokens)
        for blocks in (1, most_blocks(world, setting)):
            yield _outcome(call, peers, form, blocks)


def other_requests(world: int, setting: Setting) -> Iterator[str | None]:
    peers = peers_of(world, setting)
    for number, (name, request) in enumerate(list(REQUESTS.items())[1:]):
        if setting.small and request.hidden > 100:
            continue
        # all kinds of requests meet all forms, over the worlds
        forms = (
            list(FORMS) if setting.small else [list(FORMS)[(number + world) % 4], list(FORMS)[(number + world + 2) % 4]]
        )
        for form in forms:
            for tokens in (3,) if setting.small else (2, 45):
                call = Call.make(request, world, tokens, setting.device, number)
                wrong = _outcome(call, peers, form, most_blocks(world, setting))
                yield None if wrong is None else f"{name}: {wrong}"


def epochs(world: int, setting: Setting) -> Iterator[str | None]:
    """Calls of all forms and sizes in one workspace, launched behind each other without a wait: only the flags keep ranks apart."""
    request, peers = SMALL_REQUEST if setting.small else REQUESTS["bf16"], peers_of(world, setting)
    most = most_blocks(world, setting)
    calls = [Call.make(request, world, tokens, setting.device, 50 + tokens) for tokens in (1, 5, world + 1, 40)]
    for _ in range(1 if setting.small else 10):
        results = []
        for number in range(8 if setting.small else 100):
            call, form = calls[number % 4], list(FORMS)[(number + number // 4) % 4]
            results.append((number, call, form, call.run(peers, form, (most, 1, max(1, most // 2))[number % 3])))
        yield from (call.judge(peers, form, found, f"call {number}") for number, call, form, found in results)


def gathers(world: int, setting: Setting) -> Iterator[str | None]:
    peers = peers_of(world, setting)
    for length in (1, 130) if setting.small else (1, 4095, 4097, 300_000):
        generator = torch.Generator().manual_seed(length)
        x = torch.randint(-(2**31), 2**31 - 1, (world, length), dtype=torch.int32, generator=generator).to(
            setting.device
        )
        out = torch.zeros(world, world, length, dtype=torch.int32, device=setting.device)
        all_gather(peers, x, out, most_blocks(world, setting))
        right = torch.equal(out, x.expand(world, world, length))
        yield (
            None if right else f"{length} words from each of {world} ranks: {peers.expired() or 'they arrive changed'}"
        )


def _outcome(call: Call, peers: Peers, form: str, blocks: int) -> str | None:
    return call.judge(peers, form, call.run(peers, form, blocks), f"at most {blocks} programs a rank")
