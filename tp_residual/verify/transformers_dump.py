"""The pre-norm states of a Transformers model, in our dump format.

    python -m tp_residual.verify.transformers_dump MODEL_DIR DUMP_DIR --like OUR_DUMP [--dtype float32]

`dump_transformers` does the same with a model that is loaded already. It needs nothing but the module names of the Llama family: what a
norm is given is the stream after the write before it.
"""

import argparse
from collections.abc import Sequence
from os import PathLike
from typing import Any

import torch
from torch import Tensor

from tp_residual.verify.dump import DumpInfo, read_dump, write_dump
from tp_residual.verify.oracle import norm_names, site_names


def dump_transformers(model: Any, sequences: Sequence[Sequence[int]], directory: str | PathLike[str]) -> None:
    """Run each sequence alone through `model` and write what its norms read. The hook is all there is to it."""
    config = model.config
    sites = site_names(config.num_hidden_layers)
    seen: dict[str, list[Tensor]] = {site: [] for site in sites}
    hooks = [
        model.get_submodule(norm).register_forward_pre_hook(
            lambda _, inputs, site=site: seen[site].append(inputs[0][0])
        )
        for site, norm in zip(sites, norm_names(config.num_hidden_layers), strict=True)
    ]
    with torch.no_grad():
        for ids in sequences:
            model(torch.tensor([list(ids)], device=model.device))
    for hook in hooks:
        hook.remove()
    dtype, tokens = str(model.dtype).removeprefix("torch."), sum(map(len, sequences))
    info = DumpInfo(
        "transformers", config.model_type, dtype, dtype, config.hidden_size, 1, "replicated", [[0, tokens]],
        [list(ids) for ids in sequences], sites,
    )  # fmt: skip
    write_dump(directory, info, {site: torch.cat(parts) for site, parts in seen.items()})


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Dump a Transformers model's pre-norm states.", allow_abbrev=False)
    parser.add_argument("model", help="a model directory")
    parser.add_argument("dump", help="the folder to write")
    parser.add_argument("--like", required=True, metavar="DUMP", help="a dump whose token ids to run")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    arguments = parser.parse_args(argv)
    from transformers import AutoModelForCausalLM

    sequences = read_dump(arguments.like).info.sequences
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=getattr(torch, arguments.dtype))
    dump_transformers(model.eval(), sequences, arguments.dump)


if __name__ == "__main__":
    main()
