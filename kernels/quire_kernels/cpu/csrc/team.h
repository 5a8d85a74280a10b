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

// The calling thread is one of the team. A phase is over when its pieces are done, whoever did them: a thread that lost
// its processor, or that sleeps, is not waited for unless it holds a piece. When it is back it passes by what is over.
class Team {
public:
    explicit Team(int size) : size_(size) {
        try {
            for (int i = 1; i < size; ++i) threads_.emplace_back([this, i] { serve(i); });
        } catch (...) {
            end();
            throw;
        }
    }

    ~Team() { end(); }

    int size() const { return size_; }

    // Runs work(thread) on this thread, and on the others as they come, and returns when none is in it any more. Each
    // must call `share` the same number of times, for the same counts.
    void run(const std::function<void(int)>& work) {
        work_ = &work;
        first_phase_ = phase_.value.load(std::memory_order_relaxed);
        inside_.value.store(0, std::memory_order_release);
        wake(rounds_);
        own_phase() = first_phase_;
        work(0);
        inside_.value.fetch_sub(CLOSED, std::memory_order_acq_rel);
        for (int i = 0; inside_.value.load(std::memory_order_acquire) != -CLOSED; ++i)
            i < SPINS ? relax() : std::this_thread::yield();
    }

    // To be called by all threads, within run: calls body(i) for each i below count, each on some thread, and returns
    // when all calls are done.
    template <class F>
    void share(int64_t count, F&& body) {
        if (count <= 0) return;
        const uint32_t phase = own_phase()++;
        uint64_t claim = claim_.value.load(std::memory_order_acquire);
        while (static_cast<uint32_t>(claim >> 32) == phase && static_cast<int64_t>(claim & PIECE) < count) {
            if (!claim_.value.compare_exchange_weak(claim, claim + 1, std::memory_order_acq_rel)) continue;
            body(static_cast<int64_t>(claim & PIECE));
            if (done_.value.fetch_add(1, std::memory_order_acq_rel) == count - 1) {
                done_.value.store(0, std::memory_order_relaxed);
                claim_.value.store(static_cast<uint64_t>(phase + 1) << 32, std::memory_order_release);
                wake(phase_);
                return;
            }
            claim = claim_.value.load(std::memory_order_acquire);
        }
        wait_beyond(phase_, phase);
    }

private:
    // Tens of microseconds, by how long a processor pauses.
    static constexpr int SPINS = 2000;
    static constexpr int64_t CLOSED = 1 << 20;
    static constexpr uint64_t PIECE = 0xffffffff;

    template <class V>
    struct alignas(64) Shared {
        std::atomic<V> value{0};
    };

    // The phase that a thread is in. It may be behind the team's.
    static uint32_t& own_phase() {
        static thread_local uint32_t phase;
        return phase;
    }

    void end() {
        ends_ = true;
        wake(rounds_);
        for (auto& thread : threads_) thread.join();
    }

    void serve(int thread) {
        for (uint32_t seen = 0; !ends_; ++seen) {
            wait_beyond(rounds_, seen);
            seen = rounds_.value.load(std::memory_order_acquire) - 1;
            int64_t inside = inside_.value.load(std::memory_order_acquire);
            while (inside >= 0 && !inside_.value.compare_exchange_weak(inside, inside + 1, std::memory_order_acq_rel)) {}
            if (inside < 0) continue;  // it is over already
            own_phase() = first_phase_;
            (*work_)(thread);
            inside_.value.fetch_sub(1, std::memory_order_acq_rel);
        }
    }

    static void wake(Shared<uint32_t>& counter) {
        counter.value.fetch_add(1, std::memory_order_acq_rel);
        counter.value.notify_all();
    }

    // Spins a little, for what comes at once, and then sleeps.
    static void wait_beyond(Shared<uint32_t>& counter, uint32_t seen) {
        for (int i = 0; i < SPINS && counter.value.load(std::memory_order_acquire) == seen; ++i) relax();
        counter.value.wait(seen, std::memory_order_acquire);
    }

    const int size_;
    std::atomic<bool> ends_{false};
    const std::function<void(int)>* work_ = nullptr;
    uint32_t first_phase_ = 0;
    Shared<uint32_t> rounds_;
    Shared<int64_t> inside_{-CLOSED};
    // The phase that is open; in its upper half the same, and in its lower the next piece of it; and how many are done.
    Shared<uint32_t> phase_;
    Shared<uint64_t> claim_;
    Shared<int64_t> done_;
    std::vector<std::thread> threads_;
};

}  // namespace quire
