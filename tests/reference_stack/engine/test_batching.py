"""The batching model alone, in virtual time: its rules, and what each profile makes of the business mix."""

import heapq
import math
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference_stack.engine.batching import Scheduler, Sequence
from reference_stack.profiles import profile
from reference_stack.profiles.memory import BLOCK_TOKENS, GIB
from reference_stack.profiles.profile import Profile


def small(kv_blocks: int, max_num_seqs: int = 4, max_num_batched_tokens: int = 64) -> Profile:
    """The h100-8b profile with a KV cache of kv_blocks blocks, few seats and a small budget."""
    base = profile.load("h100-8b", max_model_len=256)
    used = base.weights_bytes + base.overhead_bytes + kv_blocks * BLOCK_TOKENS * base.need.kv_per_token
    assert base.vllm.gpu_memory_utilization
    card = replace(base.card, memory_gib=(used / GIB + 1e-6) / base.vllm.gpu_memory_utilization)
    limits = replace(base.vllm, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens)
    made = replace(base, card=card, vllm=limits)
    assert made.kv_blocks == kv_blocks
    return made


def play(scheduler: Scheduler, sequences: list[Sequence]) -> int:
    """Run sequences through in virtual time, each added when it is due; the number of preemptions."""
    due = [(sequence.arrived_s, index, sequence) for index, sequence in enumerate(sequences)]
    heapq.heapify(due)
    now_s, preempted = 0.0, 0
    while due or scheduler.running or scheduler.waiting:
        while due and due[0][0] <= now_s:
            scheduler.add(heapq.heappop(due)[2])
        step = scheduler.step(now_s)
        preempted += step.preempted if step else 0
        now_s = step.ended_s if step else due[0][0]
    return preempted


def business_mix(rate_per_s: float, duration_s: float, seed: int) -> list[Sequence]:
    """S1-1 for one replica: Poisson arrivals, log-uniform lengths in three classes, 32 output tokens on average."""
    rng = random.Random(seed)
    sequences, now_s = [], 0.0
    while (now_s := now_s + rng.expovariate(rate_per_s)) < duration_s:
        low, high = rng.choices([(16, 511), (512, 4095), (4096, 16384)], [70, 20, 10])[0]
        prompt_tokens = round(math.exp(rng.uniform(math.log(low), math.log(high))))
        sequences.append(Sequence(prompt_tokens, rng.randint(1, 63), now_s))
    return sequences


def p95_s(name: str, seed: int) -> float:
    """P95 of the end-to-end latency, nearest rank, of the business mix at 10 requests/s on one replica."""
    sequences = business_mix(rate_per_s=10, duration_s=120, seed=seed)
    play(Scheduler(profile.load(name)), sequences)
    latencies = sorted(s.last_token_s - s.arrived_s for s in sequences if s.last_token_s is not None)
    assert len(latencies) == len(sequences)
    return latencies[math.ceil(0.95 * len(latencies)) - 1]


@pytest.mark.parametrize("seed", range(3))
def test_business_mix_passes_gate_1_on_h100(seed: int) -> None:
    """An 8B model on an H100 serves the business mix at 10 requests/s with a P95 clearly under 1.2 s."""
    assert p95_s("h100-8b", seed) < 1.0


def test_business_mix_fails_gate_1_on_a10() -> None:
    """The same mix on an A10 misses 1.2 s: prefill alone asks for more than the card's peak."""
    assert p95_s("a10", seed=0) > 1.2


def test_decode_runs_at_the_bandwidth_floor() -> None:
    """One sequence in decode takes the time to read the weights at 70 % of the bandwidth, plus the step's overhead."""
    h100 = profile.load("h100-8b")
    scheduler = Scheduler(h100)
    sequence = Sequence(16, 3, arrived_s=0.0)
    play(scheduler, [sequence])
    floor_s = h100.weights_bytes / (3350e9 * 0.7)
    assert sequence.gap_s == pytest.approx(floor_s + 0.001, rel=0.01)


def test_prefill_grows_faster_than_length() -> None:
    """Twice the prompt takes more than twice the prefill, since attention grows with context."""
    cost = profile.load("h100-8b").cost
    assert cost(8192, 16384, 8192 * 12288).kernels_s > cost(8192, 8192, 8192 * 4096).kernels_s


def test_budget_chunks_a_long_prompt_beside_decodes() -> None:
    """A long prompt is computed in chunks of the token budget, and a running sequence still gets a token every step."""
    scheduler = Scheduler(small(kv_blocks=64))
    first = Sequence(8, 20, 0.0)
    scheduler.add(first)
    scheduler.step(0.0)
    scheduler.add(Sequence(150, 1, 0.0))
    steps = [scheduler.step(float(n)) for n in range(1, 4)]
    assert [step.batch_tokens for step in steps if step] == [64, 64, 25]
    assert all(step and first in step.sampled for step in steps)


def test_seats_are_limited_and_given_in_order() -> None:
    """No more than max_num_seqs run at once, and the one that came first gets the next free seat."""
    scheduler = Scheduler(small(kv_blocks=64, max_num_seqs=2))
    sequences = [Sequence(8, n + 1, 0.0) for n in range(4)]
    for sequence in sequences:
        scheduler.add(sequence)
    scheduler.step(0.0)
    assert list(scheduler.waiting) == sequences[2:]
    scheduler.step(1.0)
    assert scheduler.running == [sequences[2]]
    assert list(scheduler.waiting) == sequences[3:]


def test_newest_is_preempted_and_recomputed() -> None:
    """When blocks run out the newest sequence loses its cache, waits, and still ends with all of its tokens."""
    scheduler = Scheduler(small(kv_blocks=16))
    older, newer = Sequence(100, 60, 0.0), Sequence(100, 60, 0.001)
    assert play(scheduler, [older, newer]) >= 1
    assert older.preemptions == 0
    assert newer.preemptions >= 1
    assert newer.sampled_tokens == 60
    assert scheduler.kv_usage == 0


def test_abort_frees_everything_at_once() -> None:
    """An aborted sequence, running or waiting, leaves no block, no seat and no place in the queue."""
    scheduler = Scheduler(small(kv_blocks=64, max_num_seqs=1))
    running, waiting = Sequence(64, 8, 0.0), Sequence(64, 8, 0.0)
    scheduler.add(running)
    scheduler.add(waiting)
    scheduler.step(0.0)
    assert scheduler.kv_usage > 0
    scheduler.abort(running)
    scheduler.abort(waiting)
    assert scheduler.kv_usage == 0
    assert scheduler.step(1.0) is None


@given(
    shapes=st.lists(st.tuples(st.integers(1, 200), st.integers(1, 56), st.floats(0, 0.2)), min_size=1, max_size=12),
    kv_blocks=st.integers(16, 40),
    seats=st.integers(1, 6),
)
def test_every_sequence_ends_whole(shapes: list[tuple[int, int, float]], kv_blocks: int, seats: int) -> None:
    """Whatever arrives, every sequence gets exactly its tokens, in time order, and the cache ends empty."""
    scheduler = Scheduler(small(kv_blocks, max_num_seqs=seats))
    sequences = [Sequence(*shape) for shape in shapes]
    play(scheduler, sequences)
    for sequence in sequences:
        assert sequence.sampled_tokens == sequence.output_tokens
        assert sequence.scheduled_s is not None
        assert sequence.first_token_s is not None
        assert sequence.last_token_s is not None
        assert sequence.arrived_s <= sequence.scheduled_s < sequence.first_token_s <= sequence.last_token_s
    assert scheduler.free_blocks == kv_blocks
