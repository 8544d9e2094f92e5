"""`--profile`: a Chrome trace of some steps from each rank, with ranges named as errors and counters name things.

Open it in chrome://tracing or ui.perfetto.dev. Ranges: each step, layer and module, each boundary and each collective with its tag; on CUDA
the same ranges are NVTX's, for Nsight. Within a range are torch's operators; what a compiled kernel of ours takes is the part of its
module's range without one.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path

import torch
from torch import nn
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity, profile

from tp_residual.errors import RequestError
from tp_residual.parallel.group import TensorParallelGroup


class StepProfiler:
    """Enter it around each step. Watches steps `first` to `last - 1`, then writes `rank_R_of_N.json` into `folder`.

    world: all ranks of the job, by which the file is named; the group's unless given. Unwatched steps cost nothing, but none is recorded
    or captured while a profiler is there. Raises RequestError when the trace cannot be written.
    """

    def __init__(
        self,
        folder: str | Path,
        steps: tuple[int, int],
        model: nn.Module,
        group: TensorParallelGroup,
        world: TensorParallelGroup | None = None,
    ) -> None:
        named = world or group
        self.path = Path(folder) / f"rank_{named.rank}_of_{named.size}.json"
        self.written = False
        self._first, self._last = steps
        self._model, self._group = model, group
        self.steps = 0  # so far
        self._watching: ExitStack | None = None
        self._profile: profile | None = None

    @contextmanager
    def step(self) -> Iterator[None]:
        number = self.steps
        self.steps += 1
        if number == self._first:
            self._begin()
        if self._watching is None:
            yield
            return
        with self._range(f"step {number}"):
            yield
        if number + 1 == self._last:
            self.finish()

    def finish(self) -> None:
        """Write what was watched: also when the work ended before the last step that was asked for. Does nothing a second time."""
        if self._watching is None:
            return
        self._watching.close()
        self._watching = None
        assert self._profile is not None
        scratch = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._profile.export_chrome_trace(str(scratch))
            os.replace(scratch, self.path)
        except (OSError, RuntimeError) as error:
            with suppress(OSError):
                scratch.unlink()
            raise RequestError(f"--profile {self.path.parent}: the trace cannot be written: {error}") from None
        finally:
            self._profile = None
        self.written = True

    def _begin(self) -> None:
        self._watching = ExitStack()
        activities = [ProfilerActivity.CPU]
        if self._group.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._profile = self._watching.enter_context(profile(activities=activities, acc_events=True))
        self._watching.enter_context(_module_ranges(self._model, self._range))
        self._group.ranges = self._range
        self._watching.callback(setattr, self._group, "ranges", None)

    @contextmanager
    def _range(self, name: str) -> Iterator[None]:
        with record_function(name):
            if self._group.device.type != "cuda":
                yield
                return
            torch.cuda.nvtx.range_push(name)
            try:
                yield
            finally:
                torch.cuda.nvtx.range_pop()


@contextmanager
def _module_ranges(model: nn.Module, named: Callable[[str], AbstractContextManager[None]]) -> Iterator[None]:
    """A range around each module's forward, named as in the checkpoint."""
    open_ranges: list[AbstractContextManager[None]] = []
    hooks = []

    def enter(name: str) -> None:
        each = named(name)
        each.__enter__()
        open_ranges.append(each)

    def leave() -> None:
        open_ranges.pop().__exit__(None, None, None)

    for name, module in model.named_modules():
        if name and not isinstance(module, nn.ModuleList):
            hooks.append(module.register_forward_pre_hook(lambda _module, _inputs, name=name: enter(name)))
            hooks.append(module.register_forward_hook(lambda _module, _inputs, _output: leave()))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
