/* Forced into the peer's C++ by build-peer. GCC 12's _tile_loadconfig says that it reads 8 bytes of the 64 that it does read, so the optimizer
 * drops the stores to the others, and llama.cpp's AMX back end dies of an illegal instruction at its first product. */
#if defined(__AMX_TILE__) && defined(__GNUC__) && !defined(__clang__)
#include <immintrin.h>
#undef _tile_loadconfig
#define _tile_loadconfig(config) __asm__ volatile("ldtilecfg\t%X0" : : "m"(*(const char (*)[64])(config)))
#endif
