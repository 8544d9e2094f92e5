// y = x @ weight.T + bias with weights packed in panels, for CPUs with AVX2 and FMA or AVX-512. Called from kernels/linear.py, which checks.
//
// A panel holds PANEL output features, input feature by input feature, so that a step of the inner loop reads one cache line and adds
// to as many outputs. Every output is summed in one order, whatever else is computed with it: fused multiply-adds over CHUNK input features
// at a time, the chunks' sums added up, the bias last, one rounding. So a row of y does not depend on how many rows x has, nor a column on
// how the features are split over ranks or threads.
//
// Measured on an AVX2 machine without bf16 instructions, where torch's own bf16 linear decodes half as fast as memory allows and
// multiplies matrices at an eighth of the fp32 rate.
#include <algorithm>
#include <type_traits>

#include "contract.h"
#include "native_time.h"
#include "scratch.h"
#include "threads.h"
#include "vector_math.h"

namespace tpr {

// One call; kernels/linear.py's _Call. Strides are in elements; bias may be null.
struct LinearCall {
    const void *x, *packed, *bias;
    void* y;
    int64_t tokens, in_features, out_features, x_stride, y_stride;
    DType dtype;
    int32_t threads;
};

struct PackCall {
    const void* weight;  // [out_features, in_features], rows `stride` elements apart
    void* packed;
    int64_t out_features, in_features, stride;
    DType dtype;
};

constexpr int64_t PANEL = 32, CHUNK = 256;

#if defined(TPR_FMA)

#if defined(TPR_AVX512)
using Reg = __m512;
constexpr int W = 16, MOST_ROWS = 8;
TPR_INLINE Reg zero_reg() { return _mm512_setzero_ps(); }
TPR_INLINE Reg fma_reg(Reg a, Reg b, Reg c) { return _mm512_fmadd_ps(a, b, c); }
TPR_INLINE Reg add_reg(Reg a, Reg b) { return _mm512_add_ps(a, b); }
TPR_INLINE Reg spread_reg(float x) { return _mm512_set1_ps(x); }
TPR_INLINE Reg load_reg(const float* p) { return _mm512_loadu_ps(p); }
TPR_INLINE void store_reg(float* p, Reg v) { _mm512_storeu_ps(p, v); }
TPR_INLINE void load_pair(const uint16_t* p, Reg& low, Reg& high) {
    const __m512i both = _mm512_loadu_si512(p);
    low = _mm512_castsi512_ps(_mm512_slli_epi32(both, 16));
    high = _mm512_castsi512_ps(_mm512_and_si512(both, _mm512_set1_epi32(int(0xffff0000u))));
}
#else
using Reg = __m256;
constexpr int W = 8, MOST_ROWS = 6;
TPR_INLINE Reg zero_reg() { return _mm256_setzero_ps(); }
TPR_INLINE Reg fma_reg(Reg a, Reg b, Reg c) { return _mm256_fmadd_ps(a, b, c); }
TPR_INLINE Reg add_reg(Reg a, Reg b) { return _mm256_add_ps(a, b); }
TPR_INLINE Reg spread_reg(float x) { return _mm256_set1_ps(x); }
TPR_INLINE Reg load_reg(const float* p) { return _mm256_loadu_ps(p); }
TPR_INLINE void store_reg(float* p, Reg v) { _mm256_storeu_ps(p, v); }
TPR_INLINE void load_pair(const uint16_t* p, Reg& low, Reg& high) {
    const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    low = _mm256_castsi256_ps(_mm256_slli_epi32(both, 16));
    high = _mm256_castsi256_ps(_mm256_and_si256(both, _mm256_set1_epi32(int(0xffff0000u))));
}
#endif
TPR_INLINE void load_pair(const float* p, Reg& low, Reg& high) { low = load_reg(p), high = load_reg(p + W); }

constexpr int PAIRS = int(PANEL) / (2 * W);  // of registers in a panel

// Where output feature n of a panel lies in each line of it: 16-bit features share a 32-bit lane with the one W further on.
template <class T>
constexpr int64_t place_in_panel(int64_t n) {
    if (sizeof(typename T::Bits) == 4) return n;
    const int64_t pair = n / (2 * W), within = n % (2 * W);
    return pair * 2 * W + 2 * (within % W) + within / W;
}

// What is fetched into the second cache meanwhile: `lines` of 64 bytes for each STRIP input features, from `next` to `end`. Without it a
// processor computes, then waits for memory, in turns: its own prefetching does not look as far ahead as a step of several rows takes.
// With one row it does: measured, two panels side by side are read at the speed of a plain sum (0.98-1.00 of it; fetched ahead, 0.87-0.90).
struct Ahead {
    const char *next, *end;
    int64_t lines;
};
constexpr int64_t STRIP = 8;

// sums[m][pair ...] of M rows of x and P pairs of registers, the pairs' lines `apart` elements from each other.
template <class T, int M, int P>
TPR_INLINE void sum_block(const float* x, int64_t x_stride, const typename T::Bits* w, int64_t apart, int64_t K, Ahead& ahead, float* sums, int64_t sums_stride) {
    Reg total[M][2 * P];
    for (int64_t begin = 0; begin < K; begin += CHUNK) {
        const int64_t end = std::min(begin + CHUNK, K);
        Reg acc[M][2 * P];
#pragma GCC unroll 12
        for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
            for (int j = 0; j < 2 * P; ++j) acc[m][j] = zero_reg();
        for (int64_t k = begin; k < end; ++k) {
            if (k % STRIP == 0) {
                const char* stop = std::min(ahead.next + ahead.lines * 64, ahead.end);
                for (; ahead.next < stop; ahead.next += 64) _mm_prefetch(ahead.next, _MM_HINT_T1);
            }
            Reg line[2 * P];
#pragma GCC unroll 4
            for (int p = 0; p < P; ++p) load_pair(w + p * 2 * W % PANEL + p * 2 * W / PANEL * apart + k * PANEL, line[2 * p], line[2 * p + 1]);
#pragma GCC unroll 12
            for (int m = 0; m < M; ++m) {
                const Reg value = spread_reg(x[m * x_stride + k]);
#pragma GCC unroll 8
                for (int j = 0; j < 2 * P; ++j) acc[m][j] = fma_reg(value, line[j], acc[m][j]);
            }
        }
#pragma GCC unroll 12
        for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
            for (int j = 0; j < 2 * P; ++j) total[m][j] = begin ? add_reg(total[m][j], acc[m][j]) : acc[m][j];
    }
#pragma GCC unroll 12
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
        for (int j = 0; j < 2 * P; ++j) store_reg(sums + m * sums_stride + j * W, K ? total[m][j] : zero_reg());
}

// How often a pair of panels is read for `blocks` blocks of rows, the largest of `rows` rows.
constexpr int64_t passes_of(int64_t blocks, int64_t rows) { return blocks * (rows == 1 ? 1 : rows <= 3 || PAIRS == 1 ? 2 : 2 * PAIRS); }

// M rows of a pair of panels (or of the one that is left), as many registers at a time as there are.
template <class T, int M>
TPR_APART void sum_panels(const float* x, int64_t x_stride, const typename T::Bits* w, int64_t K, int panels, Ahead& ahead, float* sums) {
    constexpr int STRIDE = 2 * int(PANEL);
    const auto pass = [&](auto pairs, const typename T::Bits* lines, float* out) {
        sum_block<T, M, decltype(pairs)::value>(x, x_stride, lines, K * PANEL, K, ahead, out, STRIDE);
    };
    if constexpr (M == 1) {
        if (panels == 2) return pass(std::integral_constant<int, 2 * PAIRS>{}, w, sums);
    }
    for (int panel = 0; panel < panels; ++panel) {
        const auto* lines = w + panel * K * PANEL;
        float* out = sums + panel * PANEL;
        if constexpr (M <= 3 || PAIRS == 1) {
            pass(std::integral_constant<int, PAIRS>{}, lines, out);
        } else {
            for (int pair = 0; pair < PAIRS; ++pair) pass(std::integral_constant<int, 1>{}, lines + pair * 2 * W, out + pair * 2 * W);
        }
    }
}

template <class T>
void sum_rows_of_panels(int64_t rows, const float* x, int64_t x_stride, const typename T::Bits* w, int64_t K, int panels, Ahead& ahead, float* sums) {
    switch (rows) {
        case 1: return sum_panels<T, 1>(x, x_stride, w, K, panels, ahead, sums);
        case 2: return sum_panels<T, 2>(x, x_stride, w, K, panels, ahead, sums);
        case 3: return sum_panels<T, 3>(x, x_stride, w, K, panels, ahead, sums);
        case 4: return sum_panels<T, 4>(x, x_stride, w, K, panels, ahead, sums);
        case 5: return sum_panels<T, 5>(x, x_stride, w, K, panels, ahead, sums);
        case 6: return sum_panels<T, 6>(x, x_stride, w, K, panels, ahead, sums);
#if defined(TPR_AVX512)
        case 7: return sum_panels<T, 7>(x, x_stride, w, K, panels, ahead, sums);
        case 8: return sum_panels<T, 8>(x, x_stride, w, K, panels, ahead, sums);
#endif
    }
}

template <class T>
void store_sums(const LinearCall& call, int rows, int64_t row, int64_t first, int64_t count, const float* sums) {
    using Bits = typename T::Bits;
    const Bits* bias = static_cast<const Bits*>(call.bias);
    for (int m = 0; m < rows; ++m) {
        const float* sum = sums + m * 2 * PANEL;
        Bits* y = static_cast<Bits*>(call.y) + (row + m) * call.y_stride + first;
        if (bias) {
            TPR_INDEPENDENT for (int64_t n = 0; n < count; ++n) y[n] = T::narrow(sum[n] + T::wide(bias[first + n]));
        } else {
            TPR_INDEPENDENT for (int64_t n = 0; n < count; ++n) y[n] = T::narrow(sum[n]);
        }
    }
}

template <class T>
void linear_of(const LinearCall& call) {
    using Bits = typename T::Bits;
    const int64_t K = call.in_features, tokens = call.tokens, panels = (call.out_features + PANEL - 1) / PANEL, pairs = (panels + 1) / 2;
    static thread_local Scratch scratch;
    const float* x = static_cast<const float*>(call.x);
    int64_t x_stride = call.x_stride;
    if (sizeof(Bits) != sizeof(float)) {
        float* wide = scratch.at_least(tokens * K);
        for (int64_t t = 0; t < tokens; ++t) {
            const Bits* from = static_cast<const Bits*>(call.x) + t * call.x_stride;
            float* to = wide + t * K;
            TPR_INDEPENDENT for (int64_t k = 0; k < K; ++k) to[k] = T::wide(from[k]);
        }
        x = wide, x_stride = K;
    }
    const Bits* packed = static_cast<const Bits*>(call.packed);
    const int64_t blocks = (tokens + MOST_ROWS - 1) / MOST_ROWS, passes = passes_of(blocks, (tokens + blocks - 1) / std::max<int64_t>(blocks, 1));
    Pool::run(pairs, call.threads, [&](int64_t begin, int64_t end) {
        alignas(64) float sums[MOST_ROWS * 2 * PANEL];
        for (int64_t pair = begin; pair < end; ++pair) {
            const int64_t first = pair * 2 * PANEL, count = std::min<int64_t>(2 * PANEL, call.out_features - first);
            const int here = count > PANEL ? 2 : 1;
            const Bits* w = packed + first * K;
            // what follows this pair in memory, wherever it ends: fetching beyond the weights reads nothing and cannot fault
            const char* next = reinterpret_cast<const char*>(w + 2 * PANEL * K);
            const int64_t strip = STRIP * 2 * PANEL * sizeof(Bits) / 64;
            const int64_t lines = tokens == 1 ? 0 : (strip + passes - 1) / std::max<int64_t>(passes, 1);
            Ahead ahead{next, next + 2 * PANEL * K * int64_t(sizeof(Bits)), lines};
            for (int64_t block = 0; block < blocks; ++block) {  // of as equal sizes as can be
                const int64_t row = block * tokens / blocks, rows = (block + 1) * tokens / blocks - row;
                sum_rows_of_panels<T>(rows, x + row * x_stride, x_stride, w, K, here, ahead, sums);
                store_sums<T>(call, int(rows), row, first, count, sums);
            }
        }
    });
}

template <class T>
void pack_of(const PackCall& call) {
    using Bits = typename T::Bits;
    const Bits* weight = static_cast<const Bits*>(call.weight);
    Bits* packed = static_cast<Bits*>(call.packed);
    const int64_t K = call.in_features, panels = (call.out_features + PANEL - 1) / PANEL;
    for (int64_t panel = 0; panel < panels; ++panel) {
        Bits* lines = packed + panel * PANEL * K;
        for (int64_t n = 0; n < PANEL; ++n) {
            const int64_t feature = panel * PANEL + n, place = place_in_panel<T>(n);
            for (int64_t k = 0; k < K; ++k) lines[k * PANEL + place] = feature < call.out_features ? weight[feature * call.stride + k] : Bits(0);
        }
    }
}

#endif

}  // namespace tpr

// Features a panel has on this machine, or 0 where there is no such kernel.
extern "C" int64_t tpr_linear_panel() {
#if defined(TPR_FMA)
    return tpr::PANEL;
#else
    return 0;
#endif
}

extern "C" void tpr_pack_linear(const tpr::PackCall* call) {
#if defined(TPR_FMA)
    if (call->dtype == tpr::F32) return tpr::pack_of<tpr::Fp32>(*call);
    tpr::pack_of<tpr::Bfloat16>(*call);
#endif
}

extern "C" void tpr_linear(const tpr::LinearCall* call) {
    const tpr::Timed timed(tpr::LINEAR);
#if defined(TPR_FMA)
    if (call->dtype == tpr::F32) return tpr::linear_of<tpr::Fp32>(*call);
    tpr::linear_of<tpr::Bfloat16>(*call);
#endif
}
