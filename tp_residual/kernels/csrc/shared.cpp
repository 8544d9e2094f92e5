// Exchanges among processes of one host through a shared segment: collectives, and the boundary (reduce, add, norm) in one call.
//
// Every exchange is a sequence of steps, numbered from 1 over the life of the segment and the same on all ranks. In step s a rank
//   1. writes what the others need into its slot, buffer s % 2;
//   2. publishes: stores s to its own sequence word (release);
//   3. waits until the sequence word of *every* rank is at least s (acquire);
//   4. reads the others' buffers s % 2.
// Two buffers are enough. A rank writes buffer s % 2 again in step s + 2, after it has passed the wait of step s + 1. So it has seen
// every peer publish s + 1, and a peer publishes s + 1 only when it is through with reading step s: nobody still reads what is
// overwritten. One buffer would not do: a peer that has seen s may read it long after this rank has gone on to step s + 1.
// The argument needs each step to wait for all ranks, also for those that have nothing to send (a broadcast's receivers).
//
// No call blocks for long: when a peer is late it returns PENDING, with its place kept in the Exchange, and is called again.

#include <sched.h>
#include <time.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "contract.h"
#include "native_time.h"

namespace tpr::shared {

constexpr int MAX_RANKS = 64;
constexpr int64_t BLOCK = 1024;  // elements summed at a time: they stay in the first-level cache

enum Status : int32_t { DONE = 0, PENDING = 1, PENDING_IN_GATHER = 2, DIFFERENT = 3 };
enum Form : int32_t { ONE_SHOT = 0, TWO_SHOT, SCATTER, SCATTER_GATHER, GATHER, ALL_TO_ALL, BROADCAST };
enum Wide : int32_t { F64 = 3, I64, I32, I16, I8, U8 };  // goes on where tpr::DType ends

// One rank's words. The signatures say what a rank is doing in steps of either parity; they share the line of the sequence word, which
// peers fetch anyway. `left` has a line of its own: it is read only when a wait is long.
struct alignas(128) Line {
    uint64_t sequence;
    uint64_t signature[2];
    alignas(128) uint64_t left;
};
static_assert(sizeof(Line) == 256);

// This rank's view of the segment. Laid out again in parallel/shared.py.
struct Channel {
    Line* lines;
    char* slots;  // [rank][2][slot_bytes]
    int64_t slot_bytes;
    uint64_t step;  // the last one that this rank is through with
    int64_t spin_ns, yield_ns, sleep_ns, limit_ns;
    int32_t rank, size;

    char* slot(int peer) const { return slots + (peer * 2 + int64_t((step + 1) & 1)) * slot_bytes; }
};

// Rows in private memory: `row` bytes each, the first of them being row `first` of the whole.
struct Rows {
    char* data;
    int64_t row, first;

    char* at(int64_t index) const { return data + (index - first) * row; }
};

// What to do, and how far it is. Laid out again in parallel/shared.py.
//
// Sums (ONE_SHOT, TWO_SHOT, SCATTER, SCATTER_GATHER): `rows` rows of `in` of `width` elements are summed over the ranks, and a row's sum
// either is out[0]'s row or, with a spec, goes through residual add and norm to out[0] (new residual) and out[1] (normed, may be absent).
// SCATTER gives each rank its ceil chunk of rows only; SCATTER_GATHER gathers out[1] again.
// Moves (GATHER, ALL_TO_ALL, BROADCAST): in and out[0] are `rows` bytes a rank (GATHER: of input), a pair of ranks, or in all.
struct Exchange {
    const RowSpec* spec;
    Rows in, residual, out[2];
    float *update, *scratch;  // one row, and what the norm needs
    int64_t rows, width, piece_bytes;
    uint64_t signature;
    int32_t form, dtype, residual_dtype, root;
    // progress
    int64_t stage;
    int32_t published, patient;
};

inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

inline int64_t now_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * int64_t(1000000000) + t.tv_nsec;
}

inline bool arrived(const Channel& c, int peer) {
    return __atomic_load_n(&c.lines[peer].sequence, __ATOMIC_ACQUIRE) > c.step;
}

// Spins, then yields the core to whoever can use it (the late peer, where ranks outnumber cores), then sleeps. `patient`: an earlier
// call has waited in vain, so sleep at once. False when limit_ns is over.
inline bool wait_for_all(const Channel& c, bool patient) {
    int64_t start = 0;
    for (int peer = 0; peer < c.size; ++peer) {
        for (int turn = 1; !arrived(c, peer); ++turn) {
            relax();
            if (turn % 16 && !patient && start == 0) continue;
            const int64_t now = now_ns();
            if (start == 0) start = now;
            const int64_t waited = now - start;
            if (waited > c.limit_ns) return false;
            if (patient || waited > c.yield_ns) {
                const timespec pause = {0, long(c.sleep_ns)};
                nanosleep(&pause, nullptr);
            } else if (waited > c.spin_ns) {
                sched_yield();
            }
        }
    }
    return true;
}

template <class T>
void sum_as(void* out, const void* const* in, int count, int64_t n) {
    T* const total = static_cast<T*>(out);
    const T *first = static_cast<const T*>(in[0]), *second = static_cast<const T*>(in[1]);
    for (int64_t i = 0; i < n; ++i) total[i] = T(first[i] + second[i]);
    for (int k = 2; k < count; ++k) {
        const T* next = static_cast<const T*>(in[k]);
        for (int64_t i = 0; i < n; ++i) total[i] = T(total[i] + next[i]);
    }
}

inline void sum(void* out, const void* const* in, int count, int32_t dtype, int64_t n) {
    switch (dtype) {  // integers wrap around, so they are added without a sign
        case F64: return sum_as<double>(out, in, count, n);
        case I64: return sum_as<uint64_t>(out, in, count, n);
        case I32: return sum_as<uint32_t>(out, in, count, n);
        case I16: return sum_as<uint16_t>(out, in, count, n);
        case I8:
        case U8: return sum_as<uint8_t>(out, in, count, n);
        default: return sum_rows(static_cast<float*>(out), in, count, DType(dtype), n);
    }
}

// Rows [begin, end) of the result. where[p]: row `begin` of rank p's summands.
inline void compute(const Channel& c, const Exchange& e, int64_t begin, int64_t end, const char* const* where) {
    const void* summands[MAX_RANKS];
    if (e.spec) {
        for (int64_t row = begin; row < end; ++row) {
            for (int p = 0; p < c.size; ++p) summands[p] = where[p] + (row - begin) * e.in.row;
            sum_rows(e.update, summands, c.size, DType(e.dtype), e.width);
            finish_row(*e.spec, e.update, e.residual.data ? e.residual.at(row) : nullptr, DType(e.residual_dtype),
                            e.out[0].at(row), e.out[1].data ? e.out[1].at(row) : nullptr, e.scratch);
        }
        return;
    }
    for (int64_t row = begin; row < end; row += BLOCK) {
        for (int p = 0; p < c.size; ++p) summands[p] = where[p] + (row - begin) * e.in.row;
        sum(e.out[0].at(row), summands, c.size, e.dtype, std::min(BLOCK, end - row));
    }
}

// Every rank publishes all its rows and computes all of them: one step a piece.
struct OneShot {
    const Channel& c;
    const Exchange& e;
    int64_t per = std::min(e.piece_bytes, c.slot_bytes) / e.in.row;

    int64_t stages() const { return (e.rows + per - 1) / per; }
    bool in_gather(int64_t) const { return false; }
    void write(int64_t stage) const {
        const int64_t begin = stage * per, end = std::min(begin + per, e.rows);
        std::memcpy(c.slot(c.rank), e.in.at(begin), (end - begin) * e.in.row);
    }
    void read(int64_t stage) const {
        const int64_t begin = stage * per, end = std::min(begin + per, e.rows);
        const char* where[MAX_RANKS];
        for (int p = 0; p < c.size; ++p) where[p] = p == c.rank ? e.in.at(begin) : c.slot(p);
        compute(c, e, begin, end, where);
    }
};

// Each rank computes its share of every piece and the others copy the results: the results of a piece travel in the same step as the
// summands of the next.
struct TwoShot {
    const Channel& c;
    const Exchange& e;
    int64_t result_row = e.out[0].row + (e.out[1].data ? e.out[1].row : 0);
    int64_t share = std::min(e.piece_bytes, c.slot_bytes) / (c.size * e.in.row + result_row);
    int64_t per = share * c.size;

    int64_t pieces() const { return (e.rows + per - 1) / per; }
    int64_t stages() const { return pieces() + 1; }
    bool in_gather(int64_t) const { return false; }
    void rows_of(int64_t piece, int rank, int64_t& begin, int64_t& end) const {
        const int64_t first = piece * per, last = std::min(first + per, e.rows), chunk = (last - first + c.size - 1) / c.size;
        begin = std::min(first + rank * chunk, last);
        end = std::min(begin + chunk, last);
    }
    void write(int64_t stage) const {
        char* slot = c.slot(c.rank);
        int64_t begin, end;
        if (stage < pieces()) {
            const int64_t first = stage * per, last = std::min(first + per, e.rows);
            rows_of(stage, c.rank, begin, end);
            std::memcpy(slot, e.in.at(first), (begin - first) * e.in.row);
            std::memcpy(slot + (end - first) * e.in.row, e.in.at(end), (last - end) * e.in.row);
        }
        if (stage > 0) {
            char* to = slot + per * e.in.row;
            rows_of(stage - 1, c.rank, begin, end);
            std::memcpy(to, e.out[0].at(begin), (end - begin) * e.out[0].row);
            if (e.out[1].data) std::memcpy(to + share * e.out[0].row, e.out[1].at(begin), (end - begin) * e.out[1].row);
        }
    }
    void read(int64_t stage) const {
        int64_t begin, end;
        for (int p = 0; p < c.size && stage > 0; ++p) {
            if (p == c.rank) continue;
            const char* from = c.slot(p) + per * e.in.row;
            rows_of(stage - 1, p, begin, end);
            std::memcpy(e.out[0].at(begin), from, (end - begin) * e.out[0].row);
            if (e.out[1].data) std::memcpy(e.out[1].at(begin), from + share * e.out[0].row, (end - begin) * e.out[1].row);
        }
        if (stage < pieces()) {
            const char* where[MAX_RANKS];
            rows_of(stage, c.rank, begin, end);
            for (int p = 0; p < c.size; ++p)
                where[p] = p == c.rank ? e.in.at(begin) : c.slot(p) + (begin - stage * per) * e.in.row;
            compute(c, e, begin, end, where);
        }
    }
};

// Rank r computes rows [r * chunk, (r + 1) * chunk). With `gather`, the normed rows of a piece travel in the same step as the summands of
// the next, so that only the last step is a gather alone.
struct Scatter {
    const Channel& c;
    const Exchange& e;
    bool gather = e.form == SCATTER_GATHER;
    int64_t chunk = (e.rows + c.size - 1) / c.size;
    int64_t per = std::min(e.piece_bytes, c.slot_bytes) / (c.size * e.in.row + (gather ? e.out[1].row : 0));

    int64_t pieces() const { return (chunk + per - 1) / per; }
    int64_t stages() const { return pieces() + gather; }
    bool in_gather(int64_t stage) const { return stage == pieces(); }
    void rows_of(int64_t piece, int rank, int64_t& begin, int64_t& end) const {
        begin = std::min(rank * chunk + piece * per, e.rows);
        end = std::min({begin + per, (rank + 1) * chunk, e.rows});
    }
    void write(int64_t stage) const {
        char* slot = c.slot(c.rank);
        int64_t begin, end;
        for (int p = 0; p < c.size && stage < pieces(); ++p) {
            rows_of(stage, p, begin, end);
            if (p != c.rank && begin < end) std::memcpy(slot + p * per * e.in.row, e.in.at(begin), (end - begin) * e.in.row);
        }
        if (gather && stage > 0) {
            rows_of(stage - 1, c.rank, begin, end);
            if (begin < end) std::memcpy(slot + c.size * per * e.in.row, e.out[1].at(begin), (end - begin) * e.out[1].row);
        }
    }
    void read(int64_t stage) const {
        int64_t begin, end;
        for (int p = 0; p < c.size && gather && stage > 0; ++p) {
            rows_of(stage - 1, p, begin, end);
            if (p != c.rank && begin < end)
                std::memcpy(e.out[1].at(begin), c.slot(p) + c.size * per * e.in.row, (end - begin) * e.out[1].row);
        }
        rows_of(stage, c.rank, begin, end);
        if (stage < pieces() && begin < end) {
            const char* where[MAX_RANKS];
            for (int p = 0; p < c.size; ++p)
                where[p] = p == c.rank ? e.in.at(begin) : c.slot(p) + c.rank * per * e.in.row;
            compute(c, e, begin, end, where);
        }
    }
};

struct Gather {
    const Channel& c;
    const Exchange& e;
    int64_t per = c.slot_bytes;

    int64_t stages() const { return (e.rows + per - 1) / per; }
    bool in_gather(int64_t) const { return false; }
    void write(int64_t stage) const {
        std::memcpy(c.slot(c.rank), e.in.data + stage * per, std::min(per, e.rows - stage * per));
    }
    void read(int64_t stage) const {
        const int64_t at = stage * per;
        for (int p = 0; p < c.size; ++p)
            std::memcpy(e.out[0].data + p * e.rows + at, p == c.rank ? e.in.data + at : c.slot(p), std::min(per, e.rows - at));
    }
};

struct AllToAll {
    const Channel& c;
    const Exchange& e;
    int64_t per = c.slot_bytes / c.size / 64 * 64;

    int64_t stages() const { return (e.rows + per - 1) / per; }
    bool in_gather(int64_t) const { return false; }
    void write(int64_t stage) const {
        const int64_t at = stage * per;
        for (int p = 0; p < c.size; ++p)
            if (p != c.rank) std::memcpy(c.slot(c.rank) + p * per, e.in.data + p * e.rows + at, std::min(per, e.rows - at));
    }
    void read(int64_t stage) const {
        const int64_t at = stage * per;
        for (int p = 0; p < c.size; ++p)
            std::memcpy(e.out[0].data + p * e.rows + at, p == c.rank ? e.in.data + p * e.rows + at : c.slot(p) + c.rank * per,
                        std::min(per, e.rows - at));
    }
};

struct Broadcast {
    const Channel& c;
    const Exchange& e;
    int64_t per = c.slot_bytes;

    int64_t stages() const { return (e.rows + per - 1) / per; }
    bool in_gather(int64_t) const { return false; }
    void write(int64_t stage) const {
        if (c.rank == e.root) std::memcpy(c.slot(c.rank), e.in.data + stage * per, std::min(per, e.rows - stage * per));
    }
    void read(int64_t stage) const {
        const int64_t at = stage * per;
        std::memcpy(e.out[0].data + at, c.rank == e.root ? e.in.data + at : c.slot(e.root), std::min(per, e.rows - at));
    }
};

template <class Steps>
int32_t drive(Channel& c, Exchange& e) {
    const Steps steps{c, e};
    for (const int64_t stages = steps.stages(); e.stage < stages; ++e.stage) {
        Line& own = c.lines[c.rank];
        const int parity = (c.step + 1) & 1;
        if (!e.published) {
            steps.write(e.stage);
            own.signature[parity] = e.signature;
            __atomic_store_n(&own.sequence, c.step + 1, __ATOMIC_RELEASE);
            e.published = 1;
        }
        if (!wait_for_all(c, e.patient)) {
            e.patient = 1;
            return steps.in_gather(e.stage) ? PENDING_IN_GATHER : PENDING;
        }
        for (int p = 0; p < c.size; ++p)
            if (c.lines[p].signature[parity] != e.signature) return DIFFERENT;
        steps.read(e.stage);
        ++c.step;
        e.published = e.patient = 0;
    }
    e.stage = 0;
    return DONE;
}

}  // namespace tpr::shared

extern "C" {

using tpr::shared::Channel;
using tpr::shared::Exchange;

// Begins or continues `e`. After DIFFERENT (some rank is in another exchange) nothing may follow on this channel.
int32_t tpr_exchange(Channel* c, Exchange* e) {
    const tpr::Timed timed(tpr::EXCHANGE);
    using namespace tpr::shared;
    switch (e->form) {
        case ONE_SHOT: return drive<OneShot>(*c, *e);
        case TWO_SHOT: return drive<TwoShot>(*c, *e);
        case SCATTER:
        case SCATTER_GATHER: return drive<Scatter>(*c, *e);
        case GATHER: return drive<Gather>(*c, *e);
        case ALL_TO_ALL: return drive<AllToAll>(*c, *e);
        default: return drive<Broadcast>(*c, *e);
    }
}

// Bit p: rank p has not published the step that this rank is in.
uint64_t tpr_missing(const Channel* c) {
    uint64_t missing = 0;
    for (int p = 0; p < c->size; ++p) missing |= uint64_t(!tpr::shared::arrived(*c, p)) << p;
    return missing;
}

// Bit p: rank p has said that it will publish no more.
uint64_t tpr_left(const Channel* c) {
    uint64_t left = 0;
    for (int p = 0; p < c->size; ++p) left |= __atomic_load_n(&c->lines[p].left, __ATOMIC_ACQUIRE) << p;
    return left;
}

void tpr_leave(Channel* c) { __atomic_store_n(&c->lines[c->rank].left, uint64_t(1), __ATOMIC_RELEASE); }

int64_t tpr_scratch_floats(int64_t width) { return tpr::scratch_floats(width); }

// For a check against the Python side.
int64_t tpr_sizeof_channel() { return sizeof(Channel); }
int64_t tpr_sizeof_exchange() { return sizeof(Exchange); }

// What rank `peer` is doing in the present step.
uint64_t tpr_signature(const Channel* c, int32_t peer) { return c->lines[peer].signature[(c->step + 1) & 1]; }
}
