"""Write a run's rollouts as a mirrored-traffic log: something to try `audit ingest` and
`audit watch` on before your own engine writes one.

    python samples/traffic_from_run.py runs/quickstart traffic.jsonl --build my-engine@1
"""

from __future__ import annotations

import argparse
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

from mismatch_audit.monitor.traffic import TrafficRow, TrafficWriter
from mismatch_audit.tokens import read_parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("log", type=Path)
    parser.add_argument("--build", default="my-engine@1")
    parser.add_argument("--stage", default="shadow", choices=("shadow", "canary", "full"))
    asked = parser.parse_args()
    settings = json.loads((asked.run / "run.json").read_text())["spec"]["settings"]
    prompts = {
        row["id"]: {k: v for k, v in row.items() if isinstance(v, str | int | float)}
        for row in map(json.loads, Path(settings["prompts"]).read_text().splitlines())
    }
    tokens = read_parts(sorted((asked.run / "tokens").glob("part-*.parquet")))
    decode = tokens[tokens["path"] == "decode"].sort_values("position")
    reported = decode.groupby("sequence_id")["engine_reported_logprob"].agg(list)
    sequences = read_parts(sorted((asked.run / "sequences").glob("part-*.parquet")))
    start = datetime(2026, 1, 1, tzinfo=UTC)
    with TrafficWriter(asked.log) as writer:
        for number, row in enumerate(sequences.to_dict("records")):
            at, known = int(row["prompt_length"]), prompts[row["prompt_id"]]
            moment = (start + timedelta(seconds=20 * number)).isoformat().replace("+00:00", "Z")
            writer.write(
                TrafficRow(
                    request_id=f"{asked.stage}-{row['sequence_id']}",
                    time=moment,
                    stage=asked.stage,
                    engine_build=asked.build,
                    prompt_token_ids=tuple(int(t) for t in row["token_ids"][:at]),
                    response_token_ids=tuple(int(t) for t in row["token_ids"][at:]),
                    engine_logprobs=tuple(reported[row["sequence_id"]]),
                    weights_version=0,
                    temperature=settings["sampling"]["temperature"],
                    top_p=settings["sampling"]["top_p"],
                    top_k=settings["sampling"]["top_k"],
                    finish_reason=row["finish_reason"],
                    n_cached_tokens=None,
                    metadata={k: known[k] for k in ("domain", "language") if k in known},
                )
            )


if __name__ == "__main__":
    main()
