"""`x @ weight.T + bias` for inference on the CPU, with weights packed once in the order in which a kernel reads them.

Three forms, chosen by `packed_form`, once: `onednn`, torch's own pre-packed linear, where its bf16 has instructions; `panels`, compiled C++
(csrc/linear.cpp), elsewhere; and the plain linear, which any other dtype and device keeps. A row of a `panels` result depends neither on
the other rows nor on how features are split: the same token alone and in a crowd, to the bit.
"""

import ctypes
import functools
import mmap
from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from tp_residual.errors import UserError
from tp_residual.kernels import build
from tp_residual.kernels.native_time import counted
from tp_residual.kernels.recording import active

Form = Literal["panels", "onednn", "plain"]

PANEL_DTYPES = {torch.float32: 0, torch.bfloat16: 1}


class _Call(ctypes.Structure):
    """csrc/linear.cpp's LinearCall."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("packed", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("tokens", ctypes.c_int64),
        ("in_features", ctypes.c_int64),
        ("out_features", ctypes.c_int64),
        ("x_stride", ctypes.c_int64),
        ("y_stride", ctypes.c_int64),
        ("dtype", ctypes.c_int32),
        ("threads", ctypes.c_int32),
    )


class _PackCall(ctypes.Structure):
    _fields_ = (
        ("weight", ctypes.c_void_p),
        ("packed", ctypes.c_void_p),
        ("out_features", ctypes.c_int64),
        ("in_features", ctypes.c_int64),
        ("stride", ctypes.c_int64),
        ("dtype", ctypes.c_int32),
    )


def packed_form(device: torch.device, dtype: torch.dtype) -> tuple[Form, str]:
    """Which form linears of `dtype` take on `device`, and why: from what the machine can do, the same for every layer.

    On an AVX2 machine without bf16 instructions torch's bf16 linear reaches half of the memory's speed at one token and an eighth of the
    fp32 rate at many, and its oneDNN form is refused; with them, oneDNN's is the fastest there is. fp32 goes through panels wherever those
    are compiled: as fast as oneDNN's within some percent, and the same bits for a row in any batch.
    """
    if device.type != "cpu":
        return "plain", f"weights are packed for the CPU alone, and the device is {device.type}"
    if dtype not in PANEL_DTYPES:
        return "plain", f"no packed kernel for {str(dtype).removeprefix('torch.')}"
    if dtype == torch.bfloat16 and onednn_has_bf16():
        return "onednn", "oneDNN has bf16 instructions here"
    reason = build.unavailable()
    if reason is None and _functions() is not None:
        return "panels", "compiled for this CPU"
    if dtype == torch.float32:
        return "onednn", f"no panels: {reason or 'the CPU has neither AVX2 with FMA nor AVX-512'}"
    return "plain", reason or "the CPU has neither AVX2 with FMA nor AVX-512"


def onednn_has_bf16() -> bool:
    """Whether torch's pre-packed linear takes bf16 on this CPU. Its operators are torch's own and private: asked for, not assumed."""
    try:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    except (AttributeError, RuntimeError):
        return False


class PackedWeight:
    """A weight `[out_features, in_features]` in the order in which its kernel reads it. For inference: it has no gradient.

    form: `panels` or `onednn`. memory: where panels are put, `panel_elements` of the weight's dtype. Raises UserError for a weight that the
    form cannot take.
    """

    def __init__(self, weight: Tensor, form: Form, memory: Tensor | None = None) -> None:
        if weight.dim() != 2 or weight.device.type != "cpu" or (weight.stride(1) != 1 and weight.shape[1] > 1):
            raise UserError(
                f"a weight of shape {list(weight.shape)}, strides {list(weight.stride())} on {weight.device} cannot be packed; "
                "it must be [out_features, in_features] with contiguous rows on the CPU"
            )
        self.form, self.dtype = form, weight.dtype
        self.out_features, self.in_features = weight.shape
        self._like = torch.empty(1, dtype=weight.dtype).expand(1, self.out_features)
        if form == "onednn":
            self.data: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), None)
            self.nbytes = weight.numel() * weight.element_size()
            self.linear: Callable[[Tensor, Tensor | None], Tensor] = self._onednn
            return
        functions = _functions()
        if form != "panels" or functions is None or weight.dtype not in PANEL_DTYPES:
            raise UserError(f"form={form!r} does not take {weight.dtype} here; ask packed_form()")
        pack, self._run, _ = functions
        self._code = PANEL_DTYPES[weight.dtype]
        elements = panel_elements(weight)
        self.data = empty_on_huge_pages(elements, weight.dtype) if memory is None else memory
        assert self.data.shape == (elements,) and self.data.dtype == weight.dtype
        self._at = self.data.data_ptr()
        self.nbytes = self.data.numel() * self.data.element_size()
        call = _PackCall(weight.data_ptr(), self._at, self.out_features, self.in_features, weight.stride(0), self._code)
        pack(ctypes.addressof(call))
        self.linear = self._panels

    def _onednn(self, x: Tensor, bias: Tensor | None) -> Tensor:
        with counted("linear"):
            y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.data, bias, "none", [], "")
        return y

    def _panels(self, x: Tensor, bias: Tensor | None) -> Tensor:
        tokens, features = x.shape
        if (
            features != self.in_features
            or x.dtype is not self.dtype
            or (bias is not None and bias.dtype is not x.dtype)
        ):
            raise UserError(
                f"a packed weight of {self.in_features} input features in {self.dtype} got x {list(x.shape)} in {x.dtype}"
                + ("" if bias is None else f" and a bias in {bias.dtype}")
            )
        bias = None if bias is None else bias.contiguous()
        if features > 1 and x.stride(1) != 1:
            x = x.contiguous()
        y = torch.empty((tokens, self.out_features), dtype=x.dtype)
        call = _Call(
            x.data_ptr(),
            self._at,
            None if bias is None else bias.data_ptr(),
            y.data_ptr(),
            tokens,
            features,
            self.out_features,
            x.stride(0),
            self.out_features,
            self._code,
            torch.get_num_threads(),
        )
        self._run(ctypes.addressof(call))
        if (recording := active()) is not None:
            recording.add("linear", call, x, y, bias, self)
        return y


def panel_elements(weight: Tensor) -> int:
    """Of a weight's panels, the last one filled up."""
    functions = _functions()
    assert functions is not None, "ask packed_form()"
    return -(-weight.shape[0] // functions[2]) * functions[2] * weight.shape[1]


def linear(x: Tensor, weight: Tensor, packed: PackedWeight | None, bias: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias`, by the packed copy where there is one (the weight itself may then be gone)."""
    return F.linear(x, weight, bias) if packed is None else packed.linear(x, bias)


def empty_on_huge_pages(count: int, dtype: torch.dtype) -> Tensor:
    """An uninitialised `[count]` whose pages the kernel is asked to make huge: fewer of them to look up while it is streamed.

    Where the system knows no such thing it is ordinary memory. Its memory is its own mapping, given back when the tensor is freed.
    """
    nbytes = count * dtype.itemsize
    if nbytes < 4 << 20:  # below two huge pages there is nothing to gain
        return torch.empty(count, dtype=dtype)
    # private: pages that could be shared with a child are huge by another rule, mostly never
    mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            mapping.madvise(mmap.MADV_HUGEPAGE)
        except OSError:  # a kernel without them
            pass
    return torch.frombuffer(mapping, dtype=dtype, count=count)


@functools.cache
def _functions() -> tuple[Callable[[int], None], Callable[[int], None], int] | None:
    """tpr_pack_linear and tpr_linear of a call's address, and the features of a panel; None where this CPU has none."""
    library = build.library()
    library.tpr_linear_panel.restype = ctypes.c_int64
    panel = int(library.tpr_linear_panel())
    if not panel:
        return None
    for function in (library.tpr_pack_linear, library.tpr_linear):
        function.argtypes, function.restype = (ctypes.c_void_p,), None
    return library.tpr_pack_linear, library.tpr_linear, panel
