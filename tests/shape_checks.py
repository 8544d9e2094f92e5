"""Checks the shapes in signatures while the tests run. Import it before the package's modules; ranks preload it
(conftest.py).

jaxtyping keeps the sizes of one call; the checker handed to it looks at tensors only. beartype would refuse a `Partial`
given for a tensor before our own error, which is what users see and tests look for. `kernels` stays out: compiled
Triton breaks under the hook.
"""

import inspect
from collections.abc import Callable
from functools import wraps
from types import UnionType
from typing import Any, Union, get_args, get_origin

import torch
from jaxtyping import AbstractArray, install_import_hook

CHECKED = ("tp_residual.parallel", "tp_residual.residual", "tp_residual.model", "tp_residual.inference")


def check_tensors(function: Callable[..., Any]) -> Callable[..., Any]:
    """The decorator that jaxtyping puts on a function with the signature of each checked one."""
    signature = inspect.signature(function)
    hints = {name: p.annotation for name, p in signature.parameters.items() if _has_shape(p.annotation)}
    if not hints:
        return function

    @wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        for name, hint in hints.items():
            if name in given and not _fits(given[name], hint):
                raise TypeError(f"{name} has shape {list(given[name].shape)}, not {hint}")
        return function(*args, **kwargs)

    return checked


def _has_shape(hint: Any) -> bool:
    return _is_array(hint) or any(_has_shape(part) for part in get_args(hint))


def _fits(value: Any, hint: Any) -> bool:
    if _is_array(hint):
        return not isinstance(value, torch.Tensor) or isinstance(value, hint)
    if get_origin(hint) in (Union, UnionType):
        arrays = [part for part in get_args(hint) if _is_array(part)]
        return not arrays or any(_fits(value, part) for part in arrays)
    if get_origin(hint) is tuple and isinstance(value, tuple) and len(value) == len(get_args(hint)):
        return all(_fits(item, part) for item, part in zip(value, get_args(hint), strict=True))
    return True


def _is_array(hint: Any) -> bool:
    return inspect.isclass(hint) and issubclass(hint, AbstractArray)


install_import_hook(CHECKED, "shape_checks.check_tensors")
