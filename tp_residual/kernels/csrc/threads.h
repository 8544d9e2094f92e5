// Threads for large calls: they are started once, and take pieces of work from a counter. Between calls they look for the next one for some
// ten microseconds, since in a decoder it comes that soon and waking takes longer than many a call; then they sleep.
//
// Not OpenMP: a second OpenMP runtime beside torch's would start its own pool, and a process forked after either was used hangs.
// Here a forked child finds that the pool belongs to its parent, and makes its own. The caller works, too, and takes every piece
// that no thread has begun: it waits for threads that work, never for one that has yet to wake.
#pragma once

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <system_error>
#include <thread>

namespace tpr {

class Pool {
  public:
    // work(begin, end) for pieces of 0 .. count, on up to `threads` threads, this one included.
    // A caller that finds the pool busy works alone.
    template <class F>
    static void run(int64_t count, int threads, F work) {
        Pool* pool = threads > 1 ? mine() : nullptr;
        std::unique_lock<std::mutex> only;
        if (pool) only = std::unique_lock<std::mutex>(pool->callers_, std::try_to_lock);
        if (!only.owns_lock()) return work(0, count);
        Job job{count, (count + 4 * threads - 1) / (4 * threads), [](const void* f, int64_t begin, int64_t end) {
                    (*static_cast<const F*>(f))(begin, end);
                }, &work, {0}};
        pool->share(job, threads - 1);
    }

  private:
    struct Job {
        int64_t count, piece;
        void (*call)(const void*, int64_t, int64_t);
        const void* work;
        std::atomic<int64_t> next;

        void drain() {
            for (int64_t begin; (begin = next.fetch_add(piece)) < count;) call(work, begin, begin + piece < count ? begin + piece : count);
        }
    };

    // This process's pool. It is never freed: its threads sleep until the process ends.
    static Pool* mine() {
        static std::atomic<Pool*> pool{nullptr};
        Pool* current = pool.load();
        if (current && current->process_ == getpid()) return current;
        Pool* fresh = new Pool;
        if (pool.compare_exchange_strong(current, fresh)) return fresh;
        delete fresh;
        return current;
    }

    void share(Job& job, int helpers) {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            try {
                for (; started_ < helpers; ++started_) std::thread([this] { help(); }).detach();
            } catch (const std::system_error&) {  // no more threads to be had: those that there are will do
            }
            job_ = &job;
            wanted_ = helpers;
            ++calls_;
        }
        wake_.notify_all();
        job.drain();
        {
            std::lock_guard<std::mutex> lock(mutex_);
            job_ = nullptr;  // nobody joins any more
        }
        look([this] { return working_ == 0; });
        std::unique_lock<std::mutex> lock(mutex_);
        done_.wait(lock, [this] { return working_ == 0; });
    }

    void help() {
        std::unique_lock<std::mutex> lock(mutex_);
        for (;;) {
            wake_.wait(lock, [this] { return job_ && wanted_ > 0; });
            Job* job = job_;
            --wanted_, ++working_;
            lock.unlock();
            job->drain();
            lock.lock();
            if (--working_ == 0) done_.notify_one();
            const uint64_t seen = calls_;
            lock.unlock();
            look([this, seen] { return calls_ != seen; });
            lock.lock();
        }
    }

    // Until it is so, or for LOOK: the lock is taken afterwards in any case, and what is so is looked up under it.
    template <class F>
    static void look(F is_so) {
        constexpr auto LOOK = std::chrono::microseconds(50);
        const auto end = std::chrono::steady_clock::now() + LOOK;
        while (!is_so() && std::chrono::steady_clock::now() < end) {
#if defined(__x86_64__) || defined(__i386__)
            for (int i = 0; i < 8; ++i) __builtin_ia32_pause();
#endif
        }
    }

    const pid_t process_ = getpid();
    std::mutex callers_, mutex_;
    std::condition_variable wake_, done_;
    Job* job_ = nullptr;
    int started_ = 0, wanted_ = 0;
    std::atomic<int> working_{0};
    std::atomic<uint64_t> calls_{0};
};

}  // namespace tpr
