"""Whole models on the device: the greedy text of the CPU in fp32, and a checkpoint that arrives bit for bit, and how fast."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from _gpu_operands import Setting
from _gpu_record import Recorder
from safetensors.torch import save_file

from tp_residual.inference.decode_graphs import DecodeGraphs
from tp_residual.inference.engine import Engine
from tp_residual.inference.generate import Generation, generate
from tp_residual.inference.loading import load_model
from tp_residual.inference.paged_attention import TRIAL_LIMIT, choose_attention, trial_error
from tp_residual.inference.paged_cache import PagedKVCache
from tp_residual.inference.request import EngineLimits, GenerationSettings, Request
from tp_residual.model.attention_backend import HeadGroups
from tp_residual.parallel.blocks import parameter_blocks
from tp_residual.parallel.group import TensorParallelGroup
from tp_residual.parallel.splits import HeadSplit

COMMON = {
    "vocab_size": 101,
    "num_hidden_layers": 3,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": False,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": COMMON | {"model_type": "llama", "hidden_size": 72, "intermediate_size": 131, "head_dim": 8},
    "qwen3": COMMON | {"model_type": "qwen3", "hidden_size": 136, "intermediate_size": 59, "head_dim": 16},
}
PROMPTS = ([1, 5, 17, 90, 33, 8, 61], [1], [100, 2, 2, 47] * 9)
SETTINGS = GenerationSettings(max_new_tokens=40, ignore_eos=True, logprobs=2)
CLOSE_CALL = 1e-4  # a gap between the two likeliest tokens' log-probabilities that fp32 does not decide

LARGE = {
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}


def check_generation(record: Recorder, setting: Setting) -> None:
    for name, config in CONFIGS.items():
        record.check(
            f"greedy ids of a tiny {name} are the CPU's, fp32", greedy(_saved(setting.scratch / name, config), setting)
        )
    record.check("a tiny llama in bf16 is finite", finite(_saved(setting.scratch / "llama", CONFIGS["llama"]), setting))


def check_decode_graphs(record: Recorder, setting: Setting) -> None:
    folder = _saved(setting.scratch / "llama", CONFIGS["llama"])
    record.check("decode steps of fixed shapes choose the tokens of steps of any shape", captured(folder, setting))
    record.check("who attends in bf16 is right", attention(record, setting))


def check_loading(record: Recorder, setting: Setting) -> None:
    config = CONFIGS["llama"] | {"dtype": "bfloat16"} if setting.small else LARGE
    folder = _saved(setting.scratch / "large", config)
    record.check("a checkpoint arrives bit for bit", loaded(record, folder, setting))


def _saved(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _generated(
    folder: Path, device: torch.device, dtype: torch.dtype, *, check_finite: bool = False
) -> list[Generation]:
    group = TensorParallelGroup.single(device)
    model, _ = load_model(folder, group, dtype=dtype, random_seed=3)
    return generate(model.eval(), PROMPTS, group, SETTINGS, check_finite=check_finite)


def greedy(folder: Path, setting: Setting) -> Iterator[str | None]:
    there, here = (_generated(folder, device, torch.float32) for device in (setting.device, torch.device("cpu")))
    for found, expected in zip(there, here, strict=True):
        yield differing_ids(found, expected)


def differing_ids(found: Generation, expected: Generation) -> str | None:
    """Up to the first place where the CPU itself cannot tell the two likeliest tokens apart: from there on, texts may part."""
    assert found.logprobs is not None and expected.logprobs is not None
    for place, (ours, theirs) in enumerate(zip(found.logprobs, expected.logprobs, strict=True)):
        (_, first), (_, second) = theirs.top
        if ours.token_id != theirs.token_id and first - second > CLOSE_CALL:
            return (
                f"prompt {expected.index}: new token {place} is {ours.token_id}, on CPU {theirs.token_id}, "
                f"{first - second:.1e} likelier than the next"
            )
        if ours.token_id != theirs.token_id:
            return None if place else f"prompt {expected.index}: its first token is too close a call to compare"
        if not abs(ours.log_prob - theirs.log_prob) < CLOSE_CALL:
            return f"prompt {expected.index}: log-probability of new token {place} is {ours.log_prob}, on CPU {theirs.log_prob}"
    return None


def captured(folder: Path, setting: Setting) -> Iterator[str | None]:
    """In fp32, several batch sizes, so that rows only fill up; captured on CUDA, computed each time elsewhere."""
    group = TensorParallelGroup.single(setting.device)
    model, _ = load_model(folder, group, dtype=torch.float32, random_seed=3)
    model.requires_grad_(False).eval()
    limits = EngineLimits(max_model_len=max(map(len, PROMPTS)) + SETTINGS.max_new_tokens, max_num_seqs=len(PROMPTS))
    found = []
    for fixed in (True, False):
        engine = Engine(model, group, limits)
        engine.cache = PagedKVCache(model.layout, group, engine.capacity.num_blocks, dtype=model.dtype)
        engine.cache.kv.zero_()
        graphs = DecodeGraphs(model, engine.cache, len(PROMPTS))
        engine.replay = graphs if fixed else None
        for index, prompt in enumerate(PROMPTS):
            engine.add(Request(prompt, SETTINGS, index))
        results: list[Generation] = []
        while engine.has_work:
            results += [event.generation for event in engine.step() if event.generation is not None]
        found.append(sorted(results, key=lambda result: result.index))
        if fixed:
            yield None if graphs.sizes else "no step was of a fixed shape"
    for ours, theirs in zip(*found, strict=True):
        yield differing_ids(ours, theirs)


def attention(record: Recorder, setting: Setting) -> Iterator[str | None]:
    for heads, kv_heads, tp_size in ((32, 8, 1), (9, 3, 2)):
        groups = HeadGroups(HeadSplit.of(heads, kv_heads, tp_size), 0, setting.device)
        for head_dim in (64, 128):
            chosen = choose_attention(groups, head_dim, torch.bfloat16)
            record.note(f"attention of heads {heads}/{kv_heads} at tp={tp_size}, head_dim={head_dim}: {chosen.name}")
            error = trial_error(chosen, groups, head_dim, torch.bfloat16)
            yield None if error < TRIAL_LIMIT else f"{chosen.name}, head_dim={head_dim}: error {error:.2g}"


def finite(folder: Path, setting: Setting) -> Iterator[str | None]:
    results = _generated(folder, setting.device, torch.bfloat16, check_finite=True)
    for result in results:
        short = len(result.token_ids) != SETTINGS.max_new_tokens
        yield f"prompt {result.index}: {len(result.token_ids)} tokens, not {SETTINGS.max_new_tokens}" if short else None


def loaded(record: Recorder, folder: Path, setting: Setting) -> Iterator[str | None]:
    device, group = setting.device, TensorParallelGroup.single(setting.device)
    source, _ = load_model(folder, group, random_seed=5)
    weights = source.state_dict()
    blocks = parameter_blocks(source)  # the checkpoint's names, where a module holds several of its tensors in one
    saved = {block.name: block.of(block.parameter).detach().cpu().contiguous() for block in blocks}
    save_file(saved, folder / "model.safetensors", metadata={"format": "pt"})
    nbytes = sum(tensor.numel() * tensor.element_size() for tensor in saved.values())
    del saved
    host = torch.zeros(nbytes, dtype=torch.uint8)
    seconds, limits = [], []
    for _ in range(3):
        _wait(device)
        began = time.perf_counter()
        host.to(device, copy=True)
        _wait(device)
        limits.append(time.perf_counter() - began)
        _wait(device)
        began = time.perf_counter()
        model, report = load_model(folder, group)
        _wait(device)
        seconds.append(time.perf_counter() - began)
        yield None if report.bytes_read == nbytes else f"{report.bytes_read} bytes were read, {nbytes} were saved"
        for name, tensor in model.state_dict().items():
            yield None if torch.equal(tensor, weights[name]) else f"{name} arrives changed"
    best, limit = min(seconds), min(limits)
    record.row(
        {
            "what": "load",
            "bytes": nbytes,
            "seconds": [round(each, 4) for each in seconds],
            "GB_s": round(nbytes / best / 1e9, 3),
            "timing": "host",
            "cache": "the file is in the page cache, just written",
            "limit": "a copy of as many bytes from pageable host memory to the device",
            "limit_seconds": [round(each, 4) for each in limits],
            "percent_of_limit": round(100 * limit / best, 1),
        }
    )
    record.say(f"{nbytes / 1e6:.0f} MB in {best:.2f} s, {100 * limit / best:.0f} % of a copy")


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
