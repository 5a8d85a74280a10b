// Threads that run one function together, in phases: the tiles of each phase are handed out to threads on demand.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

#if defined(__linux__)
#include <linux/membarrier.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

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

// An asymmetric fence: of two threads that each write and then read, one with light() and one with heavy() between, at least one
// reads what the other wrote. light() then costs nothing: heavy() makes the system issue a fence on all threads of the process
// (membarrier). Where it does not do that, both are fences.
class AsymmetricFence {
#if defined(__linux__) && !defined(QUIRE_NO_MEMBARRIER)
    static bool membarrier(int command) { return syscall(SYS_membarrier, command, 0, 0) == 0; }
    static bool fence_all() { return membarrier(MEMBARRIER_CMD_PRIVATE_EXPEDITED); }
    static bool register_process() { return membarrier(MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED) && fence_all(); }
#else
    static bool fence_all() { return false; }
    static bool register_process() { return false; }
#endif

public:
    // Decided as the library is loaded, so that it is the same for all threads.
    inline static const bool LIGHT_IS_FREE = register_process();

    static void light() {
        if (LIGHT_IS_FREE) std::atomic_signal_fence(std::memory_order_seq_cst);
        else std::atomic_thread_fence(std::memory_order_seq_cst);
    }
    // Returns false where the system cannot do it now: then nothing is known of the other thread.
    static bool heavy() {
        std::atomic_thread_fence(std::memory_order_seq_cst);
        return !LIGHT_IS_FREE || fence_all();
    }
};

// A thread's claim on a tile, which is done in units, in their order. Each unit is computed in private memory and then
// written. Between two writes another thread may take over the rest of the tile; the first thread's current result is then
// discarded. Others may overwrite its inputs by then, but no memory is freed before `run` ends.
//
// Units may be small, so a write has no locked instruction. A thread's board has the state of its claim, which it alone writes, and
// the claim's number:
// - The owner stores that it writes, and then loads the number. Another thread changes the number, as a request, and then loads the
//   state. An asymmetric fence stands between the two in both threads: so the owner finds the request before it writes, or the other
//   thread finds the state of that write or a later one.
// - The other thread withdraws its request where the owner is writing. Else it turns the request into a take-over, from the state that
//   it has loaded. An owner that finds a request rejects it, and only then writes. Both exchange the same value, so one of them
//   fails, and the loaded state was the last one.
// - A third thread leaves a claim alone that has a request or is taken over.
// - Each claim on a board, and each rejection, has a new number, in 64 bits. So an exchange by a thread that has seen an earlier claim
//   fails, even where that was of the same tile.
// - A state is cleared before the next claim's number is stored, and set after it. So a state that is loaded after a number is of that
//   claim or of a later one; and if the number can still be exchanged, of that claim.
class TaskClaim {
public:
    TaskClaim(const TaskClaim&) = delete;

    // The first unit that is not done.
    int64_t next() const { return static_cast<int64_t>(state_ >> UNIT_SHIFT & MAX_UNITS); }

    // Shows that units are written so many at a time, each soon after the one before: a longer time passes before the first.
    void set_burst(int64_t units) { burst_ = units; }

    // Writes one unit or more, unless another thread took over: then this thread must leave the tile.
    template <class F>
    [[gnu::always_inline]] bool write(F&& units, int64_t count = 1) {
        if (!begin_writing()) return false;
        units();
        advance(count);
        return true;
    }

    // As write, for a tile that is written as a whole, after any number of calls of `heartbeat`.
    template <class F>
    void write_all(F&& task) {
        if (!begin_writing()) return;
        task();
        state_ |= WRITING;  // until the end: nothing is left to take over
    }

    // Shows that the thread makes progress. Returns whether the tile is still its own; a thread that takes over starts again.
    bool heartbeat() {
        if (!begin_writing()) return false;
        advance(1);
        return true;
    }

private:
    friend class ThreadPool;

    // Where a thread shows its claim.
    struct alignas(64) Board {
        std::atomic<uint64_t> state{0};   // 0: no claim
        std::atomic<uint64_t> number{0};  // a multiple of NEXT; plus REQUESTED or TAKEN
    };

    // phase (24 bits) · tile (22) · next unit (16) · is being written (1) · is claimed (1)
    static constexpr int UNIT_SHIFT = 2, TASK_SHIFT = 18, PHASE_SHIFT = 40;
    static constexpr uint64_t OWNED = 1, WRITING = 2, MAX_TASKS = (1 << 22) - 1;
    static constexpr int64_t MAX_UNITS = (1 << 16) - 1;  // more are written, but not taken over
    static constexpr uint64_t REQUESTED = 1, TAKEN = 2, NEXT = 4;

    static uint64_t of(uint32_t phase, int64_t task) {
        return static_cast<uint64_t>(phase) << PHASE_SHIFT | static_cast<uint64_t>(task) << TASK_SHIFT | OWNED;
    }
    static bool can_take_over(uint64_t seen) { return (seen & (OWNED | WRITING)) == OWNED; }
    static bool can_take_over(uint64_t seen, uint32_t phase) {
        return can_take_over(seen) && seen >> PHASE_SHIFT == of(phase, 0) >> PHASE_SHIFT;
    }

    // Takes over the claim of that number, which had no request. Returns the state to go on from, or 0: the claim is another's, or its owner writes.
    static uint64_t take_over(Board& board, uint64_t number) {
        if (!exchange(board, number, number | REQUESTED)) return 0;
        const bool is_ordered = AsymmetricFence::heavy();
        const uint64_t state = board.state.load(std::memory_order_acquire);
        const bool takes = is_ordered && can_take_over(state);
        return exchange(board, number | REQUESTED, takes ? number | TAKEN : number) && takes ? state : 0;
    }
    static bool exchange(Board& board, uint64_t from, uint64_t to) {
        return board.number.compare_exchange_strong(from, to, std::memory_order_acq_rel);
    }

    // Of a new tile, or of the rest of one that another thread claimed.
    TaskClaim(Board& board, uint64_t state)
        : board_(board), state_(state), number_((board.number.load(std::memory_order_relaxed) | (NEXT - 1)) + 1) {
        board_.number.store(number_, std::memory_order_release);
        board_.state.store(state_, std::memory_order_release);
    }

    int64_t task() const { return static_cast<int64_t>(state_ >> TASK_SHIFT & MAX_TASKS); }

    // Returns whether the tile was this thread's up to here.
    bool end() {
        if (!begin_writing()) return false;
        board_.state.store(0, std::memory_order_release);
        return true;
    }

    [[gnu::always_inline]] bool begin_writing() {
        if (state_ & WRITING) return true;
        board_.state.store(state_ | WRITING, std::memory_order_relaxed);
        AsymmetricFence::light();
        return board_.number.load(std::memory_order_acquire) == number_ || reject_request();
    }

    // Returns false where it is too late.
    [[gnu::noinline]] bool reject_request() {
        uint64_t seen = number_ | REQUESTED;
        if (board_.number.compare_exchange_strong(seen, number_ + NEXT, std::memory_order_acq_rel)) {
            number_ += NEXT;
        } else if (seen != number_) {
            board_.state.store(0, std::memory_order_release);
            return false;
        }
        return true;
    }

    void advance(int64_t units) {
        if (state_ & WRITING) return;
        // Beyond the largest number of units no thread can take over: the tile is written to its end.
        if (next() + units >= MAX_UNITS) state_ |= WRITING;
        else state_ += static_cast<uint64_t>(units) << UNIT_SHIFT;
        board_.state.store(state_, std::memory_order_release);
    }

    Board& board_;
    uint64_t state_;  // the board's while the tile is this thread's and no unit is being written
    uint64_t number_;
    int64_t burst_ = 1;
};

// The calling thread is one of the pool. A phase is over when its tiles are done, by any thread: a descheduled or sleeping
// thread is not waited for unless it claims a tile that no other can take over. It skips finished phases when it is back.
class ThreadPool {
public:
    explicit ThreadPool(int size) : size_(size), boards_(size) {
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
    // `parallel_for` and its variants the same number of times, with the same counts.
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

    // As parallel_for, for fewer than four million tiles that are done in units: calls body(i, claim), which does those from
    // claim.next() on. A thread without a tile takes over that of a descheduled one.
    template <class F>
    void parallel_for_tasks(int64_t count, F&& body) {
        if (count <= 0) return;
        const ThreadState me = thread_state();
        ++thread_state().phase;
        auto take_over_timeout = INITIAL_TAKE_OVER_TIMEOUT;
        const auto work_on = [&](uint64_t value) {
            TaskClaim task_claim(boards_[me.thread], value);
            const auto began = Clock::now();
            const int64_t first = task_claim.next();
            body(task_claim.task(), task_claim);
            if (!task_claim.end()) return false;
            // The time between writes, at most: of a burst of units.
            const auto unit = (Clock::now() - began) / std::max<int64_t>(1, (task_claim.next() - first) / task_claim.burst_);
            take_over_timeout = std::max<Clock::duration>(take_over_timeout == INITIAL_TAKE_OVER_TIMEOUT ? TAKE_OVER_TIMEOUT : take_over_timeout, 2 * unit);
            return is_last(me.phase, count);
        };
        for (int64_t i; (i = claim(me.phase, count)) >= 0;)
            if (work_on(TaskClaim::of(me.phase, i))) return;
        if (!is_over(me.phase)) std::this_thread::yield();  // see wait_until_past()
        for (int num_scans = 0; num_scans < SPINS && !is_over(me.phase); ++num_scans) {
            for (int other = 0; other < size_; ++other) {
                TaskClaim::Board& board = boards_[other];
                const uint64_t number = board.number.load(std::memory_order_acquire), seen = board.state.load(std::memory_order_acquire);
                // The board of a claim that is taken over stays as it is until its owner is back.
                if (other == me.thread || number % TaskClaim::NEXT || !TaskClaim::can_take_over(seen, me.phase)) continue;
                // A running thread would make progress soon.
                const auto until = Clock::now() + take_over_timeout;
                while (board.state.load(std::memory_order_acquire) == seen && !is_over(me.phase) && Clock::now() < until) cpu_pause();
                if (board.state.load(std::memory_order_acquire) != seen) continue;
                const uint64_t rest = TaskClaim::take_over(board, number);
                if (!rest) continue;
                if (work_on(rest)) return;
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

    // The same, in ranges that begin with the first call or one for which can_begin(i), if there are enough calls for all threads.
    template <class B, class F>
    void parallel_for_ranges(int64_t count, B&& can_begin, F&& body) {
        const int64_t length = std::clamp<int64_t>(count / (RANGES_PER_THREAD * size_), 1, MAX_RANGE_LENGTH);
        const bool has_enough = count >= 2 * MAX_RANGE_LENGTH * size_;
        const auto begin = [&](int64_t i) {
            while (has_enough && 0 < i && i < count && !can_begin(i)) ++i;
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

    // Spins for a short time, then sleeps. It yields before: threads of the services are ready to run where a step's results are on
    // their way to clients, and the system would let most of them wait for its next tick, up to 4 ms.
    static void wait_until_past(PaddedAtomic<uint32_t>& counter, uint32_t seen) {
        if (counter.value.load(std::memory_order_acquire) == seen) std::this_thread::yield();
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
    std::vector<TaskClaim::Board> boards_;
    std::vector<std::thread> threads_;
};

}  // namespace quire
