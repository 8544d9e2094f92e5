"""Time of a collective by algorithm: one launch, a latency a step, and the bytes that cross a rank's link one way over its bandwidth.

`S` is the full buffer everywhere, as nccl-tests counts it; over N ranks:

| algorithm | all-reduce: steps, bytes | reduce-scatter or all-gather |
|---|---|---|
| one_shot (every rank reads all) | 1, S (N - 1) | 1, S (N - 1) / N: each rank reads its own rows |
| two_shot (reduce-scatter, then all-gather, direct) | 2, 2 S (N - 1) / N | as one_shot |
| ring | 2 (N - 1), 2 S (N - 1) / N | N - 1, S (N - 1) / N |
| multimem (the switch adds and replicates) | 2, S (1 + 1 / N) | 1, S (N - 1) / N |
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from tp_residual.plan.hardware import Hardware

Collective = Literal["all_reduce", "reduce_scatter", "all_gather"]


@dataclass(frozen=True)
class Link:
    """gb_s: attained, each way and rank."""

    gb_s: float
    latency_us: float
    algorithms: tuple[str, ...]

    @classmethod
    def within_node(cls, hardware: Hardware) -> "Link":
        assert hardware.link_gb_s is not None and hardware.link_latency_us is not None
        return cls(hardware.link_gb_s * hardware.link_efficiency, hardware.link_latency_us, hardware.algorithms)

    @classmethod
    def between_nodes(cls, hardware: Hardware, ranks_per_node: int) -> "Link":
        """For one rank: a GPU has its own port, ranks on cores share their node's. Rings, as the libraries run them over a network."""
        assert hardware.inter_node_gb_s is not None and hardware.inter_node_latency_us is not None
        rate = hardware.inter_node_gb_s * hardware.link_efficiency * hardware.share(ranks_per_node)
        return cls(rate, hardware.inter_node_latency_us, ("ring",))


def steps_and_bytes(collective: Collective, algorithm: str, nbytes: float, ranks: int) -> tuple[int, float]:
    """Steps, and bytes over a rank's link one way (the busier way)."""
    if ranks == 1:
        return 0, 0.0
    share = nbytes * (ranks - 1) / ranks
    if collective != "all_reduce":
        return (ranks - 1 if algorithm == "ring" else 1), share
    return {
        "one_shot": (1, nbytes * (ranks - 1)),
        "two_shot": (2, 2 * share),
        "ring": (2 * (ranks - 1), 2 * share),
        "multimem": (2, nbytes * (1 + 1 / ranks)),
    }[algorithm]


def wire_us(collective: Collective, nbytes: float, ranks: int, link: Link, algorithms: Iterable[str] = ()) -> float:
    """By the fastest of `algorithms` (the link's), without the launch."""
    return min(
        steps * link.latency_us + moved / link.gb_s / 1e3
        for steps, moved in (
            steps_and_bytes(collective, algorithm, nbytes, ranks) for algorithm in algorithms or link.algorithms
        )
    )


def collective_us(collective: Collective, nbytes: float, hardware: Hardware, nodes: int, ranks_per_node: int) -> float:
    """One call, its launch included.

    Over several nodes by levels: reduce-scatter within each node, the same shard over the nodes, all-gather within each node; ranks on
    cores, which then meet through the network alone, by one ring over all of them.
    """
    ranks = nodes * ranks_per_node
    if ranks == 1:
        return 0.0
    launch = hardware.launch_us
    if nodes == 1:
        return launch + wire_us(collective, nbytes, ranks, Link.within_node(hardware))
    between = Link.between_nodes(hardware, ranks_per_node)
    if hardware.cores is not None:
        return launch + wire_us(collective, nbytes, ranks, between)
    across = wire_us(collective, nbytes / ranks_per_node, nodes, between)
    if ranks_per_node == 1:
        return launch + across
    within = Link.within_node(hardware)
    parts: tuple[Collective, ...] = ("reduce_scatter", "all_gather") if collective == "all_reduce" else (collective,)
    return launch + across + sum(wire_us(part, nbytes, ranks_per_node, within) for part in parts)
