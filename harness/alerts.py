"""Which alerts a Prometheus fires, and when they begin and end: as those on call would hear of it.

It refuses to guess: a rule that was not evaluated, or that failed, says nothing, so what it said before stands, and
its silence can be seen. When an alert began to fire is when we saw it fire, at most a second late.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from harness.model import Event, Reading
from harness.sources import TIMEOUT_S, Clock, PartialAnswer, Unwatchable, prometheus_session


class Alerts:
    """The alerting rules of the Prometheus at `url`, by name. Raises Unwatchable when it has none.

    Several rules of one name, and several series of one rule, are one alert: it fires while any of them does.
    """

    clock: Clock = "monotonic"

    def __init__(self, url: str) -> None:
        self.name, self._session = url, prometheus_session()
        self._firing: set[str] = set()
        self.rules = sorted({str(rule["name"]) for rule in self._ask()})
        if not self.rules:
            raise Unwatchable(f"{url} has no alert rules")

    def sample(self) -> Iterator[Event | Reading]:
        """`alert_fired` and `alert_cleared` for what changed since the last time; the first time, for what fires.

        And of every alert that was evaluated, whether it fires: a gap in its readings is one in what is known of it.
        """
        rules, at_s = self._ask(), time.monotonic()
        silent = {rule["name"]: rule.get("lastError", "") for rule in rules if rule["health"] != "ok"}
        firing: dict[str, Mapping[str, Any]] = {}
        for rule in rules:
            for one in rule["alerts"]:
                if one["state"] == "firing":
                    firing.setdefault(rule["name"], _detail(rule, one))
        for name in sorted({str(rule["name"]) for rule in rules} - silent.keys()):
            yield Reading(at_s, "alert.firing", float(name in firing), {"alert": name})
        for name in sorted(firing.keys() - self._firing):
            yield Event(at_s, "alert_fired", name, firing[name])
        for name in sorted(self._firing - firing.keys() - silent.keys()):
            yield Event(at_s, "alert_cleared", name)
        self._firing = firing.keys() | (self._firing & silent.keys())
        if broken := [f"{name}: {why}" for name, why in silent.items() if why]:
            raise PartialAnswer(f"alert rules cannot be evaluated: {'; '.join(broken)}")

    def _ask(self) -> Sequence[Mapping[str, Any]]:
        """The rules, checked for all that is read of them. Raises OSError or ValueError."""
        answer = self._session.get(f"{self.name}/api/v1/rules", params={"type": "alert"}, timeout=TIMEOUT_S)
        answer.raise_for_status()
        try:
            rules = [rule for group in answer.json()["data"]["groups"] for rule in group["rules"]]
            for rule in rules:
                _ = rule["name"], rule["health"], [_detail(rule, one) for one in rule["alerts"] if one["state"]]
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a list of alert rules: {error!r}") from error
        return rules


def _detail(rule: Mapping[str, Any], one: Mapping[str, Any]) -> dict[str, Any]:
    """What fires: its labels, how long its condition had to hold before, its value then."""
    labels = {name: value for name, value in one["labels"].items() if name != "alertname"}
    return {"labels": labels, "for_s": float(rule["duration"]), "value": float(one["value"])}
