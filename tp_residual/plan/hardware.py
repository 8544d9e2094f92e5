"""A machine in a dozen numbers: from a file, or from a preset of datasheet figures. Every field has its unit in its name.

Peaks are a datasheet's or a measurement's; `*_efficiency` is the part of a peak that is expected to be reached, 1 where the peak was
measured with the operation itself. One set of numbers serves every prediction: none is fitted to a point.
"""

import difflib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from tp_residual.bench.results import replace_file
from tp_residual.errors import RequestError

SOURCES = ("datasheet", "measured")
DTYPES = ("float32", "bfloat16", "float16")
ALGORITHMS = ("one_shot", "two_shot", "ring", "multimem")
BOUNDARIES = ("fused", "separate")

_POSITIVE = ("memory_gb", "memory_gb_s", "launch_us")
_OPTIONAL_POSITIVE = ("link_gb_s", "link_latency_us", "inter_node_gb_s", "inter_node_latency_us")
_EFFICIENCIES = ("memory_efficiency", "gemm_efficiency", "link_efficiency")
_RATES = ("gemm_tflops", "attention_tflops", "weight_gb_s")


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Nodes of equal devices. GB are 1e9 bytes, bandwidths one way.

    devices_per_node: GPUs, each a rank's own. cores: instead of them; the ranks of a node then share its cores, and memory_gb, memory_gb_s
    and the rates by dtype are those of the whole node with all cores busy.
    gemm_tflops: by dtype. attention_tflops: the same for attention, where it differs. weight_gb_s: at which a linear of one token reads
    its weights, where that is not memory_gb_s. launch_us: the fixed cost of one step of a layer (a kernel in a graph, an operator called
    from Python).
    link_gb_s, link_latency_us: between two devices of a node, each way and device; latency of one step of a collective. Ranks on cores
    exchange through memory, so they have a latency alone. None: not known, and no more than one rank a node can be predicted.
    algorithms: the collectives that run over the link. boundary: `fused` where sum, residual add and norm can be one kernel.
    inter_node_*: the same between nodes, for each GPU, or for the whole node of cores. None: one node.
    """

    name: str
    source: str
    memory_gb: float
    memory_gb_s: float
    gemm_tflops: Mapping[str, float]
    launch_us: float
    devices_per_node: int | None = None
    cores: int | None = None
    memory_efficiency: float = 1.0
    gemm_efficiency: float = 1.0
    attention_tflops: Mapping[str, float] = field(default_factory=dict)
    weight_gb_s: Mapping[str, float] = field(default_factory=dict)
    link_gb_s: float | None = None
    link_latency_us: float | None = None
    link_efficiency: float = 1.0
    algorithms: tuple[str, ...] = ()
    boundary: str = "separate"
    inter_node_gb_s: float | None = None
    inter_node_latency_us: float | None = None
    notes: str = ""

    def __post_init__(self) -> None:
        for name in ("name", "notes"):
            if not isinstance(getattr(self, name), str):
                raise RequestError(f"hardware {name}={getattr(self, name)!r} must be text")
        _one_of("source", self.source, SOURCES)
        _one_of("boundary", self.boundary, BOUNDARIES)
        for name in (*_POSITIVE, *_OPTIONAL_POSITIVE):
            if getattr(self, name) is not None or name in _POSITIVE:
                _require_positive(name, getattr(self, name))
        for name in _EFFICIENCIES:
            _require_positive(name, getattr(self, name))
            if getattr(self, name) > 1:
                raise RequestError(f"hardware {name}={getattr(self, name)} must be at most 1: it is a part of the peak")
        for name in _RATES:
            self._check_rates(name)
        if not self.gemm_tflops:
            raise RequestError("hardware gemm_tflops={} has no dtype; give at least one")
        self._check_places()

    def _check_rates(self, name: str) -> None:
        rates = getattr(self, name)
        if not isinstance(rates, Mapping):
            raise RequestError(f"hardware {name}={rates!r} must be an object by dtype")
        for dtype, rate in rates.items():
            _one_of(f"{name} dtype", dtype, DTYPES)
            _require_positive(f"{name}.{dtype}", rate)

    def _check_places(self) -> None:
        if (self.devices_per_node is None) == (self.cores is None):
            raise RequestError(
                f"hardware devices_per_node={self.devices_per_node} and cores={self.cores}: give one of them, GPUs or cores"
            )
        for name in ("devices_per_node", "cores"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise RequestError(f"hardware {name}={value!r} must be a whole number of at least 1")
        if not isinstance(self.algorithms, tuple):
            raise RequestError(f"hardware algorithms={self.algorithms!r} must be a list")
        for algorithm in self.algorithms:
            _one_of("algorithms entry", algorithm, ALGORITHMS)
        if self.cores is not None and (self.link_gb_s is not None or self.algorithms):
            raise RequestError(
                "hardware link_gb_s and algorithms mean nothing beside cores, whose ranks exchange through memory; leave them out"
            )
        link = {self.link_gb_s is None, self.link_latency_us is None, not self.algorithms}
        if self.cores is None and len(link) > 1:
            raise RequestError(
                f"hardware link_gb_s={self.link_gb_s}, link_latency_us={self.link_latency_us} and algorithms={list(self.algorithms)} "
                "belong together; give all of them or none"
            )
        if (self.inter_node_gb_s is None) != (self.inter_node_latency_us is None):
            raise RequestError(
                f"hardware inter_node_gb_s={self.inter_node_gb_s} and inter_node_latency_us={self.inter_node_latency_us} belong together"
            )

    @property
    def places_per_node(self) -> int:
        """The most ranks that a node can have."""
        return self.devices_per_node or self.cores or 1

    @property
    def kind(self) -> str:
        return "cores" if self.cores is not None else "GPUs"

    def share(self, ranks_per_node: int) -> float:
        """What part of memory_gb, memory_gb_s and the rates is one rank's."""
        return 1 / ranks_per_node if self.cores is not None else 1.0

    def require_dtype(self, dtype: str) -> None:
        if dtype not in self.gemm_tflops:
            raise RequestError(
                f"hardware {self.name} has no gemm_tflops for dtype {dtype}; use {', '.join(self.gemm_tflops)}, or a file that has it"
            )

    def origin(self) -> str:
        """What every output says of where these numbers come from."""
        if self.source == "measured":
            return "this machine, measured" if not self.notes else f"measured: {self.notes}"
        reached = ", ".join(
            f"{100 * getattr(self, name):.0f} % of {name.partition('_')[0]}"
            for name in _EFFICIENCIES
            if getattr(self, name) < 1
        )
        assumed = f" and assumed efficiencies ({reached}) and latencies" if reached else " and assumed latencies"
        return f"datasheet peaks{assumed}; nothing was measured" + (f". {self.notes}" if self.notes else "")

    def to_json(self) -> dict[str, Any]:
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    def write(self, path: str) -> None:
        replace_file(path, json.dumps(self.to_json(), indent=1, allow_nan=False) + "\n")

    @classmethod
    def load(cls, name_or_path: str) -> "Hardware":
        """A preset by its name, or a file. Raises RequestError for anything else, and for a file with a fault, naming the field."""
        if name_or_path in PRESETS:
            return PRESETS[name_or_path]
        try:
            content = json.loads(Path(name_or_path).read_text())
        except OSError as error:
            raise RequestError(
                f"--hardware {name_or_path} is no preset ({', '.join(PRESETS)}) and no file that can be read: {error.strerror}"
            ) from None
        except ValueError as error:
            raise RequestError(f"--hardware {name_or_path} is not JSON: {error}") from None
        try:
            return cls.from_json(content)
        except RequestError as error:
            raise RequestError(f"--hardware {name_or_path}: {error}") from None

    @classmethod
    def from_json(cls, content: Any) -> "Hardware":
        if not isinstance(content, dict):
            raise RequestError(f"{str(content)[:40]!r} is not an object of hardware fields")
        known = {each.name: each for each in fields(cls)}
        for name in content:
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                raise RequestError(
                    f"unknown field {name!r}"
                    + (f"; did you mean {near[0]}?" if near else f"; fields: {', '.join(known)}")
                )
        missing = [name for name in _REQUIRED if name not in content]
        if missing:
            raise RequestError(
                f"field {missing[0]} is missing" + (f", and {', '.join(missing[1:])}" * (len(missing) > 1))
            )
        values = dict(content)
        if isinstance(values.get("algorithms"), list):
            values["algorithms"] = tuple(values["algorithms"])
        return cls(**values)


_REQUIRED = ("name", "source", "memory_gb", "memory_gb_s", "gemm_tflops", "launch_us")


def _one_of(name: str, value: object, choices: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in choices:
        raise RequestError(f"hardware {name}={value!r} is not one of {', '.join(choices)}")


def _require_positive(name: str, value: object) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not (0 < value < math.inf):  # type: ignore[operator]
        raise RequestError(f"hardware {name}={value!r} must be a finite number above 0")


# What a GPU preset assumes beside its datasheet: 90 % of the memory's peak is what add+norm kernels reach on H100, 75 % of the link's lies
# between kernels over peers' memory (58-73 %) and NCCL's ring (82 %), 65 % of the matrix peak is what large bf16 products reach under a
# power limit; a kernel of a graph costs 4 us, a step of a collective 2.5 us over NVLink. Judged from published timings of H100 and A100.
_GPU: dict[str, Any] = {
    "source": "datasheet", "launch_us": 4.0, "memory_efficiency": 0.9, "gemm_efficiency": 0.65, "link_efficiency": 0.75,
    "devices_per_node": 8, "link_latency_us": 2.5, "algorithms": ("one_shot", "two_shot", "ring"), "boundary": "fused",
    "inter_node_gb_s": 50.0, "inter_node_latency_us": 8.0,
}  # fmt: skip
_HOPPER = {"bfloat16": 989.0, "float16": 989.0, "float32": 67.0}

PRESETS: dict[str, Hardware] = {
    preset.name: preset
    for preset in (
        Hardware(
            **_GPU
            | {
                "name": "a100-nvlink",
                "memory_gb": 80.0,
                "memory_gb_s": 2039.0,
                "link_gb_s": 300.0,
                "inter_node_gb_s": 25.0,
            },
            gemm_tflops={"bfloat16": 312.0, "float16": 312.0, "float32": 19.5},
            notes="A100 80 GB SXM; one 200 Gb/s port a GPU",
        ),
        Hardware(
            **_GPU | {"name": "h100-nvlink", "memory_gb": 80.0, "memory_gb_s": 3350.0, "link_gb_s": 450.0},
            gemm_tflops=_HOPPER,
            notes="H100 SXM; one 400 Gb/s port a GPU",
        ),
        Hardware(
            **_GPU | {"name": "h200-nvlink", "memory_gb": 141.0, "memory_gb_s": 4800.0, "link_gb_s": 450.0},
            gemm_tflops=_HOPPER,
            notes="H200 SXM; one 400 Gb/s port a GPU",
        ),
        Hardware(
            **_GPU | {"name": "b200-nvlink", "memory_gb": 180.0, "memory_gb_s": 8000.0, "link_gb_s": 900.0},
            gemm_tflops={"bfloat16": 2250.0, "float16": 2250.0, "float32": 75.0},
            notes="B200 of an eight-GPU board, dense rates; one 400 Gb/s port a GPU",
        ),
        Hardware(
            # over PCIe a peer's memory is not addressed by our kernels: NCCL's ring and a separate add+norm
            **_GPU
            | {"name": "l40s-pcie", "memory_gb": 48.0, "memory_gb_s": 864.0, "link_gb_s": 32.0, "link_latency_us": 5.0}
            | {"algorithms": ("ring",), "boundary": "separate", "inter_node_gb_s": 25.0},
            gemm_tflops={"bfloat16": 362.0, "float16": 362.0, "float32": 91.6},
            notes="L40S, PCIe 4.0 x16; one 200 Gb/s port a GPU",
        ),
        Hardware(
            name="cpu-2core",
            source="datasheet",
            cores=2,
            memory_gb=16.0,
            memory_gb_s=51.2,
            memory_efficiency=0.75,
            # two cores at 3 GHz, two 8-wide FMA units each; 16-bit operands are widened to fp32 and run at its rate
            gemm_tflops={"float32": 0.192, "bfloat16": 0.192},
            gemm_efficiency=0.6,
            launch_us=10.0,
            link_latency_us=10.0,
            boundary="fused",
            inter_node_gb_s=1.25,
            inter_node_latency_us=100.0,
            notes="two AVX2 cores at 3 GHz, two channels of DDR4-3200, 10 Gb/s Ethernet",
        ),
    )
}
