"""A verdict as annotations of a GitHub job: each broken gate at its own line of the scenario file.

GitHub shows ten of a kind a step, so there are never more: INVALID first, and the last one counts what is not shown.
"""

from harness.model import Finding, Judgement, Verdict
from harness.report import tables

LIMIT = 10


def annotations(verdict: Verdict) -> str:
    """The workflow commands, a line each; "" when every gate passed."""
    broken = [f for f in tables.by_severity(tables.cases(verdict)) if f.verdict != Judgement.PASS]
    shown = broken if len(broken) <= LIMIT else broken[: LIMIT - 1]
    lines = [_annotation(finding, verdict) for finding in shown]
    if rest := len(broken) - len(shown):
        lines.append(f"::error::{rest:,} more gates did not pass: verdict.json and report.md name them")
    return "\n".join(lines)


def mistake(sentence: str, where: str) -> str:
    """The workflow command for a user's mistake; `where` is `file:line`, `file`, or ""."""
    file, _, line = where.partition(":")
    properties = ",".join(f"{key}={_property(value)}" for key, value in (("file", file), ("line", line)) if value)
    return f"::error {properties}::{_data(sentence)}" if properties else f"::error::{_data(sentence)}"


def _annotation(finding: Finding, verdict: Verdict) -> str:
    level = "warning" if finding.verdict == Judgement.INCONCLUSIVE and verdict.exit_code == 0 else "error"
    where = {"title": f"{finding.verdict.value} {finding.gate}"}
    scenario = verdict.provenance.get("scenario")
    if scenario and finding.line and not tables.several(verdict):
        where = {"file": str(scenario), "line": str(finding.line), **where}
    properties = ",".join(f"{key}={_property(value)}" for key, value in where.items())
    return f"::{level} {properties}::{_data(tables.sentence(finding))}"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
