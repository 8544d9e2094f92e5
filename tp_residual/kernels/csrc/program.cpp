// A recorded pass: the calls of compiled kernels that one pass made, made again in the same order on the same memory, without Python in
// between. See kernels/recording.py. The other files' functions are declared here, since each is a file of its own.
#include <cstdint>

#include "native_time.h"

namespace tpr {
struct LinearCall;
struct RopeCall;
struct SiluCall;
struct AppendCall;
struct AttendCall;
struct AddNormCall;
namespace shared {
struct Channel;
struct Exchange;
}

struct Op {  // kernels/recording.py's
    int32_t kind, in_boundary;
    void *call, *channel;
};

// How far it is: kernels/recording.py's Progress.
struct Progress {
    int64_t next;         // the operation to begin with; afterwards the one that has not ended, or their number
    int32_t status;       // of an exchange that waits for a peer
    uint64_t boundary_ns;  // added to
};
}  // namespace tpr

extern "C" {
void tpr_linear(const tpr::LinearCall*);
void tpr_rope(const tpr::RopeCall*);
void tpr_silu(const tpr::SiluCall*);
void tpr_append(const tpr::AppendCall*);
void tpr_attend(const tpr::AttendCall*);
int32_t tpr_add_norm(const tpr::AddNormCall*);
int32_t tpr_exchange(tpr::shared::Channel*, tpr::shared::Exchange*);

// Until the end, or until an exchange comes back without one: Python then waits for it, looks after the peers, and calls again.
void tpr_run_program(const tpr::Op* ops, int64_t count, tpr::Progress* progress) {
    progress->status = 0;
    for (; progress->next < count; ++progress->next) {
        const tpr::Op& op = ops[progress->next];
        const uint64_t began = op.in_boundary ? tpr::Timed::now() : 0;
        switch (op.kind) {
            case 0: tpr_linear(static_cast<tpr::LinearCall*>(op.call)); break;
            case 1: tpr_rope(static_cast<tpr::RopeCall*>(op.call)); break;
            case 2: tpr_silu(static_cast<tpr::SiluCall*>(op.call)); break;
            case 3: tpr_append(static_cast<tpr::AppendCall*>(op.call)); break;
            case 4: tpr_attend(static_cast<tpr::AttendCall*>(op.call)); break;
            case 5: tpr_add_norm(static_cast<tpr::AddNormCall*>(op.call)); break;
            default:
                progress->status = tpr_exchange(static_cast<tpr::shared::Channel*>(op.channel), static_cast<tpr::shared::Exchange*>(op.call));
        }
        if (op.in_boundary) progress->boundary_ns += tpr::Timed::now() - began;
        if (progress->status) return;
    }
}
}
