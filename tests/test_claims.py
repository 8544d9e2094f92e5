"""benchmarks/claims: every claim lies inside its bound and its broken twin outside; and a claim that does not hold is not overlooked."""

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.claims import __main__ as command  # noqa: E402 - from the checkout, which is not installed
from benchmarks.claims.claim import Bound, Claim, Found, NotRun, Outcome, run, short, slope  # noqa: E402
from benchmarks.claims.registry import CLAIMS  # noqa: E402
from benchmarks.claims.report import WIDTH, as_json, markdown_statements, print_claims, print_outcomes, write_json  # noqa: E402

QUICK = [claim.id for claim in CLAIMS.values() if claim.quick]
LONG = [claim.id for claim in CLAIMS.values() if not claim.quick]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def require(claim: Claim) -> Outcome:
    outcome = run(claim)
    if outcome.reason:
        pytest.skip(outcome.reason)
    assert outcome.rows and [row.figure for row in outcome.rows] == list(claim.bounds)
    for row in outcome.rows:
        assert row.measured in row.bound, f"{claim.id}: {row.figure}: {row.measured} is outside {row.bound}"
        assert row.twin not in row.bound, f"{claim.id}: {row.figure}: the twin's {row.twin} is inside {row.bound}"
    assert outcome.good
    return outcome


@pytest.mark.parametrize("name", QUICK)
def test_a_claim_holds_and_its_broken_twin_does_not(name: str) -> None:
    require(CLAIMS[name])


@pytest.mark.slow
@pytest.mark.timeout(900)  # each takes up to a minute on two free cores, and a machine may have others to serve
@pytest.mark.parametrize("name", LONG)
def test_a_long_claim_holds_and_its_broken_twin_does_not(name: str) -> None:
    outcome = require(CLAIMS[name])
    assert outcome.series or not CLAIMS[name].has_curves


@pytest.mark.parametrize("claim", CLAIMS.values(), ids=str)
def test_a_claim_says_where_it_is_from_and_what_its_twin_breaks(claim: Claim) -> None:
    assert claim.bounds and claim.twin and claim.source and claim.note
    assert all(bound.low > -float("inf") or bound.high < float("inf") for bound in claim.bounds.values())
    table = (ROOT / "docs" / "claims.md").read_text()
    assert markdown_statements([claim]) in table, (
        f"docs/claims.md has another {claim.id}: run with --page docs/claims.md"
    )
    assert f"`{claim.id}`" in table, f"docs/claims.md does not have {claim.id}"
    for figure, bound in claim.bounds.items():
        assert f"| {figure.replace('|', chr(92) + '|')} | {bound} |" in table, (
            f"{claim.id}: {figure} {bound} in docs/claims.md"
        )


def made_up(measured: float, twin: float) -> Claim:
    def measure(broken: bool) -> Found:
        return Found({"a figure": twin if broken else measured}, {} if broken else {"beside it": "a word"})

    return Claim("made-up", "A statement.", "S3 0", "wrong", "A note.", {"a figure": Bound(0, 1)}, "nothing", measure)


@pytest.mark.parametrize(
    ("measured", "twin", "verdict"),
    [
        (0.5, 2.0, "holds"),
        (0.0, -1e-9, "holds"),
        (2.0, 3.0, "FAILS"),
        (2.0, 0.5, "FAILS"),
        (float("nan"), 2.0, "FAILS"),
        (0.5, 0.5, "TWIN HOLDS"),
    ],
)
def test_verdicts(measured: float, twin: float, verdict: str) -> None:
    outcome = run(made_up(measured, twin))
    assert [row.verdict for row in outcome.rows] == [verdict]
    assert outcome.good == (verdict == "holds")


def test_a_figure_without_a_bound_is_our_own_mistake() -> None:
    with pytest.raises(AssertionError, match="figures"):
        run(replace(made_up(0.5, 2.0), bounds={"a figure": Bound(0, 1), "another": Bound(0, 1)}))


def test_what_a_claim_needs_and_does_not_find_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    def measure(broken: bool) -> Found:
        raise NotRun("needs a checkpoint: set X")

    outcome = run(replace(made_up(0, 0), measure=measure))
    assert outcome.good and [row.verdict for row in outcome.rows] == ["not run"]
    assert "made-up: needs a checkpoint: set X" in printed([outcome])


def test_slope_and_short_numbers() -> None:
    assert slope({4: 3 * 4**0.5, 8: 3 * 8**0.5, 32: 3 * 32**0.5}) == pytest.approx(0.5)
    assert [short(x) for x in (0.0, 1.0, -0.5267, 7.03e-17, 2938523161.3, 0.00612, float("nan"))] == [
        "0", "1", "-0.527", "7.03e-17", "2.94e+9", "0.00612", "-",
    ]  # fmt: skip
    assert [str(b) for b in (Bound(1, 1), Bound(0, 1e-12), Bound(low=3.0), Bound(high=1.6), Bound(-0.2, 0.2))] == [
        "= 1", "<= 1e-12", ">= 3", "<= 1.6", "-0.2 .. 0.2",
    ]  # fmt: skip


def printed(outcomes: list[Outcome]) -> str:
    text = StringIO()
    print_outcomes(outcomes, Console(file=text, width=WIDTH))
    return text.getvalue()


def test_the_table_of_everything_fits_a_hundred_columns_and_cuts_nothing() -> None:
    """With figures as wide as they come."""
    outcomes = []
    for claim in CLAIMS.values():
        values = dict.fromkeys(claim.bounds, -1.2345e-12)
        outcomes.append(run(replace(claim, measure=lambda broken, values=values: Found(values))))
    text = printed(outcomes)
    assert max(map(len, text.splitlines())) <= WIDTH
    assert "…" not in text
    assert all(figure in text for claim in CLAIMS.values() for figure in claim.bounds)
    listed = StringIO()
    print_claims(list(CLAIMS.values()), Console(file=listed, width=WIDTH))
    assert all(claim.id in listed.getvalue() for claim in CLAIMS.values())


def test_exit_codes_and_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("benchmarks.claims.registry.CLAIMS", {"made-up": made_up(0.5, 2.0)})
    output = tmp_path / "claims.json"
    assert command.main(["--output", str(output)]) == 0
    (claim,) = json.loads(output.read_text())["claims"]
    assert claim["figures"] == [
        {"figure": "a figure", "low": 0, "high": 1, "measured": 0.5, "twin": 2.0, "verdict": "holds"}
    ]
    assert "1 of 1 figures of 1 claims hold" in capsys.readouterr().out
    for measured, twin in ((2.0, 3.0), (0.5, 0.5)):
        monkeypatch.setattr("benchmarks.claims.registry.CLAIMS", {"made-up": made_up(measured, twin)})
        assert command.main([]) == 1
    assert command.main(["--plot", str(tmp_path / "claims.png")]) == 2
    assert "none of these claims has a curve" in capsys.readouterr().err
    assert command.main(["--output", str(tmp_path / "missing" / "x.json")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_an_unknown_claim_is_refused_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--only", "macaron,jacobain"]) == 2
    assert "'jacobain' is no claim; did you mean jacobian?" in capsys.readouterr().err
    assert command.main(["--only", ","]) == 2
    assert command.main(["--list", "--only", "macaron"]) == 0
    assert "half steps" in capsys.readouterr().out


def test_the_plot_draws_what_there_is(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from benchmarks.claims.plots import write_plot

    lines: dict[str, Any] = {
        "gradient-depth": {"post-norm": [(16, 1.0), (32, 1.1)], "pre-norm": [(16, 0.3), (32, 0.2)]},
        "init-rules": {name: [(4, 1.0), (8, 2.0)] for name in ("plain", "variance / sqrt(N)", "std / sqrt(2L)")},
        "learns": {name: [(1, 3.4), (2, 3.1)] for name in ("pre", "post", "deepnorm")},
        "ladder-overlap": {"measured": [(0.4, 1.4), (1.0, 1.9)], "theory": [(0.4, 1.4), (1.0, 2.0)]},
    }
    assert {claim.id for claim in CLAIMS.values() if claim.has_curves} == set(lines)
    sizes = []
    for names in (["learns"], list(lines)):
        outcomes = [Outcome(CLAIMS[name], [], {}, lines[name], 1.0) for name in names]
        content = as_json(outcomes, 2)
        write_json(str(tmp_path / "claims.json"), content)
        write_plot(json.loads((tmp_path / "claims.json").read_text()), str(tmp_path / "claims.png"))
        picture = (tmp_path / "claims.png").read_bytes()
        assert picture.startswith(b"\x89PNG")
        sizes.append(int.from_bytes(picture[16:20], "big"))
    assert sizes[0] < sizes[1], "panels without curves are left out"
    with pytest.raises(ValueError, match="has a curve"):
        write_plot(as_json([], 2), str(tmp_path / "claims.png"))
