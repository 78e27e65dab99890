"""Scenario files: the shipped ones load, and each mistake is one sentence with its line."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from harness import scenario
from harness.model import UsageError

ROOT = Path(__file__).parents[1]
SHIPPED = sorted((ROOT / "scenarios").rglob("*.yaml"))
GOOD = (ROOT / "scenarios/load/business_mix.yaml").read_text()


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    return path


def sentence(tmp_path: Path, text: str) -> str:
    with pytest.raises(UsageError) as caught:
        scenario.load(written(tmp_path, text))
    assert "\n" not in str(caught.value)
    return str(caught.value).replace(str(tmp_path) + "/", "")


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_shipped_scenario_loads(path: Path) -> None:
    """Each is named for its claim, short, and has gates."""
    loaded = scenario.load(path, to_plan=path.parent.name != "replay")  # whose recordings are the user's
    assert loaded.claim
    assert loaded.gates
    assert len(path.read_text().splitlines()) <= 40


def test_a_gate_knows_its_line() -> None:
    """Findings point into the file that made the promise."""
    loaded = scenario.load(ROOT / "scenarios/load/business_mix.yaml")
    lines = GOOD.splitlines()
    assert [gate.id for gate in loaded.gates] == ["p95_latency", "success", "rejections", "gpu_memory"]
    assert all(gate.id in lines[gate.line - 1] for gate in loaded.gates)
    assert (loaded.seed, loaded.on_inconclusive) == (7, "")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("  for: 2m", "  fro: 2m", "mine.yaml:7: unknown key `fro` in `traffic`; did you mean `for`?"),
        ("  for: 2m\n", "", "mine.yaml:4: `for` is missing in `traffic`"),
        ("rate: 20/s", "rate: 20", "mine.yaml:5: `traffic.arrivals.poisson.rate`: 20 is not a rate such as 20/s"),
        ("poisson:", "poison:", "mine.yaml:5: `traffic.arrivals` knows no `poison`; did you mean `poisson`?"),
        (
            "share: 70%",
            "share: 60%",
            "mine.yaml:8: `traffic.prompts`: the shares of the mix add to 90%, not to 100%",
        ),
        ("empty_body: 400", "empty: 400", "`traffic.bad.kinds`: no flaw is called `empty`; there are: empty_body"),
        ("- p95_latency", "- p96_latency", "`gates.0` knows no `p96_latency`; did you mean `p99_latency`"),
        ("below: 1.2s", "below: 1.2", "`gates.0.p95_latency.below`: 1.2 is not a time such as 1.2s"),
        ("below: 1.2s", "below: 1.2s, class: shrt", "p95_latency: there is no class `shrt`; did you mean `short`?"),
        (
            "below: 1.2s",
            "below: 1.2s, window: stedy",
            "p95_latency: there is no window `stedy`; did you mean `steady`?",
        ),
        ("seed: 7", "seed: 7\nseed: 8", "mine.yaml:4: `seed` is written twice, first on line 3"),
        ("seed: 7", "seed: yes", "mine.yaml:3: `seed` must be a whole number, not 'yes'"),
        ("seed: 7", f"seed: {2**63}", "mine.yaml:3: `seed`: input should be less than or equal to 9223372036854775807"),
        ("seed: 7", "seed: -1", "mine.yaml:3: `seed`: input should be greater than or equal to 0, not '-1'"),
        ("seed: 7", "seed: " + 5000 * "9", "mine.yaml:3: `seed`: "),
        ("seed: 7", "on_inconclusive: pass", "`on_inconclusive`: input should be '', 'fail', 'warn' or 'extend'"),
        (
            "  bad:\n",
            "  misbehaving: {floood: {}}\n  bad:\n",
            "`floood` in `traffic.misbehaving`; did you mean `flood`?",
        ),
        (
            "  bad:\n",
            "  misbehaving: {repeat: {size: 10, within: 1s, every: 3m}}\n  bad:\n",
            "mine.yaml:15: repeat never comes in the steady state: the run is too short",
        ),
        ("share: 10%                  ", "share: 0%", "`traffic.bad.share`: input should be greater than 0, not '0%'"),
        ("streamed: 80%", "text: no/such.txt", "mine.yaml:14: there is no file no/such.txt"),
        ("poisson: {rate: 20/s}", "recorded: {file: no/such}", "mine.yaml:5: there is no file no/such"),
        ("streamed: 80%", "path: /v1/rerank", "'/v1/rerank' is no path that ends in one of /chat/completions"),
        ("streamed: 80%", "path: /v1/embeddings", "answers of /v1/embeddings cannot be streamed: write `streamed: 0%`"),
    ],
)
def test_a_mistake_is_one_sentence_with_its_line(tmp_path: Path, old: str, new: str, said: str) -> None:
    """Keys, units, shares, kinds, classes and windows: what is wrong, where, what was perhaps meant."""
    assert old in GOOD
    assert said in sentence(tmp_path, GOOD.replace(old, new, 1))


def test_a_scenario_without_gates_judges_nothing(tmp_path: Path) -> None:
    """An empty list of gates is refused: nothing could fail."""
    text = GOOD[: GOOD.index("gates:")] + "gates: []\n"
    assert "a scenario without gates judges nothing" in sentence(tmp_path, text)


def test_rejections_of_nothing_are_refused(tmp_path: Path) -> None:
    """Exact rejections need a request that may be refused: bad ones, or a client whose right answers hold a refusal."""
    good, gates = GOOD[: GOOD.index("  bad:")], "gates:\n  - rejections: exact\n"
    assert "mine.yaml:16: rejections judges nothing" in sentence(tmp_path, good + gates)
    forged = "  misbehaving: {forged_address: {share: 5%}}\n"
    assert "judges nothing" in sentence(tmp_path, good + forged + gates)
    refused = forged.replace("5%", "5%, expect: [2xx, 403]")
    assert scenario.load(written(tmp_path, good + refused + gates))


def test_a_comparison_needs_a_capture(tmp_path: Path) -> None:
    """Gates that compare with a capture are refused, with their line, where the traffic is composed."""
    for gate in ("same_answers: {}", "latency_against_capture: {quantile: p99, at_most: 1.2x}"):
        said = sentence(tmp_path, GOOD[: GOOD.index("gates:")] + f"gates:\n  - {gate}\n")
        assert said.startswith("mine.yaml:") and "it needs `traffic: {replay: FILE}`" in said


def test_gates_on_faults_need_a_fault(tmp_path: Path) -> None:
    """A recovery, and a window around a fault, are refused in a scenario that breaks nothing."""
    head, chaos = GOOD[: GOOD.index("gates:")], "chaos: [{experiment: kill.yaml, at: 40s}]\n"
    for gate in ("recovery: {within: 30s}", "replica_recovery: {within: 2m}", "retry_storm: {at_most: 2x}"):
        gates = f"gates:\n  - {gate}\n"
        assert "it needs `chaos: [{experiment: FILE, at: 40s}]`" in sentence(tmp_path, head + gates)
        assert scenario.load(written(tmp_path, head + chaos + gates), to_plan=False)
    gates = "gates:\n  - p95_latency: {below: 1.2s, window: after}\n"
    assert "there is no window `after`" in sentence(tmp_path, head + gates)
    assert scenario.load(written(tmp_path, head + chaos + gates), to_plan=False)


def test_a_finished_run_is_judged_without_the_files_of_its_plan(tmp_path: Path) -> None:
    """The text that prompts were cut from may be gone when a run is judged again, or lie on another machine."""
    path = written(tmp_path, GOOD.replace("streamed: 80%", "text: no/such.txt"))
    assert scenario.load(path, to_plan=False).gates


def test_a_gate_that_cannot_hold_is_refused_before_the_run(tmp_path: Path) -> None:
    """An engine that takes 92 % of the GPU at its start fails a gate of 85 % while idle: refused, if there is one."""
    loaded = scenario.load(written(tmp_path, GOOD))
    serving = {"gpu_memory_utilization": {"http://127.0.0.1:1": 0.92}}
    with pytest.raises(UsageError, match=r"mine\.yaml:23: gpu_memory cannot stay below 85 %"):
        scenario.refuse_impossible(loaded, SimpleNamespace(gpu="dcgm"), serving)  # type: ignore[arg-type]
    scenario.refuse_impossible(loaded, SimpleNamespace(gpu="none"), serving)  # type: ignore[arg-type]
    healthy = {"gpu_memory_utilization": {"http://127.0.0.1:1": 0.82}}
    scenario.refuse_impossible(loaded, SimpleNamespace(gpu="dcgm"), healthy)  # type: ignore[arg-type]


def test_the_schema_knows_every_kind() -> None:
    """Editors are offered the arrivals, flaws' shape, misbehaviours and gates that exist."""
    text = str(scenario.json_schema())
    for name in ("poisson", "recorded", "hang_up", "p95_latency", "gpu_memory", "answer_tokens", "on_inconclusive"):
        assert f"'{name}'" in text
