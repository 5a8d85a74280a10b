// Products by AMX that another thread goes on with: run by test_thread_pool.py. Ends with 0 where all is as it should be, else says
// what is not.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include "amx.h"

using namespace quire;

namespace {

constexpr int64_t OUTPUTS = 3 * PANEL, UNIT_ROWS = 2;
using Results = std::vector<float>;  // [rows, OUTPUTS]

// The results of a product from a unit on, -1 where nothing is written. `wrong` is set where a result is written twice.
template <int PARTS>
Results multiply_from(ThreadPool& pool, const Matrix& matrix, const Piece& piece, int64_t unit, const FactorRows<const BFloat16>& rows,
                      bool& wrong) {
    Results results(piece.last_row * OUTPUTS, -1.0f);
    std::vector<BFloat16> scratch(AmxFactors<PARTS>::scratch_size(matrix.inputs));
    pool.run([&](int) {
        const AmxRegisters registers;
        pool.parallel_for_tasks(1, [&](int64_t, TaskClaim& claim) {
            AmxFactors<PARTS>::multiply_piece(matrix, piece, unit, rows, scratch.data(), claim,
                                              [&](int64_t row, int64_t panel, Floats left, Floats right) {
                float* to = &results[row * OUTPUTS + panel * PANEL];
                wrong = wrong || *to != -1.0f;
                store(to, left);
                store(to + LANES, right);
            });
        });
    });
    return results;
}

// Whether every part of a product has the bits of the whole, and is what the units from `unit` on are.
template <int PARTS>
const char* parts_of_a_product(int64_t inputs, int64_t num_rows, Format format) {
    std::mt19937 random(1);
    std::uniform_real_distribution<float> numbers(0.5f, 1.0f);
    const int64_t stride = AmxFactors<PARTS>::stride(inputs / PARTS), num_tiles = ceil_div(num_rows, int64_t{32});
    std::vector<BFloat16> numbers_of_rows(round_up(num_rows, 32) * stride), panels(OUTPUTS * inputs + PANEL);
    const auto fill = [&](std::vector<BFloat16>& to) {
        for (size_t i = 0; i + LANES <= to.size(); i += LANES) store_floats(to.data() + i, splat(numbers(random)));
    };
    fill(numbers_of_rows);
    const FactorRows<const BFloat16> rows{numbers_of_rows.data(), stride};
    std::vector<int8_t> codes(OUTPUTS * inputs);
    for (int8_t& code : codes) code = static_cast<int8_t>(1 + random() % 100);
    fill(panels);
    std::vector<float> scales(OUTPUTS, 0.01f);
    Matrix matrix{};
    matrix.outputs = OUTPUTS;
    matrix.inputs = inputs;
    matrix.format = format;
    matrix.panels = format == Format::INT8 ? static_cast<const void*>(codes.data()) : panels.data();
    if (format == Format::INT8) matrix.scales = scales.data();
    const Piece piece{0, 3, 0, num_rows, 32};
    const int64_t units = AmxFactors<PARTS>::num_units(matrix, piece), of_tile = 32 / UNIT_ROWS;
    if (units != 3 * num_tiles * of_tile) return "a unit is not two rows of a tile and a panel";
    ThreadPool pool(1);
    bool wrong = false;
    const Results whole = multiply_from<PARTS>(pool, matrix, piece, 0, rows, wrong);
    for (const float x : whole)
        if (!(x > 0.0f)) return "a result was not written";
    std::vector<BFloat16> numbers_in_tiles(numbers_of_rows.size());
    const FactorRows<BFloat16> in_tiles{numbers_in_tiles.data(), stride, true};
    for (int64_t row = 0; row < num_rows; ++row)
        for (int64_t column = 0; column < inputs / PARTS; column += LANES)
            std::copy_n(rows.at(row, column), LANES, in_tiles.at(row, column));
    for (int64_t unit = 0; unit <= units; unit += unit % 7 == 3 ? 5 : 1) {
        const Results part = multiply_from<PARTS>(pool, matrix, piece, unit, rows, wrong);
        if constexpr (AmxFactors<PARTS>::TAKES_TILES)
            if (multiply_from<PARTS>(pool, matrix, piece, unit, {in_tiles.data, stride, true}, wrong) != part)
                return "rows in tiles have other results";
        for (int64_t row = 0; row < num_rows; ++row)
            for (int64_t output = 0; output < OUTPUTS; ++output) {
                const int64_t of_row = (output / PANEL * num_tiles + row / 32) * of_tile + row % 32 / UNIT_ROWS;
                const float found = part[row * OUTPUTS + output], expected = of_row < unit ? -1.0f : whole[row * OUTPUTS + output];
                if (std::memcmp(&found, &expected, sizeof(float))) return "a part of a product is not that of the whole";
            }
    }
    return wrong ? "a result was written twice" : nullptr;
}

}  // namespace

int main() {
    if (!may_use_amx()) return std::puts("the system refuses AMX"), 1;
    for (const Format format : {Format::PLAIN, Format::INT8})
        for (const int64_t inputs : {64, 1344, 4096})  // the last in parts
            for (const int64_t rows : {1, 31, 33, 77, 290}) {
                if (inputs == 4096 && rows == 290) continue;  // slow
                if (const char* wrong = parts_of_a_product<1>(inputs, rows, format)) return std::puts(wrong), 1;
            }
    for (const int64_t rows : {1, 40, 300})
        if (const char* wrong = parts_of_a_product<2>(1344, rows, Format::PLAIN)) return std::puts(wrong), 1;
}
