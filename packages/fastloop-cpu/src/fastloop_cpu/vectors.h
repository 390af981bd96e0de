/* Vectors of 16 numbers for the kernels of this folder: conversion from and to bf16, exponentials, dropout. For AVX512-BF16. */
#include <immintrin.h>
#include <stdint.h>

typedef uint16_t bf16;

#define INLINE static inline __attribute__((always_inline))

INLINE __m512 splat(float number) { return _mm512_set1_ps(number); }

INLINE __m512 widen(const bf16 *from) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from)), 16));
}

INLINE void narrow(bf16 *to, __m512 from) { _mm256_storeu_si256((__m256i *)to, (__m256i)_mm512_cvtneps_pbh(from)); }

/* 2^x for x <= 0, relative error below 3e-6: a polynomial of degree 5 on [-0.5, 0.5]. */
INLINE __m512 exp2_of(__m512 x) {
    __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), part = _mm512_sub_ps(x, whole);
    __m512 power = _mm512_set1_ps(1.33335581e-3f);
    power = _mm512_fmadd_ps(power, part, _mm512_set1_ps(9.61812911e-3f));
    power = _mm512_fmadd_ps(power, part, _mm512_set1_ps(5.55041087e-2f));
    power = _mm512_fmadd_ps(power, part, _mm512_set1_ps(2.40226507e-1f));
    power = _mm512_fmadd_ps(power, part, _mm512_set1_ps(6.93147181e-1f));
    power = _mm512_fmadd_ps(power, part, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(power, whole);
}

/* What dropout multiplies kept elements by: `drop` of 65536 are dropped. */
INLINE float dropout_scale(uint32_t drop) { return 1.0f / (1.0f - (float)drop / 65536.0f); }

/* Which of 32 elements dropout keeps: bit i is the element 32 * position + i. An element is dropped if its 16 random bits are below `drop`.
 * The bits are splitmix64 (Steele et al., 2014) of the position. */
INLINE __mmask32 draw_kept(uint64_t seed, uint64_t position, uint32_t drop) {
    if (!drop) return 0xffffffffu;
    const uint64_t golden = 0x9e3779b97f4a7c15ull;
    const __m512i steps = _mm512_setr_epi64(0, (long long)golden, (long long)(2 * golden), (long long)(3 * golden), (long long)(4 * golden),
                                            (long long)(5 * golden), (long long)(6 * golden), (long long)(7 * golden));
    __m512i bits = _mm512_add_epi64(_mm512_set1_epi64((long long)(seed + (position << 3) * golden)), steps);
    bits = _mm512_mullo_epi64(_mm512_xor_si512(bits, _mm512_srli_epi64(bits, 30)), _mm512_set1_epi64((long long)0xbf58476d1ce4e5b9ull));
    bits = _mm512_mullo_epi64(_mm512_xor_si512(bits, _mm512_srli_epi64(bits, 27)), _mm512_set1_epi64((long long)0x94d049bb133111ebull));
    bits = _mm512_xor_si512(bits, _mm512_srli_epi64(bits, 31));
    return _mm512_cmpge_epu16_mask(bits, _mm512_set1_epi16((short)drop));
}
