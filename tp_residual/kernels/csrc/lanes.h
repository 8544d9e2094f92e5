// Loading, storing and rounding one fp32 number, or as many as a vector register holds, with the same results.
//
// x86 has its own code where the compiler's instruction set allows (AVX-512, AVX2 with F16C); elsewhere, and with TPR_PORTABLE
// defined, plain loops are left to the compiler.
#pragma once

#include <cstdint>
#include <cstring>

#if !defined(TPR_PORTABLE) && defined(__AVX512F__)
#define TPR_AVX512
#include <immintrin.h>
#elif !defined(TPR_PORTABLE) && defined(__AVX2__) && defined(__F16C__)
#define TPR_AVX2
#include <immintrin.h>
#endif

// Inlined whatever the compiler's budget: a call in a loop's body keeps the loop from being vectorised.
#define TPR_LAMBDA __attribute__((always_inline))
#define TPR_INLINE inline TPR_LAMBDA
// Compiled once: these are long, and a copy in each caller takes seconds to compile.
#if defined(__clang__)
#define TPR_APART __attribute__((noinline))
#else
#define TPR_APART __attribute__((noinline, noclone))
#endif

// The next loop's iterations are independent: where its output overlaps an input, it is that input, element by element.
#if defined(__clang__)
#define TPR_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define TPR_INDEPENDENT _Pragma("GCC ivdep")
#endif

namespace tpr {

TPR_INLINE uint32_t bits_of(float x) {
    uint32_t b;
    std::memcpy(&b, &x, 4);
    return b;
}
TPR_INLINE float of_bits(uint32_t b) {
    float x;
    std::memcpy(&x, &b, 4);
    return x;
}
// Without a branch, so that a loop around it is vectorised.
TPR_INLINE uint32_t select(bool condition, uint32_t a, uint32_t b) { return b ^ ((a ^ b) & (0u - uint32_t(condition))); }

// How a dtype is stored, widened (exactly), and narrowed (to nearest even).
struct Fp32 {
    using Bits = float;
    static TPR_INLINE float wide(float x) { return x; }
    static TPR_INLINE float narrow(float x) { return x; }
};
struct Bfloat16 {
    using Bits = uint16_t;
    static TPR_INLINE float wide(uint16_t x) { return of_bits(uint32_t(x) << 16); }
    static TPR_INLINE uint16_t narrow(float x) {
        uint32_t b = bits_of(x);
        b = select((b & 0x7fffffffu) > 0x7f800000u, 0x7fc00000u, b);
        return uint16_t((b + 0x7fffu + ((b >> 16) & 1u)) >> 16);
    }
};
struct Float16 {
    using Bits = uint16_t;
    static TPR_INLINE float wide(uint16_t x) {
        const uint32_t magnitude = x & 0x7fffu, sign = (x & 0x8000u) << 16;
        const uint32_t subnormal = bits_of(of_bits((magnitude << 13) + 0x38800000u) - of_bits(0x38800000u));
        const uint32_t normal = (magnitude << 13) + select(magnitude >= 0x7c00u, 0x70000000u, 0x38000000u);
        return of_bits(select(magnitude < 0x0400u, subnormal, normal) | sign);
    }
    static TPR_INLINE uint16_t narrow(float x) {
        const uint32_t b = bits_of(x), magnitude = b & 0x7fffffffu;
        const uint32_t subnormal = bits_of(of_bits(magnitude) + 0.5f) - 0x3f000000u;  // the last bit of 0.5 is fp16's smallest step
        const uint32_t normal = (magnitude + 0xfffu + ((magnitude >> 13) & 1u) - 0x38000000u) >> 13;
        const uint32_t beyond = select(magnitude > 0x7f800000u, 0x7e00u, 0x7c00u);
        const uint32_t finite = select(magnitude < 0x38800000u, subnormal, normal);
        return uint16_t(select(magnitude >= 0x47800000u, beyond, finite) | ((b >> 16) & 0x8000u));
    }
};

// One number, or a register of them: load<T, V>(p) widens from T, store<T>(p, v) narrows to it.
template <class T, class V>
struct Lanes;

template <class T>
struct Lanes<T, float> {
    static TPR_INLINE float load(const typename T::Bits* p) { return T::wide(*p); }
    static TPR_INLINE void store(typename T::Bits* p, float v) { *p = T::narrow(v); }
    static TPR_INLINE float round(float v) { return T::wide(T::narrow(v)); }
};

#if defined(TPR_AVX512)
struct Vector {
    __m512 a;
};
TPR_INLINE Vector operator+(Vector x, Vector y) { return {_mm512_add_ps(x.a, y.a)}; }
TPR_INLINE Vector operator-(Vector x, Vector y) { return {_mm512_sub_ps(x.a, y.a)}; }
TPR_INLINE Vector operator*(Vector x, Vector y) { return {_mm512_mul_ps(x.a, y.a)}; }
TPR_INLINE Vector spread(float x, Vector) { return {_mm512_set1_ps(x)}; }

template <>
struct Lanes<Fp32, Vector> {
    static TPR_INLINE Vector load(const float* p) { return {_mm512_loadu_ps(p)}; }
    static TPR_INLINE void store(float* p, Vector v) { _mm512_storeu_ps(p, v.a); }
    static TPR_INLINE Vector round(Vector v) { return v; }
};
template <>
struct Lanes<Bfloat16, Vector> {
    static TPR_INLINE Vector load(const uint16_t* p) {
        const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
        return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16))};
    }
    // not AVX512-BF16's conversion, which takes denormals for zero
    static TPR_INLINE __m512i rounded(__m512 v) {
        const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
        const __m512i b = _mm512_mask_mov_epi32(_mm512_castps_si512(v), nan, _mm512_set1_epi32(0x7fc00000));
        const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(b, 16), _mm512_set1_epi32(1));
        return _mm512_add_epi32(_mm512_add_epi32(b, _mm512_set1_epi32(0x7fff)), odd);
    }
    static TPR_INLINE void store(uint16_t* p, Vector v) {
        const __m512i high = _mm512_srli_epi32(rounded(v.a), 16);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(high));
    }
    static TPR_INLINE Vector round(Vector v) {
        return {_mm512_castsi512_ps(_mm512_and_si512(rounded(v.a), _mm512_set1_epi32(int(0xffff0000u))))};
    }
};
template <>
struct Lanes<Float16, Vector> {
    static TPR_INLINE __m256i narrow(Vector v) { return _mm512_cvtps_ph(v.a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
    static TPR_INLINE Vector load(const uint16_t* p) {
        return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
    }
    static TPR_INLINE void store(uint16_t* p, Vector v) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow(v)); }
    static TPR_INLINE Vector round(Vector v) { return {_mm512_cvtph_ps(narrow(v))}; }
};
#elif defined(TPR_AVX2)
struct Vector {  // two registers: 16-bit results pack by pairs
    __m256 a, b;
};
TPR_INLINE Vector operator+(Vector x, Vector y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
TPR_INLINE Vector operator-(Vector x, Vector y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
TPR_INLINE Vector operator*(Vector x, Vector y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
TPR_INLINE Vector spread(float x, Vector) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }

template <>
struct Lanes<Fp32, Vector> {
    static TPR_INLINE Vector load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
    static TPR_INLINE void store(float* p, Vector v) { _mm256_storeu_ps(p, v.a), _mm256_storeu_ps(p + 8, v.b); }
    static TPR_INLINE Vector round(Vector v) { return v; }
};
template <>
struct Lanes<Bfloat16, Vector> {
    static TPR_INLINE Vector load(const uint16_t* p) {
        const __m256i bits = _mm256_permute4x64_epi64(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), 0xd8);
        const __m256i zero = _mm256_setzero_si256();
        return {_mm256_castsi256_ps(_mm256_unpacklo_epi16(zero, bits)), _mm256_castsi256_ps(_mm256_unpackhi_epi16(zero, bits))};
    }
    static TPR_INLINE __m256i rounded(__m256 v) {
        const __m256 nan = _mm256_cmp_ps(v, v, _CMP_UNORD_Q);
        const __m256i b = _mm256_castps_si256(_mm256_blendv_ps(v, _mm256_castsi256_ps(_mm256_set1_epi32(0x7fc00000)), nan));
        const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(b, 16), _mm256_set1_epi32(1));
        return _mm256_add_epi32(_mm256_add_epi32(b, _mm256_set1_epi32(0x7fff)), odd);
    }
    static TPR_INLINE void store(uint16_t* p, Vector v) {
        const __m256i packed = _mm256_packus_epi32(_mm256_srli_epi32(rounded(v.a), 16), _mm256_srli_epi32(rounded(v.b), 16));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(packed, 0xd8));
    }
    static TPR_INLINE Vector round(Vector v) {
        const __m256i high = _mm256_set1_epi32(int(0xffff0000u));
        return {_mm256_castsi256_ps(_mm256_and_si256(rounded(v.a), high)), _mm256_castsi256_ps(_mm256_and_si256(rounded(v.b), high))};
    }
};
template <>
struct Lanes<Float16, Vector> {
    static constexpr int NEAREST = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    static TPR_INLINE Vector load(const uint16_t* p) {
        const auto* bits = reinterpret_cast<const __m128i*>(p);
        return {_mm256_cvtph_ps(_mm_loadu_si128(bits)), _mm256_cvtph_ps(_mm_loadu_si128(bits + 1))};
    }
    static TPR_INLINE void store(uint16_t* p, Vector v) {
        auto* bits = reinterpret_cast<__m128i*>(p);
        _mm_storeu_si128(bits, _mm256_cvtps_ph(v.a, NEAREST));
        _mm_storeu_si128(bits + 1, _mm256_cvtps_ph(v.b, NEAREST));
    }
    static TPR_INLINE Vector round(Vector v) {
        return {_mm256_cvtph_ps(_mm256_cvtps_ph(v.a, NEAREST)), _mm256_cvtph_ps(_mm256_cvtps_ph(v.b, NEAREST))};
    }
};
#endif

TPR_INLINE float spread(float x, float) { return x; }

// f(i, V()) for consecutive pieces of 0 .. D, in order: registers, then single numbers
template <class F>
TPR_INLINE void each_lane(int64_t D, F f) {
    int64_t i = 0;
#if defined(TPR_AVX512) || defined(TPR_AVX2)
    constexpr int64_t LANES = sizeof(Vector) / sizeof(float);
    for (; i + LANES <= D; i += LANES) f(i, Vector{});
    for (; i < D; ++i) {
        __asm__ volatile("");  // not to be vectorised: a few iterations, and each loop's code would double
        f(i, 0.0f);
    }
#else
    TPR_INDEPENDENT for (; i < D; ++i) f(i, 0.0f);
#endif
}

}  // namespace tpr
