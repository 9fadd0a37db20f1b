"""Fuzz: random models, prepared with random options, beside eager on fresh inputs.

    python -m tests.fuzz --seed 17                       # one case, printed
    python -m tests.fuzz --from 0 --count 20000 --out fuzz.jsonl   # goes on where it stopped
    python -m tests.fuzz --count 2000 --device cuda
    python -m tests.fuzz --count 200 --device cuda --fuse inductor

A case is a pure function of its seed. Exit status 1 where one differs from eager without a word, or crashes.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from tests.fuzz.check import check
from tests.fuzz.generator import MODES, generate


def main(arguments: Sequence[str] | None = None) -> int:
    """Run cases; write one line of JSON each, and print what failed as a program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, help="run this case alone, and print it")
    parser.add_argument("--from", dest="first", type=int, default=0, help="the first seed")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--out", type=Path, help="JSON lines; seeds that it holds are not run again")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--fuse", default="", help="none, library, auto or inductor instead of what is drawn")
    parser.add_argument("--mode", default="", choices=("", *MODES))
    given = parser.parse_args(arguments)
    seeds = range(given.first, given.first + given.count) if given.seed is None else [given.seed]
    lines = given.out.read_text().splitlines() if given.out and given.out.exists() else []
    results = [json.loads(line) for line in lines]
    started = time.monotonic()
    for seed in sorted({*seeds} - {one["seed"] for one in results}):
        case = generate(seed, given.mode, given.fuse)
        result = check(case, given.device)
        results.append(asdict(result))
        if given.out:
            with given.out.open("a") as file:
                file.write(json.dumps(results[-1]) + "\n")
        if result.failed or given.seed is not None:
            print(f"{case.program()}\n# seed {seed}: {result.outcome}: {result.why}\n", flush=True)
    kinds = Counter(one["outcome"] + " (not static)" * (not one["static"]) for one in results)
    counted = ", ".join(f"{number} {kind}" for kind, number in sorted(kinds.items()))
    print(f"{len(results) - len(lines)} cases in {time.monotonic() - started:.0f} s: {counted}")
    return int(any(one["outcome"] in ("wrong", "crash") for one in results))


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
