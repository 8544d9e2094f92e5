// How long this process has been inside the compiled kernels, by what they do: kernels/native_time.py reads it.
#pragma once

#include <time.h>

#include <atomic>
#include <cstdint>

namespace tpr {

enum Work : int32_t { LINEAR, ATTENTION, ELEMENTWISE, EXCHANGE, WORKS };

inline std::atomic<uint64_t> native_ns[WORKS];

// Adds its own life time; two readings of the clock are some 50 ns.
class Timed {
  public:
    explicit Timed(Work work) : work_(work), began_(now()) {}
    ~Timed() { native_ns[work_].fetch_add(now() - began_, std::memory_order_relaxed); }
    Timed(const Timed&) = delete;
    static uint64_t now() {
        timespec t;
        clock_gettime(CLOCK_MONOTONIC, &t);
        return uint64_t(t.tv_sec) * 1000000000u + uint64_t(t.tv_nsec);
    }

  private:
    const Work work_;
    const uint64_t began_;
};

}  // namespace tpr
