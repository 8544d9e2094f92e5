// What a decoder layer does between its linears: rotary positions, keys and values into a paged cache, attention over it, silu(gate) * up.
// Called from kernels/decoder.py, which checks.
//
// A block of the cache holds BLOCK tokens of one KV head, keys by dimension (`[head_dim][BLOCK]`, so that a register holds one dimension of
// 16 keys), values by token. Attention goes over TILE keys at a time from a place that is a multiple of TILE, whatever the batch or the
// piece of a prompt: a query's result depends on its own sequence alone, to the bit. Everything is fp32 between loading and one rounding.
#include <algorithm>
#include <cmath>
#include <limits>

#include "contract.h"
#include "native_time.h"
#include "threads.h"
#include "vector_math.h"

namespace tpr {

constexpr int64_t BLOCK = 16, TILE = 64;

struct RopeCall {  // strides in elements; cos and sin: fp32 [tokens, head_dim]
    const void* x;
    void* y;
    const float *cos, *sin;
    int64_t tokens, heads, head_dim, x_stride, y_stride;
    DType dtype;
};

struct SiluCall {
    const void *gate, *up;
    void* y;
    int64_t tokens, features, in_stride, y_stride;
    DType dtype;
    int32_t threads;
};

struct AppendCall {  // slots: block * BLOCK + place in it, for each token
    const void *k, *v;
    void *keys, *values;  // of this layer: [blocks, kv_heads, head_dim, BLOCK] and [blocks, kv_heads, BLOCK, head_dim], blocks apart
    const int64_t* slots;
    int64_t tokens, kv_heads, head_dim, k_stride, v_stride, block_stride;
    DType dtype;
};

struct AttendCall {
    const void *q, *keys, *values;
    void* out;
    const int64_t* spans;   // (first token, one past the last, row of the table, tokens before) of each sequence
    const int32_t* tables;  // [rows, table_width]: a sequence's blocks in order
    const int64_t* heads;   // (first query head, how many) of each KV head
    int64_t span_count, table_width, kv_heads, query_heads, head_dim, q_stride, out_stride, window, block_stride;  // window 0: none
    float scale;
    DType dtype;
    int32_t threads;
};

template <class T>
void rope_of(const RopeCall& call) {
    using Bits = typename T::Bits;
    const int64_t D = call.head_dim, half = D / 2;
    for (int64_t t = 0; t < call.tokens; ++t) {
        const float *cos = call.cos + t * D, *sin = call.sin + t * D;
        for (int64_t h = 0; h < call.heads; ++h) {
            const Bits* x = static_cast<const Bits*>(call.x) + t * call.x_stride + h * D;
            Bits* y = static_cast<Bits*>(call.y) + t * call.y_stride + h * D;
            TPR_INDEPENDENT for (int64_t i = 0; i < half; ++i) {
                const float low = T::wide(x[i]), high = T::wide(x[i + half]);
                y[i] = T::narrow(low * cos[i] + -high * sin[i]);
                y[i + half] = T::narrow(high * cos[i + half] + low * sin[i + half]);
            }
        }
    }
}

template <class T>
void silu_of(const SiluCall& call, int64_t begin, int64_t end) {
    using Bits = typename T::Bits;
    for (int64_t t = begin; t < end; ++t) {
        const Bits *gate = static_cast<const Bits*>(call.gate) + t * call.in_stride, *up = static_cast<const Bits*>(call.up) + t * call.in_stride;
        Bits* y = static_cast<Bits*>(call.y) + t * call.y_stride;
        TPR_INDEPENDENT for (int64_t i = 0; i < call.features; ++i) {
            const float g = T::wide(gate[i]);
            const float silu = T::wide(T::narrow(g / (1.0f + exp_of(-g))));  // two roundings, as of silu(gate) and of the product
            y[i] = T::narrow(silu * T::wide(up[i]));
        }
    }
}

template <class Bits>
void append_of(const AppendCall& call) {
    const int64_t D = call.head_dim, H = call.kv_heads;
    for (int64_t t = 0; t < call.tokens; ++t) {
        const int64_t block = call.slots[t] / BLOCK, place = call.slots[t] % BLOCK;
        for (int64_t h = 0; h < H; ++h) {
            const Bits *k = static_cast<const Bits*>(call.k) + t * call.k_stride + h * D, *v = static_cast<const Bits*>(call.v) + t * call.v_stride + h * D;
            Bits* keys = static_cast<Bits*>(call.keys) + block * call.block_stride + h * D * BLOCK + place;
            for (int64_t d = 0; d < D; ++d) keys[d * BLOCK] = k[d];
            std::copy(v, v + D, static_cast<Bits*>(call.values) + block * call.block_stride + (h * BLOCK + place) * D);
        }
    }
}

#if defined(TPR_FMA)

constexpr int ROWS = 6;            // of queries at a time: 12 accumulators of 8 lanes
constexpr int64_t MOST_DIM = 256;  // of a head

// What one block of query rows keeps while it goes over the keys.
struct Rows {
    alignas(64) float q[ROWS][MOST_DIM], out[ROWS][MOST_DIM], p[ROWS][TILE];
    alignas(64) float totals[ROWS][BLOCK];  // of every sixteenth weight
    float peak[ROWS];
    int64_t first[ROWS], limit[ROWS];  // keys [first, limit) are seen
};

// p[m][...] = q[m] . keys of BLOCK keys.
template <class T, int M>
TPR_INLINE void score_block(Rows& rows, const typename T::Bits* keys, int64_t D, int64_t at) {
    Vector acc[M];
#pragma GCC unroll 6
    for (int m = 0; m < M; ++m) acc[m] = zero_vector();
    for (int64_t d = 0; d < D; ++d) {
        const Vector k = Lanes<T, Vector>::load(keys + d * BLOCK);
#pragma GCC unroll 6
        for (int m = 0; m < M; ++m) acc[m] = fma_vector(spread_vector(rows.q[m][d]), k, acc[m]);
    }
#pragma GCC unroll 6
    for (int m = 0; m < M; ++m) store_floats(rows.p[m] + at, acc[m]);
}

// out[m] += p[m] . values of BLOCK keys, of which `count` exist.
template <class T, int M>
TPR_INLINE void add_block(Rows& rows, const typename T::Bits* values, int64_t D, int64_t at, int64_t count) {
    for (int64_t d = 0; d < D; d += 16) {
        Vector acc[M];
#pragma GCC unroll 6
        for (int m = 0; m < M; ++m) acc[m] = load_floats(rows.out[m] + d);
        for (int64_t key = 0; key < count; ++key) {
            const Vector v = Lanes<T, Vector>::load(values + key * D + d);
#pragma GCC unroll 6
            for (int m = 0; m < M; ++m) acc[m] = fma_vector(spread_vector(rows.p[m][at + key]), v, acc[m]);
        }
#pragma GCC unroll 6
        for (int m = 0; m < M; ++m) store_floats(rows.out[m] + d, acc[m]);
    }
}

// Scores of a tile to weights: scaled, masked, exp(s - peak), with what was summed before rescaled when the peak rises. A key that a row does
// not see has weight 0, which changes no bit of its sums: so they do not depend on which rows share a block.
inline void weigh_tile(Rows& rows, int m, int64_t begin, int64_t count, int64_t D, float scale) {
    float* p = rows.p[m];
    const int32_t from = int32_t(std::max<int64_t>(rows.first[m] - begin, 0)), to = int32_t(std::min(rows.limit[m] - begin, count));
    if (from >= to) return void(std::fill(p, p + count, 0.0f));
    const float nothing = -std::numeric_limits<float>::infinity();
    float peaks[BLOCK];
    std::fill(peaks, peaks + BLOCK, rows.peak[m]);
    for (int32_t at = 0; at < count; at += BLOCK) {
        TPR_INDEPENDENT for (int32_t i = 0; i < BLOCK; ++i) {
            const float s = at + i >= from && at + i < to ? p[at + i] * scale : nothing;
            p[at + i] = s;
            peaks[i] = s > peaks[i] ? s : peaks[i];
        }
    }
    const float peak = *std::max_element(peaks, peaks + BLOCK);
    const float base = peak == nothing ? 0.0f : peak;
    if (peak != rows.peak[m]) {
        const float kept = exp_of(rows.peak[m] - base);
        for (int64_t i = 0; i < BLOCK; ++i) rows.totals[m][i] *= kept;
        for (int64_t d = 0; d < D; ++d) rows.out[m][d] *= kept;
        rows.peak[m] = peak;
    }
    for (int32_t at = 0; at < count; at += BLOCK) {
        TPR_INDEPENDENT for (int32_t i = 0; i < BLOCK; ++i) {
            p[at + i] = exp_of(p[at + i] - base);
            rows.totals[m][i] += p[at + i];
        }
    }
}

template <class T, int M>
TPR_APART void attend_rows(const AttendCall& call, Rows& rows, const int32_t* table, int64_t head) {
    using Bits = typename T::Bits;
    const int64_t D = call.head_dim;
    const Bits *keys = static_cast<const Bits*>(call.keys) + head * D * BLOCK, *values = static_cast<const Bits*>(call.values) + head * D * BLOCK;
    const int64_t first = *std::min_element(rows.first, rows.first + M), limit = *std::max_element(rows.limit, rows.limit + M);
    for (int m = 0; m < M; ++m) {
        rows.peak[m] = -std::numeric_limits<float>::infinity();
        std::fill(rows.totals[m], rows.totals[m] + BLOCK, 0.0f);
        std::fill(rows.out[m], rows.out[m] + D, 0.0f);
    }
    for (int64_t tile = first / TILE * TILE; tile < limit; tile += TILE) {
        const int64_t count = std::min(TILE, limit - tile);
        for (int64_t at = 0; at < count; at += BLOCK) score_block<T, M>(rows, keys + table[(tile + at) / BLOCK] * call.block_stride, D, at);
        for (int m = 0; m < M; ++m) weigh_tile(rows, m, tile, count, D, call.scale);
        for (int64_t at = 0; at < count; at += BLOCK) {
            add_block<T, M>(rows, values + table[(tile + at) / BLOCK] * call.block_stride, D, at, std::min(BLOCK, count - at));
        }
    }
}

template <class T>
void attend_span(const AttendCall& call, const int64_t* span, int64_t head, int64_t begin, int64_t end) {
    using Bits = typename T::Bits;
    static thread_local Rows rows;
    const int64_t D = call.head_dim, first_head = call.heads[2 * head], group = call.heads[2 * head + 1];
    const int32_t* table = call.tables + span[2] * call.table_width;
    for (int64_t row = begin; row < end; row += ROWS) {
        const int M = int(std::min<int64_t>(ROWS, end - row));
        for (int m = 0; m < M; ++m) {
            const int64_t token = span[0] + (row + m) / group, at = first_head + (row + m) % group;
            const Bits* q = static_cast<const Bits*>(call.q) + token * call.q_stride + at * D;
            for (int64_t d = 0; d < D; ++d) rows.q[m][d] = T::wide(q[d]);
            rows.limit[m] = span[3] + token - span[0] + 1;
            rows.first[m] = call.window ? std::max<int64_t>(rows.limit[m] - call.window, 0) : 0;
        }
        switch (M) {
            case 1: attend_rows<T, 1>(call, rows, table, head); break;
            case 2: attend_rows<T, 2>(call, rows, table, head); break;
            case 3: attend_rows<T, 3>(call, rows, table, head); break;
            case 4: attend_rows<T, 4>(call, rows, table, head); break;
            case 5: attend_rows<T, 5>(call, rows, table, head); break;
            default: attend_rows<T, 6>(call, rows, table, head);
        }
        for (int m = 0; m < M; ++m) {
            const int64_t token = span[0] + (row + m) / group, at = first_head + (row + m) % group;
            Bits* out = static_cast<Bits*>(call.out) + token * call.out_stride + at * D;
            float total = 0.0f;
            for (int64_t i = 0; i < BLOCK; ++i) total += rows.totals[m][i];
            for (int64_t d = 0; d < D; ++d) out[d] = T::narrow(rows.out[m][d] / total);
        }
    }
}

template <class T>
void attend_of(const AttendCall& call) {
    // pieces of QUERIES queries of one sequence for one KV head, so that a long prompt is shared by all threads
    constexpr int64_t QUERIES = 48;
    int64_t pieces = 0;
    for (int64_t s = 0; s < call.span_count; ++s) pieces += (call.spans[4 * s + 1] - call.spans[4 * s] + QUERIES - 1) / QUERIES;
    Pool::run(pieces * call.kv_heads, call.threads, [&](int64_t begin, int64_t end) {
        int64_t piece = 0;
        for (int64_t s = 0; s < call.span_count; ++s) {
            const int64_t* span = call.spans + 4 * s;
            const int64_t queries = span[1] - span[0];
            for (int64_t first = 0; first < queries; first += QUERIES) {
                for (int64_t head = 0; head < call.kv_heads; ++head, ++piece) {
                    if (piece < begin || piece >= end) continue;
                    const int64_t group = call.heads[2 * head + 1];
                    attend_span<T>(call, span, head, first * group, std::min(first + QUERIES, queries) * group);
                }
            }
        }
    });
}

#endif

}  // namespace tpr

// Tokens a block of the cache has, or 0 where there is no such attention.
extern "C" int64_t tpr_attention_block() {
#if defined(TPR_FMA)
    return tpr::BLOCK;
#else
    return 0;
#endif
}

extern "C" void tpr_rope(const tpr::RopeCall* call) {
    const tpr::Timed timed(tpr::ELEMENTWISE);
    tpr::with_type(call->dtype, [=](auto type) { tpr::rope_of<decltype(type)>(*call); });
}

extern "C" void tpr_silu(const tpr::SiluCall* call) {
    const tpr::Timed timed(tpr::ELEMENTWISE);
    tpr::with_type(call->dtype, [=](auto type) {
        constexpr int64_t ELEMENTS = 1 << 14;  // fewer for each thread do not pay for waking it
        const int64_t useful = std::max<int64_t>(1, call->tokens * call->features / ELEMENTS);
        const int threads = int(std::min<int64_t>(useful, call->threads));
        tpr::Pool::run(call->tokens, threads, [=](int64_t begin, int64_t end) { tpr::silu_of<decltype(type)>(*call, begin, end); });
    });
}

extern "C" void tpr_append(const tpr::AppendCall* call) {
    const tpr::Timed timed(tpr::ATTENTION);
    if (call->dtype == tpr::F32) return tpr::append_of<uint32_t>(*call);
    tpr::append_of<uint16_t>(*call);
}

extern "C" void tpr_attend(const tpr::AttendCall* call) {
    const tpr::Timed timed(tpr::ATTENTION);
#if defined(TPR_FMA)
    tpr::with_type(call->dtype, [=](auto type) { tpr::attend_of<decltype(type)>(*call); });
#endif
}
