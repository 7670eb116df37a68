# Every target prepares the machine first (dev/setup.sh), which takes a second once that is done.
PYTHON := .venv/bin/python
CARGO := cargo
# One for each checkout: cargo takes what another has built for its own, if only it is younger.
export CARGO_TARGET_DIR := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/forktree/target/$(firstword $(shell echo '$(CURDIR)' | sha256sum))
NATIVE := node-agent/native/Cargo.toml

.PHONY: demo test test-slow test-node fuzz bench check generate up down setup
.DEFAULT_GOAL := demo

demo: setup ## A tree of live forks, shown and taken down again. OUT=DIR writes demo.json there.
	$(PYTHON) -m forktree_dev.demo

test: setup ## All tests, two files at a time. ARGS='tests/unit -k name' narrows them.
	$(CARGO) test --manifest-path $(NATIVE) --locked --workspace --quiet
	$(PYTHON) -m pytest --numprocesses=2 --dist=loadfile $(ARGS)

test-slow: setup ## Tests that take minutes, or images of their own: left out by `make test`.
	$(PYTHON) -m pytest -m slow $(ARGS)

test-node: NODE = real
test-node: setup ## Tests on a real node: kubelet, containerd, the chart. Left out by `make test`.
	$(PYTHON) -m forktree_dev.argo_programs
	$(PYTHON) -m pytest -m node $(ARGS)

fuzz: setup ## Fuzzers of all that strangers may send, SECONDS (60) each. What broke lies in ~/.cache/forktree/fuzz.
	@for target in guest bodies tools; do \
		found=$(or $(XDG_CACHE_HOME),$(HOME)/.cache)/forktree/fuzz/$$target; mkdir -p $$found/new; \
		PYTHONPATH=tests $(PYTHON) -m fuzz $$target -max_total_time=$(or $(SECONDS),60) -timeout=60 \
			-artifact_prefix=$$found/ $$found/new tests/fuzz/corpus/$$target || exit 1; \
	done

bench: setup ## Benchmarks. SUITE=engine,tree,search,control-plane,soak; OUT=DIR for results; QUICK=1 for a try.
	@$(PYTHON) -c 'import matplotlib' 2>/dev/null || { echo 'setup: installing what draws plots'; \
		$(PYTHON) -m pip install --quiet --disable-pip-version-check --editable '.[bench]'; }
	$(PYTHON) -m forktree_bench

check: setup ## Style, types, layers.
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/mypy
	.venv/bin/pyright
	.venv/bin/lint-imports
	$(CARGO) fmt --manifest-path $(NATIVE) --all --check
	$(CARGO) clippy --manifest-path $(NATIVE) --locked --workspace --all-targets --quiet -- --deny warnings

generate: setup ## Rewrite generated files from their sources.
	$(PYTHON) -m forktree_dev.crds
	$(PYTHON) -m forktree_dev.reference
	$(PYTHON) -m forktree_dev.openapi
	$(PYTHON) -m forktree_dev.sync_client
	$(PYTHON) -m forktree_dev.container_images dockerfiles
	$(PYTHON) -m forktree_dev.monitoring

up: setup ## Start a playground that stays, in $STATE. NODE=real: with kubelet, pods and the chart.
	$(PYTHON) -m forktree_dev.playground up $(if $(NODE),--node=$(NODE))

down: ## End the playground.
	$(PYTHON) -m forktree_dev.playground down

setup:
	@dev/setup.sh $(if $(filter real,$(NODE)),node)
