// exp of fp32 numbers in a form that compilers vectorise, and sums and products of registers of 16.
#pragma once

#include <cstdint>

#include "lanes.h"

#if defined(TPR_AVX512) || (defined(TPR_AVX2) && defined(__FMA__))
#define TPR_FMA
#endif

namespace tpr {

// exp(x) to about one unit in the last place (a polynomial on [-ln 2 / 2, ln 2 / 2], Cephes' coefficients, times a power of two). NaN stays
// NaN, below -87.3 it is 0 or nearly, above 88.3 it is infinity or nearly.
TPR_INLINE float exp_of(float x) {
    const float low = -87.33654f, high = 88.37626f;
    float c = x < low ? low : x;  // in this order a NaN passes
    c = c > high ? high : c;
    const float shifted = c * 1.44269504088896341f + 12582912.0f;  // 1.5 * 2^23: the integer lands in the low bits
    const float n = shifted - 12582912.0f;
    const float r = (c - n * 0.693359375f) - n * -2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    const float power = of_bits((bits_of(shifted) << 23) + 0x3f800000u);
    return x < low ? 0.0f : p * power;
}

#if defined(TPR_FMA)
#if defined(TPR_AVX512)
TPR_INLINE Vector zero_vector() { return {_mm512_setzero_ps()}; }
TPR_INLINE Vector fma_vector(Vector x, Vector y, Vector z) { return {_mm512_fmadd_ps(x.a, y.a, z.a)}; }
TPR_INLINE Vector spread_vector(float x) { return {_mm512_set1_ps(x)}; }
#else
TPR_INLINE Vector zero_vector() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
TPR_INLINE Vector fma_vector(Vector x, Vector y, Vector z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
TPR_INLINE Vector spread_vector(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
#endif
TPR_INLINE Vector load_floats(const float* p) { return Lanes<Fp32, Vector>::load(p); }
TPR_INLINE void store_floats(float* p, Vector v) { Lanes<Fp32, Vector>::store(p, v); }
#endif

}  // namespace tpr
