#include "native_time.h"

extern "C" {

int32_t tpr_native_works() { return tpr::WORKS; }
uint64_t tpr_native_ns(int32_t work) { return tpr::native_ns[work].load(std::memory_order_relaxed); }
// What another library has taken for such work, so that one place counts it.
void tpr_add_native_ns(int32_t work, uint64_t ns) { tpr::native_ns[work].fetch_add(ns, std::memory_order_relaxed); }
}
