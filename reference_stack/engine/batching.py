"""Continuous batching as vLLM does it, without a clock: who computes what in the next step, and how long that takes.

First come, first served. A step has a token budget (max_num_batched_tokens) that running sequences take first, so a
long prompt is prefilled in chunks beside the decodes of others. At most max_num_seqs run at once. The KV cache is
blocks of 16 tokens; when it runs out, the newest running sequence is preempted and recomputed later. Nothing here is
random: the same arrivals give the same steps. Prefix caching, speculative decoding and priorities are left out.
"""

from collections import deque
from dataclasses import dataclass, field

from reference_stack.profiles.memory import BLOCK_TOKENS
from reference_stack.profiles.profile import Cost, Profile


@dataclass(slots=True, eq=False)
class Sequence:
    """One request in the engine. Times are seconds on the caller's clock; None until it happened."""

    prompt_tokens: int
    output_tokens: int
    arrived_s: float
    computed_tokens: int = 0  # tokens whose KV lies in the cache
    sampled_tokens: int = 0
    blocks: int = 0
    preemptions: int = 0
    scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    gap_s: float | None = None  # between its last two tokens

    @property
    def pending_tokens(self) -> int:
        """Tokens that must be computed before the next one can be sampled: the prompt at first, one in decode."""
        return self.prompt_tokens + self.sampled_tokens - self.computed_tokens

    @property
    def finished(self) -> bool:
        """All of the answer is sampled."""
        return self.sampled_tokens >= self.output_tokens


@dataclass(frozen=True, slots=True)
class Step:
    """One forward pass, from started_s to ended_s; each of `sampled` has one more token at ended_s."""

    started_s: float
    ended_s: float
    sampled: list[Sequence]
    batch_tokens: int
    preempted: int
    cost: Cost


@dataclass(slots=True)
class Scheduler:
    """The waiting queue, the running batch and the KV cache of one replica."""

    profile: Profile
    waiting: deque[Sequence] = field(default_factory=deque)
    running: list[Sequence] = field(default_factory=list)
    free_blocks: int = field(init=False)

    def __post_init__(self) -> None:
        """Start with an empty cache."""
        self.free_blocks = self.profile.kv_blocks

    @property
    def kv_usage(self) -> float:
        """The share of KV blocks in use, 0 to 1."""
        return 1 - self.free_blocks / self.profile.kv_blocks

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence; prompt and answer together must fit max_model_len."""
        assert sequence.prompt_tokens + sequence.output_tokens <= self.profile.vllm.max_model_len
        self.waiting.append(sequence)

    def abort(self, sequence: Sequence) -> None:
        """Forget a sequence at once, wherever it is; one that is over is left alone."""
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        self._release(sequence)

    def step(self, now_s: float) -> Step | None:
        """Do the next step, begun at now_s; None when there is nothing to do."""
        chunks, preempted = self._schedule()
        if not chunks:
            return None
        cost = self.profile.cost(
            batch_tokens=sum(tokens for _, tokens in chunks),
            context_tokens=sum(sequence.computed_tokens + tokens for sequence, tokens in chunks),
            attended_pairs=sum(tokens * (sequence.computed_tokens + tokens / 2) for sequence, tokens in chunks),
        )
        ended_s = now_s + cost.step_s
        sampled = [sequence for sequence, tokens in chunks if self._advance(sequence, tokens, now_s, ended_s)]
        return Step(now_s, ended_s, sampled, sum(tokens for _, tokens in chunks), preempted, cost)

    def _schedule(self) -> tuple[list[tuple[Sequence, int]], int]:
        """Who computes how many tokens: the running first, then the waiting while budget, seats and blocks last."""
        settings = self.profile.vllm
        budget = settings.max_num_batched_tokens
        chunks: list[tuple[Sequence, int]] = []
        preempted = 0
        while len(chunks) < len(self.running) and budget:
            sequence = self.running[len(chunks)]
            tokens = min(sequence.pending_tokens, budget)
            if self._reserve(sequence, tokens):
                chunks.append((sequence, tokens))
                budget -= tokens
            else:
                self._preempt(self.running.pop())
                preempted += 1
        while self.waiting and budget and not preempted and len(self.running) < settings.max_num_seqs:
            sequence = self.waiting[0]
            tokens = min(sequence.pending_tokens, budget)
            if not self._reserve(sequence, tokens):
                break
            self.running.append(self.waiting.popleft())
            chunks.append((sequence, tokens))
            budget -= tokens
        return chunks, preempted

    def _advance(self, sequence: Sequence, tokens: int, now_s: float, ended_s: float) -> bool:
        """Account for computed tokens; True when that sampled a token."""
        if sequence.scheduled_s is None:
            sequence.scheduled_s = max(now_s, sequence.arrived_s)
        sequence.computed_tokens += tokens
        if sequence.pending_tokens:
            return False
        sequence.sampled_tokens += 1
        sequence.gap_s = None if sequence.last_token_s is None else ended_s - sequence.last_token_s
        sequence.last_token_s = ended_s
        if sequence.first_token_s is None:
            sequence.first_token_s = ended_s
        if sequence.finished:
            self.running.remove(sequence)
            self._release(sequence)
        return True

    def _reserve(self, sequence: Sequence, tokens: int) -> bool:
        """Take the blocks that `tokens` more tokens need; False, and nothing taken, when there are too few."""
        needed = -(-(sequence.computed_tokens + tokens) // BLOCK_TOKENS) - sequence.blocks
        if needed > self.free_blocks:
            return False
        self.free_blocks -= needed
        sequence.blocks += needed
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Give up a sequence's cache and put it first in the queue: all of it is computed again."""
        self._release(sequence)
        sequence.computed_tokens = 0
        sequence.preemptions += 1
        self.waiting.appendleft(sequence)

    def _release(self, sequence: Sequence) -> None:
        """Return a sequence's blocks."""
        self.free_blocks += sequence.blocks
        sequence.blocks = 0
