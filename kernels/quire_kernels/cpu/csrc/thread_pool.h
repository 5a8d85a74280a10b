// Threads that run one function together, in phases: the tiles of each phase are handed out to threads on demand.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

namespace quire {

inline void cpu_pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// A value in its own cache line.
template <class V>
struct alignas(64) PaddedAtomic {
    std::atomic<V> value{0};
};

// A thread's claim on a tile, which is done in units, in their order. Each unit is computed in private memory and then
// written. Between two writes another thread may take over the rest of the tile; the first thread's current result is then
// discarded. Others may overwrite its inputs by then, but no memory is freed before `run` ends.
class TaskClaim {
public:
    TaskClaim(const TaskClaim&) = delete;

    // The first unit that is not done.
    int64_t next() const { return static_cast<int64_t>(state_ >> UNIT_SHIFT & MAX_UNITS); }

    // Writes a unit, unless another thread took over: then this thread must leave the tile.
    template <class F>
    bool write(F&& unit) {
        if (!begin_writing()) return false;
        unit();
        advance();
        return true;
    }

    // As write, for a tile that is written as a whole, after any number of calls of `beat`.
    template <class F>
    void write_all(F&& task) {
        if (!begin_writing()) return;
        task();
        state_ |= WRITING;  // until the end: nothing is left to take over
    }

    // Shows that the thread makes progress. Returns whether the tile is still its own; a thread that takes over starts again.
    bool heartbeat() {
        if (!begin_writing()) return false;
        advance();
        return true;
    }

private:
    friend class ThreadPool;

    // phase (24 bits) · tile (22) · next unit (16) · is being written (1) · is claimed (1)
    static constexpr int UNIT_SHIFT = 2, TASK_SHIFT = 18, PHASE_SHIFT = 40;
    static constexpr uint64_t OWNED = 1, WRITING = 2, MAX_TASKS = (1 << 22) - 1;
    static constexpr int64_t MAX_UNITS = (1 << 16) - 1;

    static uint64_t of(uint32_t phase, int64_t task) {
        return static_cast<uint64_t>(phase) << PHASE_SHIFT | static_cast<uint64_t>(task) << TASK_SHIFT | OWNED;
    }
    static bool can_take_over(uint64_t seen, uint32_t phase) {
        return (seen & (OWNED | WRITING)) == OWNED && seen >> PHASE_SHIFT == of(phase, 0) >> PHASE_SHIFT;
    }

    // Of a new tile, or of the rest of one that another thread claims.
    TaskClaim(std::atomic<uint64_t>& slot, uint64_t value) : slot_(slot), state_(value) {
        slot_.store(state_, std::memory_order_release);
    }

    int64_t task() const { return static_cast<int64_t>(state_ >> TASK_SHIFT & MAX_TASKS); }
    bool end() { return change(0); }

    bool begin_writing() { return state_ & WRITING || change(state_ | WRITING); }
    void advance() {
        if (state_ & WRITING) return;
        state_ += 1ull << UNIT_SHIFT;
        // Beyond the largest number of units no thread can take over: the tile is written to its end.
        if (next() == MAX_UNITS) state_ |= WRITING;
        slot_.store(state_, std::memory_order_release);
    }
    bool change(uint64_t to) {
        uint64_t from = state_;
        return slot_.compare_exchange_strong(from, to, std::memory_order_acq_rel);
    }

    std::atomic<uint64_t>& slot_;
    uint64_t state_;  // the slot's content while the tile is this thread's and no unit is being written
};

// The calling thread is one of the pool. A phase is over when its tiles are done, by any thread: a descheduled or sleeping
// thread is not waited for unless it claims a tile that no other can take over. It skips finished phases when it is back.
class ThreadPool {
public:
    explicit ThreadPool(int size) : size_(size), slots_(size) {
        try {
            for (int i = 1; i < size; ++i) threads_.emplace_back([this, i] { worker_loop(i); });
        } catch (...) {
            end();
            throw;
        }
    }

    ~ThreadPool() { end(); }

    int size() const { return size_; }

    // Runs work(thread) on this thread and on the others as they wake, and returns when all have left it. Each must call
    // `share` and its variants the same number of times, with the same counts.
    void run(const std::function<void(int)>& work) {
        work_ = &work;
        first_phase_ = phase_.value.load(std::memory_order_relaxed);
        num_inside_.value.store(0, std::memory_order_release);
        notify(generation_);
        thread_state() = {first_phase_, 0};
        work(0);
        num_inside_.value.fetch_sub(CLOSED, std::memory_order_acq_rel);
        for (int i = 0; num_inside_.value.load(std::memory_order_acquire) != -CLOSED; ++i)
            i < SPINS ? cpu_pause() : std::this_thread::yield();
    }

    // To be called by all threads, within run: calls body(i) for each i below count, each on some thread, and returns
    // when all calls are done.
    template <class F>
    void parallel_for(int64_t count, F&& body) {
        if (count <= 0) return;
        const uint32_t phase = thread_state().phase++;
        for (int64_t i; (i = claim(phase, count)) >= 0;) {
            body(i);
            if (is_last(phase, count)) return;
        }
        wait_until_past(phase_, phase);
    }

    // As share, for fewer than four million tiles that are done in units: calls body(i, claim), which does those from
    // claim.next() on. A thread without a tile takes over that of a descheduled one.
    template <class F>
    void parallel_for_tasks(int64_t count, F&& body) {
        if (count <= 0) return;
        const ThreadState me = thread_state();
        ++thread_state().phase;
        auto take_over_timeout = INITIAL_TAKE_OVER_TIMEOUT;
        const auto work_on = [&](uint64_t value) {
            TaskClaim task_claim(slots_[me.thread].value, value);
            const auto began = Clock::now();
            const int64_t first = task_claim.next();
            body(task_claim.task(), task_claim);
            if (!task_claim.end()) return false;
            const auto unit = (Clock::now() - began) / std::max<int64_t>(1, task_claim.next() - first);
            take_over_timeout = std::max<Clock::duration>(take_over_timeout == INITIAL_TAKE_OVER_TIMEOUT ? TAKE_OVER_TIMEOUT : take_over_timeout, 2 * unit);
            return is_last(me.phase, count);
        };
        for (int64_t i; (i = claim(me.phase, count)) >= 0;)
            if (work_on(TaskClaim::of(me.phase, i))) return;
        for (int num_scans = 0; num_scans < SPINS && !is_over(me.phase); ++num_scans) {
            for (int other = 0; other < size_; ++other) {
                uint64_t seen = slots_[other].value.load(std::memory_order_acquire);
                if (other == me.thread || !TaskClaim::can_take_over(seen, me.phase)) continue;
                // A running thread would make progress soon.
                const auto until = Clock::now() + take_over_timeout;
                while (slots_[other].value.load(std::memory_order_acquire) == seen && Clock::now() < until) cpu_pause();
                if (!slots_[other].value.compare_exchange_strong(seen, 0, std::memory_order_acq_rel)) continue;
                if (work_on(seen)) return;
                num_scans = 0;
            }
            cpu_pause();
        }
        wait_until_past(phase_, me.phase);
    }

    // As parallel_for, for calls too small to be handed out one by one, or whose neighbours write to the same cache lines.
    template <class F>
    void parallel_for_ranges(int64_t count, F&& body) {
        parallel_for_ranges(count, [](int64_t) { return true; }, body);
    }

    // The same, in ranges that begin with the first call or one for which can_begin(i).
    template <class B, class F>
    void parallel_for_ranges(int64_t count, B&& can_begin, F&& body) {
        const int64_t length = std::clamp<int64_t>(count / (RANGES_PER_THREAD * size_), 1, MAX_RANGE_LENGTH);
        const auto begin = [&](int64_t i) {
            while (0 < i && i < count && !can_begin(i)) ++i;
            return std::min(i, count);
        };
        parallel_for((count + length - 1) / length, [&](int64_t range) {
            for (int64_t i = begin(range * length), end = begin((range + 1) * length); i < end; ++i) body(i);
        });
    }

private:
    static constexpr int64_t RANGES_PER_THREAD = 4, MAX_RANGE_LENGTH = 16;
    // Tens of microseconds, by the duration of a pause instruction.
    static constexpr int SPINS = 2000;
    using Clock = std::chrono::steady_clock;
    // The least time without progress before a tile is taken over, and the time where a unit's duration is unknown.
    static constexpr Clock::duration TAKE_OVER_TIMEOUT = std::chrono::microseconds{10};
    static constexpr Clock::duration INITIAL_TAKE_OVER_TIMEOUT = std::chrono::microseconds{200};
    static constexpr int64_t CLOSED = 1 << 20;
    static constexpr uint64_t TASK_MASK = 0xffffffff;

    // The phase that a thread is in, which may be behind the pool's, and its place in the pool.
    struct ThreadState {
        uint32_t phase;
        int thread;
    };
    static ThreadState& thread_state() {
        static thread_local ThreadState thread_state;
        return thread_state;
    }

    // The next tile of a phase, or -1.
    int64_t claim(uint32_t phase, int64_t count) {
        uint64_t claim = claim_.value.load(std::memory_order_acquire);
        while (static_cast<uint32_t>(claim >> 32) == phase && static_cast<int64_t>(claim & TASK_MASK) < count)
            if (claim_.value.compare_exchange_weak(claim, claim + 1, std::memory_order_acq_rel))
                return static_cast<int64_t>(claim & TASK_MASK);
        return -1;
    }

    // Counts a tile that is done. Returns whether it was the last one, which ends the phase.
    bool is_last(uint32_t phase, int64_t count) {
        if (done_.value.fetch_add(1, std::memory_order_acq_rel) != count - 1) return false;
        done_.value.store(0, std::memory_order_relaxed);
        claim_.value.store(static_cast<uint64_t>(phase + 1) << 32, std::memory_order_release);
        notify(phase_);
        return true;
    }

    bool is_over(uint32_t phase) const { return phase_.value.load(std::memory_order_acquire) != phase; }

    void end() {
        is_stopping_ = true;
        notify(generation_);
        for (auto& thread : threads_) thread.join();
    }

    void worker_loop(int thread) {
        for (uint32_t seen = 0; !is_stopping_; ++seen) {
            wait_until_past(generation_, seen);
            seen = generation_.value.load(std::memory_order_acquire) - 1;
            int64_t inside = num_inside_.value.load(std::memory_order_acquire);
            while (inside >= 0 && !num_inside_.value.compare_exchange_weak(inside, inside + 1, std::memory_order_acq_rel)) {}
            if (inside < 0) continue;  // it is over already
            thread_state() = {first_phase_, thread};
            (*work_)(thread);
            num_inside_.value.fetch_sub(1, std::memory_order_acq_rel);
        }
    }

    static void notify(PaddedAtomic<uint32_t>& counter) {
        counter.value.fetch_add(1, std::memory_order_acq_rel);
        counter.value.notify_all();
    }

    // Spins for a short time, then sleeps.
    static void wait_until_past(PaddedAtomic<uint32_t>& counter, uint32_t seen) {
        for (int i = 0; i < SPINS && counter.value.load(std::memory_order_acquire) == seen; ++i) cpu_pause();
        counter.value.wait(seen, std::memory_order_acquire);
    }

    const int size_;
    std::atomic<bool> is_stopping_{false};
    const std::function<void(int)>* work_ = nullptr;
    uint32_t first_phase_ = 0;
    PaddedAtomic<uint32_t> generation_;
    PaddedAtomic<int64_t> num_inside_{-CLOSED};
    // The open phase; the same in the upper half with the next tile in the lower; and the number of finished tiles.
    PaddedAtomic<uint32_t> phase_;
    PaddedAtomic<uint64_t> claim_;
    PaddedAtomic<int64_t> done_;
    // The tile that each thread claims.
    std::vector<PaddedAtomic<uint64_t>> slots_;
    std::vector<std::thread> threads_;
};

}  // namespace quire
