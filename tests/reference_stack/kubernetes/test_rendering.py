"""What of the manifests follows from code is in the repository as the code says it now (K8S-1, ENG-1)."""

import pytest

from harness import scenario
from harness.traffic.arrivals import Poisson
from reference_stack.kubernetes import overlays, rendering
from reference_stack.profiles import profile
from reference_stack.profiles.arguments import settings


@pytest.mark.parametrize("path", rendering.documents())
def test_file_is_as_rendered(path: str) -> None:
    """`python -m reference_stack.kubernetes` would change nothing."""
    assert (rendering.HERE / path).read_text() == rendering.text(rendering.documents()[path])


def test_every_profile_with_a_gpu_has_an_overlay() -> None:
    """There is an overlay for each, and none for what is no profile."""
    there = {path.name for path in (rendering.HERE / "overlays").iterdir()}
    assert there == {name for name in profile.names() if profile.load(name).card.compute_capability is not None}
    assert len(there) >= 7


@pytest.mark.parametrize("name", ["h100", "a10"])
def test_arguments_are_the_profiles(name: str) -> None:
    """What `harness profile` renders is what a pod runs, after what is the stack's own."""
    chosen = profile.load(name)
    rendered = overlays.arguments(chosen)
    assert rendered[-len(settings(chosen)) :] == settings(chosen)
    assert not set(rendered[: -len(settings(chosen))]) & set(settings(chosen))


def test_the_promotions_scenario() -> None:
    """It is one that `harness run` takes, and long enough for its own gate: 5,990 requests for 99.95 % (K8S-2)."""
    rehearsal = scenario.load(rendering.HERE / "base/promotion/candidate.yaml")
    assert {gate.id for gate in rehearsal.gates} == {"p95_latency", "success", "rejections", "gpu_memory"}
    traffic = rehearsal.traffic
    assert isinstance(traffic, scenario.Traffic)
    assert isinstance(traffic.arrivals, Poisson) and traffic.bad
    assert traffic.arrivals.rate_per_s * traffic.for_s * (1 - traffic.bad.share) >= 5990
