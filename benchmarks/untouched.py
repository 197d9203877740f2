"""Show that a trace only reads the model: interrupts in the middle of it, and threads that run and train meanwhile.

    python benchmarks/untouched.py --what interrupts --count 2000
    python benchmarks/untouched.py --what threads --count 64

Interrupts are of two kinds, half and half: KeyboardInterrupt at a call of a Python or C function, drawn from all calls
of the action ("call"), and the signal of a timer at a random moment ("timer"). `--kinds edge` draws from the calls and
returns where a trace sets things up and puts them back. Each happens in a child process, which then compares the model,
Python modules, modes and generators with what they were, and traces again. "Swallowed" is what Python itself drops, in
a `__del__` or a callback of a weak reference.

In a run of threads, eight trace one model by every entry point while two others train and run it by turns. Losses,
outputs, tensors, modes, attributes and the generator are compared bit for bit with a copy that nobody traced. "Wrong"
are traces that raised, or have other names or values than alone.

What is wrong is printed to standard error with a line that repeats it, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from dataclasses import astuple

import torch
import untouched_interrupts
import untouched_threads
from compare import print_table
from untouched_models import CASES


def main() -> int:
    """Print the table, and return 1 where something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--what", choices=["interrupts", "threads"], default="interrupts")
    parser.add_argument("--count", type=int, default=200, help="how many interrupts, or runs of threads, in all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--models", nargs="+", default=list(CASES), choices=list(CASES))
    kinds = untouched_interrupts.KINDS
    parser.add_argument("--kinds", nargs="+", default=kinds[:2], choices=kinds, help="of interrupts")
    seeds = "in runs of threads, seed torch's generator again and again while others trace"
    parser.add_argument("--seeds", action="store_true", help=seeds)
    repeat = "do one interrupt again, as it was printed; that of a timer comes where it comes"
    parser.add_argument("--repeat", nargs=4, metavar=("ENTRY", "MODEL", "KIND", "AT"), help=repeat)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.repeat:
        entry, model, kind, at = options.repeat
        result = untouched_interrupts.repeat(entry, model, kind, float(at))
        print(*[f"{name}: {value}" for name, value in vars(result).items()], sep="\n")
        return int(result.is_bad)
    start = time.monotonic()
    is_bad = interrupts(options) if options.what == "interrupts" else threads(options)
    cpu = sum(os.times()[:4])
    print(f"\nseed {options.seed}; {time.monotonic() - start:.0f} s, {cpu:.0f} s of processor time")
    gc.unfreeze()
    return int(is_bad)


def interrupts(options: argparse.Namespace) -> bool:
    """Print the table of interrupts, and say whether something is wrong."""
    found = list(untouched_interrupts.run(options.count, options.seed, options.kinds, options.models))
    rows = [[entry, kind, *map(str, astuple(tally))] for entry, kind, tally in found]
    totals = [str(sum(column)) for column in zip(*(astuple(tally) for *_, tally in found), strict=True)]
    headings = ["entry point", "kind", "interrupts", "swallowed", "damaged", "next trace failed"]
    print_table(headings, [*rows, ["all", "", *totals]])
    return any(tally.damaged or tally.next_failed for *_, tally in found)


def threads(options: argparse.Namespace) -> bool:
    """Print the table of threads, and say whether something is wrong."""
    found = list(untouched_threads.run(options.count, options.seed, options.models, options.seeds))
    rows = [[name, *map(str, astuple(tally))] for name, tally in found]
    totals = [str(sum(column)) for column in zip(*(astuple(tally) for _, tally in found), strict=True)]
    print_table(
        ["model", "runs", "equal", "differing", "steps", "traces", "wrong", "refused"], [*rows, ["all", *totals]]
    )
    return any(tally.differing or tally.wrong for _, tally in found)


if __name__ == "__main__":
    sys.exit(main())
