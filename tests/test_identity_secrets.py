"""What an engine was started with is in every report; what must not be read there is not."""

from __future__ import annotations

import pytest

from mismatch_audit.identity import without_secrets


@pytest.mark.parametrize(
    "name", ["hf_token", "api_key", "HF_TOKEN", "token", "client_secret", "password", "auth_header"]
)
def test_values_named_like_secrets_are_not_shown(name: str) -> None:
    """On the top and nested; the name stays, so that a reader sees that one was given."""
    kept = without_secrets({name: "s3cr3t", "nested": {name: "s3cr3t"}, "dtype": "bfloat16"})
    assert "s3cr3t" not in repr(kept)
    assert kept["dtype"] == "bfloat16"
    assert set(kept["nested"]) == {name}


@pytest.mark.parametrize("name", ["max_num_batched_tokens", "tokenizer", "kv_cache_dtype", "seed"])
def test_ordinary_arguments_are_shown(name: str) -> None:
    """The control: settings that only sound alike."""
    assert without_secrets({name: 7}) == {name: 7}
