"""The gateway's data plane in a cluster: the local stack's Envoy, with pods behind names in place of addresses.

What a request may do is the same document (`gateway/envoy.py`); here is only what a cluster adds: engines found by
DNS, checked by the canary that lives beside each, a candidate release that gets a share of the traffic, and a page of
metrics that a Prometheus outside the pod can read. The shares come from files, so that a ConfigMap moves them while
Envoy runs.
"""

from typing import Any

from reference_stack.gateway import envoy
from reference_stack.gateway.envoy import Address

GATEWAY: Address = ("0.0.0.0", 8080)
STATS: Address = ("0.0.0.0", 9902)
ADMIN: Address = ("127.0.0.1", 9901)
GUARD: Address = ("127.0.0.1", 8083)
ENGINE: Address = ("engine", 8000)  # headless Services: one address a ready pod
CANDIDATE: Address = ("engine-candidate", 8000)
CANARY_PORT = 8001
WEIGHTS = "/weights/..data"  # the link that kubelet swaps when the ConfigMap changes
RETRIES = 2  # how many replicas there are is not known here
RELEASE_HEADER = "x-release"  # `x-release: candidate` goes to the candidate, whatever its share


def config(
    gateway: Address = GATEWAY,
    stats: Address = STATS,
    admin: Address = ADMIN,
    guard: Address = GUARD,
    engine: Address = ENGINE,
    candidate: Address = CANDIDATE,
    canary_port: int = CANARY_PORT,
    weights: str = WEIGHTS,
) -> dict[str, Any]:
    """Envoy's bootstrap document. `weights` is a directory with the files routing.engines and routing.candidate."""
    document = envoy.config(gateway, admin, guard, [engine] * (RETRIES + 1))
    engines, guards, _ = document["static_resources"]["clusters"]
    document["static_resources"]["clusters"] = [
        _found_by_name(engines, "engines", engine, canary_port),
        _found_by_name(engines, "candidate", candidate, canary_port),
        guards,
        _cluster("admin", admin),
    ]
    _split(document["static_resources"]["listeners"][0])
    document["static_resources"]["listeners"].append(_stats(stats))
    # Releases are compared by the time that their engines took.
    buckets = {"match": {"suffix": "upstream_rq_time"}, "buckets": envoy.LATENCY_BUCKETS_MS}
    document["stats_config"]["histogram_bucket_settings"].append(buckets)
    shares = {"name": "shares", "disk_layer": {"symlink_root": weights}}
    document["layered_runtime"]["layers"].insert(1, shares)
    return document


def _found_by_name(engines: dict[str, Any], name: str, service: Address, canary_port: int) -> dict[str, Any]:
    """A cluster of all pods of a headless Service, each asked for its own canary."""
    endpoint = {"address": _socket(service), "health_check_config": {"port_value": canary_port}}
    resolved = {
        "@type": "type.googleapis.com/envoy.extensions.clusters.dns.v3.DnsCluster",
        "dns_lookup_family": "V4_PREFERRED",
        "dns_refresh_rate": "1s",
        "respect_dns_ttl": False,
    }
    return {
        **{key: value for key, value in engines.items() if key != "type"},
        "name": name,
        "cluster_type": {"name": "envoy.cluster.dns", "typed_config": resolved},
        # A pod that is told to stop leaves the name while it still answers: no new requests, the old ones to their end.
        "ignore_health_on_host_removal": True,
        "load_assignment": {"cluster_name": name, "endpoints": [{"lb_endpoints": [{"endpoint": endpoint}]}]},
    }


def _split(listener: dict[str, Any]) -> None:
    """Every route to engines becomes two: by header to the candidate, else by weight."""
    manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
    (host,) = manager["route_config"]["virtual_hosts"]
    routes: list[dict[str, Any]] = []
    for route in host["routes"]:
        if "route" in route:
            asked = {"name": RELEASE_HEADER, "string_match": {"exact": "candidate"}}
            match = {**route["match"], "headers": [*route["match"].get("headers", []), asked]}
            unsplit = {key: value for key, value in route["route"].items() if key != "weighted_clusters"}
            routes.append({**route, "match": match, "route": {**unsplit, "cluster": "candidate"}})
            shares = [{"name": "engines", "weight": 100}, {"name": "candidate", "weight": 0}]
            weighted = {"clusters": shares, "runtime_key_prefix": "routing"}
            route = {**route, "route": {**unsplit, "weighted_clusters": weighted}}
        routes.append(route)
    host["routes"] = routes


def _stats(address: Address) -> dict[str, Any]:
    """Metrics and readiness of Envoy and of the guard, for those outside the pod; nothing else of the admin's port."""
    routes = [
        {"match": {"path": "/stats/prometheus"}, "route": {"cluster": "admin"}},
        {"match": {"path": "/ready"}, "route": {"cluster": "admin"}},
        {"match": {"path": "/guard/metrics"}, "route": {"cluster": "guard", "prefix_rewrite": "/metrics"}},
        {"match": {"path": "/guard/health"}, "route": {"cluster": "guard", "prefix_rewrite": "/health"}},
    ]
    manager = {
        "@type": "type.googleapis.com/envoy.extensions.filters.network."
        "http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "stats",
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": routes}]},
        "http_filters": [
            {
                "name": "router",
                "typed_config": {"@type": "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router"},
            }
        ],
    }
    chain = {"filters": [{"name": "http", "typed_config": manager}]}
    return {"name": "stats", "address": _socket(address), "filter_chains": [chain]}


def _cluster(name: str, address: Address) -> dict[str, Any]:
    endpoint = {"endpoint": {"address": _socket(address)}}
    return {
        "name": name,
        "type": "STATIC",
        "connect_timeout": "0.5s",
        "load_assignment": {"cluster_name": name, "endpoints": [{"lb_endpoints": [endpoint]}]},
    }


def _socket(address: Address) -> dict[str, Any]:
    return {"socket_address": {"address": address[0], "port_value": address[1]}}
