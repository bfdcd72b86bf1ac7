# make demo: train on real data with each compression, and compare; make demo FRAMEWORK=tensorflow: in TensorFlow.
# make bench: a reduced set of all benchmarks, in under 15 minutes, and a report in results/.
# make test: all checks and tests.
# All set up .venv first if need be (see tools/set_up.py), and need Python 3.10 to 3.13 with its headers, a C++17 compiler, make.

PYTHON ?= python3
FRAMEWORK ?= torch
# Named in full, for make itself does not look for a recipe's commands in the PATH that it exports to them.
bin := $(CURDIR)/.venv/bin
path_before := $(PATH)
export PATH := $(bin):$(PATH)

# Open MPI refuses to run as root, and to start more ranks than there are cores, unless told that it may.
export OMPI_ALLOW_RUN_AS_ROOT = 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM = 1
# Where ranks fill the cores, one that waits must leave its core to those that do not.
export OMPI_MCA_mpi_yield_when_idle = 1
export TF_CPP_MIN_LOG_LEVEL = 3
# A hang is a failure: a test that hangs ends its rank, and with it the job; failing that, the whole job is killed.
parallel = timeout --kill-after=10 900 $(bin)/mpirun --oversubscribe -np $(1) $(bin)/python -m pytest --exitfirst --color=no

.PHONY: demo bench test check unit parallel jobs package docs set-up clean

demo: set-up
	TTY_COMPATIBLE=$$(test -t 1 && echo 1 || echo 0) \
		$(bin)/horovodrun -np 2 $(bin)/python benchmarks/digits.py --framework $(FRAMEWORK)

bench: set-up
	$(bin)/python benchmarks/bench.py

# The ranks of a test, and tests side by side, fill the cores: more threads would only wait for one another.
unit parallel jobs package docs: export OMP_NUM_THREADS = 1
unit parallel jobs package docs: export TF_NUM_INTRAOP_THREADS = 1
unit parallel jobs package docs: export TF_NUM_INTEROP_THREADS = 1

test: check unit parallel jobs package docs

check: set-up
	$(bin)/ruff check .
	$(bin)/ruff format --check .
	$(bin)/mypy

unit: set-up
	$(bin)/python -m pytest tests/unit -n auto

parallel: set-up
	$(call parallel,2) tests/parallel_torch
	$(call parallel,3) tests/parallel_torch -m laws
	$(call parallel,4) tests/parallel_torch -m laws
	$(call parallel,2) tests/parallel_tensorflow
	TF_USE_LEGACY_KERAS=1 $(call parallel,2) tests/parallel_tensorflow -m keras
	$(call parallel,3) tests/parallel_tensorflow -m laws

# These start jobs of their own, and kill ranks in them.
jobs: set-up
	$(bin)/python -m pytest tests/jobs

# Builds the wheel and the source distribution, installs the wheel by itself, and trains with it.
package: set-up
	$(bin)/python -m pytest tests/packaging

# The site, in build/site: a warning is an error. Then every block of code on it runs.
docs: set-up
	NO_MKDOCS_2_WARNING=1 $(bin)/mkdocs build --strict --site-dir build/site
	timeout --kill-after=10 900 $(bin)/python -m pytest tests/documentation

set-up:
	@PATH="$(path_before)" $(PYTHON) tools/set_up.py  # not by the Python in .venv, which it may replace

clean:
	rm -rf .venv build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache results
