"""The lens: what it says of a sharded run is what an unsharded one says, and its sums hold or name what broke them.

Functions named check_* run on every rank. The unsharded side is tests/oracle.py, in fp64, and plain torch on top of it.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from oracle import Oracle, OracleOutput
from tiny_models import config, prompts, random_weights, sharded
from torch import Tensor

from tp_residual.errors import GenerationError, RequestError
from tp_residual.lens import observe, run
from tp_residual.lens.request import LensRequest
from tp_residual.lens.result import PromptLens, sites
from tp_residual.lens.run import look
from tp_residual.model.attention_backend import NoCache, TokenBatch
from tp_residual.model.decoder import CausalLM
from tp_residual.parallel.group import TensorParallelGroup
from tp_residual.residual.config import ResidualConfig
from tp_residual.testing import run_ranks
from tp_residual.verify.faults import inject

BATCH = prompts(3)  # 13, 1 and 2 tokens
ALONE = TensorParallelGroup.single()
FP64 = torch.float64
# sums of at most a hundred fp64 numbers of size up to 20, in another order: 100 * 20 * 2**-53 is 2e-13
TIGHT = 1e-11
# logits in fp64 are off by some 1e-13 after two layers; log-probabilities and KL inherit it
CLOSE = 1e-10


def build(group: TensorParallelGroup, name: str, dtype: torch.dtype = FP64, **options: Any) -> CausalLM:
    return sharded(config(name), group, random_weights(config(name), dtype=dtype), dtype=dtype, **options)


# ---- the unsharded side ----


class Unsharded:
    """The oracle's run of one model, and what the lens should say of it."""

    def __init__(self, name: str) -> None:
        self.config, self.weights = config(name), random_weights(config(name))
        self.oracle = Oracle(self.config, self.weights)
        heads: list[Tensor] = []
        attention = self.oracle.attention

        def keep(*arguments: Any) -> Tensor:
            heads.append(attention(*arguments))
            return heads[-1]

        self.oracle.attention = keep  # type: ignore[method-assign]
        with torch.no_grad():
            self.run: OracleOutput = self.oracle(BATCH)
        per_layer = len(BATCH)
        self.heads = [torch.cat(heads[at : at + per_layer]) for at in range(0, len(heads), per_layer)]
        tied = self.config.tie_word_embeddings
        self.unembed = self.weights["model.embed_tokens.weight" if tied else "lm_head.weight"]
        self.final = self.run.streams[sites(self.config.num_hidden_layers)[-1].name]

    def direction(self, token: int, target: int, versus: int | None) -> Tensor:
        """By autograd: the logit's gradient with respect to x_L where r does not move."""
        wanted = self.unembed[target] - (0 if versus is None else self.unembed[versus])
        x = self.final[token]
        r = (x.square().mean() + self.config.rms_norm_eps).rsqrt().detach()
        free = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad((free * r * self.weights["model.norm.weight"] * wanted).sum(), free)
        return gradient

    def head_writes(self, layer: int, token: int) -> Tensor:
        """`[heads, hidden]`, written out."""
        o_proj = self.weights[f"model.layers.{layer}.self_attn.o_proj.weight"].unflatten(1, (-1, self.config.head_dim))
        outputs = self.heads[layer][token].view(-1, self.config.head_dim)
        return torch.stack([o_proj[:, head] @ outputs[head] for head in range(len(outputs))])

    def logits_of(self, state: Tensor) -> Tensor:
        with torch.no_grad():
            return self.oracle.norm(state, "model.norm") @ self.unembed.T


def judge(found: list[PromptLens], name: str, request: LensRequest) -> None:
    side = Unsharded(name)
    every, first = sites(side.config.num_hidden_layers), 0
    for prompt, lens in zip(BATCH, found, strict=True):
        tokens = range(first, first + len(prompt))
        first += len(prompt)
        assert lens.token_ids == prompt and lens.window[-1] == lens.position == request.position % len(prompt)
        focus = tokens[lens.position]
        x = side.final[focus]
        # norms and cosines
        for number, write in enumerate(lens.writes):
            update, stream = side.run.updates[every[number].name][tokens], side.run.streams[every[number].name][tokens]
            assert write.site == every[number]
            assert write.norm == pytest.approx(stream.norm(dim=-1).tolist(), rel=TIGHT)
            assert write.update_norm == pytest.approx(update.norm(dim=-1).tolist(), rel=TIGHT)
            if number:
                before = side.run.streams[every[number - 1].name][tokens]
                expected = torch.cosine_similarity(update, before, dim=-1, eps=0)
                assert write.cosine == pytest.approx(expected.tolist(), abs=TIGHT)
                assert lens.relative_writes(number) == pytest.approx(
                    (update.norm(dim=-1) / before.norm(dim=-1)).tolist(), rel=TIGHT
                )
            else:
                assert all(math.isnan(value) for value in write.cosine)
        borders = [side.run.streams[site.name][tokens] for site in every if site.kind != "attention"]
        for layer, values in enumerate(lens.layer_cosine):
            expected = torch.cosine_similarity(borders[layer], borders[layer + 1], dim=-1, eps=0)
            assert values == pytest.approx(expected.tolist(), abs=TIGHT)
        # shares and attributions
        logits = side.run.logits[focus].detach()
        target = int(logits.argmax()) if request.target is None else request.target
        value = float(logits[target]) - (0 if request.versus is None else float(logits[request.versus]))
        assert (lens.target, lens.versus) == (target, request.versus)
        assert lens.logit == pytest.approx(value, abs=CLOSE)
        direction = side.direction(focus, target, request.versus)
        window = [tokens[position] for position in lens.window]
        for component, site in zip(lens.components, every, strict=True):
            update = side.run.updates[site.name].detach()
            finals = side.final[window].detach()
            shares = (update[window] * finals).sum(-1) / finals.square().sum(-1)
            assert component.share == pytest.approx(float(update[focus] @ x / x.square().sum()), abs=TIGHT)
            assert component.mean_share == pytest.approx(float(shares.mean()), abs=TIGHT)
            assert component.logit == pytest.approx(float(update[focus] @ direction), abs=CLOSE)
        for attention in lens.attentions:
            writes = side.head_writes(attention.layer, focus)
            assert attention.logits == pytest.approx((writes @ direction).tolist(), abs=CLOSE)
            assert attention.shares == pytest.approx((writes @ x / x.square().sum()).tolist(), abs=TIGHT)
        # the logit lens
        shown = request.shown_layers(side.config)
        assert [state.layer for state in lens.states] == ([-1] if shown.start == 0 else []) + list(shown)
        final = side.run.logits[window].detach().log_softmax(-1)
        assert lens.final_ids == final.argmax(-1).tolist()
        for state in lens.states:
            log_probs = side.logits_of(borders[state.layer + 1][[p for p in lens.window]]).log_softmax(-1)
            for row, likely in enumerate(state.window):
                best = log_probs[row].topk(request.top)
                assert [token for token, _ in likely.top] == best.indices.tolist()
                assert [value for _, value in likely.top] == pytest.approx(best.values.tolist(), abs=CLOSE)
                predicted = lens.final_ids[row]
                assert likely.final_log_prob == pytest.approx(float(log_probs[row, predicted]), abs=CLOSE)
                assert likely.final_rank == 1 + int((log_probs[row] > log_probs[row, predicted]).sum())
                kl = float((final[row].exp() * (final[row] - log_probs[row])).sum())
                assert likely.kl == pytest.approx(kl, abs=CLOSE)


def sums_hold(found: list[PromptLens]) -> None:
    for lens in found:
        assert math.fsum(c.share for c in lens.components) == pytest.approx(1, abs=TIGHT)
        assert math.fsum(c.logit for c in lens.components) + lens.norm_bias_logit == pytest.approx(
            lens.logit, abs=1e-10
        )
        assert abs(lens.left_over.stream_logit) < 1e-10 and abs(lens.left_over.head_logit) < 1e-10
        assert lens.left_over.is_rounding and lens.as_json()["sums_hold"]
        for attention in lens.attentions:
            whole = lens.by_site[attention.layer, "attention"]
            assert math.fsum(attention.shares) + attention.bias_share == pytest.approx(whole.share, abs=TIGHT)
            assert math.fsum(attention.logits) + attention.bias_logit == pytest.approx(whole.logit, abs=CLOSE)
        last = lens.states[-1].window
        assert [likely.top[0][0] for likely in last] == lens.final_ids, "the last layer is the model's own answer"
        assert all(likely.final_rank == 1 and likely.kl < 1e-12 for likely in last)


Case = tuple[str, str, LensRequest]

# heads 9, 8 and 14 over 1 to 4 ranks, a vocabulary of 101, windows shorter and longer than the prompts
CASES: dict[int, list[Case]] = {
    1: [("llama", "off", LensRequest())],
    2: [("llama", "on", LensRequest(target=7, versus=100, window=3)), ("qwen2", "off", LensRequest(layers=(1, 2)))],
    3: [("llama_biased", "off", LensRequest(position=0, top=101, window=1)), ("llama_biased", "on", LensRequest())],
    4: [("qwen2", "on", LensRequest(versus=3)), ("qwen3", "off", LensRequest(target=100, top=1))],
}


def check_cases(group: TensorParallelGroup, cases: list[Case]) -> list[list[PromptLens]]:
    return [look(build(group, name, sequence_parallel=mode), BATCH, request) for name, mode, request in cases]


@pytest.mark.parametrize("tp_size", CASES)
def test_the_lens_says_what_the_unsharded_model_says(tp_size: int) -> None:
    cases = CASES[tp_size]
    everybody = run_ranks(tp_size, check_cases, cases) if tp_size > 1 else [check_cases(ALONE, cases)]
    assert all(str(found) == str(everybody[0]) for found in everybody), "the same numbers on all ranks"
    for (name, _, request), found in zip(cases, everybody[0], strict=True):
        sums_hold(found)
        judge(found, name, request)


# ---- what breaks the sums ----


def check_broken(group: TensorParallelGroup) -> dict[str, list[PromptLens]]:
    """Each with its fault in layer 0's attention; the lens is given the healthy summands of a stream that got something else."""
    found = {}
    for mode in ("off", "on"):
        model = build(group, "llama", sequence_parallel=mode)
        for kind in ("missing reduction", "double reduction", "wrong scale", "stale residual"):
            undo = inject(model, kind, 0)
            found[f"{kind}, {mode}"] = look(model, BATCH, LensRequest())
            undo()
        found[f"repaired, {mode}"] = look(model, BATCH, LensRequest())
    return found


def test_a_broken_residual_breaks_the_sums() -> None:
    for name, found in run_ranks(2, check_broken)[0].items():
        if name.startswith("repaired"):
            sums_hold(found)
            continue
        for lens in found:
            assert not lens.left_over.is_rounding and not lens.as_json()["sums_hold"], name
            # a million times what a healthy model leaves: sums_hold asks for 1e-11
            assert abs(1 - math.fsum(c.share for c in lens.components)) > 1e-5, name
            assert abs(math.fsum(c.logit for c in lens.components) - lens.logit) > 1e-5, name
            if not name.startswith("missing"):  # there, each rank reads a stream of its own
                assert abs(lens.left_over.head_logit) < 1e-10, "the head is healthy"


def test_a_doubled_component_and_exchanged_heads_break_the_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sums are not the decomposition's by construction."""

    def broken(change: Callable[[observe.Watch], None]) -> PromptLens:
        def watched(*arguments: Any) -> Any:
            seen, logits = observe.watch(*arguments)
            change(seen)
            return seen, logits

        monkeypatch.setattr(run, "watch", watched)
        return look(build(ALONE, "llama"), BATCH, LensRequest())[0]

    def double(seen: observe.Watch) -> None:
        summand, bias = seen.kept_summands[3]
        seen.kept_summands[3] = summand * 2, bias

    def exchange(seen: observe.Watch) -> None:
        seen.kept_heads[1] = seen.kept_heads[1].roll(1, dims=-1)

    lens = broken(double)
    expected = -lens.components[3].share / 2
    assert lens.left_over.share == pytest.approx(expected, abs=TIGHT) and not lens.left_over.is_rounding
    lens = broken(exchange)
    wholes = [lens.by_site[layer, "attention"].logit for layer in (0, 1)]
    heads = [math.fsum(attention.logits) for attention in lens.attentions]
    assert heads[0] == pytest.approx(wholes[0], abs=CLOSE) and abs(heads[1] - wholes[1]) > 1e-3


# ---- what crosses ranks ----


def check_traffic(group: TensorParallelGroup, mode: str) -> dict[str, list[int]]:
    """Calls and bytes by tag, of the lens; and the pass itself is the one that nobody watches."""
    model = build(group, "llama", sequence_parallel=mode)
    batch = TokenBatch.prefill([list(ids) for ids in BATCH])
    with torch.no_grad():
        alone = model(batch, NoCache()).local_logits
        own = dict(group.counters.calls)
        group.counters.reset()
        _, watched = observe.watch(model, batch, range(len(batch.token_ids)))
        assert torch.equal(alone, watched), "the same bits"
    assert all(not layer.self_attn.o_proj._forward_pre_hooks for layer in model.model.layers)  # type: ignore[union-attr]
    passed = {key: calls for key, calls in group.counters.calls.items() if not key[0].startswith("lens.")}
    assert passed == own, "the same collectives"
    group.counters.reset()
    look(model, BATCH, LensRequest(window=4))
    calls, sent = group.counters.calls, group.counters.bytes
    return {f"{tag} {kind}": [calls[tag, kind], sent[tag, kind]] for tag, kind in calls if tag.startswith("lens.")}


@pytest.mark.parametrize("mode", ["off", "on"])
def test_scalars_cross_ranks_and_no_update_is_gathered(mode: str) -> None:
    tp_size, layers, hidden, prompts_, rows, tokens = 2, 2, 45, 3, 4 + 1 + 2, 13 + 1 + 2
    sites_, states, heads, fp64 = 2 * layers + 1, layers + 1, 5, 8
    expected = {
        # each update once, as token chunks of the summands: half an all-reduce
        "lens.update reduce_scatter": [sites_, sites_ * tokens * hidden * fp64],
        "lens.figures all_gather": [1, tokens // tp_size * sites_ * observe.FIGURES * fp64],
        "lens.head_rows all_reduce": None,  # as many rows as there are different answers
        "lens.components all_reduce": [2, sites_ * (rows + prompts_) * fp64],
        "lens.heads all_gather": [2, 2 * layers * prompts_ * heads * fp64],
        # 3 + 2 * count numbers a row: the final answer, its logit, and each state
        "lens.logits all_gather": [2 + states, rows * (5 + 3 + states * 13) * fp64],
        "lens.comparison all_reduce": [states, states * 2 * rows * fp64],
    }
    if mode == "on":  # x_L, and what the head reads of each state, at the kept rows only
        expected["lens.rows all_gather"] = None
    for traffic in run_ranks(tp_size, check_traffic, mode):
        assert traffic.keys() == expected.keys()
        for name, counted in expected.items():
            assert counted is None or traffic[name] == counted, name
        calls, sent = traffic["lens.head_rows all_reduce"]
        assert calls == 1 and sent <= prompts_ * hidden * fp64
        if mode == "on":
            calls, sent = traffic["lens.rows all_gather"]
            assert calls == 1 + states and sent <= calls * rows * hidden * fp64


# ---- other models ----


def layer_norm_model(group: TensorParallelGroup) -> CausalLM:
    changed = replace(config("llama_biased"), residual=ResidualConfig(norm="layer"))
    weights = random_weights(changed)
    biases = {name.replace("weight", "bias"): 0.3 * (x - 1) for name, x in weights.items() if "norm" in name}
    return sharded(changed, group, weights | biases, dtype=FP64, sequence_parallel="on")


def check_other_models(group: TensorParallelGroup) -> dict[str, list[PromptLens]]:
    found = {"layer norm": look(layer_norm_model(group), BATCH, LensRequest(versus=5))}
    for mode in ("off", "on"):
        model = build(group, "llama", torch.bfloat16, sequence_parallel=mode, round_reduced=mode == "on")
        found[f"bfloat16, {mode}"] = look(model, BATCH, LensRequest())
    return found


def test_centring_norms_with_biases_and_16_bits() -> None:
    found = run_ranks(2, check_other_models)[1]
    sums_hold(found["layer norm"])
    assert all(abs(lens.norm_bias_logit) > 1e-3 for lens in found["layer norm"])
    for name in ("bfloat16, off", "bfloat16, on"):
        for lens in found[name]:
            left = lens.left_over
            # five writes of a stream of 8 bits, each rounded by at most 2**-9 of it: what is left over is that, and is not hidden
            assert left.is_rounding and 0 < abs(left.share) < 0.02, name
            at, last = lens.position, lens.writes[-1]
            rounded = 2**-7 * math.fsum(write.norm[at] for write in lens.writes)
            if name.endswith("on"):
                rounded += 2**-7 * math.fsum(write.update_norm[at] for write in lens.writes)
            assert left.share_bound == pytest.approx(rounded / last.norm[at], rel=1e-6)
            assert abs(left.stream_logit + left.head_logit) < 0.1 * (1 + abs(lens.logit)), name
            assert lens.states[-1].window[-1].final_rank == 1


# ---- what is refused ----

REFUSED: list[tuple[list[list[int]], dict[str, Any], str]] = [
    ([], {}, "no prompt was given"),
    ([[1], []], {}, "prompt 1 is empty: it has 0 tokens"),
    ([[1, 101]], {}, "prompt 0 has token id 101, outside the vocabulary of 101 ids; use 0 to 100"),
    ([[1] * 65], {}, "sequence 0 has 65 tokens, more than max_position_embeddings=64"),
    ([[1, 2]], {"target": 101}, "token id 101 is outside the vocabulary of 101 ids; use 0 to 100"),
    ([[1, 2]], {"versus": -1}, "versus id -1 is outside the vocabulary"),
    ([[1, 2]], {"target": 3, "versus": 3}, "token 3 versus itself is always 0"),
    ([[1, 2, 3], [1, 2]], {"position": 2}, "position 2 is outside prompt 1 of 2 tokens; use 0 to 1, or -1"),
    ([[1, 2]], {"position": -3}, "position -3 is outside prompt 0 of 2 tokens"),
    ([[1, 2]], {"top": 102}, "top=102 must be between 1 and the vocabulary's 101"),
    ([[1, 2]], {"window": 0}, "window=0 must be at least 1"),
    ([[1, 2]], {"layers": (1, 3)}, "layers 1:3 must be A:B with 0 <= A < B <= 2, the number of layers"),
    ([[1, 2]], {"layers": (1, 1)}, "layers 1:1 must be A:B"),
]


def test_requests_without_meaning_are_refused() -> None:
    model = build(ALONE, "llama")
    for prompts_, options, message in REFUSED:
        with pytest.raises(RequestError) as error:
            look(model, prompts_, LensRequest(**options))
        assert message in str(error.value)
    likeliest = look(model, BATCH, LensRequest())[0].target
    with pytest.raises(RequestError, match=f"token {likeliest} is the likeliest itself"):
        look(model, BATCH[:1], LensRequest(versus=likeliest))


def test_streams_that_are_no_sum_of_writes_are_refused() -> None:
    scaled = replace(config("llama"), residual=ResidualConfig(update_scale=0.5, final_norm=True))
    with pytest.raises(RequestError, match=r"residual has update_scale=0\.5, and lens takes apart"):
        LensRequest().check(BATCH, scaled)
    for residual in (
        ResidualConfig.preset("post"),
        ResidualConfig(final_norm=False),
        ResidualConfig(topology="ladder"),
    ):
        with pytest.raises(RequestError, match="lens takes apart"):
            LensRequest().check(BATCH, replace(config("llama"), residual=residual))
    LensRequest().check(BATCH, replace(config("llama"), residual=ResidualConfig(norm="layer", final_norm=True)))


def check_nan(group: TensorParallelGroup) -> None:
    model = build(group, "llama")
    if group.rank == 1:
        model.lm_head.weight.data[0, 0] = torch.nan
    with pytest.raises(GenerationError, match="NaN, or infinite"):
        look(model, BATCH, LensRequest())
    with pytest.raises(GenerationError, match="disagree about prompts or settings"):
        look(model, BATCH, LensRequest(window=1 + group.rank))


def test_every_rank_raises_for_nan_and_for_different_requests() -> None:
    run_ranks(2, check_nan)
