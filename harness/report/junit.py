"""A verdict as JUnit XML, for CI servers: one test case a gate, one for each check of the harness's own health.

Servers have read `<error>` as nothing, `<skipped>` as success and an empty suite as broken, and drop the second of two
cases of one name. So: FAIL is a `<failure type="slo">`, INVALID an `<error type="invalid">`, INCONCLUSIVE a
`<failure type="inconclusive">`; nothing is ever skipped; names are unique; there is always a case. Under the policy
`on_inconclusive: warn` the exit code is 0, and an inconclusive case is then a pass that says so in its output.
"""

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any
from xml.etree import ElementTree as Xml

import orjson

from harness.model import Finding, Judgement, Verdict
from harness.report import tables

_ENDING = {
    Judgement.FAIL: ("failure", "slo"),
    Judgement.INVALID: ("error", "invalid"),
    Judgement.INCONCLUSIVE: ("failure", "inconclusive"),
}
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def render(verdict: Verdict) -> str:
    """The XML document, as a CI server reads it."""
    suite = Xml.Element("testsuite", name=_text(tables.name(verdict)))
    _properties(suite, verdict.provenance)
    taken: Counter[str] = Counter()
    for finding in tables.cases(verdict):
        case_name = f"{tables.name(verdict)}.{finding.gate}"
        taken[case_name] += 1
        number = taken[case_name]
        suite.append(
            _case(finding, tables.name(verdict), f"{case_name}#{number}" if number > 1 else case_name, verdict)
        )
    root = Xml.Element("testsuites", name="harness")
    root.append(suite)
    for element in (suite, root):
        element.set("tests", str(len(suite.findall("testcase"))))
        element.set("failures", str(len(suite.findall("testcase/failure"))))
        element.set("errors", str(len(suite.findall("testcase/error"))))
        element.set("skipped", "0")
    Xml.indent(root)
    return Xml.tostring(root, encoding="unicode", xml_declaration=False) + "\n"


def _case(finding: Finding, suite: str, name: str, verdict: Verdict) -> Xml.Element:
    case = Xml.Element("testcase", classname=_text(suite), name=_text(name), time="0")
    shown = {"window": finding.window, "limit": finding.limit, "line": finding.line or None, **finding.figures}
    _properties(case, shown)
    words = tables.sentence(finding)
    only_a_warning = finding.verdict == Judgement.INCONCLUSIVE and verdict.exit_code == 0
    if only_a_warning:
        Xml.SubElement(case, "system-out").text = _text(f"INCONCLUSIVE, which this scenario lets pass: {words}")
    elif finding.verdict in _ENDING:
        tag, kind = _ENDING[finding.verdict]
        Xml.SubElement(case, tag, type=kind, message=_text(finding.why)).text = _text(words)
    return case


def _properties(parent: Xml.Element, values: Mapping[str, Any]) -> None:
    """Values as programs read them back: strings as they are, the rest as JSON."""
    known = {key: value for key, value in values.items() if value not in (None, "")}
    properties = Xml.SubElement(parent, "properties") if known else parent
    for key, value in known.items():
        plain = value if isinstance(value, str) else orjson.dumps(value).decode()
        Xml.SubElement(properties, "property", name=_text(key), value=_text(plain))


def _text(words: str) -> str:
    """Words without the characters that no XML document may hold."""
    return _NOT_XML.sub("?", words)
