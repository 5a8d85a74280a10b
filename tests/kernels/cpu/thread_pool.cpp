// Pieces that are taken over: run by test_thread_pool.py. Ends with 0 where all is as it should be, else says what is not.
#include <atomic>
#include <chrono>
#include <cstdio>
#include <thread>
#include <vector>

#include "thread_pool.h"

using quire::TaskClaim;
using quire::ThreadPool;

namespace {

constexpr int UNITS = 5, WRITTEN_FIRST = 2;

// A thread that writes two units of a piece and is then away until another is through with all of it.
const char* tile_taken_over() {
    ThreadPool pool(2);
    std::atomic<int> num_claims{0}, written[UNITS] = {}, by_first{0};
    std::atomic<bool> is_away{false}, is_over{false}, lost_claim{false};
    pool.run([&](int thread) {
        while (thread != 0 && !is_away) quire::cpu_pause();
        pool.parallel_for_tasks(1, [&](int64_t, TaskClaim& task_claim) {
            ++num_claims;
            for (int64_t unit = task_claim.next(); unit < UNITS; ++unit) {
                if (thread == 0 && unit == WRITTEN_FIRST) {
                    is_away = true;
                    while (!is_over) quire::cpu_pause();
                }
                if (!task_claim.write([&] { ++written[unit], by_first += thread == 0; })) {
                    lost_claim = true;
                    return;
                }
            }
        });
        if (thread != 0) is_over = true;
    });
    for (const auto& times : written)
        if (times != 1) return "a unit was not written once";
    if (num_claims != 2 || by_first != WRITTEN_FIRST) return "the piece was not taken over where its holder left it";
    return lost_claim ? nullptr : "who lost a piece went on writing";
}

// A piece that is written at once: who takes it over computes all of it.
const char* whole_task_taken_over() {
    ThreadPool pool(2);
    std::atomic<int> written{0}, by_first{0};
    std::atomic<bool> is_away{false}, is_over{false}, lost_claim{false};
    pool.run([&](int thread) {
        while (thread != 0 && !is_away) quire::cpu_pause();
        pool.parallel_for_tasks(1, [&](int64_t, TaskClaim& task_claim) {
            for (int heartbeat = 0; heartbeat < UNITS; ++heartbeat) {
                if (!task_claim.heartbeat()) {
                    lost_claim = true;
                    return;
                }
                if (thread == 0 && heartbeat + 1 == WRITTEN_FIRST) {
                    is_away = true;
                    while (!is_over) quire::cpu_pause();
                }
            }
            task_claim.write_all([&] { ++written, by_first += thread == 0; });
        });
        if (thread != 0) is_over = true;
    });
    if (written != 1 || by_first != 0) return "a piece was not written once, by who took it over";
    return lost_claim ? nullptr : "who lost a piece found it its own";
}

// Many more threads than processors, so that many lose theirs: whatever happens, a unit is written once, in its phase.
const char* oversubscribed() {
    constexpr int PHASES = 3000, TASKS = 12;
    ThreadPool pool(16);
    std::vector<std::atomic<int>> written(TASKS * UNITS);
    std::atomic<bool> is_wrong{false};
    pool.run([&](int) {
        for (int phase = 0; phase < PHASES; ++phase)
            pool.parallel_for_tasks(TASKS, [&](int64_t task, TaskClaim& task_claim) {
                for (int64_t unit = task_claim.next(); unit < UNITS; ++unit)
                    if (!task_claim.write([&] { is_wrong = written[task * UNITS + unit]++ != phase || is_wrong; })) return;
            });
    });
    for (const auto& times : written)
        if (times != PHASES) return "a unit was left out";
    return is_wrong ? "a unit was written twice, or in another's phase" : nullptr;
}

// An idle thread comes while a unit is written, again and again: nobody else writes meanwhile, and each unit is written once.
const char* requested_while_writing() {
    constexpr int ROUNDS = 100;
    ThreadPool pool(2);
    std::atomic<int> written[UNITS] = {}, num_writing{0};
    std::atomic<bool> is_wrong{false};
    pool.run([&](int) {
        for (int round = 0; round < ROUNDS; ++round)
            pool.parallel_for_tasks(1, [&](int64_t, TaskClaim& task_claim) {
                for (int64_t unit = task_claim.next(); unit < UNITS; ++unit) {
                    const bool is_owned = task_claim.write([&] {
                        if (num_writing++) is_wrong = true;
                        if (unit % 2) std::this_thread::sleep_for(std::chrono::microseconds(300));
                        ++written[unit];
                        --num_writing;
                    });
                    if (!is_owned) return;
                    if (unit == 2) std::this_thread::sleep_for(std::chrono::microseconds(10 * (round % 40)));
                }
            });
    });
    for (const auto& times : written)
        if (times != ROUNDS) return "a unit was not written once";
    return is_wrong ? "two threads wrote at once" : nullptr;
}

// Tiles of all kinds, on more threads than processors, which sleep now and then between two small units: tiles are taken over, also
// back by a thread that has lost them, while others end theirs and claim new ones.
const char* small_units_with_delays() {
    constexpr int PHASES = 1500, TASKS = 24, MANY = 64, BURST = 4;
    ThreadPool pool(8);
    std::vector<std::atomic<int>> written(TASKS * MANY);
    std::atomic<bool> is_wrong{false};
    std::atomic<int> num_claims{0};
    std::atomic<uint32_t> steps{0};
    const auto step = [&] {
        if ((steps.fetch_add(1, std::memory_order_relaxed) + 1) % 2048 == 0) std::this_thread::sleep_for(std::chrono::microseconds(400));
    };
    pool.run([&](int) {
        for (int phase = 0; phase < PHASES; ++phase)
            pool.parallel_for_tasks(TASKS, [&](int64_t task, TaskClaim& task_claim) {
                ++num_claims;
                const auto put = [&](int64_t first, int64_t count) {
                    for (int64_t unit = first; unit < first + count; ++unit) is_wrong = written[task * MANY + unit]++ != phase || is_wrong;
                };
                if (task % 3 == 0) {
                    for (int heartbeat = 0; heartbeat < MANY; ++heartbeat, step())
                        if (!task_claim.heartbeat()) return;
                    task_claim.write_all([&] { put(0, MANY); });
                    return;
                }
                const int64_t count = task % 3 == 1 ? 1 : BURST;
                task_claim.set_burst(count);
                for (int64_t unit = task_claim.next(); unit < MANY; unit += count, step())
                    if (!task_claim.write([&] { put(unit, count); }, count)) return;
            });
    });
    for (const auto& times : written)
        if (times != PHASES) return "a small unit was left out";
    if (num_claims == PHASES * TASKS) return "no tile was taken over";
    return is_wrong ? "a small unit was written twice, or in another's phase" : nullptr;
}

// More units than can be counted: they are all written.
const char* more_units_than_counted() {
    constexpr int64_t MANY = 70000;
    ThreadPool pool(2);
    std::vector<std::atomic<int>> written(MANY);
    pool.run([&](int) {
        pool.parallel_for_tasks(1, [&](int64_t, TaskClaim& task_claim) {
            for (int64_t unit = task_claim.next(); unit < MANY; ++unit)
                if (!task_claim.write([&] { ++written[unit]; })) return;
        });
    });
    for (const auto& times : written)
        if (times != 1) return "one of many units was not written once";
    return nullptr;
}

// Of many calls, ranges begin only where they may; and all calls are made once.
const char* ranges() {
    constexpr int64_t MANY = 1000;
    for (const int64_t count : {int64_t{0}, int64_t{1}, int64_t{7}, MANY})
        for (const int64_t step : {int64_t{1}, int64_t{3}, int64_t{40}, 2 * MANY}) {
            ThreadPool pool(3);
            std::vector<std::atomic<int>> calls(MANY);
            std::vector<int> by(MANY);
            pool.run([&](int thread) {
                pool.parallel_for_ranges(count, [&](int64_t i) { return i % step == 0; }, [&](int64_t i) { ++calls[i], by[i] = thread; });
            });
            for (int64_t i = 0; i < MANY; ++i) {
                if (calls[i] != (i < count)) return "a call in ranges was not made once";
                if (count == MANY && 0 < i && i % step && by[i] != by[i - 1]) return "a range began where it may not";
            }
        }
    return nullptr;
}

}  // namespace

int main() {
    for (const auto test : {tile_taken_over, whole_task_taken_over, oversubscribed, requested_while_writing, small_units_with_delays,
                            more_units_than_counted, ranges})
        if (const char* wrong = test()) return std::puts(wrong), 1;
}
