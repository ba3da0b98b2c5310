/* Which build of the kernels this CPU runs. */
#include <cpuid.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>
#include "../kernels.h"

extern const struct pd_kernels pd_kernels_scalar, pd_kernels_avx2, pd_kernels_avx512, pd_kernels_avx512_dpbf16, pd_kernels_amx;

static int has_f16c(void)       /* not every compiler's check knows this name */
{
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}

/* The compiler's checks include that the operating system saves the wide registers. */
static int has_avx2(void) { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c(); }
static int has_avx512(void)
{
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni");
}

/* AMD's bf16 instruction does twice the work of the multiply-adds that it stands for, Intel's half of it (measured on Zen 4, Emerald Rapids). */
static const struct pd_kernels *avx512(void)
{
    return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_is("amd") ? &pd_kernels_avx512_dpbf16 : &pd_kernels_avx512;
}

/* The tile unit: the processor's, and the kernel's leave to use it (asked once a process; its threads inherit it). */
static int has_amx(void)
{
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_TILEDATA = 18 };
    unsigned a, b, c, d, want = 1u << 22 | 1u << 24;      /* AMX-BF16, AMX-TILE */
    return has_avx512() && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & want) == want &&
           syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_TILEDATA) == 0;
}

const struct pd_kernels *pd_kernels_cpu(const char *force, const char **why)
{
    const char *unused;
    if (!why)
        why = &unused;
    *why = NULL;
    __builtin_cpu_init();
    if (!force || !*force)
        return has_amx() ? &pd_kernels_amx : has_avx512() ? avx512() : has_avx2() ? &pd_kernels_avx2 : &pd_kernels_scalar;
    if (!strcmp(force, "scalar"))
        return &pd_kernels_scalar;
    if (!strcmp(force, "avx2")) {
        if (has_avx2())
            return &pd_kernels_avx2;
        *why = "this CPU lacks AVX2, FMA or F16C: use PD_CPU=scalar, or unset it";
        return NULL;
    }
    if (!strcmp(force, "avx512")) {
        if (has_avx512())
            return avx512();
        *why = "this CPU lacks AVX-512 F, BW, VL, DQ or VNNI: use PD_CPU=avx2 or scalar, or unset it";
        return NULL;
    }
    if (!strcmp(force, "amx")) {
        if (has_amx())
            return &pd_kernels_amx;
        *why = "this CPU lacks AMX-TILE or AMX-BF16, or its kernel does not lend them: use PD_CPU=avx512, avx2 or scalar, or unset it";
        return NULL;
    }
    *why = "unknown CPU path: use scalar, avx2, avx512 or amx, or unset PD_CPU";
    return NULL;
}
