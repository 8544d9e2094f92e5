// Memory that a thread keeps between calls.
#pragma once

#include <cstdint>
#include <cstdlib>

namespace tpr {

// 64-byte aligned floats; their contents do not survive a call that asks for more.
class Scratch {
  public:
    ~Scratch() { std::free(floats_); }
    float* at_least(int64_t count) {
        if (count > count_) {
            std::free(floats_);
            floats_ = static_cast<float*>(std::aligned_alloc(64, (size_t(count) * sizeof(float) + 63) / 64 * 64));
            if (!floats_) std::abort();
            count_ = count;
        }
        return floats_;
    }

  private:
    float* floats_ = nullptr;
    int64_t count_ = 0;
};

}  // namespace tpr
