"""vLLM's V2 model runner, the default on a GPU, driven here through Triton's interpreter.

The hooks must capture the same rows as on V1: each row's log-prob, from the captured hidden state
and the engine's head, equals what the engine reports on the decode path, on the prefill path (which
uses other request fields on V2) and on teacher-forced decode (trace replay).
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from mismatch_audit.programs.base import Sampling, ScoredSequence
from mismatch_audit.programs.vllm_engine import VllmEngine
from mismatch_audit.sample_model import sample_model_path
from mismatch_audit.settings import EngineSettings

pytestmark = pytest.mark.engine


def test_rows_captured_on_v2_are_the_engines_own(tmp_path: Path) -> None:
    """One short request through all three paths."""
    settings = EngineSettings(
        dtype="float32",
        args={"enable_trace_replay": True, "logits_processors": None, "max_model_len": 128},
    )
    engine = VllmEngine(
        str(sample_model_path()), settings, workdir=tmp_path, log_path=tmp_path / "log",
        command=[sys.executable, str(Path(__file__).with_name("v2_worker.py"))],
    )  # fmt: skip
    try:
        assert engine.facts()["runner"] == "v2"
        head = engine.head()

        def worst(row: ScoredSequence, response: tuple[int, ...]) -> float:
            logprobs = torch.log_softmax(head.logits(row.hidden).float(), -1)
            ours = logprobs.gather(1, torch.tensor(response)[:, None])[:, 0]
            return float((ours - torch.tensor(row.reported_logprob)).abs().max())

        (rollout,) = engine.generate([("a", [1, 5000, 300, 42])], Sampling(max_tokens=4))
        response = rollout.sequence.response
        assert len(response) == 4
        assert worst(rollout, response) <= 1e-3
        (scored,) = engine.score([rollout.sequence])
        assert worst(scored, response) <= 1e-3
        (forced,) = engine.generate(
            [("b", [1, 5000, 300, 42])], Sampling(max_tokens=4), forced=[response]
        )
        assert forced.sequence.response == response
        assert float((forced.hidden - rollout.hidden).abs().max()) <= 1e-3
    finally:
        engine.close()
