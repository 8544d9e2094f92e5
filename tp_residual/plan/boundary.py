"""Time of one boundary, which completes the owed sum, adds and normalises; and from how many tokens on a sharded stream is faster."""

from dataclasses import dataclass

from tp_residual.parallel.splits import Split
from tp_residual.plan.collectives import Link, collective_us, steps_and_bytes
from tp_residual.plan.hardware import Hardware

_MOST_TOKENS = 1 << 20


@dataclass(frozen=True)
class Placement:
    """tp ranks, as many on each node."""

    tp_size: int
    nodes: int

    @property
    def ranks_per_node(self) -> int:
        return self.tp_size // self.nodes


def memory_gb_s(hardware: Hardware, place: Placement) -> float:
    """What one rank reads and writes a second, all ranks at once."""
    return hardware.memory_gb_s * hardware.memory_efficiency * hardware.share(place.ranks_per_node)


def boundary_us(
    hardware: Hardware, place: Placement, tokens: int, token_bytes: int, *, sequence_parallel: bool
) -> float:
    """Of `[tokens, hidden]` with token_bytes a token: the faster of the fused kernel and of collectives with an add+norm between them."""
    launch, rate = hardware.launch_us, memory_gb_s(hardware, place)
    ranks, nbytes = place.tp_size, tokens * token_bytes
    if ranks == 1:
        return launch + _us(4 * nbytes, rate)  # update and residual in, residual and normed value out
    chunk = max(Split.ceil_chunks(tokens, ranks).sizes)
    if sequence_parallel:
        nbytes = chunk * ranks * token_bytes  # the tail is padded inside the collective
    if hardware.cores is not None and place.nodes == 1:
        return launch + _through_memory(hardware, ranks, nbytes, rate, sequence_parallel)
    where = hardware, place.nodes, place.ranks_per_node
    if sequence_parallel:
        norm = launch + _us(4 * chunk * token_bytes, rate)
        separate = collective_us("reduce_scatter", nbytes, *where) + norm + collective_us("all_gather", nbytes, *where)
    else:
        separate = collective_us("all_reduce", nbytes, *where) + launch + _us(4 * nbytes, rate)
    direct = [each for each in hardware.algorithms if each != "ring" and not (sequence_parallel and each == "one_shot")]
    if place.nodes > 1 or hardware.boundary == "separate" or not direct:
        return separate
    return min(separate, launch + _fused(Link.within_node(hardware), direct, ranks, nbytes, rate, sequence_parallel))


def _through_memory(hardware: Hardware, ranks: int, nbytes: float, rate: float, sequence_parallel: bool) -> float:
    """Ranks on cores of one node: every byte exchanged is the memory's. Passes over the buffer as `bench boundary` counts them."""
    assert hardware.link_latency_us is not None
    others, latency = (ranks - 1) / ranks, hardware.link_latency_us
    if sequence_parallel:
        return 2 * latency + _us((3 + 2 * others + 3 / ranks) * nbytes, rate)
    one_shot = latency + _us((5 + ranks - 1) * nbytes, rate)
    two_shot = 2 * latency + _us((5 + 2 * others + 1 / ranks) * nbytes, rate)
    return min(one_shot, two_shot)


def _fused(link: Link, algorithms: list[str], ranks: int, nbytes: float, rate: float, sequence_parallel: bool) -> float:
    """One kernel: bytes cross the link while others move in memory, so that the slower of the two counts.

    Replicated, each rank makes 4 passes over all rows; sharded, it reads its partial and writes normed rows (2), and residual in and out
    for its own rows (2 / N).
    """
    if sequence_parallel:
        steps, moved = min(steps_and_bytes("all_reduce", each, nbytes, ranks) for each in algorithms)
        return steps * link.latency_us + max(_us(moved, link.gb_s), _us((2 + 2 / ranks) * nbytes, rate))
    ways = [steps_and_bytes("all_reduce", each, nbytes, ranks) for each in algorithms]
    return min(steps * link.latency_us + max(_us(moved, link.gb_s), _us(4 * nbytes, rate)) for steps, moved in ways)


def _us(nbytes: float, gb_s: float) -> float:
    return nbytes / gb_s / 1e3


@dataclass(frozen=True)
class Crossover:
    """tokens: from this many on a pass is faster with a token-sharded stream, and not with one token less. None: never, for `reason`."""

    tokens: int | None
    reason: str


def crossover(hardware: Hardware, place: Placement, token_bytes: int, most_tokens: int = _MOST_TOKENS) -> Crossover:
    """Only boundaries differ between the two forms. Looked for among powers of two, then between two of them."""
    if place.tp_size == 1:
        return Crossover(None, "one rank has nothing to shard")

    def gain(tokens: int) -> float:
        tp, sp = (boundary_us(hardware, place, tokens, token_bytes, sequence_parallel=mode) for mode in (False, True))
        return tp - sp

    sizes = [1 << k for k in range(most_tokens.bit_length())]
    lost = [tokens for tokens in sizes if gain(tokens) <= 0]
    if lost and lost[-1] == sizes[-1]:
        return Crossover(None, _why_never(hardware, place, sizes[-1], token_bytes))
    if not lost:
        return Crossover(1, "faster at every size")
    low, high = lost[-1], 2 * lost[-1]
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if gain(middle) > 0 else (middle, high)
    return Crossover(high, "the norm on a share of the tokens saves more than the second collective's latency costs")


def _why_never(hardware: Hardware, place: Placement, tokens: int, token_bytes: int) -> str:
    tp, sp = (boundary_us(hardware, place, tokens, token_bytes, sequence_parallel=mode) for mode in (False, True))
    if sp <= tp * 1.01:
        return "the fused kernel moves as many bytes in both forms: sharding saves the stream's memory, not time"
    times = f"{tp / 1e3:.1f} ms replicated and {sp / 1e3:.1f} ms sharded"
    return f"at {tokens} tokens a boundary takes {times}: two collectives cost more than the norm saves"
