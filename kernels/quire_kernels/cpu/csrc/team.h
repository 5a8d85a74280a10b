// Threads that run one function together, in phases: the work of each is handed out in pieces, as threads come for it.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

namespace quire {

inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// The calling thread is one of the team. Between calls the others spin a little and then sleep, so that steps that
// follow each other start at once, and a worker without work leaves its processors alone.
class Team {
public:
    explicit Team(int size) : size_(size) {
        for (int i = 1; i < size; ++i) threads_.emplace_back([this, i] { serve(i); });
    }

    ~Team() {
        work_ = nullptr;
        start();
        for (auto& thread : threads_) thread.join();
    }

    int size() const { return size_; }

    // Runs work(thread) on every thread, and returns when all are done.
    void run(const std::function<void(int)>& work) {
        work_ = &work;
        start();
        work(0);
        wait_for_all();
    }

    // To be called by all threads, within run: calls body(i) for each i below count, on some thread, and returns when
    // all calls are done.
    template <class F>
    void share(int64_t count, F&& body) {
        for (int64_t i; (i = next_.value.fetch_add(1, std::memory_order_relaxed)) < count;) body(i);
        wait_for_all();
    }

private:
    // About 50 microseconds.
    static constexpr int SPINS = 2000;

    struct alignas(64) Counter {
        std::atomic<int64_t> value{0};
    };

    void start() {
        rounds_.value.fetch_add(1, std::memory_order_release);
        rounds_.value.notify_all();
    }

    void serve(int thread) {
        for (int64_t seen = 0;; ++seen) {
            wait_beyond(rounds_, seen);
            if (!work_) return;
            (*work_)(thread);
            wait_for_all();
        }
    }

    // A barrier. The last to come clears what the phase counted.
    void wait_for_all() {
        const int64_t phase = phases_.value.load(std::memory_order_acquire);
        if (arrived_.value.fetch_add(1, std::memory_order_acq_rel) != size_ - 1) return wait_beyond(phases_, phase);
        arrived_.value.store(0, std::memory_order_relaxed);
        next_.value.store(0, std::memory_order_relaxed);
        phases_.value.store(phase + 1, std::memory_order_release);
        phases_.value.notify_all();
    }

    // A thread that is late lost its processor, perhaps to the one that waits: so that one sleeps in the end.
    static void wait_beyond(Counter& counter, int64_t seen) {
        for (int i = 0; i < SPINS && counter.value.load(std::memory_order_acquire) == seen; ++i) relax();
        counter.value.wait(seen, std::memory_order_acquire);
    }

    const int size_;
    const std::function<void(int)>* work_ = nullptr;
    Counter rounds_, phases_, arrived_, next_;
    std::vector<std::thread> threads_;
};

}  // namespace quire
