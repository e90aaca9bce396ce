"""Three states: a contract must pass the reference against itself and fail every injected fault.

The logic is shown on synthetic tables: a good contract is SOUND; the same with absurd limits, with
limits below the control's noise, or without a clause that looks where the fault is, is UNSOUND; a
sample too small for the control is INCONCLUSIVE; a missing column never passes. The faults are
shown to do what they say on tensors, and to leave the model as it was. One test runs the model.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from typer.testing import CliRunner

from kernel_contracts.errors import InputError, UnsoundError
from kernel_contracts.loading import parse_contract
from kernel_contracts.selftest import (
    Injection,
    OrdinaryCheck,
    calibrate,
    smallest_detected,
    summary,
    testable,
)
from kernel_contracts.verdict import Evidence
from kernel_contracts.vocabulary import FAULTS
from mismatch_audit.cli.contract import contract_app
from mismatch_audit.programs.base import Sequence_
from mismatch_audit.selftest import faults
from mismatch_audit.selftest.tables import BEGIN, END, write_tables

testable.__test__ = False  # a function of ours, not a test
RUNNER = CliRunner()
SERVING = Path(__file__).parents[1] / "samples" / "contracts" / "bf16-serving.yaml"

CONTRACT = """
schema: kernel-contracts/v1
name: example
slices: {domain: {by: domain}}
numerical:
  - {id: N1, metric: nonfinite, limit: 0}
  - {id: N2, metric: abs_dlp, exceeds: 0.7, share: 0.05}
statistical:
  - {id: S1, metric: kl_engine_reference, limit: 0.002, ceiling: 0.01, slices: [all, domain]}
  - {id: S2, metric: policy_gradient_bias, limit: 0.05}
runtime:
  - {id: R1, probe: prefill_decode, limit: 0.002}
observability:
  - {id: O1, min_prompts: 500}
"""


def evidence(rms: float, prompts: int = 80, tokens: int = 12, *, shift: float = 0.0) -> Evidence:
    """Rows at a KL of rms^2 / 2; shift moves only the log-prob of the sampled token."""
    rng = np.random.default_rng(0)
    names = [f"p{i:03d}" for i in range(prompts)]
    scale = np.repeat(rms * np.exp(0.2 * rng.standard_normal(prompts)), tokens)
    dlp = scale * rng.standard_normal(len(scale)) + shift * rng.standard_normal(len(scale))
    rows = pd.DataFrame(
        {
            "prompt_id": np.repeat(names, tokens),
            "path": "decode",
            "reference_logprob": -1.0,
            "engine_logprob": -1.0 - dlp,
            "kl_engine_reference": scale**2 / 2,
            "flip": rng.random(len(scale)) < rms / 4,
            "nonfinite": 0,
        }
    )
    domain = ["code" if i % 10 == 0 else "prose" for i in range(prompts)]
    metadata = pd.DataFrame({"prompt_id": names, "domain": domain})
    return Evidence(tokens=rows, prompts=metadata, max_rows=tokens)


CONTROL = evidence(1e-3)
DRIFT = Injection("drift", "KL of 0.02", "rows", evidence(0.2))
SHIFT = Injection("shift", "reported log-probs are off", "reported", evidence(1e-3, shift=2.0))


def test_a_good_contract_is_sound_and_says_what_it_did_not_test() -> None:
    """Control passes, both faults fail. The small domain, probes, the gradient are named."""
    found = calibrate(parse_contract(CONTRACT), CONTROL, [DRIFT, SHIFT])
    assert found.state == "SOUND"
    assert found.exit_code == 0
    assert ("S1", "all") in found.faults[0].caught_by
    assert ("N2", "all") in found.faults[1].caught_by
    told = "; ".join(found.left_out)
    for part in ("R1: probes", "S2: the gradient", "O1: asks for 500 prompts, here 80",
                 "S1 for passing on domain=code (8): takes 59"):  # fmt: skip
        assert part in told
    assert "2 of 2 faults detected" in summary(found)


def test_absurdly_loose_limits_are_unsound() -> None:
    """Everything passes such a contract, which is exactly what is wrong with it."""
    loose = CONTRACT.replace("limit: 0.002, ceiling: 0.01", "limit: 50.0, ceiling: 100.0").replace(
        "exceeds: 0.7", "exceeds: 70.0"
    )
    found = calibrate(parse_contract(loose), CONTROL, [DRIFT, SHIFT])
    assert [t.verdict for t in found.faults] == ["PASS", "PASS"]
    assert found.state == "UNSOUND"
    assert found.exit_code == 4
    assert found.faults[0].reason.startswith("nearest to failing: S1")


def test_limits_under_the_control_are_unsound() -> None:
    """A contract that refuses the reference itself detects every fault, and is worth nothing."""
    tight = CONTRACT.replace("limit: 0.002, ceiling: 0.01", "limit: 1.0e-8, ceiling: 1.0e-6")
    found = calibrate(parse_contract(tight), CONTROL, [DRIFT])
    assert found.faults[0].detected
    assert found.control.verdict == "FAIL"
    assert found.state == "UNSOUND"


def test_a_fault_that_no_clause_looks_at_is_named_with_the_clause_that_would() -> None:
    """Wrong reported log-probs do not move a full-vocabulary KL."""
    blind = parse_contract(CONTRACT.replace("metric: abs_dlp, exceeds: 0.7", "metric: kl_engine_"
                                            "reference, exceeds: 0.7"))  # fmt: skip
    found = calibrate(blind, CONTROL, [DRIFT, SHIFT])
    assert [t.name for t in found.undetected] == ["shift"]
    assert "no clause looks at it: add one on abs_dlp" in found.faults[1].reason
    assert found.state == "UNSOUND"


def test_a_tolerated_miss_is_reported_but_does_not_count() -> None:
    """Only by name, only for what is in the menu, and the verdict stays visible."""
    blind = parse_contract(CONTRACT.replace("metric: abs_dlp, exceeds: 0.7", "metric: kl_engine_"
                                            "reference, exceeds: 0.7"))  # fmt: skip
    found = calibrate(blind, CONTROL, [DRIFT, SHIFT], tolerate=["shift"])
    assert found.state == "SOUND"
    assert found.faults[1].tolerated
    assert summary(found).endswith("1 of 2 faults detected; borne: shift")
    assert found.faults[1].verdict == "PASS"
    with pytest.raises(InputError, match="no fault 'typo'"):
        calibrate(blind, CONTROL, [DRIFT], tolerate=["typo"])


def test_a_contract_may_name_what_it_bears_and_nothing_else() -> None:
    """`tolerates` takes names of the menu only, and the words of the language are that menu."""
    assert tuple(fault.name for fault in faults.MENU) == FAULTS
    bearing = parse_contract(CONTRACT + "\ntolerates: [temperature]\n")
    assert bearing.tolerates == ("temperature",)
    assert bearing.document()["tolerates"] == ["temperature"]
    assert "tolerates" not in parse_contract(CONTRACT).document()
    with pytest.raises(InputError, match="tolerates"):
        parse_contract(CONTRACT + "\ntolerates: [temprature]\n")


def test_a_sample_too_small_for_the_control_is_inconclusive_never_sound() -> None:
    """20 prompts cannot certify 5 % of anything; a detected fault is detected all the same."""
    few = evidence(1e-3, prompts=20)
    found = calibrate(
        parse_contract(CONTRACT), few, [Injection("drift", "", "rows", evidence(0.2, prompts=20))]
    )
    assert found.control.verdict == "INCONCLUSIVE"
    assert found.faults[0].detected
    assert (found.state, found.exit_code) == ("INCONCLUSIVE", 3)
    assert calibrate(parse_contract(CONTRACT), CONTROL, []).state == "UNSOUND"


@pytest.mark.parametrize("column", ["kl_engine_reference", "nonfinite", "engine_logprob"])
def test_a_missing_column_is_no_evidence_on_either_side(column: str) -> None:
    """Neither the control passes nor the fault counts as detected by the clause that needs it."""

    def without(e: Evidence) -> Evidence:
        return Evidence(e.tokens.drop(columns=column), e.prompts, max_rows=e.max_rows)

    small = evidence(0.01)  # passes every clause, so nothing else can catch it
    found = calibrate(
        parse_contract(CONTRACT), without(CONTROL), [Injection("f", "", "rows", without(small))]
    )
    assert found.control.verdict == "UNOBSERVED"
    assert found.state == "UNSOUND"
    assert not found.faults[0].detected


def test_one_nan_is_no_evidence() -> None:
    """A NaN in the control's KL is not left out of the mean."""
    rows = CONTROL.tokens.copy()
    rows.loc[5, "kl_engine_reference"] = math.nan
    found = calibrate(
        parse_contract(CONTRACT), Evidence(rows, CONTROL.prompts, max_rows=12), [DRIFT]
    )
    assert found.state == "INCONCLUSIVE"
    assert "no finite value" in found.control.reason


def test_a_contract_of_probes_alone_cannot_be_tested() -> None:
    """Said as an error, not as a sound contract."""
    probes = parse_contract(
        "schema: kernel-contracts/v1\nname: p\n"
        "numerical: [{id: N1, metric: nonfinite, limit: 0}]\n"
        "runtime: [{id: R, probe: order, limit: 1.0}]"
    )
    with pytest.raises(InputError, match="no numerical or statistical clause"):
        testable(probes, 60)


def test_a_fault_that_ordinary_checks_see_is_marked() -> None:
    """It still has to be detected, but proves less."""
    seen = OrdinaryCheck("same greedy token", 0.2, ">= 0.5", passed=False)
    found = calibrate(
        parse_contract(CONTRACT), CONTROL,
        [Injection("drift", "", "rows", evidence(0.2), (seen,))],
    )  # fmt: skip
    assert found.faults[0].detected
    assert not found.faults[0].ordinary_passed


@pytest.mark.parametrize("edge", [2e-5, 3e-3, 0.5])
def test_the_smallest_detected_size_is_bracketed(edge: float) -> None:
    """A detector with a known edge: missed < edge <= caught, within the stated factor."""
    missed, caught = smallest_detected(lambda s: s >= edge, low=1e-5, high=1.0, steps=8)
    assert missed is not None
    assert caught is not None
    assert missed < edge <= caught <= missed * 10 ** (5 / 256) * 1.0001


def test_a_detector_without_an_edge_gives_no_bracket() -> None:
    """All detected: nothing was missed. None detected: nothing was caught."""
    assert smallest_detected(lambda s: True, low=1e-3, high=1.0) == (None, 1e-3)
    assert smallest_detected(lambda s: False, low=1e-3, high=1.0) == (1.0, None)


# The faults themselves ---------------------------------------------------------------------------


def test_e4m3_gives_the_grid_and_saturates() -> None:
    """Powers of two are exact, 17 rounds to 16 (spacing 2), 1000 ends at 448, no NaN."""
    x = torch.tensor([1.0, 0.5, -2.0, 17.0, 19.0, 1000.0, -1000.0, 0.0])
    wanted = torch.tensor([1.0, 0.5, -2.0, 16.0, 20.0, 448.0, -448.0, 0.0])
    assert torch.equal(faults.e4m3(x), wanted)
    assert torch.equal(faults.e4m3(torch.tensor([4.48]), 0.01), torch.tensor([4.48]))


def test_the_top_p_set_is_the_smallest_that_reaches_its_mass() -> None:
    """Against a count by hand over random rows: reaches 0.8, and does not without its last."""
    z = torch.randn(50, 40, generator=torch.Generator().manual_seed(0)) * 2
    inside, p = faults.top_p_support(faults.TOP_P)(z), z.softmax(-1)
    mass = (p * inside).sum(-1)
    last = p.masked_fill(~inside, 2.0).amin(-1)
    assert bool((mass >= faults.TOP_P - 1e-6).all())
    assert bool((mass - last < faults.TOP_P).all())


def test_bf16_log_softmax_is_near_the_truth_and_does_not_sum_to_one() -> None:
    """Within a rounding of bf16 of the float64 log-softmax, yet not equal to it."""
    z = torch.randn(20, 500, generator=torch.Generator().manual_seed(0)) * 5
    rounded, exact = faults.bf16_log_softmax(z).double(), z.double().log_softmax(-1)
    assert float((rounded - exact).abs().max()) <= 2**-8 * (20 + 2 * float(exact.abs().max()))
    assert float((rounded.exp().sum(-1) - 1).abs().max()) > 1e-4


def test_shifted_values_stay_within_their_sequence() -> None:
    """Off by one row, no value invented, none moved to another prompt."""
    shift = next(f for f in faults.MENU if f.name == "shifted_logprobs").reported
    assert shift is not None
    given = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
    moved = shift(given, torch.zeros(5), [3, 2])
    assert moved.tolist() == [3.0, 1.0, 2.0, 5.0, 4.0]


def test_double_bos_adds_one_token_and_keeps_the_response() -> None:
    before = Sequence_("p", (1, 7, 8, 9), 2)
    after = faults.double_bos(before, 1)
    assert after.token_ids == (1, 1, 7, 8, 9)
    assert after.response == before.response


class _Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(16, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.linear(x)[None, None]
        return torch.nn.functional.scaled_dot_product_attention(h, h, h)[0, 0]


class _Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([_Layer() for _ in range(3)])
        self.rotary = torch.nn.Module()
        self.rotary.register_buffer("inv_freq", torch.ones(4))

    @property
    def base_model(self) -> torch.nn.Module:
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x * self.rotary.inv_freq.sum()


def _fail_at(x: torch.Tensor) -> None:
    raise ValueError(f"shape {tuple(x.shape)}")


@pytest.mark.parametrize("name", [f.name for f in faults.MENU if f.model is not None])
def test_a_model_fault_acts_inside_its_block_and_is_gone_after_it(name: str) -> None:
    """Output changes inside, is bit-equal after, also when the block is left by an exception."""
    torch.manual_seed(0)
    model, x = _Model(), torch.randn(5, 16)
    fault = next(f for f in faults.MENU if f.name == name).model
    assert fault is not None
    with torch.no_grad():
        before = model(x)
        with fault(model):
            assert not torch.equal(model(x), before)
        assert torch.equal(model(x), before)
        with pytest.raises(ValueError, match="shape"), fault(model):
            _fail_at(model(x))
        assert torch.equal(model(x), before)


def test_a_fault_that_did_nothing_is_an_error_not_a_pass() -> None:
    """Rounding the cache of a model whose attention is elsewhere; scaling a RoPE that is not."""
    model = SimpleNamespace(base_model=torch.nn.Sequential(), modules=lambda: [])
    with pytest.raises(UnsoundError, match="did nothing"), faults.fp8_kv(model):
        pass
    with pytest.raises(InputError, match="rotary"), faults.rope_scaling(1.25)(model):
        pass
    with pytest.raises(InputError, match="decoder layers"), faults.fp8_weights(model):
        pass


def test_an_unknown_fault_is_named_with_those_there_are() -> None:
    with pytest.raises(InputError, match="no fault 'heat'") as caught:
        faults.chosen(["heat"])
    assert "temperature" in (caught.value.fix or "")
    result = RUNNER.invoke(contract_app, ["selftest", str(SERVING), "--fault", "heat"])
    assert isinstance(result.exception, InputError)
    result = RUNNER.invoke(
        contract_app, ["selftest", str(SERVING), "--fault", "top_p", "--tolerate", "temperature"]
    )
    assert isinstance(result.exception, InputError)


# The real model ----------------------------------------------------------------------------------


@pytest.mark.model
def test_the_command_on_the_sample_model(tmp_path: Path) -> None:
    """bf16-serving detects temperature 0.9, top-p renormalisation and shifted log-probs, by the
    clauses that can see each; a contract of KL alone misses the latter two and is UNSOUND."""
    kl_only = tmp_path / "kl.yaml"
    kl_only.write_text(
        "schema: kernel-contracts/v1\nname: kl-only\nstatistical:\n"
        "- {id: S1, metric: kl_engine_reference, limit: 2.0e-3, ceiling: 1.0e-2, tail: 0.2}\n"
    )
    options = ["--limit", "24", "--max-tokens", "6", "--max-prompt-tokens", "30", "--no-drift"]
    for name in ("temperature", "top_p", "shifted_logprobs"):
        options += ["--fault", name]
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    result = RUNNER.invoke(
        contract_app,
        ["selftest", str(SERVING), str(kl_only), *options, "--json", "--write-docs", str(page)],
    )
    assert result.exit_code == 4, result.output
    document = json.loads(result.stdout)
    serving, alone = document["contracts"]
    caught = {t["name"]: {c for c, _ in t["caught_by"]} for t in serving["trials"]}
    assert {n for n, c in caught.items() if c} == {"temperature", "top_p", "shifted_logprobs"}
    assert "S1" in caught["temperature"]
    assert caught["top_p"] <= {"N2", "S3"}
    verdicts = {t["name"]: t["verdict"] for t in alone["trials"]}
    assert verdicts == {
        "control": "PASS", "temperature": "FAIL", "top_p": "PASS", "shifted_logprobs": "PASS"
    }  # fmt: skip
    assert alone["state"] == "UNSOUND"
    control = document["measured"][0]
    assert 0 < control["kl"] < 1e-9  # otherwise batched: not the same bits, not a drift either
    assert all(t["ordinary_passed"] for t in serving["trials"])
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    assert "| `top_p` | FAIL: " in text


def test_tables_need_their_markers(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("no markers")
    with pytest.raises(InputError, match="no lines"):
        write_tables(SimpleNamespace(), page)  # type: ignore[arg-type]
