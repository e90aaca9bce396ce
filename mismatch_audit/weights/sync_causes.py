"""From the pattern of failing checks to the cause, most specific first."""

from __future__ import annotations

from mismatch_audit.weights.findings import Fault, WeightReport
from mismatch_audit.weights.sync_checks import CheckResult


def name_cause(results: dict[str, CheckResult], read_back: WeightReport | None) -> str:
    """One line; "" when no check fails."""
    failing = {name for name, result in results.items() if result.ok is False}
    if not failing:
        return ""
    if "engine_answers" in failing:
        return f"the engine fails after the push: {results['engine_answers'].detail}"
    if "set_audit" in failing:
        return f"the two sides quantise different layers: {results['set_audit'].where[0]}"
    if "live_dtype" in failing:
        return f"live dtype changed: {results['live_dtype'].where[0]}"
    if "incoming_dtype" in failing:
        return f"incoming dtype differs from the live one: {results['incoming_dtype'].where[0]}"
    faults = {finding.fault for finding in read_back.findings} if read_back else set()
    if "version" in failing and Fault.NOTHING_PUSHED in faults:
        return "acknowledged, not applied"
    if Fault.NOTHING_PUSHED in faults:
        return "version bumped without a load"
    wide = {Fault.PARTIAL_PUSH, Fault.SKIPPED_LAYER, Fault.SHARD_STALE}
    if read_back is not None and faults:
        first = next((f for f in read_back.findings if f.fault in wide), read_back.findings[0])
        if first.fault == Fault.UNWRITTEN:
            return _unwritten(results)
        return first.title
    return _beyond_storage(results, failing)


def _unwritten(results: dict[str, CheckResult]) -> str:
    marked = results.get("unwritten_scales")
    left = marked.evidence if marked is not None else {}
    if not left:
        return "unwritten memory"
    name, share = next(iter(left.items()))
    if share == 1.0:
        return f"missing scale: {name} was never written"
    return f"NaN in a pushed scale: {name}"


def _beyond_storage(results: dict[str, CheckResult], failing: set[str]) -> str:
    """The parameters are right, and still something is wrong."""
    probes = failing & {"dense_self_probe", "expert_probe"}
    anchored = results.get("anchored_probe")
    everywhere = all(results[name].where == tuple(results[name].evidence) for name in probes)
    if "canary_push" in failing and everywhere:
        return (
            "the kernel reads other memory than the read-back: a captured graph keeps old "
            "storage, or the read-back only echoes the push"
        )
    if probes:
        where = results[sorted(probes)[0]].where
        return f"stale derived copy (repacked or swizzled scales): {where[0] if where else ''}"
    if anchored is not None and "adapter_coefficients" in anchored.evidence:
        return f"adapter off: {anchored.detail}"
    if "prefix_cache" in failing:
        return "stale prefix cache: it was not flushed with the push"
    if "zero_change_push" in failing:
        return "a push is not repeatable: the same weights again give other log-probs"
    if "rollout_sentinel" in failing:
        return f"rollouts are broken, weights are right: {results['rollout_sentinel'].detail}"
    return f"unexplained: {', '.join(sorted(failing))}"
