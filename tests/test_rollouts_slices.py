"""Slices of a stream: the same groups as on a token table, whatever the batches."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from rollout_logs import frame, log

from kernel_contracts.errors import ContractError
from kernel_contracts.loading import parse_contract
from kernel_contracts.slices import resolve
from mismatch_audit.rollouts.batch import TokenBatch
from mismatch_audit.rollouts.judge import judged
from mismatch_audit.rollouts.stream import Stream

CONTRACT = """
schema: kernel-contracts/v1
name: t
slices:
  step: {by: step}
  both: {by: [environment, step]}
  code: {where: environment == "code", by: step}
  entropy: {bins: {entropy: [0, 0.5, 1, 9]}}
  place: {bins: {position: [0, 10, 20, 1000], engine_prob: [0, 0.5, 1]}}
  early: {where: position < 5 and entropy > 0.2}
statistical:
  - {id: S1, metric: k3, limit: 0.01, slices: [step, both, code, entropy, place, early, all]}
"""


def streamed(text: str, *batches: pa.RecordBatch):
    contract = parse_contract(text)
    stream = Stream(contract)
    for batch in batches:
        stream.update(TokenBatch(batch))
    measurements, rows = judged(contract, stream, {}, missing_columns={})
    stream.close()
    return measurements, {row.slice: row for row in rows}


def test_the_same_slices_as_on_a_token_table():
    """Names, tokens, prompts and means of every kind of definition equal those of the table route,
    with the log in one batch or in pieces that cut prompts apart."""
    batch = log()
    table = frame(batch)
    found = {s.name: table[s.mask] for s in resolve(parse_contract(CONTRACT), table)}
    dlp = table["reference_logprob"] - table["engine_logprob"]
    cuts = [batch.slice(a, 7) for a in range(0, batch.num_rows, 7)]
    for pieces in ([batch], cuts):
        _, rows = streamed(CONTRACT, *pieces)
        assert set(rows) == set(found)
        for name, part in found.items():
            assert rows[name].n_tokens == len(part), name
            assert rows[name].n_prompts == part["prompt_id"].nunique()
            if len(part):
                assert rows[name].abs_dlp == pytest.approx(dlp[part.index].abs().mean())


def test_a_column_that_the_log_lacks_is_named():
    """Its slice has no row and says which column, and the promise on it is UNOBSERVED."""
    text = CONTRACT.replace("step: {by: step}", "step: {by: step}\n  moe: {by: routing_changed}")
    text = text.replace("slices: [step,", "slices: [moe, step,")
    measurements, rows = streamed(text, log())
    assert rows["moe"].n_tokens == 0
    assert "routing_changed" in rows["moe"].why
    of = {m.slice: m for m in measurements}
    assert of["moe"].verdict == "UNOBSERVED"
    assert "routing_changed" in of["moe"].detail


def test_a_null_keeps_a_token_out_and_is_counted():
    """A step that half of the rows do not have: those tokens are in no step, and are told."""
    batch = log()
    steps = [None if i % 2 else 1 for i in range(batch.num_rows)]
    at = batch.schema.names.index("step")
    batch = batch.set_column(at, "step", pa.array(steps, type=pa.int32()))
    _, rows = streamed(CONTRACT, batch)
    assert rows["step=1"].n_tokens + rows["step=1"].unknown == rows["all"].n_tokens
    assert rows["step=1"].unknown > 0


def test_many_steps_become_ranges_and_lose_nothing():
    """A long run has more steps than slices may be: ranges cover them, and add up."""
    prompts = 400
    batch = log(prompts, 1)
    at = batch.schema.names.index("step")
    batch = batch.set_column(at, "step", pa.array(np.arange(prompts).astype(np.int32)))
    text = CONTRACT.replace("  both: {by: [environment, step]}\n", "")
    text = text.replace('  code: {where: environment == "code", by: step}\n', "")
    text = text.replace("both, code, ", "")
    _, rows = streamed(text, *[batch.slice(i, 50) for i in range(0, prompts, 50)])
    ranges = [r for name, r in rows.items() if name.startswith("step[")]
    assert 16 <= len(ranges) <= 33
    assert sum(r.n_tokens for r in ranges) == rows["all"].n_tokens


def test_an_unknown_column_is_a_mistake_at_once():
    """A misspelt column is an error before anything is read, not an empty slice."""
    with pytest.raises(ContractError, match="enviroment"):
        Stream(parse_contract(CONTRACT.replace("where: environment", "where: enviroment")))


def test_advantage_sign_and_version_lag_are_columns():
    """Computed columns: signs of the advantage, and versions between sampler and trainer."""
    batch = log(
        weights_version_min=np.arange(240) % 3, trainer_version=np.full(240, 2, dtype=np.int64)
    )
    text = """
schema: kernel-contracts/v1
name: t
slices: {sign: {by: advantage_sign}, lag: {by: weights_lag}}
statistical: [{id: S1, metric: k3, limit: 0.01, slices: [sign, lag]}]
"""
    _, rows = streamed(text, batch)
    assert {n for n in rows if n.startswith("adv")} == {
        "advantage_sign=negative",
        "advantage_sign=positive",
    }
    assert {n for n in rows if n.startswith("weights")} == {f"weights_lag={i}" for i in range(3)}
    lags = sum(rows[f"weights_lag={i}"].n_tokens for i in range(3))
    assert lags == rows["all"].n_tokens
