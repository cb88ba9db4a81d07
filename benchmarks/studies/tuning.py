"""Measure what `ckpt tune` gains over the defaults: on a fast server, a narrow link, a long way.

    python -m benchmarks.studies.tuning [--targets loopback narrow far] [--seconds 300] [--memory-mib 256]

Each target is the suite's own endpoint, which keeps all objects; the last two stand behind a link
(`benchmarks.run.link`) of 25 MB/s, and of 80 ms. Prints a JSON object a target; with the extra `tune`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import sys
from urllib.parse import urlsplit

import ckpt
from benchmarks.run.link import link
from benchmarks.run.servers import ACCESS_KEY, BUCKET, REGION, SECRET_KEY, sink

TARGETS = {"loopback": (0.0, 0.0), "narrow": (0.0, 25e6), "far": (0.08, 0.0)}
"""The latency of a round trip, and the bandwidth, of a link before the endpoint; 0 is none, and no limit."""


def show(doing: str, gone_s: float, total_s: float) -> None:
    """Print the progress on one line of standard error."""
    print(f"\r{doing}, {gone_s:.0f} of {total_s:.0f} s", end="\033[K", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--megabytes", type=float)
    parser.add_argument("--memory-mib", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    for name in arguments.targets:
        with contextlib.ExitStack() as stack:
            endpoint = stack.enter_context(sink(keep=True)).url
            latency_s, bytes_per_s = TARGETS[name]
            if latency_s or bytes_per_s:
                far_end = urlsplit(endpoint).port or 0
                port = stack.enter_context(link(far_end, latency_s=latency_s, bytes_per_s=bytes_per_s))
                endpoint = f"http://127.0.0.1:{port}"
            tuned = ckpt.tune(
                f"s3://{BUCKET}/runs",
                storage_options={
                    "endpoint_url": endpoint, "key": ACCESS_KEY, "secret": SECRET_KEY, "region": REGION,
                },
                seconds=arguments.seconds,
                megabytes=arguments.megabytes,
                memory_budget_bytes=arguments.memory_mib << 20,
                write=False,
                seed=arguments.seed,
                progress=show,
            )  # fmt: skip
        print(file=sys.stderr)
        trials = [
            {
                **trial.point,
                "cost": round(trial.cost, 3) if math.isfinite(trial.cost) else None,
                "state": trial.state,
            }
            for trial in tuned.trials
        ]
        facts = {
            "target": name,
            "state_bytes": tuned.state_bytes,
            "defaults": [tuned.defaults.settings.given(), tuned.defaults.save_s, tuned.defaults.load_s],
            "best": [tuned.best.settings.given(), tuned.best.save_s, tuned.best.load_s],
            "gain": round(tuned.gain, 4),
            "rounds": tuned.defaults.rounds,
            "trials": trials,
        }
        print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main()
