# Build, test and install pd. `make` needs no network; `scripts/setup` installs what it needs.
#   V=asan | tsan | fault   another build, under build/$(V); asan and fault have fault points (base/fault.h)
#   PREFIX, DESTDIR         where `make install` puts things
CC      ?= gcc
V       ?=
PREFIX  ?= /usr/local
DESTDIR ?=
B       := build$(if $(V),/$(V))
VERSION := 0.1

PKGS    := popt msgpack hdf5 libzstd libxxhash libssl libcrypto jansson libpcre2-8 libpng libevent libibverbs
CFLAGS  ?= -O2 -g
FLAGS   := -std=gnu11 -Wall -Wextra -Wvla -Wshadow -Wstrict-prototypes -Wno-unused-parameter -ffp-contract=off -fno-math-errno \
           -fno-strict-aliasing -fPIC -pthread -D_GNU_SOURCE -DPD_VERSION='"$(VERSION)"' -DPD_PREFIX='"$(PREFIX)"' $(shell pkg-config --cflags $(PKGS))
LIBS    := $(shell pkg-config --libs $(PKGS)) -lm -pthread
ifeq ($(V),asan)
FLAGS   += -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer
else ifeq ($(V),tsan)
FLAGS   += -fsanitize=thread
else ifneq ($(filter-out fault,$(V)),)
$(error V=$(V) is unknown (asan, tsan or fault))
endif
FAULT   := $(if $(filter asan fault,$(V)),-DPD_FAULT=1)

# One source a kernel, built once for each instruction set; chosen at run time.
ISA_scalar := -fno-tree-vectorize -fno-tree-slp-vectorize
ISA_avx2   := -mavx2 -mfma -mf16c -DPD_ISA_AVX2
ISA_avx512 := -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vnni -mavx512bf16 -mavx2 -mfma -mf16c -mprefer-vector-width=512 -DPD_ISA_AVX512

# The tile unit's own file is one more instruction set beside avx512, whose functions it calls.
ISA_amx    := $(ISA_avx512) -mamx-tile -mamx-bf16

LIB_SRC := $(wildcard libcommon/*/*.c libcommon/model/family/*.c)
CPU_COM := kernels/cpu/select.c
CPU_AMX := kernels/cpu/amx.c
CPU_ISA := $(filter-out $(CPU_COM) $(CPU_AMX),$(wildcard kernels/cpu/*.c))
CPU_OBJ := $(foreach i,scalar avx2 avx512,$(CPU_ISA:%.c=%.$(i).o)) $(CPU_AMX:%.c=%.amx.o)
# V=fault compiles only what has fault points; the other objects (SHARED) are those of the plain build.
SHARED  := $(if $(filter fault,$(V)),build,$(B))
FAULTY  := $(shell grep -lE 'fault\.h|PD_FAULT' $(LIB_SRC))
LIB_OBJ := $(FAULTY:%.c=$(B)/o/%.o) $(patsubst %.c,$(SHARED)/o/%.o,$(filter-out $(FAULTY),$(LIB_SRC)) $(wildcard $(CPU_COM))) \
           $(CPU_OBJ:%=$(SHARED)/o/%)
CMDS    := $(patsubst cmd/%.c,$(B)/bin/%,$(wildcard cmd/pd-*.c))
UNITS   := $(patsubst tests/unit/%.c,$(B)/unit/%,$(wildcard tests/unit/test_*.c))
DRILLS  := $(filter $(B)/unit/test_fault_%,$(UNITS))
ifeq ($(FAULT),)
UNITS   := $(filter-out $(DRILLS),$(UNITS))
else ifeq ($(V),fault)
UNITS   := $(DRILLS)
endif
TOOLS   := $(patsubst tests/tools/%.c,$(B)/tools/%,$(wildcard tests/tools/*.c))
FUZZ    := $(patsubst tests/fuzz/%.c,build/fuzz/%,$(wildcard tests/fuzz/fuzz_*.c))
PLUGIN  := $(B)/hdf5-plugin/libH5Zzstd.so

.PHONY: all lib units drills fuzz check check-faults check-rdma check-long bench-engine bench-serve bench-kv bench-route demo install clean
all: $(CMDS) $(PLUGIN)
lib: $(B)/libpd.a
units: $(UNITS) $(TOOLS)
# What the tests need to make things fail: commands and units of V=fault, after the plain build whose objects they share.
ifeq ($(V),)
drills: all
	@$(MAKE) --no-print-directory V=fault drills
else
drills: $(CMDS) $(UNITS)
endif
fuzz: $(FUZZ)

$(B)/libpd.a: $(LIB_OBJ)
	@rm -f $@; ar rcs $@ $(LIB_OBJ)
define c_rule
$(1)/o/%.o: %.c
	@mkdir -p $$(@D)
	$$(CC) $$(FLAGS) $(2) $$(CFLAGS) -MMD -MP -c $$< -o $$@
endef
$(eval $(call c_rule,$(B),$(FAULT)))
ifneq ($(SHARED),$(B))
$(eval $(call c_rule,$(SHARED),))
endif
define isa_rule
$(SHARED)/o/kernels/cpu/%.$(1).o: kernels/cpu/%.c
	@mkdir -p $$(@D)
	$$(CC) $$(FLAGS) $$(CFLAGS) -O3 $$(ISA_$(1)) -DPD_ISA=$(1:amx=avx512) -MMD -MP -c $$< -o $$@
endef
$(foreach i,scalar avx2 avx512 amx,$(eval $(call isa_rule,$(i))))
$(B)/bin/%: cmd/%.c $(B)/libpd.a
	@mkdir -p $(@D)
	$(CC) $(FLAGS) $(CFLAGS) -MMD -MP -MF $(B)/o/$*.d $< -o $@ $(B)/libpd.a $(LIBS)
$(B)/unit/%: tests/unit/%.c $(B)/libpd.a
	@mkdir -p $(@D)
	$(CC) $(FLAGS) $(FAULT) $(CFLAGS) -MMD -MP -MF $(B)/unit/$*.d $< -o $@ $(B)/libpd.a -lcmocka $(LIBS)
$(B)/tools/%: tests/tools/%.c $(B)/libpd.a
	@mkdir -p $(@D)
	$(CC) $(FLAGS) $(CFLAGS) -MMD -MP -MF $(B)/tools/$*.d $< -o $@ $(B)/libpd.a $(LIBS)
# libFuzzer is clang's: the targets compile the library's sources again, instrumented.
FUZZ_FLAGS := $(filter-out -fsanitize%,$(FLAGS)) -O1 -g -fsanitize=fuzzer-no-link,address,undefined -Wno-everything
FUZZ_OBJ   := $(LIB_SRC:%.c=build/fuzz/o/%.o) $(patsubst %.c,build/fuzz/o/%.o,$(wildcard $(CPU_COM))) \
              $(CPU_OBJ:%=build/fuzz/o/%)
build/fuzz/o/%.o: %.c
	@mkdir -p $(@D)
	clang $(FUZZ_FLAGS) -MMD -MP -c $< -o $@
define fuzz_isa_rule
build/fuzz/o/kernels/cpu/%.$(1).o: kernels/cpu/%.c
	@mkdir -p $$(@D)
	clang $$(FUZZ_FLAGS) $$(ISA_$(1)) -DPD_ISA=$(1:amx=avx512) -MMD -MP -c $$< -o $$@
endef
$(foreach i,scalar avx2 avx512 amx,$(eval $(call fuzz_isa_rule,$(i))))
build/fuzz/libpd.a: $(FUZZ_OBJ)
	@rm -f $@; ar rcs $@ $(FUZZ_OBJ)
build/fuzz/%: tests/fuzz/%.c build/fuzz/libpd.a
	clang $(FUZZ_FLAGS) -fsanitize=fuzzer,address,undefined $< -o $@ build/fuzz/libpd.a $(LIBS)

# The registered HDF5 filter 32015, as a plug-in, so that h5dump and h5py read dumps too.
# Linked with zstd alone: the program that loads it brings an HDF5 library of its own (h5py does).
$(PLUGIN): libcommon/kv/h5zstd_plugin/plugin.c libcommon/kv/h5zstd.c libcommon/kv/h5zstd.h
	@mkdir -p $(@D)
	$(CC) $(filter-out -fsanitize% -fno-sanitize%,$(FLAGS)) $(CFLAGS) -shared $(filter %.c,$^) -o $@ $(shell pkg-config --libs libzstd)

check: all units drills
	B=$(B) V=$(V) scripts/run-tests
# Processes killed, stopped, starved and lied to: tests/faults.
check-faults: all drills
	FAULTS=1 B=$(B) V=$(V) scripts/run-tests
# With RDMA devices, in a virtual machine of its own; where that cannot be had it says so and is no failure.
check-rdma: all units
	@RDMA=1 PD_OFFLINE=1 B=$(B) V=$(V) scripts/rdma-vm -t 900 scripts/run-tests; \
	rc=$$?; [ $$rc != 126 ] || { echo "check-rdma: skipped, there is no virtual machine to be had here"; exit 0; }; exit $$rc
check-long: all units drills
	B=$(B) V=$(V) LONG=1 scripts/run-tests
bench-engine: all
	scripts/bench-engine
bench-serve: all $(B)/tools/bench_serve $(B)/tools/bench_xfer
	scripts/bench-serve
bench-kv: all $(B)/tools/bench_kv $(B)/tools/bench_xfer $(B)/tools/bench_tcp $(B)/tools/bench_rdma
	scripts/bench-kv
bench-route: all $(B)/tools/bench_index $(B)/tools/bench_route
	scripts/bench-route
demo:
	scripts/demo

install: all
	install -d $(DESTDIR)$(PREFIX)/bin $(DESTDIR)$(PREFIX)/lib/pd/hdf5-plugin $(DESTDIR)$(PREFIX)/include/pd \
	    $(DESTDIR)$(PREFIX)/share/man/man1 $(DESTDIR)$(PREFIX)/share/man/man5 $(DESTDIR)$(PREFIX)/share/man/man7 $(DESTDIR)$(PREFIX)/share/bash-completion/completions
	install -m755 $(CMDS) scripts/pd-up $(DESTDIR)$(PREFIX)/bin
	install -m644 $(B)/libpd.a $(DESTDIR)$(PREFIX)/lib
	install -m755 $(PLUGIN) $(DESTDIR)$(PREFIX)/lib/pd/hdf5-plugin
	for f in libcommon/*/*.h libcommon/*/*/*.h kernels/kernels.h; do install -Dm644 $$f $(DESTDIR)$(PREFIX)/include/pd/$$f; done
	for s in 1 5 7; do for f in man/*.$$s; do install -m644 $$f $(DESTDIR)$(PREFIX)/share/man/man$$s; done; done
	for c in $(notdir $(CMDS)); do install -m644 scripts/completion/pd.bash $(DESTDIR)$(PREFIX)/share/bash-completion/completions/$$c; done
clean:
	rm -rf build

-include $(shell find $(B)/o $(SHARED)/o $(B)/unit $(B)/tools build/fuzz/o -name '*.d' 2>/dev/null)
