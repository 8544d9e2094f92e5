// The arithmetic of kernels/contract.py for one row, in fp32: the same operations in the same order, so the same bits.
//
// Compile with -ffp-contract=off and without -ffast-math: a fused multiply-add or a reassociated sum is another number.
// A NaN stays a NaN in the same element; its sign and payload are not part of the contract (torch's own depend on the loop it takes).
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "lanes.h"

namespace tpr {

enum DType : int32_t { NONE = -1, F32 = 0, BF16 = 1, F16 = 2 };

struct NormSpec {
    float eps;
    float weight_offset;
    int32_t kind;  // 0: rms, 1: layer
    int32_t weight_after_cast;
};

// What happens to a completed sum, with its parameters; contract.AddNormSpec. Absent operands are null.
struct RowSpec {
    int64_t D;
    DType stream, output, round_update;  // round_update: NONE for no rounding
    float update_scale, skip_scale;
    NormSpec norm, update_norm;
    int32_t has_norm, has_update_norm;
    DType weight_dtype, norm_bias_dtype, update_bias_dtype, update_weight_dtype, update_norm_bias_dtype;
    const void *weight, *norm_bias, *update_bias, *update_weight, *update_norm_bias;
};

// f called with the type that dtype names
template <class F>
TPR_INLINE void with_type(DType dtype, F f) {
    if (dtype == BF16) f(Bfloat16{});
    else if (dtype == F16) f(Float16{});
    else f(Fp32{});
}

// f(i, x[i .. ] widened) for 0 .. D, a register at a time
template <class F>
TPR_INLINE void each(const void* x, DType dtype, int64_t D, F f) {
    with_type(dtype, [=](auto type) TPR_LAMBDA {
        using T = decltype(type);
        const auto* bits = static_cast<const typename T::Bits*>(x);
        each_lane(D, [=](int64_t i, auto lanes) TPR_LAMBDA { f(i, Lanes<T, decltype(lanes)>::load(bits + i)); });
    });
}

template <class V>
TPR_INLINE V get(const float* x) {
    return Lanes<Fp32, V>::load(x);
}
template <class V>
TPR_INLINE void put(float* x, V v) {
    Lanes<Fp32, V>::store(x, v);
}

TPR_APART inline void round_in_place(float* x, DType dtype, int64_t D) {
    with_type(dtype, [=](auto type) TPR_LAMBDA {
        each(x, F32, D, [=](int64_t i, auto v) TPR_LAMBDA { put(x + i, Lanes<decltype(type), decltype(v)>::round(v)); });
    });
}

TPR_APART inline void round_to(void* out, const float* x, DType dtype, int64_t D) {
    with_type(dtype, [=](auto type) TPR_LAMBDA {
        auto* bits = static_cast<typename decltype(type)::Bits*>(out);
        each(x, F32, D, [=](int64_t i, auto v) TPR_LAMBDA { Lanes<decltype(type), decltype(v)>::store(bits + i, v); });
    });
}

// out[i] = the summands, widened, added in order 0 .. count - 1
TPR_APART inline void sum_rows(float* out, const void* const* summands, int count, DType dtype, int64_t D) {
    each(summands[0], dtype, D, [=](int64_t i, auto v) TPR_LAMBDA { put(out + i, v); });
    for (int s = 1; s < count; ++s)
        each(summands[s], dtype, D, [=](int64_t i, auto v) TPR_LAMBDA { put(out + i, get<decltype(v)>(out + i) + v); });
}

constexpr int64_t TAIL = 64;  // a row sum's last levels have a fixed size, and are unrolled

// A row's width in scratch: the tree's power of two, and at least one tail.
inline int64_t padded_width(int64_t D) {
    int64_t width = TAIL;
    while (width < D) width *= 2;
    return width;
}

inline int64_t scratch_floats(int64_t D) { return 2 * padded_width(D); }

template <int H>
TPR_INLINE float halve(const float* v) {
    float sums[H];
    for (int i = 0; i < H; ++i) sums[i] = v[i] + v[i + H];
    if constexpr (H == 1) return sums[0];
    else return halve<H / 2>(sums);
}

struct Identity {
    template <class V>
    TPR_INLINE V operator()(V v) const {
        return v;
    }
};
struct Square {
    template <class V>
    TPR_INLINE V operator()(V v) const {
        return v * v;
    }
};

// Sum of f(v[0]) .. f(v[D - 1]), zero-padded to a power of two and halved by v[i] + v[i + h]. v: zero from D to padded_width(D).
template <class F>
TPR_APART inline float tree_sum(F f, const float* v, int64_t D, float* tree) {
    if (D <= TAIL) {
        for (int64_t i = 0; i < TAIL; ++i) tree[i] = f(v[i]);
        if (D == 1) return tree[0];  // a width of its own for each: what is not padded gets no 0.0 added, which would turn -0.0 into it
        if (D <= 2) return halve<1>(tree);
        if (D <= 4) return halve<2>(tree);
        if (D <= 8) return halve<4>(tree);
        if (D <= 16) return halve<8>(tree);
        if (D <= 32) return halve<16>(tree);
        return halve<32>(tree);
    }
    int64_t h = padded_width(D) / 2;
    if (h >= 4 * TAIL) {  // three levels in one pass
        h /= 4;
        each(v, F32, h, [=](int64_t i, auto a) TPR_LAMBDA {
            using V = decltype(a);
            const auto at = [=](int64_t k) TPR_LAMBDA { return f(get<V>(v + i + k * h)); };
            put(tree + i, ((f(a) + at(4)) + (at(2) + at(6))) + ((at(1) + at(5)) + (at(3) + at(7))));
        });
    } else {
        each(v, F32, h, [=](int64_t i, auto a) TPR_LAMBDA { put(tree + i, f(a) + f(get<decltype(a)>(v + i + h))); });
    }
    for (; h > TAIL; h /= 2)
        each(tree, F32, h / 2, [=](int64_t i, auto a) TPR_LAMBDA { put(tree + i, a + get<decltype(a)>(tree + i + h / 2)); });
    return halve<TAIL / 2>(tree);
}

// The same sum in a free order: TAIL running sums.
template <class F>
TPR_APART inline float fast_sum(F f, const float* v, int64_t D) {
    float sums[TAIL] = {};
    for (int64_t start = 0; start < D; start += TAIL)
        for (int64_t i = 0; i < TAIL; ++i) sums[i] += f(v[start + i]);
    return halve<TAIL / 2>(sums);
}

// y = round((x * r) * w (+ b)). x: zero from D to padded_width(D), overwritten. y: of dtype output.
TPR_APART inline void norm_row(bool fast, const NormSpec& norm, float* x, int64_t D, const void* weight, DType weight_dtype,
                               const void* bias, DType bias_dtype, void* y, DType output, float* tree) {
    if (norm.kind == 1) {
        const float mean = (fast ? fast_sum(Identity{}, x, D) : tree_sum(Identity{}, x, D, tree)) / float(D);
        each(x, F32, D, [=](int64_t i, auto v) TPR_LAMBDA { put(x + i, v - spread(mean, v)); });
    }
    const float mean_square = (fast ? fast_sum(Square{}, x, D) : tree_sum(Square{}, x, D, tree)) / float(D);
    const float r = 1.0f / std::sqrt(mean_square + norm.eps);
    const float offset = norm.weight_offset != 0.0f ? norm.weight_offset : -0.0f;  // -0.0 changes no number
    if (bias) {
        each(x, F32, D, [=](int64_t i, auto v) TPR_LAMBDA { put(x + i, v * spread(r, v)); });
        if (norm.weight_after_cast) round_in_place(x, output, D);
        each(weight, weight_dtype, D, [=](int64_t i, auto w) TPR_LAMBDA {
            put(x + i, get<decltype(w)>(x + i) * (w + spread(offset, w)));
        });
        if (norm.weight_after_cast) round_in_place(x, output, D);
        each(bias, bias_dtype, D, [=](int64_t i, auto b) TPR_LAMBDA { put(x + i, get<decltype(b)>(x + i) + b); });
        round_to(y, x, output, D);
        return;
    }
    with_type(output, [=](auto type) TPR_LAMBDA {
        using Y = decltype(type);
        auto* out = static_cast<typename Y::Bits*>(y);
        if (norm.weight_after_cast)
            each(weight, weight_dtype, D, [=](int64_t i, auto w) TPR_LAMBDA {
                using L = Lanes<Y, decltype(w)>;
                L::store(out + i, L::round(get<decltype(w)>(x + i) * spread(r, w)) * (w + spread(offset, w)));
            });
        else
            each(weight, weight_dtype, D, [=](int64_t i, auto w) TPR_LAMBDA {
                Lanes<Y, decltype(w)>::store(out + i, (get<decltype(w)>(x + i) * spread(r, w)) * (w + spread(offset, w)));
            });
    });
}

// Whether the update is added as it comes.
inline bool update_is_plain(const RowSpec& spec) {
    return !spec.update_bias && spec.round_update == NONE && !spec.has_update_norm && spec.update_scale == 1.0f;
}

// What is done to the update before it is added, in place. x: zero from D to padded_width(D), overwritten.
TPR_APART inline void prepare_update(bool fast, const RowSpec& spec, float* update, float* x, float* tree) {
    const int64_t D = spec.D;
    if (spec.update_bias)
        each(spec.update_bias, spec.update_bias_dtype, D,
             [=](int64_t i, auto b) TPR_LAMBDA { put(update + i, get<decltype(b)>(update + i) + b); });
    if (spec.round_update != NONE) round_in_place(update, spec.round_update, D);
    if (spec.has_update_norm) {
        std::memcpy(x, update, size_t(D) * sizeof(float));
        norm_row(fast, spec.update_norm, x, D, spec.update_weight, spec.update_weight_dtype, spec.update_norm_bias,
                 spec.update_norm_bias_dtype, update, F32, tree);
        if (spec.round_update != NONE) round_in_place(update, spec.round_update, D);
    }
    const float scale = spec.update_scale;
    if (scale != 1.0f) each(update, F32, D, [=](int64_t i, auto v) TPR_LAMBDA { put(update + i, v * spread(scale, v)); });
}

// finish_row for an update of any dtype. Only an fp32 one may need more than being added; it is overwritten then.
TPR_APART inline void finish_row_of(bool fast, const RowSpec& spec, void* update, DType update_dtype, const void* residual,
                                    DType residual_dtype, void* residual_out, void* normed_out, float* scratch) {
    const int64_t D = spec.D, width = padded_width(D);
    float *x = scratch, *tree = x + width;
    std::memset(x + D, 0, size_t(width - D) * sizeof(float));
    if (update && !update_is_plain(spec)) prepare_update(fast, spec, static_cast<float*>(update), x, tree);
    if (residual && spec.skip_scale != 1.0f) {
        const float scale = spec.skip_scale;
        each(residual, residual_dtype, D, [=](int64_t i, auto old) TPR_LAMBDA { put(x + i, old * spread(scale, old)); });
        residual = x, residual_dtype = F32;
    }
    with_type(spec.stream, [=](auto type) TPR_LAMBDA {
        using S = decltype(type);
        auto* out = static_cast<typename S::Bits*>(residual_out);
        const auto keep = [=](int64_t i, auto v) TPR_LAMBDA {
            using L = Lanes<S, decltype(v)>;
            L::store(out + i, v);
            put(x + i, L::round(v));
        };
        if (residual && update)
            with_type(update_dtype, [=](auto update_type) TPR_LAMBDA {
                using U = decltype(update_type);
                const auto* summand = static_cast<const typename U::Bits*>(update);
                each(residual, residual_dtype, D,
                     [=](int64_t i, auto old) TPR_LAMBDA { keep(i, old + Lanes<U, decltype(old)>::load(summand + i)); });
            });
        else
            each(residual ? residual : update, residual ? residual_dtype : update_dtype, D, keep);
    });
    if (spec.has_norm)
        norm_row(fast, spec.norm, x, D, spec.weight, spec.weight_dtype, spec.norm_bias, spec.norm_bias_dtype, normed_out, spec.output,
                 tree);
}

// The new residual and the normed value of one row; contract.add_norm.
// update: fp32 sum of D elements, overwritten, or null. residual: of residual_dtype, or null; not both null.
// residual_out: of spec.stream, may be residual. normed_out: of spec.output, null without a norm.
// scratch: scratch_floats(D) floats, 64-byte aligned.
inline void finish_row(const RowSpec& spec, float* update, const void* residual, DType residual_dtype, void* residual_out,
                       void* normed_out, float* scratch) {
    finish_row_of(false, spec, update, F32, residual, residual_dtype, residual_out, normed_out, scratch);
}

// The same, with the norms' row sums in a free order.
inline void finish_row_fast(const RowSpec& spec, float* update, const void* residual, DType residual_dtype, void* residual_out,
                            void* normed_out, float* scratch) {
    finish_row_of(true, spec, update, F32, residual, residual_dtype, residual_out, normed_out, scratch);
}

}  // namespace tpr
