# Everything a person or a CI machine runs. `make help` lists it.
# Needs a Rust toolchain and a C linker; scripts/setup checks, and installs what it may.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help demo test miri sim sim-build sim-seeds sim-plants drive-plants sim-fs sim-device sim-worlds lint bench spdk-compare guest blktests fs-programs mutants build install-c fio python sqlite packages package-test setup

# Extra arguments for the program behind a target: make demo ARGS='-o json'
ARGS ?=

# The build itself, and the tests after it, in seconds at most.
BUILD_LIMIT ?= 3600
TEST_LIMIT ?= 1800
# How long the simulator runs new seeds, in minutes. Its other parts are bounded
# by SIM_LIMIT, in seconds for each part.
SIM_MINUTES ?= 10
SIM_LIMIT ?= 1500

# Where `make install-c` puts its files. DESTDIR goes before each path, for packages.
PREFIX ?= /usr/local
LIBDIR ?=
DESTDIR ?=

# The source of fio, for `make fio`; without it Debian's source package is used.
FIO_SRC ?=

CARGO ?= cargo
OUT := $(or $(CARGO_TARGET_DIR),target)
RIO := $(OUT)/release/rio
# At a terminal Ctrl-C must reach the tests; elsewhere running out of time must end all of them.
FOREGROUND := $(shell test -t 0 && echo --foreground)
BOUNDED_BUILD := timeout $(FOREGROUND) --kill-after=30 $(BUILD_LIMIT)
BOUNDED_TEST := timeout $(FOREGROUND) --kill-after=30 $(TEST_LIMIT)

help: ## This list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s  %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo "  ARGS='…' goes to the program: make demo ARGS='-o json'"

demo: build ## Two targets on loopback, a file copied and verified, sync/rio/none compared
	@$(RIO) demo $(ARGS)

test: setup ## All tests; the build first, then the tests, each bounded in time
	@echo "test: building (at most $(BUILD_LIMIT) s)"
	@$(BOUNDED_BUILD) $(CARGO) test --workspace --locked --no-run
	@echo "test: running (at most $(TEST_LIMIT) s)"
	@$(BOUNDED_TEST) $(CARGO) test --workspace --locked $(ARGS) || { rc=$$?; \
	  [ $$rc -ne 124 ] || echo "test: stopped after $(TEST_LIMIT) s: a test hangs or this machine is slow; TEST_LIMIT=… changes the bound" >&2; \
	  exit $$rc; }
	@echo "test: passed"

lint: setup ## Format, clippy, rustdoc, licences and advisories, tidy rules
	@scripts/lint

bench: build ## All ways to keep order, and a raw exchange, at three depths: a minute
	@$(RIO) bench compare --quick $(ARGS)

spdk-compare: build ## The target beside SPDK's, with SPDK's own initiator (minutes; SPDK=built checkout; ARGS='read:128K:32')
	@SPDK="$(SPDK)" scripts/spdk-compare --rio $(RIO) $(ARGS)

guest: build ## Against Linux's own NVMe/TCP host and target, in an emulated machine (minutes; Debian)
	@scripts/kernel-guest --rio $(RIO) $(ARGS)

blktests: build ## blktests' NVMe tests against the target, in that machine (BLKTESTS=checkout; ARGS='--drives mem --tests 029')
	@BLKTESTS="$(BLKTESTS)" scripts/kernel-guest --only blktests --rio $(RIO) $(ARGS)

fs-programs: build ## Other people's programs on a mounted RioFS, some with kills of the mount (minutes; ARGS='sqlite')
	@scripts/fs-programs --rio $(RIO) $(ARGS)

miri: setup ## Tests in Miri, an interpreter that finds undefined behaviour (needs nightly; MINUTES=15)
	@scripts/miri

mutants: setup ## Small wrong changes in the pure crates: does a test notice each? (SLICE=0/40 MINUTES=60)
	@scripts/mutants

build: setup ## The rio program, optimised
	@$(BOUNDED_BUILD) $(CARGO) build --release --locked --package riopipe-cli --bin rio

install-c: setup ## The C library, its header and its pkg-config file, optimised (PREFIX=/usr/local DESTDIR= LIBDIR=)
	@$(BOUNDED_BUILD) $(CARGO) rustc --release --locked --package riopipe-capi --lib --crate-type cdylib,staticlib
	@DESTDIR='$(DESTDIR)' LIBDIR='$(LIBDIR)' scripts/install-c $(OUT)/release $(PREFIX)

fio: build ## fio's engine for ordered groups, and fio with it against targets here (minutes; FIO_SRC=source of fio; ARGS='counts')
	@$(BOUNDED_BUILD) $(CARGO) rustc --release --locked --package riopipe-capi --lib --crate-type cdylib,staticlib
	@FIO_SRC='$(FIO_SRC)' scripts/fio --rio $(RIO) $(ARGS)

python: build ## The wheel of the Python package, and its tests against targets here (Python 3.11; ARGS='test_riopipe.Reads')
	@scripts/python --rio $(RIO) $(ARGS)

sqlite: build ## SQLite's log on a stream: kills, and a measurement (minutes; libsqlite3-dev; ARGS='kill')
	@$(BOUNDED_BUILD) $(CARGO) rustc --release --locked --package riopipe-capi --lib --crate-type cdylib,staticlib
	@scripts/sqlite --rio $(RIO) $(ARGS)

# A static program is made, too, where Rust has the target for it (`rustup target add MUSL`), and a C compiler for it is there.
MUSL ?= $(shell uname -m)-unknown-linux-musl
PACKAGES ?= $(OUT)/packages
packages: build ## Debian packages, and a static program where Rust has the musl target (PACKAGES=folder)
	@$(BOUNDED_BUILD) $(CARGO) rustc --release --locked --package riopipe-capi --lib --crate-type cdylib,staticlib
	@if [ -d "$$(rustc --print sysroot)/lib/rustlib/$(MUSL)" ] && ! command -v musl-gcc >/dev/null; then \
	  echo "packages: no static program, because there is no musl-gcc here, which compiles the library of TLS (Debian: musl-tools)"; \
	elif [ -d "$$(rustc --print sysroot)/lib/rustlib/$(MUSL)" ]; then \
	  $(BOUNDED_BUILD) $(CARGO) build --release --locked --package riopipe-cli --bin rio --target $(MUSL); \
	  export STATIC=$(OUT)/$(MUSL)/release/rio TARGET=$(MUSL); \
	else \
	  echo "packages: no static program, because Rust has no $(MUSL) here (rustup target add $(MUSL))"; \
	fi; \
	scripts/packages $(OUT)/release $(PACKAGES)

package-test: packages ## Install, use and remove the packages in a clean root (Debian, root, network)
	@scripts/package-test $(PACKAGES)

sim: sim-seeds sim-plants drive-plants sim-fs sim-device sim-worlds ## The simulator: new seeds for SIM_MINUTES=10, planted bugs, RioFS, a block device, small worlds

# Apart from rio: its planted bugs must not get into the program.
sim-build: build
	@$(BOUNDED_BUILD) $(CARGO) build --profile sim --locked --package riopipe-sim --bin rio-sim

sim-seeds: sim-build
	@echo "sim: new seeds for $(SIM_MINUTES) minutes"
	@timeout $(FOREGROUND) --kill-after=30 $$(( $(SIM_MINUTES) * 60 + $(SIM_LIMIT) )) $(RIO) sim --for $(SIM_MINUTES)m $(ARGS)

sim-fs: sim-build
	@echo "sim: RioFS in the cluster: planted bugs, and new seeds for two minutes"
	@timeout $(FOREGROUND) --kill-after=30 $(SIM_LIMIT) $(RIO) sim --fs --plant all $(ARGS)
	@timeout $(FOREGROUND) --kill-after=30 $(SIM_LIMIT) $(RIO) sim --fs --for 2m $(ARGS)

sim-device: sim-build
	@echo "sim: a plain block device in the cluster: planted bugs, and new seeds for two minutes"
	@timeout $(FOREGROUND) --kill-after=30 $(SIM_LIMIT) $(RIO) sim --device --plant all $(ARGS)
	@timeout $(FOREGROUND) --kill-after=30 $(SIM_LIMIT) $(RIO) sim --device --for 2m $(ARGS)

sim-plants: sim-build
	@echo "sim: planted bugs"
	@timeout $(FOREGROUND) --kill-after=30 $(SIM_LIMIT) $(RIO) sim --plant all $(ARGS)

# Not in the simulator: tests of the modelled drive, and of the host's half, alone.
drive-plants: setup
	@echo "sim: planted bugs of drives that keep an order"
	@timeout $(FOREGROUND) --kill-after=30 $(SIM_LIMIT) $(CARGO) test --locked --quiet \
	  --package riopipe-model --features probe --test plants
	@timeout $(FOREGROUND) --kill-after=30 $(SIM_LIMIT) $(CARGO) test --locked --quiet \
	  --package riopipe-order --features probe --test dispatch_plants

sim-worlds: setup
	@echo "sim: small worlds, all of them"
	@timeout $(FOREGROUND) --kill-after=30 $(SIM_LIMIT) $(CARGO) test --release --locked --quiet \
	  --package riopipe-order --test small_worlds -- full

setup: ## Check the tools; install missing ones where that is possible
	@scripts/setup
