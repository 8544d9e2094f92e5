"""Two dumps of the same tokens, from runs of any tp size, layout, dtype or framework: where do they part ways?"""

from dataclasses import asdict, dataclass
from os import PathLike
from typing import Any

import torch

from tp_residual.errors import RequestError
from tp_residual.verify.dump import Dump, read_dump
from tp_residual.verify.metrics import difference, limits

# Two runs in 16 bits (or one, against fp32) are apart by rounding that grows over the layers. On the demo model a median over tokens
# reaches 0.03 in bf16 (eps 2^-7 = 0.0078); a fault in one layer gives 0.3 and more from there on.
_MEDIAN_EPS = 16.0


@dataclass(frozen=True)
class StateComparison:
    """One state of B against A's. sequence, position, dimension: the worst token and its worst element."""

    site: str
    max_error: float
    median_error: float
    max_ulp: float
    sequence: int
    position: int
    dimension: int
    rank_a: int  # who held that token's row; 0 where the stream was replicated
    rank_b: int
    value: float  # what is judged
    limit: float

    @property
    def agrees(self) -> bool:
        return self.value <= self.limit


@dataclass(frozen=True)
class CompareReport:
    """passed: every common state agrees. first: the site of the first that does not. only_a, only_b: states without a counterpart."""

    passed: bool
    summary: str
    first: str | None
    judged: str
    comparisons: tuple[StateComparison, ...]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    runs: tuple[dict[str, Any], dict[str, Any]]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def compare_dumps(
    directory_a: str | PathLike[str], directory_b: str | PathLike[str], *, limit: float | None = None
) -> CompareReport:
    """B judged against A. limit: of a token's relative error; by default what rounding explains in the coarser of the two dtypes.

    Raises RequestError for folders that are no dumps, or that hold other tokens, sizes or sites.
    """
    a, b = read_dump(directory_a), read_dump(directory_b)
    tokens = _common_tokens(a, b)
    dtypes = [getattr(torch, name) for info in (a.info, b.info) for name in (info.dtype, info.stream_dtype)]
    coarsest = max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)
    wide = torch.finfo(coarsest).eps <= torch.finfo(torch.float32).eps
    judged = "max" if wide else "median"
    if limit is None:
        # both runs round, and nobody said whether the tokens are text
        limit = 2 * limits(coarsest, text=False)["stream"] if wide else _MEDIAN_EPS * torch.finfo(coarsest).eps
    theirs = set(b.info.sites)
    common = [site for site in a.info.sites if site in theirs]
    comparisons = []
    for site in common:
        found = difference(b.state(site)[:tokens], a.state(site)[:tokens], coarsest)
        sequence, position = a.info.token_at(found.worst_token)
        comparisons.append(
            StateComparison(
                site,
                found.max_error,
                found.median_error,
                found.max_ulp,
                sequence,
                position,
                found.worst_dimension,
                _holder(a, found.worst_token),
                _holder(b, found.worst_token),
                found.max_error if wide else found.median_error,
                limit,
            )
        )
    first = next((index for index, each in enumerate(comparisons) if not each.agrees), None)
    if first is None:
        worst = max(comparisons, key=lambda each: each.value)
        summary = (
            f"pass: {len(common)} states agree; largest {judged} error of a token {worst.value:.2e} at {worst.site}"
        )
    else:
        each = comparisons[first]
        before = comparisons[first - 1].value if first else 0.0
        jump = f"{each.value / before:.3g} times the state before it" if before else "the states before it are equal"
        summary = (
            f"the runs part at {each.site}: {judged} error of a token {each.value:.2e} > {limit:.2e} ({jump}); worst in sequence "
            f"{each.sequence}, token {each.position}, dimension {each.dimension}"
        )
    return CompareReport(
        first is None,
        summary,
        None if first is None else comparisons[first].site,
        judged,
        tuple(comparisons),
        tuple(site for site in a.info.sites if site not in theirs),
        tuple(site for site in b.info.sites if site not in set(a.info.sites)),
        (_run(a), _run(b)),
    )


def _common_tokens(a: Dump, b: Dump) -> int:
    """How many rows to compare. One dump may have more sequences (verify fills up 16-bit runs); the common ones must be equal."""
    if a.info.hidden_size != b.info.hidden_size:
        raise RequestError(
            f"hidden_size={a.info.hidden_size} in {a.directory} differs from {b.info.hidden_size} in {b.directory}: two models"
        )
    count = min(len(a.info.sequences), len(b.info.sequences))
    ours, theirs = a.info.sequences[:count], b.info.sequences[:count]
    if ours != theirs:
        lengths = [list(map(len, sequences)) for sequences in (ours, theirs)]
        if lengths[0] != lengths[1]:
            detail = f"sequences of {lengths[0]} tokens against {lengths[1]}"
        else:
            detail = next(
                f"token {position} of sequence {index} is {one} against {other}"
                for index, pair in enumerate(zip(ours, theirs, strict=True))
                for position, (one, other) in enumerate(zip(*pair, strict=True))
                if one != other
            )
        raise RequestError(f"{a.directory} and {b.directory} hold other tokens: {detail}; dump both from the same ids")
    if not set(a.info.sites) & set(b.info.sites):
        raise RequestError(
            f"{a.directory} and {b.directory} have no site in common ({a.info.sites[0]}, ... and {b.info.sites[0]}, ...)"
        )
    return sum(map(len, ours))


def _holder(dump: Dump, row: int) -> int:
    return next((rank for rank, (start, stop) in enumerate(dump.info.token_ranges) if start <= row < stop), 0)


def _run(dump: Dump) -> dict[str, Any]:
    info = dump.info
    return {"directory": str(dump.directory), "framework": info.framework, "tp": info.tp, "layout": info.layout} | {
        "dtype": info.dtype,
        "stream_dtype": info.stream_dtype,
    }
