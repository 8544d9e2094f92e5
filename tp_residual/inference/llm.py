"""The Python interface: a model directory in, texts out, whole or as they come.

    with LLM("DIR") as llm:
        for generation in llm.generate(["The capital of France is"], GenerationSettings(max_new_tokens=8)):
            print(generation.text)

Outside torchrun it is one process; under it every rank makes the same LLM and calls it alike, and every rank gets the results.
"""

import logging
import operator
import os
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from types import TracebackType

import torch
import torch.distributed as dist

from tp_residual.errors import RequestError
from tp_residual.inference.engine import Engine
from tp_residual.inference.hub import CONFIG_ONLY, EVERYTHING, resolve_model
from tp_residual.inference.loading import load_model
from tp_residual.inference.request import EngineLimits, GenerationSettings, Request, check_prompts
from tp_residual.inference.results import Generation, TokenEvent
from tp_residual.inference.tokenizer import Tokenizer
from tp_residual.parallel.group import TensorParallelGroup
from tp_residual.parallel.packing import pack_weights
from tp_residual.parallel.vocabulary import request_checksum, require_same_request

logger = logging.getLogger("tp_residual")


class LLM:
    """A loaded model and its engine. Its weights are packed for inference: it cannot be trained or saved.

    group: the ranks that hold the model together; without one, all ranks of torchrun, or this process alone. dtype: of the weights, the
    checkpoint's unless given; stream_dtype, sequence_parallel, boundary, random_seed as in `load_model`; limits: see `EngineLimits`.
    Raises ConfigError, CheckpointError or RequestError on every rank for what cannot be loaded or does not fit.
    """

    def __init__(
        self,
        model_dir: str | PathLike[str],
        *,
        group: TensorParallelGroup | None = None,
        dtype: torch.dtype | None = None,
        stream_dtype: torch.dtype | None = None,
        sequence_parallel: str = "auto",
        boundary: str = "auto",
        random_seed: int | None = None,
        limits: EngineLimits | None = None,
        check_finite: bool = False,
    ) -> None:
        for name, value, kind in (
            ("limits", limits, EngineLimits),
            ("dtype", dtype, torch.dtype),
            ("stream_dtype", stream_dtype, torch.dtype),
        ):
            if value is not None and not isinstance(value, kind):
                raise RequestError(
                    f"{name}={value!r} is no {kind.__module__.split('.')[0]} {kind.__name__}; make one, or leave it out"
                )
        self._closed = False
        directory = resolve_model(str(model_dir), EVERYTHING if random_seed is None else CONFIG_ONLY)
        self._owns_world = False
        self._owned: TensorParallelGroup | None = None
        if group is None:
            self._owned = group = self._own_group()
        self.group = group
        self.model, _ = load_model(
            directory,
            group,
            dtype=dtype,
            stream_dtype=stream_dtype,
            sequence_parallel=sequence_parallel,
            boundary=boundary,
            random_seed=random_seed,
        )
        self.model.requires_grad_(False).eval()
        packing = pack_weights(self.model, group.device, self.model.dtype)
        if group.rank == 0:
            logger.info("linears: %s", packing)
        self.tokenizer = Tokenizer.from_dir(directory) if Path(directory, "tokenizer.json").exists() else None
        self.engine = Engine(self.model, group, limits, tokenizer=self.tokenizer, check_finite=check_finite)
        self._inboxes: dict[int, deque[TokenEvent]] = {}

    def generate(
        self,
        prompts: Sequence[str] | Sequence[Sequence[int]],
        params: GenerationSettings | Sequence[GenerationSettings] | None = None,
    ) -> list[Generation]:
        """Continue every prompt, text or token ids; params for all of them, or one for each.

        In the order of the prompts, params' n samples each. Stop tokens are the model's own where params name none (`ignore_eos` goes on
        after them). A prompt longer than the engine's max_model_len allows comes back with finish_reason "refused", and the others go on.
        Raises RequestError, before anything runs, for prompts that are no prompts and settings that mean nothing for this model.
        """
        ended = [event for event in self.stream(prompts, params) if event.generation is not None]
        ended.sort(key=lambda event: (event.index, event.sample))
        return [event.generation for event in ended if event.generation is not None]

    def stream(
        self,
        prompts: Sequence[str] | Sequence[Sequence[int]],
        params: GenerationSettings | Sequence[GenerationSettings] | None = None,
    ) -> Iterator[TokenEvent]:
        """The same, token by token: each event has a prompt's index, a sample and the text that has become certain.

        The last of a continuation has its `generation`. Leaving the loop, or closing the iterator, ends what has not finished and frees
        its memory; all ranks leave at the same event. Several streams may be read in turn.
        """
        requests = self._requests(prompts, params)
        require_same_request(self.group, request_checksum(requests))
        return self._events(requests)

    def cancel(self, request: int) -> None:
        """End a request (`TokenEvent.request`) on all ranks; it is enough that one rank asks."""
        self.engine.cancel(request)

    def close(self) -> None:
        """All ranks alike. Afterwards the LLM answers nothing any more."""
        self._closed = True
        self.engine.drop(list(self._inboxes))
        self._inboxes.clear()
        if self._owned is not None:
            self._owned.close()
            self._owned = None
        if self._owns_world and dist.is_initialized():
            dist.destroy_process_group()
        self._owns_world = False

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _own_group(self) -> TensorParallelGroup:
        """Of a launcher's ranks, when there is one (torchrun's variables say so) or somebody has set up torch.distributed."""
        local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        device = torch.device("cpu")
        if torch.cuda.device_count() >= local_ranks:
            device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
            torch.cuda.set_device(device)
        if not dist.is_initialized():
            if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
                return TensorParallelGroup.single(device)
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
            self._owns_world = True
        return TensorParallelGroup.from_world(device=device)

    def _requests(
        self,
        prompts: Sequence[str] | Sequence[Sequence[int]],
        params: GenerationSettings | Sequence[GenerationSettings] | None,
    ) -> list[Request]:
        if self._closed:
            raise RequestError("this LLM is closed; make another, or call it within its `with`")
        if isinstance(prompts, str):
            raise RequestError(f"prompts={prompts!r} is one text; give a list of them")
        if not isinstance(prompts, Sequence) or not all(isinstance(prompt, Sequence) for prompt in prompts):
            raise RequestError(f"prompts={prompts!r} is no list of texts, nor of lists of token ids")
        each = (
            [GenerationSettings() if params is None else params] * len(prompts)
            if not isinstance(params, Sequence)
            else list(params)
        )
        if len(each) != len(prompts):
            raise RequestError(
                f"{len(prompts)} prompts and {len(each)} params were given; give one for each, or one for all"
            )
        for settings in each:
            if not isinstance(settings, GenerationSettings):
                raise RequestError(f"params={settings!r} are no GenerationSettings")
        ids = [self._encode(prompt) for prompt in prompts]
        own = self.model.config.eos_token_ids
        requests = []
        for index, (prompt, settings) in enumerate(zip(ids, each, strict=True)):
            check_prompts([prompt], self.model.config, settings, first_index=index, lengths=False)
            if settings.stop and self.tokenizer is None:
                raise RequestError(
                    f"stop strings {list(settings.stop)} are text, and the model has no tokenizer.json; add it"
                )
            requests.append(Request(prompt, replace(settings, stop_token_ids=settings.stop_token_ids or own), index))
        if not requests:
            raise RequestError("no prompt was given; pass at least one")
        return requests

    def _encode(self, prompt: str | Sequence[int]) -> list[int]:
        if not isinstance(prompt, str):
            try:
                return [operator.index(token_id) for token_id in prompt]
            except TypeError:
                raise RequestError(f"prompt {list(prompt)} has token ids that are no whole numbers") from None
        if self.tokenizer is None:
            raise RequestError(
                f"prompt {prompt!r} is text, and the model has no tokenizer.json; add it, or give token ids"
            )
        return self.tokenizer.encode(prompt)

    def _events(self, requests: list[Request]) -> Iterator[TokenEvent]:
        inbox = deque[TokenEvent]()
        unfinished: dict[int, int] = {}  # samples left, by request
        try:
            for request in requests:
                samples = request.settings.sampling.n
                try:
                    number = self.engine.add(request)
                except RequestError as error:
                    inbox += [_refusal(request, sample, error) for sample in range(samples)]
                else:
                    unfinished[number], self._inboxes[number] = samples, inbox
            while unfinished or inbox:
                if not inbox:
                    for event in self.engine.step():
                        self._inboxes[event.request].append(event)
                while inbox:
                    event = inbox.popleft()
                    if event.generation is not None and event.request in unfinished:
                        unfinished[event.request] -= 1
                        if not unfinished[event.request]:
                            del unfinished[event.request], self._inboxes[event.request]
                    yield event
        finally:
            self.engine.drop(list(unfinished))
            for number in unfinished:
                self._inboxes.pop(number, None)


def _refusal(request: Request, sample: int, error: RequestError) -> TokenEvent:
    result = Generation(request.index, len(request.prompt_ids), sample, finish_reason="refused", error=str(error))
    return TokenEvent(-1, request.index, sample, None, generation=result)
