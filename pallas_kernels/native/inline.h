// Small functions and loops on registers: left to itself, a compiler calls some of them, and keeps vectors in memory.
#pragma once

#define PWJAX_INLINE inline __attribute__((always_inline))
#define PWJAX_UNROLL _Pragma("GCC unroll 8")
#define PWJAX_UNROLL_4 _Pragma("GCC unroll 4")
