"""make chaos: load, faults, and the judge.

make chaos CHAOS_ARGS='--seconds 600 --seed 7'
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time

from tests.chaos.checker import counts, judge
from tests.chaos.faults import FAULTS
from tests.chaos.load import chaos


def main() -> int:
    """Run, print the summary, end with 1 when a rule is broken."""
    parser = argparse.ArgumentParser(prog="make chaos", description="Faults under load, judged from histories alone.")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31))
    parser.add_argument("--seconds", type=float, default=180)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--every", type=float, default=2.0, help="seconds between faults, on average")
    parser.add_argument("--kind", action="append", choices=list(FAULTS), help="only these faults")
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    begin = time.monotonic()
    report = chaos(
        options.seed,
        options.seconds,
        clients=options.clients,
        every=options.every,
        kinds=options.kind,
        say=lambda line: print(line, flush=True),
    )
    for violation in judge(report.run):
        print(f"BROKEN  {violation.rule}: {violation.what}"[:1000])
    summary = counts(report.run)
    summary["faults"] = dict(report.faults)
    summary["recoveries"] = len(report.recoveries)
    summary["slowest recovery, s"] = round(max(report.recoveries, default=0.0), 3)
    summary["seed"], summary["seconds"] = options.seed, round(time.monotonic() - begin)
    print(json.dumps(summary, indent=2))
    return 1 if summary["broken rules"] else 0


if __name__ == "__main__":
    sys.exit(main())
