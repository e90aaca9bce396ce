"""Contract documents that several tests start from."""

from __future__ import annotations

from typing import Any

EXAMPLE = """\
schema: kernel-contracts/v1
name: smollm2-bf16-serving
pair:
  reference: {dtype: float32}
  engine: {program: vllm, dtype: bfloat16, logprobs_mode: raw_logprobs}
slices:
  all: {}
  undecided: {where: "reference_margin <= 0.5"}
  domain: {by: domain}
  confidence: {bins: {reference_prob: [0, 0.01, 0.1, 0.5, 0.9, 1]}}
numerical:
  - {id: N1, metric: drift, exceeds: 1.0, share: 0.01, slices: [all]}
  - {id: N2, metric: nonfinite, limit: 0}
statistical:
  - {id: S1, metric: kl_engine_reference, limit: 2.0e-3, warn: 1.0e-3, slices: [all, domain]}
  - {id: S2, metric: flip_rate, limit: 0.10, slices: [undecided]}
  - {id: S3, metric: policy_gradient_bias, limit: 0.05, slices: [all]}
runtime:
  - {id: R1, probe: batch_invariance, limit: 2.0e-3}
  - {id: R2, probe: prefill_decode, metric: kl, limit: 2.0e-3}
observability:
  - {id: O1, min_prompts: 60, max_missing: 0.0, require: [engine_logprob, reference_logprob, weights_version]}
budget: {reward_range: 1.0, reward_drift: 0.5, horizon: 64}
escalation:
  - {when: {clause: S2, verdict: FAIL}, action: route, to: reference, slice: undecided}
  - {when: {verdict: FAIL}, action: block}
"""  # noqa: E501

BASE: dict[str, Any] = {
    "schema": "kernel-contracts/v1",
    "name": "base",
    "slices": {"all": {}, "domain": {"by": "domain"}},
    "numerical": [{"id": "N1", "metric": "drift", "exceeds": 1.0, "share": 0.05}],
    "statistical": [{"id": "S1", "metric": "kl_engine_reference", "limit": 0.002}],
    "runtime": [{"id": "R1", "probe": "order", "limit": 0.002}],
    "observability": [{"id": "O1", "min_prompts": 60}],
}
