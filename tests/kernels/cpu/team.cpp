// Pieces that are taken over: run by test_team.py. Ends with 0 where all is as it should be, else says what is not.
#include <atomic>
#include <cstdio>
#include <vector>

#include "team.h"

using quire::Hold;
using quire::Team;

namespace {

constexpr int UNITS = 5, WRITTEN_FIRST = 2;

// A thread that writes two units of a piece and is then away until another is through with all of it.
const char* relieved() {
    Team team(2);
    std::atomic<int> holders{0}, written[UNITS] = {}, by_first{0};
    std::atomic<bool> is_away{false}, is_over{false}, was_refused{false};
    team.run([&](int thread) {
        while (thread != 0 && !is_away) quire::relax();
        team.share_units(1, [&](int64_t, Hold& hold) {
            ++holders;
            for (int64_t unit = hold.next(); unit < UNITS; ++unit) {
                if (thread == 0 && unit == WRITTEN_FIRST) {
                    is_away = true;
                    while (!is_over) quire::relax();
                }
                if (!hold.write([&] { ++written[unit], by_first += thread == 0; })) {
                    was_refused = true;
                    return;
                }
            }
        });
        if (thread != 0) is_over = true;
    });
    for (const auto& times : written)
        if (times != 1) return "a unit was not written once";
    if (holders != 2 || by_first != WRITTEN_FIRST) return "the piece was not taken over where its holder left it";
    return was_refused ? nullptr : "who lost a piece went on writing";
}

// A piece that is written at once: who takes it over computes all of it.
const char* relieved_of_all() {
    Team team(2);
    std::atomic<int> written{0}, by_first{0};
    std::atomic<bool> is_away{false}, is_over{false}, was_refused{false};
    team.run([&](int thread) {
        while (thread != 0 && !is_away) quire::relax();
        team.share_units(1, [&](int64_t, Hold& hold) {
            for (int beat = 0; beat < UNITS; ++beat) {
                if (!hold.beat()) {
                    was_refused = true;
                    return;
                }
                if (thread == 0 && beat + 1 == WRITTEN_FIRST) {
                    is_away = true;
                    while (!is_over) quire::relax();
                }
            }
            hold.write_all([&] { ++written, by_first += thread == 0; });
        });
        if (thread != 0) is_over = true;
    });
    if (written != 1 || by_first != 0) return "a piece was not written once, by who took it over";
    return was_refused ? nullptr : "who lost a piece found it its own";
}

// Many more threads than processors, so that many lose theirs: whatever happens, a unit is written once, in its phase.
const char* crowded() {
    constexpr int PHASES = 3000, PIECES = 12;
    Team team(16);
    std::vector<std::atomic<int>> written(PIECES * UNITS);
    std::atomic<bool> is_wrong{false};
    team.run([&](int) {
        for (int phase = 0; phase < PHASES; ++phase)
            team.share_units(PIECES, [&](int64_t piece, Hold& hold) {
                for (int64_t unit = hold.next(); unit < UNITS; ++unit)
                    if (!hold.write([&] { is_wrong = written[piece * UNITS + unit]++ != phase || is_wrong; })) return;
            });
    });
    for (const auto& times : written)
        if (times != PHASES) return "a unit was left out";
    return is_wrong ? "a unit was written twice, or in another's phase" : nullptr;
}

// More units than can be counted: they are all written.
const char* endless() {
    constexpr int64_t MANY = 70000;
    Team team(2);
    std::vector<std::atomic<int>> written(MANY);
    team.run([&](int) {
        team.share_units(1, [&](int64_t, Hold& hold) {
            for (int64_t unit = hold.next(); unit < MANY; ++unit)
                if (!hold.write([&] { ++written[unit]; })) return;
        });
    });
    for (const auto& times : written)
        if (times != 1) return "one of many units was not written once";
    return nullptr;
}

}  // namespace

int main() {
    for (const auto test : {relieved, relieved_of_all, crowded, endless})
        if (const char* wrong = test()) return std::puts(wrong), 1;
}
