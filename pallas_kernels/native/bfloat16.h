// Whether the compiler knows AVX-512's products of bfloat16.
#pragma once

#if defined(__x86_64__) && __has_include(<avx512bf16intrin.h>)
#define PWJAX_BF16 1
#else
#define PWJAX_BF16 0
#endif
