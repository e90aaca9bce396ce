"""Limits from budgets, limits from clean runs, and how many prompts they take.

derive: every limit keeps its budget when put back into the bound it came from, also after rounding,
and what is written loads, lints clean and certifies. infer: the order statistic covers what it says
(simulated for two laws), a clean run passes the contract inferred from another, a drifted run fails
it, and an injected run is refused. plan: the promised power is met by the verdict itself.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import typer
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom
from typer.testing import CliRunner

from kernel_contracts import bounds
from kernel_contracts.commented import commented
from kernel_contracts.confidence import mean_bounds
from kernel_contracts.definitions import Budget
from kernel_contracts.derive import derive_contract, round_down
from kernel_contracts.errors import InputError
from kernel_contracts.infer import ControlRun, infer_contract, tolerance_n, tolerance_rank
from kernel_contracts.loading import check_text, parse_contract
from kernel_contracts.planning import clean_n, plan_contract, prompts_needed
from kernel_contracts.verdict import Evidence, judge
from mismatch_audit.cli.contract import contract_app
from mismatch_audit.cli.plan import plan
from mismatch_audit.tokens import token_schema, write_part

RUNNER = CliRunner()
PLAN = typer.Typer()
PLAN.command()(plan)
SAMPLES = Path(__file__).parents[1] / "samples"


def table(rng: np.random.Generator, prompts: int, tokens: int, rms: float) -> pd.DataFrame:
    """Rows of an engine whose log-ratio has standard deviation ``rms``, more on some prompts."""
    n = prompts * tokens
    scale = np.repeat(rms * np.exp(0.3 * rng.standard_normal(prompts)), tokens)
    dlp = scale * rng.standard_normal(n)
    ids = np.repeat([f"p{i:04d}" for i in range(prompts)], tokens)
    return pd.DataFrame(
        {
            "prompt_id": ids,
            "sequence_id": ids,
            "path": "decode",
            "reference_logprob": -1.0 + dlp,
            "engine_logprob": -1.0,
            "kl_engine_reference": scale**2 / 2,
            "flip": rng.random(n) < rms / 4,
            "nonfinite": 0,
        }
    )


# derive ------------------------------------------------------------------------------------------


@given(st.floats(0.001, 0.99), st.integers(1, 5000))
@settings(max_examples=60, deadline=None)
def test_a_derived_limit_keeps_the_budget_and_is_not_needlessly_tight(
    b: float, horizon: int
) -> None:
    """Put back into the sequence bound the limit gives the budget, from below, within rounding."""
    budget = Budget(reward_drift=b, reward_range=1.0, horizon=horizon)
    clause = derive_contract(budget).contract.statistical[0]
    assert clause.metric == "kl_engine_reference"
    tv = float(bounds.sequence_tv_from_mean_kl(clause.limit, horizon))
    assert b * 0.99 <= tv <= b * (1 + 1e-9)


@given(st.floats(1e-12, 1e12))
@settings(max_examples=200, deadline=None)
def test_rounding_down_never_loosens(value: float) -> None:
    """Three digits, at most the value, less than one unit of the third digit below it."""
    rounded = round_down(value)
    assert rounded <= value < rounded * 1.0101
    assert float(f"{rounded:.3g}") == rounded


def test_derive_writes_a_contract_that_lints_clean_and_says_where_limits_come_from(
    tmp_path: Path,
) -> None:
    """The arithmetic is printed, the file holds it as comments, and no warning is left."""
    out = tmp_path / "contract.yaml"
    options = "--reward-drift 0.1 --reward-range 1 --horizon 512 --flip-budget 0.05"
    result = RUNNER.invoke(
        contract_app, ["derive", *options.split(), "--name", "mine", "--out", str(out)]
    )
    assert result.exit_code == 0, result.output
    assert "kappa <= 0.02 / 512 = 3.906e-05 nats per token" in result.output
    text = out.read_text()
    contract, problems = check_text(text)
    assert problems == []
    assert contract is not None
    assert contract.name == "mine"
    assert [c.limit for c in contract.statistical] == [3.9e-05, 0.05]
    assert contract.statistical[0].weight == "token"
    comments = [line for line in text.splitlines() if line.lstrip().startswith("#")]
    assert any("kappa <= 0.02 / 512" in line for line in comments)


def test_every_derived_promise_can_be_certified_by_its_own_min_prompts() -> None:
    """An engine without drift passes on so many prompts of full length, not on one fewer."""
    contract = derive_contract(
        Budget(reward_drift=0.1, reward_range=1.0, horizon=64, flip_budget=0.02)
    ).contract
    needed = max(clean_n(c, contract.alpha) for c in contract.clauses())

    def verdicts(n: int) -> set[str]:
        rows = table(np.random.default_rng(0), n, 4, 0.0)
        return {m.verdict for m in judge(contract, Evidence(rows, pd.DataFrame(
            {"prompt_id": rows["prompt_id"].unique()}), max_rows=4))}  # fmt: skip

    assert verdicts(needed) == {"PASS"}
    assert verdicts(needed - 1) != {"PASS"}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("", "no budget given"),
        ("--reward-drift 0.1", "horizon"),
        ("--reward-drift 2 --reward-range 1 --horizon 8", "limits nothing"),
        ("--flip-budget 1.5", "flip-budget"),
        ("--reward-drift -1 --horizon 8", "reward-drift"),
    ],
)
def test_a_budget_that_cannot_be_is_refused_in_words(options: str, said: str) -> None:
    """One error that names the option or the mistake; no traceback of ours or of pydantic."""
    result = RUNNER.invoke(contract_app, ["derive", *options.split()])
    assert isinstance(result.exception, InputError)
    assert said in str(result.exception)


def test_a_comment_never_changes_the_contract() -> None:
    """Commented YAML loads back to an equal contract, whatever the texts hold."""
    contract = parse_contract((SAMPLES / "contracts" / "bf16-serving.yaml").read_text())
    texts = ["x: {1} - id: N1", "", "a " * 200, "- {id: S1}"]
    assert parse_contract(commented(contract, texts, {"S1": texts, "R1": texts})) == contract


# infer -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("coverage", [0.5, 0.9, 0.95])
@pytest.mark.parametrize("law", ["lognormal", "uniform"])
def test_the_tolerance_bound_covers_as_often_as_it_says(coverage: float, law: str) -> None:
    """Over 4000 samples the order statistic covers the share at least 95 % of the time (within
    three standard errors of the simulation), and the rank below it does not."""
    rng, n, trials = np.random.default_rng(7), 80, 4000
    rank = tolerance_rank(n, coverage, 0.95)
    assert rank is not None
    draws = rng.random((trials, n))  # of the law's own distribution function
    values = np.exp(1.5 * np.sqrt(2) * _probit(draws)) if law == "lognormal" else draws
    quantile = (
        np.exp(1.5 * np.sqrt(2) * _probit(np.array(coverage))) if law == "lognormal" else coverage
    )
    ordered = np.sort(values, axis=1)
    error = 3 * np.sqrt(0.95 * 0.05 / trials)
    assert (ordered[:, rank - 1] >= quantile).mean() >= 0.95 - error
    assert float(binom.cdf(rank - 2, n, coverage)) < 0.95


def _probit(u: np.ndarray) -> np.ndarray:
    from scipy.special import ndtri

    return np.asarray(ndtri(u))


def test_too_few_values_give_no_tolerance_bound() -> None:
    """29 prompts for 90 %, 59 for 95 % at 95 %; one fewer gives none, never the maximum."""
    for coverage, n in ((0.9, 29), (0.95, 59)):
        assert tolerance_n(coverage, 0.95) == n
        assert tolerance_rank(n, coverage, 0.95) == n
        assert tolerance_rank(n - 1, coverage, 0.95) is None


def test_a_clean_run_passes_an_inferred_contract_and_a_drifted_one_fails() -> None:
    """40 fresh clean runs and 40 with three times the drift, against one contract."""
    rng = np.random.default_rng(3)
    control = ControlRun("control", table(rng, 120, 12, 0.02))
    inferred = infer_contract([control], margin=2.0)
    assert parse_contract(inferred.text) == inferred.contract
    assert all("no budget" in c.description for c in inferred.contract.statistical)

    def share(rms: float, verdict: str) -> float:
        found = []
        for _ in range(40):
            rows = table(rng, 200, 12, rms)
            prompts = pd.DataFrame({"prompt_id": rows["prompt_id"].unique()})
            verdicts = {m.verdict for m in judge(inferred.contract, Evidence(rows, prompts))}
            found.append(verdicts == {"PASS"} if verdict == "PASS" else "FAIL" in verdicts)
        return float(np.mean(found))

    assert share(0.02, "PASS") >= 0.9
    assert share(0.06, "FAIL") == 1.0


def test_the_ceiling_and_the_mean_come_from_different_prompts() -> None:
    """Halving one half's values moves the ceiling or the mean's limit, never both."""
    rng = np.random.default_rng(5)
    rows = table(rng, 120, 4, 0.02)
    from kernel_contracts.confidence import prompt_order

    order = prompt_order(list(rows["prompt_id"].unique()))
    base = infer_contract([ControlRun("a", rows)]).proposals[1]
    changed = rows.copy()
    changed.loc[changed["prompt_id"].isin(order[:60]), "kl_engine_reference"] *= 2
    doubled = infer_contract([ControlRun("a", changed)]).proposals[1]
    assert doubled.ceiling == pytest.approx(2 * base.ceiling, rel=0.02)
    half = rows["prompt_id"].isin(order[60:])
    second = rows[half].groupby("prompt_id")["kl_engine_reference"].mean()
    upper = mean_bounds(second.loc[order[60:]], ceiling=base.ceiling / 2, alpha=0.05).upper
    assert base.limit == pytest.approx(2 * upper, rel=0.02)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.assign(nonfinite=1), "not a clean run"),
        (lambda t: t.drop(columns="kl_engine_reference"), "no column kl_engine_reference"),
        (lambda t: t.assign(engine_logprob=np.nan), "not finite"),
        (lambda t: t[t["prompt_id"] < "p0020"], "at least 58 prompts"),
        (lambda t: t[:0], "no rows"),
    ],
)
def test_a_control_that_is_not_clean_or_too_small_is_refused(change, said: str) -> None:
    """Missing evidence never becomes a limit."""
    rows = change(table(np.random.default_rng(0), 100, 4, 0.02))
    with pytest.raises(InputError) as caught:
        infer_contract([ControlRun("control", rows)])
    assert said in f"{caught.value}"


def test_infer_reads_run_folders_and_refuses_one_with_a_fault(tmp_path: Path) -> None:
    """The command end to end; a folder whose settings inject a fault is no control."""
    for name, inject in (("clean", {}), ("faulted", {"stale_weights": 0.02})):
        folder = tmp_path / name / "tokens"
        folder.mkdir(parents=True)
        write_part(
            table(np.random.default_rng(1), 80, 4, 0.02),
            token_schema(),
            folder / "part-00000.parquet",
        )
        spec = {"settings": {"engine": {"inject": inject}}}
        (tmp_path / name / "run.json").write_text(json.dumps({"spec": spec}))
    out = tmp_path / "inferred.yaml"
    result = RUNNER.invoke(contract_app, ["infer", str(tmp_path / "clean"), "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert "no budget stands behind" in result.output
    contract, problems = check_text(out.read_text())
    assert contract is not None
    assert problems == []
    refused = RUNNER.invoke(contract_app, ["infer", str(tmp_path / "faulted")])
    assert isinstance(refused.exception, InputError)
    assert "stale_weights" in str(refused.exception)
    nothing = RUNNER.invoke(contract_app, ["infer", str(tmp_path)])
    assert isinstance(nothing.exception, InputError)


# plan --------------------------------------------------------------------------------------------

KL = """
schema: kernel-contracts/v1
name: kl
slices: {domain: {by: domain}, undecided: {where: reference_margin <= 0.5}}
numerical:
  - {id: N1, metric: nonfinite, limit: 0}
statistical:
  - {id: S1, metric: kl_engine_reference, limit: 0.002, ceiling: 0.01, tail: 0.2}
  - {id: S2, metric: kl_engine_reference, limit: 0.01, ceiling: 0.04, tail: 0.2, slices: [domain]}
  - {id: S3, metric: flip_rate, limit: 0.1, slices: [undecided]}
observability:
  - {id: O1, min_prompts: 20}
"""


def test_the_planned_number_gives_the_verdict_the_promised_power() -> None:
    """At the planned n, 200 simulated audits of the planned law pass at least 85 % of the time
    (power 0.9 less three standard errors of the simulation); at half of it clearly less often."""
    contract = parse_contract(KL)
    clause = contract.clause("S1")
    needed, _ = prompts_needed(clause, 0.05, effect=0.5, cv=1.0)
    assert needed is not None
    rng, sigma = np.random.default_rng(11), np.sqrt(np.log(2.0))
    one = contract.model_copy(
        update={
            "numerical": (),
            "statistical": (clause,),
            "observability": (),
            "slices": {"all": contract.slices["all"]},
        }
    )

    def power(n: int) -> float:
        passed = 0
        for _ in range(200):
            kl = 0.001 * np.exp(sigma * rng.standard_normal(n) - sigma**2 / 2)
            rows = pd.DataFrame(
                {"prompt_id": [f"p{i}" for i in range(n)], "path": "decode",
                 "kl_engine_reference": kl}
            )  # fmt: skip
            judged = judge(one, Evidence(rows, rows[["prompt_id"]]))
            passed += judged[0].verdict == "PASS"
        return passed / 200

    assert power(needed) >= 0.85
    assert power(needed // 2) < 0.8


def test_a_plan_counts_each_slice_of_the_file_and_says_where_rows_decide() -> None:
    """Metadata slices are exact; a slice by margins can only be bounded by the file."""
    prompts = pd.DataFrame(
        {"prompt_id": [f"p{i}" for i in range(100)], "domain": ["a"] * 95 + ["b"] * 5}
    )
    planned = plan_contract(parse_contract(KL), prompts)
    needs = {(n.clause, n.slice): n for n in planned.needs}
    assert needs["S2", "domain=a"].available == 95
    assert needs["S2", "domain=b"].available == 5
    assert needs["S2", "domain=b"].enough is False
    assert needs["S3", "undecided"].available == 100
    assert not needs["S3", "undecided"].exact
    assert not planned.certifiable
    assert planned.exit_code == 3
    assert plan_contract(parse_contract(KL)).exit_code == 0


def test_the_least_number_is_what_a_drift_free_engine_needs() -> None:
    """clean_n prompts of zeros pass, one fewer does not, for each kind of clause."""
    for clause in parse_contract(KL).statistical:
        n = clean_n(clause, 0.05)
        share = clause.target / clause.upper_end
        assert n >= 14  # its tail of 0.2, or the mean
        assert mean_bounds(np.zeros(n), ceiling=1.0, alpha=0.05).upper <= share


def test_out_of_reach_is_said_and_blocks(tmp_path: Path) -> None:
    """A mean so near its limit, or a law with too many prompts above the ceiling, is no plan."""
    planned = plan_contract(parse_contract(KL), effect=0.999)
    assert any(n.unreachable for n in planned.needs)
    assert planned.exit_code == 3
    narrow = parse_contract(KL.replace("ceiling: 0.01, tail: 0.2", "ceiling: 0.0021, tail: 0.01"))
    wild = {n.clause: n for n in plan_contract(narrow, cv=8.0, effect=0.9).needs}
    assert wild["S1"].unreachable
    assert "above the ceiling" in wild["S1"].note
    with pytest.raises(InputError):
        plan_contract(parse_contract(KL), effect=1.0)


def test_plan_as_a_command(tmp_path: Path) -> None:
    """Exit 3 and the numbers for a file with too few; 0 for one with enough; JSON holds them."""
    contract = tmp_path / "c.yaml"
    contract.write_text(KL)
    few, many = tmp_path / "few.jsonl", tmp_path / "many.jsonl"
    for path, n in ((few, 10), (many, 400)):
        lines = [{"id": f"p{i}", "prompt": f"say {i}", "domain": "ab"[i % 2]} for i in range(n)]
        path.write_text("\n".join(map(json.dumps, lines)))
    short = RUNNER.invoke(PLAN, [str(contract), "--prompts-file", str(few)])
    assert short.exit_code == 3, short.output
    assert "too few" in short.output
    enough = RUNNER.invoke(PLAN, [str(contract), "--prompts-file", str(many), "--json"])
    assert enough.exit_code == 0, enough.output
    document = json.loads(enough.output)
    assert document["certifiable"]
    assert {n["slice"] for n in document["needs"]} >= {"all", "domain=a", "domain=b", "undecided"}
