# make train: everything from nothing to a trained model.   make test: the tests.   make check: format, lint, types, layers.
# make gpu: what only GPUs can show (docs/gpu.md); `make gpu ARGS=--device=cpu` rehearses it without one.
# make soak: ten minutes of a run undisturbed, and ten under one random fault every 20 seconds; `make soak ARGS='--minutes=2'` is shorter.
# make clusters: every test on real SLURM, on hosts in network namespaces and over SSH; `make test` runs the short ones of them.
# make thirdparty: one run for each of many packages of others (timm, transformers, ...), which it installs first.
# make faults: the long tests, with every fault as often as docs/faults.md counts it (an hour).
# make benchmark: whole commands, ours against torch alone and the peers that are installed; hours, or `make benchmark ARGS="--workloads W1 --pairs 3"`; what a step costs: ARGS=turns.
# make torches: unit (launch in them), config and distributed tests with each torch; VERSIONS="2.15.0" takes some of them. Each takes up to 8 GB in .venvs/.
# make hydras: config, launch and sweep tests with each Hydra; HYDRAS="1.4.0rc3:2.4.1rc1" takes some of them, with their OmegaConf.
# make reference: docs/reference.md anew, from conf/ and the schema.   make docs: the pages as a site, outputs/site/html;
#   a broken link ends it, a page in no list, and code that no test reads.
# make pictures: docs/pictures/ anew, from real runs.
# make dist: outputs/dist with a release: sdist and wheel, checked; what they need with hashes, and as a CycloneDX SBOM.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.PHONY: train test gpu clusters thirdparty faults soak check reference docs pictures dist benchmark torches hydras clean

train: $(READY)
	$(BIN)/ddp-train $(ARGS)

# One test at a time more than there are cores, as some wait; eight at most. For a few of them `make test ARGS="-n0 -k NAME"` is faster.
test: $(READY)
	$(BIN)/python -m pytest --numprocesses=auto --maxprocesses=8 --dist=loadgroup $(ARGS)

gpu: $(READY)
	$(BIN)/python -m pytest tests/gpu -m gpu -rs $(ARGS)

clusters: $(READY)
	$(BIN)/python -m pytest tests/cluster -m "cluster or cluster_long" -rs $(ARGS)

thirdparty: $(VENV)/.thirdparty
	$(BIN)/python -m pytest tests/thirdparty -m thirdparty -rs $(ARGS)

faults: $(READY)
	$(BIN)/python -m pytest -m long $(ARGS)

soak: $(READY)
	$(BIN)/python -m tests.faults.soak $(ARGS)

check: $(READY) docs
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

reference: $(READY)
	$(BIN)/python -m tests.docs.reference

pictures: $(READY)
	$(BIN)/python -m tests.docs.pictures

SITE := outputs/site
docs: $(VENV)/.docs
	@rm -rf $(SITE) && mkdir -p $(SITE)/pages
	@cp -r README.md CONTRIBUTING.md CHANGELOG.md docs $(SITE)/pages/
	@for page in examples/*/README.md; do mkdir -p $(SITE)/pages/$${page%/*} && cp $$page $(SITE)/pages/$$page; done
	@mv $(SITE)/pages/docs/zensical.toml $(SITE)/
	@cd $(SITE) && $(CURDIR)/$(BIN)/zensical build --strict
	@$(BIN)/python -m pytest tests/docs/test_site.py

DIST := outputs/dist
dist: $(VENV)/.release
	@rm -rf $(DIST)
	$(BIN)/python -m build --outdir $(DIST)
	$(BIN)/twine check --strict $(DIST)/*
	$(BIN)/uv pip compile pyproject.toml --extra image --extra text --extra optuna -c constraints.txt --generate-hashes --no-header \
	    --no-annotate --quiet --output-file $(DIST)/requirements.txt
	$(BIN)/cyclonedx-py requirements $(DIST)/requirements.txt --pyproject pyproject.toml --output-reproducible --output-file $(DIST)/sbom.cdx.json

benchmark: $(READY)
	$(BIN)/python -m tests.benchmark.whole_command $(ARGS)

# torch's CPU build where the index has one, else its CUDA build, which computes on the CPU: it cannot be imported without its nvidia packages.
VERSIONS    ?= 2.10.0 2.11.0 2.13.0 newest
TORCH_TESTS ?= tests/unit tests/config tests/distributed
torches:
	@for version in $(VERSIONS); do tests/environment.sh torch $$version && \
	.venvs/torch-$$version/bin/python -m pytest $(TORCH_TESTS) -n2 --dist=loadgroup $(ARGS) || exit 1; done

HYDRAS      ?= 1.3.5:2.3.0 1.3.8:2.3.1 1.4.0rc3:2.4.1rc1
HYDRA_TESTS ?= tests/config tests/unit/launch tests/unit/config tests/unit/cli tests/unit/sweep tests/distributed/test_sweep.py
hydras:
	@for version in $(HYDRAS); do tests/environment.sh hydra $$version && \
	.venvs/hydra-$${version%:*}/bin/python -m pytest $(HYDRA_TESTS) -n2 --dist=loadgroup -W "ignore:The version_base" $(ARGS) || exit 1; done

# Installs into .venv, again only when what is installed has changed. The constraints pin torch's CPU build; on a GPU machine that has
# torch already, `make train CONSTRAINTS=` keeps the one that pip finds.
CONSTRAINTS ?= -c constraints.txt
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "ddp_train needs Python 3.11 or newer; try: make PYTHON=python3.11")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) (once; torch takes a minute or two)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check $(CONSTRAINTS) --editable '.[dev]'
	@touch $@

$(VENV)/.docs: $(READY)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check $(CONSTRAINTS) --editable '.[docs]'
	@touch $@

$(VENV)/.release: $(READY)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check $(CONSTRAINTS) --editable '.[release]'
	@touch $@

$(VENV)/.thirdparty: $(READY)
	@echo "installing the packages of others into $(VENV) (once; a few minutes)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check $(CONSTRAINTS) --editable '.[thirdparty]'
	@# A torchvision built for CUDA cannot be loaded beside a torch for the CPU, and then transformers cannot be imported either.
	@$(BIN)/python -c "import torchvision" 2>/dev/null || { echo "no torchvision here fits this torch: it is taken away, its tests are skipped"; \
	    $(BIN)/python -m pip uninstall --quiet --yes torchvision; }
	@touch $@

clean:
	rm -rf $(VENV) .venvs .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
