"""Train a small recommender on this machine's CPUs; go on from the last checkpoint, if there is one.

python -m examples.recommender --trainers 2 --servers 2 --root /tmp/run --steps 300
python -m examples.recommender --trainers 3 --servers 1 --root /tmp/run --steps 600
"""

from __future__ import annotations

import argparse
import logging
import sys
import time

from examples.recommender.checkpoints import committed
from examples.recommender.click_log import SLICES
from examples.recommender.launch import launch
from examples.recommender.ledger import Ledger, LedgerWrong
from examples.recommender.options import Options


def main() -> int:
    options = arguments()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    print(
        f"{options.trainers} dense trainers, {options.servers} embedding servers; {options.root}", flush=True
    )
    begun_s = time.monotonic()
    try:
        codes = launch(options, patience_s=options.timeout_s)
    except KeyboardInterrupt:
        print("stopped; start again, and it goes on from the last checkpoint", file=sys.stderr)
        return 130
    if any(codes):
        ranks = ", ".join(f"rank {rank} ended with {code}" for rank, code in enumerate(codes) if code)
        print(f"{ranks}; start again, and it goes on from the last checkpoint", file=sys.stderr)
        return 1
    print(f"trained in {time.monotonic() - begun_s:.1f} s; checking the ledger of every row", flush=True)
    step = max(committed(options))
    try:
        rows = Ledger(options).check_checkpoint(step)
    except LedgerWrong as error:
        print(f"WRONG: {error}", file=sys.stderr)
        return 1
    counts = " and ".join(f"{count:,} {table}" for table, count in rows.items())
    print(f"step {step:6d}   {counts}: no update is lost, none is there twice, none is from later")
    return 0


def arguments() -> Options:
    default = Options("")
    parser = argparse.ArgumentParser(
        prog="python -m examples.recommender",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--root", required=True, help="folder or URL of the run's checkpoints")
    parser.add_argument("--trainers", type=int, default=default.trainers, help=f"1 to {SLICES} (%(default)s)")
    parser.add_argument(
        "--servers", type=int, default=default.servers, help="embedding processes (%(default)s)"
    )
    parser.add_argument("--steps", type=int, default=default.steps, help="the last step (%(default)s)")
    parser.add_argument("--save-every", type=int, default=default.save_every, help="steps (%(default)s)")
    parser.add_argument(
        "--staleness",
        type=int,
        default=default.staleness,
        help="batches whose updates a lookup may miss; 0: deterministic (%(default)s)",
    )
    parser.add_argument("--keep", type=int, default=default.keep, help="checkpoints that stay (%(default)s)")
    parser.add_argument(
        "--evict-after", type=int, default=default.evict_after, help="steps without use (%(default)s)"
    )
    parser.add_argument("--seed", type=int, default=default.seed, help="of the clicks, and the model")
    parser.add_argument("--print-every", type=int, default=25, help="steps; 0: nothing (%(default)s)")
    parser.add_argument("--timeout", type=float, default=default.timeout_s, help="seconds for each wait")
    given = parser.parse_args()
    if not 1 <= given.trainers <= SLICES:
        parser.error(f"--trainers must be from 1 to {SLICES}")
    if (
        min(given.servers, given.steps, given.save_every, given.keep, given.evict_after) < 1
        or given.staleness < 0
    ):
        parser.error("numbers of servers, steps and checkpoints are 1 or more, --staleness 0 or more")
    return Options(
        root=given.root,
        trainers=given.trainers,
        servers=given.servers,
        steps=given.steps,
        save_every=given.save_every,
        staleness=given.staleness,
        seed=given.seed,
        keep=given.keep,
        evict_after=given.evict_after,
        timeout_s=given.timeout,
        print_every=given.print_every,
    )


if __name__ == "__main__":
    sys.exit(main())
