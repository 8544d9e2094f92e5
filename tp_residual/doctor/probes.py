"""The probes: each looks at one kind of step of an observed run and returns, for this rank, what was wrong first.

All of them run their collectives before they judge, so ranks that disagree about a fault do not part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from tp_residual.checkpoint.load import load_state_dict_blocks
from tp_residual.doctor.expect import Expected, Join
from tp_residual.doctor.observe import Observed, Seen, WholeWeights, differing_ranks, observe
from tp_residual.doctor.report import Finding, Status
from tp_residual.model.attention import Attention
from tp_residual.model.attention_backend import NoCache, TokenBatch
from tp_residual.model.layout import ModelLayout
from tp_residual.model.mlp import MLP
from tp_residual.model.rope import rope_tables
from tp_residual.parallel.blocks import parameter_blocks, sync_gradients
from tp_residual.parallel.group import TensorParallelGroup
from tp_residual.residual.config import SublayerPlan

# One step is judged against fp64 from the same inputs: an error is that step's rounding alone. fp32: some hundred roundings of 6e-8 in a
# row of a matrix product. 16 bits: two or three of 4e-3 (bf16). The mistakes that are named are wrong by a factor or a whole term.
LIMITS = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 1e-2}
# A mistake's prediction must come this much closer than the right one's to be the name of what happened.
_CLOSER = 10.0


def error(value: Tensor, reference: Tensor) -> float:
    """Norm of the difference over norm of the reference, of the whole; infinite when something is not finite."""
    if not bool(torch.isfinite(value).all()):
        return float("inf")
    difference = float(torch.linalg.vector_norm(value - reference))
    return difference if difference == 0 else difference / max(float(torch.linalg.vector_norm(reference)), 1e-300)


@dataclass
class Case:
    """One examined run: the model, what it should do, and where each update belongs."""

    observed: Observed
    expected: Expected
    weights: WholeWeights
    plans: list[SublayerPlan]
    limit: float
    batch: TokenBatch

    @property
    def group(self) -> TensorParallelGroup:
        return self.observed.model.group

    @cached_property
    def steps(self) -> list["Step"]:
        """Gathered once for all probes."""
        return steps_of(self)

    def place(self, plan: SublayerPlan) -> str:
        return f"model.layers.{plan.layer}.{'+'.join(plan.modules)}"


@dataclass(frozen=True)
class Step:
    """The completion of one update: boundary number, whose it is (None: the embedding's), and the values around it, whole, in fp64.

    update, own, bias: as the sublayer wrote it, its sum, this rank's summand and what is added once.
    """

    number: int
    plan: SublayerPlan | None
    before: Tensor | None
    update: Tensor
    own: Tensor
    bias: Tensor | None
    after: Tensor


def steps_of(case: Case) -> list[Step]:
    """Updates are completed oldest first: the embedding's, then one for each sublayer of the plan."""
    observed, found, latest, waiting = case.observed, [], None, iter([None, *case.plans])
    for number, seen in enumerate(observed.boundaries):
        after = observed.stream(seen.residual)
        if seen.partial is not None:
            plan = next(waiting, None)
            if plan is None:
                update, own, bias = observed.update(seen.partial, seen.bias), seen.partial, None
            else:
                update, own, bias = observed.written(plan.layer, plan.modules)
            found.append(Step(number, plan, latest, update, _own_rows(observed, own), bias, after))
        latest = after
    return found


def _own_rows(observed: Observed, partial: Tensor) -> Tensor:
    """What the update would be if nobody's summands were added: this rank's own, or each token's from the rank that keeps it."""
    wide = partial.detach().double()
    if not observed.boundary.sequence_parallel or observed.model.group.size == 1:
        return wide
    rows = slice(*observed.boundary.token_split(observed.tokens).ranges[observed.model.group.rank])
    return observed.stream(wide[rows])


# -- joins


def probe_joins(case: Case) -> Finding:
    """Is each new residual the old one and the completed update, put together as the config says?"""
    steps, errors = case.steps, list[float]()
    older: list[Tensor | None] = [None]
    fault: Finding | None = None
    if len(steps) != len(case.plans) + 1:
        return Finding(
            "joins",
            "fault",
            f"skipped: {len(case.plans) + 1} updates are owed in one pass and {len(steps)} were completed",
        )
    for step in steps:
        before = step.before
        if before is None:
            right = case.expected.embedding(step.update)
            guesses = {} if case.group.size == 1 else {"not summed over ranks": case.expected.embedding(step.own)}
            where = "model.embed_tokens"
        else:
            assert step.plan is not None
            join = case.expected.join(step.plan, before, step.update)
            right = case.expected.after(step.plan, join.total)
            guesses = {
                name: case.expected.after(step.plan, total)
                for name, total in _mistakes(case, step, before, join, older[-1]).items()
            }
            where = case.place(step.plan)
        wrong = error(step.after, right)
        errors.append(wrong)
        if wrong > case.limit and fault is None:
            fault = Finding("joins", "fault", _named(step.after, wrong, guesses), where, wrong, case.limit)
        older.append(before)
    fine = Finding("joins", "ok", f"{len(steps)} updates join the stream as planned", "", max(errors), case.limit)
    return replace(fault or fine, series=tuple(errors))


def _mistakes(case: Case, step: Step, before: Tensor, join: Join, older: Tensor | None) -> dict[str, Tensor]:
    """What is in the place of skip + update after each known mistake."""
    assert step.plan is not None
    skip, update, size = join.skip, join.update, case.group.size
    # with two ranks these cannot be told apart
    twice, both = (
        (", or: update summed twice", ", or: skip added on every rank before the sum") if size == 2 else ("", "")
    )
    guesses = {
        "update skipped": skip,
        f"update doubled{twice}": skip + 2 * update,
        "update with the wrong sign": skip - update,
        "skip missing": update,
        f"skip doubled{both}": 2 * skip + update,
        "connection ignored: the bare sum": before + step.update,
    }
    if older is not None:
        guesses["mis-based: added to the residual before the last"] = case.expected.join(
            step.plan, older, step.update
        ).total
    if size > 1:
        guesses["not summed over ranks"] = case.expected.join(step.plan, before, step.own + _zero(step.bias)).total
        guesses[f"update summed twice: {size} times too large"] = case.expected.join(
            step.plan, before, size * (step.update - _zero(step.bias)) + _zero(step.bias)
        ).total
        guesses[f"skip added on every rank before the sum: {size} times"] = size * skip + update
        if step.bias is not None:
            biased = step.update + (size - 1) * step.bias
            guesses[f"bias added on every rank: {size} times"] = case.expected.join(step.plan, before, biased).total
    scaled = _fit(step.after, skip, update) if step.plan.connection.post_norm is None else None
    if scaled is not None:
        a, b = scaled
        guesses[f"mis-scaled: {a:.4g} times the skip and {b:.4g} times the update that are due"] = a * skip + b * update
    return guesses


def _zero(bias: Tensor | None) -> Tensor | float:
    return 0.0 if bias is None else bias


def _fit(value: Tensor, x: Tensor, u: Tensor) -> tuple[float, float] | None:
    """(a, b) of the nearest a x + b u."""
    xx, uu, xu = float((x * x).sum()), float((u * u).sum()), float((x * u).sum())
    xv, uv = float((x * value).sum()), float((u * value).sum())
    determinant = xx * uu - xu * xu
    if determinant <= 1e-12 * xx * uu:
        return None
    return (xv * uu - uv * xu) / determinant, (uv * xx - xv * xu) / determinant


def _named(value: Tensor, wrong: float, guesses: Mapping[str, Tensor]) -> str:
    """The mistake that predicts best what is there, if it does so clearly."""
    if wrong == float("inf"):
        return "not finite: NaN or infinity in the stream"
    errors = {name: error(value, guess) for name, guess in guesses.items()}
    # a fit has two free numbers: it names only what no mistake with a name of its own predicts
    for names in (
        [n for n in errors if not n.startswith("mis-scaled")],
        [n for n in errors if n.startswith("mis-scaled")],
    ):
        if names and errors[best := min(names, key=errors.__getitem__)] * _CLOSER < wrong:
            return f"{best} (off by {errors[best]:.1e}, the right value by {wrong:.1e})"
    return f"joined by no rule that is known: off by {wrong:.1e}"


# -- reads


def probe_reads(case: Case) -> Finding:
    """Is what each sublayer reads the norm that is due, of the residual that is there?"""
    observed, expected = case.observed, case.expected
    due = _norms_due(case)
    errors, fault, latest = list[float](), None, None
    for seen in observed.boundaries:
        residual = observed.stream(seen.residual)
        if seen.read is None:
            latest = residual
            continue
        read, name = seen.read.detach().double(), next(due, "")
        guesses = {"norm missing: the residual itself is read": residual}
        if seen.site.norm != name:
            where = seen.site.norm or seen.site.update
            fault = fault or Finding(
                "reads", "fault", f"wrong norm: {seen.site.norm or 'none'} in the place of {name or 'none'}", where
            )
            latest = residual
            continue
        right = expected.norm(residual, name) if name else residual
        if name:
            weight = expected.weights(f"{name}.weight")
            for offset in (-1.0, 1.0):
                guesses[f"norm weight off by {offset:+g}"] = expected.norm(residual, name, weight=weight + offset)
            if latest is not None:
                guesses["mis-based: the norm of the residual before this update"] = expected.norm(latest, name)
        wrong = error(read, right)
        errors.append(wrong)
        if wrong > case.limit and fault is None:
            fault = Finding("reads", "fault", _named(read, wrong, guesses), name or seen.site.update, wrong, case.limit)
        latest = residual
    fine = Finding(
        "reads", "ok", f"{len(errors)} reads are the norms that are due", "", max(errors, default=0.0), case.limit
    )
    return replace(fault or fine, series=tuple(errors))


def _norms_due(case: Case) -> Iterator[str]:
    """The norm of each read in turn, "" where the residual itself is read."""
    for plan in case.plans:
        single = plan.read_norms[0] if len(plan.read_norms) == 1 else None
        yield f"model.layers.{plan.layer}.{single}" if single else ""
    yield "model.norm" if case.expected.residual.has_final_norm else ""


# -- updates


def probe_updates(case: Case) -> Finding:
    """Is each module's sum over ranks what the module computes in one process, from the same input?"""
    observed = case.observed
    reads = _reads_by_plan(case)
    errors, fault = list[float](), None
    for plan, read in zip(case.plans, reads, strict=True):
        due = case.expected.inputs(plan, read)
        for name in plan.modules:
            key, where = (plan.layer, name), f"model.layers.{plan.layer}.{name}"
            if key not in observed.outputs:
                fault = fault or Finding("updates", "fault", "skipped: the module did not run", where)
                continue
            given, output = observed.inputs[key].detach().double(), observed.outputs[key]
            total = observed.update(output.value, output.bias)
            module = _alone(case, plan.layer, name)
            with torch.no_grad():
                right = _run_alone(case, module, given)
            wrong_input, wrong = error(given, due[name]), error(total, right)
            errors.append(wrong)
            if fault is None and wrong_input > case.limit:
                guesses = {"read unscaled": read, "norm missing": read}
                fault = Finding(
                    "updates",
                    "fault",
                    f"wrong input: {_named(given, wrong_input, guesses)}",
                    where,
                    wrong_input,
                    case.limit,
                )
            if fault is None and wrong > case.limit:
                factor = _factor(total, right)
                guesses = {
                    f"mis-scaled: {factor:.4g} times what one process computes": factor * right,
                    "a bias on every rank": right
                    + (case.group.size - 1) * _zero(None if output.bias is None else output.bias.detach().double()),
                    "doubled": 2 * right,
                    "of the wrong sign": -right,
                    "dead: it writes nothing": torch.zeros_like(right),
                }
                own_bias = _row_bias(module)
                if own_bias is not None and case.group.size > 1:
                    guesses["with its bias on every rank"] = right + (case.group.size - 1) * own_bias
                if own_bias is not None:
                    guesses["dead: it writes nothing but its bias"] = own_bias.expand_as(right)
                named = _named(total, wrong, guesses)
                if named.startswith("joined"):
                    named = f"mis-sharded: off by {wrong:.1e} from one process; heads, rows or halves are mixed up"
                fault = Finding("updates", "fault", named, where, wrong, case.limit)
        case.weights.forget()
    fine = Finding(
        "updates",
        "ok",
        f"{len(errors)} modules compute what they do in one process",
        "",
        max(errors, default=0.0),
        case.limit,
    )
    return replace(fault or fine, series=tuple(errors))


def _alone(case: Case, layer: int, name: str) -> nn.Module:
    """The whole of a sublayer's module in one process, in fp64."""
    model = case.observed.model
    single, layout = TensorParallelGroup.single(model.group.device), ModelLayout.of(model.config, 1)
    kind: Any = Attention if name == "self_attn" else MLP
    module: nn.Module = kind(layout, layer, single, sequence_parallel=False, dtype=torch.float64)
    blocks = parameter_blocks(module)
    load_state_dict_blocks(blocks, {b.name: case.weights(f"model.layers.{layer}.{name}.{b.name}") for b in blocks})
    return module


def _row_bias(module: nn.Module) -> Tensor | None:
    for name in ("o_proj", "down_proj"):
        bias = getattr(getattr(module, name, None), "bias", None)
        if isinstance(bias, Tensor):
            return bias.detach()
    return None


def _reads_by_plan(case: Case) -> list[Tensor]:
    return [seen.read.detach().double() for seen in case.observed.boundaries if seen.read is not None][
        : len(case.plans)
    ]


def _run_alone(case: Case, module: nn.Module, x: Tensor) -> Tensor:
    """The whole module's update, its bias in it."""
    if isinstance(module, Attention):
        batch = case.batch
        lengths = batch.sequence_lengths if case.observed.model.config.rope_type == "dynamic" else None
        rope = rope_tables(case.observed.model.config, batch.positions, torch.float64, lengths)
        partial = module(x, rope, batch, NoCache())
    else:
        partial = module(x)
    return partial.value if partial.bias is None else partial.value + partial.bias


def probe_writers(case: Case) -> Finding:
    """Which sublayers write nothing at all? No fault: it is how ReZero and zeroed writers begin."""
    silent = []
    for plan in case.plans:
        update, _, _ = case.observed.written(plan.layer, plan.modules)
        if not bool(update.any()):
            silent.append(case.place(plan))
    if not silent:
        return Finding("writers", "ok", "every sublayer writes something")
    return Finding(
        "writers",
        "note",
        f"{len(silent)} of {len(case.plans)} sublayers write zeros, the first is {silent[0]}",
        silent[0],
    )


# -- both ends of the stream


def probe_ends(case: Case) -> Finding:
    """Does the stream begin as the embedding's rows, and are the logits the head's product with what was read last?"""
    observed, config = case.observed, case.observed.model.config
    first, last = observed.boundaries[0], observed.boundaries[-1]
    assert first.partial is not None and last.read is not None and observed.local_logits is not None
    embedded = observed.update(first.partial, first.bias)
    rows = case.weights("model.embed_tokens.weight")[case.batch.token_ids]
    head = "model.embed_tokens" if config.tie_word_embeddings else "lm_head"
    start, stop = observed.model.lm_head.split.ranges[case.group.rank]
    due = last.read.detach().double() @ case.weights(f"{head}.weight")[start:stop].T
    logits = observed.local_logits.detach().double()
    # its own products round as the modules' do
    errors = [error(embedded, rows), error(logits, due) if due.numel() else 0.0]
    for where, value, right, wrong in (
        ("model.embed_tokens", embedded, rows, errors[0]),
        ("lm_head", logits, due, errors[1]),
    ):
        if wrong > case.limit:
            named = _named(
                value, wrong, {f"mis-scaled: {(factor := _factor(value, right)):.4g} times what is due": factor * right}
            )
            return Finding("ends", "fault", named, where, wrong, case.limit, tuple(errors))
    return Finding(
        "ends",
        "ok",
        "the embedding and the head are the table's rows and its product",
        "",
        max(errors),
        case.limit,
        tuple(errors),
    )


def _factor(value: Tensor, right: Tensor) -> float:
    square = float((right * right).sum())
    return float((value * right).sum()) / square if square else 0.0


# -- replicas


def probe_replicas(case: Case) -> Finding:
    """Do all ranks hold the same bits where they should: the replicated stream, what is read, parameters that several ranks hold?"""
    observed, group = case.observed, case.group
    if group.size == 1:
        return Finding("replicas", "skipped", "one rank has no replicas")
    named: list[tuple[str, Tensor]] = []
    for seen in observed.boundaries:
        if not observed.boundary.sequence_parallel:
            named.append((f"the residual at {seen.site}", seen.residual))
        if seen.read is not None:
            named.append((f"what is read at {seen.site}", seen.read))
    for name, blocks in case.weights.blocks.items():
        if all(len(block.holders) == group.size for block in blocks):
            named += [(f"the parameter {name}", block.of(block.parameter)) for block in blocks]
    differ = differing_ranks(group, [tensor for _, tensor in named])
    # parameters first: a parameter that differs makes the stream differ
    for (what, _), ranks in sorted(
        zip(named, differ, strict=True), key=lambda pair: not pair[0][0].startswith("the parameter")
    ):
        if ranks:
            return Finding(
                "replicas", "fault", f"replicas differ: {what} on ranks {ranks} is not rank 0's", what.split()[-1]
            )
    return Finding("replicas", "ok", f"{len(named)} replicated values have the same bits on all ranks")


# -- zero writers


def probe_zero_writers(case: Case, sequences: list[list[int]]) -> Finding:
    """With every writer silenced the stream must arrive as the skips alone make it."""
    model = case.observed.model
    kept: list[tuple[nn.Parameter, Tensor]] = []
    for layer in model.model.layers:
        for name in ("self_attn.o_proj", "mlp.down_proj", "first_mlp.down_proj"):
            for kind in ("weight", "bias"):
                parameter = dict(layer.named_parameters()).get(f"{name}.{kind}")
                if parameter is not None:
                    kept.append((parameter, parameter.detach().clone()))
    with torch.no_grad():
        for parameter, _ in kept:
            parameter.zero_()
        try:
            quiet = observe(model, sequences, gradients=False)
        finally:
            for parameter, value in kept:
                parameter.copy_(value)
    states = [quiet.stream(seen.residual) for seen in quiet.boundaries]
    start = next(
        (state for state, seen in zip(states, quiet.boundaries, strict=True) if seen.partial is not None), states[0]
    )
    x, silent, history = start, torch.zeros_like(start), [start]
    for index, plan in enumerate(case.plans):
        x = case.expected.after(plan, case.expected.join(plan, x, silent).total)
        last_of_layer = index + 1 == len(case.plans) or case.plans[index + 1].layer != plan.layer
        if last_of_layer and case.expected.residual.depth_mix:
            history.append(x)
            x = case.expected.mixture(plan.layer, history)
    wrong = error(states[-1], x)
    limit = case.limit * max(1, len(case.plans)) ** 0.5
    if wrong <= limit:
        return Finding("zero writers", "ok", "silenced sublayers leave what the skips carry", "", wrong, limit)
    ratio = float(states[-1].norm() / x.norm()) if float(x.norm()) > 0 else float("inf")
    size, count = case.group.size, len(case.plans)
    named = f"|x_L| is {ratio:.4g} times what is due"
    for base, what in (
        (0.0, "the skip is missing"),
        (float(size), "the skip is added on every rank"),
        (2.0, "the skip is doubled"),
    ):
        if base == 0.0 and ratio < 1e-6:
            named += f": {what}"
        elif (
            base > 1
            and ratio > 1
            and abs(torch.tensor(ratio).log().item() / torch.tensor(base).log().item() - count) < 0.01
        ):
            named += f" = {base:g}^{count}: {what}, at every sublayer"
            break
    return Finding("zero writers", "fault", named, "", wrong, limit)


# -- gradients


def probe_gradients(case: Case) -> list[Finding]:
    """Do both paths of each connection carry the gradient that is due, and the right share of it?

    For each completed update: its own gradient, and the gradient of the residual that it was added to, as far as it came by the skip.
    """
    steps = [step for step in case.steps if step.plan is not None]
    worst, faults, norms = (
        {"skip gradient": 0.0, "branch gradient": 0.0},
        dict[str, Finding](),
        dict[str, list[float]](),
    )
    for step in reversed(steps):
        assert step.plan is not None and step.before is not None
        after = _whole_gradient(case, step.number)
        with torch.enable_grad():
            x, u = step.before.clone().requires_grad_(), step.update.clone().requires_grad_()
            total = case.expected.after(step.plan, case.expected.join(step.plan, x, u).total)
            due_x, due_u = torch.autograd.grad(total, (x, u), after, allow_unused=True)
        before = case.observed.boundaries[step.number - 1]
        outputs = [case.observed.outputs.get((step.plan.layer, name)) for name in step.plan.modules]
        pairs = [
            ("branch gradient", torch.zeros_like(u) if output.value.grad is None else output.value.grad.double(), due_u)
            for output in outputs
            if output is not None
        ]
        if before.one_operator:
            pairs.append(("skip gradient", _stream_gradient(case, before), due_x))
        for kind, found, due in pairs:
            due = torch.zeros_like(found) if due is None else due
            wrong = error(found, due)
            worst[kind] = max(worst[kind], wrong)
            norms.setdefault(kind, []).append(float(found.norm()))
            if wrong > case.limit and kind not in faults:
                faults[kind] = Finding(
                    kind,
                    "fault",
                    _named_gradient(kind, found, due, wrong, case.group.size),
                    case.place(step.plan),
                    wrong,
                    case.limit,
                )
    results = []
    for kind, value in worst.items():
        path = "skip" if kind.startswith("skip") else "update"
        fine = Finding(kind, "ok", f"each {path} carries the gradient that is due", "", value, case.limit)
        results.append(replace(faults.get(kind) or fine, series=tuple(reversed(norms.get(kind, [])))))
    return results


def _named_gradient(kind: str, found: Tensor, due: Tensor, wrong: float, size: int) -> str:
    path = kind.split()[0]
    if float(found.norm()) <= 1e-6 * float(due.norm()):
        return f"dead {path}: no gradient comes by it (due: norm {float(due.norm()):.3g})"
    factor = float((found * due).sum() / (due * due).sum()) if float(due.norm()) > 0 else float("inf")
    if error(found, factor * due) * _CLOSER < wrong:
        known = {
            float(size): f", as if summed over {size} ranks twice",
            1 / size: f", as if averaged over {size} ranks",
        }
        text = next((text for value, text in known.items() if abs(factor - value) < 1e-3 and size > 1), "")
        return f"mis-scaled {path} gradient: {factor:.4g} times what is due{text}"
    return f"wrong {path} gradient: off by {wrong:.1e}"


def _stream_gradient(case: Case, seen: Seen) -> Tensor:
    grad = seen.residual.grad
    return case.observed.stream(torch.zeros_like(seen.residual) if grad is None else grad)


def _whole_gradient(case: Case, number: int) -> Tensor:
    """Of the residual that boundary `number` made, by all its readers."""
    seen = case.observed.boundaries[number]
    gradient = _stream_gradient(case, seen)
    if seen.one_operator and seen.read is not None and seen.site.norm:
        read = case.observed.sum(torch.zeros_like(seen.read) if seen.read.grad is None else seen.read.grad)
        with torch.enable_grad():
            x = case.observed.stream(seen.residual).requires_grad_()
            (through,) = torch.autograd.grad(case.expected.norm(x, seen.site.norm), x, read)
        gradient = gradient + through
    return gradient


def probe_replicated_gradients(case: Case) -> Finding:
    """After `sync_gradients`, do all holders of a parameter have the same gradient? One that was not declared partial does not."""
    group = case.group
    if group.size == 1:
        return Finding("gradient sync", "skipped", "one rank has nothing to sum")
    blocks = [block for blocks in case.weights.blocks.values() for block in blocks]
    sync_gradients(blocks, group)
    shared = [block for block in blocks if len(block.holders) == group.size and block.parameter.grad is not None]
    worst, fault = 0.0, None
    for block in shared:
        grad = block.of(block.parameter.grad).double()  # type: ignore[arg-type] # it has one
        mean = case.observed.sum(grad) / group.size
        everybody = case.observed.sum((grad - mean).norm().reshape(1) ** 2).sqrt()
        wrong = float(everybody) / max(float(mean.norm()), 1e-30)
        worst = max(worst, wrong)
        # replicated arithmetic on equal inputs rounds alike; a sum that is missing leaves whole shares apart
        if wrong > case.limit and fault is None:
            fault = Finding(
                "gradient sync", "fault", f"unsummed gradient: the ranks' gradients of {block.name} differ by {wrong:.1e} of their mean",
                block.name, wrong, case.limit,
            )  # fmt: skip
    return fault or Finding(
        "gradient sync", "ok", f"{len(shared)} shared gradients are the same on all ranks", "", worst, case.limit
    )


def probe_parameter_gradients(case: Case) -> Finding:
    """Is each parameter's gradient, summed over its holders, that of one process from the same input and the same gradient of its output?

    Modules and the norms that are read; after `sync_gradients`.
    """
    observed = case.observed
    errors, fault = list[float](), None

    def compare(name: str, due: Tensor | None) -> Finding | None:
        found = case.weights.gather(name, gradient=True)
        due = torch.zeros_like(found) if due is None else due.detach()
        wrong = error(found, due) if float(due.norm()) > 0 else float(found.norm())
        errors.append(wrong)
        if wrong <= case.limit or fault is not None:
            return None
        return Finding(
            "parameter gradients",
            "fault",
            _named_gradient("parameter", found, due, wrong, case.group.size),
            name,
            wrong,
            case.limit,
        )

    for plan in case.plans:
        for name in plan.modules:
            output = observed.outputs.get((plan.layer, name))
            if output is None or output.value.grad is None:
                continue
            where = f"model.layers.{plan.layer}.{name}"
            module = _alone(case, plan.layer, name)
            with torch.enable_grad():
                update = _run_alone(case, module, observed.inputs[plan.layer, name].detach().double())
            update.backward(output.value.grad.double())
            for block in parameter_blocks(module):
                grad = None if block.parameter.grad is None else block.of(block.parameter.grad)
                fault = compare(f"{where}.{block.name}", grad) or fault
        case.weights.forget()
    for seen in observed.boundaries:
        if seen.read is None or not seen.site.norm:
            continue
        gradient = observed.sum(torch.zeros_like(seen.read) if seen.read.grad is None else seen.read.grad)
        names = [f"{seen.site.norm}.weight"] + (
            [f"{seen.site.norm}.bias"] if case.expected.residual.norm == "layer" else []
        )
        leaves = {name: case.weights(name).clone().requires_grad_() for name in names}
        with torch.enable_grad():
            value = Expected(case.expected.config, leaves.__getitem__).norm(
                observed.stream(seen.residual), seen.site.norm
            )
        for name, grad in zip(names, torch.autograd.grad(value, list(leaves.values()), gradient), strict=True):
            fault = compare(name, grad) or fault
    fault = _gradients_of_ends(case, compare) or fault
    fine = Finding(
        "parameter gradients",
        "ok",
        f"{len(errors)} gradients are those of one process",
        "",
        max(errors, default=0.0),
        case.limit,
    )
    return replace(fault or fine, series=tuple(errors))


def _gradients_of_ends(case: Case, compare: Callable[[str, Tensor | None], Finding | None]) -> Finding | None:
    """The embedding's and the head's, which are one when tied."""
    observed = case.observed
    first, last, cotangent = observed.boundaries[0], observed.boundaries[-1], observed.cotangent
    assert first.partial is not None and last.read is not None and cotangent is not None
    embedding = torch.zeros_like(case.weights("model.embed_tokens.weight"))
    if first.partial.grad is not None:
        embedding.index_add_(0, case.batch.token_ids, first.partial.grad.double())
    head = cotangent.T @ last.read.detach().double()
    if observed.model.config.tie_word_embeddings:
        return compare("model.embed_tokens.weight", embedding + head)
    # both, whatever the first says: each gathers a gradient, and ranks may not agree about a fault
    findings = compare("model.embed_tokens.weight", embedding), compare("lm_head.weight", head)
    return findings[0] or findings[1]


# -- precision


def probe_swallowed(case: Case) -> Finding:
    """How much of the updates a bf16 stream would lose to rounding: the share of non-zero elements that change nothing."""
    lost, total, shares = 0, 0, list[float]()
    where, highest = "", 0.0
    for step in case.steps:
        if step.plan is None or step.before is None:
            continue
        join = case.expected.join(step.plan, step.before, step.update)
        old = join.skip.bfloat16()
        changed = (old.double() + join.update).bfloat16() != old
        written = join.update != 0
        share = float((written & ~changed).sum()) / max(1, int(written.sum()))
        shares.append(share)
        lost, total = lost + int((written & ~changed).sum()), total + int(written.sum())
        if share > highest:
            highest, where = share, case.place(step.plan)
    share = lost / max(1, total)
    text = f"{share:.2%} of the updates' elements vanish in a bfloat16 stream, most at {where or 'none'}: {highest:.2%}"
    rounds = case.observed.boundary.stream_dtype.itemsize < 4
    status: Status = "fault" if share > 0.5 and rounds else "note" if share > 0.1 else "ok"
    if status == "fault":
        text = f"updates are swallowed: {text}; keep the stream in float32"
    return Finding("swallow rate", status, text, where, share, 0.5, tuple(shares))
