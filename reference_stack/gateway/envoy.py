"""The gateway's data plane: an Envoy configuration as one pure function of the addresses in it.

Envoy routes, checks, retries and streams; what a good request is, the guard beside it decides. Nothing is started here.
It refuses to be clever about answers: an answer that has begun is never sent twice, never held back, never rewritten.
"""

from collections.abc import Sequence
from typing import Any

Address = tuple[str, int]

BODY_LIMIT_BYTES = 10 * 1024 * 1024
RESPONSE_HEADERS_LIMIT_KB = 256  # one header of 128 kB, and room for the others
CHECK_INTERVAL = "1s"
UNUSED_CHECK_INTERVAL = "5s"  # of the detour while nobody takes it; the canary asks an engine only once a second anyway
DETOUR_DISTANCE = 100  # from an engine's port
CHECK_TIMEOUT = "3s"  # longer than the guard's canary takes to give up
KEEP_ALIVE = "4s"  # uvicorn closes an idle connection after 5 s; closing first avoids a race
GUARD_TIMEOUT = "10s"  # an exact count of a large prompt on a busy machine
MAX_REQUESTS = 1024  # start value of the controller's lever: circuit_breakers.engines.default.max_requests
MAX_RETRIES = 64  # at once; with one retry per request a dying replica cannot start a storm

LATENCY_BUCKETS_MS = [50, 100, 250, 500, 800, 1000, 1200, 1500, 2000, 3000, 5000, 10_000, 30_000, 60_000, 300_000]

FORWARDING_HEADERS = (
    "forwarded",
    "x-forwarded-for",
    "x-forwarded-host",
    "x-forwarded-port",
    "x-real-ip",
    "x-client-ip",
    "x-cluster-client-ip",
    "true-client-ip",
    "cf-connecting-ip",
)

CUT_SHORT = ["UC", "UF", "UT", "UPE", "SI"]  # answers that may carry status 200 and are not whole

_TYPE = "type.googleapis.com/envoy"
_HTTP = f"{_TYPE}.extensions.filters.http"
_HTTP_OPTIONS = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"


def config(gateway: Address, admin: Address, guard: Address, engines: Sequence[Address]) -> dict[str, Any]:
    """Envoy's bootstrap document for a gateway in front of `engines` (named engine-0, engine-1 ... for the guard)."""
    return {
        "admin": {"address": _socket(admin)},
        "stats_flush_interval": "1s",  # histograms are as old as this
        "stats_config": {"histogram_bucket_settings": [_latency_buckets()]},
        "layered_runtime": {
            "layers": [{"name": "static", "static_layer": {}}, {"name": "admin", "admin_layer": {}}],
        },
        "static_resources": {
            "listeners": [_listener(gateway, retries=max(1, len(engines) - 1))],
            "clusters": [_engines(engines, guard), _guard(guard), _detour(engines, guard)],
        },
    }


def _latency_buckets() -> dict[str, Any]:
    """Users' latency, with a boundary where promises are made: 1.2 s lies between two of Envoy's own."""
    return {"match": {"exact": "http.gateway.downstream_rq_time"}, "buckets": LATENCY_BUCKETS_MS}


def _socket(address: Address) -> dict[str, Any]:
    return {"socket_address": {"address": address[0], "port_value": address[1]}}


def _listener(gateway: Address, retries: int) -> dict[str, Any]:
    manager = {
        "@type": f"{_TYPE}.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "gateway",
        # A client's address is the one it connects from: what it says of itself is removed before anything reads it.
        "use_remote_address": True,
        "internal_address_config": {"cidr_ranges": []},
        "early_header_mutation_extensions": [_forget_forwarding()],
        "preserve_external_request_id": True,
        "always_set_request_id_in_response": True,
        "request_id_extension": {
            "typed_config": {
                "@type": f"{_TYPE}.extensions.request_id.uuid.v3.UuidRequestIdConfig",
                "pack_trace_reason": False,
            },
        },
        # One spelling per path, so that the guard and the engine read the same one.
        "normalize_path": True,
        "merge_slashes": True,
        "path_with_escaped_slashes_action": "REJECT_REQUEST",
        "request_headers_timeout": "10s",
        "request_timeout": "60s",  # to send the request, not to answer it
        "access_log": [_failures_log()],
        "local_reply_config": _error_shape(),
        "route_config": {"virtual_hosts": [_routes(retries)]},
        "http_filters": [
            _ask_guard(),
            _break_nothing(),
            {"name": "router", "typed_config": {"@type": f"{_HTTP}.router.v3.Router"}},
        ],
    }
    filters = [{"name": "http", "typed_config": manager}]
    return {"name": "gateway", "address": _socket(gateway), "filter_chains": [{"filters": filters}]}


def _forget_forwarding() -> dict[str, Any]:
    return {
        "name": "forget_forwarding",
        "typed_config": {
            "@type": f"{_TYPE}.extensions.http.early_header_mutation.header_mutation.v3.HeaderMutation",
            "mutations": [{"remove": name} for name in FORWARDING_HEADERS],
        },
    }


def _failures_log() -> dict[str, Any]:
    """What went wrong behind the gateway, on stdout; what the guard refused is counted, not written."""
    words = (
        "%START_TIME% %REQ(:METHOD)% %REQ(:PATH)% %RESPONSE_CODE% %RESPONSE_FLAGS% %RESPONSE_CODE_DETAILS% "
        "%DURATION%ms %UPSTREAM_HOST% attempts=%UPSTREAM_REQUEST_ATTEMPT_COUNT% id=%REQ(X-REQUEST-ID)%\n"
    )
    return {
        "name": "failures",
        "filter": {
            "or_filter": {
                "filters": [
                    {"status_code_filter": _status("GE", 500)},
                    {"response_flag_filter": {"flags": CUT_SHORT}},
                ]
            }
        },
        "typed_config": {
            "@type": f"{_TYPE}.extensions.access_loggers.stream.v3.StdoutAccessLog",
            "log_format": {"text_format_source": {"inline_string": words}},
        },
    }


def _status(operator: str, value: int) -> dict[str, Any]:
    return {"comparison": {"op": operator, "value": {"default_value": value, "runtime_key": "unused"}}}


def _error_shape() -> dict[str, Any]:
    """Every answer of Envoy's own in OpenAI's error shape; the first rule that matches counts."""

    def rule(match: dict[str, Any], kind: str, code: str, message: str = "%LOCAL_REPLY_BODY%") -> dict[str, Any]:
        error = {"message": message, "type": kind, "param": None, "code": code}
        return {"filter": match, "body_format_override": {"json_format": {"error": error}}}

    guards_own = {
        "filter": {"response_flag_filter": {"flags": ["UAEX"]}},
        "body_format_override": {
            "text_format_source": {"inline_string": "%LOCAL_REPLY_BODY%"},
            "content_type": "application/json",
        },
    }
    return {
        "mappers": [
            rule(
                {"and_filter": {"filters": [_code("GE", 500), {"response_flag_filter": {"flags": ["UAEX"]}}]}},
                "server_error",
                "guard_unavailable",
                "The gateway's guard does not answer.",
            ),
            guards_own,
            rule(_code("EQ", 404), "invalid_request_error", "not_found"),
            rule(
                _code("EQ", 413),
                "invalid_request_error",
                "body_too_large",
                f"The request body is larger than {BODY_LIMIT_BYTES} bytes.",
            ),
            rule(_code("EQ", 503), "server_error", "unavailable"),
            rule(_code("GE", 500), "server_error", "gateway_error"),
            rule(_code("GE", 400), "invalid_request_error", "bad_request"),
        ]
    }


def _code(operator: str, value: int) -> dict[str, Any]:
    return {"status_code_filter": _status(operator, value)}


def _routes(retries: int) -> dict[str, Any]:
    to_engines = {
        # All go straight, until the admin's runtime sends them round (routing.engines, routing.detour).
        "weighted_clusters": {
            "clusters": [{"name": "engines", "weight": 1}, {"name": "detour", "weight": 0}],
            "runtime_key_prefix": "routing",
        },
        "timeout": "0s",  # an answer may stream for as long as it has something to say
        "retry_policy": {
            # A reset counts too: before the first byte of an answer another replica can still give it, and the loser
            # is dead or closed. Envoy itself never retries once the headers of an answer have gone to the client.
            "retry_on": "connect-failure,refused-stream,reset,retriable-status-codes",
            "retriable_status_codes": [500, 502, 503, 504],
            "num_retries": retries,
            "retry_back_off": {"base_interval": "0.025s", "max_interval": "0.25s"},
            "retry_host_predicate": [
                {
                    "name": "previous_hosts",
                    "typed_config": {
                        "@type": f"{_TYPE}.extensions.retry.host.previous_hosts.v3.PreviousHostsPredicate"
                    },
                }
            ],
            # A dead replica has the fewest requests, so least-request offers it again and again: keep asking.
            "host_selection_retry_max_attempts": 50,
        },
    }
    unguarded = {"guard": {"@type": f"{_HTTP}.ext_authz.v3.ExtAuthzPerRoute", "disabled": True}}
    reading = {"name": ":method", "string_match": {"exact": "GET"}}
    return {
        "name": "all",
        "domains": ["*"],
        "routes": [
            {
                "match": {"prefix": "/v1/", "headers": [reading]},
                "route": to_engines,
                "typed_per_filter_config": unguarded,
            },
            {"match": {"prefix": "/v1/"}, "route": to_engines},
            {"match": {"path": "/health"}, "route": to_engines, "typed_per_filter_config": unguarded},
            # An engine serves more than it should to strangers (/metrics, /tokenize, /invocations): only /v1 is public.
            {
                "match": {"prefix": "/"},
                "direct_response": {"status": 404, "body": {"inline_string": "This gateway serves /v1/ and /health."}},
                "typed_per_filter_config": unguarded,
            },
        ],
    }


def _ask_guard() -> dict[str, Any]:
    passed_on = ["content-type", "x-forwarded-for"]
    return {
        "name": "guard",
        "typed_config": {
            "@type": f"{_HTTP}.ext_authz.v3.ExtAuthz",
            "failure_mode_allow": False,
            "status_on_error": {"code": "ServiceUnavailable"},
            "with_request_body": {"max_request_bytes": BODY_LIMIT_BYTES, "allow_partial_message": False},
            "allowed_headers": {"patterns": [{"exact": name, "ignore_case": True} for name in passed_on]},
            "http_service": {
                "server_uri": {"uri": "http://guard", "cluster": "guard", "timeout": GUARD_TIMEOUT},
                "path_prefix": "/decide",
            },
        },
    }


def _break_nothing() -> dict[str, Any]:
    """Delays and aborts for those who test the stack, off until the admin's runtime says otherwise.

    They hold for a request before it is sent to an engine, and so before any retry: users feel each.
    """
    off = {"numerator": 0, "denominator": "HUNDRED"}
    return {
        "name": "fault",
        "typed_config": {
            "@type": f"{_HTTP}.fault.v3.HTTPFault",
            "delay": {"fixed_delay": "0.001s", "percentage": off},
            "delay_percent_runtime": "fault.engines.delay_percent",
            "delay_duration_runtime": "fault.engines.delay_ms",
            "abort": {"http_status": 503, "percentage": off},
            "abort_percent_runtime": "fault.engines.abort_percent",
            "abort_http_status_runtime": "fault.engines.abort_status",
        },
    }


def _engines(engines: Sequence[Address], guard: Address) -> dict[str, Any]:
    return {
        "name": "engines",
        "type": "STATIC",
        "lb_policy": "LEAST_REQUEST",
        "connect_timeout": "0.5s",
        "close_connections_on_host_health_failure": True,
        # No merge window: what a health check finds holds for the next request, not for those a second later.
        "common_lb_config": {"healthy_panic_threshold": {"value": 0}, "update_merge_window": "0s"},
        "typed_extension_protocol_options": {
            _HTTP_OPTIONS: {
                "@type": f"type.googleapis.com/{_HTTP_OPTIONS}",
                "explicit_http_config": {"http_protocol_options": {}},
                "common_http_protocol_options": {
                    "idle_timeout": KEEP_ALIVE,
                    "max_response_headers_kb": RESPONSE_HEADERS_LIMIT_KB,
                },
            }
        },
        "load_assignment": {
            "cluster_name": "engines",
            "endpoints": [{"lb_endpoints": [_replica(n, engine, guard) for n, engine in enumerate(engines)]}],
        },
        "health_checks": [_canary_check()],
        "outlier_detection": {
            # Only what Envoy sees at the socket: an engine that sheds load with 503 is busy, not broken.
            "split_external_local_origin_errors": True,
            "consecutive_local_origin_failure": 2,
            "enforcing_consecutive_5xx": 0,
            "enforcing_success_rate": 0,
            "enforcing_local_origin_success_rate": 0,
            "interval": "1s",
            "base_ejection_time": "1s",
            "max_ejection_percent": 50,
        },
        "circuit_breakers": {
            "thresholds": [
                {
                    "max_connections": 4 * MAX_REQUESTS,
                    "max_pending_requests": MAX_REQUESTS,
                    "max_requests": MAX_REQUESTS,
                    "max_retries": MAX_RETRIES,
                }
            ]
        },
    }


def _detour(engines: Sequence[Address], guard: Address) -> dict[str, Any]:
    """The same engines by way of whoever listens at a fixed distance from each: those who test the stack, or nobody."""
    around = _engines([(host, port + DETOUR_DISTANCE) for host, port in engines], guard)
    checks = [{**check, "no_traffic_interval": UNUSED_CHECK_INTERVAL} for check in around["health_checks"]]
    assignment = {**around["load_assignment"], "cluster_name": "detour"}
    return {**around, "name": "detour", "load_assignment": assignment, "health_checks": checks}


def _replica(number: int, engine: Address, guard: Address) -> dict[str, Any]:
    """One engine; the question whether it is well goes to the guard, under the engine's name as host."""
    check = {"address": _socket(guard), "hostname": f"engine-{number}"}
    return {"endpoint": {"address": _socket(engine), "hostname": f"engine-{number}", "health_check_config": check}}


def _canary_check() -> dict[str, Any]:
    """A dead replica (503) is out at once, a late one (504) when it is late twice running."""
    return {
        "interval": CHECK_INTERVAL,
        "no_traffic_interval": CHECK_INTERVAL,
        "timeout": CHECK_TIMEOUT,
        "unhealthy_threshold": 2,
        "healthy_threshold": 1,
        "http_health_check": {"path": "/canary", "retriable_statuses": [{"start": 504, "end": 505}]},
        "event_logger": [
            {
                "name": "stdout",
                "typed_config": {
                    "@type": f"{_TYPE}.extensions.health_check.event_sinks.file.v3.HealthCheckEventFileSink",
                    "event_log_path": "/dev/stdout",
                },
            }
        ],
    }


def _guard(guard: Address) -> dict[str, Any]:
    return {
        "name": "guard",
        "type": "STATIC",
        "connect_timeout": "0.5s",
        "load_assignment": {
            "cluster_name": "guard",
            "endpoints": [{"lb_endpoints": [{"endpoint": {"address": _socket(guard)}}]}],
        },
    }
