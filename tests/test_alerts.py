"""Which alerts fire, asked of a small server that lists rules as Prometheus does."""

import contextlib
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from harness import sources, watch
from harness.alerts import Alerts
from harness.log import Log, read_log
from harness.model import Event, Reading
from harness.targets.base import Target


def rule(name, *firing, pending=(), health="ok", error=""):
    """A rule as Prometheus lists it, with an alert for each replica that fires or waits to."""
    alerts = [alert(replica, "firing") for replica in firing] + [alert(replica, "pending") for replica in pending]
    listed = {"name": name, "duration": 2, "health": health, "alerts": alerts, "type": "alerting"}
    return listed | ({"lastError": error} if error else {})


def alert(replica, state):
    labels = {"alertname": "any", "instance": replica, "severity": "critical"}
    return {"labels": labels, "state": state, "value": "1e+00"}


class Told:
    """What the server answers: rules, or a status and a body."""

    def __init__(self):
        self.rules, self.status, self.more, self.asked = [], 200, {}, []

    def body(self):
        return json.dumps({"status": "success", "data": {"groups": [{"rules": self.rules}]}, **self.more})


@pytest.fixture
def prometheus():
    """The server's url and what it tells."""
    told = Told()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            told.asked.append(self.path)
            self.send_response(told.status)
            self.end_headers()
            self.wfile.write(told.body().encode())

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", told
    server.shutdown()
    server.server_close()


def changes(alerts):
    return [(seen.kind, seen.name) for seen in alerts.sample() if isinstance(seen, Event)]


def told_of(alerts):
    """Whether each alert fires, of those that said so."""
    return {seen.labels["alert"]: seen.value for seen in looked(alerts) if isinstance(seen, Reading)}


def looked(alerts):
    with contextlib.suppress(sources.PartialAnswer):
        yield from alerts.sample()


def test_fires_and_clears(prometheus):
    """An alert is told once when it fires, with its labels, `for` and value, and once when it is gone."""
    url, told = prometheus
    told.rules = [rule("ReplicaDown", pending=["a"]), rule("GpuMemoryHigh")]
    alerts = Alerts(url)
    assert alerts.rules == ["GpuMemoryHigh", "ReplicaDown"] and changes(alerts) == []
    told.rules = [rule("ReplicaDown", "a"), rule("GpuMemoryHigh")]
    before_s = time.monotonic()
    (fired,) = [seen for seen in alerts.sample() if isinstance(seen, Event)]
    assert (fired.kind, fired.name) == ("alert_fired", "ReplicaDown")
    assert fired.detail == {"labels": {"instance": "a", "severity": "critical"}, "for_s": 2.0, "value": 1.0}
    assert before_s <= fired.at_s <= time.monotonic()
    assert changes(alerts) == []
    told.rules = [rule("ReplicaDown", pending=["a"]), rule("GpuMemoryHigh")]
    assert changes(alerts) == [("alert_cleared", "ReplicaDown")]
    assert told.asked == ["/api/v1/rules?type=alert"] * 5


def test_what_fires_already_is_told_at_once(prometheus):
    """An alert that fires before the run began is an event of its first second."""
    url, told = prometheus
    told.rules = [rule("ReplicaDown", "a")]
    assert changes(Alerts(url)) == [("alert_fired", "ReplicaDown")]


def test_an_alert_fires_while_any_of_its_series_does(prometheus):
    """Two replicas, or two rules of one name, are one alert: it clears with the last of them."""
    url, told = prometheus
    told.rules = [rule("ReplicaDown", "a"), rule("ReplicaDown", "b", "c")]
    alerts = Alerts(url)
    assert changes(alerts) == [("alert_fired", "ReplicaDown")]
    told.rules = [rule("ReplicaDown"), rule("ReplicaDown", "c")]
    assert changes(alerts) == []
    told.rules = [rule("ReplicaDown"), rule("ReplicaDown")]
    assert changes(alerts) == [("alert_cleared", "ReplicaDown")]


def test_a_rule_that_was_not_evaluated_says_nothing(prometheus):
    """A Prometheus that has just started lists rules without alerts: what fired is not over."""
    url, told = prometheus
    told.rules = [rule("ReplicaDown", "a")]
    alerts = Alerts(url)
    assert changes(alerts) == [("alert_fired", "ReplicaDown")]
    told.rules = [rule("ReplicaDown", health="unknown")]
    assert changes(alerts) == []
    told.rules = [rule("ReplicaDown")]
    assert changes(alerts) == [("alert_cleared", "ReplicaDown")]


def test_a_rule_that_fails_is_complained_about(prometheus):
    """A rule that cannot be evaluated does not clear, the others are still told, and the reason is given."""
    url, told = prometheus
    told.rules = [rule("Broken", "a"), rule("Well")]
    alerts = Alerts(url)
    assert changes(alerts) == [("alert_fired", "Broken")]
    told.rules = [rule("Broken", health="err", error="many-to-many matching"), rule("Well", "a")]
    assert [seen.name for seen in looked(alerts) if isinstance(seen, Event)] == ["Well"]
    with pytest.raises(sources.PartialAnswer, match="Broken: many-to-many matching"):
        changes(alerts)
    told.rules = [rule("Broken", "a"), rule("Well")]
    assert changes(alerts) == [("alert_cleared", "Well")]


def test_what_was_not_evaluated_can_be_told_from_what_does_not_fire(prometheus):
    """At each look every alert says whether it fires, but for those whose rules failed or were not evaluated yet."""
    url, told = prometheus
    told.rules = [rule("Down", "a"), rule("High", pending=["a"]), rule("New", health="unknown")]
    alerts = Alerts(url)
    assert told_of(alerts) == {"Down": 1.0, "High": 0.0}
    told.rules = [rule("Down", "a", health="err", error="no"), rule("High"), rule("New")]
    assert told_of(alerts) == {"High": 0.0, "New": 0.0}


@pytest.mark.parametrize(
    "broken",
    [
        {"status": 503},
        {"more": {"warnings": ["one shard is down"]}},
        {"more": {"data": {"resultType": "matrix"}}},
        {"more": {"data": []}},
        {"rules": [{"name": "no health"}]},
        {"rules": [rule("x") | {"alerts": [{"state": "firing"}]}]},
        {"rules": [rule("x") | {"alerts": [{"labels": {}, "state": "firing", "value": "much"}]}]},
    ],
)
def test_answers_that_are_no_rules(prometheus, broken):
    """A refusal, a partial answer and other documents are errors; nothing changed by them."""
    url, told = prometheus
    told.rules = [rule("ReplicaDown", "a")]
    alerts = Alerts(url)
    assert changes(alerts) == [("alert_fired", "ReplicaDown")]
    vars(told).update(broken)
    with pytest.raises((OSError, ValueError)):
        changes(alerts)
    told.status, told.more, told.rules = 200, {}, [rule("ReplicaDown")]
    assert changes(alerts) == [("alert_cleared", "ReplicaDown")]


def test_no_rules_are_nothing_to_watch(prometheus):
    """A Prometheus without alert rules cannot say that nothing is wrong."""
    with pytest.raises(sources.Unwatchable, match="no alert rules"):
        Alerts(prometheus[0])


def target(tmp_path, prometheus):
    keys = {"kind": "url", "url": "http://127.0.0.1:9", "model": "tiny", "tokenizer": tmp_path, "gpu": "none"}
    return Target(path=tmp_path / "target.yaml", prometheus=prometheus, **keys)


def logged(tmp_path):
    return [entry for entry in read_log(tmp_path / "log.jsonl", []) if isinstance(entry, Event)]


def test_a_run_tells_alerts_on_its_own_clock(tmp_path, prometheus):
    """The watcher announces the rules, and its log has what fired and cleared, in seconds of the run."""
    url, told = prometheus
    told.rules = [rule("ReplicaDown", "a")]
    log, stop = Log(tmp_path / "log.jsonl"), threading.Event()
    (source,) = watch.alert_source(target(tmp_path, url), log)
    origin_s = time.monotonic()
    stop.set()  # one look, as at the end of a run
    watch.follow(source, log, origin_s, stop)
    told.rules = [rule("ReplicaDown")]
    watch.follow(source, log, origin_s, stop)
    log.close()
    announced, fired, cleared = logged(tmp_path)
    assert announced.detail == {"source": url, "rules": ["ReplicaDown"]}
    assert (announced.kind, announced.name) == ("watching", "alerts")
    assert [(fired.kind, fired.name), (cleared.kind, cleared.name)] == [
        ("alert_fired", "ReplicaDown"),
        ("alert_cleared", "ReplicaDown"),
    ]
    assert 0 <= fired.at_s <= cleared.at_s <= time.monotonic() - origin_s


@pytest.mark.parametrize("url", [None, "http://127.0.0.1:9"])
def test_unwatched_alerts_are_said(tmp_path, url):
    """Without a Prometheus, and with one that does not answer, one note says that alerts are not watched."""
    log = Log(tmp_path / "log.jsonl")
    assert watch.alert_source(target(tmp_path, url), log) == []
    log.close()
    (note,) = logged(tmp_path)
    assert (note.kind, note.name) == ("note", "alerts")
    assert note.detail["why"].startswith("alerts are not watched: ")
