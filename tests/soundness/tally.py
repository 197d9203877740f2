"""Turn verdicts into one table, and a program that fails into the smallest that fails in the same way."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field, replace

from comparison import Library, Verdict, judge
from grammar import smaller
from programs import Program


@dataclass
class Tally:
    """Counts of cases and of calls, over many verdicts."""

    cases: Counter[str] = field(default_factory=Counter)
    calls: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    findings: Counter[str] = field(default_factory=Counter)

    def add(self, verdict: Verdict) -> None:
        """Count one verdict."""
        if verdict.invalid:
            self.cases["the model itself raises"] += 1
            return
        self.cases["run"] += 1
        self.cases["traced"] += verdict.traced
        self.cases["features extracted"] += verdict.extracted
        self.cases["compared at another size"] += verdict.follows_sizes
        self.cases["with a finding"] += bool(verdict.findings)
        self.calls["equal"] += len(verdict.equal)
        self.calls["refused at run time"] += len(verdict.refused)
        self.refusals.update(shortened(refusal) for refusal in verdict.refusals[:1])
        self.findings.update({kind for kind, _, _ in verdict.findings})

    def share(self, name: str) -> float:
        """The part of the cases that run of which this holds."""
        return self.cases[name] / max(1, self.cases["run"])

    def __str__(self) -> str:
        run = self.cases["run"]
        rows = [("models", run + self.cases["the model itself raises"], "")]
        rows += [("  that raise themselves", self.cases["the model itself raises"], "")]
        for name in ("traced", "compared at another size", "features extracted", "with a finding"):
            rows.append((f"  {name}", self.cases[name], f"{self.share(name):.1%}"))
        rows += [(f"calls {name}", count, "") for name, count in sorted(self.calls.items())]
        rows += [
            (f"refused: {name}", count, f"{count / max(1, run):.1%}") for name, count in self.refusals.most_common(40)
        ]
        rows += [
            (f"finding: {name}", count, f"{count / max(1, run):.1%}") for name, count in self.findings.most_common()
        ]
        return "\n".join(f"{count:>8}  {share:>6}  {name}" for name, count, share in rows)


def shortened(text: str) -> str:
    """The first words of a message without numbers and names, to count messages of one kind together."""
    return re.sub(
        r"'[^']*'|\"[^\"]*\"|-?\d[\d.e+-]*", "#", re.sub(r"soundness_case_\d+|\b[a-z]+\d+\b", "#", text.split("\n")[0])
    )[:100]


def kind_of(verdict: Verdict) -> tuple[str, str] | None:
    """The kind of the first finding, and for raw errors what the message says."""
    if not verdict.findings:
        return None
    kind, where, what = verdict.findings[0]
    place = "extractor" if "extractor" in where or where == "names" else ""
    return f"{kind} {place}".strip(), shortened(what) if kind == "raw error" else ""


def shrink(program: Program, library: Library, limit: int = 400) -> Program:
    """Take away from `program` what its kind of finding does not need; at most `limit` verdicts."""
    wanted = kind_of(judge(program.case, library, stop=True))
    if wanted is not None and "extractor" not in wanted[0]:
        library = replace(library, extractor=None)
    tried, go_on = 0, wanted is not None
    while go_on and tried < limit:
        go_on = False
        for other in smaller(program):
            tried += 1
            if kind_of(judge(other.case, library, stop=True)) == wanted:
                program, go_on = other, True
                break
            if tried >= limit:
                break
    return program
