// contract.add_norm of many rows, on several threads. Called from kernels/cpu.py, which checks the operands.
//
// Ordinary stores: those that bypass the caches were slower for 64 MB of bf16 and no faster for fp32, on one thread and on two.
#include <algorithm>

#include "contract.h"
#include "native_time.h"
#include "scratch.h"
#include "threads.h"

namespace tpr {

// One call; kernels/cpu.py's _Call. Strides are in elements. residual or update may be null; residual_out where the new residual is
// only normed; normed_out is without a norm.
struct AddNormCall {
    const RowSpec* row;
    int64_t tokens;
    const void *residual, *update;
    void *residual_out, *normed_out;
    int64_t residual_stride, update_stride, residual_out_stride, normed_out_stride;
    DType residual_dtype, update_dtype;
    int32_t fast, threads;
    int32_t wary;  // rows are contiguous: do nothing if an output shares memory with another tensor, other than in place
};

inline int64_t size_of(DType dtype) { return dtype == F32 ? 4 : 2; }

inline const void* at(const void* rows, int64_t index, DType dtype) {
    return rows ? static_cast<const char*>(rows) + index * size_of(dtype) : nullptr;
}
inline void* at(void* rows, int64_t index, DType dtype) { return rows ? static_cast<char*>(rows) + index * size_of(dtype) : nullptr; }

inline void add_norm_rows(const AddNormCall& call, int64_t begin, int64_t end) {
    static thread_local Scratch scratch;
    const RowSpec& row = *call.row;
    const int64_t width = padded_width(row.D);
    const bool plain = update_is_plain(row);
    float* wide = scratch.at_least(2 * width + scratch_floats(row.D));
    for (int64_t t = begin; t < end; ++t) {
        const void* summand = at(call.update, t * call.update_stride, call.update_dtype);
        const bool widened = summand && !plain;
        if (widened) sum_rows(wide, &summand, 1, call.update_dtype, row.D);
        void* update = widened ? wide : const_cast<void*>(summand);  // read only, if it is plain
        const void* residual = at(call.residual, t * call.residual_stride, call.residual_dtype);
        void* residual_out = call.residual_out ? at(call.residual_out, t * call.residual_out_stride, row.stream) : wide + width;
        void* normed_out = at(call.normed_out, t * call.normed_out_stride, row.output);
        finish_row_of(call.fast, row, update, widened ? F32 : call.update_dtype, residual, call.residual_dtype, residual_out, normed_out,
                      wide + 2 * width);
    }
}

// Whether an output lies over another tensor of the call, or over the other output. It may be residual or update, element for element.
inline bool outputs_overlap(const AddNormCall& call) {
    const RowSpec& row = *call.row;
    struct Place {
        const void* begin;
        DType dtype;
        int64_t rows;
    };
    const Place places[] = {
        {call.residual_out, row.stream, call.tokens},
        {call.normed_out, row.output, call.tokens},
        {call.residual, call.residual_dtype, call.tokens},
        {call.update, call.update_dtype, call.tokens},
        {row.weight, row.weight_dtype, 1},
        {row.norm_bias, row.norm_bias_dtype, 1},
        {row.update_bias, row.update_bias_dtype, 1},
        {row.update_weight, row.update_weight_dtype, 1},
        {row.update_norm_bias, row.update_norm_bias_dtype, 1},
    };
    const auto end_of = [&](const Place& p) { return static_cast<const char*>(p.begin) + p.rows * row.D * size_of(p.dtype); };
    for (int out = 0; out < 2; ++out) {
        for (int other = out + 1; other < 9; ++other) {
            const Place &a = places[out], &b = places[other];
            const bool in_place = (other == 2 || other == 3) && a.begin == b.begin && a.dtype == b.dtype;
            if (a.begin && b.begin && !in_place && a.begin < end_of(b) && b.begin < end_of(a)) return true;
        }
    }
    return false;
}

}  // namespace tpr

extern "C" int32_t tpr_add_norm(const tpr::AddNormCall* call) {
    const tpr::Timed timed(tpr::ELEMENTWISE);
    if (call->wary && tpr::outputs_overlap(*call)) return 1;
    constexpr int64_t ELEMENTS = 1 << 16;  // fewer for each thread do not pay for waking it
    const int64_t useful = call->tokens * call->row->D / ELEMENTS;
    const int threads = int(std::max<int64_t>(1, std::min({int64_t(call->threads), call->tokens, useful})));
    tpr::Pool::run(call->tokens, threads, [call](int64_t begin, int64_t end) { tpr::add_norm_rows(*call, begin, end); });
    return 0;
}

// sizeof RowSpec and AddNormCall, for a check against the Python side.
extern "C" int64_t tpr_sizeof_row_spec() { return sizeof(tpr::RowSpec); }
extern "C" int64_t tpr_sizeof_add_norm_call() { return sizeof(tpr::AddNormCall); }
