# Two commands are enough: `make stage1` runs the gate, `make test` runs the tests. Both do all set-up themselves.
ENGINE ?= sim
TARGET ?= local
WORKERS ?= 1
SCENARIOS ?= scenarios/load/business_mix.yaml
REPLAYS ?= scenarios/replay/$(if $(CAPTURE)$(RECORDING),production_hour,own_minute).yaml
CHAOS ?= $(if $(ALL),$(wildcard scenarios/chaos/*.yaml),$(addprefix scenarios/chaos/,kill_replica.yaml latency_100ms.yaml gpu_leak.yaml))
CAPTURE ?=
RECORDING ?=
FULL ?=
PYTHON ?= python3
export PYTHON
harness := .venv/bin/harness

.PHONY: setup vllm redis stage1 stage2 stage3 smoke test check types unit gpu-check bench up down clean

setup:
	@scripts/setup

vllm: setup
	@scripts/setup-vllm

# Of the full stack: the one Debian package that it needs besides.
redis:
	@scripts/setup-redis

engine := $(if $(filter vllm,$(ENGINE)),vllm,setup)

# Stage 1: the business mix on the stack; ENGINE=vllm for the real one, TARGET=FILE for yours.
stage1: $(engine)
	@$(harness) run $(SCENARIOS) --stage 1 --target $(TARGET) --engine $(ENGINE) --workers $(WORKERS)

# Stage 2: captured traffic sent again, and its answers compared. CAPTURE="one.pcap two.pcap" (and PORT=8000) imports
# yours, RECORDING=FILE plays one that you have imported; with neither, a minute of the stack's own is recorded first.
recording := $(or $(RECORDING),.cache/recordings/$(ENGINE).jsonl)
stage2: $(engine)
	@$(if $(RECORDING),,scripts/record $(ENGINE) $(TARGET) $(recording) $(CAPTURE))
	@$(harness) run $(REPLAYS) --recording $(recording) --stage 2 --target $(TARGET) --engine $(ENGINE) --workers $(WORKERS)

# Stage 3: a replica killed, 100 ms of latency, a GPU memory leak, each under load; ALL=1 for every scenario of scenarios/chaos.
stage3: $(engine)
	@$(harness) run $(CHAOS) --stage 3 --target $(TARGET) --engine $(ENGINE) --workers $(WORKERS)

smoke: $(engine)
	@$(harness) run scenarios/smoke.yaml --target $(TARGET) --engine $(ENGINE)

# Everything: lint, types, layers, unit tests, properties on many more examples, real processes, and the real vLLM.
test: check vllm redis
	.venv/bin/pytest tests -n 2 --dist worksteal -m "hypothesis and not e2e and not vllm" --hypothesis-profile thorough
	.venv/bin/pytest tests -m "e2e or vllm"

# Under a minute: lint, format, types, layers, unit tests. Bytecode is kept: to make it anew takes as long as many tests.
check: export PYTHONDONTWRITEBYTECODE =
check: setup
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	@$(MAKE) --no-print-directory -j2 --output-sync types unit

# Parts of `make check`, side by side: types take one core, tests what is left.
types:
	.venv/bin/mypy
	.venv/bin/lint-imports

unit:
	.venv/bin/pytest tests -n 2 --dist worksteal -m "not e2e and not vllm"

# Leaks and frees memory of this machine's GPU for real; a minute. Where there is no GPU it says so and fails (exit 3).
gpu-check:
	@scripts/gpu-check

# Ours beside its peers, as ratios, and the goals of the benchmarks' README.
bench: setup
	.venv/bin/python -m benchmarks

# FULL=1 starts the orchestrator before the gateway too, with Redis and Qdrant.
up: $(engine) $(if $(FULL),redis)
	@$(harness) stack up --target $(TARGET) --engine $(ENGINE) $(if $(FULL),--full)

down: setup
	@$(harness) stack down

clean:
	@[ ! -x $(harness) ] || $(harness) stack down
	rm -rf .venv .venv-vllm .cache .stack
