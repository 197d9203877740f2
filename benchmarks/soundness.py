"""Trace many random models and print how many were traced, refused, followed to other sizes, and wrong.

    python benchmarks/soundness.py --cases 10000 --seed 0

A wrong case is printed as the smallest source that is wrong in the same way, ready for
tests/soundness/test_kept_cases.py; `--show 0` prints the table only. A case takes 0.1 s.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import torch

import featx

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "soundness"))

import grammar
from comparison import Library, judge
from programs import Program
from tally import Tally, kind_of, shrink

LIBRARY = Library(featx.trace, featx.FeatxError, featx.create_feature_extractor, featx.get_graph_node_names)


def main() -> int:
    """Return 1 where a case is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="case number N of a seed is the same in each run")
    parser.add_argument("--show", type=int, default=50, help="how many wrong cases to make small and print")
    parser.add_argument("--lines", action="store_true", help="instead, one model for each line that models consist of")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.lines:
        return show_lines()
    start = time.monotonic()
    tally, wrong = run(range(options.cases), options.seed)
    print(f"{options.cases} cases of seed {options.seed} in {time.monotonic() - start:.0f} s\n{tally}")
    show(dict(list(wrong.items())[: options.show]))
    return int(bool(wrong))


def show_lines() -> int:
    """Print what comes of each line alone, where it is wrong, refused, or holds for the sizes of the example only."""
    tally = Tally()
    for program in grammar.of_each_line():
        verdict = judge(program.case, LIBRARY)
        tally.add(verdict)
        line = " ; ".join(list(program.lines())[1].split("\n"))
        if verdict.findings:
            print(f"WRONG    {line}\n         {verdict.findings[0]}")
        elif not verdict.traced:
            print(f"refused  {line}\n         {verdict.refusals[0]}")
        elif not verdict.follows_sizes:
            print(f"narrow   {line}\n         equal: {', '.join(verdict.equal)}")
    print(tally)
    return int(tally.cases["with a finding"] > 0)


def run(numbers: Iterable[int], seed: int) -> tuple[Tally, dict[int, Program]]:
    """Count what comes of the cases of these numbers, and return the wrong ones."""
    tally, wrong = Tally(), {}
    for number in numbers:
        program = grammar.draw(random.Random(f"{seed} {number}").randrange)
        verdict = judge(program.case, LIBRARY)
        tally.add(verdict)
        if verdict.findings:
            wrong[number] = program
            print(f"case {number}: {verdict.findings[0]}", file=sys.stderr)
    return tally, wrong


def show(wrong: dict[int, Program]) -> None:
    """Print each case as small as it gets, or that it comes down to the lines of one before."""
    alike: dict[tuple[str, ...], int] = {}
    for number, program in wrong.items():
        small = shrink(program, LIBRARY)
        verdict = judge(small.case, LIBRARY)
        kind = kind_of(verdict) or ("not found again", "")
        first = alike.setdefault((*kind, *sorted(set(small.lines()))), number)
        if first == number:
            print(f"\n{'=' * 100}\ncase {number}\n{verdict}\n\n{small.case}", flush=True)
        else:
            print(f"case {number}: as case {first}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
